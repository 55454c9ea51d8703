"""`span` on trained networks: one line of `images.jsonl` for every attacked update, as it comes.

    python papers/spans/images.py --only 'resnet18 B=1' --count 20 [--first 0] [--threads 1] [--attack span]

Victims: `runs/victims` (papers/spans/victims.py; `--victim` takes another for the last one) and the public ResNet-20
(weights beside the folder GRADLEAK_DATA).
Settings of `span` were chosen on rows 1000 to 1999 of the data pack's test split; images here are rows below 1000.
`--table` prints the tables of README.md from the stored lines.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import gradleak as gl
from gradleak.audit.intervals import rate
from gradleak.core.environment import git
from gradleak.report.grid import interval
from gradleak.scenario.fields import TaskError
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.rules import SGD

HERE = Path(__file__).parent
CIFAR = ((0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
VICTIMS = Path(os.environ.get("GRADLEAK_VICTIMS", "runs/victims"))
TOLD = ("outside", "apart", "peeled", "matched")  # settings of the result that are stored

DEFENCES = (
    "clipping:norm=1.0", "pruning:keep=0.9", "pruning:keep=0.1", "random-mask:keep=0.5", "random-mask:keep=0.1",
    "withholding:layer=classifier", "soteria", "local-gaussian:sigma=1e-6", "local-gaussian:sigma=1e-4", "dp-sgd",
    "agp:layers=features.10.body.3", "tip", "mixup", "pgd", "fedsam", "fedasam", "fedgf", "secadam", "seclion",
    "dp-fedavg", "dp-fedavg-lewis", "dp-secadam", "fedsai", "geyer", "ldp-secadam", "tip-dp-baseline",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A victim, its clients, and what the attacker runs."""

    victim: str = "resnet18-4680"
    examples: int = 1
    training: gl.LocalTraining = gl.LocalTraining(lr=1.0)
    defence: Any = None
    wire: str = "update"  # or "weights", or a type of torch that gradients are rounded to
    train: bool = False  # BatchNorm in training mode; running statistics come back
    data: str = "cifar10"  # labels are taken modulo ten


def rows() -> dict[str, Row]:
    found = {f"resnet18 B={count}": Row(examples=count) for count in (1, 2, 4, 8, 16, 32)}
    found |= {f"resnet18 B={count}, training mode": Row(examples=count, train=True) for count in (2, 4, 8)}
    found["resnet20 B=1"] = Row("resnet20")
    found["resnet18 B=1, 64 px"] = Row(data="tiny-imagenet-mini")
    found |= {f"resnet18 untrained B={count}": Row("untrained", count) for count in (1, 4, 8)}
    found |= {f"resnet18 after {step} steps": Row(f"resnet18-{step}") for step in (30, 78, 234, 780, 2340)}
    found |= {f"resnet18 SAM after {step} steps": Row(f"resnet18-sam-{step}") for step in (780, 2340, 4680)}
    recipe = gl.LocalTraining(lr=0.001, epochs=5, batch_size=4, optimiser=SGD(momentum=0.9))
    found["resnet18 FedAvg, 8 images, 5 epochs of 4, momentum"] = Row(examples=8, training=recipe)
    found["resnet18 FedAvg, 1 image, 5 steps, lr 0.01"] = Row(training=gl.LocalTraining(lr=0.01, steps=5))
    for lr in (1.0, 0.1, 0.01):
        found[f"resnet18 B=1, weights on the wire, lr {lr}"] = Row(training=gl.LocalTraining(lr=lr), wire="weights")
    found |= {f"resnet18 B=1, {kind} on the wire": Row(wire=kind) for kind in ("float16", "bfloat16")}
    found |= {f"resnet18 B=1, {name}": Row(defence=name) for name in DEFENCES}
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
    if name == "untrained":
        return gl.models.resnet18(generator=torch.Generator().manual_seed(0)).eval(), CIFAR
    parts = [load_file(path) for path in sorted(VICTIMS.glob(f"{name}.*safetensors"))]  # may be split in two
    model.load_state_dict({key: value for part in parts for key, value in part.items()})
    return model.eval(), CIFAR


def sent(task: gl.Task, client: gl.Batch, row: Row, defence: Any, key: str) -> gl.Observation:
    """What the server sees of this client."""
    if row.wire in ("update", "weights"):
        return gl.observe(task, client, row.training, defence, key=key, wire=row.wire)
    seen, kind = gl.observe(task, client, row.training, defence, key=key), getattr(torch, row.wire)
    return replace(seen, update={each: value.to(kind).to(value.dtype) for each, value in seen.update.items()})


def measure(name: str, row: Row, options: argparse.Namespace) -> None:
    trained_here = options.victim and row.victim == Row.victim
    model, (mean, std) = victim(options.victim if trained_here else row.victim)
    name += f", {options.victim}" * bool(trained_here)
    model.train(row.train)
    images = gl.data.load(row.data, split="test")
    labels = images.y % 10
    middle, spread = (torch.tensor(each).view(3, 1, 1) for each in (mean, std))
    task = gl.Task.supervised(
        model, F.cross_entropy, like=((images.x[:1] - middle) / spread, labels[:1]), mean=mean, std=std
    )
    defence = None if row.defence is None else gl.core.registry.parse("defence", row.defence)
    attack = gl.core.registry.parse("attack", options.attack)
    knows = gl.Knowledge(training=row.training, defence=defence)
    batches = range(options.first, options.first + options.count)
    # Far from each other, so that batches hold different classes; below 1000, where nothing was tuned.
    most = min(1000, len(images.x))
    picked = [[(batch * row.examples + n) * 7 % most for n in range(row.examples)] for batch in batches]
    for first in range(0, len(picked), options.group):
        rows = picked[first : first + options.group]
        clients = [{"x": (images.x[each] - middle) / spread, "y": labels[each]} for each in rows]
        with torch.no_grad():
            losses = [F.cross_entropy(copy.deepcopy(model.cpu())(c["x"]), c["y"], reduction="none") for c in clients]
        seen = [sent(task, client, row, defence, f"{name} {batch}") for client, batch in zip(clients, batches[first:])]
        began = time.perf_counter()
        try:
            found = attack.run(task, seen, knows, seed=0, engine=gl.Engine(options.device))
        except (TaskError, MissingKnowledge) as refusal:
            print(name, "refused:", refusal, flush=True)
            return
        seconds = time.perf_counter() - began
        truth = {key: torch.stack([client[key] for client in clients]) for key in clients[0]}
        scores = gl.metrics.compare(found, truth)
        for number, each in enumerate(rows):
            told = {key: found.settings[key][number] for key in TOLD if key in found.settings}
            line = {
                "row": name,
                "attack": repr(attack),
                "images": each,
                "psnr": [round(float(value), 2) for value in scores.psnr[number].flatten()],
                "losses": [round(float(value), 5) for value in losses[number]],
                "labels right": sorted(found.batch["y"][number].tolist()) == sorted(truth["y"][number].tolist()),
                "match": float(found.match[number].min()),
                **told,
                "seconds": round(seconds / len(rows), 2),
                "updates in the run": len(rows),
                "threads": options.threads,
                "torch": torch.__version__,
                "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine() + ", CPU",
                "commit": options.commit,
                "command": "python papers/spans/images.py "
                + " ".join(f"'{a}'" if " " in a else a for a in sys.argv[1:]),
            }
            with options.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(name, line["psnr"], line["losses"], f"{seconds / len(rows):.1f} s", flush=True)


def tables(path: Path) -> str:
    """For each machine a table: one line a row, attack and commit, in the order of `rows`.

    Counts, median and shares; shares again for images whose loss is above 0.05. They have 95 % intervals over updates,
    in per cent.
    """
    lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
    machines = dict.fromkeys(line["machine"] for line in lines)
    return "\n\n".join(
        f"### {each}\n\n{_table([line for line in lines if line['machine'] == each])}" for each in machines
    )


def _table(lines: list[dict[str, Any]]) -> str:
    order = list(rows())

    def place(line: dict[str, Any]) -> tuple[int, str]:
        return order.index(line["row"].removesuffix(", resnet18-2340")), line["commit"]

    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in sorted(lines, key=place):
        other = re.match(r"Composed\(name='(.*?)'", line["attack"])  # `span` is no such
        row = f"{line['row']}, by {other[1]}" if other else line["row"]
        groups.setdefault((row, line["commit"].split(",")[0]), []).append(line)
    head = ["client", "commit", "updates", "images", "median dB", "25 %, 75 %", "at 30", "at 25"]
    head += ["loss above 0.05: at 30", "at 25", "labels right", "s an update"]
    text = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for (row, commit), found in groups.items():
        pairs = [list(zip(line["psnr"], line["losses"], strict=True)) for line in found]
        every = [[psnr for psnr, _ in update] for update in pairs]
        told = [[psnr for psnr, loss in update if loss > 0.05] for update in pairs]
        flat = sorted(psnr for update in every for psnr in update)
        right = f"{sum(line['labels right'] for line in found)} of {len(found)}"
        cells = [row, commit, len(found), len(flat), f"{median(flat):.1f}"]
        cells += [f"{flat[len(flat) // 4]:.1f}, {flat[-1 - len(flat) // 4]:.1f}", share(every, 30), share(every, 25)]
        cells += [share(told, 30), share(told, 25), right, f"{median(line['seconds'] for line in found):.0f}"]
        text.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(text)


def share(updates: list[list[float]], least: float) -> str:
    """How many images reach this PSNR, with the interval of the share."""
    hits = [[float(psnr >= least) for psnr in update] for update in updates if update]
    count = f"{sum(map(sum, hits)):.0f} of {sum(map(len, hits))}"
    return f"{count} {interval(rate(hits))}" if hits else count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--group", type=int, default=1, help="updates attacked in one run")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--attack", default="span:fine_steps=0")
    parser.add_argument("--victim", help="in place of resnet18-4680")
    parser.add_argument("--out", type=Path, default=HERE / "images.jsonl")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print(tables(options.out))
        return
    torch.set_num_threads(options.threads)
    state = git(HERE / "images.py") or {"commit": "", "dirty": False}  # the run outlives a commit
    options.commit = state["commit"][:7] + "+" * bool(state["dirty"])
    for name, row in rows().items():
        if re.fullmatch(options.only, name):
            measure(name, row, options)


if __name__ == "__main__":
    main()
