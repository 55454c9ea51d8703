"""Tasks of any form: what `Task.supervised` and `Task.from_batch` make of loss, output and target.

Every sound case is compared with what a user would write: plain autograd of the user's own line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl
from conftest import largest_difference
from gradleak.scenario import probe
from gradleak.scenario.fields import UNBOUNDED, Field, TaskError
from gradleak.scenario.fit import fits
from gradleak.scenario.kinds import ClassMap, Codes, Column, Series, Table, Tokens
from gradleak.scenario.objectives import prediction_of

B, VOCABULARY, LENGTH = 3, 11, 5


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().double().eval()


class Convert(nn.Module):
    """A model whose output is changed."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.inner(x))


class Text(nn.Module):
    """A tiny transformer. `causal`: a decoder; `heads`: outputs at each place; `pooled`: one output for a text."""

    def __init__(
        self, outputs: int = VOCABULARY, *, causal: bool = False, pooled: bool = False, pad: Any = None
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=pad)
        self.position = nn.Parameter(torch.randn(LENGTH, 8))
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, outputs)
        self.causal, self.pooled = causal, pooled

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = self.embedding(input_ids) + self.position
        scores = self.query(h) @ self.key(h).mT / 8**0.5
        if self.causal:
            scores = scores + torch.full((LENGTH, LENGTH), -1e9, dtype=h.dtype).triu(1)
        if attention_mask is not None:
            scores = scores + (1 - attention_mask.to(h.dtype))[:, None] * -1e9
        h = h + scores.softmax(-1) @ self.value(h)
        return self.head(h.mean(1) if self.pooled else h)


class Two(nn.Module):
    """Two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Embedding(7, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, features: Tensor, place: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(features) + self.second(place)))


class Columns(nn.Module):
    """Embedded columns. `before` changes the ids first."""

    def __init__(self, *sizes: int, before: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, 4) for size in sizes)
        self.before, self.head = before, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        ids = self.before(x)
        if len(self.embeddings) == 1:
            return self.head(self.embeddings[0](ids).flatten(1))
        return self.head(torch.cat([layer(ids[:, n]) for n, layer in enumerate(self.embeddings)], 1))


def rows(count: int = 4) -> Tensor:
    return torch.randn(B, count, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    return torch.rand(B, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def ids(*shape: int, below: int = VOCABULARY) -> Tensor:
    return torch.randint(1, below, shape or (B, LENGTH), generator=torch.Generator().manual_seed(2))


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def flat(inputs: int, outputs: int) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)))


def gradient_of(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*((name, p) for name, p in model.named_parameters() if p.requires_grad))
    return dict(zip(names, torch.autograd.grad(loss, parameters, materialize_grads=True)))


def sound(task: gl.Task, batch: dict[str, Tensor], expected: Tensor) -> None:
    """The task's gradient is that of the user's own line, a client can train, and blanks and probes work."""
    ours = task.gradient(task.weights(), batch)
    assert largest_difference(ours, gradient_of(task.model, expected)) < 1e-12
    seen = gl.observe(task, batch, gl.LocalTraining(lr=0.1))
    assert largest_difference(seen.update, {name: 0.1 * value for name, value in ours.items()}) < 1e-12
    fits(task, [seen])
    assert task.objective(task.model, task.blank(2)).isfinite()
    assert not probe.gradient_of(task).startswith(probe.NOT_RUN)


# --- every loss, output and target ------------------------------------------------------------------------------------


@dataclass
class Sound:
    """A case: the model, the loss, x, y, what the user's own line is, and the kind and field of the target."""

    model: Callable[[], nn.Module]
    loss: Any
    x: Tensor
    y: Tensor
    kind: str
    classes: int | None = None
    line: Callable[[Tensor, Tensor], Tensor] | None = None
    settings: dict[str, Any] | None = None


WEIGHT = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
BINARY, FEW = F.binary_cross_entropy_with_logits, ids(B, below=3)
SEGMENT = lambda: seeded(lambda: nn.Conv2d(3, 4, 3, padding=1))  # noqa: E731
TAGGER = lambda: seeded(lambda: Text(4))  # noqa: E731


def own_line(scores: Tensor, y: Tensor) -> Tensor:
    return -scores.log_softmax(-1).gather(1, y[:, None]).mean()


def tag_line(scores: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), y.flatten())


SOUND: dict[str, Sound] = {
    "classes": Sound(lambda: flat(48, 3), F.cross_entropy, images(), FEW, "category", 3),
    "module": Sound(lambda: flat(48, 3), nn.CrossEntropyLoss(), images(), FEW, "category", 3),
    "weighted": Sound(lambda: flat(48, 3), nn.CrossEntropyLoss(weight=WEIGHT), images(), FEW, "category", 3),
    "smoothed": Sound(lambda: flat(48, 3), nn.CrossEntropyLoss(label_smoothing=0.1), images(), FEW, "category", 3),
    "partial": Sound(
        lambda: flat(4, 3), partial(partial(F.cross_entropy, weight=WEIGHT), reduction="sum"),
        rows(), FEW, "category", 3,
    ),
    "soft classes": Sound(lambda: flat(4, 3), F.cross_entropy, rows(), numbers(B, 3).softmax(1), "category", 3),
    "nll": Sound(
        lambda: seeded(lambda: nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1))), F.nll_loss, rows(), FEW, "category", 3
    ),
    "own loss": Sound(lambda: flat(4, 3), own_line, rows(), FEW, "category", 3),
    "lambda with classes": Sound(
        lambda: flat(4, 3), lambda s, y: own_line(s, y), rows(), FEW, "category", 3, settings={"classes": 3}
    ),
    "per pixel": Sound(SEGMENT, F.cross_entropy, images(), ids(B, 4, 4, below=4), "class-map", 4),
    "per pixel, weighted": Sound(
        SEGMENT,
        nn.CrossEntropyLoss(weight=torch.rand(4, dtype=torch.float64) + 0.1),
        images(),
        ids(B, 4, 4, below=4),
        "class-map",
        4,
    ),
    "per pixel, given classes": Sound(
        SEGMENT, F.cross_entropy, images(), ids(B, 4, 4, below=4), "class-map", 4, settings={"classes": 4}
    ),
    "tags": Sound(TAGGER, F.cross_entropy, ids(), ids(below=4), "class-map", 4, tag_line),
    "tags, own loss": Sound(TAGGER, tag_line, ids(), ids(below=4), "class-map", 4),
    "tags, given classes": Sound(
        TAGGER, F.cross_entropy, ids(), ids(below=4), "class-map", 4, tag_line, {"classes": 4}
    ),
    "text": Sound(lambda: seeded(lambda: Text(3, pooled=True)), F.cross_entropy, ids(), FEW, "category", 3),
    "labels": Sound(lambda: flat(4, 3), BINARY, rows(), numbers(B, 3).gt(0).double(), "multi-label"),
    "labels, module": Sound(
        lambda: flat(4, 3), nn.BCEWithLogitsLoss(pos_weight=WEIGHT), rows(), numbers(B, 3).gt(0).double(), "multi-label"
    ),
    "labels, whole": Sound(
        lambda: flat(4, 3), BINARY, rows(), numbers(B, 3).gt(0).long(), "multi-label", None,
        lambda s, y: BINARY(s, y.double()),
    ),
    "probabilities": Sound(
        lambda: seeded(lambda: nn.Sequential(nn.Linear(4, 2), nn.Sigmoid())),
        nn.BCELoss(), rows(), numbers(B, 2).gt(0).double(), "multi-label",
    ),
    "yes or no": Sound(
        lambda: flat(4, 1), BINARY, rows(), numbers(B).gt(0).double(), "multi-label", None,
        lambda s, y: BINARY(s[:, 0], y),
    ),
    "mask": Sound(
        lambda: seeded(lambda: nn.Conv2d(3, 1, 1)), BINARY, images(), numbers(B, 4, 4).gt(0).double(),
        "multi-label", None, lambda s, y: BINARY(s[:, 0], y),
    ),
    "own loss, said": Sound(
        lambda: flat(4, 2), lambda s, y: (s - y).pow(4).mean(), rows(), numbers(B, 2), "value",
        settings={"target": "value"},
    ),
    "own loss, said labels": Sound(
        lambda: flat(4, 2), lambda s, y: (s.sigmoid() - y).pow(2).mean(), rows(), numbers(B, 2).gt(0).double(),
        "multi-label", settings={"target": "multi-label"},
    ),
    "values, one column": Sound(
        lambda: flat(4, 1), F.mse_loss, rows(), numbers(B), "value", None, lambda s, y: F.mse_loss(s[:, 0], y)
    ),
    "values, flat output": Sound(
        lambda: Convert(flat(4, 1), lambda s: s[:, 0]), F.mse_loss, rows(), numbers(B, 1), "value", None,
        lambda s, y: F.mse_loss(s, y[:, 0]),
    ),
    "whole values": Sound(
        lambda: flat(4, 1), F.mse_loss, rows(), ids(B), "value", None, lambda s, y: F.mse_loss(s[:, 0], y.double())
    ),
    "one-hot values": Sound(lambda: flat(4, 3), F.mse_loss, rows(), F.one_hot(FEW, 3).double(), "value"),
}  # fmt: skip
SOUND |= {
    name: Sound(lambda: flat(4, 2), loss, rows(), numbers(B, 2), "value")
    for name, loss in {
        "mse": nn.MSELoss(),
        "l1": F.l1_loss,
        "l1 module": nn.L1Loss(),
        "huber": F.huber_loss,
        "huber module": nn.HuberLoss(delta=0.3),
        "smooth l1": partial(F.smooth_l1_loss, beta=0.5),
        "smooth l1 module": nn.SmoothL1Loss(),
    }.items()
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("form", ["tensor", "tuple", "dict", "torchvision", "one entry"])
def test_supervised_understands(name: str, form: str) -> None:
    case = SOUND[name]
    wrap: dict[str, Callable[[Tensor], Any]] = {
        "tuple": lambda s: (s, (s.sum(),)),
        "dict": lambda s: {"hidden": s.sum(0), "logits": s},
        "torchvision": lambda s: {"out": s, "aux": 2 * s},
        "one entry": lambda s: {"scores": s},
    }
    inner = case.model()
    model = inner if form == "tensor" else Convert(inner, wrap[form])
    task = gl.Task.supervised(model, case.loss, like=(case.x, case.y), **(case.settings or {}))
    field = task.fields["y"]
    assert (field.kind.name, field.classes, task.target) == (case.kind, case.classes, "y")
    soft = case.y.is_floating_point() and case.classes is not None
    assert field.shape == (tuple(case.y.shape[1:]) if not soft else ())
    line = case.line or case.loss
    sound(task, {"x": case.x, "y": case.y}, line(inner(case.x), case.y))


@pytest.mark.parametrize("name", [name for name, case in SOUND.items() if case.kind == "value"])
def test_regression_is_never_taken_for_classes(name: str) -> None:
    case = SOUND[name]
    task = gl.Task.supervised(case.model(), case.loss, like=(case.x, case.y), **(case.settings or {}))
    assert task.fields["y"].classes is None
    assert task.fields["y"].bounds == UNBOUNDED
    with pytest.raises(TaskError, match=r"'y' \(value: values\) is not one class index"):
        _ = task.classifier


@pytest.mark.parametrize("name", ["per pixel", "per pixel, weighted", "tags"])
def test_soft_class_maps_equal_hard_ones(name: str) -> None:
    """A search has the classes last; torch takes them in axis 1."""
    case = SOUND[name]
    loss = F.cross_entropy if name == "per pixel, weighted" else case.loss  # torch weighs probabilities differently
    task = gl.Task.supervised(case.model(), loss, like=(case.x, case.y))
    assert case.classes is not None
    hard = task.gradient(task.weights(), {"x": case.x, "y": case.y})
    soft = task.gradient(task.weights(), {"x": case.x, "y": F.one_hot(case.y, case.classes).double()})
    assert largest_difference(hard, soft) < 1e-14
    with pytest.raises(TaskError, match="class-map: masks"):
        _ = task.classifier


def ignoring(y: Tensor, index: int) -> Tensor:
    """A third of the places without a class."""
    return torch.where(torch.arange(y.numel()).reshape(y.shape) % 3 == 0, index, y)


IGNORING: dict[str, tuple[Callable[[], nn.Module], Any, Tensor, Tensor, dict[str, Any]]] = {
    "pixels": (SEGMENT, partial(F.cross_entropy, ignore_index=255), images(), ids(B, 4, 4, below=4), {}),
    "pixels, module": (SEGMENT, nn.CrossEntropyLoss(ignore_index=255), images(), ids(B, 4, 4, below=4), {}),
    "tags": (TAGGER, F.cross_entropy, ids(), ids(below=4), {}),
    "tags, given classes": (TAGGER, F.cross_entropy, ids(), ids(below=4), {"classes": 4}),
    "tags, own loss": (TAGGER, tag_line, ids(), ids(below=4), {}),
}


@pytest.mark.parametrize("name", IGNORING)
def test_places_that_the_loss_ignores_are_allowed_and_not_scored(name: str) -> None:
    model, loss, x, y, settings = IGNORING[name]
    index = 255 if name.startswith("pixels") else -100
    masked = ignoring(y, index)
    task = gl.Task.supervised(model(), loss, like=(x, masked), **settings)
    field, batch = task.fields["y"], {"x": x, "y": masked}
    assert field == Field(tuple(y.shape[1:]), classes=4, kind=ClassMap(ignored=index))
    scores = task.model(x) if name.startswith("pixels") else task.model(x).mT
    sound(task, batch, F.cross_entropy(scores, masked, ignore_index=index))
    assert not [each for each in task.check(batch) if each.severity == "error"]
    assert "holds -7" in field.kind.allowed(masked.masked_fill(masked == index, -7), field)
    found, truth = (field.kind.comparable(each, field) for each in (y, masked))
    assert field.kind.scores(found, truth)["right"].tolist() == [1.0] * B
    assert field.kind.scores(found, truth)["iou"].tolist() == [1.0] * B
    assert field.kind.exhibit(truth[0], found[0], field) is not None


def test_no_example_is_compared_with_another() -> None:
    """(B, 1) beside (B,) would broadcast to (B, B)."""
    model, x, y = flat(4, 1), rows(), numbers(B)
    task = gl.Task.supervised(model, F.mse_loss, like=(x, y))
    torch.testing.assert_close(task.objective(model, {"x": x, "y": y}), (model(x)[:, 0] - y).square().mean())


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(weight=WEIGHT.float()), partial(F.cross_entropy, weight=WEIGHT)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_the_loss_travel_with_the_task(loss: Any, dtype: torch.dtype) -> None:
    task = gl.Task.supervised(flat(4, 3), loss, like=(rows(), FEW)).to("cpu", dtype)
    assert task.objective(task.model, {"x": rows().to(dtype), "y": FEW}).dtype == dtype


# --- what has two readings, and what has none -------------------------------------------------------------------------


def my_loss(scores: Tensor, y: Tensor) -> Tensor:
    return (scores - y).abs().mean()


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "numbers or labels": (lambda: flat(4, 2), my_loss, (rows(), numbers(B, 2)), "multi-label.*or.*'value'"),
    "whole numbers or labels": (lambda: flat(4, 2), my_loss, (rows(), ids(B, 2)), "multi-label.*or.*'value'"),
    "numbers, one output": (lambda: flat(4, 1), my_loss, (rows(), numbers(B)), "multi-label.*or.*'value'"),
    "whole, one output": (lambda: flat(4, 1), my_loss, (rows(), FEW), "yes-or-no.*or a regression"),
    "whole, one output, lambda": (lambda: flat(4, 1), lambda s, y: 0 * s, (rows(), FEW), "lambda.*yes-or-no.*regress"),
    "module": (lambda: flat(4, 2), nn.PairwiseDistance(), (rows(), numbers(B, 2)), "PairwiseDistance.*two readings"),
    "one class": (lambda: flat(4, 1), F.cross_entropy, (rows(), FEW), "one class.*binary_cross.*mse_loss"),
    "float classes": (lambda: flat(4, 3), F.cross_entropy, (rows(), numbers(B)), r"y\.long\(\)"),
    "column of classes": (lambda: flat(4, 3), F.cross_entropy, (rows(), FEW[:, None]), r"y\.squeeze\(\)"),
    "classes for numbers": (lambda: flat(4, 3), F.mse_loss, (rows(), FEW), "cross_entropy"),
    "no target": (lambda: flat(4, 3), F.cross_entropy, (rows(),), "no target"),
    "three entries": (lambda: flat(4, 3), F.cross_entropy, (rows(), rows(), FEW), r"\(\(x1, x2\), y\)"),
    "no label in a dict": (lambda: flat(4, 3), F.cross_entropy, {"input": rows()}, "labels"),
    "two labels in a dict": (lambda: flat(4, 3), F.cross_entropy, {"input": rows(), "y": FEW, "label": FEW}, "several"),
    "ids without embedding": (lambda: flat(4, 3), F.cross_entropy, (ids(B, 4), FEW), "does not accept|nn.Embedding"),
    "several tensors": (
        lambda: Convert(flat(4, 3), lambda s: {"a": s, "b": s}), F.cross_entropy, (rows(), FEW),
        "a dict of a, b.*from_batch",
    ),
    "no tensor": (lambda: Convert(flat(4, 3), lambda s: "no"), F.cross_entropy, (rows(), FEW), "returns str"),
    "next token or own text": (
        lambda: seeded(lambda: Text(causal=True)), F.cross_entropy, (ids(), ids()), "next-token.*or.*target='tokens'",
    ),
    "next token or own text, in a dict": (
        lambda: seeded(lambda: Text(causal=True)), F.cross_entropy, {"input_ids": ids(), "y": ids()}, "two readings",
    ),
    "one place, several sizes": (
        lambda: seeded(lambda: Columns(5, 6, before=lambda x: x[:, :1].expand(-1, 2))),
        F.cross_entropy, (ids(B, 2), FEW), "different sizes.*fields={'x': Field",
    ),
    "encoder without target": (lambda: seeded(lambda: Text()), F.cross_entropy, (ids(),), "no target"),
    "no batch axis": (lambda: flat(4, 3), F.cross_entropy, (torch.tensor(1.0), FEW), "batch axis"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_supervised_refuses(name: str) -> None:
    model, loss, like, message = REFUSED[name]
    with pytest.raises(TaskError) as problem:
        gl.Task.supervised(model(), loss, like=like)
    assert re.search(message, str(problem.value)), problem.value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "classes"}, "'classes' is no target.*category"),
        ({"kind": "picture"}, "no kind 'picture'.*image"),
        ({"public": ("x",)}, "nothing is private"),
        ({"public": ("z",)}, "public names z; the inputs are x"),
        ({"target": "next-token"}, "Next tokens need"),
        ({"target": "tokens"}, "Tokens as target need"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        gl.Task.supervised(flat(4, 3), F.cross_entropy, like=(rows(), FEW), **settings)


# --- shapes and kinds of x --------------------------------------------------------------------------------------------


def test_values_of_like_never_matter() -> None:
    """Nothing of the client's batch but its shapes and types reaches the task."""
    for case in SOUND.values():
        tasks = [
            gl.Task.supervised(case.model(), case.loss, like=like, **(case.settings or {}))
            for like in ((case.x, case.y), (torch.zeros_like(case.x[:1]), torch.zeros_like(case.y[:1])))
        ]
        assert tasks[0].fields == tasks[1].fields
        assert tasks[0].objective.meet == tasks[1].objective.meet
        assert probe.gradient_of(tasks[0]) == probe.gradient_of(tasks[1])


def test_bounds_are_those_of_pictures_or_none() -> None:
    def field(x: Tensor, **settings: Any) -> Field:
        model = flat(x[0].numel(), 3)
        return gl.Task.supervised(model, F.cross_entropy, like=(x, FEW), **settings).fields["x"]

    assert (field(images()).bounds, field(images()).kind.name) == ((0.0, 1.0), "image")
    assert (field(rows()).bounds, field(rows()).kind.name) == (UNBOUNDED, "vector")
    assert field(rows(), bounds=(0, 2)).bounds == (0, 2)
    assert field(numbers(B, 2, 6)).kind == Series()
    assert field(numbers(B, 6, 2), kind=Series(time_first=True)).kind == Series(time_first=True)
    assert field(rows(), kind="series").kind == Series()
    assert field(images(), mean=(0.1, 0.2, 0.3), std=0.5).mean == (0.1, 0.2, 0.3)
    table = Table((Column("age", low=0, mean=40, std=10), Column("sex", categories=("f", "m")), Column("pay")))
    assert field(rows(), kind=table).bounds == table.limits()


def test_ids_have_the_vocabulary_and_the_padding_of_their_embedding() -> None:
    task = gl.Task.supervised(seeded(lambda: Text(3, pooled=True, pad=0)), F.cross_entropy, like=(ids(), FEW))
    assert task.fields["x"] == Field((LENGTH,), classes=VOCABULARY, kind=Tokens(padding=0))
    assert task.blank()["x"].unique().tolist() == [1]
    assert (task.classifier.module, task.target) == ("head", "y")
    named = gl.Task.supervised(task.model, F.cross_entropy, like=(ids(), FEW), kind=Tokens(words=("a",)))
    assert named.fields["x"].kind == Tokens(padding=0, words=("a",))


def test_embedded_columns_have_the_vocabulary_of_their_embedding() -> None:
    for model in (Columns(7, 7), Columns(7), Columns(7, before=lambda x: x.int())):
        task = gl.Task.supervised(model, F.cross_entropy, like=(ids(B, 2), FEW))
        assert task.fields["x"].classes == 7
    with pytest.raises(TaskError, match="no nn.Embedding of the model takes it"):  # each column has its own range
        gl.Task.supervised(
            Columns(7, before=lambda x: x + torch.tensor([0, 3])), F.cross_entropy, like=(ids(B, 2), FEW)
        )


def test_columns_with_embeddings_of_their_own_sizes_are_codes() -> None:
    task = gl.Task.supervised(seeded(lambda: Columns(5, 6)), F.cross_entropy, like=(ids(B, 2), FEW))
    columns = tuple(Column(str(n), tuple(map(str, range(size)))) for n, size in enumerate((5, 6)))
    assert task.fields["x"] == Field((2,), classes=6, kind=Codes(columns))
    sound(task, {"x": ids(B, 2, below=5), "y": FEW}, F.cross_entropy(task.model(ids(B, 2, below=5)), FEW))
    with pytest.raises(TaskError, match="'codes'"):
        gl.Task.supervised(task.model, F.cross_entropy, like=(ids(B, 2), FEW), kind="tokens")


def test_a_declared_field_is_not_read_off_the_model() -> None:
    """Both embeddings take the first place, which no reading tells: the way that the error names works."""
    model = seeded(lambda: Columns(5, 6, before=lambda x: x[:, :1].expand(-1, 2)))
    field = Field((2,), classes=6, kind=Codes((Column("a", tuple("abcde")), Column("b", tuple("abcdef")))))
    batch = {"x": ids(B, 2, below=5), "y": FEW}
    loss = lambda output, b: F.cross_entropy(output, b["y"])  # noqa: E731
    with pytest.raises(TaskError, match="different sizes"):
        gl.Task.from_batch(model, loss, batch)
    task = gl.Task.from_batch(model, loss, batch, fields={"x": field})
    assert (task.fields["x"], task.fields["y"]) == (field, Field((), classes=3))


def test_a_batch_with_ids_out_of_the_vocabulary_is_refused() -> None:
    task = gl.Task.supervised(seeded(lambda: Text(3, pooled=True)), F.cross_entropy, like=(ids(), FEW))
    with pytest.raises(TaskError, match=f"Field 'x'.*vocabulary has {VOCABULARY}"):
        gl.observe(task, {"x": ids() + VOCABULARY, "y": FEW}, gl.LocalTraining(lr=0.1))


# --- several inputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["tuple", "dict", "one dict"])
def test_several_inputs_one_of_them_public(form: str) -> None:
    model, x, place = seeded(Two), rows(), ids(B, below=7)
    second = "x2" if form == "tuple" else "place"
    named = {"place": place, "features": x}  # the first private one is x, wherever it stands
    like = {"tuple": ((x, place), FEW), "dict": (named, FEW), "one dict": {**named, "target": FEW}}[form]
    task = gl.Task.supervised(model, F.cross_entropy, like=like, public=(second,))
    assert list(task.fields) == ["x", second, "y"]
    assert (task.fields[second].public, task.fields[second].classes, task.fields["x"].public) == (True, 7, False)
    batch = task.as_batch(like)
    assert batch.keys() == task.fields.keys()
    sound(task, batch, F.cross_entropy(model(x, place), FEW))
    assert task.classifier.module == "head"


def test_masks_are_public_and_blank_ones_hide_nothing() -> None:
    model, mask = seeded(lambda: Text(3, pooled=True)), torch.tensor([[1, 1, 1, 0, 0]] * B)
    for given in (mask, mask.bool()):
        like = {"input_ids": ids(), "attention_mask": given, "labels": FEW}
        task = gl.Task.supervised(model, F.cross_entropy, like=like)
        assert task.fields["attention_mask"].public
        assert task.blank()["attention_mask"].unique().tolist() == [1]
        sound(task, task.as_batch(like), F.cross_entropy(model(ids(), given), FEW))


def test_a_batch_without_a_field_is_refused() -> None:
    task = gl.Task.supervised(seeded(Two), F.cross_entropy, like=({"features": rows(), "place": FEW}, FEW))
    with pytest.raises(TaskError, match="lacks place; it has features, y"):
        task.as_batch(({"features": rows()}, FEW))


# --- language models --------------------------------------------------------------------------------------------------


def next_token_line(scores: Tensor, text: Tensor, ignored: int = -100) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), text[:, 1:].flatten(), ignore_index=ignored)


@pytest.mark.parametrize("like", [(ids(),), ids(), {"input_ids": ids(), "labels": ids()}], ids=["one", "bare", "dict"])
def test_a_causal_model_predicts_its_own_text(like: Any) -> None:
    model = seeded(lambda: Text(causal=True))
    task = gl.Task.supervised(model, F.cross_entropy, like=like)
    assert (list(task.fields), task.target) == (["x"], None)
    assert task.as_batch(like).keys() == {"x"}
    sound(task, {"x": ids()}, next_token_line(model(ids()), ids()))
    with pytest.raises(TaskError, match="no labels"):
        _ = task.classifier


def test_padding_is_not_learned() -> None:
    model, text = seeded(lambda: Text(causal=True, pad=0)), ids().clone()
    text[:, -2:] = 0
    task = gl.Task.supervised(model, nn.CrossEntropyLoss(ignore_index=-7), like=(text,))
    sound(task, {"x": text}, next_token_line(model(text), text, ignored=0))


def test_a_text_of_its_own_beside_a_causal_model() -> None:
    """As in nanoGPT: the client moves the text itself."""
    model, y = seeded(lambda: Text(causal=True)), ids().roll(-1, 1)
    task = gl.Task.supervised(model, F.cross_entropy, like=(ids(), y), target="tokens")
    assert task.fields["y"] == Field((LENGTH,), classes=VOCABULARY, kind=Tokens(ignored=-100))
    sound(task, {"x": ids(), "y": y}, F.cross_entropy(model(ids()).flatten(0, 1), y.flatten()))
    shifted = gl.Task.supervised(model, F.cross_entropy, like=(ids(), y), target="next-token")
    sound(shifted, {"x": ids()}, next_token_line(model(ids()), ids()))


def test_a_masked_model_predicts_hidden_tokens() -> None:
    model, y = seeded(Text), torch.full((B, LENGTH), -100)
    y[:, 2] = ids(B)
    task = gl.Task.supervised(model, F.cross_entropy, like=(ids(), y))
    assert task.fields["y"].kind == Tokens(ignored=-100)
    sound(task, {"x": ids(), "y": y}, F.cross_entropy(model(ids()).flatten(0, 1), y.flatten()))
    with pytest.raises(TaskError, match="tokens: texts"):
        _ = task.classifier


def test_scores_that_do_not_depend_on_the_text_show_nothing() -> None:
    model = seeded(lambda: Text(causal=True))
    nn.init.zeros_(model.head.weight)
    with pytest.raises(TaskError, match="next-token.*or target='tokens'"):
        gl.Task.supervised(model, F.cross_entropy, like=(ids(),))
    assert list(gl.Task.supervised(model, F.cross_entropy, like=(ids(),), target="next-token").fields) == ["x"]


def test_an_own_loss_of_next_tokens_gets_the_vocabulary_last() -> None:
    model = seeded(lambda: Text(causal=True))
    line = lambda s, y: F.cross_entropy(s.flatten(0, 1), y.flatten())  # noqa: E731
    task = gl.Task.supervised(model, line, like=(ids(),), target="next-token")
    sound(task, {"x": ids()}, next_token_line(model(ids()), ids()))


# --- any other form ---------------------------------------------------------------------------------------------------


def test_from_batch_takes_any_loss() -> None:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (F.cross_entropy(output, batch["label"], reduction="none") * batch["importance"]).mean()

    model, batch = (
        seeded(Two),
        {"features": rows(), "place": ids(B, below=7), "importance": numbers(B).abs(), "label": FEW},
    )
    task = gl.Task.from_batch(model, loss, batch, public=("place",))
    assert list(task.fields) == ["x", "place", "importance", "y"]
    assert {name: field.classes for name, field in task.fields.items() if field.classes} == {"place": 7, "y": 3}
    sound(task, task.as_batch(batch), loss(model(rows(), ids(B, below=7)), batch))
    assert task.target == "y"
    other = {name: torch.zeros_like(value[:1]) for name, value in batch.items()}
    assert gl.Task.from_batch(model, loss, other, public=("place",)).fields == task.fields


def test_from_batch_gives_a_model_without_names_the_first_entry() -> None:
    model, batch = flat(48, 48), {"image": images()}
    task = gl.Task.from_batch(model, lambda output, b: (output - b["image"].flatten(1)).square().mean(), batch)
    assert list(task.fields) == ["x"]
    sound(task, {"x": images()}, (model(images()) - images().flatten(1)).square().mean())


def test_from_batch_asks_for_a_field_it_cannot_read() -> None:
    batch = {"input": rows(), "count": FEW}
    loss = lambda output, b: (output[:, 0] - b["count"]).square().mean()  # noqa: E731
    with pytest.raises(TaskError, match=r"'count' holds whole numbers.*fields={'count': Field"):
        gl.Task.from_batch(flat(4, 1), loss, batch)
    with pytest.raises(TaskError, match=r"'y' holds whole numbers.*fields={'y': Field"):
        gl.Task.from_batch(flat(4, 1), loss, {"input": rows(), "y": FEW})
    with pytest.raises(TaskError, match="fields names number; the batch has input, count"):
        gl.Task.from_batch(flat(4, 1), loss, batch, fields={"number": Field((), classes=3)})
    task = gl.Task.from_batch(flat(4, 1), loss, batch, fields={"count": Field((), classes=3)})
    sound(task, task.as_batch(batch), loss(task.model(rows()), batch))


class OwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(features)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


def test_from_batch_takes_the_loss_of_the_model() -> None:
    model, batch = seeded(OwnLoss), {"features": rows(), "labels": FEW}
    task = gl.Task.from_batch(model, None, batch)
    assert task.fields["y"] == Field((), classes=3)
    sound(task, task.as_batch(batch), model(rows(), FEW)["loss"])
    silent = gl.Task.from_batch(flat(4, 3), None, {"input": rows()})
    with pytest.raises(TaskError, match="must return one itself"):
        silent.objective(silent.model, {"x": rows()})


# --- Hugging Face -----------------------------------------------------------------------------------------------------

TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def hugging_face(model: str, config: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, config)(attn_implementation="eager", **settings)
    return seeded(lambda: getattr(transformers, model)(made))


def bert(model: str, **settings: Any) -> nn.Module:
    return hugging_face(model, "BertConfig", vocab_size=VOCABULARY, max_position_embeddings=8, **TINY, **settings)


def gpt2() -> nn.Module:
    return hugging_face(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=1, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def test_bert_classifies_texts() -> None:
    model = bert("BertForSequenceClassification", num_labels=3)
    batch = {"input_ids": ids(), "token_type_ids": torch.zeros_like(ids()), "attention_mask": torch.ones_like(ids())}
    task = gl.Task.supervised(model, F.cross_entropy, like={**batch, "labels": FEW})
    assert [name for name, field in task.fields.items() if field.public] == ["token_type_ids", "attention_mask"]
    assert task.fields["token_type_ids"].classes == 2
    assert task.fields["x"].kind == Tokens(padding=0)
    assert task.classifier.module == "classifier"
    sound(task, task.as_batch({**batch, "labels": FEW}), model(**batch, labels=FEW).loss)


def test_bert_fills_in_hidden_tokens() -> None:
    model, labels = bert("BertForMaskedLM"), torch.full((B, LENGTH), -100)
    labels[:, 1] = ids(B)
    batch = {"input_ids": ids(), "attention_mask": torch.ones_like(ids()), "labels": labels}
    for task in (gl.Task.supervised(model, F.cross_entropy, like=batch), gl.Task.from_batch(model, None, batch)):
        assert task.fields["y"].kind == Tokens(ignored=-100)
        sound(task, task.as_batch(batch), model(**batch).loss)


def test_gpt2_continues_texts() -> None:
    model, batch = gpt2(), {"input_ids": ids(), "attention_mask": torch.ones_like(ids()), "labels": ids()}
    task = gl.Task.supervised(model, F.cross_entropy, like=batch)
    assert list(task.fields) == ["x", "attention_mask"]
    sound(task, task.as_batch(batch), next_token_line(model(ids()).logits, ids()))
    own = gl.Task.from_batch(model, None, batch)
    assert own.fields["y"].kind == Tokens(ignored=-100)
    sound(own, own.as_batch(batch), model(**batch).loss)


def test_lora_trains_its_adapters_alone() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
    ).double()
    batch = {"input_ids": ids(), "labels": ids()}
    task = gl.Task.supervised(model.eval(), F.cross_entropy, like=batch)
    assert task.weights()
    assert all("lora_" in name for name in task.weights())
    sound(task, task.as_batch(batch), next_token_line(model(ids()).logits, ids()))
    torch.testing.assert_close(  # Hugging Face takes the loss in single precision
        task.objective(model, task.as_batch(batch)), model(**batch).loss, rtol=1e-6, atol=0, check_dtype=False
    )


@pytest.mark.parametrize(
    ("model", "config", "settings"),
    [
        ("ViTForImageClassification", "ViTConfig", {"image_size": 4, "patch_size": 2, **TINY}),
        (
            "ResNetForImageClassification",
            "ResNetConfig",
            {"embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic"},
        ),
    ],
)
def test_image_classifiers_of_hugging_face(model: str, config: str, settings: dict[str, Any]) -> None:
    network = hugging_face(model, config, num_labels=3, **settings)
    batch = {"pixel_values": images(), "labels": FEW}
    task = gl.Task.supervised(network, F.cross_entropy, like=batch)
    assert task.fields["x"] == Field((3, 4, 4))
    assert task.classifier.weight.startswith("classifier")
    sound(task, task.as_batch(batch), F.cross_entropy(prediction_of(network(images())), FEW))
