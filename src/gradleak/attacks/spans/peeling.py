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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.attacks.spans.equations import Frontier, Solution, System, acts_by_entry, wrong_relus
from gradleak.attacks.spans.norms import levelled
from gradleak.attacks.spans.passes import Network
from gradleak.core.tree import Params
from gradleak.parts.row_space import plain
from gradleak.scenario.task import Batch

MOST_OPEN = 768  # directions that the ReLUs above are asked for
AHEAD = 3  # ReLUs above that are asked
EXPLAINED = 1e-4  # a larger share of dL/dW that the maps leave, and a delta was wrong
DOUBTFUL = 30.0  # entries of a map up to so many times its error may be zero
PRIOR = 10.0  # entries of the whole map that count at each place
TAIL = 4.0  # deviations of noise that no zero entry exceeds, but for a few
GAP = 3.0  # the first entry that is on is so many times as large as the one before
DECODINGS = 20  # rounds in which wrong ReLUs are looked for
SETTLING, CHORDS, SETTLED = 6, 20, 1e-7  # behind norms in training mode: solutions, their steps, least change
GAINS = 0.95  # of what was unexplained before: less was gained, and the last ReLUs are taken back
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


def peel(
    network: Network,
    update: Params,
    layer: str,
    maps: Tensor,
    bases: Mapping[str, Tensor] = MappingProxyType({}),
    most: int | None = None,
) -> tuple[list[Known], Frontier | None]:
    """The maps below those that `layer` sees, (examples, C, H, W), the earliest last, `most` of them; and the frontier.

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
        while number and len(found) != most:
            below, pins[number] = _below(network, update, batch, (number, values, pins))
            if isinstance(below, Frontier):
                errors = found[-1].errors if found else errors_of(values)
                weight = below.units.square() / below.units.square().sum()
                return found, below if float((weight * errors).sum()) < SURE else None
            if below is None or not below.unexplained <= EXPLAINED:  # nor if it is not finite
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


def noise_of(values: Tensor) -> Tensor:
    """(examples, 1, H, W): the deviation of the entries at each place, by those below zero: some are told worse."""
    squares, below = values.clamp(max=0).square(), (values < 0).to(values)
    whole = squares.sum((1, 2, 3), keepdim=True) / below.sum((1, 2, 3), keepdim=True).clamp_min(1)
    return ((squares.sum(1, keepdim=True) + PRIOR * whole) / (below.sum(1, keepdim=True) + PRIOR)).sqrt()


def zeros_end(values: Tensor) -> Tensor:
    """(examples, 1, H, W): entries up to here are zero with an error.

    Errors above zero may be larger than all below. They are so many that the next entry is far from the last of them:
    the largest gap is the end. Where there is none, it is the largest entry below zero, at most `TAIL` deviations.
    """
    ends, noise = [], noise_of(values)
    for each in (values / noise.clamp_min(1e-300)).flatten(1):
        error = each.clamp(max=0).abs().amax().clamp_max(TAIL)
        above = each[(each > error) & (each < DOUBTFUL * error)].sort().values
        steps = torch.cat([error[None], above, DOUBTFUL * error[None]])
        ratios = steps[1:] / steps[:-1].clamp_min(1e-300)
        ends.append(steps[int(ratios.argmax())] if float(ratios.max()) > GAP else error)
    return torch.stack(ends).view(-1, 1, 1, 1) * noise


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
    error = TAIL * noise_of(values)
    least = 1e-3 * error + 1e-300  # of an entry that is on
    on = values > zeros_end(values)
    alive = on.flatten(1).any(1)  # the others are lost: their part of the gradient is noise

    def cases(
        pinned: Tensor, seen: Tensor | None = None, gate: bool | None = None
    ) -> tuple[list[str], list[Tensor], Sequence[int]]:
        before = {} if seen is None else {number - 1: seen}
        gates = {} if gate is None else {number: gate}
        done = network.run(batch, {**pins, **before, number: pinned}, gates=gates)
        made = done.relus.outputs[number - 1]
        names = [name for name, seen in done.seen.items() if seen is made]
        return names, network.deltas(done, names, update) if names else [], made.shape

    first = torch.where(on, values, 0.0)
    names, all_on, shape = cases(first, gate=True)
    modules: list[Any] = [network.task.model.get_submodule(name) for name in names]

    def off_by(pinned: Tensor, seen: Tensor | None) -> list[Tensor]:
        """The deltas if none is on: norms in training mode bring something from the other places."""
        return cases(pinned, seen, gate=False)[1] if network.norms else [torch.zeros_like(every) for every in all_on]

    there = alive.view(-1, 1, 1, 1)
    all_on = (
        [(opened - closed) * there for opened, closed in zip(all_on, off_by(first, None), strict=True)] if names else []
    )
    if not names or not bool(alive.any()):
        return None, values
    if not all(isinstance(module, nn.Conv2d) and plain(module) for module in modules):
        return None, values
    gradients = [update[f"{name}.weight"].double() for name in names]
    sent = System(modules, gradients, (int(alive.sum()), *shape[1:]))
    if network.norms and not sent.whole:
        return None, values  # the deltas there need the gradient itself

    def placed(solved: Solution) -> Tensor:
        maps = values.new_zeros(shape)
        maps[alive] = solved.maps
        return maps

    def filled(solved: Solution, pinned: Tensor, roughly: bool = False) -> Tensor:
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

    def settled(solved: Solution, pinned: Tensor, seen: Tensor) -> Tensor:
        """The maps whose own deltas they fit, behind norms in training mode: a chord method from the solution."""
        last = float("inf")
        for _ in range(CHORDS):
            deltas = [delta[alive] for delta in network.balanced(names, cases(pinned, seen)[1])]
            moved = replace(solved, maps=seen[alive] + solved.step(sent.rest(deltas, seen[alive])))
            before, seen = seen, filled(moved, pinned, roughly=True).clamp_min(0)
            change = float((seen - before).norm() / seen.norm())
            if not SETTLED < change < last:
                break
            last = change
        return seen

    seen: Tensor | None = None
    best: tuple[float, Tensor, list[Tensor], Solution] | None = None
    for _ in range(DECODINGS):
        pinned = torch.where(on, values.abs().maximum(least), 0.0)
        for _ in range(SETTLING):
            deltas = cases(pinned, seen)[1]
            filled_in = sent.filled([delta[alive] for delta in deltas])
            if filled_in is None:
                return None, pinned
            solved = (system := filled_in).solve([delta[alive] for delta in network.balanced(names, deltas)])
            if solved is None or not network.norms or len(solved.free) * shape[1] > MOST_OPEN:
                break
            before, seen = seen, filled(solved, pinned, roughly=True).clamp_min(0)
            if before is not None and float((seen - before).norm()) < SETTLED * float(seen.norm()):
                break
            seen = settled(solved, pinned, seen)
        if solved is None:
            return None, pinned
        scarce = len(solved.free) > 0 and not system.overdetermined  # what is filled in there would not be sure
        if len(solved.free) * shape[1] > MOST_OPEN or (scarce and not network.norms):
            # Behind norms in training mode the deltas need the whole map: what is seen well has no sure values.
            return (None if network.norms else solved.frontier(names[0], alive)), pinned
        maps = filled(solved, pinned, roughly=True) if network.norms else placed(solved)
        unexplained = sent.unexplained([delta[alive] for delta in deltas], maps[alive])
        if best is not None and unexplained > GAINS * best[0]:
            break
        best = (unexplained, pinned, deltas, solved)
        doubt = ~on | (values < DOUBTFUL * error)
        flips = [
            wrong_relus(module, gradient, delta, (every, on, doubt), maps, spare)
            for module, gradient, delta, every, spare, off in zip(
                modules, system.gradients, deltas, all_on, solved.spare, off_by(pinned, seen), strict=True
            )
            if delta.shape == on.shape and acts_by_entry(delta - off, every * on)
        ]
        if not any(bool(flip.any()) for flip in flips):
            break
        on = on ^ torch.stack(flips).any(0)
    assert best is not None
    _, pinned, deltas, solved = best
    maps = filled(solved, pinned)
    unexplained = sent.unexplained([delta[alive] for delta in deltas], maps[alive])
    return Known(tuple(names), maps, unexplained, errors_of(maps)), pinned


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
