"""TIP: what its perturbation hides from a server that looks at the right weights, and what it does to explanations.

Four groups of rows, by the first word of their names: `table` (attacks on each data set), `sweep` (beta, r, R, channels
and frequencies), `maps` (Grad-CAM fidelity) and `accuracy` (federated training). Rows are written one by one.

Reference: Wang and Su, TIP: Resisting Gradient Inversion via Targeted Interpretable Perturbation, arXiv:2602.11633.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import prior_of, reproduce, summary

import gradleak as gl
from gradleak.audit.private import examples_of
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params
from gradleak.curvature.gradcam import fidelity
from gradleak.defences import AGP, TIP, TIPBaseline, gradcam
from gradleak.defences.tip import scale_of
from gradleak.federation import Federation, Fixed, Snapshot
from gradleak.federation.clients import evaluating
from gradleak.federation.rounds import measured
from gradleak.federation.training import Trained
from gradleak.scenario.defence import Client, Defence
from gradleak.scenario.task import Task, float32_products

EXPECTED = Path(__file__).with_name("expected.json")
PAPER_STEPS, PAPER_RATE = 10_000, 0.004  # of the attack
LR, CLIENT_STEPS = 1e-3, 4  # of the client that is attacked, one image in every step
EPOCHS, BATCH_SIZE, CLIENTS, PER_ROUND = 2, 32, 100, 10  # of the federation
BETAS = (0.00114, 0.0057, 0.02, 0.1)
NORMALISATION: dict[str, dict[str, tuple[float, float, float]]] = {
    "cifar10": {"mean": (0.4914672, 0.4822617, 0.4467701), "std": (0.2470322, 0.2434851, 0.2615879)},
    "cifar100": {"mean": (0.5071, 0.4865, 0.4409), "std": (0.2673, 0.2564, 0.2762)},
    "tiny-imagenet": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
}


@dataclass(frozen=True)
class Effort:
    """How much of it is computed, and where. `small`: a thin network, a short training, few clients."""

    images: int = 10
    steps: int = 1000
    rounds: int = 100
    trained: int = 1000
    noises: int = 3
    seed: int = 0
    small: int = 0
    data: str = ""
    generator: str = ""  # file of one, for the rows of GIFD
    precision: str = "fast"
    device: str = "auto"

    @property
    def engine(self) -> gl.Engine:
        return gl.Engine(device=self.device, precision=self.precision)


class Row(Protocol):
    """One thing that is measured."""

    def measure(self, effort: Effort) -> dict[str, Any]: ...


# --- defences --------------------------------------------------------------------------------------------------------

CHANNELS: dict[str, Callable[[Tensor, Draws], Tensor]] = {
    "top": lambda importance, source: importance,
    "bottom": lambda importance, source: -importance,
    "random": lambda importance, source: source.uniform(tuple(importance.shape)),
}
FREQUENCIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "high": lambda kernels, high: high,
    "low": lambda kernels, high: kernels - high,
    "all": lambda kernels, high: kernels,
}


@dataclass(frozen=True)
class AblatedTIP(TIP):
    """TIP with other channels or other frequencies: the ablation of its authors.

    channels       those of most importance ("top", which is TIP), of least, or any
    frequencies    "high" is what the mask passes (TIP), "low" the rest (the mean of a kernel), "all" white noise.
                   With the same beta they differ in energy: 8/9, 1/9 and 1 of beta^2 in an entry of a 3 x 3 kernel.
    """

    channels: str = "top"
    frequencies: str = "high"

    def upload(self, upload: gl.Upload, client: Client) -> gl.Upload:
        assert client.draws is not None, "only a client uploads through this: attackers assume a noiseless one"
        source, update = client.draws, dict(upload.payload["update"])
        chosen = gradcam.guidance(client.batch, source)
        important = gradcam.channel_importance(client.task, client.end, client.batch, chosen, upload.buffers)
        for stream, (layer, importance) in enumerate(important.items(), start=1):  # stream 0 chose the guidance
            name = f"{layer}.weight"
            kernels = update[name]
            score = CHANNELS[self.channels](importance, source.child(stream))
            noised = gradcam.along_channels(gradcam.largest(score, self.count(len(score))), kernels)
            noise = source.normal(tuple(kernels.shape), stream=stream, dtype=kernels.dtype)
            update[name] = kernels - noised * self._filtered(self.beta * noise)
        return replace(upload, payload={**upload.payload, "update": update})

    def _filtered(self, kernels: Tensor) -> Tensor:
        return FREQUENCIES[self.frequencies](kernels, super()._filtered(kernels))


Defences = Mapping[str, Defence | None]


def defended(*, epochs: int, batches: int, batch_size: int, beta: float) -> dict[str, Defence | None]:
    """The four columns of the paper's tables; sigma follows from the client's recipe, as in the released code."""
    baseline = TIPBaseline(epochs=epochs, batches=batches, lr=LR, batch_size=batch_size)
    # gl.models.resnet calls the second convolution of a block body.3, torchvision conv2.
    return {"No DP": None, "DP": baseline, "AGP": AGP(sigma=baseline.sigma, layers="body.3"), "TIP": TIP(beta=beta)}


def attacked() -> dict[str, Defence | None]:
    """Of the attack runs: sigma 0.0194 (epsilon 5), beta 0.0969 (epsilon 1)."""
    return defended(
        epochs=1, batches=CLIENT_STEPS, batch_size=1, beta=scale_of(1.0, steps=CLIENT_STEPS, lr=LR, batch_size=1)
    )


def sweeps() -> dict[str, dict[str, Defence | None]]:
    """Every family of settings by name; the undefended client is in each, as the reference."""
    beta = scale_of(1.0, steps=CLIENT_STEPS, lr=LR)
    return {
        "beta": {"No DP": None} | {f"beta {b:g}": TIP(beta=b) for b in BETAS},
        "r": {"No DP": None} | {f"r {r:g}": TIP(beta=beta, proportion=r) for r in (0.02, 0.1, 0.3, 1.0)},
        "R": {"No DP": None}
        | {f"R {radius:g}": TIP(beta=beta, radius=radius) for radius in (0.5, 1.2, 1.5)}
        | {"R 0.5, centre as printed": TIP(beta=beta, center="real")},
        "ablation": {"No DP": None}
        | {
            f"{channels}, {frequencies}": AblatedTIP(beta=beta, channels=channels, frequencies=frequencies)
            for channels in CHANNELS
            for frequencies in FREQUENCIES
        },
    }


def described(defence: Defence | None, task: Task) -> dict[str, Any]:
    """Its settings, and how its noise compares with the weights: beta / std(w) over the convolutions."""
    if not isinstance(defence, TIP):
        return {"defence": repr(defence), **({"sigma": defence.sigma} if hasattr(defence, "sigma") else {})}
    ratios = torch.tensor(list(defence.ratios(task).values()))
    return {
        "defence": repr(defence),
        "beta": defence.beta,
        "beta_over_std_of_weights": {
            "lowest": ratios.min().item(),
            "median": ratios.quantile(0.5).item(),
            "highest": ratios.max().item(),
        },
    }


# --- networks --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """What the server sends: a network for a data set, trained beforehand on the training images, or not."""

    data: str = "cifar10"
    model: str = "resnet18"
    norm: str = "batch"
    stem: str = "cifar"
    trained: bool = True

    def images(self, effort: Effort, split: str, limit: int | None = None) -> gl.data.Images:
        return _images(effort.data or self.data, split, limit)

    def build(self, effort: Effort, images: gl.data.Images) -> torch.nn.Module:
        make = MODELS[self.model, bool(effort.small)]
        like = {"shape": tuple(images.x.shape[1:]), "classes": images.classes}
        return make(self, **like, generator=torch.Generator().manual_seed(effort.seed))

    def task(self, effort: Effort) -> Task:
        """In evaluation mode: BatchNorm keeps the statistics of the training, as in the paper's attack runs."""
        return _task(self, effort)

    def describe(self, effort: Effort) -> dict[str, Any]:
        return {
            "network": repr(self),
            "data": self.images(effort, "test", 1).source,
            "trained_steps": effort.trained if self.trained else 0,
            "test_accuracy": accuracy(self.task(effort), None, self.images(effort, "test")),
        }


@cache
def _images(name: str, split: str, limit: int | None) -> gl.data.Images:
    return gl.data.load(name, split=split, limit=limit)  # unpacking takes seconds, and every part of a row asks


def _resnet18(network: Network, **like: Any) -> torch.nn.Module:
    return gl.models.resnet18(norm=network.norm, stem=network.stem, **like)


def _thin_resnet(network: Network, **like: Any) -> torch.nn.Module:
    return gl.models.resnet((1, 1), 8, norm=network.norm, stem=network.stem, **like)


def _lenet(network: Network, **like: Any) -> torch.nn.Module:
    return gl.models.lenet_zhu(**like)


def _thin_lenet(network: Network, **like: Any) -> torch.nn.Module:
    return gl.models.lenet_zhu(width=4, **like)


MODELS: dict[tuple[str, bool], Callable[..., torch.nn.Module]] = {
    ("resnet18", False): _resnet18,
    ("resnet18", True): _thin_resnet,
    ("lenet-zhu", False): _lenet,
    ("lenet-zhu", True): _thin_lenet,
}


@cache
def _task(network: Network, effort: Effort) -> Task:
    images = network.images(effort, "train")
    scale = NORMALISATION.get(network.data, {})
    task = Task.supervised(
        network.build(effort, images).to(effort.engine.where),
        F.cross_entropy,
        like=(images.x[:1], images.y[:1]),
        **scale,  # type: ignore[arg-type]
    )
    if network.trained:
        trained(task, examples_of(images, task), effort)
    task.model.eval()
    return task


def trained(task: Task, data: Any, effort: Effort) -> None:
    """Some epochs of ordinary training, in place: the paper starts from a pretrained network, which we do not have."""
    optimiser = torch.optim.SGD(task.model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, effort.trained))
    draw, where = torch.Generator().manual_seed(effort.seed), effort.engine.where
    held = data.to(where, torch.float32)
    task.model.train()
    for _ in range(effort.trained):
        batch = held.batch(torch.randint(len(held), (64,), generator=draw))
        optimiser.zero_grad()
        F.cross_entropy(task.model(batch["x"]), batch["y"]).backward()
        optimiser.step()
        rate.step()


def accuracy(task: Task, sent: Snapshot | None, images: gl.data.Images) -> float:
    """On these images, in evaluation mode; `sent`: other weights and buffers than the model's own."""
    at = sent or Snapshot(task.weights(), task.buffers())
    batch = on_device(examples_of(images, task).tensors, task)
    return float(measured(evaluating(task), at, batch)[1]) / len(images)


def on_device(batch: Mapping[str, Tensor], task: Task) -> dict[str, Tensor]:
    like = tree.like(task.weights())
    return {name: value.to(like.device) for name, value in batch.items()}


# --- attacks ---------------------------------------------------------------------------------------------------------


def at_returned_weights(scene: gl.TargetView) -> gl.TargetView:
    """Gradients at the weights that came BACK, noise and all, instead of those that were sent."""
    return replace(scene, weights=tree.subtract(scene.weights, scene.update))


def nothing(defence: Defence | None) -> Defence | None:
    return None


def only_visible(defence: Defence | None) -> Defence | None:
    return None if defence is None else gl.OnlyVisible(told(defence))


def told(defence: Defence | None) -> Defence | None:
    """What an attacker needs to know of a defence: of TIP not how large the noise is, nor how channels were chosen.

    Targets about which the attacker knows the same are attacked together.
    """
    if isinstance(defence, AblatedTIP):
        return replace(defence, beta=1.0, channels="top")
    return replace(defence, beta=1.0) if isinstance(defence, TIP) else defence


@dataclass(frozen=True)
class Attacker:
    """What the server knows of the defence, and at which weights it evaluates gradients."""

    knows: Callable[[Defence | None], Defence | None] = nothing
    view: Callable[[gl.TargetView], gl.TargetView] | None = None
    informed: bool = False  # looks at defended targets only: of the others it knows no more than A0


ATTACKERS = {
    "A0'": Attacker(view=at_returned_weights),  # the released code's argument: reproduced, never a headline
    "A0": Attacker(),
    "A1": Attacker(only_visible, informed=True),
    "A2": Attacker(told, informed=True),
}


def signed_adam(effort: Effort, view: Any) -> Any:
    """IG as the paper sets it. With fewer steps the rate is higher, so that an image can move as far."""
    rate = min(0.1, PAPER_RATE * PAPER_STEPS / effort.steps)
    attack = gl.attacks.get("ig", steps=effort.steps, lr=rate, tv=1e-4)
    return replace(attack, stages=tuple(replace(stage, view=view) for stage in attack.stages))


def lbfgs(effort: Effort, view: Any) -> Any:
    """iDLG, whose own budget is six times as many evaluations, each far cheaper on a LeNet."""
    attack = gl.attacks.get("idlg", steps=6 * effort.steps)
    return replace(attack, stages=tuple(replace(stage, view=view) for stage in attack.stages))


def second_order(effort: Effort, view: Any) -> Any:
    if view is not None:
        raise ValueError("The second-order attack builds its own stages: A0' is for attacks that are made of them.")
    # The whole cascade is for a GPU: a small run polishes what a few steps of IG found.
    brief = {"steps": 1, "method": "krylov", "vectors": 5, "after": "ig:steps=20"} if effort.small else {}
    return gl.attacks.get("second-order", certify=False, **brief)


def gifd(effort: Effort, view: Any) -> Any:
    """As many steps as IG, shared by the stages."""
    blocks = prior_of(effort.generator)[0].blocks
    attack = gl.attacks.get("gifd", steps=effort.steps // (blocks + 1), features=blocks)
    return replace(attack, stages=tuple(replace(stage, view=view) for stage in attack.stages))


def prior_only(effort: Effort, view: Any) -> Any:
    return gl.attacks.get("prior-only")


def iterations(attack: Any) -> int:
    return sum(stage.optimiser.steps for stage in attack.stages) if hasattr(attack, "stages") else attack.steps


@dataclass(frozen=True)
class Inversion:
    """Images rebuilt from the updates of clients, each with one image, under several defences and attackers."""

    network: Network
    defences: Mapping[str, Defence | None]
    attackers: Sequence[str] = ("A0", "A1", "A2", "A0'")
    attack: Callable[[Effort, Any], Any] = signed_adam
    training: gl.LocalTraining = gl.LocalTraining(lr=LR, steps=CLIENT_STEPS)
    replayed: bool = False  # the attacker unrolls the client's steps; else it predicts one gradient
    labels_given: bool = False  # else they are read off the update, which noise on the classifier prevents
    skips: Sequence[tuple[str, str]] = ()  # (attacker, defence) pairs that would repeat another one's objective
    generator: bool = False  # the attack needs one
    paper: str = ""  # where in expected.json the paper's numbers are

    def measure(self, effort: Effort) -> dict[str, Any]:
        if self.generator and not effort.generator:
            return {"skipped": "no generator was given: --generator FILE"}
        task = self.network.task(effort)
        images = self.network.images(effort, "test", effort.images)
        truth = on_device(examples_of(images, task).tensors, task)
        seen = {label: self.observed(task, truth, label, effort.seed) for label in self.defences}
        figures: dict[str, Any] = {
            **self.network.describe(effort),
            "images": len(images),
            "training": repr(self.training),
            "attack": re.sub(r" at 0x[0-9a-f]+", "", repr(self.attack(effort, None))),
            "iterations": iterations(self.attack(effort, None)),
            "iterations_of_the_paper": PAPER_STEPS,
            "replayed": self.replayed,
            "labels_given": self.labels_given,
            "update_against_gradient": aligned(task, truth, seen["No DP"]),
            "defences": {label: described(defence, task) for label, defence in self.defences.items()},
            "channels_found": {
                label: found_channels(task, defence, seen[label], seen["No DP"])
                for label, defence in self.defences.items()
                if isinstance(defence, TIP)
            },
            "paper": references().get("attacks", {}).get(self.paper),
        }
        for name in self.attackers:
            figures[name] = self.attacked(ATTACKERS[name], name, task, truth, seen, effort)
        reference = figures["A0"]["No DP"]
        undefended, other = reference["psnr"]["mean"], reference.get("psnr_of_another_image", {}).get("mean")
        for name in self.attackers:
            for cell in figures[name].values():
                own = cell["psnr"]["mean"]
                cell["below_undefended"] = undefended - own
                cell["share_of_undefended"] = own / undefended
                # Of what the update gives away at all: decibels alone flatter an attack that found nothing.
                gained = None if other is None or undefended <= other else (own - other) / (undefended - other)
                cell["share_above_another_image"] = gained
        return figures

    def observed(self, task: Task, truth: Mapping[str, Tensor], label: str, seed: int) -> list[gl.Observation]:
        weights = task.weights()
        return [
            uploaded(task, {n: v[i : i + 1] for n, v in truth.items()}, self, label, weights, f"{label} {i}", seed)
            for i in range(len(truth["y"]))
        ]

    def attacked(
        self,
        attacker: Attacker,
        name: str,
        task: Task,
        truth: Mapping[str, Tensor],
        seen: Mapping[str, list[gl.Observation]],
        effort: Effort,
    ) -> dict[str, Any]:
        """Scores of each defence; those of which the attacker knows the same share a run."""
        groups: dict[Defence | None, list[str]] = {}
        for label, defence in self.defences.items():
            if (defence is None and attacker.informed) or (name, label) in self.skips:
                continue
            groups.setdefault(attacker.knows(defence), []).append(label)
        count = len(truth["y"])
        wanted = {field: value.unsqueeze(1) for field, value in truth.items()}
        cells: dict[str, Any] = {}
        for known, labels in groups.items():
            targets = [target for label in labels for target in seen[label]]
            everything = on_host(
                {field: value.repeat(len(labels), *[1] * (value.dim() - 1)) for field, value in wanted.items()}
            )
            knows = gl.Knowledge(
                given={"y": everything["y"]} if self.labels_given else {},
                training=self.training if self.replayed else None,
                defence=known,
                generator=prior_of(effort.generator)[0] if self.generator else None,
            )
            attack = self.attack(effort, attacker.view)
            found = attack.run(task, targets, knows, seed=effort.seed, engine=effort.engine)
            scores = gl.metrics.compare(found, everything)
            for place, label in enumerate(labels):
                own = slice(place * count, (place + 1) * count)
                cells[label] = {
                    "psnr": summary(scores.psnr[own]),
                    "ssim": summary(scores.ssim[own]),
                    "match": summary(found.match[own].min(1).values),
                    "label_accuracy": scores.labels["matched"][own].double().mean().item(),
                    "seconds_of_the_run": found.seconds,
                    "targets_of_the_run": len(targets),
                }
                if label == "No DP" and count > 1:  # what an update of another image gives
                    other = gl.metrics.psnr(
                        task.fields["x"].unit(found.batch["x"][own, 0].roll(1, 0)),
                        task.fields["x"].unit(truth["x"].to(found.batch["x"])),
                    )
                    cells[label]["psnr_of_another_image"] = summary(other)
        return {label: cells[label] for label in self.defences if label in cells}


def on_host(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in batch.items()}


def uploaded(
    task: Task, batch: dict[str, Tensor], row: Inversion, label: str, weights: Params, key: str, seed: int
) -> gl.Observation:
    """`gl.observe` of a client on the task's own device, noise drawn there; it returns weights, which round."""
    defence = row.defences[label] or Defence()
    where = tree.like(weights).device
    state = gl.ClientState(key=draws.key("client", key, seed).to(where))
    with torch.no_grad(), float32_products():
        sent, _ = row.training.run(task, weights, batch, defence, state)
        update = tree.map(lambda w, u: w - (w - u), weights, defence.reveal([sent], [sent.num_examples]))
    return gl.Observation(
        weights=weights, update=update, num_examples=len(batch["y"]), key=key, buffers=task.buffers() or None
    )


def aligned(task: Task, truth: Mapping[str, Tensor], seen: Sequence[gl.Observation]) -> dict[str, float]:
    """The cosine of an undefended update with one gradient at the weights sent: is unrolling needed?"""
    found = []
    for row, target in enumerate(seen):
        batch = {name: value[row : row + 1] for name, value in truth.items()}
        gradient = task.gradient(target.weights, batch, task.buffers())
        inner = sum((gradient[name] * update).sum() for name, update in target.update.items())
        found.append(inner / (tree.norm(gradient) * tree.norm(target.update)))
    return summary(torch.stack(found))


def found_channels(task: Task, defence: TIP, seen: Sequence[gl.Observation], plain: Sequence[gl.Observation]) -> float:
    """The share of the noised channels that the attacker takes for noised, by an auditor who has both updates."""
    hits = total = 0.0
    for target, clear in zip(seen, plain):
        scene = gl.TargetView.of(task, target, gl.Knowledge())
        for name, guessed in replace(defence, beta=1.0)._noised(scene).items():
            # An entry of rounding noise is no noise of the defence's: those are 1e-7 of a weight.
            moved = (target.update[name] - clear.update[name]).abs().amax((1, 2, 3)) > 1e-2 * defence.beta
            hits += float((moved & (guessed[:, 0, 0, 0] > 0)).sum())
            total += float(moved.sum())
    return hits / total if total else 1.0


# --- explanations ----------------------------------------------------------------------------------------------------


def federation(effort: Effort) -> Federation:
    """The paper's card: 100 clients, 10 in a round, two epochs in batches of 32, SGD 0.001, IID."""
    clients, some = (4, 2) if effort.small else (CLIENTS, PER_ROUND)
    return Federation(
        clients=clients,
        training=gl.LocalTraining(lr=LR, epochs=EPOCHS, batch_size=BATCH_SIZE),
        examples=None,
        seed=effort.seed,
        participation=Fixed(some),
    )


def federated_defences(network: Network, effort: Effort, beta: float = 0.1) -> dict[str, Defence | None]:
    """The four columns for a client of the federation: the released code's formula for what this client runs."""
    share = len(network.images(effort, "train")) // federation(effort).clients
    return defended(epochs=EPOCHS, batches=-(-share // BATCH_SIZE), batch_size=BATCH_SIZE, beta=beta)


@cache
def federated(network: Network, defence: Defence | None, effort: Effort) -> Trained:
    """A whole training. The model trains with the batch's own statistics, as clients do."""
    task = network.task(effort)
    own = replace(task, model=evaluating(task).model.train())
    data = examples_of(network.images(effort, "train"), own)
    test = examples_of(network.images(effort, "test"), own)
    return federation(effort).train(
        own, data, effort.rounds, defence=defence, test=test, every=max(1, effort.rounds // 20), engine=effort.engine
    )


@dataclass(frozen=True)
class HeatMaps:
    """Grad-CAM at the last convolution: the local model of a client, with and without defence, on the same images.

    local=True    one client trains from the federation's undefended weights; only its upload is defended
    local=False   the federation trained with the defence in all rounds, against the one without
    """

    network: Network
    defences: Callable[[Network, Effort], Defences]
    local: bool = True
    paper: str = ""

    def measure(self, effort: Effort) -> dict[str, Any]:
        task, images = self.network.task(effort), self.network.images(effort, "test", effort.images)
        batch = on_device(examples_of(images, task).tensors, task)
        chosen = self.defences(self.network, effort)
        figures: dict[str, Any] = {
            **self.network.describe(effort),
            "images": len(images),
            "federation": federation(effort).settings(),
            "rounds": effort.rounds,
            "local": self.local,
            "paper": references().get("heat maps", {}).get(self.paper),
        }
        clear = self.models(None, task, effort)[0]
        everything = self.network.images(effort, "test")
        for label, defence in chosen.items():
            models = self.models(defence, task, effort)
            compared = [
                fidelity(task, clear.weights, m.weights, batch, buffers=clear.buffers, defended_buffers=m.buffers)
                for m in models
            ]
            means = [each.means() for each in compared]
            figures[label] = {
                **described(defence, task),
                "noises": len(models),
                "test_accuracy": sum(accuracy(task, model, everything) for model in models) / len(models),
                **{name: _finite([each[name] for each in means]) for name in means[0]},
            }
        return figures

    def models(self, defence: Defence | None, task: Task, effort: Effort) -> list[Snapshot]:
        """The models that the defence leads to: one for each draw of its noise, or one training."""
        if not self.local:
            end = federated(self.network, defence, effort).state
            return [Snapshot(end.weights, end.buffers)]
        sent = federated(self.network, None, effort).at(effort.rounds)
        noises = 1 if defence is None else effort.noises
        return [returned(self.network, sent, defence, number, effort) for number in range(noises)]


def _finite(values: Sequence[float]) -> float | None:
    """Their mean; JSON has no NaN, which is the rank correlation of a blank map."""
    kept = [value for value in values if value == value]
    return sum(kept) / len(kept) if kept else None


def returned(network: Network, sent: Snapshot, defence: Defence | None, noise: int, effort: Effort) -> Snapshot:
    """The local model of client 0 as it comes back: the same shuffle whatever the defence, its own noise."""
    own, task = federation(effort), network.task(effort)
    training = replace(task, model=evaluating(task).model.train())
    data = examples_of(network.images(effort, "train"), training)
    batch = on_device(data.batch(own.partition(data)[0]), task)
    where = tree.like(sent.weights).device
    state = gl.ClientState(buffers=sent.buffers, key=draws.key("maps", effort.seed, noise).to(where))
    order = own.training.order(len(batch["y"]), torch.Generator().manual_seed(effort.seed))
    with torch.no_grad(), float32_products():
        upload, _ = own.training.run(training, sent.weights, batch, defence, state, order)
    return Snapshot(tree.subtract(sent.weights, upload.payload["update"]), upload.buffers or {})


@dataclass(frozen=True)
class Accuracy:
    """Test accuracy along the federated training, with each defence in every round."""

    network: Network
    defences: Callable[[Network, Effort], Defences] = federated_defences

    def measure(self, effort: Effort) -> dict[str, Any]:
        task, chosen = self.network.task(effort), self.defences(self.network, effort)
        figures: dict[str, Any] = {
            **self.network.describe(effort),
            "federation": {**federation(effort).settings(), "training": repr(federation(effort).training)},
            "rounds": effort.rounds,
            "rounds_of_the_paper": 1000,
        }
        for label, defence in chosen.items():
            metrics = federated(self.network, defence, effort).metrics
            tested = [row for row in metrics if "test_accuracy" in row]
            figures[label] = {
                **described(defence, task),
                "round": [row["round"] for row in tested],
                "test_accuracy": [row["test_accuracy"] for row in tested],
                "test_loss": [row["test_loss"] for row in tested],
                "final_accuracy": tested[-1]["test_accuracy"],
                "seconds": sum(row["seconds"] for row in metrics),
            }
        clear = figures["No DP"]["final_accuracy"]
        for label in chosen:
            figures[label]["accuracy_lost"] = clear - figures[label]["final_accuracy"]
        return figures


# --- everything that is measured -------------------------------------------------------------------------------------

# Under a cosine and one predicted gradient, uniform weights and clipping are factors: these would repeat another run.
SAME = (("A1", "DP"), ("A2", "DP"), ("A2", "AGP"))


def rows() -> dict[str, Row]:
    cifar10, scratch = Network(), Network(trained=False)
    cifar100, group = replace(cifar10, data="cifar100"), replace(cifar10, norm="group")
    tiny = Network("tiny-imagenet", stem="imagenet", trained=False)
    table = partial(Inversion, defences=attacked(), skips=SAME)
    honest = ("A0", "A1", "A2")
    # Unrolling is dear, and says something only where the noise is not uniform.
    two = {label: defence for label, defence in attacked().items() if label in ("No DP", "TIP")}
    found: dict[str, Row] = {
        "table cifar10": table(cifar10, paper="cifar10"),
        "table cifar100": table(cifar100, paper="cifar100"),
        "table cifar10, group norm": table(group, attackers=honest, paper="cifar10"),
        "table tiny-imagenet": table(tiny, paper="tiny-imagenet"),
        "table cifar10, labels given": table(cifar10, attackers=honest, labels_given=True, paper="cifar10"),
        "table cifar10, steps unrolled": Inversion(cifar10, two, ("A0", "A2"), replayed=True, paper="cifar10"),
        "table cifar10, gifd": table(cifar10, attackers=honest, attack=gifd, generator=True, paper="cifar10"),
        "table cifar10, prior only": table(cifar10, attackers=("A0",), attack=prior_only, generator=True),
    }
    lenet, once = Network(model="lenet-zhu", trained=False), gl.LocalTraining(lr=LR)
    weak = {"No DP": None, "beta 0.0057": TIP(beta=0.0057), "beta 0.1": TIP(beta=0.1)}
    found["table lenet"] = Inversion(lenet, weak, attack=lbfgs, training=once, replayed=True)
    found["table lenet, second order"] = Inversion(lenet, weak, honest, second_order, once, replayed=True)
    levels = {"beta": honest}
    for name, family in sweeps().items():
        found[f"sweep {name}"] = Inversion(cifar10, family, levels.get(name, ("A0", "A1")))
    for network in (cifar10, cifar100):
        found[f"accuracy {network.data}, pretrained"] = Accuracy(network)
        found[f"maps {network.data}, local"] = HeatMaps(network, federated_defences, paper=network.data)
        found[f"maps {network.data}, whole training"] = HeatMaps(network, federated_defences, False, network.data)
    for name, family in sweeps().items():
        found[f"maps cifar10, {name}"] = HeatMaps(cifar10, partial(constant, family))
    found["accuracy cifar10, from scratch"] = Accuracy(scratch)
    return found


def constant(family: Defences, network: Network, effort: Effort) -> Defences:
    return family


def references() -> dict[str, Any]:
    """The paper's own numbers, to stand beside ours."""
    return json.loads(EXPECTED.read_text())["reference"]


def told_in_a_line(row: dict[str, Any]) -> str:
    """What a row found, for whoever waits."""
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    cells = [
        f"{level} {label} {cell['psnr']['mean']:.2f} dB"
        for level in ATTACKERS
        for label, cell in row.get(level, {}).items()
    ]
    cells += [f"{label} {c['final_accuracy']:.3f}" for label, c in row.items() if _has(c, "final_accuracy")]
    cells += [f"{label} SSIM {c['ssim']:.3f}" for label, c in row.items() if _has(c, "overlay_ssim")]
    return ", ".join(cells)


def _has(cell: Any, name: str) -> bool:
    return isinstance(cell, dict) and name in cell


def main() -> None:
    reproduce(__doc__ or "", Effort, rows(), told_in_a_line, EXPECTED)


if __name__ == "__main__":
    main()
