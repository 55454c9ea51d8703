"""Attacks as the paper sets them, ours beside them, and their scores in the paper's convention and in ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from record import summary
from secadam.settings import GRADIENT, Effort, Network, single
from torch import Tensor

import gradleak as gl
from gradleak.attack import Reconstruction
from gradleak.core.random import Draws
from gradleak.metrics import baselines, compare, s004_compat
from gradleak.parts.spaces import Mosaic, Pixels, Solid, Start, Uniform, from_unit
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Defence
from gradleak.scenario.observation import Observation
from gradleak.scenario.task import Batch, Task

# TV weights (first, second power) of the main experiments, by data.
VARIATION = {
    "fashion-mnist": (1e-6, 1e-6),
    "cifar10": (1e-5, 1e-4),
    "cifar100": (0.0, 1e-4),
    "svhn": (1e-5, 1e-5),
    "tiny-imagenet": (1e-6, 1e-4),
}
STARTS: dict[str, Start] = {"uniform": Uniform(), "mosaic-8": Mosaic(8), "red": Solid((1.0, 0.0, 0.0))}


@dataclass(frozen=True, eq=False)
class OfClass(Start):
    """An image of the attacker's own of every inferred class, (N, ...) in [0, 1] with labels (N,).

    What the main script of the paper starts from. Optimistic: what ends near it looks like the class, whatever was
    seen; the score of the start itself stands beside every figure.
    """

    images: Tensor
    labels: Tensor

    def __call__(self, scene: TargetView, draws: Draws, name: str) -> Tensor:
        low, _ = scene.limits[name]
        wanted = scene.fields["y"]  # (B,)
        order = draws.uniform((len(self.labels),))
        same = wanted[:, None] == self.labels.to(wanted.device)  # (B, N)
        chosen = torch.where(same, order.to(low.device), -1.0 + 0 * order.to(low.device)).argmax(1)
        return from_unit(scene, name, self.images.to(low)[chosen])


@dataclass(frozen=True)
class Method:
    """A registered attack with settings, where it starts, and whether it is told of the defence."""

    name: str
    settings: Mapping[str, Any]
    adaptive: bool = True
    start: str = ""  # "class", or one of STARTS; empty: its own

    def attack(self, network: Network, effort: Effort) -> Any:
        attack: Any = gl.attacks.get(self.name, **self.settings)
        if not self.start:
            return attack
        public = network.images(effort, "test")
        start = OfClass(public.x, public.y) if self.start == "class" else STARTS[self.start]
        stages = [replace(stage, space=replace(stage.space, start=start)) for stage in attack.stages]
        assert all(isinstance(stage.space, Pixels) for stage in stages)
        return replace(attack, stages=tuple(stages))

    def knows(self, defence: Defence | None) -> gl.Knowledge:
        return gl.Knowledge(training=GRADIENT, defence=defence if self.adaptive else None)


def representation(data: str, effort: Effort, start: str = "class", rate: float = 0.1) -> Method:
    """The paper's own attack; it looks at the classifier's update alone and knows nothing of the defence."""
    first, second = VARIATION[data]
    settings = {"steps": effort.steps, "lr": rate, "first": first, "second": second}
    return Method("representation-lewis", settings, adaptive=False, start=start)


def gradient_methods(effort: Effort, start: str = "uniform") -> dict[str, Method]:
    """iDLG and CPL through the client's optimiser, with Yin's labels, as the paper's second table; ours beside them."""
    yin = {"steps": effort.steps, "labels": "row-minimum"}
    return {
        "iDLG": Method("idlg", yin, start=start),
        "CPL": Method("cpl", yin, start=start),
        "sign-matching (ours)": Method("sign-matching", {"steps": effort.steps, "labels": "sign"}),
    }


# --- scores -----------------------------------------------------------------------------------------------------------


def observed(task: Task, batches: Batch, defence: Defence | None, effort: Effort) -> list[Observation]:
    return [
        gl.observe(task, single(batches, run), GRADIENT, defence, key=f"run{run}", seed=effort.seed)
        for run in range(len(batches["x"]))
    ]


def scored(found: Reconstruction, truth: Batch) -> dict[str, Any]:
    """Ours: pairs matched one to one, no tuning. The paper's: an oracle, by the name of its convention."""
    scores = compare(found, truth)
    field = found.fields["x"]
    each = [
        s004_compat(field.unit(one.cpu()), field.unit(real.cpu())) for one, real in zip(found.batch["x"], truth["x"])
    ]
    theirs = {name: summary(torch.tensor([run[name] for run in each])) for name in each[0]}
    labels = scores.labels.get("multiset_accuracy")
    return {
        "psnr": summary(scores.psnr),
        "ssim": summary(scores.ssim),
        "labels": None if labels is None else float(labels.double().mean()),
        "s004_compat": theirs,
        "s004_of_each": each,
        "match": float(found.match.nanmean()),
        "diverged": float(found.diverged.double().mean()),
        "seconds": found.seconds,
    }


def attacked(method: Method, network: Network, effort: Effort, truth: Batch, defence: Defence | None) -> dict[str, Any]:
    task = network.task(effort)
    seen = observed(task, truth, defence, effort)
    attack = method.attack(network, effort)
    return scored(attack.run(task, seen, method.knows(defence), seed=effort.seed, engine=effort.engine), truth)


def unseen(network: Network, effort: Effort, truth: Batch) -> dict[str, Any]:
    """What somebody shows who saw no update: grey, the mean image, the nearest others, and images of the class."""
    public = network.images(effort, "test")
    flat = network.task(effort).fields["x"].unit(truth["x"].flatten(0, 1).cpu())
    labels = truth["y"].flatten().cpu()
    found = baselines(flat, public.x, labels=(labels, public.y))
    told = {name: {"psnr": summary(held["psnr"]), "ssim": summary(held["ssim"])} for name, held in found.items()}
    start = OfClass(public.x, public.y)
    draw = torch.Generator().manual_seed(effort.seed)
    theirs = []
    for real, y in zip(truth["x"].cpu(), truth["y"].cpu()):
        rows = [int(torch.nonzero(start.labels == label).flatten()[_pick(start.labels, label, draw)]) for label in y]
        theirs.append(s004_compat(start.images[rows], network.task(effort).fields["x"].unit(real)))
    told["an image of each class, s004_compat"] = {
        name: summary(torch.tensor([run[name] for run in theirs])) for name in theirs[0]
    }
    return told


def _pick(labels: Tensor, label: Tensor, draw: torch.Generator) -> int:
    count = int((labels == label).sum())
    if not count:
        raise ValueError(f"The attacker's own images hold none of class {int(label)}.")
    return int(torch.randint(count, (), generator=draw))


Told = Callable[[dict[str, Any]], str]
