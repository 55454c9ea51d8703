"""Second-order inversion: matching as nonlinear least squares, solved to the last digit, with a certificate."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

import torch

from gradleak.attack import Attack, Composed, Reconstruction, missing_fields, require, supported
from gradleak.attack.cascade import given_of, matches, part, taken, unsolved
from gradleak.attacks.second_order.krylov import GaussNewtonKrylov
from gradleak.attacks.second_order.peeling import Peeled, applies
from gradleak.attacks.second_order.smoothing import Smoothed, kinked
from gradleak.core import registry, tree
from gradleak.core.listeners import Share
from gradleak.core.registry import named
from gradleak.diffusion import Denoising
from gradleak.engine import Engine, memory_of, unknowns_of
from gradleak.identify.certificates import certify
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.levenberg import Homotopy, LevenbergMarquardt
from gradleak.parts.matches import Relative, Sketched
from gradleak.parts.optimisers import require_positive
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import NaturalImage, Smoothness
from gradleak.parts.protocols import FieldRule, Needs, Space
from gradleak.parts.residual import FreeNoise
from gradleak.parts.spaces import FreeField, JointSpace, Normal, Pixels
from gradleak.parts.stage import Stage
from gradleak.parts.steps import ReadSteps
from gradleak.parts.view import TargetView
from gradleak.scenario.client import Order
from gradleak.scenario.defence import overrides
from gradleak.scenario.kinds import Image
from gradleak.scenario.observation import Knowledge, Seen, Track, as_targets
from gradleak.scenario.task import Task

GREY = Normal(0.5, 0.02, unit=True)
NOISY = Normal(0.5, 0.25, unit=True)  # for restarts, which must differ
SHARPER = (1.0, 4.0, 16.0, 64.0, 256.0)  # sharpness of the smoothed networks that lead to one with kinks
FADING = (1.0, 1e-2, 1e-4)  # weights of the prior where no Jacobian gives the units
MOST_DENSE = 12_288  # unknowns: four colour images of 32 x 32
SKETCH = 4  # rows for every unknown, where a network has many times as many parameters
REFINING = 15  # steps with all equations, after those with a sketch of them
RESTARTS = 4  # along the smoothed networks: the start decides in which solution the path ends
SOLVED = 1e-10  # a match at the rounding of float32 weights, or better; stuck searches reached 4e-9
TRIAL = 25  # steps for one of several orders: the right one is solved in ten
MOST_ORDERS = 16  # of the examples in a client's minibatches that are tried


@named("second-order", kind="attack", paper="gradleak's own; Levenberg 1944, Marquardt 1963")
@dataclass(frozen=True)
class SecondOrder(Attack):
    """Solve for the images that give exactly this update: least squares with second-order steps, in float64.

    min over x of mean_j ((f_j(x) - u_j) / RMS of u's tensor)^2 + mu * roughness of x (`parts.priors.roughness`), f the
    client's own rule with the defence as far as it is known, mu falling to the level of the noise (`Homotopy`). Where a
    known defence adds noise, the unit is the RMS of the whole update.

    With few unknowns the Jacobian is dense (`LevenbergMarquardt`), else only products with it are taken
    (`GaussNewtonKrylov`); `method` forces one. A smooth network is solved from a grey image. A chain of layers that has
    kinks, or that is not solved so, is peeled from the top (`Peeled`). Other networks with kinks are followed from
    smoothed ones (`Smoothed`) in four restarts. A costlier way counts only where it solves the update to rounding:
    before that a lower match does not mean a better image. For a client that shuffles its minibatches every order is
    tried, up to 16; where it takes several steps over several examples, their labels are unknowns too.

    steps       the most steps of the final search; a lane that is solved stops
    restarts    None: one, and four along smoothed networks, where the end of the path depends on its start
    prior       first weight of the roughness, relative to the data term
    after       an attack whose result is polished instead of a new start, such as "ig:steps=500"; its own labels and
                restarts then count
    certify     say for each target whether the update determines it (`identify.certificates`), if its Jacobian fits in
                memory and it was seen in one round
    """

    steps: int = 60
    prior: float = 1.0
    fall: float = 0.1
    restarts: int | None = None
    labels: str = "auto"
    method: str = "auto"
    vectors: int = 100
    after: str = ""
    certify: bool = True

    def __post_init__(self) -> None:
        require_positive(self, whole=("steps", "vectors"), real=("prior", "fall"))
        if self.restarts is not None and self.restarts < 1:
            raise ValueError(f"restarts must be at least 1; given {self.restarts}.")
        Homotopy(self.prior, self.fall)
        label_rule(self.labels)
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
        if self.after:
            return self.search_needs | registry.parse("attack", self.after).needs
        return self.search_needs | label_rule(self.labels).needs

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        diffusion = isinstance(task.objective, Denoising)
        space: Space = JointSpace((Pixels(GREY), FreeNoise())) if diffusion else Pixels(GREY)
        stage = Stage(space, Replay(), Relative(), (NaturalImage(),), LevenbergMarquardt())
        return self._attack([stage], self._rule(task)).refuses(task, given)

    def _rule(self, task: Task) -> FieldRule:
        """What is read off before the search: the steps of a denoiser, or labels."""
        return ReadSteps() if isinstance(task.objective, Denoising) else Labels(label_rule(self.labels))

    def run(
        self,
        task: Task,
        seen: Seen,
        knows: Knowledge = Knowledge(),
        seed: int = 0,
        *,
        engine: Engine | None = None,
        progress: Share | None = None,
    ) -> Reconstruction:
        """Attack every target in every order its client may have used, keep the lowest match, and certify it."""
        supported(self, task, knows)
        require(self, knows)
        engine = replace(engine or Engine(), precision="double")
        targets = as_targets(seen)
        orders = orders_of(knows, {target.num_examples for target in targets}, engine)
        one = self if len(orders) == 1 else replace(self, steps=min(self.steps, TRIAL))
        best = one._cascade(task, targets, knows, seed, engine, orders[0], part(progress, 0, len(orders)))
        winning = [orders[0]] * len(targets)
        for done, order in enumerate(orders[1:], start=1):
            rows = unsolved(best, SOLVED)
            if rows:
                some, granted = [targets[row] for row in rows], given_of(task, knows, rows, len(targets))
                result = one._cascade(task, some, granted, seed, engine, order, part(progress, done, len(orders)))
                lower = matches(result) < matches(best)[rows]
                best = taken(best, result, rows, lower)
                for row, better in zip(rows, lower, strict=True):
                    winning[row] = order if better else winning[row]
        if progress is not None:
            progress(1.0)
        best = replace(best, settings={**best.settings, "attack": repr(self)})
        if not self.certify or not _room(engine, task, targets) or any(len(each.observations) > 1 for each in targets):
            return best
        # At the reconstruction, with its own labels, in the order that won.
        certificates = [
            certify(task, target.last, best.target(row), knows, engine=engine, order=winning[row])
            for row, target in enumerate(targets)
        ]
        return replace(best, certificates=tuple(certificates))

    def _cascade(
        self,
        task: Task,
        targets: Sequence[Track],
        knows: Knowledge,
        seed: int,
        engine: Engine,
        order: Order | None,
        progress: Share | None,
    ) -> Reconstruction:
        """One way after the other, each on the targets that no earlier one solved."""
        ways = self.ways(task, knows, targets, engine, order)
        best = ways[0].run(task, targets, knows, seed, engine=engine, progress=part(progress, 0, len(ways)))
        for done, way in enumerate(ways[1:], start=1):
            rows = unsolved(best, SOLVED)
            if rows:
                some, granted = [targets[row] for row in rows], given_of(task, knows, rows, len(targets))
                result = way.run(task, some, granted, seed, engine=engine, progress=part(progress, done, len(ways)))
                best = taken(best, result, rows, matches(result) < SOLVED)
        if progress is not None:
            progress(1.0)
        return best

    def ways(
        self, task: Task, knows: Knowledge, targets: Sequence[Track], engine: Engine, order: Order | None = None
    ) -> list[Composed]:
        """The attacks to try on this task, cheapest first."""
        largest = max(targets, key=lambda target: target.num_examples)
        unknowns, equations = unknowns_of(task, largest.num_examples, knows.given), largest.equations
        rows = SKETCH * unknowns
        large = equations > 2 * rows
        dense = LevenbergMarquardt(steps=self.steps, homotopy=Homotopy(self.prior, self.fall), single=large)
        room = lambda rows: 8 * dense.entries(unknowns, rows) < 0.6 * memory_of(engine)  # noqa: E731
        few = unknowns <= MOST_DENSE and room(rows if large else equations)
        small = self.method == "dense" or (self.method == "auto" and few)
        every = Relative(whole=_noisy(task, knows, targets))
        match = Sketched(every, rows) if large and small else every
        diffusion = isinstance(task.objective, Denoising)
        free = diffusion and "noise" not in knows.given
        fields = self._rule(task)
        # What no rule reads: as free numbers, in which least squares is linear.
        unread = missing_fields(task, fields.reads(task) | knows.given.keys() | {"x"})
        others = tuple(FreeField(name) for name in unread)
        begin = NOISY if others else GREY
        space: Space = JointSpace((Pixels(NOISY), FreeNoise())) if free else _joined(Pixels(begin), others)
        stage = Stage(space, Replay(order=order), match, (NaturalImage(),), dense)
        bare = replace(dense, homotopy=None, damping=1e-4)
        polish = replace(stage, priors=(), optimiser=bare)
        if self.after:
            first: Composed = registry.parse("attack", self.after)
            # In its own space: labels that it optimises beside the images stay unknowns.
            last = replace(polish, space=first.stages[-1].space)
            last = last if small else replace(last, optimiser=self._krylov(self.steps))
            return [replace(first, name=self.name, stages=(*first.stages, last))]
        if not small:
            return [self._attack(self._matrix_free(polish, task), fields)]
        bent, chain = kinked(task), not diffusion and applies(task, knows, largest.num_examples)
        peeling = _joined(Pixels(Peeled(GREY)), others)
        peeled = replace(polish, space=peeling, optimiser=replace(bare, only_if_solved=SOLVED))
        # Without the prior, to the last digit, if there is no noise to fit.
        sharpened = replace(polish, optimiser=replace(bare, steps=10, only_if_solved=SOLVED))
        if self._joint(task, knows, targets):
            both = JointSpace((stage.space, FreeField()))
            stage, sharpened = replace(stage, space=both), replace(sharpened, space=both)
        smooth = [stage, sharpened]
        if large and room(equations):
            # Against noise every equation counts, and a sketch has only some: a few steps with all of them. Lanes that
            # are solved skip these steps: their strong prior would undo the solution.
            refining = replace(dense, steps=REFINING, solved=SOLVED)
            smooth.insert(1, replace(stage, match=every, optimiser=refining))
        several = self.restarts or RESTARTS
        ways = [] if bent else [self._attack(smooth, fields, several if free or others else None)]
        if chain:
            ways.append(self._attack([peeled], fields))
        if bent:
            noisy = replace(stage, space=_joined(Pixels(NOISY), others))
            ways.append(self._attack([*self._path(noisy, dense, task), sharpened], fields, several))
        return ways

    def _joint(self, task: Task, knows: Knowledge, targets: Sequence[Track]) -> bool:
        """Are labels unknowns beside the images? After several steps no rule reads the labels of several examples well.

        On 50 pairs of CIFAR-10 images, an untrained LeNet and four steps of lr 0.1, the best rule was right on 26.
        """
        training, loss = knows.training, getattr(task.objective, "loss", None)
        if (
            self.labels != "auto"
            or self.after
            or not task.class_index
            or "y" in knows.given
            or training is None
            or kinked(task)
        ):
            return False
        soft = loss is torch.nn.functional.cross_entropy or isinstance(loss, torch.nn.CrossEntropyLoss)
        several = [target.num_examples for target in targets if target.num_examples > 1]
        return soft and bool(several) and any(len(training.order(examples)) > 1 for examples in several)

    def _attack(self, stages: Iterable[Stage], fields: FieldRule, restarts: int | None = None) -> Composed:
        return Composed(self.name, tuple(stages), fields, restarts=restarts or self.restarts or 1, keep="last")

    def _path(self, stage: Stage, dense: LevenbergMarquardt, task: Task) -> Iterator[Stage]:
        """Less and less smooth networks, each solved as far as it can explain the update, and the real one."""
        # Plain smoothness: of 12 restarts on four 8 x 8 images and one small ReLU ResNet 10 converged, with the
        # roughness of photographs 4. It is made for images; other fields keep the roughness.
        image = isinstance(task.fields["x"].kind, Image)
        stage = replace(stage, priors=(Smoothness(),) if image else stage.priors)
        brief = replace(dense, steps=12, homotopy=Homotopy(start=1e-2, fall=0.3))
        for sharpness in SHARPER:
            yield replace(stage, optimiser=brief, view=Smoothed(sharpness))
        yield replace(stage, optimiser=replace(dense, homotopy=Homotopy(start=1e-2)))

    def _matrix_free(self, whole: Stage, task: Task) -> Iterator[Stage]:
        """The same in stages of fixed weights: a Krylov space belongs to one objective."""
        for sharpness in SHARPER if kinked(task) else ():
            yield replace(whole, priors=(NaturalImage(FADING[0]),), optimiser=self._krylov(3), view=Smoothed(sharpness))
        for weight in FADING:
            yield replace(whole, priors=(NaturalImage(weight),), optimiser=self._krylov(self.steps // 6))
        yield replace(whole, optimiser=self._krylov(self.steps // 2))

    def _krylov(self, iterations: int) -> GaussNewtonKrylov:
        return GaussNewtonKrylov(steps=max(1, iterations) * self.vectors, vectors=self.vectors)


def _joined(first: Space, others: tuple[Space, ...]) -> Space:
    """The space, with the unknowns of the others."""
    return JointSpace((first, *others)) if others else first


def _noisy(task: Task, knows: Knowledge, targets: Sequence[Track]) -> bool:
    """Does the defence, as far as it is known, add noise of a known size?"""
    if knows.defence is None or not overrides(knows.defence, "noise_variance"):
        return False
    scene = TargetView.of(task, targets[0].last, knows)
    variance = tree.flatten(knows.defence.assumed(scene, task).noise_variance(scene))
    return bool(((variance > 0) & variance.isfinite()).any())


def _room(engine: Engine, task: Task, targets: Sequence[Track]) -> bool:
    """Does the Jacobian of the largest target fit beside its factors?"""
    largest = max(targets, key=lambda target: target.num_examples)
    entries = unknowns_of(task, largest.num_examples) * largest.equations
    return 8 * entries < 0.4 * memory_of(engine)


def orders_of(knows: Knowledge, counts: set[int], engine: Engine) -> list[Order | None]:
    """The possible orders of a client's minibatches; its shuffle is its secret.

    [None] is the order of the examples themselves: if every step takes all of them, targets differ in their number, or
    there are too many orders to try.
    """
    training, [examples, *others] = knows.training, counts
    size = None if training is None else training.batch_size
    if training is None or others or size is None or size >= examples:
        return [None]
    steps = len(training.order(examples))
    epochs = -(-steps // -(-examples // size))
    if math.factorial(examples) ** epochs > MOST_ORDERS:
        return [None]
    # All of them, although labels may be unknowns too and examples are then interchangeable: two examples in each
    # other's place are a deep local minimum (match 1e-4 where the right order gives 1e-28).
    walks = product(permutations(range(examples)), repeat=epochs)
    rows = lambda walk: torch.tensor(walk, device=engine.where).split(size)  # noqa: E731
    return [[part for walk in each for part in rows(walk)][:steps] for each in walks]
