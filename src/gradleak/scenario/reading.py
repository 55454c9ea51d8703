"""How loss, output and target are read: which kind of target it is, and how the loss is called.

Of the client's batch only shapes and dtypes are looked at (`Example`). The model runs once, on a blank batch, on a copy
in evaluation mode: its output has the number of classes, and its embeddings the sizes of vocabularies.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.scenario.fields import UNBOUNDED, Bounds, Field, TaskError
from gradleak.scenario.kinds import KINDS, Category, Kind, Mask, MultiLabel, Table, Tokens, Value
from gradleak.scenario.objectives import (
    IGNORED,
    BatchLoss,
    ClassesMeet,
    Input,
    Meet,
    NextToken,
    Supervised,
    as_numbers,
    pair_of,
    prediction_of,
)

LABELS = ("y", "label", "labels", "target")
"""Names of the target in a batch that is a dict."""
PUBLIC = ("attention_mask", "token_type_ids", "position_ids")
"""Inputs that count as known to the server unless they are private by declaration: they reveal lengths at most."""
NEXT_TOKEN = "next-token"
TRIAL = 2  # examples in a blank batch: BatchNorm cannot train on one


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What is said about the data of a supervised task; None: read off shapes, loss and model.

    bounds      of the raw values of x, such as pixels; None: (0, 1) for images, none for everything else
    classes     number of classes of the target
    mean, std   what the client's pipeline subtracts from x and divides by
    kind        of x: a Kind, or its name, such as "series" or "tokens"
    target      of y: a Kind, or "category", "class-map", "multi-label", "value", "tokens"; "next-token": x itself
    public      names of inputs that the server knows; `PUBLIC` are known anyway
    """

    bounds: Bounds | None = None
    classes: int | None = None
    mean: float | Sequence[float] = 0.0
    std: float | Sequence[float] = 1.0
    kind: Kind | str | None = None
    target: Kind | str | None = None
    public: Sequence[str] = ()


class Example(NamedTuple):
    """All that is read of a tensor of the client: the shape of one example, and the type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def whole(self) -> bool:
        """Does it hold whole numbers, such as ids?"""
        return not (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def core(self) -> tuple[int, ...]:
        return _core(self.shape)


class Entry(NamedTuple):
    """An input of the model with its example."""

    input: Input
    example: Example
    kind: Kind | None
    public: bool

    @property
    def whole(self) -> bool:
        if self.kind is None:
            return self.example.whole and self.example.dtype != torch.uint8  # bytes are a picture
        return not self.kind.continuous


class Vocabulary(NamedTuple):
    """The embedding that an input reaches: its number of rows, and the row of padding."""

    rows: int
    padding: int | None


@dataclass(frozen=True)
class Case:
    """One target to be read, with all that a reader may look at.

    output      shape of one prediction; None: the model was not asked, since the classes are given
    is_causal   does no place look at later ones?
    said        what the caller says of the target
    labelled    the batch is a dict with labels: the convention of Hugging Face, whose models shift them themselves
    """

    loss: Any
    output: tuple[int, ...] | None
    y: Example | None
    x: Field
    is_causal: Callable[[], bool | None] | None = None
    said: Kind | str | None = None
    classes: int | None = None
    labelled: bool = False

    @property
    def known(self) -> bool:
        """Is the loss one of torch, whose conventions hold?"""
        return family_of(self.loss) is not None

    @property
    def kind(self) -> Kind | None:
        return self.said if isinstance(self.said, Kind) else None

    @property
    def scores(self) -> tuple[int, ...]:
        """The shape of one prediction."""
        assert self.output is not None
        return self.output

    @property
    def target(self) -> Example:
        if self.y is None:
            raise TaskError("`like` has no target: pass like=(x, y), or a dict with one of " + ", ".join(LABELS) + ".")
        return self.y

    @property
    def predicts_tokens(self) -> bool:
        """Is there a score for every word of x's vocabulary at every place of x?"""
        return isinstance(self.x.kind, Tokens) and self.output == (*self.x.shape, self.x.classes)


class Read(NamedTuple):
    """A target as read: its field, None where x itself is predicted, and how prediction and target meet."""

    field: Field | None
    meet: Meet | None = None


# --- losses -----------------------------------------------------------------------------------------------------------

FAMILIES: dict[str, tuple[Any, ...]] = {
    "classes": (F.cross_entropy, nn.CrossEntropyLoss, F.nll_loss, nn.NLLLoss),
    "labels": (
        *(F.binary_cross_entropy_with_logits, nn.BCEWithLogitsLoss, F.binary_cross_entropy, nn.BCELoss),
        *(F.multilabel_soft_margin_loss, nn.MultiLabelSoftMarginLoss),
    ),
    "values": (
        *(F.mse_loss, nn.MSELoss, F.l1_loss, nn.L1Loss, F.huber_loss, nn.HuberLoss),
        *(F.smooth_l1_loss, nn.SmoothL1Loss, F.poisson_nll_loss, nn.PoissonNLLLoss),
    ),
}


def family_of(loss: Any) -> str | None:
    """What a loss of torch is for, also inside functools.partial; None for any other."""
    while isinstance(loss, partial):
        loss = loss.func
    of_module = type(loss).__mro__ if isinstance(loss, nn.Module) else (loss,)
    return next((name for name, losses in FAMILIES.items() if any(each in losses for each in of_module)), None)


def ignored_by(loss: Any) -> int:
    """The class index that a loss leaves out."""
    if isinstance(loss, partial):
        return int(loss.keywords.get("ignore_index", ignored_by(loss.func)))
    return int(loss.ignore_index) if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) else IGNORED


# --- targets ----------------------------------------------------------------------------------------------------------


def read_classes(case: Case) -> Read:
    """A class index, a class for every place, or tokens."""
    if case.predicts_tokens and case.said is None and (case.y is None or case.y.shape == case.x.shape):
        return read_language(case)
    if math.prod(case.scores) == 1:
        raise TaskError(
            "Cross-entropy with one output has one class, which cannot be learned. For one yes-or-no answer use "
            "binary_cross_entropy_with_logits, for a number mse_loss; or give the model two outputs."
        )
    y, scores = case.target, case.scores
    for last in (True, False) if isinstance(case.x.kind, Tokens) else (False, True):
        places, classes = (scores[:-1], scores[-1]) if last else (scores[1:], scores[0])
        if y.shape == (places if y.whole else scores):  # probabilities have the output's shape
            meet = ClassesMeet(last) if places and case.known else None
            return Read(Field(places, classes=classes, kind=case.kind), meet)  # type: ignore[arg-type]
    raise TaskError(
        f"The model's output for one example has shape {scores} and the target {y.shape} ({y.dtype}): classes are "
        "indices (int64), one for each example or for each place of the output, or probabilities of the output's "
        f"shape. {_advice(y, scores)}"
    )


def read_given_classes(case: Case) -> Read:
    """Class indices, as many as the caller says."""
    y = case.target
    places = y.shape if y.whole else ()
    several = len(case.output or ()) > 1 and case.known
    meet = ClassesMeet(case.scores[:-1] == places) if several else None
    return Read(Field(places, classes=case.classes, kind=case.kind), meet)  # type: ignore[arg-type]


def _advice(y: Example, scores: tuple[int, ...]) -> str:
    if y.core == _core(scores[1:]):
        return "Remove axes of length 1: y.squeeze()." if y.whole else "Convert the labels: y.long()."
    if len(scores) > 1:
        return "If the loss makes class scores of it itself, pass classes=."
    return "For numbers use mse_loss, for several labels at once binary_cross_entropy_with_logits."


def read_language(case: Case) -> Read:
    """Next tokens of a causal model, or hidden tokens of a masked one."""
    causal = None if case.is_causal is None else case.is_causal()
    if causal is None:
        raise TaskError(
            "The model predicts tokens, but a blank pass does not show whether a place looks at later ones. Say what "
            f"the target is: target={NEXT_TOKEN!r} (each place predicts the token after it; only x is private), or "
            "target='tokens' (each place predicts its own entry of y)."
        )
    if causal and (case.y is None or case.labelled):
        return read_next_token(case)
    if causal:
        raise TaskError(
            "The model is a causal language model and y has the shape of x, which has two readings. If y repeats x and "
            f"each place predicts the token after it, pass target={NEXT_TOKEN!r} (or like=(x,)): only x is private. If "
            "y is a text of its own, such as x moved by one place before the model sees it, pass target='tokens'."
        )
    return read_tokens(case)


def read_next_token(case: Case) -> Read:
    """Causal language modelling: x is its own target, one place later."""
    if not case.predicts_tokens:
        raise TaskError(
            f"Next tokens need a model from ids (length,) to scores (length, vocabulary); one example has shape "
            f"{case.x.shape} ({case.x.kind.name}) and output {case.scores}."
        )
    assert isinstance(case.x.kind, Tokens)
    return Read(None, NextToken(case.x.kind.padding, ignored_by(case.loss), classes_first=case.known))


def read_tokens(case: Case) -> Read:
    """A text of its own at the places of x: hidden tokens, -100 where there is nothing to predict."""
    if case.target.shape != case.scores[:-1] or not case.target.whole:
        raise TaskError(
            f"Tokens as target need an id for every place: the output for one example has shape {case.output}, the "
            f"target {case.target.shape} ({case.target.dtype})."
        )
    kind = case.kind if isinstance(case.kind, Tokens) else Tokens()
    kind = replace(kind, ignored=ignored_by(case.loss)) if kind.ignored is None else kind
    field = Field(case.target.shape, classes=case.scores[-1], kind=kind)
    return Read(field, ClassesMeet(last=True) if case.known else None)


def read_labels(case: Case) -> Read:
    """Several labels at once, each 0 or 1; also one yes-or-no answer."""
    return Read(Field(_beside(case), kind=case.kind or MultiLabel()), as_numbers)


def read_values(case: Case) -> Read:
    """The numbers of a regression."""
    return Read(Field(_beside(case), bounds=UNBOUNDED, kind=case.kind or Value()), as_numbers)


def _beside(case: Case) -> tuple[int, ...]:
    """The target's shape, which must be the output's up to axes of length 1."""
    if case.target.core != _core(case.scores):
        raise TaskError(
            f"The model's output for one example has shape {case.output}, the target {case.target.shape}: this loss "
            "compares entry with entry. Class indices need cross_entropy; otherwise give both the same shape."
        )
    return case.target.shape


def read_by_shape(case: Case) -> Read:
    """The target of a loss that is not torch's: class indices beside class scores; all else has two readings."""
    y, one = case.target, math.prod(case.scores) == 1
    if y.whole and one and not y.core:
        raise _ambiguous(case, "whole numbers beside one output", "a yes-or-no answer", "a regression")
    if y.core == _core(case.scores):
        raise _ambiguous(case, "a target of the output's shape", "several labels at once, each 0 or 1", "a regression")
    if case.predicts_tokens and y.whole and y.shape == case.x.shape:
        return read_tokens(case)
    return read_classes(case)


def _ambiguous(case: Case, what: str, first: str, second: str) -> TaskError:
    name = type(case.loss).__name__ if isinstance(case.loss, nn.Module) else getattr(case.loss, "__name__", "loss")
    return TaskError(
        f"The loss {name!r} is not one of torch, and {what} ({case.target.shape}, {case.target.dtype}, output "
        f"{case.output}) has two readings: {first} (pass target='multi-label'), or {second} (pass target='value'). "
        "Probabilities of classes are target='category'."
    )


READERS: dict[str | None, Callable[[Case], Read]] = {
    "classes": read_classes,
    "labels": read_labels,
    "values": read_values,
    None: read_by_shape,
}
"""By family of the loss."""
TARGETS: dict[str, Callable[[Case], Read]] = {
    "category": read_classes,
    "class-map": read_classes,
    "multi-label": read_labels,
    "value": read_values,
    "tokens": read_tokens,
    NEXT_TOKEN: read_next_token,
}
"""By what the caller says."""


def reader_of(case: Case) -> Callable[[Case], Read]:
    """What the caller says comes first: the number of classes, the target; then the loss."""
    if case.classes is not None:
        return read_given_classes
    if case.said is None:
        return READERS[family_of(case.loss)]
    name = case.said.name if isinstance(case.said, Kind) else case.said
    if name not in TARGETS:
        raise TaskError(f"{name!r} is no target: the targets are {', '.join(TARGETS)}.")
    return TARGETS[name]


# --- inputs -----------------------------------------------------------------------------------------------------------


def entries_of(inputs: Any, reading: Reading) -> list[Entry]:
    """The inputs of a model: one tensor, a tuple (x, x2, x3), or a dict by argument (the first private one is x)."""
    named = isinstance(inputs, Mapping)
    if not named:
        values = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        inputs = {"x" if number == 1 else f"x{number}": value for number, value in enumerate(values, start=1)}
    public = {*PUBLIC, *reading.public}
    private = [name for name in inputs if name not in public]
    if not private:
        raise TaskError(f"Every input is public ({', '.join(inputs)}): nothing is private, and nothing can leak.")
    if unknown := set(reading.public) - set(inputs):
        raise TaskError(f"public names {', '.join(sorted(unknown))}; the inputs are {', '.join(inputs)}.")
    first = "x" if "x" in private else private[0]
    entries = []
    for name, value in inputs.items():
        example = example_of(name, value)
        field = "x" if name == first else name
        input_ = Input(field, name if named else None, example.dtype == torch.bool)
        kind = kind_of(reading.kind) if field == "x" else Mask() if name == PUBLIC[0] else None
        entries.append(Entry(input_, example, kind, name in public))
    names = [each.input.field for each in entries]
    if len(set(names)) < len(names) or "y" in names:
        raise TaskError(f"The inputs would be called {', '.join(names)}; x is the first private one and y the target.")
    return entries


def example_of(name: str, value: Any) -> Example:
    """Shape and type of a tensor, and nothing else of it."""
    if not isinstance(value, Tensor) or not value.dim():
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TaskError(f"{name!r} needs to be a tensor with a batch axis; given {shape}.")
    return Example(tuple(value.shape[1:]), value.dtype)


def kind_of(named: Kind | str | None) -> Kind | None:
    """A kind by its name."""
    if not isinstance(named, str):
        return named
    if named not in KINDS:
        raise TaskError(f"There is no kind {named!r}: the kinds are {', '.join(KINDS)}.")
    return KINDS[named]()


def field_of(entry: Entry, vocabulary: Vocabulary | None, reading: Reading) -> Field:
    """The field of an input."""
    name, shape, kind = entry.input.field, entry.example.shape, entry.kind
    if not entry.whole:
        scale = (_floats(reading.mean), _floats(reading.std)) if name == "x" else ((0.0,), (1.0,))
        bounds = reading.bounds if name == "x" else None
        bounds = _bounds(shape, kind) if bounds is None else bounds
        return Field(shape, bounds, *scale, kind=kind, public=entry.public)  # type: ignore[arg-type]
    if entry.input.boolean or isinstance(kind, Mask):
        return Field(shape, classes=2, kind=kind, public=entry.public)  # type: ignore[arg-type]
    if vocabulary is None:
        raise TaskError(
            f"Input {name!r} holds whole numbers, and no nn.Embedding of the model takes it: how many there are is not "
            "known. If they are quantities, convert them to floating point; if they are ids, use Task.from_batch with "
            f"fields={{{name!r}: Field(shape, classes=...)}}."
        )
    if kind is None:
        kind = Tokens() if shape else Category()
    if isinstance(kind, Tokens) and kind.padding is None:
        kind = replace(kind, padding=vocabulary.padding)
    return Field(shape, classes=vocabulary.rows, kind=kind, public=entry.public)


def _bounds(shape: tuple[int, ...], kind: Kind | None) -> Bounds:
    """What values can be, if nobody says it: a picture's pixels, the bounds of columns, any number."""
    if isinstance(kind, Table):
        return kind.limits()
    return (0.0, 1.0) if len(shape) == 3 and (kind is None or kind.name == "image") else UNBOUNDED


# --- the blank pass ---------------------------------------------------------------------------------------------------


class Trial:
    """A copy of the model in evaluation mode, run on blank inputs of the right shapes."""

    def __init__(self, model: nn.Module, entries: Sequence[Entry]) -> None:
        self.model = copy.deepcopy(model).eval()
        self.entries = entries
        self.like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        self.blank = {each.input.field: self._blank(each) for each in entries}
        self.embedded: dict[str, Vocabulary] = {}
        self.output = self._observed()

    def _blank(self, entry: Entry) -> Tensor:
        dtype = torch.long if entry.whole else self.like.dtype
        value = entry.kind.blank() if entry.whole and entry.kind is not None else 0
        return torch.full((TRIAL, *entry.example.shape), value, dtype=dtype, device=self.like.device)

    def run(self, batch: Mapping[str, Tensor]) -> Any:
        """What the model returns."""
        objective = Supervised(None, tuple(each.input for each in self.entries))
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                return objective.output(self.model, batch)
        except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError) as problem:
            shapes = [str(tuple(value.shape)) for value in batch.values()]
            named = shapes if len(shapes) == 1 else [f"{name} {shape}" for name, shape in zip(batch, shapes)]
            raise TaskError(
                f"The model does not accept a batch of shape {', '.join(named)} as read off like=(x, y): {problem}. "
                "Check channels and size, and that `like` has a batch axis."
            ) from problem

    def _observed(self) -> Any:
        """The output, with the embedding noted that each input of whole numbers reaches."""
        calls: list[tuple[Any, Tensor]] = []
        embeddings = [each for each in self.model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
        note = lambda module, args: calls.append((module, args[0])) if args else None  # noqa: E731
        handles = [each.register_forward_pre_hook(note) for each in embeddings]
        try:
            output = self.run(self.blank)
        finally:
            for handle in handles:
                handle.remove()
        for entry in self.entries:
            ids = self.blank[entry.input.field]
            if not entry.whole or entry.input.boolean:
                continue
            # Views of the ids share their memory; ids that were shifted first have their shape.
            reached = [layer for layer, value in calls if value.data_ptr() == ids.data_ptr()]
            reached = reached or [layer for layer, value in calls if value.shape == ids.shape]
            sizes = {Vocabulary(layer.num_embeddings, layer.padding_idx) for layer in reached}
            if len({size.rows for size in sizes}) > 1:
                raise TaskError(
                    f"Input {entry.input.field!r} reaches embeddings of {sorted(size.rows for size in sizes)} rows: "
                    "its columns have vocabularies of their own. Make each an input of its own, or use from_batch."
                )
            if sizes:
                self.embedded[entry.input.field] = sizes.pop()
        return output

    def is_causal(self) -> bool | None:
        """Does no place look at later ones? None: the scores do not depend on the last token, or there is only one."""
        vocabulary = self.embedded["x"]
        words = [number for number in range(min(3, vocabulary.rows)) if number != vocabulary.padding]
        if len(words) < 2 or self.blank["x"].shape[-1] < 2:
            return None
        text = torch.full_like(self.blank["x"], words[0])
        other = text.clone()
        other[:, -1] = words[1]
        before, after = (prediction_of(self.run({**self.blank, "x": each})) for each in (text, other))
        rounding = 8 * torch.finfo(before.dtype).eps * before.abs().max()
        changed = ((before - after).abs() > rounding).any(-1).any(0)  # (length,)
        return None if not changed.any() else not bool(changed[:-1].any())


# --- tasks ------------------------------------------------------------------------------------------------------------


def supervised(model: nn.Module, loss: Any, like: Any, reading: Reading) -> tuple[Supervised, dict[str, Field]]:
    """Objective and fields of `Task.supervised`."""
    label = _label_of(like, needed=True) if isinstance(like, Mapping) else None
    inputs, target = pair_of(like) if label is None else (_without(like, label), like[label])
    entries = entries_of(inputs, reading)
    if any(each.input.field == "x" and not each.example.shape and not each.whole for each in entries):
        raise TaskError("like=(x, y) needs x with a batch axis and at least one more; given shape (examples,).")
    y = None if target is None else example_of("y", target)
    # Given classes and no ids, the model need not be asked.
    asked = reading.classes is None or y is None or any(each.whole for each in entries)
    trial = Trial(model, entries) if asked else None
    embedded = {} if trial is None else trial.embedded
    fields = {each.input.field: field_of(each, embedded.get(each.input.field), reading) for each in entries}
    fields = {"x": fields["x"], **fields}
    case = Case(
        loss,
        None if trial is None else tuple(prediction_of(trial.output).shape[1:]),
        y,
        fields["x"],
        None if trial is None else trial.is_causal,
        reading.target,
        classes=reading.classes,
        labelled=label is not None,
    )
    read = reader_of(case)(case)
    objective = Supervised(
        loss, tuple(each.input for each in entries), label, "x" if read.field is None else "y", read.meet
    )
    return objective, fields if read.field is None else {**fields, "y": read.field}


def from_batch(
    model: nn.Module, loss: Any, batch: Mapping[str, Tensor], fields: Mapping[str, Field], public: Sequence[str]
) -> tuple[BatchLoss, dict[str, Field]]:
    """Objective and fields of `Task.from_batch`."""
    label = _label_of(batch, needed=False)
    entries = entries_of(_without(batch, label), Reading(public=public))
    own = {each.input.field: str(each.input.argument) for each in entries} | ({} if label is None else {"y": label})
    declared = {field: fields.get(name, fields.get(field)) for field, name in own.items()}
    if unknown := set(fields) - set(own) - set(own.values()):
        raise TaskError(f"fields names {', '.join(sorted(unknown))}; the batch has {', '.join(batch)}.")
    entries = [_as_declared(each, declared[each.input.field]) for each in entries]
    passed = _accepted(model, entries) if loss is not None else entries
    if loss is None and label is not None:
        target = Entry(Input("y", label), example_of(label, batch[label]), None, public=False)
        passed = [*passed, _as_declared(target, declared["y"])]
    known = {field: value for field, value in declared.items() if value is not None}
    needed = [each for each in passed if each.whole and each.input.field not in known]
    undeclared = label is not None and "y" not in known
    trial = Trial(model, passed) if needed or undeclared else None
    embedded = {} if trial is None else trial.embedded
    for each in entries:
        if each.input.field not in known:
            known[each.input.field] = field_of(each, embedded.get(each.input.field), Reading())
    if label is not None and undeclared and trial is not None:
        known["y"] = _label_field(loss, label, example_of(label, batch[label]), known["x"], trial)
    order = {"x": known["x"], **{field: known[field] for field in own}}
    return BatchLoss(loss, tuple(each.input for each in passed), label, tuple(own.items())), order


def _label_field(loss: Any, label: str, y: Example, x: Field, trial: Trial) -> Field:
    """The target of `Task.from_batch`: numbers by their shape, ids by the classes of the model's output."""
    if not y.whole:
        return Field(y.shape, bounds=UNBOUNDED, kind=Value())
    try:
        case = Case(loss, tuple(prediction_of(trial.output).shape[1:]), y, x)
        tokens = case.predicts_tokens and y.shape == x.shape
        field = (read_tokens if tokens else read_classes)(case).field
    except TaskError as problem:
        raise TaskError(
            f"{label!r} holds whole numbers, and how many classes there are is not known: pass fields={{{label!r}: "
            f"Field({y.shape}, classes=...)}}, or convert it to floating point if it is a quantity. ({problem})"
        ) from problem
    assert field is not None
    return field


def _label_of(batch: Mapping[str, Any], *, needed: bool) -> str | None:
    """The name of the target in a batch."""
    names = [name for name in LABELS if name in batch]
    if len(names) == 1 or not (names or needed):
        return names[0] if names else None
    raise TaskError(
        f"The batch has {', '.join(batch)}: its target must have one of the names {', '.join(LABELS)}, and "
        f"{'these are several' if names else 'none has'}. Pass like=({{inputs by name}}, target), or use "
        "Task.from_batch."
    )


def _as_declared(entry: Entry, field: Field | None) -> Entry:
    return entry if field is None else entry._replace(kind=field.kind)


def _accepted(model: nn.Module, entries: list[Entry]) -> list[Entry]:
    """The entries that `forward` has arguments for; x alone, by position, if it has none."""
    parameters = inspect.signature(model.forward).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return entries
    named = [each for each in entries if each.input.argument in parameters]
    return named or [each._replace(input=replace(each.input, argument=None)) for each in entries if _is_x(each)]


def _is_x(entry: Entry) -> bool:
    return entry.input.field == "x"


def _without(batch: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    return {key: value for key, value in batch.items() if key != name}


def _core(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape without its axes of length 1."""
    return tuple(length for length in shape if length != 1)


def _floats(value: float | Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),)
