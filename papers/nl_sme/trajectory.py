"""The path of a client's weights: how straight it is, how well a quadratic Bezier curve follows it, and what one
gradient taken near it has to do with the update. The theory behind SME and NL-SME, measured on simulated clients.

Time runs from 0 at w_0 to 1 at w_T, one T-th for each local step; all errors are in units of ||w_T - w_0||, and an
integral over time is the trapezoidal sum over the steps. With s(t) = (1 - t) w_0 + t w_T and m = (w_0 + w_T) / 2:

    line      E^2 = int ||w(t) - s(t)||^2 dt: with both ends fixed there is nothing to choose
    Bezier    the same for W(t) = s(t) + 2 t (1 - t) (c - m), c by the normal equations

Two constants follow from e = w - s, e'' = w'', e(0) = e(1) = 0. Where w'' keeps its direction and ||w''|| >= k,
E^2 >= k^2 / 120, with equality for constant w'' (int t^2 (1 - t)^2 dt = 1 / 30). Where ||w''|| <= k, the Bezier curve
has E^2 <= k^2 / 480: subtract from w'' its mean, which is what the curve takes up; the odd part of the rest has
||e|| <= ||e''|| / (2 pi)^2, the even part ends flat, so that it obeys the clamped beam's ||e|| <= ||e''|| / 4.73^2, and
1 / 4.73^4 < 1 / 480. The first needs its premise: mini-batches turn the path at every step, and then a path can be
curved everywhere and close to its chord.

References: Zhu, Yao, Blaschko, ICML 2023 (SME); arXiv 2509.22082 (NL-SME), whose theorems these are the measured form
of. It states the error as an L1 norm and takes it for the root of E^2; the mean distance is at most that (Jensen).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from gradleak.core import tree
from gradleak.core.tree import Params
from gradleak.scenario.client import LocalTraining, observe
from gradleak.scenario.defence import Client, Compute, Defence
from gradleak.scenario.derivatives import double_backward_safe
from gradleak.scenario.rules import SGD, constant
from gradleak.scenario.task import Batch, Task

LINE, BEZIER = 1 / 120, 1 / 480  # of squared curvature, in unit time
GRID = 21  # points of a segment or curve at which gradients are taken
CHUNK = 4  # gradients at a time


# --- the path ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Recorder(Defence):
    """No defence: it keeps the weights at which every local step begins, and changes nothing."""

    points: list[Params] = field(default_factory=list)

    def gradient(self, compute: Compute, weights: Params, batch: Batch, client: Client) -> Params:
        self.points.append(weights)
        return compute(weights, batch)


@dataclass(frozen=True, eq=False)
class Path:
    """The weights w_0 .. w_T of one client, float64, and all that their distances depend on.

    points   T + 1 sets of weights
    gram     (T + 1, T + 1) inner products of w_t - w_0, on the CPU
    epoch    steps that go over all examples once
    """

    task: Task
    batch: Batch
    points: tuple[Params, ...]
    gram: Tensor
    epoch: int = 1

    def __post_init__(self) -> None:
        if len(self.points) < 3:
            raise ValueError(f"A path has two steps or more: one is its own chord; given {len(self.points) - 1}.")
        if not float(self.gram[-1, -1]) > 0:
            raise ValueError("The path ends where it began: there is no update to compare with.")

    @property
    def steps(self) -> int:
        return len(self.points) - 1

    @property
    def update(self) -> Params:
        """w_0 - w_T, as in an observation."""
        return tree.subtract(self.points[0], self.points[-1])

    def until(self, steps: int) -> Path:
        """The client that had stopped here: the same path where its schedule does not depend on the number of steps."""
        if not 2 <= steps <= self.steps:
            raise ValueError(f"steps goes from 2 to the {self.steps} of the path; given {steps}.")
        return replace(self, points=self.points[: steps + 1], gram=self.gram[: steps + 1, : steps + 1])


def recorded(
    task: Task,
    batch: Batch,
    training: LocalTraining,
    *,
    key: str = "target",
    seed: int = 0,
) -> Path:
    """The path of the client that `observe` with the same arguments runs: its steps, its shuffle, in float64."""
    where = tree.like(task.weights()).device
    work, own = task.to(where, torch.float64), tree.to(batch, where, torch.float64)
    recorder = Recorder()
    seen = observe(work, own, training, recorder, key=key, seed=seed)
    points = (*recorder.points, tree.subtract(seen.weights, seen.update))
    size = min(training.batch_size or seen.num_examples, seen.num_examples)
    return Path(work, own, points, gram_of(points), -(-seen.num_examples // size))


def gram_of(points: Sequence[Params]) -> Tensor:
    """Inner products of w_t - w_0, (T + 1, T + 1): distances along a path need no more of the weights."""
    total = torch.zeros(len(points), len(points), dtype=torch.float64)
    for name in points[0]:  # tensor by tensor: a copy of the whole path would double its memory
        moved = torch.stack([point[name].flatten() - points[0][name].flatten() for point in points]).double()
        total += (moved @ moved.T).cpu()
    return total


# --- its shape --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """How far the path is from a curve, in units of ||w_T - w_0||: E^2, its root, the mean and the largest distance."""

    squared: float
    rms: float
    mean: float
    largest: float


@dataclass(frozen=True)
class Shape:
    """A path against its chord and its best Bezier curve.

    length       ||w_T - w_0||
    detour       sum of the steps' lengths, over it
    gain         E^2 of the line over that of the Bezier curve; the roots' ratio is its root
    bend         ||c - m|| / ||w_T - w_0|| of the best control point
    curvature    ||w''|| by second differences over `stride` steps, along the path: over an epoch, mini-batch noise is
                 mostly averaged out. Empty where the path has no two such strides
    """

    steps: int
    length: float
    detour: float
    line: Fit
    bezier: Fit
    gain: float
    bend: float
    curvature: tuple[float, ...]
    stride: int

    @property
    def line_bound(self) -> float | None:
        """min ||w''||^2 / 120: E^2 of the line is at least this, where w'' keeps its direction."""
        return min(self.curvature) ** 2 * LINE if self.curvature else None

    @property
    def bezier_bound(self) -> float | None:
        """max ||w''||^2 / 480: E^2 of the Bezier curve is at most this, for a path as smooth as its strides."""
        return max(self.curvature) ** 2 * BEZIER if self.curvature else None


def _rows(gram: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of a path's Gram matrix: w_t - s_t and w_t - W_t as combinations of the w_t - w_0 (T + 1, T + 1); c - m as one
    (T + 1,); and the weights of the trapezoidal sum (T + 1,)."""
    steps = len(gram) - 1
    time = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    weights = _trapezoid(steps + 1)
    line = torch.eye(steps + 1, dtype=torch.float64)
    line[:, -1] -= time
    basis = 2 * time * (1 - time)
    control = (weights * basis) @ line / (weights * basis.square()).sum()  # the normal equations
    return line, line - basis[:, None] * control, control, weights


def shape(gram: Tensor, *, stride: int = 1) -> Shape:
    """The shape of the path with this Gram matrix; curvature over `stride` steps."""
    gram = gram.double().cpu()
    steps, square = len(gram) - 1, float(gram[-1, -1])
    line, curve, control, weights = _rows(gram)

    def squares(rows: Tensor) -> Tensor:
        """Squared lengths of combinations (n, T + 1), in units of ||w_T - w_0||^2."""
        return ((rows @ gram) * rows).sum(-1).clamp_min(0) / square

    def fit(rows: Tensor) -> Fit:
        away = squares(rows)
        squared = float(weights @ away)
        return Fit(squared, math.sqrt(squared), float(weights @ away.sqrt()), float(away.max().sqrt()))

    unit = torch.eye(steps + 1, dtype=torch.float64)
    middles = range(stride, steps - stride + 1, stride)
    bends = [unit[at - stride] - 2 * unit[at] + unit[at + stride] for at in middles]
    curvature = squares(torch.stack(bends)).sqrt() * (steps / stride) ** 2 if bends else torch.zeros(0)
    straight, bent = fit(line), fit(curve)
    return Shape(
        steps=steps,
        length=math.sqrt(square),
        detour=float(squares(unit[1:] - unit[:-1]).sqrt().sum()),
        line=straight,
        bezier=bent,
        gain=straight.squared / bent.squared if bent.squared else math.inf,
        bend=float(squares(control[None]).sqrt()),
        curvature=tuple(curvature.tolist()),
        stride=stride,
    )


def control(path: Path) -> Params:
    """c - m of the best Bezier curve, as weights."""
    _, _, combination, _ = _rows(path.gram)

    def combined(*values: Tensor) -> Tensor:
        return torch.tensordot(combination.to(values[0]), torch.stack(values) - values[0], dims=1)

    return tree.map(combined, *path.points)


# --- what a gradient near it says -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mismatch:
    """1 - cos of the update with gradients of ALL the client's examples: what an attack is left with at the truth.

    start, midpoint      at w_0 (IG-ms), and half way along the chord, where SME begins
    line, line_at        the lowest along the chord, and where: the best that SME can do
    bezier, bezier_at    the same along the best Bezier curve. NL-SME's point is freer than this one
    path                 the lowest at a point of the path itself
    along_line, along_bezier, along_path     of the mean gradient along them
    replays              by the number K of full-batch steps with the same total step (coarse replay)
    """

    start: float
    midpoint: float
    line: float
    line_at: float
    bezier: float
    bezier_at: float
    path: float
    along_line: float
    along_bezier: float
    along_path: float
    replays: dict[int, float] = field(default_factory=dict)


def _cosine_distances(gradients: Params, update: Params) -> Tensor:
    """1 - cos of each of (n, ...) gradients with the update, (n,)."""
    flat = {name: value.flatten(1) for name, value in gradients.items()}
    pairs = [(value, update[name].flatten()) for name, value in flat.items()]
    dots, own = (sum(value @ seen for value, seen in pairs), sum(value.square().sum(1) for value, _ in pairs))
    return (1 - dots / (torch.as_tensor(own).sqrt() * tree.norm(update))).detach().cpu()


def mismatch(path: Path, *, training: LocalTraining | None = None, replays: Sequence[int] = ()) -> Mismatch:
    """Gradients along chord, Bezier curve and path against the update, `CHUNK` of them at a time.

    `replays`: also coarse replays of so many steps; they need `training`, plain SGD with a constant rate.
    """
    task, update, bend = path.task, path.update, control(path)
    alphas = torch.linspace(0, 1, GRID, dtype=torch.float64).to(tree.like(update).device)
    along = lambda value: alphas.reshape(-1, *[1] * value.dim())  # noqa: E731
    line = tree.map(lambda start, moved: start - along(start) * moved, path.points[0], update)
    curve = tree.map(lambda at, away: at + 2 * along(away) * (1 - along(away)) * away, line, bend)
    count = min(
        path.steps, 2 * GRID
    )  # an update is the sum over where steps BEGIN: the middle one of each share of them
    rows = [int((place + 0.5) * path.steps / count) for place in range(count)]
    own = tree.map(lambda *values: torch.stack(values), *(path.points[row] for row in rows))

    def against(points: Params, shares: Tensor) -> tuple[Tensor, float]:
        """The distance at each point, and that of the mean gradient."""
        with double_backward_safe():
            gradients: Params = vmap(lambda at: task.gradient(at, path.batch), chunk_size=CHUNK)(points)
        mean = tree.map(lambda value: torch.tensordot(shares.to(alphas), value, dims=1)[None], gradients)
        return _cosine_distances(gradients, update), float(_cosine_distances(mean, update))

    (straight, mean_line), (bent, mean_bezier) = (against(points, _trapezoid(GRID)) for points in (line, curve))
    walked, mean_path = against(own, torch.full((count,), 1 / count))
    return Mismatch(
        start=float(straight[0]),
        midpoint=float(straight[GRID // 2]),
        line=float(straight.min()),
        line_at=float(alphas[int(straight.argmin())]),
        bezier=float(bent.min()),
        bezier_at=float(alphas[int(bent.argmin())]),
        path=float(walked.min()),
        along_line=mean_line,
        along_bezier=mean_bezier,
        along_path=mean_path,
        replays={count: _replayed(path, training, count) for count in replays},
    )


def _trapezoid(points: int) -> Tensor:
    """Weights of the trapezoidal sum over equal times, which sum to one."""
    weights = torch.full((points,), 1 / (points - 1), dtype=torch.float64)
    weights[[0, -1]] /= 2
    return weights


def _replayed(path: Path, training: LocalTraining | None, count: int) -> float:
    """1 - cos of the update with that of `count` full-batch steps of the same total length."""
    if training is None or training.optimiser != SGD() or training.schedule is not constant:
        raise ValueError(
            f"A coarse replay needs the recipe of a client with plain SGD and a constant rate; given {training}."
        )
    coarse = LocalTraining(lr=training.lr * path.steps / count, steps=count)
    sent, _ = coarse.run(path.task, path.points[0], path.batch)
    return float(_cosine_distances(tree.map(lambda value: value[None], sent.payload["update"]), path.update))


# --- together ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trajectory:
    """Shape and mismatch of one path; `steps_shape` has the curvature from step to step, mini-batch noise included."""

    shape: Shape
    steps_shape: Shape
    mismatch: Mismatch

    def record(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON."""
        told, every = asdict(self.shape), self.shape.curvature
        told["curvature"] = _extremes(every)
        told["curvature_along"] = list(every)
        told["curvature_of_steps"] = _extremes(self.steps_shape.curvature)
        bounds = {"line": self.shape.line_bound, "bezier": self.shape.bezier_bound}
        return {
            **told,
            "bounds": bounds,
            "line_bound_holds": None if bounds["line"] is None else self.shape.line.squared >= bounds["line"],
            "bezier_bound_holds": None if bounds["bezier"] is None else self.shape.bezier.squared <= bounds["bezier"],
            "mismatch": asdict(self.mismatch) | {"replays": {str(k): v for k, v in self.mismatch.replays.items()}},
        }


def _extremes(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"lowest": min(values), "median": float(np.median(values)), "highest": max(values)}


def trajectory(path: Path, *, training: LocalTraining | None = None, replays: Sequence[int] = ()) -> Trajectory:
    """All of it for one path; curvature over an epoch, or a step where there are no two epochs."""
    stride = path.epoch if path.steps >= 2 * path.epoch else 1
    found = mismatch(path, training=training, replays=replays)
    return Trajectory(shape(path.gram, stride=stride), shape(path.gram), found)


def growth(
    path: Path,
    lengths: Sequence[int],
    *,
    training: LocalTraining | None = None,
    replays: Sequence[int] = (),
) -> tuple[Trajectory, ...]:
    """The same for the client that had stopped after each of `lengths` steps."""
    return tuple(trajectory(path.until(steps), training=training, replays=replays) for steps in lengths)


def order(lengths: Sequence[float], values: Sequence[float]) -> float | None:
    """p of the best values ~ steps^p, by least squares in logarithms; None where that is not defined.

    Of a smooth path the line's relative error grows like steps, the Bezier curve's like steps^2; mini-batch noise
    about a straight path falls like 1 / sqrt(steps).
    """
    x, y = np.asarray(lengths, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if len(x) < 2 or len(set(x)) < 2 or not (x > 0).all() or not (y > 0).all():
        return None
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
