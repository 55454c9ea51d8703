"""TabLeak: rows of a table through softmaxes and sigmoids, pooled over many restarts, with a confidence per entry."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradleak.attack import Attack, Composed, Reconstruction, require, supported
from gradleak.attacks.settings import SearchSettings
from gradleak.attacks.spans.sparse import SHOWN, SparseSpan
from gradleak.core.assignment import cost_matrix, match
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.core.tree import Tree
from gradleak.engine import Engine
from gradleak.parts.fields import Nothing, label_rule
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import SignedAdam, Still, require_positive
from gradleak.parts.predictions import Replay
from gradleak.parts.protocols import Needs, Space
from gradleak.parts.spaces import Pixels
from gradleak.parts.stage import Stage
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.kinds import Table
from gradleak.scenario.observation import Knowledge, Seen, Track, as_targets
from gradleak.scenario.task import Batch, Task, TaskError

PAPER = "Vero, Balunovic, Dimitrov, Vechev, TabLeak: Tabular Data Leakage in Federated Learning, ICML 2023"
ANSWERS = ("match", "pooled")
ONE_HOT = 0.01  # a row whose blocks are this close to one category each was not made by chance
SMALLEST = 1e-6  # standard deviations: restarts that agree better than this agree to rounding


# --- the space --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the blocks and numbers of a row are, as tensors: one softmax does all blocks, one sigmoid all numbers.

    blocks    (blocks, widest): the entries of each one-hot block; short blocks are filled up with entry 0
    present   (blocks, widest): which of them belong to the block
    numbers   (numbers,): entries that are numbers
    low, high (numbers,): their bounds; `bounded`: those with a sigmoid
    order     (width,): places of the entries among [all blocks, all numbers]
    """

    blocks: Tensor
    present: Tensor
    numbers: Tensor
    low: Tensor
    high: Tensor
    bounded: Tensor
    order: Tensor

    @staticmethod
    def of(table: Table, widest: float, device: torch.device, dtype: torch.dtype) -> Layout:
        blocks = [list(range(place.start, place.stop)) for place in table.blocks]
        size = max((len(block) for block in blocks), default=1)
        places = {entry: row * size + at for row, block in enumerate(blocks) for at, entry in enumerate(block)}
        places |= {entry: len(blocks) * size + at for at, entry in enumerate(table.numbers)}
        limits = torch.tensor([table.limits()[entry] for entry in table.numbers], dtype=torch.float64).reshape(-1, 2)
        low, high = limits.to(device, dtype).unbind(1)
        bounded = low.isfinite() & high.isfinite() & (high - low <= widest)

        def whole(values: list[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=device)

        return Layout(
            blocks=whole([block + [0] * (size - len(block)) for block in blocks]).reshape(len(blocks), size),
            present=whole([[at < len(block) for at in range(size)] for block in blocks])
            .reshape(len(blocks), size)
            .bool(),
            numbers=whole(list(table.numbers)),
            low=torch.where(bounded, low, 0.0),
            high=torch.where(bounded, high, 1.0),
            bounded=bounded,
            order=whole([places[entry] for entry in range(table.width)]),
        )

    def decode(self, z: Tensor) -> Tensor:
        """Free numbers (rows, width) to rows: blocks that sum to one, numbers inside their bounds."""
        shares = torch.where(self.present, z[:, self.blocks], -torch.inf).softmax(-1)
        numbers = z[:, self.numbers]
        inside = self.low + (self.high - self.low) * numbers.sigmoid()
        numbers = torch.where(self.bounded, inside, numbers)
        return torch.cat([shares.flatten(1), numbers], dim=1)[:, self.order]


@dataclass(frozen=True, eq=False)
class SoftRows(Space):
    """Rows of a table as free numbers z, from U(-1, 1); `Layout.decode` makes rows of them.

    A start that holds `certain`, (examples,), has rows that are known: those of its `x` are fixed, the others searched.
    """

    layout: Layout

    @property
    def decoded(self) -> frozenset[str]:
        return frozenset({"x"})

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        shape = (scene.num_examples, *scene.task.fields["x"].shape)
        return {"z": 2 * draws.uniform(shape, dtype=scene.like.dtype) - 1}

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {} if before is None else {"x": before["x"], "certain": before["certain"]}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        rows = self.layout.decode(v["z"])
        if known := scene.constants:
            rows = torch.where(known["certain"][:, None], known["x"], rows)
        return {"x": rows}


# --- pooling ----------------------------------------------------------------------------------------------------------


def valid(table: Table, rows: Tensor) -> Tensor:
    """The nearest valid rows: one category in each block, numbers in their bounds, whole ones rounded."""
    low, high = (torch.tensor(side).to(rows) for side in zip(*table.limits(), strict=True))
    rows = table.hardened(rows.clamp(low, high))
    for column, place in table.places:
        if column.whole and not column.categories:
            rows[..., place] = ((rows[..., place] * column.std + column.mean).round() - column.mean) / column.std
    return rows


def aligned(table: Table, rows: Tensor, best: int, labels: Tensor) -> Tensor:
    """Every restart's rows, (restarts, rows, width), in the order of the `best` one's: a batch has no order.

    The assignment has the fewest wrong columns; only rows of equal label are put in each other's place.
    """
    hard, same = valid(table, rows), (labels, labels)
    order = [match(cost_matrix(hard[best], each, distance=table.distance, same_label=same)) for each in hard]
    return torch.stack([each[place] for each, place in zip(rows, order, strict=True)])


def pooled(rows: Tensor) -> Tensor:
    """The median over aligned restarts, (restarts, rows, width) -> (rows, width)."""
    return rows.quantile(0.5, dim=0)


def uncertainty(table: Table, rows: Tensor) -> Tensor:
    """How unsure each entry is, (rows, columns), from aligned restarts (restarts, rows, width); lower is surer.

    A category: the entropy of the pooled block over log(categories), from 0 to 1. A number: 1/2 log(2 pi e s^2), the
    entropy of a normal law with the deviation s over restarts, in standard deviations of the column; NaN for one.
    """
    middle, each = pooled(rows), []
    for column, place in table.places:
        if column.categories:
            shares = middle[:, place] / middle[:, place].sum(-1, keepdim=True)
            each.append(torch.special.entr(shares).sum(-1) / math.log(max(2, column.width)))
        else:
            spread = rows[:, :, place.start].std(0) if len(rows) > 1 else middle.new_full(middle.shape[:1], torch.nan)
            each.append(0.5 * torch.log(2 * math.pi * math.e * spread.clamp_min(SMALLEST).square()))
    return torch.stack(each, -1)


@dataclass(frozen=True, eq=False)
class Scored:
    """The match of candidates: scored(x, y) of rows (targets, candidates, examples, width) is (targets, candidates)."""

    task: Task
    targets: list[Track]
    knows: Knowledge
    engine: Engine

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        known = replace(self.knows, given={**self.knows.given, "y": y})
        attack = Composed("tableak", (Stage(Pixels(), Replay(), Cosine(), (), Still()),), Nothing())
        run = lambda rows: attack.run(self.task, self.targets, known, engine=self.engine, begin={"x": rows})  # noqa: E731
        return torch.cat([run(rows).match for rows in x.unbind(1)], dim=1)


# --- the attack -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TabLeakSettings(SearchSettings):
    """The exact search before, the search itself, the widest bounds with a sigmoid, and which rows are the answer."""

    steps: int = 1500
    lr: float = 0.06
    restarts: int = 30
    widest: float = math.inf
    answer: str = "match"
    exact: bool = True
    waves: int = 4

    def __post_init__(self) -> None:
        require_positive(self, whole=("steps", "restarts", "waves"), real=("lr", "widest"))
        if self.answer not in ANSWERS:
            raise ValueError(f"answer must be {' or '.join(map(repr, ANSWERS))}; given {self.answer!r}.")


@named("tableak", kind="attack", paper=PAPER)
@takes(TabLeakSettings)
def tableak(settings: TabLeakSettings) -> Attack:
    """Rows of a table: relaxed categories, bounded numbers, the direction of the gradient, a median over restarts.

    min over Z of 1 - cos(update(x(Z), y), observed) with x = softmax(Z) in every one-hot block and low + (high - low)
    sigmoid(Z) for every number with finite bounds; Adam on the sign of the gradient, Z from U(-1, 1). Each restart is
    scored by the match of its nearest valid rows. All are aligned to the best by assignment on wrong columns, and their
    median, made valid, is the pooled batch.

    Where the first layer is linear with a ReLU, `sparse-span` reads rows off its gradient first. Rows that it is sure
    of are fixed, and the search is for the others. `settings["certain"]` counts them for each target.

    `unknowns["uncertainty"]` of the result, (T, R, B, columns), says how unsure each entry is: see `uncertainty`. It is
    the same for all restarts. `settings["uncertainty"]` has its mean for each column by name.

    answer   "match": the best restart, or the pooled batch if that matches better. "pooled": always the pooled batch,
             as in the paper. papers/tableak has both
    exact    run `sparse-span` first, if it applies, with at most so many `waves`; the paper has no such step
    widest   bounds further apart than this many standard deviations get no sigmoid: a heavy tail leaves the bulk of a
             column in a corner of it. Numbers without finite bounds never have one

    Differs: rows of `sparse-span` first; the answer is chosen by match; one-hot entries are not standardised; the
    client's steps are replayed where its recipe is known; each restart keeps its iterate with the best match; rows of
    different labels are never aligned; only columns of whole numbers are rounded.
    """
    return TabLeak(settings)


@dataclass(frozen=True)
class TabLeak(Attack):
    """The search over all restarts, then scoring, alignment and pooling."""

    options: TabLeakSettings

    @property
    def name(self) -> str:
        return "tableak"

    @property
    def search_needs(self) -> Needs:
        return frozenset()

    @property
    def needs(self) -> Needs:
        return label_rule(self.options.labels).needs

    @property
    def work(self) -> int:
        return self.options.steps * self.options.restarts

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        field = task.fields.get("x")
        if field is None or not isinstance(field.kind, Table):
            return "it recovers rows of a table, and x is no table: give Task.supervised kind=Table(columns)"
        return "" if task.class_index else "it aligns restarts within classes, and y is no class index"

    def run(
        self,
        task: Task,
        seen: Seen,
        knows: Knowledge = Knowledge(),
        seed: int = 0,
        *,
        engine: Engine | None = None,
        progress: Share | None = None,
        begin: Batch | None = None,
    ) -> Reconstruction:
        """Attack one target or several.

        begin   rows that are known: "x" (targets, examples, width), and "certain" (targets, examples), which of them
        """
        supported(self, task, knows)
        require(self, knows)
        table, engine, targets, steps = table_of(task), engine or Engine(), as_targets(seen), self.options.steps
        settings: dict[str, Any] = {"certain": [0] * len(targets)}
        if begin is None and self.options.exact:
            knows, begin, settings = self._exact(task, targets, knows, seed, engine)
        if begin is not None and bool(begin["certain"].all()):
            steps = 1  # nothing is left to search for
        layout = Layout.of(table, self.options.widest, engine.where, engine.dtype)
        stage = Stage(SoftRows(layout), Replay(), Cosine(), (), SignedAdam(lr=self.options.lr, steps=steps))
        search = self.options.attack(self.name, stage)
        soft = search.run(task, targets, knows, seed, engine=engine, progress=progress, begin=begin)
        scored = Scored(task, targets, knows, engine)
        result = self._pooled(soft, table, scored)
        if begin is not None:  # rows that are nearly right may still explain the update better than those searched for
            rows = begin["x"].double().cpu()
            result = offered(result, "as begun", torch.where(rows.isnan(), rows, valid(table, rows)), scored)
        return replace(result, settings={**result.settings, **settings})

    def _exact(
        self, task: Task, targets: list[Track], knows: Knowledge, seed: int, engine: Engine
    ) -> tuple[Knowledge, Batch | None, dict[str, Any]]:
        """What `sparse-span` is certain of: the labels in the order of its rows, the rows, and how many there are."""
        try:
            found = SparseSpan(self.options.labels, self.options.waves).run(task, targets, knows, seed, engine=engine)
        except TaskError as reason:
            return knows, None, {"certain": [0] * len(targets), "exact": f"sparse-span does not apply: {reason}"}
        x, agreement = found.batch["x"], found.unknowns["agreement"][:, 0]
        sure = certain(table_of(task), x, agreement) | agreement.isnan()  # padding has nothing to be searched for
        settings = {"certain": (sure & ~agreement.isnan()).sum(1).tolist()}
        rows = torch.where(sure[..., None], valid(table_of(task), x), x)
        return replace(knows, given={**knows.given, "y": found.batch["y"]}), {"x": rows, "certain": sure}, settings

    def _pooled(self, soft: Reconstruction, table: Table, scored: Scored) -> Reconstruction:
        """Candidates made valid and scored; the pooled batch takes the place of the best restart where it wins."""
        x, y = soft.candidates["x"].double(), soft.candidates["y"][:, 0]
        hard = torch.where(x.isnan(), x, valid(table, x))  # padding stays
        scores = scored(hard, y)
        chosen = torch.where(scores.isnan(), torch.inf, scores).argmin(1)
        doubts = x.new_full((*x.shape[:3], len(table.columns)), torch.nan)
        together = hard[torch.arange(len(chosen)), chosen]
        for target, examples in enumerate(soft.examples):
            usable = scores[target].isfinite()
            if not usable[chosen[target]]:
                continue
            best = int(usable[: chosen[target]].sum())
            labels = y[target, :examples].argmax(-1) if y.is_floating_point() else y[target, :examples]
            rows = aligned(table, x[target, usable, :examples], best, labels)
            together[target, :examples] = valid(table, pooled(rows))
            doubts[target, :, :examples] = uncertainty(table, rows)
        names, mean = [column.name for column in table.columns], doubts[:, 0].nanmean((0, 1)).tolist()
        settings = {"attack": repr(self), "uncertainty": dict(zip(names, mean, strict=True))}
        result = replace(
            soft,
            candidates={**soft.candidates, "x": hard.to(soft.candidates["x"].dtype)},
            match=scores,
            objective=scores.clone(),
            chosen=chosen,
            unknowns={"uncertainty": doubts},
            settings={**soft.settings, **settings},
        )
        return offered(result, "pooled", together, scored, always=self.options.answer == "pooled")


def offered(result: Reconstruction, name: str, rows: Tensor, scored: Scored, *, always: bool = False) -> Reconstruction:
    """The result, with these valid rows, (targets, examples, width), for the chosen restart where they match better.

    `always`: wherever they are. `settings[name]` says for which targets they were taken.
    """
    every, chosen = torch.arange(len(result.chosen)), result.chosen
    score = scored(rows[:, None], result.candidates["y"][:, 0])[:, 0]
    wins = (score < result.match[every, chosen]) | always
    x, match = result.candidates["x"].clone(), result.match.clone()
    x[every[wins], chosen[wins]] = rows[wins].to(x.dtype)
    match[every[wins], chosen[wins]] = score[wins]
    candidates = {**result.candidates, "x": x}
    return replace(
        result,
        candidates=candidates,
        batch={field: value[every, chosen] for field, value in candidates.items()},
        match=match,
        objective=match.clone(),
        settings={**result.settings, name: wins.tolist()},
    )


def certain(table: Table, x: Tensor, agreement: Tensor) -> Tensor:
    """Which rows of `sparse-span` are taken as they are, (...): all zeros agree, or most do and the row is one-hot."""
    blocks = torch.cat([torch.arange(place.start, place.stop) for place in (*table.blocks, slice(0, 0))])
    one_hot = ((x - table.hardened(x)).abs() < ONE_HOT)[..., blocks].all(-1)
    return one_hot & ((agreement == 1) | ((agreement >= SHOWN) & (len(blocks) > 0)))


def table_of(task: Task) -> Table:
    """The columns of the private rows, where `refuses` found some."""
    kind = task.fields["x"].kind
    assert isinstance(kind, Table)
    return kind
