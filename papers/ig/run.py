"""IG on an untrained ConvNet64, single CIFAR-10 images: how far the cosine cost falls."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import arguments, record, summary

import gradleak as gl

CIFAR10 = {"mean": (0.4914672, 0.4822617, 0.4467701), "std": (0.2470322, 0.2434851, 0.2615879)}


def main() -> None:
    options = arguments(
        __doc__, data="cifar10-mini", images=16, steps=4000, tv=1e-6, restarts=1, network=0, seed=0, precision="strict"
    )
    images = gl.data.load(options.data, split="test", limit=options.images)
    model = gl.models.convnet(norm="batch", generator=torch.Generator().manual_seed(options.network)).eval()
    task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(images.x, images.y), **CIFAR10)
    x = task.fields["x"].model(images.x)
    training, weights = gl.LocalTraining(lr=1.0), task.weights()
    seen = [
        gl.observe(task, {"x": x[i : i + 1], "y": images.y[i : i + 1]}, training, weights=weights, key=f"image{i}")
        for i in range(len(images))
    ]
    attack = gl.attacks.get("ig", steps=options.steps, tv=options.tv, restarts=options.restarts)
    found = attack.run(
        task, seen, gl.Knowledge(training=training), seed=options.seed, engine=gl.Engine(precision=options.precision)
    )
    scores = gl.metrics.compare(found, {"x": x[:, None], "y": images.y[:, None]})
    record(
        options,
        Path(__file__).with_name("expected.json"),
        {
            "cosine": summary(found.match.min(1).values),
            "psnr": summary(scores.psnr),
            "ssim": summary(scores.ssim),
            "label_accuracy": (found.batch["y"][:, 0] == images.y).double().mean().item(),
            "seconds": found.seconds,
            "images_x_iterations_per_second": len(images) * options.restarts * options.steps / found.seconds,
        },
    )


if __name__ == "__main__":
    main()
