"""Label counts by iLRG on an untrained LeNet-5 with 100 classes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import arguments, record

import gradleak as gl
from gradleak.parts.fields import label_rule
from gradleak.parts.view import TargetView

RULES = ("ilrg", "bias-corrected", "llg", "llg-star", "row-minimum")


def main() -> None:
    options = arguments(__doc__, data="cifar100-mini", examples=64, trials=200, seed=0)
    images = gl.data.load(options.data, split="train")
    generator = torch.Generator().manual_seed(options.seed)
    training = gl.LocalTraining(lr=1.0)
    exact: dict[str, list[float]] = {rule: [] for rule in RULES}
    whole: dict[str, list[bool]] = {rule: [] for rule in RULES}
    began = time.perf_counter()
    for trial in range(options.trials):  # a new network and a new batch each time
        model = gl.models.lenet5(classes=100, generator=generator)
        task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(images.x[:1], images.y[:1]))
        batch = images.batch(torch.randperm(len(images), generator=generator)[: options.examples])
        seen = gl.observe(task, batch, training, key=f"trial{trial}")
        truth = torch.bincount(batch["y"], minlength=100)
        for rule in RULES:
            counts = label_rule(rule).counts(TargetView.of(task, seen, gl.Knowledge(training=training)))
            exact[rule].append((counts == truth).double().mean().item())
            whole[rule].append(bool((counts == truth).all()))
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    record(
        options,
        Path(__file__).with_name("expected.json"),
        {
            "classes_with_exact_count": {rule: mean(values) for rule, values in exact.items()},
            "batches_with_all_counts_exact": {rule: mean(values) for rule, values in whole.items()},
            "seconds": time.perf_counter() - began,
        },
    )


if __name__ == "__main__":
    main()
