"""Generators as files: safetensors, with a card that describes them. Nothing read from them is executed.

metadata      format "gradleak.generator", version, card (JSON: architecture, settings, and the fields of `Card`)
tensors       by the network's own names; "card/images": fingerprints of the images it was trained on

A file without a card whose tensors have the names of StyleGAN2-ADA is read as one: docs/priors.md shows how to convert.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.core.tree import Params
from gradleak.generators.dcgan import DCGAN, WGAN
from gradleak.generators.stages import Staged
from gradleak.generators.stylegan2 import StyleGAN2, kernel

FORMAT, VERSION = "gradleak.generator", 1
ARCHITECTURES: dict[str, type[Staged]] = {each.architecture: each for each in (DCGAN, WGAN, StyleGAN2)}
# A file with more is damaged or malicious; StyleGAN2 at 1024 x 1024 has 30 million weights in 180 tensors.
MOST_BYTES, MOST_TENSORS, MOST_TEXT, MOST_ENTRIES = 2**31, 4096, 2**20, 2**16
IMAGES = "card/images"
PUBLIC_CLAMP = 256.0  # the default of the public training script; a state dict does not hold it
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class BadGenerator(ValueError):
    """A file that holds no generator, or weights that do not fit the network that it names."""


@dataclass(frozen=True, eq=False)
class Card:
    """What is known about a generator besides its weights.

    data      the origin of its training images, for people
    split     which of them: part, rows, what was held out and how
    images    fingerprints of all of them, int64 (N,), see `fingerprints`; None: not known
    training  steps, settings, time
    score     name, value, and what it was computed on
    """

    data: str = ""
    split: Mapping[str, Any] = field(default_factory=dict)
    images: Tensor | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    score: Mapping[str, Any] = field(default_factory=dict)

    def seen(self, images: Tensor) -> Tensor:
        """Rows of these images, (N, C, H, W) in [0, 1], that the generator was trained on, with identical pixels."""
        if self.images is None:
            raise BadGenerator("This generator's card does not say which images it was trained on.")
        return torch.isin(fingerprints(images), self.images).nonzero().flatten()


def fingerprints(images: Tensor) -> Tensor:
    """A 64-bit hash of every image (C, H, W) in [0, 1], of its size and its pixels in 8 bits; int64 (N,)."""
    pixels = images.detach().cpu().clamp(0, 1).mul(255).round().byte()
    size = str(tuple(images.shape[1:])).encode()
    hashes = [hashlib.blake2b(size + row.numpy().tobytes(), digest_size=8).digest() for row in pixels]
    return torch.tensor([int.from_bytes(each, "little", signed=True) for each in hashes], dtype=torch.int64)


def save(generator: Staged, path: str | os.PathLike[str], card: Card | None = None, *, half: bool = False) -> Path:
    """Write a generator of this package. `half`: weights in float16, half the size."""
    from safetensors.torch import save_file

    if not isinstance(generator, Staged) or ARCHITECTURES.get(generator.architecture) is not type(generator):
        known = ", ".join(ARCHITECTURES)
        raise BadGenerator(f"Files hold {known}; given {type(generator).__name__}. Keep others in your own code.")
    card = card or Card()
    tensors: Params = {}
    for name, value in generator.state_dict().items():
        plain = value.detach().cpu()
        small = plain.half() if half and plain.is_floating_point() else plain
        if not bool(torch.isfinite(small).all()):
            why = "too large for half precision" if bool(torch.isfinite(plain).all()) else "not finite"
            raise BadGenerator(f"{name} is {why}: nothing was written.")
        tensors[name] = small.contiguous().clone()
    if card.images is not None:
        tensors[IMAGES] = card.images.detach().cpu().contiguous().clone()
    content = {
        "architecture": generator.architecture,
        "settings": generator.settings,
        **{name: dict(getattr(card, name)) for name in ("split", "training", "score")},
        "data": card.data,
    }
    metadata = {"format": FORMAT, "version": str(VERSION), "card": json.dumps(content, allow_nan=False)}
    path = Path(path)
    partial = path.with_name(path.name + ".part")
    save_file(tensors, partial, metadata=metadata)
    os.replace(partial, path)  # a reader never sees half a file
    return path


def load(path: str | os.PathLike[str]) -> Staged:
    """The generator of a file, float32, in evaluation mode; `read` returns its card too."""
    return read(path)[0]


def read(path: str | os.PathLike[str]) -> tuple[Staged, Card]:
    """The generator of a file, and its card. If a tensor does not fit, the error names the first one."""
    path = Path(path)
    metadata, tensors = _opened(path)
    images = tensors.pop(IMAGES, None)
    if images is not None and (images.dtype != torch.int64 or images.dim() != 1):
        raise BadGenerator(f"{path}: {IMAGES} must be int64 (N,), not {images.dtype} {tuple(images.shape)}.")
    if metadata.get("format") == FORMAT:
        content = _card(path, metadata)
        architecture, settings = content.get("architecture"), content.get("settings")
        names = ("split", "training", "score")
        card = Card(
            str(content.get("data", "")), images=images, **{name: _table(path, content, name) for name in names}
        )
    elif "synthesis.b4.const" in tensors:
        architecture, settings = StyleGAN2.architecture, _public_settings(path, metadata, tensors)
        card = Card("not said: converted from a public StyleGAN2-ADA network")
    else:
        raise BadGenerator(
            f"{path} holds no generator: it has neither a card of gradleak nor the names of StyleGAN2-ADA "
            f"(synthesis.b4.const, ...); it begins with {next(iter(tensors), 'nothing')!r:.80}. docs/priors.md "
            "says how to convert one."
        )
    network = _built(path, architecture, settings)
    _fill(path, network, tensors)
    network.card = card  # so that an audit can check whether its targets were training images
    return network, card


# --- reading untrusted files -----------------------------------------------------------------------------------------


def _opened(path: Path) -> tuple[dict[str, str], Params]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise BadGenerator(f"There is no file {path}.")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise BadGenerator(f"{path} has {size:,} bytes; a generator has at most {MOST_BYTES:,}.")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            if len(names) > MOST_TENSORS:
                raise BadGenerator(f"{path} has {len(names)} tensors; a generator has at most {MOST_TENSORS}.")
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, KeyError, OverflowError, RuntimeError) as problem:
        if isinstance(problem, BadGenerator):
            raise
        message = f"{path} cannot be read as safetensors ({type(problem).__name__}: {problem})."
        advice = "Pickles (.pkl, .pt) are never opened here: docs/priors.md says how to convert one."
        raise BadGenerator(f"{message} It may be cut off; copy it again. {advice}") from None


def _card(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if metadata.get("version") != str(VERSION):
        raise BadGenerator(f"{path} is of version {metadata.get('version')!r:.20}; this gradleak reads {VERSION}.")
    text = metadata.get("card", "")
    if len(text) > MOST_TEXT:
        raise BadGenerator(f"{path}: its card has {len(text):,} characters; at most {MOST_TEXT:,} are read.")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise BadGenerator(f"{path}: its card is not a JSON object.")
    return content


def _table(path: Path, content: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise BadGenerator(f"{path}: {name} of its card is not an object.")
    return table


def _built(path: Path, architecture: Any, settings: Any) -> Staged:
    """The network without memory for its weights: numbers in a file must not allocate memory."""
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise BadGenerator(f"{path}: unknown architecture {architecture!r:.40}; known: {', '.join(ARCHITECTURES)}.")
    if not isinstance(settings, dict):
        raise BadGenerator(f"{path}: the settings of its card are not an object.")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    for name, value in values.items():
        counts = value if isinstance(value, tuple) else (value,)
        fits = all(count is None or (_number(count, name) and 0 < count <= MOST_ENTRIES) for count in counts)
        if not fits or len(counts) > 32:
            raise BadGenerator(f"{path}: the setting {name!r:.40} cannot be {value!r:.80}.")
    shape, layers = values.get("shape"), values.get("layers", 1)
    sound = isinstance(shape, tuple) and len(shape) == 3 and None not in shape and max(shape) <= 4096
    if not sound or not isinstance(layers, int) or layers > 64:
        raise BadGenerator(f"{path}: its settings are not those of a {architecture}: {settings!r:.200}.")
    try:
        with torch.device("meta"):
            return ARCHITECTURES[architecture].of(values)
    except (TypeError, ValueError) as problem:
        raise BadGenerator(f"{path}: no {architecture} has these settings: {problem}") from None


def _number(value: Any, name: str) -> bool:
    kinds = (int, float) if name == "clamp" else (int,)
    return isinstance(value, kinds) and not isinstance(value, bool)


def _fill(path: Path, network: Staged, tensors: Params) -> None:
    """Load the weights; the error names the first that does not fit."""
    wanted = network.state_dict()
    whole = f"for this {network.architecture} of {'x'.join(map(str, network.shape))}"
    for name, like in wanted.items():
        if name not in tensors:
            raise BadGenerator(f"{path}: tensor {name} is missing; wanted {tuple(like.shape)} {whole}.")
        tensor = tensors[name]
        if tensor.shape != like.shape:
            raise BadGenerator(
                f"{path}: tensor {name} has shape {tuple(tensor.shape)}; wanted {tuple(like.shape)} {whole}."
            )
        if like.is_floating_point() != (tensor.dtype in _FLOATS):
            raise BadGenerator(f"{path}: tensor {name} is {tensor.dtype}; wanted {like.dtype}.")
        if like.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise BadGenerator(f"{path}: tensor {name} holds NaN or infinity.")
        if name.endswith("resample_filter") and not torch.allclose(tensor.float(), kernel(), atol=1e-4):
            raise BadGenerator(f"{path}: tensor {name} is another filter than [1, 3, 3, 1], which is not supported.")
    if odd := [name for name in tensors if name not in wanted]:
        shape = tuple(tensors[odd[0]].shape)
        raise BadGenerator(f"{path}: tensor {odd[0]!r:.80} of shape {shape} has no place {whole}.")
    exact = {name: tensors[name].to(like.dtype) for name, like in wanted.items()}
    network.load_state_dict(exact, assign=True)
    assert not any(value.is_meta for value in (*network.parameters(), *network.buffers()))
    network.requires_grad_(False).eval()


def _public_settings(path: Path, metadata: Mapping[str, str], tensors: Params) -> dict[str, Any]:
    """Settings of a StyleGAN2-ADA generator, from the shapes of its tensors."""

    def shape(name: str, axes: int) -> torch.Size:
        if name not in tensors:
            raise BadGenerator(f"{path}: tensor {name} is missing; a StyleGAN2-ADA generator with skips has it.")
        if tensors[name].dim() != axes:
            raise BadGenerator(f"{path}: tensor {name} has shape {tuple(tensors[name].shape)}; wanted {axes} axes.")
        return tensors[name].shape

    sizes = sorted({int(block[1]) for name in tensors if (block := re.match(r"synthesis\.b(\d{1,4})\.", name))})
    layers = len([name for name in tensors if re.fullmatch(r"mapping\.fc\d+\.weight", name)])
    embedded, classes = shape("mapping.embed.weight", 2) if "mapping.embed.weight" in tensors else (0, None)
    style, inputs = shape("mapping.fc0.weight", 2)
    if layers > 1:
        style = shape(f"mapping.fc{layers - 1}.weight", 2)[0]
    try:
        clamp = float(metadata.get("conv_clamp", PUBLIC_CLAMP))
    except ValueError:
        raise BadGenerator(f"{path}: conv_clamp is {metadata['conv_clamp']!r:.40}, no number.") from None
    return {
        "shape": [shape(f"synthesis.b{sizes[-1]}.torgb.weight", 4)[0], sizes[-1], sizes[-1]],
        "classes": classes,
        "latent": inputs - embedded,
        "style": style,
        "layers": layers,
        "widths": [shape(f"synthesis.b{size}.conv1.weight", 4)[0] for size in sizes],
        "clamp": clamp if clamp > 0 else None,
        "embedded": embedded or None,
    }


def parameters(network: nn.Module) -> int:
    """Number of weights."""
    return sum(value.numel() for value in network.parameters())
