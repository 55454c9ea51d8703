"""`span` on trained networks: one line of `images.jsonl` for every attacked update, as it comes.

    python papers/spans/images.py --only 'resnet18 B=1' --count 20 [--first 0] [--threads 1] [--attack span]

Victims: `runs/victims` (papers/spans/victims.py) and the public ResNet-20 (weights beside the folder GRADLEAK_DATA).
Settings of `span` were chosen on rows 1000 to 1999 of the data pack's test split; images here are rows below 1000.
`--table` prints the table of README.md from the stored lines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import gradleak as gl
from gradleak.scenario.rules import SGD

HERE = Path(__file__).parent
CIFAR = ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
VICTIMS = Path("runs/victims")


@dataclass(frozen=True)
class Row:
    """A victim, its clients, and what the attacker runs."""

    victim: str = "resnet18-2340"
    examples: int = 1
    training: gl.LocalTraining = gl.LocalTraining(lr=1.0)
    defence: Any = None
    settings: dict[str, Any] = field(default_factory=dict)


def rows() -> dict[str, Row]:
    found = {f"resnet18 B={count}": Row(examples=count) for count in (1, 2, 4, 8, 16)}
    found["resnet20 B=1"] = Row("resnet20")
    found |= {f"resnet18 after {step} steps": Row(f"resnet18-{step}") for step in (0, 30, 100, 390, 780, 1560)}
    found |= {f"resnet18 SAM after {step} steps": Row(f"resnet18-sam-{step}") for step in (390, 780, 1170)}
    recipe = gl.LocalTraining(lr=0.001, epochs=5, batch_size=4, optimiser=SGD(momentum=0.9))
    found["resnet18 FedAvg, 8 images, 5 epochs of 4, momentum"] = Row(examples=8, training=recipe)
    found["resnet18 FedAvg, 1 image, 5 steps, lr 0.01"] = Row(training=gl.LocalTraining(lr=0.01, steps=5))
    for name in ("clipping:norm=1.0", "pruning:keep=0.9", "soteria"):
        found[f"resnet18 B=1, {name}"] = Row(defence=name)
    return found


class BasicBlock(nn.Module):
    """Of the CIFAR ResNets: the shortcut drops every second pixel and pads channels with zeros."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.stride, self.pad = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        deep = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(deep + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.pad, self.pad)))


class ResNet20(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        widths = (16, 16, 32, 64)
        for stage in (1, 2, 3):
            first = BasicBlock(widths[stage - 1], widths[stage], 1 if stage == 1 else 2)
            others = [BasicBlock(widths[stage], widths[stage], 1) for _ in range(2)]
            setattr(self, f"layer{stage}", nn.Sequential(first, *others))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


def victim(name: str) -> tuple[nn.Module, tuple[tuple[float, ...], tuple[float, ...]]]:
    if name == "resnet20":
        model: nn.Module = ResNet20()
        state = load_file(Path(os.environ["GRADLEAK_DATA"]).parent / "weights" / "resnet20_cifar10.safetensors")
        model.load_state_dict({key.removeprefix("module."): value for key, value in state.items()})
        return model.eval(), IMAGENET
    model = gl.models.resnet18()
    model.load_state_dict(load_file(VICTIMS / f"{name}.safetensors"))
    return model.eval(), CIFAR


def measure(name: str, row: Row, options: argparse.Namespace) -> None:
    model, (mean, std) = victim(row.victim)
    images = gl.data.load("cifar10", split="test")
    middle, spread = (torch.tensor(each).view(3, 1, 1) for each in (mean, std))
    task = gl.Task.supervised(
        model, F.cross_entropy, like=((images.x[:1] - middle) / spread, images.y[:1]), mean=mean, std=std
    )
    defence = None if row.defence is None else gl.core.registry.parse("defence", row.defence)
    attack = gl.core.registry.parse("attack", options.attack)
    for batch in range(options.first, options.first + options.count):
        # Far from each other, so that batches hold different classes; below 1000, where nothing was tuned.
        picked = [(batch * row.examples + number) * 7 % 1000 for number in range(row.examples)]
        x, y = images.x[picked], images.y[picked]
        client = {"x": (x - middle) / spread, "y": y}
        with torch.no_grad():
            losses = F.cross_entropy(model(client["x"]), y, reduction="none")
        seen = gl.observe(task, client, row.training, defence, key=f"{name} {batch}")
        began = time.perf_counter()
        knows = gl.Knowledge(training=row.training, defence=defence)
        found = attack.run(task, seen, knows, seed=0, engine=gl.Engine("cpu"))
        seconds = time.perf_counter() - began
        scores = gl.metrics.compare(found, {key: value[None] for key, value in client.items()})
        line = {
            "row": name,
            "attack": repr(attack),
            "images": picked,
            "psnr": [round(float(value), 2) for value in scores.psnr.flatten()],
            "losses": [round(float(value), 4) for value in losses],
            "labels right": sorted(found.batch["y"][0].tolist()) == sorted(y.tolist()),
            "match": float(found.match[0].min()),
            "outside": found.settings.get("outside"),
            "apart": found.settings.get("apart"),
            "seconds": round(seconds, 1),
            "threads": options.threads,
            "torch": torch.__version__,
            "machine": f"{platform.processor() or platform.machine()}, CPU",
            "command": "python papers/spans/images.py " + " ".join(f"'{a}'" if " " in a else a for a in sys.argv[1:]),
        }
        with options.out.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        print(name, line["psnr"], line["losses"], f"{seconds:.0f} s", flush=True)


def table(path: Path) -> str:
    """One line a row and attack: counts, median, shares, seconds per image."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        groups.setdefault((line["row"], line["attack"].partition("(")[0]), []).append(line)
    lines = [
        "| client | attack | images | median dB | 25 % and 75 % | above 30 | above 25 | labels right | s an image |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for (row, attack), found in groups.items():
        scores = sorted(value for line in found for value in line["psnr"])
        share = lambda least, scores=scores: f"{sum(value >= least for value in scores)} of {len(scores)}"  # noqa: E731
        low, high = scores[len(scores) // 4], scores[-1 - len(scores) // 4]
        right = f"{sum(line['labels right'] for line in found)} of {len(found)}"
        seconds = sum(line["seconds"] for line in found) / len(scores)
        lines.append(
            f"| {row} | {attack} | {len(scores)} | {median(scores):.1f} | {low:.1f}, {high:.1f} | {share(30)} "
            f"| {share(25)} | {right} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--attack", default="span:fine_steps=0")
    parser.add_argument("--out", type=Path, default=HERE / "images.jsonl")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(table(options.out))
        return
    torch.set_num_threads(options.threads)
    for name, row in rows().items():
        if re.fullmatch(options.only, name):
            measure(name, row, options)


if __name__ == "__main__":
    main()
