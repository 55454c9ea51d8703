"""Maps of earlier layers from those of a deep one: behind known maps every gradient is linear in the map before it.

The maps of one deep layer fix all that follows it: its ReLUs, the features of the classifier, hence the deltas of all
later layers and of the layer's own input. Below it, for a convolution with known delta,

    dL/dW[o, c, k] = sum over places p of delta[o, p] z[c, p + k]

is linear in its input z: outputs x taps equations for places x examples unknowns, the same matrix for every channel c.
Directions that these equations leave open, or see too badly, follow from the ReLU above: where its map is positive, it
equals what the layers between make of z, which is linear in z too. A solved z gives the ReLU that made it, so the
delta of the layer below, and so on down. Batches, residual blocks and unknown labels make no difference.

`second_order.peeling` solves chains for one example, with inequalities. This one starts from maps in the middle of a
deep network and takes whole batches. R-GAP (Zhu and Blaschko, ICLR 2021) peels one example by pseudo-inverses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradleak.attacks.spans.norms import Norm, levelled, normed_layers, norms_of
from gradleak.core.tree import Params
from gradleak.parts.row_space import plain
from gradleak.scenario.task import Batch, Task

BATCH_NORM = {F.batch_norm, torch.batch_norm}
CONVOLUTIONS = {F.conv1d, F.conv2d, F.conv3d}
RELU = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
WEAK = 1e-4  # singular values below this share of the largest: rounding of float32 is a percent of such directions
MOST_OPEN = 768  # directions that the ReLUs above are asked for
AHEAD = 3  # ReLUs above that are asked
EXPLAINED = 1e-4  # a larger share of dL/dW that the maps leave, and a delta was wrong
DOUBTFUL = 30.0  # entries of a map up to so many times its error may be zero
ODD = 5.0  # residuals of an output, in units of the median, from which on it holds a wrong ReLU
REWEIGHTINGS = 10  # rounds of least squares in which such outputs lose weight
DECODINGS, FLIPS = 20, 3  # rounds in which wrong ReLUs are looked for, and how many of an output in each
CLOSE = 1e-2  # relative: two passes at slightly different maps
SETTLING, CHORDS, SETTLED = 6, 20, 1e-7  # behind norms in training mode: solutions, their steps, least change
GAINS = 0.95  # of what was unexplained before: less was gained, and the last ReLUs are taken back
TOP = 0.05  # share of the best of a round: weaker ones may follow from stronger ones
EVIDENCE = 100.0  # squared deviations of noise that a wrong ReLU explains at least
ENOUGH = 4.0  # equations of a frontier for each number of its images
WELL = 1e-2  # singular values from this share on tell a direction in spite of noise
SURE = 1e-3  # error of the deltas' ReLUs up to which a frontier is used
LOST, HOPELESS = 0.1, 0.5  # relative error from which on a map is not searched with, and not peeled with
NEAR = 0.3  # relative distance up to which a map is one of those in closed form
CHUNK = 64  # examples in one pass of directions


@dataclass(frozen=True, eq=False)
class Known:
    """The maps (examples, C, H, W) that some layers see.

    layers        convolutions that see them
    unexplained   share of these layers' gradients that does not follow from the maps: rounding, if they are true
    errors        (examples,) relative error of each map, by what lies below zero
    """

    layers: tuple[str, ...]
    maps: Tensor
    unexplained: float
    errors: Tensor


@dataclass(frozen=True, eq=False)
class Frontier:
    """What equations say of the maps before the earliest known ones: coordinates in some directions, no more.

    layer        the first convolution that sees them
    directions   (k, examples, H x W), orthonormal rows up to `units`
    values       (k, C): the maps' coordinates
    units        (examples,): maps are multiplied by them first: an example of a small loss says little
    """

    layer: str
    directions: Tensor
    values: Tensor
    units: Tensor

    @property
    def sufficient(self) -> bool:
        """Are there several equations for each number of the maps' images? Counted against places of three channels."""
        _, examples, places = self.directions.shape
        return self.values.numel() >= ENOUGH * examples * places * 3

    def padded(self, most: int) -> Frontier:
        """With empty equations, up to so many directions."""
        more = most - len(self.values)
        wide = [torch.cat([each, each.new_zeros(more, *each.shape[1:])]) for each in (self.directions, self.values)]
        return replace(self, directions=wide[0], values=wide[1])

    def residual(self, maps: Tensor) -> Tensor:
        """(k, C) of maps (examples, C, H, W)."""
        flat = (maps * self.units.view(-1, 1, 1, 1)).flatten(2)
        return torch.einsum("kbp,bcp->kc", self.directions, flat) - self.values

    def distance(self, maps: Tensor) -> Tensor:
        return self.residual(maps.to(self.values)).norm()


class _Enough(Exception):
    """The pass has come as far as it is needed."""


class PinnedReLUs(TorchFunctionMode):
    """ReLUs return given maps; a derivative passes where the map is positive. Numbered in the order of the calls.

    until   stop after this one
    norms   those in training mode, by the identity of their weight: their derivative is that of the whole batch
    closed  no derivative passes this one
    """

    def __init__(
        self,
        pins: Mapping[int, Tensor],
        until: int | None = None,
        norms: Mapping[int, Norm] = MappingProxyType({}),
        closed: int | None = None,
    ) -> None:
        super().__init__()
        self.pins, self.until, self.norms, self.closed = pins, until, norms, closed
        self.unknown: list[Tensor] = []  # what convolutions make of maps before the pinned ones
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in BATCH_NORM and (norm := self.norms.get(id(args[3] if len(args) > 3 else kwargs["weight"]))):
            return norm(args, kwargs or {}, not any(args[0] is each for each in self.unknown))
        if func in CONVOLUTIONS and self.norms:
            output = func(*args, **(kwargs or {}))
            if any(args[0] is each for each in self.outputs[: min(self.pins, default=0)]):
                self.unknown.append(output)
            return output
        if func not in RELU:
            return func(*args, **(kwargs or {}))
        values: Tensor = args[0] if args else kwargs["input"]
        pinned = self.pins.get(len(self.outputs))
        if pinned is None:
            output = values.clamp_min(0)
        else:
            passed = values * ((pinned > 0) & (len(self.outputs) != self.closed))
            output = pinned + (passed - passed.detach())
        self.inputs.append(values)
        self.outputs.append(output)
        if self.until is not None and len(self.outputs) > self.until:
            raise _Enough
        return output


@dataclass(eq=False)
class Pass:
    """One pass of the objective: what convolutions see and give, what ReLUs see and give, and the classifier."""

    relus: PinnedReLUs
    seen: dict[str, Tensor] = field(default_factory=dict)
    given: dict[str, Tensor] = field(default_factory=dict)

    def made_by(self, name: str) -> int | None:
        """The ReLU whose output this layer sees."""
        return next((n for n, output in enumerate(self.relus.outputs) if output is self.seen[name]), None)


@dataclass(frozen=True, eq=False)
class Network:
    """A model at the weights that the client received, in double precision, with passes in which ReLUs are pinned."""

    task: Task
    weights: Params
    buffers: Params
    layers: tuple[str, ...]
    classifier: str
    norms: Mapping[int, Norm] = field(default_factory=dict)
    normed: Mapping[str, str] = field(default_factory=dict)  # layers with one behind: their deltas add up to zero

    @classmethod
    def of(cls, task: Task, weights: Params, buffers: Params | None, layers: Sequence[str]) -> Network:
        task = task.to(next(iter(weights.values())).device, torch.float64)
        as_sent = task.buffers() if buffers is None else buffers
        buffers = {name: value.double() if value.is_floating_point() else value for name, value in as_sent.items()}
        weights = {name: value.double() for name, value in weights.items()}
        return cls(task, weights, buffers, tuple(layers), task.classifier.module)

    def with_norms(self, update: Params, names: Sequence[str], examples: int) -> Network:
        """The same for a client whose norms of these names were in training mode, in a batch of so many examples."""
        norms = norms_of(self.task, self.weights, update, names, examples)
        return replace(self, norms=norms, normed=normed_layers(self.task, names))

    def run(
        self, batch: Batch, pins: Mapping[int, Tensor], until: int | None = None, closed: int | None = None
    ) -> Pass:
        done = Pass(PinnedReLUs(pins, until, self.norms, closed))

        def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_: nn.Module, args: Any, output: Any) -> None:
                done.seen[name], done.given[name] = args[0], output

            return hook

        handles = [
            self.task.model.get_submodule(name).register_forward_hook(note(name))
            for name in (*self.layers, self.classifier)
        ]
        try:
            with done.relus:
                self.task.loss(self.weights, batch, self.buffers)
        except _Enough:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return done

    def deltas(self, done: Pass, names: Sequence[str], update: Params) -> list[Tensor]:
        """dL/d output of the named layers. That of the classifier follows from its gradient and its known inputs."""
        logits, features = done.given[self.classifier], done.seen[self.classifier].detach()
        observed = update[f"{self.classifier}.weight"].double()  # (classes, features) = delta^T features
        delta = observed @ torch.linalg.pinv(features)
        outputs = [done.given[name] for name in names]
        return list(torch.autograd.grad(logits, outputs, delta.T.reshape(logits.shape)))

    def weighted(self, name: str) -> nn.Conv2d:
        """A convolution with the weights that were sent."""
        module: Any = copy.copy(self.task.model.get_submodule(name))
        module._parameters = {
            each: None if value is None else nn.Parameter(self.weights.get(f"{name}.{each}", value), False)
            for each, value in module._parameters.items()
        }
        return module

    def mean_of(self, name: str) -> Tensor:
        """The mean over the batch of what a layer before a norm in training mode gives."""
        return self.buffers[f"{self.normed[name]}.running_mean"]

    def balanced(self, names: Sequence[str], deltas: Sequence[Tensor]) -> list[Tensor]:
        """Deltas that add up to zero where a norm in training mode follows."""
        means = [delta.mean((0, 2, 3), keepdim=True) for delta in deltas]
        each = zip(names, deltas, means, strict=True)
        return [delta - mean if name in self.normed else delta for name, delta, mean in each]


def peel(
    network: Network, update: Params, layer: str, maps: Tensor, bases: Mapping[str, Tensor] = MappingProxyType({})
) -> tuple[list[Known], Frontier | None]:
    """The maps below those that `layer` sees, (examples, C, H, W), the earliest last; and the frontier.

    `layer` must see all that the network makes of an example (`is_cut`), and `maps` need their true scale. Entries
    below zero show their error. `bases` hold the maps of some layers in closed form (`maps.Maps.basis`).
    """
    batch = network.task.blank(len(maps))
    batch = {**batch, "x": batch["x"].requires_grad_()}
    with torch.enable_grad():
        number = network.run(batch, {}).made_by(layer)
        if number is None:
            return [], None
        pins, found, values = dict[int, Tensor](), list[Known](), maps.double()
        while number:
            below, pins[number] = _below(network, update, batch, (number, values, pins))
            if isinstance(below, Frontier):
                errors = found[-1].errors if found else errors_of(values)
                weight = below.units.square() / below.units.square().sum()
                return found, below if float((weight * errors).sum()) < SURE else None
            if below is None or below.unexplained > EXPLAINED:
                break
            values = _in_basis(below, bases)
            errors = errors_of(values)
            values = values * (errors < HOPELESS).view(-1, 1, 1, 1)
            found.append(replace(below, maps=values.clamp_min(0), errors=errors))
            number -= 1
    return found, None


def errors_of(maps: Tensor) -> Tensor:
    """The relative error of each map, (examples,): a ReLU made it, so what is below zero is error, and half of it."""
    flat = maps.flatten(1)
    size = flat.square().sum(1)
    return torch.where(size > 0, 2 * flat.clamp(max=0).square().sum(1) / size.clamp_min(1e-30), 1.0).sqrt()


def _in_basis(known: Known, bases: Mapping[str, Tensor]) -> Tensor:
    """The maps, in the span of those in closed form: its error does not grow from layer to layer."""
    maps = known.maps
    for name in known.layers:
        if name in bases:
            flat, basis = maps.flatten(1), bases[name]
            inside = (flat @ basis.T) @ basis
            near = (inside - flat).norm(dim=1) < NEAR * flat.norm(dim=1)
            better = near & (errors_of(inside) < errors_of(flat))
            maps = torch.where(better[:, None], inside, flat).reshape(maps.shape)
    return maps


def _below(
    network: Network, update: Params, batch: Batch, above: tuple[int, Tensor, dict[int, Tensor]]
) -> tuple[Known | Frontier | None, Tensor]:
    """The maps before ReLU `number`, and what that ReLU gave: which of its entries are zero shows in the equations.

    above   number; what the ReLU gave, with an error; what later ReLUs gave
    """
    number, values, pins = above
    error = values.clamp(max=0).abs().amax((1, 2, 3), keepdim=True)
    least = 1e-3 * error + 1e-300  # of an entry that is on
    on = values > error
    alive = on.flatten(1).any(1)  # the others are lost: their part of the gradient is noise

    def cases(
        pinned: Tensor, seen: Tensor | None = None, closed: int | None = None
    ) -> tuple[list[str], list[Tensor], Sequence[int]]:
        before = {} if seen is None else {number - 1: seen}
        done = network.run(batch, {**pins, **before, number: pinned}, closed=closed)
        made = done.relus.outputs[number - 1]
        names = [name for name, seen in done.seen.items() if seen is made]
        return names, network.deltas(done, names, update) if names else [], made.shape

    everywhere = values.abs().maximum(least) * alive.view(-1, 1, 1, 1)
    names, all_on, shape = cases(everywhere)
    modules: list[Any] = [network.task.model.get_submodule(name) for name in names]

    def off_by(pinned: Tensor, seen: Tensor | None) -> list[Tensor]:
        """The deltas if none is on: norms in training mode bring something from the other places."""
        return cases(pinned, seen, number)[1] if network.norms else [torch.zeros_like(every) for every in all_on]

    all_on = [on - off for on, off in zip(all_on, off_by(everywhere, None), strict=True)] if names else []
    if not names or not all(isinstance(module, nn.Conv2d) and plain(module) for module in modules):
        return None, values
    gradients = [update[f"{name}.weight"].double() for name in names]
    system = _System(modules, gradients, (int(alive.sum()), *shape[1:]))

    def placed(solved: _Solution) -> Tensor:
        maps = values.new_zeros(shape)
        maps[alive] = solved.maps
        return maps

    def filled(solved: _Solution, pinned: Tensor, roughly: bool = False) -> Tensor:
        maps = placed(solved)
        if not len(solved.free):
            return maps
        free = values.new_zeros(len(solved.free), shape[0], shape[2] * shape[3])
        free[:, alive] = solved.free.unflatten(1, (-1, shape[2] * shape[3]))
        with_mean = [name for name in names if name in network.normed]
        if roughly and bool(alive.all()):
            moved = levelled(maps, free, [(network.weighted(name), network.mean_of(name)) for name in with_mean])
            if moved is not None:
                return moved
        return _filled(network, maps, free.flatten(1), number - 1, {**pins, number: pinned})

    def settled(solved: _Solution, pinned: Tensor, seen: Tensor) -> Tensor:
        """The maps whose own deltas they fit, behind norms in training mode: a chord method from the solution."""
        last = float("inf")
        for _ in range(CHORDS):
            deltas = [delta[alive] for delta in network.balanced(names, cases(pinned, seen)[1])]
            moved = replace(solved, maps=seen[alive] + solved.step(system.rest(deltas, seen[alive])))
            before, seen = seen, filled(moved, pinned, roughly=True).clamp_min(0)
            change = float((seen - before).norm() / seen.norm())
            if not SETTLED < change < last:
                break
            last = change
        return seen

    seen: Tensor | None = None
    best: tuple[float, Tensor, list[Tensor], _Solution] | None = None
    for _ in range(DECODINGS):
        pinned = torch.where(on, values.abs().maximum(least), 0.0)
        for _ in range(SETTLING):
            deltas = cases(pinned, seen)[1]
            solved = system.solve([delta[alive] for delta in network.balanced(names, deltas)])
            if solved is None or not network.norms or len(solved.free) * shape[1] > MOST_OPEN:
                break
            before, seen = seen, filled(solved, pinned, roughly=True).clamp_min(0)
            if before is not None and float((seen - before).norm()) < SETTLED * float(seen.norm()):
                break
            seen = settled(solved, pinned, seen)
        if solved is None:
            return None, pinned
        if len(solved.free) * shape[1] > MOST_OPEN:
            # Behind norms in training mode the deltas need the whole map: what is seen well has no sure values.
            return (None if network.norms else solved.frontier(names[0], alive)), pinned
        maps = filled(solved, pinned, roughly=True) if network.norms else placed(solved)
        unexplained = system.unexplained([delta[alive] for delta in deltas], maps[alive])
        if best is not None and unexplained > GAINS * best[0]:
            break
        best = (unexplained, pinned, deltas, solved)
        doubt = ~on | (values < DOUBTFUL * error)
        flips = [
            _flips(module, gradient, delta, (every, on, doubt), maps, spare)
            for module, gradient, delta, every, spare, off in zip(
                modules, gradients, deltas, all_on, solved.spare, off_by(pinned, seen), strict=True
            )
            if delta.shape == on.shape and _by_entry(delta - off, every * on)
        ]
        if not any(bool(flip.any()) for flip in flips):
            break
        on = on ^ torch.stack(flips).any(0)
    assert best is not None
    _, pinned, deltas, solved = best
    maps = filled(solved, pinned)
    unexplained = system.unexplained([delta[alive] for delta in deltas], maps[alive])
    return Known(tuple(names), maps, unexplained, errors_of(maps)), pinned


def _by_entry(delta: Tensor, expected: Tensor) -> bool:
    """Does each ReLU reach only its own entry?"""
    return float((delta - expected).abs().max()) <= CLOSE * float(expected.abs().max())


def _flips(
    module: nn.Conv2d,
    gradient: Tensor,
    delta: Tensor,
    relus: tuple[Tensor, Tensor, Tensor],
    maps: Tensor,
    spare: Tensor,
) -> Tensor:
    """ReLUs, (examples, outputs, h, w), that were taken for on or off and are not: the ones that explain what is left.

    With R = dL/dW[o] - sum over p of delta[o, p] a_p: entry p is wrong if R is about +-delta[o, p] a_p, less what the
    solution has made of it.

    relus   delta of all if they are on; which are; which may be wrong
    spare   (outputs, taps, taps): what the solution leaves of a change in the equations of an output
    """
    assert not isinstance(module.padding, str)
    window = (module.kernel_size, module.dilation, module.padding, module.stride)
    patches = F.unfold(maps, *window).transpose(1, 2).flatten(0, 1)  # (examples x places, C x taps)
    every, on, doubt = (each.transpose(0, 1).flatten(1) for each in relus)  # (outputs, examples x places)
    rest = gradient.flatten(1) - delta.transpose(0, 1).flatten(1) @ patches
    by_tap = patches.unflatten(1, (-1, spare.shape[-1]))
    squares = spare.flatten(1) @ (by_tap.transpose(1, 2) @ by_tap).flatten(1).T
    noise = rest.square().sum(1).median() / rest.shape[1]
    change = torch.where(on, -every, every)
    products, gram = rest @ patches.T, patches @ patches.T
    flips = torch.zeros_like(on)
    for _ in range(FLIPS):  # the best of each output, one after the other
        alone = change.square() * squares
        gain = ((2 * change * products - alone) * doubt).masked_fill(flips, 0.0)
        best = gain.argmax(1, keepdim=True)
        gain, alone = gain.gather(1, best), alone.gather(1, best)
        good = (
            (gain > torch.where(on.gather(1, best), 0.0, 0.5) * alone)
            & (gain > EVIDENCE * noise)
            & (gain > TOP * gain.max())
        )
        if not bool(good.any()):
            break
        flips.scatter_(1, best, good | flips.gather(1, best))
        products = products - change.gather(1, best) * good * gram[best[:, 0]]
    shape = delta.shape
    return flips.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class _Solution:
    """Maps, and the directions (k, examples x H x W) of each channel that the equations leave open.

    units, well, values   as in `Frontier`: what is seen well
    spare   by layer (outputs, taps, taps): what is left of a change in the equations of an output
    inverse   from the right side of the equations to maps
    """

    maps: Tensor
    free: Tensor
    spare: list[Tensor]
    units: Tensor
    well: Tensor
    values: Tensor
    inverse: Callable[[Tensor], Tensor]

    def step(self, rest: Tensor) -> Tensor:
        """The maps that explain such a rest of the equations."""
        return self.inverse(rest).reshape(len(self.maps), *self.maps.shape[2:], -1).permute(0, 3, 1, 2)

    def frontier(self, layer: str, alive: Tensor) -> Frontier:
        directions = self.well.new_zeros(len(self.well), len(alive), self.well.shape[1] // len(self.maps))
        directions[:, alive] = self.well.unflatten(1, (len(self.maps), -1))
        units = self.units.new_zeros(len(alive))
        units[alive] = self.units
        return Frontier(layer, directions, self.values, units)


@dataclass(frozen=True, eq=False)
class _System:
    """The linear equations of the layers that see one map, for given deltas."""

    modules: Sequence[Any]
    gradients: Sequence[Tensor]
    shape: Sequence[int]

    def _matrix(self, deltas: Sequence[Tensor]) -> Tensor:
        return torch.cat([equations(*each, self.shape) for each in zip(deltas, self.modules, strict=True)])

    @property
    def _right(self) -> Tensor:
        return torch.cat([gradient.permute(0, 2, 3, 1).flatten(0, 2) for gradient in self.gradients])

    def solve(self, deltas: Sequence[Tensor]) -> _Solution | None:
        """The maps, as far as the equations tell; None where these are not finite.

        Reweighted least squares: outputs whose equations a wrong ReLU spoils count for less.
        """
        matrix, right, shape = self._matrix(deltas), self._right, self.shape
        if not bool(matrix.isfinite().all()):
            return None
        # Each example in units of its own delta: a small loss is no reason to leave a direction open.
        sizes = matrix.square().sum(0).reshape(shape[0], -1).mean(1).sqrt().clamp_min(1e-300)
        units = sizes.repeat_interleave(matrix.shape[1] // shape[0])
        matrix = matrix / units
        weights = matrix.new_ones(len(matrix), 1)
        energies = self._by_output(right.square().sum(1)).clamp_min(1e-300)
        for _ in range(REWEIGHTINGS):
            values, directions = torch.linalg.eigh((weights * matrix).T @ matrix)  # faster than an SVD of the matrix
            clear = values > WEAK**2 * values[-1]
            seen = directions[:, clear]
            flat = seen @ ((seen.T @ (matrix.T @ (weights * right))) / values[clear, None])  # (examples x places, C)
            outputs = self._by_output((matrix @ flat - right).square().sum(1))
            share = (outputs / energies).median()  # rounding grows with the gradient of an output
            spread = outputs / (ODD**2 * (outputs.median() + share * energies)).clamp_min(1e-300)
            taps = torch.cat([spread.new_full((len(g),), g[0, 0].numel(), dtype=torch.long) for g in self.gradients])
            weights = (1 / (1 + spread).square()).repeat_interleave(taps)[:, None]
        maps = (flat / units[:, None]).reshape(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
        well = directions[:, values > WELL**2 * values[-1]]
        hat = (weights.sqrt() * matrix) @ (seen / values[clear].sqrt())
        spare = []
        for part, gradient in zip(hat.split(self._equations), self.gradients, strict=True):
            each = part.unflatten(0, (len(gradient), -1))  # (outputs, taps, unknowns)
            spare.append(torch.eye(each.shape[1]).to(each) - each @ each.transpose(1, 2))

        def inverse(rest: Tensor) -> Tensor:
            return seen @ ((seen.T @ (matrix.T @ (weights * rest))) / values[clear, None]) / units[:, None]

        free = (directions[:, ~clear] / units[:, None]).T
        return _Solution(maps, free, spare, sizes, well.T, well.T @ flat, inverse)

    @property
    def _equations(self) -> list[int]:
        return [gradient.shape[0] * gradient[0, 0].numel() for gradient in self.gradients]

    def _by_output(self, rows: Tensor) -> Tensor:
        """Means over the taps of each output."""
        parts = zip(rows.split(self._equations), self.gradients, strict=True)
        return torch.cat([part.reshape(len(gradient), -1).mean(1) for part, gradient in parts])

    def rest(self, deltas: Sequence[Tensor], maps: Tensor) -> Tensor:
        """What these maps leave of the right side of the equations."""
        return self._right - self._matrix(deltas) @ maps.permute(0, 2, 3, 1).reshape(-1, self.shape[1])

    def unexplained(self, deltas: Sequence[Tensor], maps: Tensor) -> float:
        """The share of the gradients' energy that these maps do not explain."""
        return float(self.rest(deltas, maps).square().sum() / self._right.square().sum())


def equations(delta: Tensor, module: nn.Conv2d, shape: Sequence[int]) -> Tensor:
    """The matrix (outputs x taps, examples x H x W) from one channel of the input to its part of dL/dW.

    delta   (examples, outputs, h, w)
    """
    assert not isinstance(module.padding, str)
    height, width = shape[2:]
    down, right = delta.shape[2:]
    (kernel_h, kernel_w), (stride_h, stride_w) = module.kernel_size, module.stride
    (pad_h, pad_w), (apart_h, apart_w) = module.padding, module.dilation
    taps = []
    for i in range(kernel_h):
        for j in range(kernel_w):
            top, start = i * apart_h, j * apart_w
            plane = delta.new_zeros(*delta.shape[:2], height + 2 * pad_h, width + 2 * pad_w)
            plane[:, :, top : top + stride_h * down : stride_h, start : start + stride_w * right : stride_w] = delta
            taps.append(plane[:, :, pad_h : pad_h + height, pad_w : pad_w + width])
    return torch.stack(taps).permute(2, 0, 1, 3, 4).reshape(delta.shape[1] * len(taps), -1)


@torch.no_grad()
def _filled(network: Network, maps: Tensor, free: Tensor, number: int, pins: dict[int, Tensor]) -> Tensor:
    """The maps, moved along free directions (k, examples x H x W) of each channel such that the ReLUs above fit."""
    examples, channels, height, width = maps.shape
    above = [n for n in range(number + 1, number + 1 + AHEAD) if n in pins]
    active = [pins[n] > 0 for n in above]

    def made(inputs: Tensor) -> Tensor:
        """(directions, examples, C, H, W) -> (directions, equations): what those ReLUs see where they are on."""
        many = len(inputs)
        held = {n: pin.repeat(many, 1, 1, 1) for n, pin in pins.items()}
        batch = network.task.blank(many * examples)
        done = network.run(batch, {**held, number: inputs.flatten(0, 1)}, until=above[-1])
        caught = [done.relus.inputs[n].unflatten(0, (many, examples)) for n in above]
        return torch.cat([value[:, on] for value, on in zip(caught, active, strict=True)], 1)

    wanted = torch.cat([pins[n][on] for n, on in zip(above, active, strict=True)])
    here = made(maps[None])[0]
    directions = free.reshape(-1, examples, 1, height, width)
    one_hot = torch.eye(channels, dtype=maps.dtype, device=maps.device)[:, None, None, :, None, None]
    moves = (one_hot * directions).flatten(0, 1)  # (channels x k, examples, C, H, W)
    size = float(maps.abs().mean()) * (height * width) ** 0.5
    columns = torch.cat([made(maps + size * part) - here for part in moves.split(max(1, CHUNK // examples))]) / size
    steps = torch.linalg.lstsq(columns.T, (wanted - here)[:, None]).solution[:, 0]
    return maps + torch.einsum("d,dbchw->bchw", steps, moves)


@torch.no_grad()
def is_cut(network: Network, layer: str, shape: Sequence[int]) -> bool:
    """Does all that the classifier sees follow from the map that this layer sees?"""
    batch = network.task.blank(2)
    noise = torch.linspace(-1, 1, batch["x"].numel(), dtype=torch.float64, device=batch["x"].device)
    batch = {**batch, "x": batch["x"] + noise.reshape(batch["x"].shape)}
    number = network.run(batch, {}).made_by(layer)
    if number is None:
        return False
    features = network.run(batch, {number: noise.new_ones(2, *shape)}).seen[network.classifier]
    return torch.equal(features[0], features[1])
