"""Measures the attack `vit`: one image off the update of ViT-Tiny/16 and ViT-Base/16 at 224 pixels, and a small one.

Rows "pair" are updates of two images of the small one, scored in the order that fits the client's images best.

    python papers/spans/vit.py [--only tiny,base] [--images 5] [--threads 2] [--out papers/spans/vit.json]

Each line of the file is one row: a client, the PSNR of every image in dB (160: equal to float32 rounding), and seconds
of an attack, wall clock and CPU. Weights are random unless a row says trained. Images are of 8 bits, as files hold
them; rows "real numbers" keep what a resize in floating point makes of them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl

SIZES = {
    "tiny": {"patch": 16, "width": 192, "heads": 3, "depth": 12, "ratio": 4},
    "base": {"patch": 16, "width": 768, "heads": 12, "depth": 12, "ratio": 4},
    "small": {"patch": 4, "width": 192, "heads": 3, "depth": 4, "ratio": 2},
}
ONE_STEP = gl.LocalTraining(lr=0.01)
MOST = 160.0


def model_of(size: str, side: int, classes: int) -> nn.Module:
    return gl.models.vit(
        shape=(3, side, side), classes=classes, generator=torch.Generator().manual_seed(0), **SIZES[size]
    )


def fixed_positions(model: nn.Module) -> nn.Module:
    """Positions that are not trained, of deviation 0.5: independent, as sines and cosines are not."""
    for name, value in model.named_parameters():
        if name.endswith("position.value"):
            nn.init.normal_(value, std=0.5, generator=torch.Generator().manual_seed(1)).requires_grad_(False)
    return model


def trained(model: nn.Module, steps: int = 200) -> nn.Module:
    """After some steps of Adam on CIFAR-10."""
    data = gl.data.load_images("cifar10", split="train", limit=50 * 64)
    make, optimiser = torch.Generator().manual_seed(0), torch.optim.Adam(model.parameters(), 5e-4)
    for _ in range(steps):
        picked = torch.randint(len(data.x), (64,), generator=make)
        loss = F.cross_entropy(model(2 * data.x[picked] - 1), data.y[picked])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    print(f"trained: loss of the last batch {loss.item():.2f}", flush=True)
    return model


def attack(model: nn.Module, x: Tensor, y: Tensor, training: gl.LocalTraining) -> dict[str, Any]:
    task = gl.Task.supervised(model, F.cross_entropy, like=(x, y), mean=0.5, std=0.5)
    seen = gl.observe(task, {"x": task.fields["x"].model(x), "y": y}, training)
    wall, cpu = time.perf_counter(), time.process_time()
    found = gl.attacks.get("vit").run(task, seen, gl.Knowledge(training=training), engine=gl.Engine(device="cpu"))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    images = task.fields["x"].unit(found.batch["x"][0].double())
    psnr = [decibels(image, own) for image, own in zip(images, x[matched(images, x)], strict=True)]
    kept = ("rank", "patches", "smallest", "residual", "open", "starts", "spans")
    return {
        "psnr": psnr if len(x) > 1 else psnr[0],
        "label": found.batch["y"][0].sort().values.equal(y.sort().values),
        "wall": wall,
        "cpu": cpu,
        **{name: found.settings[name][0] for name in kept if name in found.settings},
    }


def decibels(found: Tensor, own: Tensor) -> float:
    return min(MOST, -10 * math.log10(max(float((found - own).square().mean()), 1e-20)))


def matched(found: Tensor, own: Tensor) -> list[int]:
    """Which of the client's images each image is scored against: the order with the highest PSNR of all."""
    orders = itertools.permutations(range(len(own)))
    return list(max(orders, key=lambda order: sum(map(decibels, found, own[list(order)]))))


def measured(
    model: nn.Module, data: Any, count: int, *, bits: bool = True, training: gl.LocalTraining = ONE_STEP
) -> dict[str, Any]:
    found = []
    for number in range(count):
        x = data.x[number : number + 1].double()
        x = ((255 * x).round() / 255 if bits else x).float()
        found.append(attack(model, x, data.y[number : number + 1] % 10, training))
        print(f"  {found[-1]['psnr']:.1f} dB, {found[-1]['wall']:.1f} s", flush=True)
    row = {name: [each[name] for each in found] for name in found[0]}
    return {
        "images": count,
        "psnr": [round(value, 1) for value in row["psnr"]],
        "psnr_least": round(min(row["psnr"]), 1),
        "labels": sum(row["label"]),
        "seconds": round(statistics.median(row["wall"]), 2),
        "cpu_seconds": round(statistics.median(row["cpu"]), 2),
        "rank": row["rank"][0],
        "patches": row["patches"][0],
        "smallest_singular_value": min(row["smallest"]),
        "open": row["open"],
    }


def paired(model: nn.Module, data: Any, count: int) -> dict[str, Any]:
    """Updates of two images each."""
    found = []
    for number in range(count):
        x, y = (values[2 * number : 2 * number + 2] for values in (data.x, data.y))
        x = ((255 * x.double()).round() / 255).float()
        found.append(attack(model, x, y % 10, ONE_STEP))
        last = found[-1]
        print(f"  {last['psnr']} dB, residual {last['residual']:.0e}, {last['wall']:.0f} s", flush=True)
    row = {name: [each[name] for each in found] for name in found[0]}
    return {
        "updates": count,
        "psnr": [[round(value, 1) for value in pair] for pair in row["psnr"]],
        "proved": [each["proved"] for each in row["spans"]],
        "labels": sum(row["label"]),
        "residual": row["residual"],
        "starts": row["starts"],
        "seconds": [round(value, 1) for value in row["wall"]],
        "cpu_seconds": [round(value, 1) for value in row["cpu"]],
        "patches": row["patches"][0],
    }


def refused(model: nn.Module, data: Any, examples: int) -> dict[str, Any]:
    try:
        attack(model, data.x[:examples], data.y[:examples] % 10, ONE_STEP)
    except ValueError as problem:
        return {"images": examples, "refused": str(problem)}
    raise AssertionError("it was meant to refuse")


def rows(images: int) -> Iterator[tuple[str, str, Callable[[], dict[str, Any]]]]:
    """A name that --only picks, what is measured, and how."""
    photographs, small = gl.data.load_images("imagenet-samples"), gl.data.load_images("cifar10", split="test", limit=20)
    tiny, base = (partial(model_of, size, 224, 1000) for size in ("tiny", "base"))
    little = partial(model_of, "small", 32, 10)
    several = gl.LocalTraining(lr=0.01, steps=5)
    yield "tiny", "ViT-Tiny/16, 224 px", lambda: measured(tiny(), photographs, 4 * images)
    yield "tiny-real", "ViT-Tiny/16, 224 px, real numbers", lambda: measured(tiny(), photographs, images, bits=False)
    yield "tiny-steps", "ViT-Tiny/16, 224 px, 5 local steps", lambda: measured(tiny(), photographs, 2, training=several)
    yield "base", "ViT-Base/16, 224 px", lambda: measured(base(), photographs, images)
    yield (
        "base-real",
        "ViT-Base/16, 224 px, real numbers",
        lambda: measured(base(), photographs, 2, bits=False),
    )
    yield (
        "base-fixed",
        "ViT-Base/16, 224 px, fixed independent positions",
        lambda: measured(fixed_positions(base()), photographs, 2),
    )
    yield "small", "patch 4, width 192, 4 blocks, 32 px", lambda: measured(little(), small, 4 * images)
    yield "small-trained", "the same, trained for 200 steps", lambda: measured(trained(little()), small, 4 * images)
    yield (
        "small-fixed",
        "the same, untrained, fixed independent positions",
        lambda: measured(fixed_positions(little()), small, 4 * images),
    )
    yield "pair", "the same, learned positions, 2 images in the update", lambda: paired(little(), small, images)
    yield "pair-trained", "the same, trained for 200 steps", lambda: paired(trained(little()), small, images)
    yield "batch", "the same, learned positions, 4 images in the update", lambda: refused(little(), small, 4)
    yield "tiny-batch", "ViT-Tiny/16, 224 px, 2 images in the update", lambda: refused(tiny(), photographs, 2)
    yield "base-batch", "ViT-Base/16, 224 px, 3 images in the update", lambda: refused(base(), photographs, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--images", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wanted = set(filter(None, options.only.split(",")))
    how = {
        "command": " ".join(["python papers/spans/vit.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "gradleak": gl.__version__},
        "threads": options.threads,
    }
    stored = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    table = {row["name"]: row for row in stored}
    for name, what, measure in rows(options.images):
        if wanted and name not in wanted:
            continue
        print(what, flush=True)
        table[name] = {"name": name, "what": what, **measure(), **how}
        print(json.dumps(table[name]), flush=True)
        options.out.write_text("".join(f"{json.dumps(row)}\n" for row in table.values()))


if __name__ == "__main__":
    main()
