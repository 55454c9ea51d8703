"""Where peeling begins: a deep layer whose maps follow in closed form, and that sees all of an example.

The deepest such layer is asked first: it has the fewest places, so its span is the most complete. Its maps come without
their scale, which the layers behind it tell: only the true scale puts what they see into their spans.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.attacks.spans.equations import Frontier
from gradleak.attacks.spans.maps import Maps, separated, solve_maps
from gradleak.attacks.spans.passes import Network, is_cut
from gradleak.attacks.spans.peeling import Known, errors_of, peel, zeros_end
from gradleak.attacks.spans.unsent import by_rows
from gradleak.core.random import Draws
from gradleak.core.tree import Params
from gradleak.parts.row_space import Layer, rows

SCALES = (1e-3, 1e3)  # root mean square of a map's entries: where its scale is searched for
GRID, ZOOMS = 49, 8  # scales in one pass; passes, each around the best of the one before
FLOOR = 1e-6  # share of the classifier's gradient that is rounding
TRIED = 5  # layers at most, of those that overlap
BELOW = 3  # maps that are peeled to see the scale: one of them sees all, in blocks of up to three convolutions
STEP = 1e-4  # relative, of a difference
HOMOGENEOUS = 1e-6  # relative distance of what a map of double the scale gives from the double
SCALE_ERROR = 1e-2  # relative, what the spans' scale may be wrong by
EXACT = 1e-3  # relative error of a map that tells the scale of those above better than the spans
SURPLUS = 2  # entries that were sent of each class of the classifier, for each example
ENOUGH = 4  # maps below the first: a wrong ReLU shows earlier


def anchored(
    network: Network, update: Params, layers: tuple[Layer, ...], spans: Params, examples: int, draws: Draws
) -> tuple[list[Known], Frontier | None, dict[str, Maps]]:
    """All known maps of the examples that are told apart, the deepest first; the frontier; and the maps in closed form.

    layers   those that tell, in the order of the forward pass
    spans    of each, (rank, inputs)
    """
    with torch.no_grad():
        shapes = {name: tuple(seen.shape[1:]) for name, seen in network.run(network.task.blank(1), {}).seen.items()}
    solved = dict[str, Maps]()
    for layer in layers:
        module: Any = network.task.model.get_submodule(layer.name)
        if overlaps(module):
            closed = solve_maps(
                module, spans[layer.name], shapes[layer.name], examples, draws, layer.rows, layer.centred
            )
            if closed.determined:
                solved[layer.name] = closed
    bases = {name: each.basis for name, each in solved.items()}
    if not network.classifier or not bool(update[f"{network.classifier}.weight"].any()):
        return [], None, solved
    unsent = update[f"{network.classifier}.weight"].isnan()
    best, frontier = list[Known](), None
    for name in list(reversed(solved))[:TRIED]:
        if not is_cut(network, name, shapes[name]):
            continue
        apart = separated(bases[name])
        if not len(apart) or (best and len(apart) < len(best[0].maps)):
            continue
        place = [layer.name for layer in layers].index(name)
        behind = {each.name: spans[each.name] for each in layers[place + 1 :]}
        if not behind and bool(unsent.any()) and (len(apart) > 1 or bool(unsent.all())):
            continue  # nothing tells the scale
        centred = frozenset(each.name for each in layers if each.centred)
        maps = scaled(network, name, apart.reshape(-1, *shapes[name]), behind, update, centred)
        maps = rescaled(network, classified(network, update, name, maps), name, maps, bases)
        anchor = Known((name,), maps.clamp_min(0), solved[name].level, errors_of(maps))
        peeled, beyond = peel(network, classified(network, update, name, maps), name, maps, bases)
        if not best or (len(apart), len(peeled)) > (len(best[0].maps), len(best) - 1):
            best, frontier = [anchor, *peeled], beyond
        if len(apart) == solved[name].examples and len(peeled) >= ENOUGH:
            break
    return best, frontier, solved


@torch.enable_grad()
def classified(network: Network, update: Params, layer: str, maps: Tensor) -> Params:
    """The update with the whole gradient of the classifier, if a part of it was not sent.

    Behind the maps (examples, C, H, W) that `layer` sees its inputs are known, and its gradient is linear in one number
    for each class and example: told by the entries that were sent, or else by the gradient of the layer.
    """
    name = f"{network.classifier}.weight"
    if network.norms or not bool(update[name].isnan().any()):  # norms in training mode mix the examples
        return update
    batch = network.task.blank(len(maps))
    batch = {**batch, "x": batch["x"].requires_grad_()}
    number = network.run(batch, {}).made_by(layer)
    assert number is not None  # it is a cut
    done = network.run(batch, {number: maps.clamp_min(0)})
    features, logits = done.seen[network.classifier].detach(), done.given[network.classifier]
    if int((~update[name].isnan()).sum(1).min()) >= SURPLUS * len(maps):
        return {**update, name: by_rows(update[name].double(), features)}
    patches = rows(network.task.model.get_submodule(layer), done.seen[layer].detach())
    told = by_rows(update[f"{layer}.weight"].flatten(1).double(), patches) @ torch.linalg.pinv(patches)
    told = told.unflatten(1, (len(maps), -1)).movedim(1, 0).flatten(1)
    slopes = [
        torch.autograd.grad(logits[:, each].sum(), done.given[layer], retain_graph=True)[0].flatten(1)
        for each in range(logits.shape[1])
    ]
    deltas = torch.linalg.lstsq(torch.stack(slopes, 2), told[..., None]).solution[..., 0]  # (examples, classes)
    return {**update, name: deltas.T @ features}


def overlaps(module: nn.Module) -> bool:
    """Do the patches of this layer share entries, and does no shifted map have the same ones?"""
    return isinstance(module, nn.Conv2d) and max(module.stride) == 1 and max(module.kernel_size) > 1


@torch.no_grad()
def scaled(
    network: Network,
    layer: str,
    maps: Tensor,
    behind: Mapping[str, Tensor],
    update: Params,
    centred: Collection[str] = (),
) -> Tensor:
    """The maps (examples, C, H, W) at the scale at which all that the layers behind see lies in their spans.

    Behind an untrained network's maps that is every scale (`scaled_by_bias`).

    centred   the layers whose spans hold differences of rows only
    """
    classifier, spans = update[f"{network.classifier}.weight"].double(), dict(behind)
    part = None
    if bool(classifier.isnan().any()):
        part = classifier if len(maps) == 1 else None
    else:
        _, values, directions = torch.linalg.svd(classifier, full_matrices=False)
        rank = int((values > FLOOR * values[0]).sum())
        if rank < len(classifier):
            spans[network.classifier] = directions[:rank]
    found = []
    for single in maps.double():
        unit = single / single.square().mean().sqrt()
        low, high = (float(torch.tensor(end).log()) for end in SCALES)
        for _ in range(ZOOMS):
            scales = torch.linspace(low, high, GRID, dtype=unit.dtype, device=unit.device).exp()
            outside = _outside(network, layer, scales.view(-1, 1, 1, 1) * unit.clamp_min(0), spans, centred, part)
            best = float(scales[int(outside.argmin())].log())
            step = (high - low) / (GRID - 1)
            low, high = best - step, best + step
        found.append(unit * torch.tensor(best, dtype=unit.dtype).exp())
    return scaled_by_bias(network, layer, torch.stack(found), update)


def scaled_by_bias(network: Network, layer: str, maps: Tensor, update: Params) -> Tensor:
    """The maps at the scale that the classifier's bias tells, if all that follows them is homogeneous; else as given.

    Without biases, h(k map) = k h(map) for the classifier's inputs h: spans are the same at every scale. At k_b times
    the true one dL/dW = sum_b delta_b h_b^T gives delta_b / k_b, and dL/db = sum_b delta_b tells the k_b.
    """
    bias, weight = update.get(f"{network.classifier}.bias"), update[f"{network.classifier}.weight"]
    if bias is None or not bool(bias.any()) or bool(bias.isnan().any() | weight.isnan().any()):
        return maps

    def features(scale: float) -> Tensor:
        batch = network.task.blank(len(maps))
        number = network.run(batch, {}).made_by(layer)
        assert number is not None  # it is a cut
        return network.run(batch, {number: scale * maps.clamp_min(0)}).seen[network.classifier]

    here = features(1.0)
    if float((features(2.0) - 2 * here).norm()) > HOMOGENEOUS * float(here.norm()):
        return maps
    deltas = weight.double() @ torch.linalg.pinv(here)  # (classes, examples)
    factors = torch.linalg.lstsq(deltas, bias.double()[:, None]).solution[:, 0]
    return maps / torch.where(factors > 0, factors, 1.0).view(-1, 1, 1, 1)


def rescaled(network: Network, update: Params, layer: str, maps: Tensor, bases: Mapping[str, Tensor]) -> Tensor:
    """The maps (examples, C, H, W) at the scale at which those below them make them: spans tell it to 1e-4 at best.

    With its ReLUs as they are, the network is affine from a cut below to these maps: s maps = t J below + c, where on.
    """
    peeled, _ = peel(network, update, layer, maps, bases, BELOW)
    cut = next((each for each in peeled if is_cut(network, each.layers[0], each.maps.shape[1:])), None)
    if cut is None:
        return maps
    done = network.run(network.task.blank(1), {})
    first, last = done.made_by(cut.layers[0]), done.made_by(layer)
    assert first is not None  # both are maps that a ReLU made
    assert last is not None
    batch = network.task.blank(len(maps))

    def made(below: Tensor) -> Tensor:
        with torch.no_grad():
            return network.run(batch, {first: below}, until=last).relus.inputs[last]

    here = made(cut.maps)
    slope = (made(cut.maps * (1 + STEP)) - here) / STEP
    factors = []
    on_in_both = (maps > zeros_end(maps)) & (here > 0)  # an error above zero is no entry that is on
    each = zip(maps, here, slope, on_in_both, cut.errors, strict=True)
    for single, value, along, on, error in each:
        columns = torch.stack([single[on], -along[on]], 1)
        factor = torch.linalg.lstsq(columns, (value - along)[on][:, None]).solution[0]
        better = abs(float(factor) - 1) < SCALE_ERROR and float(error) < EXACT
        factors.append(factor if better else torch.ones_like(factor))
    return maps * torch.stack(factors).view(-1, 1, 1, 1)


def _outside(
    network: Network,
    layer: str,
    maps: Tensor,
    spans: Mapping[str, Tensor],
    centred: Collection[str],
    part: Tensor | None = None,
) -> Tensor:
    """(maps,) mean share of the rows outside of the spans of the layers behind.

    part   of a single example's gradient of the classifier, as far as it was sent: what its inputs do not explain
    """
    number = network.run(network.task.blank(1), {}).made_by(layer)
    assert number is not None  # it is a cut: nothing behind it depends on the image
    batch = {**network.task.blank(len(maps)), "x": network.task.blank(1)["x"]}
    seen = network.run(batch, {number: maps}).seen
    total = maps.new_zeros(len(maps))
    for name, span in spans.items():
        table = rows(network.task.model.get_submodule(name), seen[name]).unflatten(0, (len(maps), -1))
        if name in centred:
            table = table - table.mean(1, keepdim=True)
        inside = (table @ span.T.to(table)).square().sum((1, 2))
        total += 1 - inside / table.square().sum((1, 2)).clamp_min(1e-30)
    if part is not None:
        there, observed, features = ~part.isnan(), part.nan_to_num(0.0), seen[network.classifier]
        sizes = features.square() @ there.to(maps).T
        fitted = ((features @ observed.T).square() / sizes.clamp_min(1e-30)).sum(1)
        total += 1 - fitted / observed.square().sum().clamp_min(1e-30)
    return total / max(1, len(spans))
