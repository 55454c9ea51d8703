"""What enters a model: its inputs by name, their fields, and one run on a blank batch.

Of the client's batch only shapes and dtypes are looked at (`Example`). The model runs on a copy in evaluation mode: its
output has the number of classes, and its embeddings the sizes of vocabularies.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradleak.scenario.fields import UNBOUNDED, Bounds, Field, TaskError
from gradleak.scenario.kinds import KINDS, Category, Codes, Column, Kind, Mask, Table, Tokens
from gradleak.scenario.objectives import Input, Supervised, prediction_of

PUBLIC = ("attention_mask", "token_type_ids", "position_ids")
"""Inputs that count as known to the server unless they are private by declaration: they reveal lengths at most."""
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
        return core_of(self.shape)


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

    @property
    def has_ids(self) -> bool:
        """Does it hold ids, whose number only an embedding shows?"""
        return self.whole and not self.input.boolean and not isinstance(self.kind, Mask)


class Vocabulary(NamedTuple):
    """The embedding that an input reaches: its number of rows, and the row of padding.

    columns   rows by place, where places have embeddings of different sizes; 0: which one a place has is not known
    """

    rows: int
    padding: int | None
    columns: tuple[int, ...] = ()


# --- inputs -----------------------------------------------------------------------------------------------------------


def entries_of(inputs: Any, reading: Reading) -> list[Entry]:
    """The inputs of a model: one tensor, a tuple (x, x2, x3), or a dict by argument.

    x is the first private one that holds numbers, which a search can move, else the first private one.
    """
    named, kind = isinstance(inputs, Mapping), kind_of(reading.kind)
    if not named:
        values = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        numbered = {f"x{number}": value for number, value in enumerate(values, start=1)}
        first = _primary(list(numbered), numbered, kind)
        inputs = {"x" if name == first else name: value for name, value in numbered.items()}
    public = {*PUBLIC, *reading.public}
    private = [name for name in inputs if name not in public]
    if not private:
        raise TaskError(f"Every input is public ({', '.join(inputs)}): nothing is private, and nothing can leak.")
    if unknown := set(reading.public) - set(inputs):
        raise TaskError(f"public names {', '.join(sorted(unknown))}; the inputs are {', '.join(inputs)}.")
    first = "x" if "x" in private else _primary(private, inputs, kind)
    entries = []
    for name, value in inputs.items():
        example = example_of(name, value)
        field = "x" if name == first else name
        input_ = Input(field, name if named else None, example.dtype == torch.bool)
        declared = kind if field == "x" else Mask() if name == PUBLIC[0] else None
        entries.append(Entry(input_, example, declared, name in public))
    names = [each.input.field for each in entries]
    if len(set(names)) < len(names) or "y" in names:
        raise TaskError(f"The inputs would be called {', '.join(names)}; x is the first private one and y the target.")
    return entries


def _primary(private: Sequence[str], inputs: Mapping[str, Any], kind: Kind | None) -> str:
    """The input that becomes x, the kind of which may be declared."""
    numbers = [name for name in private if isinstance(inputs[name], Tensor) and inputs[name].is_floating_point()]
    return numbers[0] if numbers and (kind is None or kind.continuous) else private[0]


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
    if not entry.has_ids:
        return Field(shape, classes=2, kind=kind, public=entry.public)  # type: ignore[arg-type]
    if vocabulary is None:
        raise TaskError(
            f"Input {name!r} holds whole numbers, and no nn.Embedding of the model takes it: how many there are is not "
            "known. If they are quantities, convert them to floating point; if they are ids, use Task.from_batch with "
            f"fields={{{name!r}: Field(shape, classes=...)}}."
        )
    if vocabulary.columns and not (isinstance(kind, Codes) and kind.columns):
        kind = _codes(entry, vocabulary)
    if kind is None:
        kind = Tokens() if shape else Category()
    if isinstance(kind, Tokens) and kind.padding is None:
        kind = replace(kind, padding=vocabulary.padding)
    return Field(shape, classes=vocabulary.rows, kind=kind, public=entry.public)


def _codes(entry: Entry, vocabulary: Vocabulary) -> Codes:
    """Columns with embeddings of their own: each has as many categories as its embedding has rows."""
    name, other = entry.input.field, entry.kind is not None and not isinstance(entry.kind, Codes)
    if other or not all(vocabulary.columns):
        reason = "which are columns (kind 'codes')" if other else "and which place reaches which is not known"
        raise TaskError(
            f"Input {name!r} reaches embeddings of different sizes, the largest with {vocabulary.rows} rows, {reason}. "
            f"Use Task.from_batch with fields={{{name!r}: Field({entry.example.shape}, classes={vocabulary.rows}, "
            "kind=Codes((Column(name, categories), ...)))}, one Column for each place."
        )
    columns = enumerate(vocabulary.columns)
    return Codes(tuple(Column(str(place), tuple(map(str, range(rows)))) for place, rows in columns))


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
        ids = {each.input.field: self.blank[each.input.field] for each in self.entries if each.has_ids}
        # Views of the ids, such as one column, share their memory.
        memory = {_address(value): field for field, value in ids.items()}
        reached: dict[str, list[tuple[Vocabulary, Tensor]]] = {field: [] for field in ids}
        others: list[tuple[Vocabulary, Tensor]] = []
        for layer, value in calls:
            vocabulary, field = Vocabulary(layer.num_embeddings, layer.padding_idx), memory.get(_address(value))
            (others if field is None else reached[field]).append((vocabulary, value))
        for field, direct in reached.items():
            # A copy, such as of another type, is equal to them; ids with an offset are not, and stay unknown.
            takers = direct or [each for each in others if torch.equal(each[1], ids[field].to(each[1]))]
            if takers:
                self.embedded[field] = _joined(takers, ids[field])
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


def _joined(takers: Sequence[tuple[Vocabulary, Tensor]], ids: Tensor) -> Vocabulary:
    """The vocabulary of an input, from the embeddings that take its ids, or views of them."""
    sizes = {vocabulary for vocabulary, _ in takers}
    if len({each.rows for each in sizes}) == 1:
        return min(sizes, key=lambda each: each.padding is None)
    # The same view of numbered places shows which places it has.
    numbered = torch.arange(ids.numel()) % ids[0].numel()
    rows: dict[int, set[int]] = {place: set() for place in range(ids[0].numel())}
    for vocabulary, value in takers:
        if _address(value) == _address(ids) and value.dtype == ids.dtype and ids.dim() == 2:
            for place in numbered.as_strided(value.shape, value.stride(), value.storage_offset()).unique().tolist():
                rows[place].add(vocabulary.rows)
    columns = tuple(max(each) if len(each) == 1 else 0 for each in rows.values())
    return Vocabulary(max(each.rows for each in sizes), None, columns)


def core_of(shape: Iterable[int]) -> tuple[int, ...]:
    """A shape without its axes of length 1."""
    return tuple(length for length in shape if length != 1)


def _address(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _floats(value: float | Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),)
