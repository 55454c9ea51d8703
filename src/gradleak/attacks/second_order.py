"""Second-order inversion: matching as nonlinear least squares, solved to the last digit, with a certificate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import torch

from gradleak import registry, tree
from gradleak.analysis.identifiability import Certificate, certify
from gradleak.attack import Composed, Progress, Reconstruction, Stage, require
from gradleak.engine import Engine, memory_of, unknowns_of
from gradleak.local import Order
from gradleak.observation import Knowledge, Observation, Track, as_targets
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.krylov import GaussNewtonKrylov
from gradleak.parts.levenberg import Homotopy, LevenbergMarquardt
from gradleak.parts.matches import Relative, Sketched
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import Smoothness
from gradleak.parts.smoothing import Smoothed, kinked
from gradleak.parts.spaces import Normal, Pixels
from gradleak.registry import named
from gradleak.scene import Needs
from gradleak.task import Task

try:  # TEMPORARY
    from gradleak.parts.peeling_ import Peeled, applies
except ImportError:
    Peeled, applies = (lambda start: start), (lambda *a: False)

GREY = Normal(0.5, 0.02, unit=True)
SHARPER = (1.0, 4.0, 16.0, 64.0, 256.0)  # of the smoothed networks that lead to one with kinks
FADING = (1.0, 1e-2, 1e-4)  # weights of the prior where no Jacobian tells the units
MOST_DENSE = 12_288  # unknowns: four colour images of 32 x 32
SKETCH = 4  # rows for every unknown, where a network has many times as many parameters
MOST_ORDERS = 16  # of the examples in a client's minibatches that are tried


@named("second-order", kind="attack", paper="gradleak's own; Levenberg 1944, Marquardt 1963")
@dataclass(frozen=True)
class SecondOrder:
    """Solve for the images that give exactly this update: least squares with second-order steps, in float64.

    min over x of mean_j ((f_j(x) - u_j) / RMS of u's tensor)^2 + mu * mean squared difference of neighbours, f the
    client's own rule with the defence as far as it is known, mu falling to the level of the noise (`Homotopy`).

    Where the unknowns are few the Jacobian is dense (`LevenbergMarquardt`), else only products with it are taken
    (`GaussNewtonKrylov`); `method` forces one. One example of a chain of layers is peeled off from the top first
    (`Peeled`); other networks with kinks are followed from smoothed ones (`Smoothed`). A client that shuffles its
    minibatches is tried in every order, up to 16; the lowest match wins.

    steps       of the final search at most; a lane that is solved stops
    smoothness  first weight of the prior, in units of the data's own
    after       an attack whose result is polished instead of starting anew, such as "ig:steps=500"
    certify     say for each target whether the update determines it (`gradleak.analysis.certify`); dense only
    """

    steps: int = 60
    smoothness: float = 1.0
    fall: float = 0.1
    restarts: int = 1
    labels: str = "auto"
    method: str = "auto"
    vectors: int = 100
    after: str = ""
    certify: bool = True

    def __post_init__(self) -> None:
        if self.method not in ("auto", "dense", "krylov"):
            raise ValueError(f"method must be auto, dense or krylov; given {self.method!r}.")
        if self.after and not isinstance(registry.parse("attack", self.after), Composed):
            raise ValueError(f"after must name an attack made of stages, such as 'ig:steps=500'; given {self.after!r}.")

    @property
    def name(self) -> str:
        return "second-order"

    @property
    def search_needs(self) -> Needs:
        return frozenset({"training"})

    @property
    def needs(self) -> Needs:
        return self.search_needs | label_rule(self.labels).needs

    def run(
        self,
        task: Task,
        seen: Observation | Track | Sequence[Observation],
        knows: Knowledge = Knowledge(),
        seed: int = 0,
        *,
        engine: Engine | None = None,
        progress: Progress | None = None,
    ) -> Reconstruction:
        """Attack every target in every order its client may have used, keep the lowest match, and certify it."""
        require(self, knows)
        engine = replace(engine or Engine(), precision="double")
        targets = as_targets(seen)
        orders = list(_orders(knows, max(target.num_examples for target in targets)))
        best: Reconstruction | None = None
        for done, order in enumerate(orders):
            share = None if progress is None else lambda part, done=done: progress((done + part) / len(orders))
            attack = self.composed(task, knows, targets, engine, order)
            found = attack.run(task, targets, knows, seed, engine=engine, progress=share)
            best = found if best is None else _better(best, found)
        assert best is not None
        return replace(best, certificates=self._certificates(task, targets, knows, best, engine))

    def composed(
        self, task: Task, knows: Knowledge, targets: Sequence[Observation], engine: Engine, order: Order | None = None
    ) -> Composed:
        """The attack on this task: what is smooth, small or a chain of layers needs fewer stages."""
        largest = max(targets, key=lambda target: target.num_examples)
        dense = LevenbergMarquardt(steps=self.steps, homotopy=Homotopy(self.smoothness, self.fall))
        unknowns, equations = unknowns_of(task, largest.num_examples), tree.size(largest.update)
        small = self.method == "dense" or (self.method == "auto" and unknowns <= MOST_DENSE)
        rows = SKETCH * unknowns
        match = Sketched(Relative(), rows) if small and equations > 2 * rows else Relative()
        whole = Stage(Pixels(GREY), Replay(order=order), match, (), dense)
        if self.after:
            first: Composed = registry.parse("attack", self.after)
            last = replace(whole, optimiser=replace(dense, homotopy=None) if small else self._krylov(self.steps))
            return replace(first, name=self.name, stages=(*first.stages, last), keep="last")
        stages = self._dense(whole, task, knows, largest.num_examples) if small else self._matrix_free(whole, task)
        return Composed(self.name, tuple(stages), Labels(label_rule(self.labels)), restarts=self.restarts, keep="last")

    def _dense(self, whole: Stage, task: Task, knows: Knowledge, examples: int) -> Iterator[Stage]:
        """One stage whose prior fades; before it, what brings a network with kinks within reach."""
        whole = replace(whole, priors=(Smoothness(),))
        if applies(task, knows, examples):
            yield replace(whole, space=Pixels(Peeled(GREY)))
            return
        for sharpness in SHARPER if kinked(task) else ():
            path = replace(whole.optimiser, steps=12, homotopy=Homotopy(self.smoothness, fall=1.0))  # type: ignore[type-var]
            yield replace(whole, optimiser=path, view=Smoothed(sharpness))
        yield whole

    def _matrix_free(self, whole: Stage, task: Task) -> Iterator[Stage]:
        """The same path in stages of fixed weights: a Krylov space is of one objective."""
        for sharpness in SHARPER if kinked(task) else ():
            yield replace(whole, priors=(Smoothness(FADING[0]),), optimiser=self._krylov(3), view=Smoothed(sharpness))
        for weight in FADING:
            yield replace(whole, priors=(Smoothness(weight),), optimiser=self._krylov(self.steps // 6))
        yield replace(whole, optimiser=self._krylov(self.steps // 2))

    def _krylov(self, iterations: int) -> GaussNewtonKrylov:
        return GaussNewtonKrylov(steps=max(1, iterations) * self.vectors, vectors=self.vectors)

    def _certificates(
        self, task: Task, targets: Sequence[Observation], knows: Knowledge, found: Reconstruction, engine: Engine
    ) -> tuple[Certificate, ...] | None:
        largest = max(targets, key=lambda target: target.num_examples)
        entries = unknowns_of(task, largest.num_examples) * tree.size(largest.update)
        if not self.certify or 8 * entries > 0.4 * memory_of(engine):
            return None
        return tuple(certify(task, seen, found.target(row), knows, engine=engine) for row, seen in enumerate(targets))


def _orders(knows: Knowledge, examples: int) -> Iterator[Order | None]:
    """The orders in which a client may have walked through its minibatches; its own shuffle is its secret.

    Labels are sorted and the examples of a target have no names, so the order as it stands comes first; None where
    there is one step over everything, or more orders than can be tried.
    """
    training = knows.training
    plan = [] if training is None else training.order(examples)
    if training is None or training.batch_size is None or training.batch_size >= examples:
        return iter([None])
    per_epoch = -(-examples // training.batch_size)
    epochs = -(-len(plan) // per_epoch)
    ways = math.factorial(examples) ** epochs
    if ways > MOST_ORDERS:
        return iter([None])
    walks = product(permutations(range(examples)), repeat=epochs)
    size = training.batch_size
    return (
        [torch.tensor(walk[start : start + size]) for walk in each for start in range(0, examples, size)][: len(plan)]
        for each in walks
    )


def _better(one: Reconstruction, other: Reconstruction) -> Reconstruction:
    """Target by target, the one whose chosen restart has the lower match."""
    rows = torch.arange(len(one.keys))
    lower = other.match[rows, other.chosen] < one.match[rows, one.chosen]

    def pick(a: torch.Tensor, b: torch.Tensor, axis: int = 0) -> torch.Tensor:
        shape = [1] * a.dim()
        shape[axis] = -1
        return torch.where(lower.reshape(shape), b, a)

    return replace(
        one,
        batch={name: pick(value, other.batch[name]) for name, value in one.batch.items()},
        candidates={name: pick(value, other.candidates[name]) for name, value in one.candidates.items()},
        objective=pick(one.objective, other.objective),
        match=pick(one.match, other.match),
        chosen=pick(one.chosen, other.chosen),
        diverged=pick(one.diverged, other.diverged),
        trace={
            **one.trace,
            **{name: pick(one.trace[name], other.trace[name], axis=1) for name in ("objective", "match")},
        },
        seconds=one.seconds + other.seconds,
        evaluations=one.evaluations + other.evaluations,
    )
