"""iDLG with batched L-BFGS on an untrained LeNet-Zhu, one example per client, restarts chosen by residual."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import arguments, record, summary

import gradleak as gl


def main() -> None:
    options = arguments(__doc__, data="cifar10-mini", images=64, steps=6000, history=100, restarts=4, network=0, seed=0)
    images = gl.data.load(options.data, split="test", limit=options.images)
    # The network's seed is fixed before any image is looked at; the attacker is given the network, as a server is.
    model = gl.models.lenet_zhu(generator=torch.Generator().manual_seed(options.network))
    task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(images.x, images.y))
    training, weights = gl.LocalTraining(lr=1.0), task.weights()
    seen = [gl.observe(task, images.batch([i]), training, weights=weights, key=f"image{i}") for i in range(len(images))]
    attack = gl.attacks.get("idlg", steps=options.steps, history=options.history, restarts=options.restarts)
    found = attack.run(task, seen, gl.Knowledge(training=training), seed=options.seed)
    scores = gl.metrics.compare(found, {"x": images.x[:, None], "y": images.y[:, None]})
    record(
        options,
        Path(__file__).with_name("expected.json"),
        {
            "psnr": summary(scores.psnr),
            "ssim": summary(scores.ssim),
            "share_above_30_db": (scores.psnr > 30).double().mean().item(),
            "share_residual_below_1e-6": (found.match.min(1).values < 1e-6).double().mean().item(),
            "label_accuracy": (found.batch["y"][:, 0] == images.y).double().mean().item(),
            "gradient_evaluations_per_restart": found.evaluations,
            "diverged_lanes": int(found.diverged.sum()),
            "seconds": found.seconds,
        },
    )


if __name__ == "__main__":
    main()
