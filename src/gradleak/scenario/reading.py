"""How loss, output and target are read: which kind of target it is, and how the loss is called."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.scenario.fields import UNBOUNDED, Field, TaskError
from gradleak.scenario.inputs import Entry, Example, Reading, Trial, core_of, entries_of, example_of, field_of
from gradleak.scenario.kinds import ClassMap, Kind, MultiLabel, Tokens, Value
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
SHIFTED = "labels"
NEXT_TOKEN = "next-token"


@dataclass(frozen=True)
class Case:
    """One target to be read, with all that a reader may look at.

    output      shape of one prediction; None: the model was not asked, since the classes are given
    is_causal   does no place look at later ones?
    said        what the caller says of the target
    shifts_labels   the target is called as Hugging Face calls it, whose models move it by one place themselves
    """

    loss: Any
    output: tuple[int, ...] | None
    y: Example | None
    x: Field
    is_causal: Callable[[], bool | None] | None = None
    said: Kind | str | None = None
    classes: int | None = None
    shifts_labels: bool = False

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
            return Read(Field(places, classes=classes, kind=_kind_at(places, case)), meet)  # type: ignore[arg-type]
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
    return Read(Field(places, classes=case.classes, kind=_kind_at(places, case)), meet)  # type: ignore[arg-type]


def _kind_at(places: tuple[int, ...], case: Case) -> Kind | None:
    """The kind of a class target: one at every place knows the index that the loss leaves out."""
    kind = ClassMap() if places and case.kind is None else case.kind
    if isinstance(kind, ClassMap) and kind.ignored is None:
        return replace(kind, ignored=ignored_by(case.loss))
    return kind


def _advice(y: Example, scores: tuple[int, ...]) -> str:
    if y.core == core_of(scores[1:]):
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
    if causal and (case.y is None or case.shifts_labels):
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
    if case.target.shape != case.scores[:-1] or not case.target.shape or not case.target.whole:
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
    if case.target.core != core_of(case.scores):
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
    if y.core == core_of(case.scores):
        raise _ambiguous(case, "a target of the output's shape", "several labels at once, each 0 or 1", "a regression")
    if case.predicts_tokens and y.whole and y.shape == case.x.shape:
        return read_tokens(case)
    return read_classes(case)


def _ambiguous(case: Case, what: str, first: str, second: str) -> TaskError:
    name = type(case.loss).__name__ if isinstance(case.loss, nn.Module) else getattr(case.loss, "__name__", "loss")
    return TaskError(
        f"The loss {name!r} does not say what its targets are, and {what} ({case.target.shape}, {case.target.dtype}, "
        f"output {case.output}) has two readings: {first} (pass target='multi-label'), or {second} (pass "
        "target='value'). "
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
        shifts_labels=label == SHIFTED,
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
