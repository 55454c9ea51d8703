"""Grad-CAM: how much each channel of a convolution speaks for a class, and where in the image.

    alpha_k = (1 / (h w)) sum_{m,n} d y_c / d H_k[m, n],      map = ReLU(sum_k alpha_k H_k),

y_c the logit of class c (before any softmax), H_k the k-th feature map of a layer. Defences choose channels by it and
`gradleak.curvature.gradcam` compares maps; it reads no truth, so it lives here, where defences may import it.

H is the convolution's output after the normalisation and the activation that follow it, if these are modules: a
function such as F.relu, or the addition at the end of a residual block, is not seen, and H is the value before it. The
network runs in evaluation mode, as usual for Grad-CAM: examples do not mix, so a batch gives what each example gives.

Reference: Selvaraju et al., Grad-CAM: Visual Explanations from Deep Networks, ICCV 2017.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad
from torch.nn.modules.batchnorm import _NormBase

from gradleak.core.random import Draws
from gradleak.core.registry import did_you_mean
from gradleak.core.tree import Params
from gradleak.scenario.task import Batch, Task, TaskError

NORMALISATIONS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm, nn.Identity)
ACTIVATIONS: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Softplus, nn.Sigmoid, nn.Tanh, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
)


def convolutions(task: Task) -> dict[str, nn.Conv2d]:
    """The trained two-dimensional convolutions, by the name of the module."""
    return {
        name: module
        for name, module in task.model.named_modules()
        if isinstance(module, nn.Conv2d) and module.weight.requires_grad
    }


@dataclass(frozen=True)
class Feature:
    """Where the feature map of a convolution appears: which output of which module, and its shape for one example."""

    module: str
    call: int
    shape: tuple[int, ...]


def features(task: Task) -> dict[str, Feature]:
    """The feature map of every trained convolution, in the order of the forward pass, found on a blank example."""
    names: dict[nn.Module, str] = {module: name for name, module in task.model.named_modules()}
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []  # holds the tensors, so that no two share an identity

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            calls.append((module, args[0], output))

    watched = (nn.Conv2d, *NORMALISATIONS, *ACTIVATIONS)
    handles = [module.register_forward_hook(note) for module in names if isinstance(module, watched)]
    try:
        with torch.no_grad(), _evaluation(task.model):
            task.loss(task.weights(), task.blank(1))
    finally:
        for handle in handles:
            handle.remove()

    known, where = convolutions(task), dict[str, Feature]()
    for position, (module, _, output) in enumerate(calls):
        if names[module] not in known:
            continue
        last, value = position, output
        for later in range(position + 1, len(calls)):
            follower, inputs, outputs = calls[later]
            if inputs is value and isinstance(follower, NORMALISATIONS + ACTIVATIONS):
                last, value = later, outputs
                if isinstance(follower, ACTIVATIONS):
                    break
        owner = calls[last][0]
        number = sum(other is owner for other, _, _ in calls[:last])
        where.pop(names[module], None)  # a layer that is used twice counts where it was used last
        where[names[module]] = Feature(names[owner], number, tuple(value.shape[1:]))
    return where


def guidance(batch: Batch, draws: Draws, *, single: bool = False) -> Tensor:
    """One random example of every class that is present: 1.0 where an example is chosen, else 0.0, (B,).

    `single` chooses one example in all, as the released code of TIP did by an error in its selector.
    """
    labels = _labels(batch)
    lot = draws.uniform(tuple(labels.shape))
    alike = torch.ones_like(labels[:, None] == labels) if single else labels[:, None] == labels
    return (lot >= torch.where(alike, lot, 0.0).amax(1)).to(lot.dtype)


def channel_importance(
    task: Task,
    weights: Params,
    batch: Batch,
    chosen: Tensor,
    buffers: Params | None = None,
    *,
    absolute: bool = False,
) -> dict[str, Tensor]:
    """The mean of alpha_k over the chosen examples, each for its label: (channels,) for every convolution.

    `chosen` comes from `guidance`. The mean is of signed values: channels that speak for one class and against another
    count little. `absolute` takes the mean of |alpha|. (Papers do not say which.)
    """
    labels, where = _labels(batch), _features(task)
    classes = next((f.classes for f in task.fields.values() if f.classes is not None), None) or labels.shape[0]
    # At most one example a class is chosen: a fixed number of rows, of which those not chosen count nothing.
    rows = chosen.topk(min(labels.shape[0], classes)).indices
    some = {name: value.index_select(0, rows) for name, value in batch.items()}
    counted = chosen.index_select(0, rows)
    alphas, _ = _channels(task, weights, some, buffers, where, _labels(some))

    def mean(alpha: Tensor) -> Tensor:
        alpha = alpha.abs() if absolute else alpha  # (rows, channels)
        return (alpha * counted.to(alpha)[:, None]).sum(0) / counted.to(alpha).sum()

    return {name: mean(alpha) for name, alpha in alphas.items()}


def largest(scores: Tensor, count: int) -> Tensor:
    """1.0 at the `count` channels with the largest scores, else 0.0, (channels,)."""
    return torch.zeros_like(scores).scatter(0, scores.topk(count).indices, torch.ones_like(scores))


def along_channels(values: Tensor, parameter: Tensor) -> Tensor:
    """One value for each output channel, shaped to multiply a weight or a bias."""
    return values.reshape(-1, *[1] * (parameter.dim() - 1))


def heat_maps(
    task: Task,
    weights: Params,
    batch: Batch,
    *,
    layer: str | None = None,
    target: Tensor | None = None,
    buffers: Params | None = None,
) -> Tensor:
    """(B, H, W) in [0, 1] at the size of the images: bilinear, divided by the largest value; a map of zeros stays zero.

    `layer`: a convolution, by default the last of the forward pass. `target`: the classes, by default the labels.
    """
    where = _features(task)
    if layer is not None and layer not in where:
        raise TaskError(f"Unknown convolution {layer!r}.{did_you_mean(layer, where)}")
    name = layer or list(where)[-1]
    target = _labels(batch) if target is None else target
    alphas, maps = _channels(task, weights, batch, buffers, {name: where[name]}, target)
    raw = F.relu((alphas[name][..., None, None] * maps[name]).sum(1, keepdim=True))  # (B, 1, h, w)
    full = F.interpolate(raw, size=tuple(task.fields["x"].shape[-2:]), mode="bilinear", align_corners=False)[:, 0]
    top = full.amax((-2, -1), keepdim=True)
    return torch.where(top > 0, full / torch.where(top > 0, top, 1.0), 0.0)


def _channels(
    task: Task, weights: Params, batch: Batch, buffers: Params | None, where: Mapping[str, Feature], target: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """alpha (B, channels) and feature maps (B, channels, h, w) of every layer in `where`, in one backward pass.

    Zeros are added to each map inside the forward pass, and the derivative is taken with respect to them.
    """
    like = batch["x"]
    zeros = {name: like.new_zeros(like.shape[0], *feature.shape) for name, feature in where.items()}

    def score(added: Params) -> tuple[Tensor, Params]:
        maps: Params = {}

        def pass_on(name: str, output: Tensor) -> Tensor:
            maps[name] = output
            return output + added[name]

        logits = _logits(task, weights, batch, buffers, where, pass_on)
        one_hot = (target[:, None] == torch.arange(logits.shape[1], device=logits.device)).to(logits.dtype)
        return (logits * one_hot).sum(), maps

    slopes, maps = grad(score, has_aux=True)(zeros)
    return {name: slope.mean((-2, -1)) for name, slope in slopes.items()}, maps


def _logits(
    task: Task,
    weights: Params,
    batch: Batch,
    buffers: Params | None,
    where: Mapping[str, Feature],
    pass_on: Callable[[str, Tensor], Tensor],
) -> Tensor:
    """The classifier's output in evaluation mode, with every feature map replaced by `pass_on` of it."""
    layers = {(feature.module, feature.call): name for name, feature in where.items()}
    calls: Counter[str] = Counter()
    caught: list[Tensor] = []

    def tap(module: str) -> Callable[..., Tensor | None]:
        def hook(_: nn.Module, __: Any, output: Tensor) -> Tensor | None:
            name = layers.get((module, calls[module]))
            calls[module] += 1
            return None if name is None else pass_on(name, output)

        return hook

    classifier = task.classifier.module
    handles = [
        task.model.get_submodule(module).register_forward_hook(tap(module))
        for module in {module for module, _ in layers}
    ]
    handles.append(
        task.model.get_submodule(classifier).register_forward_hook(lambda _, __, output: caught.append(output))
    )
    try:
        with _evaluation(task.model):
            task.loss(weights, batch, buffers)
    finally:
        for handle in handles:
            handle.remove()
    if caught[-1].dim() != 2:
        raise TaskError(f"Grad-CAM needs logits of shape (examples, classes); given {tuple(caught[-1].shape)}.")
    return caught[-1]


def _features(task: Task) -> dict[str, Feature]:
    if not (where := features(task)):
        raise TaskError("Grad-CAM needs feature maps, and this network has no trained nn.Conv2d.")
    return where


def _labels(batch: Batch) -> Tensor:
    if "y" not in batch:
        raise TaskError(f"Grad-CAM needs labels, a field 'y'; the batch has {', '.join(sorted(batch))}.")
    y = batch["y"]
    return y.argmax(-1) if y.is_floating_point() else y


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module has its mode back."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode
