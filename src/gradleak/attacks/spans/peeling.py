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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradleak.core.tree import Params
from gradleak.parts.row_space import plain
from gradleak.scenario.task import Batch, Task

RELU = {F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
WEAK = (
    1e-4  # singular values below this share of the largest: rounding of float32 would be a percent of such directions
)
MOST_OPEN = 768  # directions that the ReLUs above are asked for
AHEAD = 3  # ReLUs above that are asked
ROUNDING = 1e-11  # share of dL/dW that a true map leaves in float32
EXPLAINED = 1e-9  # a larger share, and a delta was wrong
LEVELS = (2.0, 1.0, 0.5, 4.0, 0.25, 8.0)  # sizes, in units of the error, up to which an entry of a map may be zero
CHUNK = 64  # examples in one pass of directions


@dataclass(frozen=True, eq=False)
class Known:
    """The maps (examples, C, H, W) that some layers see.

    layers        convolutions that see them
    unexplained   share of these layers' gradients that does not follow from the maps: rounding, if they are true
    """

    layers: tuple[str, ...]
    maps: Tensor
    unexplained: float


class _Enough(Exception):
    """The pass has come as far as it is needed."""


class PinnedReLUs(TorchFunctionMode):
    """ReLUs return given maps; a derivative passes where the map is positive. Numbered in the order of the calls.

    until   stop after this one
    """

    def __init__(self, pins: Mapping[int, Tensor], until: int | None = None) -> None:
        super().__init__()
        self.pins, self.until = pins, until
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in RELU:
            return func(*args, **(kwargs or {}))
        values: Tensor = args[0] if args else kwargs["input"]
        pinned = self.pins.get(len(self.outputs))
        if pinned is None:
            output = values.clamp_min(0)
        else:
            passed = values * (pinned > 0)
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

    @classmethod
    def of(cls, task: Task, weights: Params, buffers: Params | None, layers: Sequence[str]) -> Network:
        task = task.to(next(iter(weights.values())).device, torch.float64)
        as_sent = task.buffers() if buffers is None else buffers
        buffers = {name: value.double() if value.is_floating_point() else value for name, value in as_sent.items()}
        weights = {name: value.double() for name, value in weights.items()}
        return cls(task, weights, buffers, tuple(layers), task.classifier.module)

    def run(self, batch: Batch, pins: Mapping[int, Tensor], until: int | None = None) -> Pass:
        done = Pass(PinnedReLUs(pins, until))

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


def peel(network: Network, update: Params, layer: str, maps: Tensor) -> list[Known]:
    """The maps below those that `layer` sees, (examples, C, H, W), as far as they are determined: the earliest last.

    `layer` must see all that the network makes of an example (`is_cut`), and `maps` need their true scale. Entries
    below zero show their error.
    """
    batch = network.task.blank(len(maps))
    batch = {**batch, "x": batch["x"].requires_grad_()}
    with torch.enable_grad():
        number = network.run(batch, {}).made_by(layer)
        if number is None:
            return []
        pins, found, choices = dict[int, Tensor](), list[Known](), list(_positive(maps.double()))
        while number:
            best: Known | None = None
            for choice in choices:  # which of the smallest entries are zero shows in the layer below
                done = network.run(batch, {**pins, number: choice})
                below = _below(network, update, done, (number - 1, {**pins, number: choice}))
                if below is not None and (best is None or below.unexplained < best.unexplained):
                    best, pins = below, {**pins, number: choice}
                if best is not None and best.unexplained < ROUNDING:
                    break
            if best is None or best.unexplained > EXPLAINED:
                break
            choices = list(_positive(best.maps))
            found.append(replace(best, maps=choices[0]))
            number -= 1
    return found


def _below(network: Network, update: Params, done: Pass, where: tuple[int, dict[int, Tensor]]) -> Known | None:
    names = [name for name, seen in done.seen.items() if seen is done.relus.outputs[where[0]]]
    modules = [network.task.model.get_submodule(name) for name in names]
    if not names or not all(isinstance(module, nn.Conv2d) and plain(module) for module in modules):
        return None
    return _solved(network, update, done, names, where)


def _positive(maps: Tensor) -> Iterator[Tensor]:
    """The maps without their error: what is below zero is error, and so is about as much above it."""
    error = maps.clamp(max=0).abs().amax((1, 2, 3), keepdim=True)
    for level in LEVELS:
        yield torch.where(maps > level * error, maps, 0.0)


def _solved(
    network: Network, update: Params, done: Pass, names: list[str], where: tuple[int, dict[int, Tensor]]
) -> Known | None:
    """The maps that these layers see, or None where the equations do not determine them."""
    number, pins = where
    shape = done.relus.outputs[number].shape
    modules: list[Any] = [network.task.model.get_submodule(name) for name in names]
    deltas = network.deltas(done, names, update)
    matrix = torch.cat([equations(delta, module, shape) for delta, module in zip(deltas, modules, strict=True)])
    right = torch.cat([update[f"{name}.weight"].double().permute(0, 2, 3, 1).flatten(0, 2) for name in names])
    if (matrix.shape[1] - len(matrix)) * shape[1] > MOST_OPEN or not bool(matrix.isfinite().all()):
        return None
    values, directions = torch.linalg.eigh(matrix.T @ matrix)  # a few times faster than an SVD of the matrix
    clear = values > WEAK**2 * values[-1]
    if int((~clear).sum()) * shape[1] > MOST_OPEN:
        return None
    seen = directions[:, clear]
    flat = seen @ ((seen.T @ (matrix.T @ right)) / values[clear, None])  # (examples x places, C)
    maps = flat.reshape(shape[0], *shape[2:], shape[1]).permute(0, 3, 1, 2)
    if not clear.all():
        maps = _filled(network, maps, directions[:, ~clear].T, number, pins)
    rest = matrix @ maps.permute(0, 2, 3, 1).reshape(-1, shape[1]) - right
    return Known(tuple(names), maps, float(rest.square().sum() / right.square().sum()))


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
