"""One example peeled off a chain network, layer by layer: a start that is exact where the update determines the input.

For one example the classifier's bias gradient IS the cotangent of the logits, and the weight gradient is its outer
product with the classifier's input: both are known. Given a block's output z (where the activation can be inverted) and
its cotangent g, the block's unknown input a obeys equations that are LINEAR in a,

    dL/dW = vjp_W(block at a)(g),    block(a) = z as far as z can be trusted,

and linear inequalities: the range of the activation that made a, block(a) <= 0 where a ReLU is off, and at the bottom
the bounds of the image. The solution gives z and g of the block below, down to the image.

A layer of ReLUs at the bottom hides which of them are on. Image x and its layer a >= max(0, block(x)) are then solved
together: sum(a - max(0, block(x))) is a concave function that is zero exactly at the solutions. A few quadratic
programs minimise it over the polytope, each with the product a (a - block(x)) linearised at the solution before. Where
the image leaves in doubt which units are on, the gradient of the lowest block decides. A vertex is solved for again
with its zeros fixed, to all digits; what stays undetermined is chosen as smooth as natural images. Where an activation
folds (GELU) a negative output has two inputs: the solution of the equations shows which, in rounds. The two lowest
blocks, which have few equations, go to a nonlinear solver together.

Related: R-GAP (Zhu and Blaschko, ICLR 2021), which solves each layer by a pseudo-inverse. New here: the inequalities,
the joint solution of the two lowest layers, activations that are not injective.

It needs float64 (`Engine(precision="double")`): ranks come from singular values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from gradleak.attacks.second_order.chain import (
    FOLDED,
    OFF,
    RANGES,
    Above,
    Block,
    Chain,
    activated,
    bottom,
    chain_of,
    through,
)
from gradleak.attacks.second_order.quadratic import AtLeast, AtMost, Constraint, Over, Rows, minimise
from gradleak.core import tree
from gradleak.core.linear import gram, jacobian, solved
from gradleak.core.random import Draws
from gradleak.core.tree import Params
from gradleak.parts.predictions import gradient
from gradleak.parts.priors import roughness
from gradleak.parts.spaces import AnyStart, Start
from gradleak.parts.view import TargetView
from gradleak.scenario.observation import Knowledge
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Task

UNFOLDING = 40  # steps of the nonlinear solver, the last fifth without roughness
LARGEST = 4096  # inputs of a layer: the matrices are square in them
BASIS = 64  # basis vectors pushed through a block at a time
COLUMNS = 256  # of a nonlinear solver's Jacobian, likewise
BRANCHES = 10  # rounds that decide on the branches of an activation that folds
AMBIGUOUS = 0.05  # weight of a unit whose branch is not known yet
ZERO = 1e-5  # values of a hidden layer, in units of its RMS, that a program pushed to its boundary
SMOOTH = 1e-6  # weight of the roughness where the equations of one block choose the image
MARGIN = 1e-4  # of the layer's RMS, by which a ReLU that is off is kept off
ANCHOR = 1e-4  # added to the roughness, which says nothing about the mean


@dataclass(frozen=True)
class Round:
    """Weights of one convex program for image and lowest layer, against the layer's equations; the layer has RMS 1.

    roughness    of the image
    price        of a unit that is neither off nor equal to its value from the image
    own          the lowest block's own equations, given the units that are on (0: not yet)
    doubt        preactivations below this say little about their unit: the equations decide (0: not yet)
    """

    roughness: float
    price: float
    own: float = 0.0
    doubt: float = 0.0


# Chosen among seven schedules on a few CIFAR-10 training images and one untrained ReLU LeNet; scores on these are not
# reported.
ROUNDS = (
    *(Round(1e-2, 4e-4), Round(1e-3, 4e-3)),
    *(Round(1e-4, 4e-4, 0.01, 0.05), Round(1e-5, 4e-5, 0.1, 0.05), Round(1e-5, 4e-5, 0.1, 0.05)),
    *(Round(1e-5, 4e-5, 1, 0.03), Round(1e-6, 4e-6, 1, 0.02), Round(1e-6, 4e-6, 1, 0.01), Round(1e-6, 4e-6, 1, 0.01)),
)


# --- the start ------------------------------------------------------------------------------------------------------


def applies(task: Task, knows: Knowledge, examples: int, largest: int = LARGEST) -> bool:
    """One example, one step of SGD, no known defence, a chain, and no layer with more than `largest` inputs."""
    training = knows.training
    if examples != 1 or knows.defence is not None:
        return False
    if training is not None and not (len(training.order(1)) == 1 and isinstance(training.optimiser, SGD)):
        return False
    chain = chain_of(task)
    return chain is not None and max(block.size for block in chain.blocks) <= largest


@dataclass(frozen=True)
class Peeled(Start):
    """The image peeled off the update, or `otherwise` where that does not apply or explains the update better.

    `tolerance`: singular values below this share of the largest count as zero; raise it where the update was rounded.
    `largest`: see `applies`. `rounds`: the programs for the two lowest blocks of a ReLU network.
    """

    otherwise: AnyStart
    tolerance: float = 1e-6
    largest: int = LARGEST
    rounds: tuple[Round, ...] = ROUNDS

    def entries(self, task: Task) -> int:
        """Peak memory of a lane in numbers: a few square matrices of the largest system."""
        chain = chain_of(task)
        if chain is None:
            return 0
        sizes = [block.size for block in chain.blocks]
        together = sizes[0] + sizes[1] if _together(chain) else 0
        return 8 * max(*sizes, together) ** 2

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        other = self.otherwise(scene, draws, name)
        if not applies(scene.task, scene.knows, scene.num_examples, self.largest):
            return other
        chain = chain_of(scene.task)
        assert chain is not None
        (low, high), box = scene.extent(name), scene.limits[name]
        best, least = other, _misfit(scene, chain, other)
        for candidate in _Peeling(scene, chain, name, self.tolerance, self.rounds).images():
            image = (low + (high - low) * candidate.reshape(other.shape)).clamp(*box)
            misfit = _misfit(scene, chain, image)
            best, least = torch.where(misfit < least, image, best), torch.minimum(misfit, least)
        return best


def _misfit(scene: TargetView, chain: Chain, x: Tensor) -> Tensor:
    """Squared distance between the directions of observed and predicted gradient; infinite where not finite.

    The prediction pulls back the OBSERVED cotangent of the logits, so no label is needed.
    """
    observed = gradient(scene)
    model = lambda weights: scene.task.call(weights, scene.buffers)(x)  # noqa: E731
    predicted = vjp(model, scene.weights)[1](observed[chain.bias][None])[0]
    unit = lambda params: tree.scale(params, 1 / tree.norm(params))  # noqa: E731
    distance = tree.squared_norm(tree.subtract(unit(predicted), unit(observed)))
    return torch.where(torch.isfinite(distance), distance, torch.inf)


def _together(chain: Chain) -> bool:
    return len(chain.blocks) > 1 and isinstance(chain.blocks[0].activation, nn.ReLU)


# --- peeling one lane -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class System:
    """The equations of a block's input a as least squares: J'J, and a -> J'(wanted - J a)."""

    gram: Tensor  # (n, n)
    pulled: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Equations:
    """What the update says of a block's input a: share * (a - point) = 0, `share` a projection."""

    share: Tensor  # (n, n)
    point: Tensor  # (n,)

    def corrected(self, a: Tensor) -> Tensor:
        return a + self.point - self.share @ a

    def with_zeros(self, a: Tensor, zeros: Tensor, point: Tensor) -> Tensor:
        """The solution nearest to a with these entries zero: where that is a vertex, to all its digits."""
        a = torch.where(zeros, 0.0, a)
        free = torch.where(zeros, 0.0, 1.0)
        gram = free[:, None] * self.share * free  # share is a projection: its own Gram matrix
        factor, _ = torch.linalg.cholesky_ex(gram + 1e-9 * torch.eye(len(a), device=a.device, dtype=a.dtype))
        for _ in range(4):  # each removes the error of the small ridge
            a = a + free * solved(factor, point - self.share @ a)
        return a


@dataclass(frozen=True, eq=False)
class _Peeling:
    scene: TargetView
    chain: Chain
    name: str
    tolerance: float
    rounds: Sequence[Round]

    def images(self) -> list[Tensor]:
        """Candidates for the image in [0, 1], flat."""
        observed = tree.map(lambda value: torch.nan_to_num(value, 0.0, 0.0, 0.0), gradient(self.scene))
        delta = observed[self.chain.bias]  # (classes,)
        # The equations are homogeneous: the scale is free.
        observed = tree.scale(observed, tree.safe_inverse(delta.norm()))
        delta = observed[self.chain.bias]
        h = delta @ observed[self.chain.weight]  # the classifier's input, (features,)
        cotangent = self.scene.weights[self.chain.weight].T @ delta
        blocks = self.chain.blocks
        lowest = min(1, len(blocks) - 1)  # in these two blocks, or the only one, folds leave too much undetermined
        folded = any(isinstance(block.activation, FOLDED) for block in blocks[: lowest + 1])
        images: list[Tensor] = []
        for position in reversed(range(len(blocks))):
            block = blocks[position]
            if position == lowest and folded:
                return [self._joined(blocks[: lowest + 1], h, cotangent, observed)]
            if isinstance(block.activation, FOLDED):
                h, cotangent = self._unfolded(block, h, cotangent, observed)
                continue
            above = through(block.activation, h, cotangent)
            equations = self._equations(block, above, observed)
            if position == 1 and _together(self.chain):
                x, a = self._lowest_two(equations, above, observed)
                images.append(x)
            elif position:
                a = self._input(position, equations, above)
            else:
                a = self._picture(equations, above)
            h, cotangent = a, self._pulled(block, above.cotangent)
        return [*images, h]

    def _block(self, block: Block) -> Callable[[Params, Tensor], Tensor]:
        """The block as a function of weights and input; the input of the lowest is an image in [0, 1]."""
        state = {**(self.scene.buffers or {}), **self.scene.weights}
        if block is not self.chain.blocks[0]:
            return lambda weights, a: block({**state, **weights}, a)
        low, high = self.scene.extent(self.name)

        def from_unit(weights: Params, a: Tensor) -> Tensor:
            return block({**state, **weights}, low + (high - low) * a.reshape(block.inputs))

        return from_unit

    def _pulled(self, block: Block, cotangent: Tensor) -> Tensor:
        zero = cotangent.new_zeros(block.size)
        return vjp(lambda a: self._block(block)({}, a), zero)[1](cotangent)[0]

    def _matrix(self, block: Block) -> tuple[Tensor, Tensor]:
        """block(a) = matrix a + offset"""
        function = self._block(block)
        zero = self.scene.like.new_zeros(block.size)
        offset = function({}, zero)
        return _columns(lambda a: function({}, a) - offset, zero).T, offset

    def _rows(
        self, function: Callable[[Params, Tensor], Tensor], weights: Params, above: Above, observed: Params
    ) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        """The known quantities behind `function` as a function of its input a, and their known values.

        These are the gradients of `weights`, tensor by tensor, then the output.
        """
        share = {name: tree.safe_inverse(observed[name].norm()) for name in weights}
        trust = above.trust * tree.safe_inverse((above.trust * above.z).norm())

        def side(gradients: Params, output: Tensor) -> Tensor:
            parts = [(gradients[name] * share[name]).flatten() for name in weights]
            return torch.cat([*parts, trust * output])

        def rows(a: Tensor) -> Tensor:
            if not weights:
                return side({}, function({}, a))
            output, pull = vjp(lambda w: function(w, a), weights)[:2]
            return side(pull(above.cotangent)[0], output)

        return rows, side({name: observed[name] for name in weights}, above.z)

    def _system(self, block: Block, above: Above, observed: Params) -> System:
        rows, wanted = self._rows(self._block(block), block.weights(self.scene.weights), above, observed)
        zero = tree.like(observed).new_zeros(block.size)
        offset, pull = vjp(rows, zero)[:2]
        gram = _columns(lambda a: pull(rows(a) - offset)[0], zero)
        return System((gram + gram.T) / 2, lambda a: pull(wanted - rows(a))[0])

    def _unfolded(self, block: Block, h: Tensor, cotangent: Tensor, observed: Params) -> tuple[Tensor, Tensor]:
        """The input of a block whose activation folds, and the cotangent there.

        Each unit with a negative output lies on one of two branches. Each round guesses them, solves the equations and
        reads the branches off the solution. The equations by far outnumber the unknowns, so wrong guesses are outvoted.
        """
        assert block.activation is not None
        minimum, falling = bottom(block.activation), torch.zeros_like(h, dtype=torch.bool)
        a = h.new_zeros(block.size)
        for step in range(BRANCHES):
            above = through(block.activation, h, cotangent, falling)
            if step == 0:  # these inputs are unknown before the first solution
                above = replace(above, trust=torch.where(h < 0, AMBIGUOUS * above.trust, above.trust))
            a = self._equations(block, above, observed).point
            falling = (h < 0) & (self._block(block)({}, a) < minimum)
        a = self._solved([block], h, cotangent, observed, (a, torch.zeros_like(a)))
        cotangent = vjp(block.activation, self._block(block)({}, a))[1](cotangent)[0]
        return a, self._pulled(block, cotangent)

    def _joined(self, blocks: Sequence[Block], h: Tensor, cotangent: Tensor, observed: Params) -> Tensor:
        """The image below blocks whose activations fold, from all their equations at once: for a shallow network."""
        grey = h.new_full((blocks[0].size,), 0.5)
        return self._solved(blocks, h, cotangent, observed, (grey,), _roughness(blocks[0].inputs, h))

    def _solved(
        self,
        blocks: Sequence[Block],
        h: Tensor,
        cotangent: Tensor,
        observed: Params,
        starts: Sequence[Tensor],
        form: Tensor | None = None,
    ) -> Tensor:
        """The input of these blocks, whose output is h: the best of nonlinear least squares from `starts`.

        `form` is a quadratic form about the last start, which fades.
        """

        def function(weights: Params, a: Tensor) -> Tensor:
            for block in blocks:
                a = activated(block.activation, self._block(block)(weights, a))
            return a

        weights: Params = {}
        for block in blocks:
            weights |= block.weights(self.scene.weights)
        rows, wanted = self._rows(function, weights, Above(h, torch.ones_like(h), cotangent), observed)
        ends = [_least_squares(lambda a: rows(a) - wanted, start, form, starts[-1]) for start in starts]
        lacks = torch.stack([torch.nan_to_num((rows(end) - wanted).norm(), torch.inf) for end in ends])
        return torch.stack(ends).index_select(0, lacks.argmin()[None])[0]

    def _equations(self, block: Block, above: Above, observed: Params) -> Equations:
        system = self._system(block, above, observed)
        squares, vectors = torch.linalg.eigh(system.gram)
        counts = squares > self.tolerance**2 * squares[-1]
        inverse = torch.where(counts, 1 / torch.where(counts, squares, 1.0), 0.0)
        point = torch.zeros_like(squares)
        for _ in range(3):  # the first solves, the others remove rounding errors
            point = point + vectors @ (inverse * (vectors.T @ system.pulled(point)))
        return Equations((vectors * counts) @ vectors.T, point)

    def _inactive(self, block: Block, above: Above, margin: float = 0.0) -> Rows:
        """block(a) <= 0 where a ReLU is off, by `margin` shares of the RMS."""
        matrix, offset = self._matrix(block)
        size = (above.trust * above.z).square().mean().sqrt()
        return Rows(matrix, torch.where(above.trust > 0, torch.inf, -offset - margin * size))

    def _input(self, position: int, equations: Equations, above: Above) -> Tensor:
        """The hidden input of a block: a solution of the equations that obeys the inequalities."""
        blocks = self.chain.blocks
        block, below = blocks[position], blocks[position - 1].activation
        assert below is not None  # only the topmost block may lack an activation
        low, high = RANGES[type(below)]
        if not isinstance(below, nn.ReLU) and self._plenty(block, above):
            return equations.point
        constraints: list[Constraint] = []
        if math.isfinite(low):
            constraints.append(AtLeast(torch.full_like(equations.point, low)))
        if math.isfinite(high):
            constraints.append(AtMost(torch.full_like(equations.point, high)))
        if isinstance(block.activation, nn.ReLU):
            constraints.append(self._inactive(block, above))
        if not constraints:
            return equations.point
        return equations.corrected(minimise(equations.share, -equations.point, constraints, equations.point).x)

    def _plenty(self, block: Block, above: Above) -> bool:
        """Do the equations outnumber the unknowns, whatever their values?"""
        count = tree.size(block.weights(self.scene.weights))
        return (0 if isinstance(block.activation, nn.ReLU) else above.z.numel()) + count >= block.size

    def _picture(self, equations: Equations, above: Above) -> Tensor:
        """The smoothest image within its bounds that solves the equations of the lowest block."""
        block = self.chain.blocks[0]
        smooth, weight = _roughness(block.inputs, above.z), SMOOTH
        hessian = equations.share + weight * smooth
        grey = torch.full_like(equations.point, 0.5)
        constraints: list[Constraint] = [AtLeast(torch.zeros_like(grey)), AtMost(torch.ones_like(grey))]
        if isinstance(block.activation, nn.ReLU):
            # The smoothest image turns many units off by very little: rounding must not turn them on.
            constraints.append(self._inactive(block, above, MARGIN))
        image = minimise(hessian, -equations.point - weight * (smooth @ grey), constraints, grey).x
        return equations.corrected(image)

    def _lowest_two(self, equations: Equations, above: Above, observed: Params) -> tuple[Tensor, Tensor]:
        """The image below a layer of ReLUs, and that layer: rounds of one convex program, see the module docstring."""
        image, layer = self.chain.blocks[:2]
        scale = equations.point.square().mean().sqrt().clamp_min(torch.finfo(above.z.dtype).tiny)
        target = equations.point / scale
        matrix, offset = self._matrix(image)
        smooth = _roughness(image.inputs, above.z)
        n, m = image.size, layer.size
        grey = target.new_full((n,), 0.5)
        constraints: list[Constraint] = [
            AtLeast(target.new_zeros(n + m)),
            AtMost(torch.cat([torch.ones_like(grey), target.new_full((m,), torch.inf)])),
            Over(matrix, scale, -offset / scale),
        ]
        if isinstance(layer.activation, nn.ReLU):
            rows = self._inactive(layer, above)
            padded = torch.cat([rows.matrix.new_zeros(len(rows.matrix), n), rows.matrix], dim=1)
            constraints.append(Rows(padded, rows.limit / scale))
        on = torch.full_like(target, 0.5)
        v = torch.cat([grey, target.clamp_min(0)])
        cotangent = self._pulled(layer, above.cotangent)
        nowhere = torch.zeros_like(target)
        trained = bool(image.weights(self.scene.weights))
        for step in self.rounds:
            form = step.roughness * smooth
            pull = step.price * (matrix.T @ on) / scale + form @ grey
            if step.own and trained:
                system = self._system(image, Above(target, nowhere, cotangent * on), observed)
                form, pull = form + step.own * system.gram, pull + step.own * system.pulled(torch.zeros_like(grey))
            hessian = torch.block_diag(form, equations.share)
            v = minimise(hessian, torch.cat([-pull, step.price - target]), constraints, v).x
            a = v[n:].clamp_min(0) + OFF
            spare = (v[n:] - (matrix @ v[:n] + offset) / scale).clamp_min(0) + OFF
            on = a / (a + spare)
            if step.doubt and trained:
                on = self._doubted(a - spare, v[:n], cotangent, observed, step.doubt)
        # Zeros that the image shows determine more; they are right if the equations still hold.
        sure, careful = (equations.with_zeros(v[n:], zeros, target) for zeros in (on < 0.5, v[n:] < ZERO))
        lack = (equations.share @ sure - target).norm() / target.norm()
        return v[:n], scale * torch.where(lack < OFF, sure, careful)

    def _doubted(self, z: Tensor, x: Tensor, cotangent: Tensor, observed: Params, doubt: float) -> Tensor:
        """How far each ReLU is on, in [0, 1]: the lowest block's gradient is linear in it, and decides near z = 0."""
        block = self.chain.blocks[0]
        function, weights = self._block(block), block.weights(self.scene.weights)
        pull = vjp(lambda w: function(w, x), weights)[1]

        def rows(on: Tensor) -> Tensor:
            gradients = pull(cotangent * on)[0]
            return torch.cat(
                [(gradients[name] * tree.safe_inverse(observed[name].norm())).flatten() for name in weights]
            )

        believed = (z > 0).to(z.dtype)
        sure = 1 + (z / doubt) ** 4
        wanted = torch.cat([(observed[name] * tree.safe_inverse(observed[name].norm())).flatten() for name in weights])
        lack = wanted - rows(believed)
        back = vjp(rows, believed)[1]
        gram = _columns(lambda on: back(rows(on))[0], believed)
        trust = lack.numel() / (1.2 * doubt) ** 2  # the error of the image affects both
        bounds: list[Constraint] = [AtLeast(-believed), AtMost(1 - believed)]
        change = minimise(trust * gram + torch.diag_embed(sure), -trust * back(lack)[0], bounds).x
        return (believed + change).clamp(0, 1)


def _least_squares(residual: Callable[[Tensor], Tensor], a: Tensor, form: Tensor | None, middle: Tensor) -> Tensor:
    """Dense Levenberg-Marquardt with a quadratic form about `middle` that fades; a fixed number of steps."""
    damping = a.new_full((), 1e-2)
    form = torch.zeros(len(a), len(a), device=a.device, dtype=a.dtype) if form is None else form
    for step in range(UNFOLDING):
        weight = 10.0 ** (-2 - 10 * step / UNFOLDING) if step < 0.8 * UNFOLDING else 0.0

        def height(at: Tensor, weight: float = weight) -> Tensor:
            return residual(at).square().sum() + weight * (at - middle) @ form @ (at - middle)

        rows = jacobian(residual, a, COLUMNS)  # (unknowns, equations)
        normal = gram(rows) + weight * form
        slope = rows @ residual(a) + weight * (form @ (a - middle))
        diagonal = normal.diagonal()
        ridge = damping * (diagonal + 1e-9 * diagonal.max()) + torch.finfo(a.dtype).tiny
        factor, info = torch.linalg.cholesky_ex(normal + torch.diag_embed(ridge))
        trial = a - solved(factor, slope)
        better = (info == 0) & (height(trial) < height(a))  # NaN is never better
        a = torch.where(better, trial, a)
        damping = torch.where(better, damping / 5, damping * 4).clamp(1e-14, 1e8)
    return a


def _columns(function: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Row i is a linear function of the i-th basis vector."""
    numbers = torch.arange(like.numel(), device=like.device)
    pieces = [vmap(function)((part[:, None] == numbers).to(like.dtype)) for part in numbers.split(BASIS)]
    return torch.cat(pieces)


def _roughness(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The quadratic form of `roughness` on one flat image, plus a small multiple of the identity."""
    axes = range(-1, -len(shape), -1)  # feature maps, too, are smooth along all axes but the channels'
    zero = like.new_zeros(math.prod(shape))
    terms = _columns(lambda x: roughness(x.reshape(1, *shape), axes), zero)
    return gram(terms) + ANCHOR * torch.eye(len(zero), device=like.device, dtype=like.dtype)
