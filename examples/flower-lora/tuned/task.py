"""The model with its adapters, what they are trained on, and how: shared by clients, server and auditor."""

import json
from pathlib import Path

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import gradleak as gl

# Put your own model, tokenizer and texts here. This one is small and reads bytes, so that nothing is downloaded.
SENTENCES = json.loads((Path(__file__).parent / "sentences.json").read_text(encoding="utf-8"))["sentences"]
CLIENTS = 240  # sentences of the clients; the rest is nobody's
LENGTH = 32  # tokens of a sentence, padding included
PADDING = 256  # the id behind those of the 256 bytes
WORDS = (*(chr(byte) for byte in range(256)), "")  # the text of each id, for the report

CONFIG = LlamaConfig(
    vocab_size=257,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
    pad_token_id=PADDING,
    bos_token_id=None,
    eos_token_id=None,
    attn_implementation="eager",  # attacks differentiate twice; fused attention cannot
)
LORA = peft.LoraConfig(
    task_type="CAUSAL_LM", r=32, lora_alpha=32, lora_dropout=0.0, target_modules=["q_proj", "k_proj", "v_proj"]
)


def network() -> peft.PeftModel:
    """A language model of two blocks and its adapters; always the same weights at the start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(LlamaForCausalLM(CONFIG), LORA).eval()


def adapters(model: peft.PeftModel) -> dict[str, torch.Tensor]:
    """All that travels: the adapters' tensors, under PEFT's short names."""
    return peft.get_peft_model_state_dict(model, save_embedding_layers=False)


def task() -> gl.Task:
    """What an audit has to know of the training. It holds no data: `like` gives shapes."""
    kind = gl.kinds.Tokens(padding=PADDING, words=WORDS)
    return gl.Task.supervised(network(), torch.nn.functional.cross_entropy, like=tokenised([""]), kind=kind)


def recipe(lr: float) -> gl.LocalTraining:
    """What a client does in a round: one step on its sentences."""
    return gl.LocalTraining(lr=lr)


def tokenised(sentences: list[str]) -> dict[str, torch.Tensor]:
    """A batch as a loader of Hugging Face gives it; the loss leaves padding out."""
    ids = torch.full((len(sentences), LENGTH), PADDING)
    for row, sentence in zip(ids, sentences, strict=True):
        tokens = torch.tensor(list(sentence.encode()), dtype=torch.long)
        row[: len(tokens)] = tokens
    mask = (ids != PADDING).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def examples(partition: int, partitions: int, count: int, server_round: int) -> dict[str, torch.Tensor]:
    """The sentences of a client in a round: its share of the text, `count` of them in turn."""
    mine = SENTENCES[partition:CLIENTS:partitions]
    return tokenised([mine[((server_round - 1) * count + row) % len(mine)] for row in range(count)])


def others() -> dict[str, torch.Tensor]:
    """Sentences that are no client's: among these the audit looks reconstructions up, and takes its baseline."""
    return tokenised(SENTENCES[CLIENTS:])
