"""How exactly the maps of single examples follow from one gradient, before any search: `maps.json`.

    python papers/spans/maps.py [--batches 10] [--threads 1]

A trained ResNet-18 (papers/spans/victims.py) sends one float32 gradient of B test images. For the first convolution of
stride 1 with enough outputs, the maps are solved for and told apart. The figure is the cosine of each true map with
the one found: truth enters here, after the attack code has ended. Images are rows below 1000, as in images.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from images import victim

import gradleak as gl
from gradleak.attacks.spans.classifiers import told_by
from gradleak.core.random import Draws, key
from gradleak.identify.rounding import rounding_of
from gradleak.parts.view import TargetView

FOUND = 0.999  # cosine


def measure(model: torch.nn.Module, examples: int, batches: int) -> dict[str, Any]:
    images = gl.data.load("cifar10", split="test")
    middle, spread = (torch.tensor(each).view(3, 1, 1) for each in CIFAR)
    training = gl.LocalTraining(lr=1.0)
    like = ((images.x[:1] - middle) / spread, images.y[:1])
    task = gl.Task.supervised(model, F.cross_entropy, like=like, mean=CIFAR[0], std=CIFAR[1])
    cosines, losses, seconds, layers = list[float](), list[float](), list[float](), set[str]()
    for batch in range(batches):
        picked = [(batch * examples + number) * 7 % 1000 for number in range(examples)]
        client = {"x": (images.x[picked] - middle) / spread, "y": images.y[picked]}
        seen = gl.observe(task, client, training)
        began = time.perf_counter()
        scene = TargetView.of(task, seen, gl.Knowledge(training=training))
        told = told_by(scene, 5, rounding_of(seen).rank, Draws(key("maps")))
        seconds.append(time.perf_counter() - began)
        with torch.no_grad():
            losses += F.cross_entropy(model(client["x"]), client["y"], reduction="none").tolist()
            place = told.anchor or told.layers[0].name
            true = task.inputs_of([place], task.weights(), client)[place].flatten(1).double()
        layers.add(place)
        true = true / true.norm(dim=1, keepdim=True)
        cosines += (true @ told.own.T).max(1).values.tolist() if len(told.own) else [0.0] * examples
    found = [cosine >= FOUND for cosine in cosines]
    told_apart = [one for one, loss in zip(found, losses) if loss > 0.05]
    return {
        "batches": batches,
        "layers": sorted(layers),
        "found": sum(found),
        "of": len(found),
        "found, loss above 0.05": sum(told_apart),
        "of, loss above 0.05": len(told_apart),
        "median of 1 - cosine": median(1 - cosine for cosine in cosines),
        "seconds, median": round(median(seconds), 1),
    }


CIFAR = ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "maps.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: dict[str, Any] = {
        "command": f"python papers/spans/maps.py --batches {options.batches} --threads {options.threads}",
        "torch": torch.__version__,
    }
    for name in ("resnet18-2340", "resnet18-0"):
        model, _ = victim(name)
        for examples in (1, 4, 8, 16, 32):
            count = max(1, options.batches // max(1, examples // 4))
            figures[f"{name}, B={examples}"] = measure(model, examples, count)
            print(name, examples, figures[f"{name}, B={examples}"], flush=True)
            options.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
