"""Pictures for people: tensors in [0, 1] to PNG bytes, data URIs and contact sheets."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

LARGEST = 128  # pixels; a report reduces larger images to this side, so that it stays small enough to send
FRAME = 64  # pixels; the same for the many pictures along a search


def picture(image: Tensor, largest: int | None = None) -> Image.Image:
    """One image (C, H, W) in [0, 1], grey or colour, as 8 bits; NaN is black, infinity white or black by its sign."""
    from PIL import Image

    if image.dim() != 3 or image.shape[0] not in (1, 3):
        raise ValueError(f"A picture needs shape (1 or 3, height, width); given {tuple(image.shape)}.")
    values = image.detach().cpu().double().nan_to_num(0.0, 1.0, 0.0).clamp(0, 1).mul(255).round().byte()
    array = values.permute(1, 2, 0).numpy()
    drawn = Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    if largest is not None and max(drawn.size) > largest:
        drawn.thumbnail((largest, largest))
    return drawn


def png(drawn: Image.Image) -> bytes:
    """The bytes of a PNG file."""
    buffer = io.BytesIO()
    drawn.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def data_uri(image: Tensor) -> str:
    """One image as `data:image/png;base64,...`."""
    return "data:image/png;base64," + base64.b64encode(png(picture(image, LARGEST))).decode("ascii")


def strip(images: Tensor) -> str:
    """Pictures (N, C, H, W) in 0 to 255 side by side, as one data URI; compressed with loss, like a film."""
    from PIL import Image

    members = [picture(image.double() / 255, FRAME) for image in images]
    width, height = members[0].size
    drawn = Image.new(members[0].mode, (width * len(members), height))
    for place, member in enumerate(members):
        drawn.paste(member, (place * width, 0))
    buffer = io.BytesIO()
    drawn.save(buffer, format="JPEG", quality=82, subsampling=0, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def difference(first: Tensor, second: Tensor) -> Tensor:
    """|first - second| as a grey image (1, H, W): black where they agree."""
    return (first.double() - second.double()).abs().nan_to_num(1.0).clamp(0, 1).mean(0, keepdim=True)


def drawable(shape: Sequence[int]) -> bool:
    """Can a field of this shape (without the batch axis) be shown as a picture?"""
    return len(shape) == 3 and shape[0] in (1, 3)


def sheet(rows: Sequence[tuple[str, Sequence[Tensor]]], scale: int | None = None) -> Image.Image:
    """A contact sheet: one labelled row of images (C, H, W) after another, enlarged without smoothing."""
    from PIL import Image, ImageDraw

    images = [image for _, row in rows for image in row]
    if not images:
        raise ValueError("A sheet needs at least one image.")
    height, width = images[0].shape[-2:]
    scale = scale or max(1, 96 // max(height, width))
    gap, columns = 6, max(len(row) for _, row in rows)
    wide, high = width * scale, height * scale  # of an enlarged image
    label = max((8 * len(text) for text, _ in rows), default=0) + gap
    size = (label + columns * (wide + gap) + gap, gap + len(rows) * (high + gap))
    drawn = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(drawn)
    for row, (text, members) in enumerate(rows):
        top = gap + row * (high + gap)
        pen.text((gap, top + high // 2 - 6), text, fill="black")
        for column, image in enumerate(members):
            enlarged = picture(image).resize((wide, high), Image.Resampling.NEAREST)
            drawn.paste(enlarged, (label + gap + column * (wide + gap), top))
    return drawn


def blank(shape: Sequence[int]) -> Tensor:
    """A black picture, for what cannot be shown."""
    return torch.zeros(tuple(shape))
