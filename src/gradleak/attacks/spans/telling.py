"""What the layers of one target tell: maps of single examples where they follow, else the span of the patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.attacks.spans.anchor import anchored, overlaps
from gradleak.attacks.spans.equations import Frontier, System
from gradleak.attacks.spans.maps import Maps, separated, solve_maps
from gradleak.attacks.spans.norms import in_evaluation
from gradleak.attacks.spans.passes import Network, is_cut
from gradleak.attacks.spans.peeling import LOST, Known
from gradleak.attacks.spans.unsent import completed, unknown
from gradleak.core.random import Draws
from gradleak.core.tree import Params
from gradleak.identify.rounding import spectral_spread
from gradleak.parts.predictions import assumed_in, gradient, noise_share, sent_entries
from gradleak.parts.row_space import Layer, rows, spanning_layers
from gradleak.parts.view import TargetView
from gradleak.scenario.task import Task, TaskError

ROUNDING = 1e-9  # below one: the largest singular value is kept
EXACT = 1e-6  # level of maps that are solved for to rounding
MOVED = 2  # directions, for each row of the examples, of a span in which rows that several local steps moved have room
PRECISE = 3e-3  # relative error of a precise map: behind one of a cut, deeper ones add kinks, and little else


@dataclass(frozen=True, eq=False)
class Told:
    """What the layers of one target tell.

    layers   those that the search uses, in the order of the forward pass
    flats    by layer, as `Outside` takes them: a point and directions
    own      by layer, (found, features): the maps of single examples; only those with errors have a true scale
    errors   by layer, (found,): their relative errors; empty where they are not known
    record   for each layer its rank, rows, level and gap
    cuts     layers that see all that the network makes of an example
    peeled   for each layer whose maps followed from a deeper one, the share of its gradient that they do not explain
    """

    layers: tuple[Layer, ...]
    flats: dict[str, Tensor]
    own: dict[str, Tensor]
    errors: dict[str, Tensor] = field(default_factory=dict)
    record: list[dict[str, Any]] = field(default_factory=list)
    peeled: dict[str, float] = field(default_factory=dict)
    frontier: Frontier | None = None
    cuts: frozenset[str] = frozenset()

    @property
    def found(self) -> int:
        return max((len(maps) for maps in self.own.values()), default=0)

    def flat_of(self, layer: Layer) -> list[Tensor]:
        """Its flat, if it tells here."""
        return [self.flats[layer.name]] if layer.name in self.flats else []

    def weights_of(self, example: int) -> dict[str, float]:
        """By layer, how much its map counts: by its error, and only the earliest ones that are needed.

        A map inside a residual block sees a part of what the network makes of the image: one of a cut is needed.
        """
        weights, enough = dict[str, float](), False
        for name, errors in self.errors.items():
            error = float(errors[example])
            weights[name] = 0.0 if enough or error > LOST else PRECISE / (PRECISE + error)
            enough = enough or (error < PRECISE and name in self.cuts)
        return weights

    def of_example(self, example: int, blank: Mapping[Layer, Tensor]) -> dict[str, Tensor]:
        """The scene fields of the search for one example: the flat and the weight of each of these layers.

        An example that was told apart has its own map.

        blank   by layer, a flat of the size of all, for layers that tell nothing here
        """
        fields = dict[str, Tensor]()
        weights = self.weights_of(example) if self.errors else dict.fromkeys(self.flats, 1.0)
        for layer, nothing in blank.items():
            name, flat = layer.name, self.flats.get(layer.name, torch.zeros_like(nothing))
            if example < len(maps := self.own.get(name, flat[:0])):
                flat, single = torch.zeros_like(flat), maps[example]
                if self.errors:
                    flat[0] = single  # a point: its scale is known
                else:
                    flat[1] = single / single.norm().clamp_min(1e-30)
            fields |= {f"span {name}": flat, f"weight {name}": torch.tensor(weights.get(name, 0.0))}
        return fields


def layers_of(
    task: Task, examples: int, weights: Params | None = None, buffers: Params | None = None
) -> tuple[Layer, ...]:
    """Convolutions that tell, alone or together. Linear layers behind the average of a map tell nothing of places."""
    task = in_evaluation(task)
    layers = spanning_layers(task, examples, weights, buffers, alone=False)
    return tuple(layer for layer in layers if isinstance(task.model.get_submodule(layer.name), nn.Conv2d))


def tells(task: Task, examples: int) -> bool:
    """Does a convolution behind others give the span of its patches for so many examples in an update?

    One that sees the image itself leaves at least its scale open, and total variation shrinks it to zero.
    """
    channels = task.fields["x"].shape[0]
    modules: list[Any] = [task.model.get_submodule(layer.name) for layer in layers_of(task, examples)]
    return any(module.in_channels != channels for module in modules)


def told_by(scene: TargetView, most: int, floor: float, draws: Draws, norms: Sequence[str] = ()) -> Told:
    """What the layers of one target tell.

    most    layers at most whose spans are searched in, where maps do not follow
    floor   of the gradient's rounding, as a share of its largest singular value
    norms   those that the client ran in training mode; the scene is in evaluation mode, with the batch's statistics
    """
    task, examples = scene.task, scene.num_examples
    candidates = layers_of(task, examples, scene.weights, scene.buffers)
    update = whole = assumed_in(scene).visible(gradient(scene), scene)
    names = [name for name, module in task.model.named_modules() if isinstance(module, nn.Conv2d)]
    network = Network.of(task, scene.weights, scene.buffers, names)
    sent = sent_entries(scene)
    if not all(bool(each.all()) for each in sent.values()):
        partial = unknown(update, sent)
        told = _completed(network, partial, candidates, (examples, floor, draws))
        if told:  # else zeros stay zeros: spans are wrong, and the whole update is matched
            update, whole = partial, {**partial, **told}
    telling = tuple(layer for layer in candidates if _told(whole[f"{layer.name}.weight"]))
    if not telling:
        raise TaskError(
            f"No layer of this network tells its inputs for {examples} examples in an update: all have more places "
            "than outputs, or their gradient was not sent. `gradleak check` lists up to how many each tells. Use 'ig'."
        )
    network = network.with_norms(update, norms, examples)
    telling = tuple(
        replace(layer, rows=layer.rows - 1, bias=False, centred=True) if layer.name in network.normed else layer
        for layer in telling
    )
    floors = {layer.name: floor + _noise(scene, f"{layer.name}.weight") for layer in telling}
    spans = {each.name: span_of(whole[f"{each.name}.weight"], each.rows, floors[each.name]) for each in telling}
    known, frontier, solved = anchored(network, update, telling, spans, examples, draws)
    record: list[dict[str, Any]] = []
    for layer in telling:
        line = {"layer": layer.name, "rank": len(spans[layer.name]), "rows": layer.rows}
        if layer.name in solved:
            line |= {"level": solved[layer.name].level, "gap": solved[layer.name].gap}
        record.append(line)
    if known[1:]:
        cuts = {each.layers[0] for each in known if is_cut(network, each.layers[0], each.maps.shape[1:])}
        return replace(_of_maps(known, frontier, record), cuts=frozenset(cuts))
    passes = scene.knows.training.passes(examples) if scene.knows.training else 1
    moved = (network, whole, telling[:most], passes, floors, examples, draws, record)
    if passes > 1 and (found := _of_moved_spans(*moved)):
        return found
    return _of_spans(telling[:most], spans, solved, examples, record)


def _told(gradient: Tensor) -> bool:
    """Is it known, and not zero?"""
    return bool(gradient.any()) and not bool(gradient.isnan().any())


def _noise(scene: TargetView, name: str) -> float:
    """The largest singular value of a known defence's noise, as a share of that of the gradient."""
    noise = noise_share(scene, [name], dropped=0.0)
    if not noise:
        return 0.0
    matrix = scene.update[name].flatten(1)
    return noise * spectral_spread(matrix, float(torch.linalg.matrix_norm(matrix, 2)))


def _completed(
    network: Network, update: Params, layers: Sequence[Layer], how: tuple[int, float, Draws]
) -> dict[str, Tensor]:
    """The gradients of the layers with the fewest rows that are told in spite of entries that were not sent.

    More rows are told worse, and peeling does without.
    """
    (examples, floor, draws), found, most = how, dict[str, Tensor](), 0
    with torch.no_grad():
        seen = network.run(network.task.blank(1), {}).seen
    for number, layer in sorted(enumerate(layers), key=lambda each: each[1].rows):
        gradient = update[f"{layer.name}.weight"].double()
        if found and layer.rows > most:
            break
        if _told(gradient):
            whole: Tensor | None = gradient
        else:
            whole = completed(gradient.flatten(1), layer.rows, draws.child(number))
            if whole is not None and bool(whole.isnan().any()):
                module: Any = network.task.model.get_submodule(layer.name)
                shape = (examples, *seen[layer.name].shape[1:])
                whole = _by_overlap(module, gradient, whole, shape, (layer.rows, floor), draws)
        if whole is not None:
            found[f"{layer.name}.weight"], most = whole.reshape(gradient.shape), layer.rows
    return found


def _by_overlap(
    module: nn.Conv2d, gradient: Tensor, whole: Tensor, shape: tuple[int, ...], layer: tuple[int, float], draws: Draws
) -> Tensor | None:
    """The gradient (outputs, C, h, w) from the columns of it that are known: maps of their channels fix its deltas.

    whole   (outputs, inputs), NaN in columns that are open
    layer   its rows; the floor
    """
    count, floor = layer
    good = ~whole.unflatten(1, (shape[1], -1)).isnan().any(2).any(0)  # channels
    if not overlaps(module) or not bool(good.any()):
        return None
    part = whole.unflatten(1, (shape[1], -1))[:, good].flatten(1)
    maps = solve_maps(module, span_of(part, count, floor), (int(good.sum()), *shape[2:]), shape[0], draws, count)
    if not maps.determined or maps.examples < shape[0]:
        return None
    patches = rows(module, maps.basis.reshape(shape[0], -1, *shape[2:]))  # (examples x places, inputs)
    deltas = (part @ torch.linalg.pinv(patches)).unflatten(1, (shape[0], -1)).transpose(0, 1)
    places = module(torch.zeros(1, *shape[1:]).to(next(module.parameters()))).shape[2:]
    filled = System([module], [gradient], shape).filled([deltas.unflatten(2, places)])
    return None if filled is None else filled.gradients[0] * deltas.any(2).any(0)[:, None, None, None]


def _of_maps(known: Sequence[Known], frontier: Frontier | None, record: list[dict[str, Any]]) -> Told:
    """What is told where the maps of single examples are known: these alone, in the order of the forward pass."""
    own = {each.layers[0]: each.maps.flatten(1) for each in reversed(known)}
    layers = tuple(Layer(name, 1, bias=False, whole=True) for name in own)
    flats = {name: _flat(rows[:0], 1) for name, rows in own.items()}
    errors = {each.layers[0]: each.errors for each in reversed(known)}
    peeled = {each.layers[0]: each.unexplained for each in reversed(known)}
    return Told(layers, flats, own, errors, record, peeled, frontier)


def _of_spans(
    layers: tuple[Layer, ...],
    spans: Params,
    solved: dict[str, Maps],
    examples: int,
    record: list[dict[str, Any]],
) -> Told:
    """What is told where nothing could be peeled: spans of patches or of maps, and the maps of one layer apart."""
    solved = {layer.name: solved[layer.name] for layer in layers if layer.name in solved}
    own, anchor = _apart(solved, examples)
    # A layer of less rank has maps of less precision: its patches tell more, once the rank is completed.
    exact = {name for name, maps in solved.items() if maps.level < EXACT}
    whole = exact | {anchor} if exact else solved.keys()
    layers = tuple(replace(layer, bias=False, whole=layer.name in whole) for layer in layers)
    flats = {
        layer.name: _flat(solved[layer.name].basis, examples) if layer.whole else _flat(spans[layer.name], layer.rows)
        for layer in layers
    }
    return Told(layers, flats, {anchor: own} if anchor else {}, record=record)


def _apart(solved: Mapping[str, Maps], examples: int) -> tuple[Tensor, str]:
    """The maps of single examples, (found, features), of the first layer that tells most of them apart; its name."""
    own, anchor = torch.zeros(0), ""
    for name, maps in solved.items():
        apart = separated(maps.basis)
        if len(apart) > len(own):
            own, anchor = apart, name
        if len(own) == examples:
            break
    return own, anchor


def _of_moved_spans(
    network: Network,
    update: Params,
    telling: tuple[Layer, ...],
    passes: int,
    floors: Mapping[str, float],
    examples: int,
    draws: Draws,
    record: list[dict[str, Any]],
) -> Told | None:
    """What several local steps tell: rows move with the weights, and the gradients of all steps span them together.

    So a span has up to so many times the directions. The rows at the weights that were sent lie in it, to the noise of
    the others. Maps in closed form are of no single network: a search starts from them, and goes on without.
    None where no layer has outputs and inputs enough.
    """
    layers, flats, solved = list[Layer](), dict[str, Tensor](), dict[str, Maps]()
    lines = {line["layer"]: line for line in record}
    with torch.no_grad():
        seen = network.run(network.task.blank(1), {}).seen
    for layer in reversed(telling):
        module: Any = network.task.model.get_submodule(layer.name)
        weight = update[f"{layer.name}.weight"]
        span = span_of(weight, layer.rows * passes, floors[layer.name])
        lines[layer.name] = {"layer": layer.name, "rank": len(span), "rows": layer.rows * passes}
        if not MOVED * layer.rows <= len(span) < span.shape[1]:
            continue  # no room for rows that moved, or so much that any image fits
        layers.insert(0, replace(layer, rows=len(span), bias=False))
        flats[layer.name] = _flat(span, len(span))
        if overlaps(module):
            few = span[: MOVED * layer.rows]
            solved[layer.name] = solve_maps(module, few, tuple(seen[layer.name].shape[1:]), examples, draws)
    if not layers:
        return None
    own, anchor = _apart(solved, examples)
    if anchor:
        layers = [replace(each, whole=True, start=True) if each.name == anchor else each for each in layers]
        flats[anchor] = _flat(solved[anchor].basis, examples)
    return Told(tuple(layers), flats, {anchor: own} if anchor else {}, record=list(lines.values()))


def _flat(directions: Tensor, rows: int) -> Tensor:
    """As `Outside` takes them: the point zero, and directions, filled up with zeros to the number of rows."""
    missing = directions.new_zeros(1 + rows - len(directions), directions.shape[1])
    return torch.cat([missing[:1], directions, missing[1:]])


def span_of(weight: Tensor, rows: int, floor: float) -> Tensor:
    """The directions of dL/dW above its rounding, (rank, inputs), in double precision."""
    matrix = weight.flatten(1).double()
    squares, left = torch.linalg.eigh(matrix @ matrix.T)  # a few times faster than an SVD of so wide a matrix
    values = squares.clamp_min(0).sqrt()
    kept = (values > min(floor, 1 - ROUNDING) * values[-1]).nonzero()[:, 0].flip(0)[:rows]
    return torch.linalg.qr((left[:, kept].T @ matrix).T)[0].T.contiguous()
