"""Whole batches through fully connected layers with ReLU (`sparse-span`): images, tables, and features of a small CNN.

Networks are drawn anew for every batch, batches from the test part, which nothing was tuned on. Gradients are float32,
one step of SGD. An example counts as right above 60 dB (images) or below 1e-3 of its length (rows, features).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl
from gradleak.core.assignment import match

OUT = Path(__file__).with_suffix(".json")
ONE_STEP = gl.LocalTraining(lr=0.1)
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261)
RIGHT = 1e-3  # relative error


class Quickstart(nn.Module):
    """The network of Flower's PyTorch quickstart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(3, 6, 5), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2, 2)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def features(self, x: Tensor) -> Tensor:
        return self.pool(F.relu(self.conv2(self.pool(F.relu(self.conv1(x)))))).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(self.features(x))))))


@dataclass(frozen=True)
class Row:
    """Clients of one kind: data, network, batch size, and how many batches."""

    data: str
    width: int  # of both hidden layers; 0: the quickstart network
    examples: int
    batches: int = 10
    trained: int = 0  # epochs
    scaled: bool = False  # are images standardised?

    @property
    def name(self) -> str:
        network = f"mlp {self.width}" if self.width else "quickstart CNN"
        state = f"trained {self.trained} epochs" if self.trained else "untrained"
        return f"{self.data}{', standardised' if self.scaled else ''}, {network}, {self.examples} examples, {state}"


ROWS = [
    Row("cifar10", 1024, 32),
    Row("cifar10", 1024, 48),
    Row("cifar10", 1024, 32, scaled=True),
    Row("cifar10", 1024, 48, scaled=True),
    Row("adult", 512, 8),
    Row("adult", 100, 8),
    Row("breast-cancer", 512, 8),
    Row("breast-cancer", 512, 16),
    Row("breast-cancer", 100, 8),
    Row("cifar10", 1024, 8, 5, trained=3, scaled=True),
    Row("cifar10", 1024, 16, 5, trained=3, scaled=True),
    Row("cifar10", 1024, 32, 5, trained=3, scaled=True),
    Row("cifar10", 0, 1, 20),
    Row("cifar10", 0, 4, 5),
    Row("cifar10", 0, 8, 3),
    # Too hard for all rows: is what is called certain right?
    Row("breast-cancer", 100, 16),
    Row("breast-cancer", 512, 24),
    Row("adult", 100, 16),
    Row("cifar10", 256, 16),
    Row("cifar10", 256, 24),
    # Larger batches.
    Row("cifar10", 1024, 64, 5),
    Row("cifar10", 2048, 64, 3, scaled=True),
    Row("cifar10", 2048, 128, 2),
]


@cache
def part(data: str, split: str) -> tuple[Tensor, Tensor]:
    """Examples as the model takes them, before any standardisation, and their labels."""
    records = gl.data.load(data, split=split, **({} if data == "cifar10" else {"missing": "drop"}))
    return records.x, records.y


def standardised(x: Tensor) -> Tensor:
    mean, std = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))
    return (x - mean) / std


def network(row: Row, seed: int) -> nn.Module:
    """The network of one batch: drawn anew, or one trained network for all."""
    return trained(replace(row, examples=0, batches=0)) if row.trained else drawn(row, seed)


@cache
def trained(row: Row) -> nn.Module:
    return drawn(row, seed=0)


def drawn(row: Row, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if not row.width:
        return Quickstart()
    x, y = part(row.data, "train")
    inputs, classes = x[0].numel(), int(y.max()) + 1
    hidden = (nn.Linear(inputs, row.width), nn.ReLU(), nn.Linear(row.width, row.width), nn.ReLU())
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(row.width, classes))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(row.trained):
        for rows in torch.randperm(len(x)).split(128):
            optimiser.zero_grad()
            F.cross_entropy(model(standardised(x[rows]) if row.scaled else x[rows]), y[rows]).backward()
            optimiser.step()
    return model


def task_of(row: Row, model: nn.Module, x: Tensor, y: Tensor) -> gl.Task:
    if row.data != "cifar10":
        return gl.Task.supervised(model, F.cross_entropy, like=(x, y), bounds=(-torch.inf, torch.inf))
    scale: dict[str, Any] = {"mean": MEAN, "std": STD} if row.scaled else {}
    if not row.width:
        scale = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
    return gl.Task.supervised(model, F.cross_entropy, like=(x, y), **scale)


def measured(row: Row, seed: int) -> dict[str, Any]:
    """One client: its examples beside those recovered."""
    model = network(row, seed)
    x, y = part(row.data, "test")
    chosen = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[: row.examples]
    x, y = x[chosen].float(), y[chosen]
    scale = standardised if row.scaled else (lambda x: x) if row.width else (lambda x: 2 * x - 1)
    task = task_of(row, model, scale(x), y)
    seen = gl.observe(task, {"x": scale(x), "y": y}, ONE_STEP)
    began, cpu = time.perf_counter(), time.process_time()
    attack = gl.attacks.get("sparse-span")
    result = attack.run(task, seen, gl.Knowledge(training=ONE_STEP), seed)
    took = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
    found = result.batch["x"][0]
    gaps = torch.cdist(scale(x).flatten(1).double(), found.flatten(1).double())
    order = match(gaps.square())
    gap = gaps[torch.arange(len(x)), order]
    certain = result.unknowns["certain"][0, 0].bool()[order]
    figures: dict[str, Any] = {name: result.settings[name][0] for name in ("rank", "certain", "padded", "residual")}
    figures |= {"agreement": result.settings["agreement"][0], "waves": result.settings["waves"][0], **took}
    wrong = gap / scale(x).flatten(1).norm(dim=1).double()
    if row.data == "cifar10":
        pixels = (STD if row.scaled else (1.0,) * 3) if row.width else (0.5,) * 3
        back = lambda x: x * torch.tensor(pixels)[:, None, None]  # noqa: E731
        squares = back(scale(x) - found[order]).double().square().flatten(1).mean(1)
        figures["psnr"] = [round(min(float(value), 200.0), 2) for value in -10 * squares.clamp_min(1e-20).log10()]
    if not row.width:
        grey = (x - 0.5).double().square().flatten(1).mean(1)
        figures["grey"] = [round(float(value), 2) for value in -10 * grey.log10()]
        figures["feature_error"] = result.unknowns["feature_error"][0, 0][order].tolist()
        wrong = feature_gaps(task, seen, model.features(scale(x)), seed)
        certain = torch.ones(len(wrong), dtype=torch.bool) if figures["certain"] == row.examples else certain
    right = wrong < RIGHT
    counts = {"certain_right": certain & right, "certain_wrong": certain & ~right, "right": right}
    return {**figures, "errors": wrong.tolist(), **{name: int(each.sum()) for name, each in counts.items()}}


def feature_gaps(task: gl.Task, seen: gl.Observation, features: Tensor, seed: int) -> Tensor:
    """The relative error of each example's features, as read off the update."""
    view = gl.TargetView.of(task, seen, gl.Knowledge(training=ONE_STEP))
    rows = gl.attacks.get("sparse-span").recovered(view, seed).rows
    if not len(rows):
        return torch.ones(len(features), dtype=torch.float64)
    return torch.cdist(features.detach().double(), rows).min(1).values / features.norm(dim=1)


def summary(row: Row, clients: list[dict[str, Any]]) -> dict[str, Any]:
    total = lambda name: sum(each[name] for each in clients)  # noqa: E731
    seconds = torch.tensor([each["seconds"] for each in clients])
    figures = {
        "batches": len(clients),
        "all_rows_found": sum(each["right"] == row.examples for each in clients),
        "right": total("right"),
        "examples": row.examples * len(clients),
        "certain_right": total("certain_right"),
        "certain_wrong": total("certain_wrong"),
        "largest_error": max(max(each["errors"]) for each in clients),
        "seconds": {"median": float(seconds.median()), "most": float(seconds.max())},
        "cpu_seconds_most": max(each["cpu_seconds"] for each in clients),
    }
    for name in ("psnr", "grey", "feature_error"):
        if name in clients[0]:
            values = torch.tensor([value for each in clients for value in each[name]])
            figures[name] = {
                "least": float(values.min()),
                "median": float(values.median()),
                "mean": float(values.mean()),
            }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=".", help="rows whose name this finds")
    parser.add_argument("--seed", type=int, default=1000, help="of the first batch; the others count on")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    stored = json.loads(options.out.read_text()) if options.out.exists() else {}
    for row in ROWS:
        if not re.search(options.only, row.name):
            continue
        clients = []
        for batch in range(row.batches):
            clients.append(measured(row, options.seed + batch))
        how = f"--only {row.name!r} --seed {options.seed} --threads {options.threads}"
        about = {
            "command": f"python papers/spans/sparse.py {how}",
            "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "gradleak": gl.__version__},
            "threads": options.threads,
            "seeds": [options.seed, options.seed + row.batches - 1],
        }
        stored[row.name] = {**summary(row, clients), **about, "clients": clients}
        print(row.name, json.dumps(summary(row, clients)), flush=True)
        options.out.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
