"""Networks that tell real images from generated ones during training; not stored afterwards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradleak.generators.stages import doublings, normal
from gradleak.generators.stylegan2 import Linear, activated, boxes


class Scaled(nn.Module):
    """A convolution of unit weights with a gain of 1 / sqrt(fan-in); before halving it smooths."""

    def __init__(
        self, inputs: int, outputs: int, size: int, halve: bool = False, seed: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.weight = normal(outputs, inputs, size, size, generator=seed)
        self.bias = nn.Parameter(torch.zeros(outputs)) if size > 1 or not halve else None
        self.size, self.halve, self.gain = size, halve, 1 / math.sqrt(inputs * size * size)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * self.gain
        if not self.halve:
            x = functional.conv2d(x, weight, padding=self.size // 2)
        elif self.size == 1:
            x = functional.conv2d(boxes(functional.pad(x, (1, 1, 1, 1)), 3)[..., ::2, ::2], weight)
        else:
            x = functional.conv2d(boxes(functional.pad(x, (2, 2, 2, 2)), 3), weight, stride=2)
        return x if self.bias is None else x + self.bias[:, None, None].to(x.dtype)


class Residual(nn.Module):
    """StyleGAN2's (Karras et al., CVPR 2020): residual blocks that halve, the spread within a group, two linear layers.

    With classes, their embedding times the features is added (Miyato, Koyama, ICLR 2018). Groups are neighbours in the
    batch, so that real and generated images can share a batch.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int | None,
        widths: Sequence[int],
        group: int = 4,
        seed: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        start, times = doublings(shape)
        inward = list(widths)[::-1]  # from the size of the image to the smallest
        self.group = group
        self.first = Scaled(shape[0], inward[0], 1, seed=seed)
        self.same = nn.ModuleList(Scaled(a, a, 3, seed=seed) for a in inward[:times])
        self.halve = nn.ModuleList(Scaled(a, b, 3, True, seed) for a, b in zip(inward, inward[1:]))
        self.skip = nn.ModuleList(Scaled(a, b, 1, True, seed) for a, b in zip(inward, inward[1:]))
        deepest = inward[-1]
        self.last = Scaled(deepest + 1, deepest, 3, seed=seed)
        self.inner = Linear(deepest * start[0] * start[1], deepest, seed=seed)
        self.out = Linear(deepest, 1, seed=seed)
        self.embed = normal(classes, deepest, generator=seed) if classes else None

    def forward(self, x: Tensor, shares: Tensor | None = None) -> Tensor:
        """Images in [-1, 1] -> logits, (B,)."""
        x = activated(self.first(x))
        for same, halve, skip in zip(self.same, self.halve, self.skip):
            x = (activated(halve(activated(same(x)))) + skip(x)) * math.sqrt(0.5)
        x = activated(self.last(torch.cat([x, spread(x, self.group)], 1)))
        x = activated(self.inner(x.flatten(1)))
        logits = self.out(x)[:, 0].float()
        if self.embed is not None and shares is not None:
            logits = logits + (x * (shares @ self.embed).to(x.dtype)).sum(1).float() / math.sqrt(x.shape[1])
        return logits


class Plain(nn.Module):
    """DCGAN's discriminator: convolutions of stride 2 with leaky ReLU, one linear layer.

    Without BatchNorm: R1 penalises each image's own gradient, which BatchNorm mixes.
    """

    def __init__(
        self, shape: tuple[int, int, int], classes: int | None, width: int, seed: torch.Generator | None = None
    ) -> None:
        super().__init__()
        start, times = doublings(shape)
        widths = [shape[0], *(min(8, 2**stage) * width for stage in range(times))]
        self.stages = nn.ModuleList(nn.Conv2d(a, b, 4, 2, 1) for a, b in zip(widths, widths[1:]))
        self.out = nn.Linear(widths[-1] * start[0] * start[1], 1)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                fan_in = module.weight[0].numel()
                module.weight = normal(*module.weight.shape, std=math.sqrt(2 / fan_in), generator=seed)
                assert module.bias is not None
                nn.init.zeros_(module.bias)
        self.embed = normal(classes, self.out.in_features, std=0.02, generator=seed) if classes else None

    def forward(self, x: Tensor, shares: Tensor | None = None) -> Tensor:
        for stage in self.stages:
            x = functional.leaky_relu(stage(x), 0.2)
        x = x.flatten(1)
        logits = self.out(x)[:, 0].float()
        if self.embed is not None and shares is not None:
            logits = logits + (x * (shares @ self.embed).to(x.dtype)).sum(1).float()
        return logits


def spread(x: Tensor, group: int) -> Tensor:
    """The mean standard deviation over each group of neighbours, (B, 1, H, W): it reveals copies of one image."""
    count = math.gcd(group, len(x))
    grouped = x.float().reshape(-1, count, *x.shape[1:])
    deviation = (grouped.var(1, correction=0) + 1e-8).sqrt().mean((1, 2, 3))
    return deviation.repeat_interleave(count)[:, None, None, None].expand(-1, 1, *x.shape[2:]).to(x.dtype)
