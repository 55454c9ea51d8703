"""Texts off gradients: the bag by the first spans, the order behind attention, adapters, labels, and refusals.

The victims are small transformers of random weights: what is tested holds for any weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import gradleak as gl
from conftest import perceptron, seeded
from gradleak.attack import Reconstruction
from gradleak.attacks.spans.text import SpanText
from gradleak.attacks.spans.text.bag import bag_of
from gradleak.attacks.spans.text.order import Node, chosen
from gradleak.attacks.spans.text.readers import Passes, Sees, Update, _decomposed, readers_of, span_of
from gradleak.attacks.spans.text.sparse import picked
from gradleak.engine import Engine
from gradleak.models.language import Positions, decoder
from gradleak.parts.view import TargetView
from gradleak.scenario.fields import UnsupportedTask
from gradleak.scenario.kinds import Tokens
from gradleak.scenario.rules import Adam
from gradleak.scenario.task import Batch

VOCABULARY, LENGTH, WIDTH = 300, 10, 96
LENGTHS = (10, 7, 8, 5)
RECIPE = gl.LocalTraining(lr=0.1)
POSITIONS: tuple[Positions, ...] = ("learned", "rotary")
LLAMA = {"hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
BERT = {"hidden_size": WIDTH, "intermediate_size": 128, "num_attention_heads": 4, "max_position_embeddings": LENGTH}
GPT2 = {"n_embd": WIDTH, "n_head": 4, "n_layer": 2, "n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0}


def texts(count: int, lengths: tuple[int, ...] | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and mask, padded on the right."""
    ids = torch.randint(5, VOCABULARY, (count, LENGTH), generator=seeded(seed))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths or ()):
        ids[row, length:], mask[row, length:] = 0, 0
    return ids, mask


def language(positions: Positions = "rotary", *, width: int = WIDTH, tied: bool = False, depth: int = 2) -> nn.Module:
    return decoder(
        vocabulary=VOCABULARY, width=width, heads=4, depth=depth, length=LENGTH, positions=positions, tied=tied,
        generator=seeded(),
    )  # fmt: skip


def hugging_face(model: str, config: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `zoo`)")
    settings = {"vocab_size": VOCABULARY, "pad_token_id": 0, "num_hidden_layers": 2, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()


def gpt2(**settings: Any) -> nn.Module:
    return hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT2, **settings)


def llama(**settings: Any) -> nn.Module:
    return hugging_face("LlamaForCausalLM", "LlamaConfig", **{**LLAMA, **settings})


def adapted(
    model: nn.Module, rank: int, *, started: bool, targets: tuple[str, ...] = ("q_proj", "v_proj")
) -> nn.Module:
    """With LoRA adapters; `started`: B is zero no more, as after the first step."""
    peft = pytest.importorskip("peft", reason="peft is not installed (extra `zoo`)")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = peft.LoraConfig(r=rank, target_modules=list(targets), fan_in_fan_out="c_attn" in targets)
        model = peft.get_peft_model(model, config).eval()
        for name, value in model.named_parameters():
            if started and "lora_B" in name:
                nn.init.normal_(value, std=0.02)
    return model


def task_of(model: nn.Module, batch: Batch) -> gl.Task:
    like = batch if "labels" in batch else (batch["input_ids"],)
    return gl.Task.supervised(model, cross_entropy, like=like, kind=Tokens(padding=0))


def public(task: gl.Task, batch: Batch) -> Batch:
    return {name: batch[name] for name, field in task.fields.items() if field.public}


def read(
    model: nn.Module,
    batch: Batch,
    training: gl.LocalTraining = RECIPE,
    *,
    change: Callable[[gl.Observation], gl.Observation] = lambda seen: seen,
    defence: gl.Defence | None = None,
    knows_defence: bool = True,
    engine: Engine | None = None,
) -> Reconstruction:
    """What is found of one client."""
    task = task_of(model, batch)
    own = task.as_batch(batch) if "labels" in batch else {"x": batch["input_ids"]}
    seen = change(gl.observe(task, own, training, defence))
    given = public(task, own)
    known = defence if knows_defence else None
    knows = gl.Knowledge(training=training, defence=known, given=given, inputs=frozenset(given))
    return gl.attacks.get("span-text").run(task, seen, knows, engine=engine or Engine("cpu"))


def rows_of(ids: Tensor, mask: Tensor, *, last: bool = True) -> list[list[int]]:
    """Texts without padding, in order of their ids. `last`: with their last tokens?"""
    return sorted(row[: int(there.sum()) - (not last)].tolist() for row, there in zip(ids, mask, strict=True))


def found_rows(found: Reconstruction, mask: Tensor, *, last: bool = True) -> list[list[int]]:
    return rows_of(found.batch["x"][0], mask, last=last)


# --- spans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", POSITIONS)
def test_rows_of_the_clients_tokens_are_inside_and_others_are_not(positions: Positions) -> None:
    ids, _ = texts(4)
    task = task_of(language(positions).double(), {"input_ids": ids})
    seen = gl.observe(task, {"x": ids}, RECIPE)
    update = Update.of(TargetView.of(task, seen, gl.Knowledge(training=RECIPE)), seen)
    readers = readers_of(task)
    assert [reader.sees for reader in readers.own] == [Sees.OWN]
    assert readers.causal
    assert readers.placed is (positions == "learned")
    assert readers.shortened
    span = span_of(readers.own[0], update, ids.numel())
    assert span is not None
    pairs = {(int(token), place) for row in ids for place, token in enumerate(row[:-1])}
    distinct = pairs if positions == "learned" else {token for token, _ in pairs}
    assert span.rank == len(distinct)
    passes = replace(Passes.blank(task), shortened=True)
    module = readers.own[0].module
    rows = passes.rows(torch.arange(VOCABULARY)[:, None].expand(-1, LENGTH), [module])[module]
    outside = span.outside(rows)  # (vocabulary, places)
    true = torch.zeros_like(outside, dtype=torch.bool)
    for token, place in pairs:
        true[token, place if positions == "learned" else slice(None)] = True
    assert float(outside[true].max()) < 1e-6
    if positions == "rotary":  # with learned positions sums of rows of other pairs are inside too
        assert float(outside[~true].min()) > 1e-2
    context = span_of(readers.context[0], update, ids.numel())
    assert context is not None
    behind = passes.rows(ids[:, :-1], [readers.context[0].module])[readers.context[0].module]
    assert float(context.outside(behind).max()) < 1e-6
    wrong = ids[:, :-1].roll(1, 1)
    assert float(context.outside(passes.rows(wrong, [context.reader.module])[context.reader.module]).median()) > 1e-2


def test_a_sketch_of_a_large_gradient_has_its_directions() -> None:
    left, right = (torch.randn(side, 12, generator=seeded(side), dtype=torch.float64) for side in (1100, 1024))
    noise = torch.randn(1100, 1024, generator=seeded(1), dtype=torch.float64)
    matrix = (left * torch.logspace(0, -4, 12)) @ right.T + 1e-9 * noise
    values, directions = _decomposed(matrix, 12)
    assert len(values) < 100
    exact = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(values[:12], exact.S[:12])
    assert float((directions[:12] @ exact.Vh[:12].T).square().sum()) > 12 - 1e-9
    assert len(_decomposed(matrix, 600)[0]) == 1024


def test_a_permuted_vocabulary_changes_nothing() -> None:
    ids, _ = texts(2)
    model, order = language(), torch.randperm(VOCABULARY, generator=seeded(3))
    task = task_of(model, {"input_ids": ids})
    found = read(model, {"input_ids": ids})
    assert found_rows(found, torch.ones_like(ids)) == sorted(ids.tolist())
    renamed = language()
    back = order.argsort()
    renamed.embedding.weight.data = model.embedding.weight.data[back]
    renamed.head.weight.data = model.head.weight.data[back]
    other = read(renamed, {"input_ids": order[ids]})
    torch.testing.assert_close(
        task.loss(task.weights(), {"x": ids})[0],
        task_of(renamed, {"input_ids": ids}).loss(dict(renamed.named_parameters()), {"x": order[ids]})[0],
    )
    assert found_rows(other, torch.ones_like(ids)) == sorted(order[ids].tolist())


# --- causal models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("count", [1, 4])
def test_texts_of_the_small_decoder_are_found_with_their_last_tokens(
    positions: Positions, tied: bool, count: int
) -> None:
    ids, mask = texts(count)
    found = read(language(positions, tied=tied), {"input_ids": ids})
    assert found_rows(found, mask) == sorted(ids.tolist())
    assert float(found.match) < 1e-5
    certificate = found.settings["spans"][0]
    assert certificate["proved"] == certificate["examples"] == count
    assert found.settings["ordered"] == [count]


def test_sixteen_texts_of_a_wider_decoder() -> None:
    ids, mask = texts(16)
    assert WIDTH < len(ids[:, :-1].unique()) < 192
    found = read(language(width=192), {"input_ids": ids})
    assert found_rows(found, mask) == sorted(ids.tolist())


def test_one_block_is_enough() -> None:
    """The output projection of the first attention sees the order: no second block is needed."""
    ids, mask = texts(3)
    assert found_rows(read(language(depth=1), {"input_ids": ids}), mask) == sorted(ids.tolist())


def test_the_order_of_texts_does_not_matter() -> None:
    ids, mask = texts(4, LENGTHS)
    first = read(llama(), {"input_ids": ids, "attention_mask": mask, "labels": ids})
    order = [2, 0, 3, 1]
    other = read(llama(), {"input_ids": ids[order], "attention_mask": mask[order], "labels": ids[order]})
    assert found_rows(first, mask) == found_rows(other, mask[order])


@pytest.mark.parametrize(
    "make", [gpt2, llama, lambda: gpt2(tie_word_embeddings=False)], ids=["gpt2", "llama", "untied"]
)
def test_padded_texts_of_hugging_face_models(make: Callable[[], nn.Module]) -> None:
    ids, mask = texts(4, LENGTHS)
    found = read(make(), {"input_ids": ids, "attention_mask": mask, "labels": ids})
    assert found_rows(found, mask) == rows_of(ids, mask)
    assert torch.equal(found.batch["attention_mask"][0], mask)


def test_padding_without_a_mask() -> None:
    ids, mask = texts(3, (10, 6, 8))
    found = read(language(), {"input_ids": ids})
    # Without lengths the texts come in any order; what stands behind one was not found.
    got = [[token for token in row if token >= 0] for row in found.batch["x"][0].tolist()]
    assert sorted(row[: len(true)] for row, true in zip(sorted(got), rows_of(ids, mask), strict=True)) == rows_of(
        ids, mask
    )


def test_a_text_that_begins_another_one_is_found_by_its_length() -> None:
    ids, mask = texts(2, (10, 6))
    ids[1, :6] = ids[0, :6]
    found = read(llama(), {"input_ids": ids, "attention_mask": mask, "labels": ids})
    assert found_rows(found, mask, last=False) == rows_of(ids, mask, last=False)


def test_more_tokens_than_the_width_are_not_told() -> None:
    ids, _ = texts(16)
    found = read(language(), {"input_ids": ids})
    assert len(ids[:, :-1].unique()) > WIDTH
    assert bool((found.batch["x"] == -1).all())
    assert float(found.match) == 1.0
    assert found.settings["limit"] == [WIDTH]
    assert "more tokens than its layers tell" in found.settings["spans"][0]["reason"]


def test_a_model_without_attention_gives_the_bag_alone() -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.first, self.head = nn.Embedding(60, 24), nn.Linear(24, 32), nn.Linear(32, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.first(self.embedding(x)).relu().mean(1))

    ids = torch.tensor([[3, 9, 4, 11, 7]])
    task = gl.Task.supervised(Bag(), cross_entropy, like=(ids, torch.tensor([1])))
    seen = gl.observe(task, {"x": ids, "y": torch.tensor([1])}, RECIPE)
    found = gl.attacks.get("span-text").run(task, seen, gl.Knowledge(training=RECIPE))
    assert set(found.batch["x"].flatten().tolist()) == {3, 4, 7, 9, 11}
    assert float(found.match) == 1.0
    assert "order is not" in found.settings["spans"][0]["reason"]


def test_several_steps_at_a_small_rate() -> None:
    ids, mask = texts(2)
    training = gl.LocalTraining(lr=1e-3, steps=5)
    found = read(language(width=192), {"input_ids": ids}, training)
    assert found_rows(found, mask, last=False) == rows_of(ids, mask, last=False)


def test_scale_and_recipe_do_not_matter() -> None:
    ids, _ = texts(2)
    task = task_of(language(), {"input_ids": ids})
    seen = gl.observe(task, {"x": ids}, RECIPE)
    small = replace(seen, update={name: 1e-6 * value for name, value in seen.update.items()})
    found = gl.attacks.get("span-text").run(task, small)
    assert found_rows(found, torch.ones_like(ids)) == sorted(ids.tolist())


def test_two_clients_in_a_sum() -> None:
    ids, mask = texts(4)
    task = task_of(language(), {"input_ids": ids})
    halves = [gl.observe(task, {"x": part}, RECIPE) for part in ids.split(2)]
    mean = {name: (value + halves[1].update[name]) / 2 for name, value in halves[0].update.items()}
    seen = replace(halves[0], update=mean, num_examples=4, clients=2)
    found = gl.attacks.get("span-text").run(task, seen, gl.Knowledge(training=RECIPE))
    assert found_rows(found, mask) == sorted(ids.tolist())


# --- encoders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4])
def test_texts_of_an_encoder_are_found_by_exchange(count: int) -> None:
    ids, mask = texts(count, LENGTHS[:count])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(count) % 3}
    found = read(hugging_face("BertForSequenceClassification", "BertConfig", num_labels=3, **BERT), batch)
    assert found_rows(found, mask) == rows_of(ids, mask)
    assert sorted(found.batch["y"][0].tolist()) == sorted(batch["labels"].tolist())


@pytest.mark.parametrize("count", [1, 4])
def test_hidden_words_are_read_off_the_output_side(count: int) -> None:
    ids, mask = texts(count, LENGTHS[:count])
    labels, shown = torch.full_like(ids, -100), ids.clone()
    for place in (1, 3):
        labels[:, place], shown[:, place] = ids[:, place], 4
    batch = {"input_ids": shown, "attention_mask": mask, "labels": labels}
    found = read(hugging_face("BertForMaskedLM", "BertConfig", **BERT), batch)
    assert found_rows(found, mask) == rows_of(shown, mask)
    pairs = sorted(zip(found.batch["x"][0].tolist(), found.batch["y"][0].tolist(), strict=True))
    shown_, labels_ = shown.masked_fill(mask == 0, 0).tolist(), labels.tolist()
    assert pairs == sorted(zip(shown_, labels_, strict=True))


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("started", [False, True])
def test_adapters_tell_texts_with_fewer_tokens_than_their_rank(started: bool) -> None:
    ids, mask = texts(2, (10, 7))
    found = read(adapted(llama(), 32, started=started), {"input_ids": ids, "attention_mask": mask, "labels": ids})
    assert found_rows(found, mask) == rows_of(ids, mask)


def test_adapters_of_gpt2() -> None:
    ids, mask = texts(2, (10, 7))
    model = adapted(gpt2(), 32, started=False, targets=("c_attn",))
    assert found_rows(read(model, {"input_ids": ids, "attention_mask": mask, "labels": ids}), mask) == rows_of(
        ids, mask
    )


def test_above_its_rank_a_started_adapter_still_tells_the_bag() -> None:
    """q and v give 2 r = 8 directions, and the texts have 22 tokens: sparse recovery finds all of them."""
    ids, mask = texts(3, (10, 7, 9))
    model = adapted(llama(hidden_size=192), 4, started=True)
    found = read(model, {"input_ids": ids, "attention_mask": mask, "labels": ids})
    inputs = {int(t) for row, there in zip(ids, mask, strict=True) for t in row[: int(there.sum()) - 1]}
    assert len(inputs) == 22
    assert found.settings["tokens"] == [22]
    assert {int(t) for t in found.batch["x"].unique()} - {-1, 0} == inputs
    assert "order is not" in found.settings["spans"][0]["reason"]


def test_above_its_rank_a_fresh_adapter_tells_nothing() -> None:
    """B is zero, so only its own gradient is left: r numbers of every row, and more rows than that."""
    ids, mask = texts(3, (10, 7, 9))
    found = read(adapted(llama(), 4, started=False), {"input_ids": ids, "attention_mask": mask, "labels": ids})
    assert found.settings["tokens"] == [0]


def test_sparse_recovery_finds_a_support_larger_than_the_rank() -> None:
    table = torch.randn(2000, 64, generator=seeded(), dtype=torch.float64)
    support = torch.arange(0, 1500, 100)  # 15 rows
    mixtures = torch.randn(4, 15, generator=seeded(1), dtype=torch.float64) @ table[support]
    directions = torch.linalg.svd(mixtures, full_matrices=False)[2]
    assert torch.equal(picked(directions, table), support)
    noise = torch.linalg.qr(torch.randn(64, 4, generator=seeded(2), dtype=torch.float64)).Q.T
    assert not len(picked(noise, table))


# --- wires and defences -----------------------------------------------------------------------------------------------


def rounded(dtype: torch.dtype) -> Callable[[gl.Observation], gl.Observation]:
    return lambda seen: replace(seen, update={n: v.to(dtype).to(v.dtype) for n, v in seen.update.items()})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gradient_in_half_precision(dtype: torch.dtype) -> None:
    ids, mask = texts(1)
    found = read(language(), {"input_ids": ids}, change=rounded(dtype))
    assert found_rows(found, mask, last=False) == rows_of(ids, mask, last=False)


def test_entries_that_a_known_mask_dropped_are_completed() -> None:
    ids, mask = texts(1)
    defence = gl.defences.get("random-mask", keep=0.7)
    found = read(language(width=128), {"input_ids": ids}, defence=defence)
    assert found_rows(found, mask, last=False) == rows_of(ids, mask, last=False)


def test_a_withheld_attention_leaves_the_others() -> None:
    ids, mask = texts(1)
    defence = gl.defences.get("withholding", layer="blocks.0.attention.query")
    found = read(language(), {"input_ids": ids}, defence=defence)
    assert found_rows(found, mask, last=False) == rows_of(ids, mask, last=False)


def test_clipping_hides_nothing() -> None:
    ids, mask = texts(2)
    found = read(language(), {"input_ids": ids}, defence=gl.defences.get("clipping", norm=0.1))
    assert found_rows(found, mask) == sorted(ids.tolist())


@pytest.mark.parametrize("knows", [True, False])
def test_strong_noise_hides_texts(knows: bool) -> None:
    ids, mask = texts(2)
    noise = gl.defences.get("local-gaussian", clip=1.0, noise_multiplier=1.0)
    found = read(language(), {"input_ids": ids}, defence=noise, knows_defence=knows)
    assert not set(map(tuple, found_rows(found, mask, last=False))) & set(map(tuple, rows_of(ids, mask, last=False)))


# --- choosing and refusing --------------------------------------------------------------------------------------------


def test_lengths_choose_among_texts() -> None:
    nodes = [Node(torch.arange(n), evidence=float(n), ended=ended) for n, ended in ((3, True), (5, False), (6, True))]
    by_length = chosen(nodes, [4, 7])
    assert [None if node is None else len(node) for node in by_length] == [3, 6]
    assert [len(node) for node in chosen(nodes, [None, None]) if node] == [6, 3]
    begun = chosen(nodes, [6, 7])
    assert [None if node is None else len(node) for node in begun] == [5, 6]


def test_what_holds_no_text_is_refused() -> None:
    attack = SpanText()
    assert "x holds images" in attack.refuses(perceptron())
    task = task_of(language(), {"input_ids": texts(1)[0]})
    assert attack.refuses(task) == ""
    assert "no text to find" in attack.refuses(task, {"x"})
    for name, value in task.model.named_parameters():
        value.requires_grad_("head" in name)
    assert "no trained linear layer" in attack.refuses(task)


def test_clients_of_adam_are_refused() -> None:
    ids, _ = texts(1)
    with pytest.raises(UnsupportedTask, match="reads gradients"):
        read(language(), {"input_ids": ids}, gl.LocalTraining(lr=1e-3, optimiser=Adam()))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="beam"):
        SpanText(beam=0)


def test_lanes_of_several_targets_are_alone_what_they_are_together() -> None:
    ids, mask = texts(4)
    model = language()
    task = task_of(model, {"input_ids": ids[:2]})
    seen = [gl.observe(task, {"x": part}, RECIPE, key=f"t{n}") for n, part in enumerate(ids.split(2))]
    together = gl.attacks.get("span-text").run(task, seen, gl.Knowledge(training=RECIPE))
    for number, one in enumerate(seen):
        alone = gl.attacks.get("span-text").run(task, one, gl.Knowledge(training=RECIPE))
        assert torch.equal(alone.batch["x"][0], together.batch["x"][number])


def test_an_empty_bag_is_no_error() -> None:
    ids, _ = texts(1)
    task = task_of(language(), {"input_ids": ids})
    passes = replace(Passes.blank(task), shortened=True)
    assert not bag_of([], passes, 10, placed=False).told
