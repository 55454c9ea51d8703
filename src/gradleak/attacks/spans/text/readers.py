"""Which linear maps of a model of texts read tokens, what each row depends on, and what their gradients span.

A row of a map that reads tokens belongs to one place of one text. The rows of the first maps depend on the token at
their place alone; behind an attention they depend on earlier places too, or on all. Nothing here knows an
architecture: the maps come from `identify.ledger`, and probes with changed tokens show what their rows depend on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from gradleak.attacks.spans.unsent import completed
from gradleak.core import random as randomness
from gradleak.core.random import Draws
from gradleak.core.tree import Params
from gradleak.identify.ledger import Entry, Ledger, ledger
from gradleak.identify.rounding import rounding_of, spectral_spread
from gradleak.parts.predictions import assumed_in, gradient, noise_share, sent_entries
from gradleak.parts.view import TargetView
from gradleak.scenario.kinds import Tokens
from gradleak.scenario.observation import Observation
from gradleak.scenario.task import Batch, Task

READING = ("linear", "attention", "recurrent")  # kinds of maps in the ledger whose rows are tokens
LOOKED_AT = 16  # of the first maps
CHANGED = 1e-5  # relative: a row that moves by more depends on the token that was changed
AT_ONCE = 8192  # tokens in one pass
ROUNDINGS = 2.5  # of the client's arithmetic: 3e-7 of the largest singular value in float32
LEAST = 1e-13  # of the largest singular value: what a decomposition in float64 resolves
GAP, STEEP = 2.0, 10.0  # in a spectrum that ends above the rounding, and in one that does not
SHEER = 30.0  # a gap that no chance makes
ZERO = 3e-8  # a share outside below this is the rounding of float64 under a root
COMPLETED = (8, 16, 32, 64, 128)  # ranks that are tried where entries were not sent
LARGE = 1024  # the least side of a matrix that is sketched
SPARE, TURNS = 2, 3  # directions of a sketch for each token: half of them are noise; passes over the matrix
ROOM = 8  # dimensions outside of a span: with fewer, rows are inside by chance
RANKS = 6  # of the largest gaps in a spectrum, tried as its end


class Sees(Enum):
    """Which tokens of a text the row at a place depends on."""

    OWN = "the token at its place"
    EARLIER = "tokens up to its place"
    ALL = "all tokens"


@dataclass(frozen=True, eq=False)
class Reader:
    """Linear maps with the same rows, one for each place of a text."""

    entry: Entry
    sees: Sees

    @property
    def module(self) -> str:
        return self.entry.layers[0]


@dataclass(frozen=True, eq=False)
class Readers:
    """The maps of a model that read tokens, in the order of the forward pass.

    placed     do the rows of the first maps depend on the place, as with learned positions?
    shortened  may a text be cut behind a place, without a change of the rows before?
    """

    ledger: Ledger
    own: tuple[Reader, ...]
    context: tuple[Reader, ...]
    placed: bool
    shortened: bool

    @property
    def causal(self) -> bool:
        """Does no row depend on later tokens?"""
        return all(reader.sees is Sees.EARLIER for reader in self.context)


def readers_of(task: Task) -> Readers:
    """The maps that read every token, with what their rows depend on, by passes over tokens of noise.

    Only the first maps are looked at. Behind an attention later ones see what the last of these sees.
    """
    counted = ledger(task)
    length = task.fields["x"].shape[0]
    entries = [each for each in counted.entries if not each.reason and each.kind in READING and each.places == length]
    if not entries:
        return Readers(counted, (), (), placed=False, shortened=False)
    draws = Draws(randomness.key("text readers"))
    ids = (draws.uniform((1, length)) * (task.fields["x"].classes or 1)).long()
    first, last = ids.clone(), ids.clone()
    first[:, 0], last[:, -1] = other_token(task, ids[:, 0]), other_token(task, ids[:, -1])
    passes = Passes.blank(task)
    rows = passes.rows(torch.cat([ids, first, last]), [each.layers[0] for each in entries[:LOOKED_AT]])
    readers = [Reader(each, sees) for each in entries[:LOOKED_AT] if (sees := _sees(rows[each.layers[0]])) is not None]
    own = tuple(each for each in readers if each.sees is Sees.OWN)
    context = tuple(each for each in readers if each.sees is not Sees.OWN)
    if context:
        context += tuple(Reader(each, context[-1].sees) for each in entries[LOOKED_AT:])
    placed = length > 1 and bool(own) and _is_placed(passes, own[0], ids)
    same = [*own[:1], *(each for each in context[:1] if each.sees is Sees.EARLIER)]
    shortened = length > 1 and bool(own) and _is_shortened(passes, [each.module for each in same], ids, rows)
    return Readers(counted, own, context, placed, shortened)


def _sees(rows: Tensor) -> Sees | None:
    """From the rows of a text, of one with another first token, and of one with another last token."""
    by_first, by_last = _moved(rows[0], rows[1]), _moved(rows[0], rows[2])
    if not by_first[0]:
        return None  # not a row of the token at its place
    if bool(by_last[:-1].any()):
        return Sees.ALL
    return Sees.EARLIER if bool(by_first[1:].any()) else Sees.OWN


def other_token(task: Task, ids: Tensor) -> Tensor:
    """Ids that differ from these."""
    return (ids + 1) % (task.fields["x"].classes or 1)


def _moved(before: Tensor, after: Tensor) -> Tensor:
    """(places,): did the row change?"""
    return (before - after).norm(dim=-1) > CHANGED * before.norm(dim=-1)


def _is_placed(passes: Passes, reader: Reader, ids: Tensor) -> bool:
    repeated = ids[:, :1].expand_as(ids)
    rows = passes.rows(repeated, [reader.module])[reader.module][0]
    return bool(_moved(rows[:1].expand_as(rows), rows).any())


def _is_shortened(passes: Passes, names: Sequence[str], ids: Tensor, whole: Params) -> bool:
    """Do the first half of the tokens alone give the same rows? Models of a fixed length fail."""
    half = max(1, ids.shape[1] // 2)
    try:
        rows = replace(passes, shortened=True).rows(ids[:, :half], names)
    except (RuntimeError, ValueError, IndexError):
        return False
    return not any(bool(_moved(whole[name][0, :half], rows[name][0]).any()) for name in names)


# --- passes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Passes:
    """Texts of the attacker's own through the first layers of the model, as the client's layout has them.

    layout     the other fields of one example, (1, ...): public inputs, and a blank target
    start      places of padding before every text, that the attention does not see
    shortened  are texts cut behind their last token? Otherwise they are filled up to the full length
    """

    task: Task
    weights: Params
    buffers: Params | None
    layout: Batch
    start: int = 0
    shortened: bool = False

    @staticmethod
    def blank(task: Task) -> Passes:
        return Passes(task, task.weights(), None, {n: v for n, v in task.blank(1).items() if n != "x"})

    @property
    def length(self) -> int:
        return self.task.fields["x"].shape[0]

    @property
    def padding(self) -> int:
        kind = self.task.fields["x"].kind
        assert isinstance(kind, Tokens)
        return kind.padding or 0

    def rows(self, ids: Tensor, names: Sequence[str], last: bool = False) -> Batch:
        """The input rows of these modules for texts (texts, places): (texts, places, width) by module.

        last   of the last place alone, (texts, 1, width)
        """
        places = ids.shape[1]
        kept = slice(self.start + places - 1 if last else self.start, self.start + places)
        parts = ids.split(max(1, AT_ONCE // (self.start + places)))
        pieces = [{name: rows[:, kept] for name, rows in self._pass(part, names).items()} for part in parts]
        return {name: torch.cat([piece[name] for piece in pieces]) for name in names}

    def through(self, ids: Tensor, name: str) -> Tensor:
        """What a module sees, (texts, places of the layout, width), with its graph."""
        return self._batch_rows(ids, [name])[name]

    def _pass(self, ids: Tensor, names: Sequence[str]) -> Batch:
        with torch.no_grad():
            return self._batch_rows(ids, names)

    def _batch_rows(self, ids: Tensor, names: Sequence[str]) -> Batch:
        after = 0 if self.shortened else self.length - self.start - ids.shape[1]
        whole = torch.nn.functional.pad(ids, (self.start, after), value=self.padding)
        batch: Batch = {"x": whole.to(next(iter(self.weights.values())).device)}
        for name, value in self.layout.items():
            if self.task.fields[name].shape[:1] == (self.length,):
                value = value[:, : whole.shape[1]]
            batch[name] = value.expand(len(whole), *value.shape[1:])
        rows = self.task.inputs_of(names, self.weights, batch, self.buffers, whole=False)
        return {name: value.reshape(*whole.shape, -1) for name, value in rows.items()}  # some models flatten places


# --- spans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Span:
    """What the gradient of a reader spans: right singular vectors (k, width) with their values, as shares of the first.

    ranks   where the spectrum may end, the likeliest first: at its largest gaps, where the rounding begins, or where
            noise of an unknown size does
    filled  are all directions above the floor, one for each output? Then they may be a part of the rows' span
    whole   are there fewer directions than outputs, so that they span all rows, and not a part?
    """

    reader: Reader
    values: Tensor
    directions: Tensor
    floor: float
    ranks: tuple[int, ...]
    rank: int
    filled: bool = False

    @property
    def whole(self) -> bool:
        return self.rank < min(self.reader.entry.outputs, self.reader.entry.inputs)

    @property
    def gap(self) -> float:
        """The last value over the next, which counts as the floor at least."""
        following = float(self.values[self.rank]) if self.rank < len(self.values) else 0.0
        return float(self.values[self.rank - 1]) / max(following, self.floor)

    def outside(self, rows: Tensor, ranks: Sequence[int] = ()) -> Tensor:
        """How far rows (..., width) are outside: length of what is left over their length; (ranks, ...) for several."""
        rows = rows.to(self.directions)
        ends = torch.tensor([*ranks] or [self.rank], device=rows.device)
        inside = (rows @ self.directions[: int(ends.max())].T).square().cumsum(-1)[..., ends - 1]
        whole = rows.square().sum(-1, keepdim=True)
        shares = torch.where(whole > 0, 1 - inside / whole, 1.0)  # a row of zeros, such as padding's, says nothing
        left = shares.clamp_min(ZERO**2).sqrt().movedim(-1, 0)
        return left if ranks else left[0]

    def rounding(self, rows: Tensor) -> Tensor:
        """How far a client's rows come to lie outside, since weak directions are known by few digits: (...)."""
        rows = rows.to(self.directions)
        tilts = (self.floor / self.values[: self.rank]).square().clamp_max(1)
        inside = (rows @ self.directions[: self.rank].T).square() @ tilts
        return (inside / rows.square().sum(-1).clamp_min(1e-300)).clamp_min(ZERO**2).sqrt()


@dataclass(frozen=True, eq=False)
class Update:
    """An observation as a mean gradient, with what is known of its digits, its noise and its mask.

    sent   which entries were sent, where a known defence drops some; None: all
    """

    scene: TargetView
    seen: Observation
    gradient: Params
    sent: Params | None

    @staticmethod
    def of(scene: TargetView, seen: Observation) -> Update:
        known = scene.knows.defence is not None
        observed = assumed_in(scene).visible(gradient(scene), scene) if known else gradient(scene)
        sent = sent_entries(scene) if known else {}
        return Update(scene, seen, observed, None if all(bool(each.all()) for each in sent.values()) else sent)

    def matrix(self, entry: Entry) -> Tensor | None:
        """The gradients of maps with the same rows, (outputs, inputs): each at length one, since some are far smaller.

        None where nothing was sent. Entries that a known defence dropped are completed, or stay zero.
        """
        parts = []
        for name in entry.weights:
            part = self._whole(name, entry)
            if float(length := part.norm()) > 0:
                parts.append(part / length)
        return torch.cat(parts) if parts else None

    def _whole(self, name: str, entry: Entry) -> Tensor:
        value = self.gradient[name].double()
        there = torch.ones_like(value, dtype=torch.bool) if self.sent is None else self.sent[name]
        value, there = (side.T if entry.turned else side.flatten(1) for side in (value, there))
        if bool(there.all()) or not bool(there.any()):
            return value * there
        holes = torch.where(there, value, torch.nan)
        draws = Draws(randomness.key("unsent text", name))
        for rank in (rank for rank in COMPLETED if 2 * rank < min(value.shape)):
            if (whole := completed(holes, rank, draws)) is not None:
                return whole.nan_to_num(0.0)
        return value * there

    def floor(self, entry: Entry, matrix: Tensor, largest: float) -> float:
        """The share of the largest singular value below which there is only rounding, or a known defence's noise."""
        weights, update = (
            {name: side[name] for name in entry.weights} for side in (self.seen.weights, self.seen.update)
        )
        wire = rounding_of(Observation(weights, update, self.seen.num_examples)).wire
        computed = min(wire, torch.finfo(torch.float32).eps)
        noise = noise_share(self.scene, entry.weights, dropped=0.0)
        return max(LEAST, ROUNDINGS * computed + (wire + noise) * spectral_spread(matrix, largest))


def span_of(reader: Reader, update: Update, most: int) -> Span | None:
    """The span of a reader's gradient; None where it was not sent, or fills the whole width.

    most   tokens in the update, at the most: there are no more directions
    """
    if (matrix := update.matrix(reader.entry)) is None:
        return None
    values, directions = _decomposed(matrix, most)
    largest = float(values[0])
    floor, values = update.floor(reader.entry, matrix, largest), values / largest
    above = int((values > floor).sum())
    if above < 1:
        return None
    clamped = values.clamp_min(floor)
    gaps = clamped[:-1] / clamped[1:]
    least = GAP if above < min(matrix.shape) else STEEP
    likely = [int(place) + 1 for place in gaps.topk(min(RANKS, len(gaps))).indices if float(gaps[place]) > least]
    beyond = int((values > _edge(matrix) * values.median()).sum())  # more than noise of any size, if it has a half
    ranks = [rank for rank in dict.fromkeys((*likely, above, beyond)) if 0 < rank < matrix.shape[1]]
    most = matrix.shape[1] - max(ROOM, matrix.shape[1] // 20)
    tall = matrix.shape[0] > 2 * matrix.shape[1]  # the least value of a square matrix of noise is tiny too
    roomy = [rank for rank in ranks if rank <= most or (tall and float(gaps[rank - 1]) > SHEER)]
    ranks = roomy or ranks
    filled = above == matrix.shape[0] < matrix.shape[1]
    return Span(reader, values, directions, floor, tuple(ranks), ranks[0], filled) if ranks else None


def _edge(matrix: Tensor) -> float:
    """The largest singular value of a matrix of noise over the median one, about (Marchenko and Pastur, 1967)."""
    root = (min(matrix.shape) / max(matrix.shape)) ** 0.5
    return (1 + root) / (1 - 0.19 * root)


def _decomposed(matrix: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Singular values and right singular vectors: of a large matrix of a low rank only those that count, by a sketch.

    Halko, Martinsson and Tropp (SIAM Review, 2011), with `TURNS` passes over the matrix that turn the sketch right.
    """
    count = SPARE * most + ROOM
    if min(matrix.shape) < max(LARGE, 2 * count):
        return torch.linalg.svd(matrix, full_matrices=False)[1:]
    draws = Draws(randomness.key("sketch").to(matrix.device))
    basis = draws.normal((matrix.shape[1], count), dtype=matrix.dtype)
    for _ in range(TURNS):
        basis = torch.linalg.qr(matrix.T @ (matrix @ torch.linalg.qr(basis).Q)).Q  # (inputs, count)
    _, values, turn = torch.linalg.svd(matrix @ basis, full_matrices=False)
    return values, turn @ basis.T
