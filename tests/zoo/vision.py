"""Architectures for images by hand, small, layer for layer what timm and torchvision build."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 4


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)


class Pooled(nn.Module):
    """Features, averaged over the picture, and a linear layer."""

    def __init__(self, features: nn.Module, width: int, classes: int = CLASSES) -> None:
        super().__init__()
        self.features, self.head = features, nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Basic(nn.Module):
    """The block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, stride=stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        same = stride == 1 and inputs == outputs
        self.downsample = None if same else nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


def resnet(widths: tuple[int, ...] = (4, 8, 8, 8)) -> nn.Module:
    layers: list[nn.Module] = [conv(3, widths[0]), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True)]
    inputs = widths[0]
    for number, width in enumerate(widths):
        layers += [Basic(inputs, width, 2 if number == 1 else 1), Basic(width, width, 1)]
        inputs = width
    return Pooled(nn.Sequential(*layers), inputs)


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, width: int, gate: type[nn.Module]) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, max(width // 4, 2), 1), nn.Conv2d(max(width // 4, 2), width, 1)
        self.gate = gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True)), inplace=True)))


class Inverted(nn.Module):
    """The inverted residual of MobileNetV3 and EfficientNet (MBConv)."""

    def __init__(self, width: int, expansion: int, act: type[nn.Module], gate: type[nn.Module]) -> None:
        super().__init__()
        inner = width * expansion
        self.layers = nn.Sequential(
            conv(width, inner, 1), nn.BatchNorm2d(inner), act(inplace=True),
            conv(inner, inner, groups=inner), nn.BatchNorm2d(inner), act(inplace=True),
            Squeeze(inner, gate), conv(inner, width, 1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + x


def mobilenet() -> nn.Module:
    block = lambda: Inverted(6, 2, nn.Hardswish, nn.Hardsigmoid)  # noqa: E731
    return Pooled(
        nn.Sequential(conv(3, 6, stride=2), nn.BatchNorm2d(6), nn.Hardswish(inplace=True), block(), block()), 6
    )


def efficientnet() -> nn.Module:
    block = lambda: Inverted(6, 2, nn.SiLU, nn.Sigmoid)  # noqa: E731
    return Pooled(nn.Sequential(conv(3, 6, stride=2), nn.BatchNorm2d(6), nn.SiLU(inplace=True), block(), block()), 6)


class Attention(nn.Module):
    """Multi-head self-attention by torch's fused function."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(mixed.transpose(1, 2).reshape(b, n, c))


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, size: int = 16, patch: int = 8, width: int = 12) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(Encoder(width, 3), Encoder(width, 3))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, LayerNorm over channels, MLP, layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.gamma = nn.Parameter(torch.full((width,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        out = self.mlp(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + (self.gamma * out).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return Pooled(nn.Sequential(nn.Conv2d(3, 8, 4, 4), ConvNeXtBlock(8), ConvNeXtBlock(8)), 8)


class SwinBlock(nn.Module):
    """Attention in windows, shifted by roll, with a relative position bias and a mask."""

    def __init__(self, width: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, 2), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.table = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, 2))
        where = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (where[:, :, None] - where[:, None]) + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])
        region = torch.zeros(1, side, side, 1)
        if shift:
            region[:, -shift:] += 1
            region[:, :, -shift:] += 2
        parts = self._parts(region)[..., 0]
        self.register_buffer("mask", (parts[:, None] != parts[:, :, None]) * -100.0)

    def _parts(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        parts = self._parts(torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2)))
        bias = self.table[self.index.flatten()].view(*self.index.shape, 2).permute(2, 0, 1)
        mixed = self.attention(parts, bias + self.mask.repeat(b, 1, 1)[:, None])
        mixed = mixed.view(b, h // self.window, w // self.window, self.window, self.window, c)
        mixed = mixed.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        x = x + torch.roll(mixed, (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(SwinBlock(width, 4, 2, 0), SwinBlock(width, 4, 2, 1))
        self.reduction, self.norm = nn.Linear(4 * width, 2 * width, bias=False), nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch_embed(x).permute(0, 2, 3, 1))
        quarters = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.head(self.norm(self.reduction(torch.cat(quarters, -1))).mean((1, 2)))


class FlowerNet(nn.Module):
    """The network of Flower's quickstart for PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = x.view(-1, 16 * 5 * 5)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class UNet(nn.Module):
    """Down, up by a transposed convolution, a skip connection: scores of every pixel."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        two = lambda a, b: nn.Sequential(  # noqa: E731
            nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.ReLU(inplace=True)
        )
        self.down, self.bottom = two(3, 4), two(4, 8)
        self.up, self.top = nn.ConvTranspose2d(8, 4, 2, stride=2), two(8, 4)
        self.out = nn.Conv2d(4, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        low = self.bottom(F.max_pool2d(skip, 2))
        return self.out(self.top(torch.cat([skip, self.up(low)], 1)))


BY_HAND = {
    "resnet18": resnet,
    "mobilenetv3_small_100": mobilenet,
    "efficientnet_b0": efficientnet,
    "vit_tiny_patch16_224": ViT,
    "convnext_atto": convnext,
    "swin_tiny_patch4_window7_224": Swin,
}
"""Networks of timm by its names."""

SIZED = ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224")  # built for one size of images


def timm_model(name: str) -> tuple[nn.Module, int]:
    """The network of timm and the side of its images; by hand and smaller where timm is not installed."""
    try:
        import timm
    except ImportError:
        return BY_HAND[name](), 16
    side = 64 if name == "resnet18" else 32  # BatchNorm of a single example needs more than one value per channel
    return timm.create_model(name, num_classes=CLASSES, **({"img_size": side} if name in SIZED else {})), side
