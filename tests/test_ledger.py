"""The rank ledger: rows against outputs and inputs of every layer, and what the spans of an update tell."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl
import gradleak.identify.told as module
from conftest import normal, uniform
from gradleak.identify.ledger import COMPUTED, FROZEN, PUBLIC, SHARED, WAITING, Entry, Ledger, ledger
from gradleak.identify.risk import TextRisk, risk
from gradleak.identify.told import fixed_directions, told
from gradleak.parts.row_space import rows
from gradleak.scenario.task import Task, TaskError

TRAINING = gl.LocalTraining(lr=0.5)
KNOWS = gl.Knowledge(training=TRAINING)


def classifier(model: nn.Module, *shape: int, **settings: Any) -> Task:
    like = (torch.zeros(2, *shape), torch.zeros(2, dtype=torch.long))
    return gl.Task.supervised(model, F.cross_entropy, like=like, **settings)


def by_name(found: Ledger) -> dict[str, Entry]:
    assert not found.problem
    return {each.name: each for each in found.entries}


def small(outputs: int = 40, *, norm: nn.Module | None = None, dtype: torch.dtype = torch.float64) -> Task:
    """8 x 8 images; the second convolution has 16 places, and tells two examples with its 40 outputs."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 12, 3, padding=1), nn.Tanh(), nn.Conv2d(12, outputs, 3, stride=2, padding=1)]
    layers += [] if norm is None else [norm]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Conv2d(outputs, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 5))
    return classifier(model.to(dtype), 1, 8, 8)


def trained() -> Task:
    """The same with 32 channels in between, fitted to noise."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.Tanh(), nn.Conv2d(32, 40, 3, stride=2, padding=1), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Conv2d(40, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 5)).double()
    x, y = uniform(64, 1, 8, 8, seed=9), torch.arange(64) % 5
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimiser.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimiser.step()
    return classifier(model, 1, 8, 8)


def private(count: int, dtype: torch.dtype = torch.float64) -> gl.Batch:
    return {"x": uniform(count, 1, 8, 8).to(dtype), "y": torch.arange(count) % 5}


# --- counting ---------------------------------------------------------------------------------------------------------


def test_resnet18_at_32_pixels() -> None:
    found = ledger(classifier(gl.models.resnet18().eval(), 3, 32, 32))
    entries = by_name(found)
    last, third, second = (entries[f"features.{stage}.body.3"] for stage in (10, 8, 6))
    assert (last.places, last.outputs, last.inputs, last.entries, last.most) == (16, 512, 4608, 8192, 32)
    assert (third.places, third.outputs, third.most) == (64, 256, 4)
    assert (second.places, second.outputs, second.most) == (256, 128, 0)
    assert found.told_up_to == 32
    assert found.alone(last, 32)
    assert not found.tells(33)
    assert found.headline.startswith("Spans: up to 32 images in an update are told by 4 layers (features.9.body.0, ")
    assert found.headline.endswith("; up to 4 by 10 layers.")
    assert json.loads(json.dumps(found.record()))["told_up_to"] == 32


def test_resnet18_at_224_pixels() -> None:
    model = gl.models.resnet18(shape=(3, 224, 224), stem="imagenet").eval()
    found = ledger(classifier(model, 3, 224, 224))
    entries = by_name(found)
    last, third = entries["features.11.body.3"], entries["features.9.body.3"]
    assert (last.places, last.most, third.places, third.most) == (49, 10, 196, 1)
    assert not any(found.alone(each) for each in found.entries)
    assert found.told_up_to == 1, "together, since no layer's input has as many numbers as the image"


def test_resnet20() -> None:
    found = ledger(classifier(gl.models.resnet(blocks=(3, 3, 3), width=16).eval(), 3, 32, 32))
    last = by_name(found)["features.11.body.3"]
    assert (last.places, last.outputs, last.most, found.told_up_to) == (64, 64, 1, 1)
    assert found.headline.startswith("Spans: 1 image in an update is told by 7 layers")


def test_one_place_too_many_does_not_tell() -> None:
    fits, misses = (by_name(ledger(small(outputs)))["2"] for outputs in (16, 15))
    assert (fits.places, fits.most, misses.most) == (16, 1, 0)
    assert fits.equations(1) == min(12 * 64, 16 * (12 * 9 - 16 + 1))
    assert misses.equations(1) == fits.equations(2) == 0
    wide = Entry(("a",), ("a.weight",), "linear", places=4, outputs=64, inputs=8, entries=32)
    assert wide.most == 1, "eight rows fill the inputs: the span says nothing"


def test_a_norm_over_the_batch_leaves_differences() -> None:
    norms = {"batch": nn.BatchNorm2d(40), "example": nn.InstanceNorm2d(40), "": nn.GroupNorm(4, 40)}
    for centred, norm in norms.items():
        entry = by_name(ledger(small(norm=norm)))["2"]
        assert entry.centred == centred
        assert entry.rank(2) == {"batch": 31, "example": 30, "": 32}[centred]
    assert by_name(ledger(small(norm=nn.BatchNorm2d(40).eval())))["2"].centred == ""
    between = nn.Sequential(nn.ReLU(inplace=True), nn.BatchNorm2d(40))
    assert by_name(ledger(small(norm=between)))["2"].centred == "", "an activation stands between them"
    torch.manual_seed(0)
    trained = ledger(classifier(gl.models.resnet18(), 3, 32, 32))
    assert "only the batch as a whole" in trained.headline


class Odd(nn.Module):
    """Layers that do not tell, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.twice, self.tied, self.same = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.same.weight = self.tied.weight
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.position = nn.Linear(1, 6)
        self.q, self.k, self.last = nn.Linear(6, 4), nn.Linear(6, 3), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.frozen(x))) + self.position(torch.ones(len(x), 1).to(x))
        x = self.normed(self.same(self.tied(x).tanh()).tanh()).tanh()
        return self.last(torch.cat([self.q(x), self.k(x)], dim=-1))


def test_layers_that_do_not_tell_say_why_and_shared_rows_add_up() -> None:
    entries = by_name(ledger(classifier(Odd(), 6)))
    reasons = {name: entry.reason for name, entry in entries.items()}
    assert reasons == {
        "frozen": FROZEN, "twice": "runs 2 times", "position": PUBLIC, "tied": SHARED, "same": SHARED,
        "normed": COMPUTED, "q + k": "", "last": "",
    }  # fmt: skip
    assert entries["q + k"].outputs == 7
    assert entries["q + k"].weights == ("q.weight", "k.weight")
    assert not any(entry.equations(1) for name, entry in entries.items() if reasons[name])


def test_groups_tell_by_themselves() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 64, 3, padding=1, groups=2), nn.Conv2d(64, 64, 3, groups=64), nn.Flatten(), nn.Linear(256, 3)
    )
    grouped, depthwise, _ = by_name(ledger(classifier(model, 4, 4, 4))).values()
    assert (grouped.places, grouped.outputs, grouped.inputs, grouped.most) == (16, 32, 18, 1)
    assert grouped.equations(1) == min(64, 2 * 16 * (18 - 16 + 1))
    assert (depthwise.places, depthwise.outputs, depthwise.most) == (4, 1, 0)


def test_series_and_recurrent_networks() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.lstm, self.out = (
                nn.Conv1d(2, 20, 3, padding=1),
                nn.LSTM(20, 5, batch_first=True),
                nn.Linear(5, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(self.conv(x).transpose(1, 2))[0][:, -1])

    entries = by_name(ledger(classifier(Reader(), 2, 10)))
    assert (entries["conv"].places, entries["conv"].inputs, entries["conv"].most) == (10, 6, 0)
    lstm = entries["lstm"]
    assert (lstm.kind, lstm.places, lstm.outputs, lstm.inputs, lstm.most) == ("recurrent", 10, 20, 20, 2)
    layer = nn.Conv1d(2, 5, 3, stride=2, padding=1, dilation=2, bias=False)
    x = normal(3, 2, 9).float()
    product = rows(layer, x) @ layer.weight.flatten(1).T
    assert torch.allclose(product.reshape(3, -1, 5).transpose(1, 2), layer(x), atol=1e-5)


class Text(nn.Module):
    def __init__(self, width: int = 24, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, 50 if tied else 2)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.block(self.embed(x)).mean(1))


def test_texts_count_tokens() -> None:
    like = (torch.zeros(2, 7, dtype=torch.long), torch.zeros(2, dtype=torch.long))
    found = ledger(gl.Task.supervised(Text().eval(), F.cross_entropy, like=like))
    entries = by_name(found)
    attention = entries["block.self_attn"]
    assert (attention.kind, attention.places, attention.outputs, attention.inputs) == ("attention", 7, 72, 24)
    assert attention.most == 24 // 7
    assert (found.tokens, found.tokens_up_to, found.told_up_to) == (7, 24, 3)
    assert found.headline.startswith("Spans: up to 24 tokens in an update (3 texts of 7) are told by ")
    assert "The rows of embed name the values" in found.headline
    assert entries["out"] not in found.telling(1), "its rows are texts, not tokens"
    tied = gl.Task.supervised(Text(tied=True).eval(), F.cross_entropy, like=like)
    assert by_name(ledger(tied))["embed"].reason == SHARED
    assert not ledger(tied).bag


def test_models_that_fail_and_models_that_tell_nothing() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            if x.std() > 0:
                raise RuntimeError("only blank pictures")
            return self.layer(x)

    assert "only blank pictures" in ledger(classifier(Picky(), 4)).headline
    assert "other attacks need no span" in ledger(classifier(gl.models.lenet_zhu(), 3, 32, 32)).headline


def test_counting_leaves_the_model_and_the_random_state_alone() -> None:
    task = classifier(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)), 6)
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in task.model.state_dict().items()}
    assert not ledger(task).problem
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in task.model.state_dict().items())


# --- the certificate --------------------------------------------------------------------------------------------------


def test_truth_lies_inside_and_another_image_outside() -> None:
    task, batch = small(), private(2)
    seen = gl.observe(task, batch, TRAINING)
    lines = told(task, seen, KNOWS, batch=batch)
    assert [line.layer for line in lines] == [each.name for each in ledger(task).telling(2)]
    for line in lines:
        assert line.whole
        assert line.share == 1
        assert line.gap is None or line.gap > 1e6
        assert max(line.outside) < 1e-6
        assert min(line.above) > 1 - 1e-6
    others = {**batch, "x": uniform(2, 1, 8, 8, seed=5)}
    (line,) = told(task, seen, KNOWS, ("2",), {**batch, "x": torch.cat([batch["x"][:1], others["x"][1:]])})
    assert line.outside[0] < 1e-6 < 1e-3 < line.outside[1], "each example is tested by itself"
    assert json.loads(json.dumps(line.record()))["rank"] == 32


def test_other_images_lie_far_outside_of_a_trained_layer() -> None:
    """How far depends on network, batch and image (docs/spans.md): here each of three kinds is above 0.1."""
    task, batch = trained(), private(1)
    seen = gl.observe(task, batch, TRAINING)
    (line,) = told(task, seen, KNOWS, ("2",), batch)
    assert line.whole
    assert line.outside[0] < 1e-6
    for wrong in (normal(1, 1, 8, 8), uniform(1, 1, 8, 8, seed=5), torch.full((1, 1, 8, 8), 0.5)):
        (line,) = told(task, seen, KNOWS, ("2",), {**batch, "x": wrong})
        assert line.outside[0] > 0.1


def test_the_order_of_the_examples_and_the_labels_do_not_matter() -> None:
    task, batch = small(), private(2)
    turned = {"x": batch["x"].flip(0), "y": batch["y"]}
    for other in (turned, {**turned, "y": batch["y"].flip(0)}):
        (line,) = told(task, gl.observe(task, other, TRAINING), KNOWS, ("2",), batch)
        assert max(line.outside) < 1e-6


def test_the_floor_is_the_digits_of_the_observation() -> None:
    task, batch = small(dtype=torch.float32), private(2, torch.float32)
    (line,) = told(task, gl.observe(task, batch, TRAINING), KNOWS, ("2",), batch)
    assert 2e-7 < line.floor < 1e-6
    assert line.whole, "no direction is lost, and none of rounding is counted"
    assert max(line.outside) < 1e-6
    found = []
    for lr in (1e-3, 1e-5):
        training = gl.LocalTraining(lr=lr)
        sent = gl.observe(task, batch, training, wire="weights")
        found += told(task, sent, gl.Knowledge(training=training), ("2",), batch)
    assert line.floor < found[0].floor < found[1].floor
    assert line.rank == found[0].rank > found[1].rank
    assert max(found[1].above) < min(found[0].above)


def test_an_example_with_a_small_loss_sinks_below_the_floor() -> None:
    task, batch = small(dtype=torch.float32), private(2, torch.float32)
    with torch.no_grad():
        task.model[-1].bias[0] += 18  # the label of the first example
    (line,) = told(task, gl.observe(task, batch, TRAINING), KNOWS, ("2",), batch)
    assert 16 <= line.rank < 32
    assert line.above[0] < line.above[1]
    assert line.outside[1] < 1e-6 < line.outside[0]


def test_a_norm_over_the_batch_has_one_direction_fewer() -> None:
    task, batch = small(norm=nn.BatchNorm2d(40).double()), private(2)
    (line,) = told(task, gl.observe(task, batch, TRAINING), KNOWS, ("2",), batch)
    assert (line.expected, line.rank) == (31, 31)
    assert max(line.outside) < 1e-6
    with pytest.raises(TaskError, match="mixes the examples"):
        told(task, gl.observe(task, batch, TRAINING), KNOWS, ("2",), batch, jacobian=True)


def test_layers_fix_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    task, batch = small(), private(1)
    seen = gl.observe(task, batch, TRAINING)
    (line,) = told(task, seen, KNOWS, ("2",), batch, jacobian=True)
    assert (line.fixed, line.probed, line.determined) == ((64,), 64, (True,)), "many more equations than pixels"
    (last,) = told(task, seen, KNOWS, ("7",), batch, jacobian=True)
    assert (last.fixed, last.determined) == ((24 - 1,), (False,)), "one row of 24 numbers, up to its length"
    assert fixed_directions(task, seen, batch, KNOWS, ("2", "7")) == (64,)
    assert "fixed 64 of 64 directions" in str(line)
    monkeypatch.setattr(module, "EXACT", 32)
    monkeypatch.setattr(module, "PROBES", 16)
    (line,) = told(task, seen, KNOWS, ("2",), batch, jacobian=True)
    assert (line.fixed, line.probed, line.determined) == ((16,), 16, (False,)), "a few directions prove no more"
    assert "fixed at least 16 of 64 directions" in str(line)


def test_what_told_refuses() -> None:
    task, batch = small(), private(2)
    seen = gl.observe(task, batch, TRAINING)
    with pytest.raises(ValueError, match="No trained linear map is called nowhere"):
        told(task, seen, KNOWS, ("nowhere",))
    with pytest.raises(ValueError, match="needs a batch"):
        told(task, seen, KNOWS, jacobian=True)
    with pytest.raises(TaskError, match=r"Reconstruction\.target"):
        told(task, seen, KNOWS, batch=private(3))
    grouped = nn.Sequential(nn.Conv2d(2, 8, 3, groups=2), nn.Flatten(), nn.Linear(32, 2))
    task = classifier(grouped, 2, 4, 4)
    seen = gl.observe(task, {"x": uniform(1, 2, 4, 4).float(), "y": torch.zeros(1, dtype=torch.long)}, TRAINING)
    with pytest.raises(TaskError, match="unsupported: 0 give"):
        told(task, seen, KNOWS, ("0",))


# --- where it is shown ------------------------------------------------------------------------------------------------


def test_the_risk_says_whether_spans_tell_this_update() -> None:
    task = small()
    one, many = (risk(task, gl.observe(task, private(n), TRAINING), KNOWS) for n in (1, 9))
    assert one.told_up_to == many.told_up_to == ledger(task).told_up_to
    assert (one.told, many.told, many.examples) == (True, False, 9)
    assert f"spans tell up to {one.told_up_to} examples, this update has 1" in str(one)
    assert one.record()["told"] is True


# --- language models --------------------------------------------------------------------------------------------------

VOCABULARY, LENGTH, WIDTH = 60, 7, 16
FIRST = {"gpt2": "h.0.attn.c_attn", "llama": "layers.0.self_attn", "bert": "layer.0.attention.self"}


def language_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_attention_heads": 4}
    if name == "gpt2":
        ids = {"bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=9, n_embd=WIDTH, n_layer=2, n_head=2, **ids)
        return transformers.GPT2LMHeadModel(config).eval()
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, intermediate_size=40, num_hidden_layers=2, num_key_value_heads=2)
        return transformers.LlamaForCausalLM(config).eval()
    config = transformers.BertConfig(
        **sizes, intermediate_size=32, num_hidden_layers=2, max_position_embeddings=9, num_labels=3
    )
    return transformers.BertForSequenceClassification(config).eval()


def text_task(model: nn.Module, classes: bool = False) -> Task:
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    labels = torch.zeros(2, dtype=torch.long) if classes else ids
    return gl.Task.supervised(model, F.cross_entropy, like={"input_ids": ids, "labels": labels})


def lora(rank: int, **settings: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    model = language_model("llama")
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], **settings)
    return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize(
    ("name", "layers", "outputs", "limit"),
    [
        ("gpt2", 1, 3 * WIDTH, WIDTH),  # Conv1D: inputs first; its bias gives a point
        ("llama", 3, WIDTH + 2 * WIDTH // 2, WIDTH - 1),  # two groups of keys and values for four heads; no bias
        ("bert", 3, 3 * WIDTH, WIDTH),
    ],
)
def test_queries_keys_and_values_tell_tokens_up_to_the_width(name: str, layers: int, outputs: int, limit: int) -> None:
    found = ledger(text_task(language_model(name), classes=name == "bert"))
    [first] = [each for each in found.entries if FIRST[name] in each.name and each.outputs > WIDTH]
    assert (len(first.layers), first.outputs, first.inputs, first.places) == (layers, outputs, WIDTH, LENGTH)
    assert first.limit == limit
    assert (found.tokens_up_to, found.tokens_later, found.told_up_to) == (WIDTH, 0, WIDTH // LENGTH)
    assert found.headline.startswith(f"Spans: up to {WIDTH} tokens in an update (2 texts of {LENGTH}) are told by ")
    if name == "llama":
        by = by_name(found)
        gates = by["model.layers.0.mlp.gate_proj + model.layers.0.mlp.up_proj"]
        assert (gates.outputs, gates.inputs) == (80, WIDTH)


def stacked_rank(task: Task, layers: str, texts: list[list[int]]) -> int:
    """Of the gradients of maps that see the same rows, one below the other, in float64."""
    model = task.model.double()
    task = gl.Task(model, task.objective, task.fields)
    gradient = task.gradient(task.weights(), {"x": torch.tensor(texts)})
    parts = [gradient[f"{name}.weight"] for name in layers.split(" + ")]
    values = torch.linalg.svdvals(torch.cat([part / part.norm() for part in parts]))
    return int((values > 1e-10 * values[0]).sum())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_gradient_spans_the_tokens_as_counted(count: int) -> None:
    """Distinct tokens of a model with rotary positions, but the last of a text, which no loss stands behind."""
    task = text_task(language_model("llama"))
    [layers] = [each.name for each in ledger(task).entries if "layers.0.self_attn.q_proj" in each.name]
    texts = [list(range(1 + LENGTH * n, 1 + LENGTH * (n + 1))) for n in range(count)]
    assert stacked_rank(task, layers, texts) == min((LENGTH - 1) * count, WIDTH)


def test_lora_tells_fewer_tokens_than_its_rank_in_the_first_step() -> None:
    found = ledger(text_task(lora(8)))
    waiting = [each for each in found.entries if each.reason == WAITING]
    assert [len(each.layers) for each in waiting] == [2, 2], "A of queries and values see the same rows"
    assert {each.adapter for each in waiting} == {8}
    assert (found.tokens_up_to, found.tokens_later) == (7, WIDTH - 1)
    assert "LoRA of rank 8: everything up to 7 distinct tokens is told in the first step" in found.headline
    assert "while B is zero, and up to 15 in later ones" in found.headline
    assert found.record()["tokens_later"] == WIDTH - 1


def test_lora_adds_up_over_its_layers_once_b_is_not_zero() -> None:
    for rank, limit in ((3, 6), (12, WIDTH - 1)):
        found = ledger(text_task(lora(rank, init_lora_weights=False)))
        assert (found.tokens_up_to, found.tokens_later) == (limit, 0)
        assert f"LoRA of rank {rank}: everything up to {limit} distinct tokens is told; adapters" in found.headline
    assert "LoRA of rank 1: no token is told in the first step" in ledger(text_task(lora(1))).headline


@pytest.mark.parametrize("rank", [4, 8])
def test_the_gradients_of_lora_have_these_ranks(rank: int) -> None:
    texts = [list(range(1, 1 + LENGTH))]
    fresh, moved = text_task(lora(rank)), text_task(lora(rank, init_lora_weights=False))
    [name] = [each.name for each in ledger(moved).entries if "layers.0" in each.name and "lora_A" in each.name]
    queries, values = name.split(" + ")
    gradient = fresh.gradient(fresh.weights(), {"x": torch.tensor(texts)})
    assert not gradient[f"{queries}.weight"].any()
    assert not gradient[f"{values}.weight"].any()
    assert stacked_rank(moved, name, texts) == min(LENGTH - 1, 2 * rank)
    assert stacked_rank(fresh, values.replace("lora_A", "lora_B"), texts) == min(LENGTH - 1, rank)


def test_the_risk_of_texts_is_counted_in_tokens() -> None:
    task = text_task(language_model("llama"))
    ids = torch.tensor([[1, 2, 3, 1, 2, 3, 4]] * 3)
    seen = gl.observe(task, {"x": ids}, TRAINING)
    blind, own = risk(task, seen, KNOWS), risk(task, seen, KNOWS, batch={"x": ids})
    assert isinstance(blind, TextRisk)
    assert isinstance(own, TextRisk)
    assert (blind.tokens, own.tokens, own.tokens_up_to) == (3 * LENGTH, LENGTH, WIDTH)
    assert (blind.told, own.told, own.named) == (False, True, True)
    assert own.score == pytest.approx(5.9, abs=0.05)
    assert "spans tell everything up to 16 tokens, this update has at most 7; the rows of an embedding name" in str(own)
    adapters = risk(text_task(lora(4)), seen, KNOWS)
    assert isinstance(adapters, TextRisk)
    assert (adapters.score, adapters.told, adapters.record()["tokens_up_to"]) == (0.0, False, 3)
    assert "(8 in later steps)" in str(adapters)
