"""SecAdam: what a server sees of clients that send moments under secure aggregation, and what attacks make of it.

Rows by the first word of their names: `clients` (ours: what the server has of n = 1 ... 50 clients, view by view),
`exact` (ours: whether sums and ratios determine the images), `rounds` (ours: the same client over rounds), `state`
(ours: second moments, and with them gradients, read off the masked sums of many rounds), `labels` (ours: read off signs
and ratios), `inversion` (the paper's table: representation inversion), `gradients` (its table of iDLG and CPL),
`performance` (accuracy and loss), `grid` (the DP grid) and `ablation` (activation, norm, pooling, start). Rows are
written one by one. The paper: see README.md.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import effort_arguments, record, summary, with_effort
from secadam.attacks import Method, attacked, gradient_methods, representation, unseen
from secadam.settings import GRADIENT, Effort, Network, algorithms, single

import gradleak as gl
from gradleak.core import registry, tree
from gradleak.defences import DPFedAvgLewis, DPSecAdam, SecAdam, SecLion
from gradleak.defences.secadam import means
from gradleak.federation import ClassDirichlet, ClientDirichlet, Federation
from gradleak.metrics import baselines, compare
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Defence
from gradleak.scenario.observation import Observation, Track
from gradleak.scenario.task import Batch
from gradleak.secure import Member, reveal

EXPECTED = Path(__file__).with_name("expected.json")
SMALL = {"runs": 2, "steps": 60, "trained": 20, "rounds": 10, "clients": 8}
SETS = {"FMNIST": "fashion-mnist", "CIFAR-10": "cifar10", "CIFAR-100": "cifar100", "SVHN": "svhn"}
SETS["Tiny-ImageNet"] = "tiny-imagenet"
COHORTS = (1, 2, 4, 8, 16, 50)
ROUNDS = (1, 2, 4, 8)
ACTIVATIONS, NORMS = ("relu", "elu", "sigmoid", "leaky_relu", "tanh"), ("none", "layer")
POOLS = {
    "no pool": {},
    "max 2": {"pool": "max", "window": 2},
    "max 3": {"pool": "max", "window": 3},
    "avg 2": {"pool": "avg", "window": 2},
    "avg 3": {"pool": "avg", "window": 3},
}
CLIPS, NOISES = (1.0, 5.0, 10.0), (1e-3, 5e-3, 1e-2)


class Row(Protocol):
    """One thing that is measured."""

    def measure(self, effort: Effort) -> dict[str, Any]: ...


def references() -> dict[str, Any]:
    """The paper's own numbers, to stand beside ours."""
    held: dict[str, Any] = json.loads(EXPECTED.read_text())["reference"]
    return held


def printed(table: str, **wanted: Any) -> dict[str, Any]:
    """The row of a table of the paper with these entries; empty where it has none."""
    rows = references()[table]
    return next((row for row in rows if all(row[name] == value for name, value in wanted.items())), {})


# --- ours: what the server sees of n clients --------------------------------------------------------------------------


@dataclass(frozen=True)
class Cohorts:
    """One image a client, n clients, an untrained LeNet: PSNR and labels by n, for everything the server may have."""

    data: str = "cifar10"
    sizes: Sequence[int] = COHORTS

    def measure(self, effort: Effort) -> dict[str, Any]:
        network = Network(self.data, "lenet-zhu", trained=False)
        cells: dict[str, Any] = {}
        for size in self.sizes:
            truth = network.victims(effort, size)
            truth = {name: value[: _runs(effort, size)] for name, value in truth.items()}
            cells[str(size)] = self.of(size, network, effort, truth)
        return {**network.described(effort), "factor_bits": reveal.FACTOR_BITS, "cells": cells}

    def of(self, size: int, network: Network, effort: Effort, truth: Batch) -> dict[str, Any]:
        task, defence = network.task(effort), SecAdam()
        groups = [cohort(task, single(truth, run), size, defence, run, effort) for run in range(len(truth["x"]))]
        plain = [cohort(task, single(truth, run), size, None, run, effort) for run in range(len(truth["x"]))]
        ratio = [group.observed() for group in groups]
        sums = [group.observed() for group in plain]
        masked = [
            reveal.with_update(seen, reveal.masked_first(group, seed=run))
            for run, (seen, group) in enumerate(zip(ratio, groups))
        ]
        exact = [seen.update for seen in sums]
        lion = SecLion(rate=1.0, sees="ratio")
        lions = [cohort(task, single(truth, run), size, lion, run, effort) for run in range(len(truth["x"]))]
        steps = effort.steps
        sign = {"steps": steps, "clients": size, "labels": "ratio-counts"}
        views: dict[str, tuple[list[Observation], dict[str, Method]]] = {
            "sum (secure aggregation)": (
                sums,
                {
                    "idlg": Method("idlg", {"steps": steps}, adaptive=False),
                    "sign-matching": Method("sign-matching", {"steps": steps}, adaptive=False),
                },
            ),
            "ratio (SecAdam)": (
                ratio,
                {
                    "sign-matching": Method("sign-matching", sign),
                    "sign-matching, both": Method("sign-matching", {**sign, "match": "both"}),
                    "idlg, A0": Method("idlg", {"steps": steps}, adaptive=False),
                    "idlg, A2": Method("idlg", {"steps": steps, "labels": "ratio-counts"}),
                },
            ),
            "masked sum (what SecAdam's server holds)": (
                masked,
                {"idlg": Method("idlg", {"steps": steps}, adaptive=False)},
            ),
        }
        told: dict[str, Any] = {
            "runs": len(groups),
            "cosine_with_the_mean_gradient": {
                "ratio": _mean([reveal.cosine(seen.update, g) for seen, g in zip(ratio, exact)]),
                "masked sum": _mean([reveal.cosine(seen.update, g) for seen, g in zip(masked, exact)]),
                "signs": _mean([reveal.cosine(tree.map(torch.sign, g), g) for g in exact]),
                "SecLion's ratio": _mean([reveal.cosine(each.observed().update, g) for each, g in zip(lions, exact)]),
            },
            "mid-grey": {
                name: summary(value)
                for name, value in baselines(_flat(network, effort, truth))["mid-grey"].items()
                if name in ("psnr", "ssim")
            },
        }
        if size > effort.clients:  # looked at, not attacked
            return told
        for view, (seen, methods) in views.items():
            told[view] = {
                label: self._scored(method, task, seen, defence if method.adaptive else None, truth, effort)
                for label, method in methods.items()
                if size == 1 or label != "idlg, A2"  # a replay of one client's rule: of several it is `Sums`
            }
        if size > 1:
            told["one traitor (first moments of the others)"] = self._betrayed(groups, task, truth, effort)
        return told

    def _betrayed(self, groups: Sequence[reveal.Cohort], task: gl.Task, truth: Batch, effort: Effort) -> dict[str, Any]:
        """The last client tells the server the shared seed and its own values: the others' mean gradient is left."""
        seen, gaps = [], []
        for group in groups:
            values = reveal.weighted(group.uploads, group.sizes)
            last = len(group.uploads) - 1
            members = [*(Member(number) for number in range(last)), reveal.Traitor(last)]
            masked = reveal.in_ring(values, members=members, minimum=2)
            traitor = members[-1]
            assert isinstance(traitor, reveal.Traitor)
            assert traitor.learned is not None
            first, _ = reveal.uncovered(masked, traitor.learned, values[last])
            own = means(group.uploads[:-1], group.sizes[:-1])[0]
            gaps.append(max(float((first[name] - own[name].cpu()).abs().max()) for name in own))
            seen.append(group.observed(first, clients=range(last)))
        others = {name: value[:, :-1] for name, value in truth.items()}
        method = Method("idlg", {"steps": effort.steps}, adaptive=False)
        return {"idlg": self._scored(method, task, seen, None, others, effort), "largest_error": max(gaps)}

    def _scored(
        self,
        method: Method,
        task: gl.Task,
        seen: Sequence[Observation],
        defence: Defence | None,
        truth: Batch,
        effort: Effort,
    ) -> dict[str, Any]:
        attack = gl.attacks.get(method.name, **method.settings)
        found = attack.run(task, seen, method.knows(defence), seed=effort.seed, engine=effort.engine)
        scores = compare(found, truth)
        labels = scores.labels["multiset_accuracy"]
        told: dict[str, Any] = {
            "psnr": summary(scores.psnr),
            "ssim": summary(scores.ssim),
            "labels": float(labels.double().mean()),
            "seconds": found.seconds,
        }
        if len(seen) > 1:  # the same images beside those of another run: what any image of the attack's own kind scores
            other = compare(found, {name: value.roll(1, 0) for name, value in truth.items()})
            told["unrelated"] = {"psnr": summary(other.psnr), "ssim": summary(other.ssim)}
        return told


def cohort(task: gl.Task, batch: Batch, size: int, defence: Defence | None, run: int, effort: Effort) -> reveal.Cohort:
    """The images of a run, divided among so many clients."""
    each = [dict(zip(batch, parts)) for parts in zip(*(value.chunk(size) for value in batch.values()))]
    return reveal.cohort(task, each, GRADIENT, defence, key=f"run{run}", seed=effort.seed)


def _runs(effort: Effort, size: int) -> int:
    """Large cohorts bring many images each: about as many in all."""
    return max(1, min(effort.runs, 4 * effort.runs // size))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _flat(network: Network, effort: Effort, truth: Batch) -> Tensor:
    return network.task(effort).fields["x"].unit(truth["x"].flatten(0, 1).cpu())


@dataclass(frozen=True)
class Exact:
    """Images of 8 x 8, one a client: does the sum, does the ratio, determine all of them? Second-order steps."""

    data: str = "cifar10"
    sizes: Sequence[int] = (1, 2, 3, 4, 8)
    most: int = 8  # clients of a run that is not small

    def measure(self, effort: Effort) -> dict[str, Any]:
        network = Network(self.data, "lenet-zhu", trained=False, shrunk=4)
        task, engine = network.task(effort), replace(effort.engine, precision="double")
        steps, restarts = (min(effort.steps, 25), 2) if effort.small else (60, 8)
        cells: dict[str, Any] = {}
        for size in [size for size in self.sizes if size <= (min(effort.clients, 3) if effort.small else self.most)]:
            truth = network.victims(effort, size)
            views = {"sum": (None, "auto"), "ratio": (SecAdam(rate=1.0), "ratio-counts")}
            for view, (defence, labels) in views.items():
                seen = [
                    cohort(task, single(truth, run), size, defence, run, effort).observed()
                    for run in range(effort.runs)
                ]
                attack = gl.attacks.get(
                    "ratio-second-order", clients=size, steps=steps, restarts=restarts, labels=labels
                )
                knows = gl.Knowledge(training=GRADIENT, defence=defence)
                found = attack.run(
                    task.to(engine.where, torch.float64), _double(seen), knows, seed=effort.seed, engine=engine
                )
                scores = compare(found, truth)
                exact = (scores.psnr > 60).all(1).double().mean()
                cells[f"{view}, n {size}"] = {
                    "psnr": summary(scores.psnr),
                    "all_exact": float(exact),
                    "match": found.match.min(1).values.tolist(),
                    "labels": float(scores.labels["multiset_accuracy"].double().mean()),
                    "seconds": found.seconds,
                }
        return {**network.described(effort), "cells": cells}


def _double(seen: Sequence[Observation]) -> list[Observation]:
    wide = lambda held: tree.to(held, None, torch.float64)  # noqa: E731
    return [replace(each, weights=wide(each.weights), update=wide(each.update)) for each in seen]


@dataclass(frozen=True)
class OverRounds:
    """One client without others, the same image in every round: the attacker replays its moments, or does not."""

    data: str = "cifar10"
    rounds: Sequence[int] = ROUNDS
    rate: float = 1e-3

    def measure(self, effort: Effort) -> dict[str, Any]:
        network, defence = Network(self.data, "lenet-zhu", trained=False), SecAdam(rate=self.rate)
        task, truth = network.task(effort), network.victims(effort, 1)
        tracks = [self._track(task, single(truth, run), defence, run) for run in range(effort.runs)]
        cells: dict[str, Any] = {}
        for count in self.rounds:
            seen = [Track(tuple(track[:count])) for track in tracks]
            for tracked in (False, True) if count > 1 else (True,):
                attack = gl.attacks.get("sign-matching", steps=effort.steps, tracked=tracked)
                knows = gl.Knowledge(training=GRADIENT, defence=defence)
                found = attack.run(task, seen, knows, seed=effort.seed, engine=effort.engine)
                scores = compare(found, truth)
                label = f"{count} rounds, {'tracked' if tracked else 'each as the first'}"
                cells[label] = {"psnr": summary(scores.psnr), "ssim": summary(scores.ssim), "seconds": found.seconds}
        return {**network.described(effort), "cells": cells}

    def _track(self, task: gl.Task, batch: Batch, defence: SecAdam, run: int) -> list[Observation]:
        weights, memories, seen = task.weights(), None, []
        for number in range(max(self.rounds)):
            group = reveal.cohort(
                task, [batch], GRADIENT, defence, weights=weights, memories=memories, round=number, key=f"run{run}"
            )
            seen.append(group.observed())
            memories, weights = group.memories, tree.subtract(weights, seen[-1].update)
        return seen


@dataclass(frozen=True)
class State:
    """What a server that keeps the masked sums of all rounds knows of v, of m and of the gradients of the last one.

    A training with SecAdam: n clients with fresh images in every round, an untrained LeNet, the real protocol from
    three clients on (with fewer it refuses; then the same sums in floats). The server sees r_t sum m_t and
    r_t^2 sum v_t, knows n, the betas and that r_t is at most 2^bits, and has neither r_t nor any client on its side.
    """

    data: str = "cifar10"
    sizes: Sequence[int] = (1, 5, 20)
    examples: int = 1
    rounds: Sequence[int] = (1, 3, 10, 30, 100)
    rate: float = 1e-3
    inverted: bool = False  # attack what is known of the last gradient of one client instead

    def measure(self, effort: Effort) -> dict[str, Any]:
        network = Network(self.data, "lenet-zhu", trained=False)
        if self.inverted:
            return {**network.described(effort), "cells": self._inverted(network, effort)}
        cells: dict[str, Any] = {}
        for size in self.sizes:
            groups, seen = self._trained(network, effort, size, 0)
            cells[f"n {size}"] = {
                **{f"{last} rounds": self._known(network, groups[:last], seen[:last]) for last in self.rounds},
                "SecLion, one round": self._lion(network, effort, size),
            }
        return {**network.described(effort), "factor_bits": reveal.FACTOR_BITS, "cells": cells}

    def _batches(self, network: Network, effort: Effort, size: int, run: int) -> Batch:
        """(rounds, size * examples, ...)"""
        return network.victims(
            replace(effort, runs=max(self.rounds), seed=effort.seed + 100 * run), size * self.examples
        )

    def _trained(
        self, network: Network, effort: Effort, size: int, run: int
    ) -> tuple[list[reveal.Cohort], list[reveal.Masked]]:
        task, images, defence = network.task(effort), self._batches(network, effort, size, run), SecAdam(rate=self.rate)
        weights, memories, groups, seen = task.weights(), None, [], []
        for number in range(max(self.rounds)):
            parts = zip(*(value.chunk(size) for value in single(images, number).values()))
            group = reveal.cohort(
                task,
                [dict(zip(images, part)) for part in parts],
                GRADIENT,
                defence,
                weights=weights,
                memories=memories,
                round=number,
                key=f"run{run}",
                seed=effort.seed,
            )
            values = reveal.weighted(group.uploads, group.sizes)
            # Float masks of the size of the moments: large ones would cancel to fewer digits.
            masked = (
                reveal.in_floats(values, seed=1000 * run + number, spread=1.0)
                if size < 3
                else reveal.in_ring(values, round=number)
            )
            weights, memories = tree.subtract(weights, group.observed().update), group.memories
            groups.append(replace(group, memories=()))
            seen.append(masked)
        return groups, seen

    def _known(
        self, network: Network, groups: Sequence[reveal.Cohort], seen: Sequence[reveal.Masked]
    ) -> dict[str, Any]:
        """Errors of sizes, sqrt(mean v), and cosines with the last round's exact mean first moment and gradient."""
        last, count = groups[-1], len(seen)
        first, second = (tree.to(held, "cpu", torch.float64) for held in means(last.uploads, last.sizes))
        gradient = _gradient(groups)
        readings = {
            "largest of all rounds": reveal.second_over_rounds(seen),
            "largest of the later half": reveal.second_over_rounds(seen[count // 2 :]),
            "tracked (v forgets by beta2)": reveal.second_over_rounds(seen, beta2=SecAdam.beta2),
        }
        told: dict[str, Any] = {
            "cosines of what one round shows": {
                "ratio, with m": reveal.cosine(seen[-1].ratio(2), first),
                "r m, with m": reveal.cosine(seen[-1].first, first),
                "ratio, with the gradient": reveal.cosine(seen[-1].ratio(2), gradient),
                "r m, with the gradient": reveal.cosine(seen[-1].first, gradient),
            }
        }
        for name, found in readings.items():
            off = (tree.flatten(found) / tree.flatten(second)).sqrt() - 1
            cell = {
                "median_error_of_sizes": float(off.abs().median()),
                "share_within_a_tenth": float((off.abs() < 0.1).double().mean()),
                "largest_excess": float(off.max()),
                "cosine_with_m": reveal.cosine(reveal.first_over_rounds(seen[-1], found), first),
            }
            if count > 1:
                guess = reveal.gradient_over_rounds(seen[-2], seen[-1], found, round=count, beta1=SecAdam.beta1)
                cell["cosine_with_the_gradient"] = reveal.cosine(guess, gradient)
            told[name] = cell
        return told

    def _lion(self, network: Network, effort: Effort, size: int) -> dict[str, float]:
        """SecLion hides nothing that has to be waited for: c / e of a single round."""
        images, lion = single(self._batches(network, effort, size, 0), 0), SecLion(rate=1.0, sees="ratio")
        group = cohort(network.task(effort), images, size, lion, 0, effort)
        first = tree.to(means(group.uploads, group.sizes)[0], "cpu", torch.float64)
        seen = tree.to(group.observed().update, "cpu", torch.float64)
        exact = tree.flatten(first)
        off = (tree.flatten(seen)[exact != 0] * (lion.low + lion.high) / 2 / exact[exact != 0] - 1).abs()
        return {
            "median_error_of_sizes": float(off.median()),
            "share_within_a_tenth": float((off < 0.1).double().mean()),
            "cosine_with_c": reveal.cosine(seen, first),
        }

    def _inverted(self, network: Network, effort: Effort) -> dict[str, Any]:
        """IG on the gradient of the last round of one client: exact, as the server tracked it, and on its ratio.

        IG, since iDLG finds nothing in the exact gradient of this network after 100 rounds; it is blind to scale.
        """
        task = network.task(effort)
        views: dict[str, list[Observation]] = {"exact gradient": [], "tracked": [], "r m": [], "ratio": []}
        truth = []
        for run in range(effort.runs):
            groups, seen = self._trained(network, effort, 1, run)
            truth.append(single(self._batches(network, effort, 1, run), max(self.rounds) - 1))
            second = reveal.second_over_rounds(seen, beta2=SecAdam.beta2)
            tracked = reveal.gradient_over_rounds(seen[-2], seen[-1], second, round=len(seen), beta1=SecAdam.beta1)
            scale = 1 / (2**reveal.FACTOR_BITS + 1) * 2
            of = {
                "exact gradient": _gradient(groups),
                "tracked": tracked,
                "r m": tree.scale(seen[-1].first, scale),
                "ratio": seen[-1].ratio(2),
            }
            for name, update in of.items():
                views[name].append(groups[-1].observed(update))
        batch = {name: torch.stack([each[name] for each in truth]) for name in truth[0]}
        attack = gl.attacks.get("ig", steps=effort.steps)
        told: dict[str, Any] = {
            "mid-grey": {
                name: summary(value)
                for name, value in baselines(_flat(network, effort, batch))["mid-grey"].items()
                if name in ("psnr", "ssim")
            }
        }
        for name, observed_ in views.items():
            found = attack.run(task, observed_, gl.Knowledge(training=GRADIENT), seed=effort.seed, engine=effort.engine)
            scores = compare(found, batch)
            told[name] = {
                "psnr": summary(scores.psnr),
                "ssim": summary(scores.ssim),
                "labels": float(scores.labels["multiset_accuracy"].double().mean()),
                "seconds": found.seconds,
            }
            if len(truth) > 1:
                other = compare(found, {field: value.roll(1, 0) for field, value in batch.items()})
                told[name]["unrelated"] = {"psnr": summary(other.psnr), "ssim": summary(other.ssim)}
        return told


def _gradient(groups: Sequence[reveal.Cohort]) -> tree.Params:
    """The exact mean gradient of the last round, of two rounds' first moments in float64 (with lr 1 u is g)."""
    sums = [
        tree.scale(tree.to(means(group.uploads, group.sizes)[0], "cpu", torch.float64), 1 - SecAdam.beta1**number)
        for number, group in list(enumerate(groups, start=1))[-2:]
    ]
    before = tree.scale(sums[-2], SecAdam.beta1) if len(sums) > 1 else tree.zeros_like(sums[-1])
    return tree.scale(tree.subtract(sums[-1], before), 1 / (1 - SecAdam.beta1))


@dataclass(frozen=True)
class Labels:
    """Labels read off what SecAdam and SecLion show, by batch size and by cohort; the share that is right."""

    data: str
    model: str
    trained: bool = False

    def measure(self, effort: Effort) -> dict[str, Any]:
        network = Network(self.data, self.model, trained=self.trained)
        task = network.task(effort)
        cells: dict[str, Any] = {}
        for examples in (1, 8):
            truth = network.victims(effort, examples)
            for name, defence in (("SecAdam", SecAdam()), ("SecLion", SecLion())):
                seen = [
                    gl.observe(task, single(truth, run), GRADIENT, defence, key=f"{run}") for run in range(effort.runs)
                ]
                cells[f"{name}, one client, B {examples}"] = self._right(
                    ("sign", "row-minimum"), task, seen, truth, defence
                )
        for size in COHORTS[1:]:
            truth = network.victims(effort, size)
            seen = [
                cohort(task, single(truth, run), size, SecAdam(), run, effort).observed() for run in range(effort.runs)
            ]
            cells[f"SecAdam, {size} clients, B 1"] = self._right(("ratio-counts", "sign"), task, seen, truth, SecAdam())
        return {**network.described(effort), "cells": cells}

    def _right(
        self, rules: Sequence[str], task: gl.Task, seen: Sequence[Observation], truth: Batch, defence: Defence
    ) -> dict[str, float]:
        knows = gl.Knowledge(training=GRADIENT, defence=defence)
        found = {}
        for rule in rules:
            made, right = registry.get("labels", rule), []
            for each, y in zip(seen, truth["y"]):
                counts = made.counts(TargetView.of(task, each, knows)).cpu()
                true = torch.bincount(y.cpu(), minlength=len(counts))
                right.append(float(torch.minimum(counts, true).sum()) / len(y))
            found[rule] = _mean(right)
        return found


# --- the paper's tables -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inversion:
    """Representation inversion of single clients with eight images, under the four algorithms."""

    dataset: str
    network: Network
    examples: int = 8
    paper: bool = True  # this is the network of the paper's table

    def measure(self, effort: Effort) -> dict[str, Any]:
        truth = self.network.victims(effort, self.examples)
        method = representation(self.network.data, effort)
        cells = {}
        for name, defence in algorithms().items():
            wanted = {"dataset": self.dataset.replace("Tiny-ImageNet", "Tiny-Imagenet"), "algorithm": name}
            cells[name] = attacked(method, self.network, effort, truth, defence)
            cells[name]["paper"] = printed("inversion", **wanted) if self.paper else {}
        return {
            **self.network.described(effort),
            "cells": cells,
            "no update": unseen(self.network, effort, truth),
        }


@dataclass(frozen=True)
class Gradients:
    """iDLG and CPL through the client's optimiser on untrained networks, and ours.

    start   "class": from a test image of each inferred class, as the main script has it. Where nothing can be descended
            the start is what comes out, and the paper's metric rewards it
    """

    dataset: str
    network: Network
    examples: int = 8
    start: str = "uniform"

    def measure(self, effort: Effort) -> dict[str, Any]:
        truth = self.network.victims(effort, self.examples)
        cells: dict[str, Any] = {}
        printed_of = references()["gradients"].get(f"{self.dataset} {self.network.model}", {})
        for label, method in gradient_methods(effort, self.start).items():
            for name, defence in algorithms().items():
                cell = attacked(method, self.network, effort, truth, defence)
                cell["paper"] = printed_of.get(label, {}).get(name, {})
                cells[f"{label}, {name}"] = cell
        return {
            **self.network.described(effort),
            "cells": cells,
            "no update": unseen(self.network, effort, truth),
        }


def trainings(rate: float) -> dict[str, tuple[float, Defence | None]]:
    """The clients' learning rate and the defence. FedAVG with the same rate moves far less in a step: beside it a
    rate of its own."""
    return {
        "FedAVG": (rate, None),
        "SecAdam": (1.0, SecAdam(rate=rate)),
        "FedAVG, lr 0.1": (0.1, None),
        "SecLion": (1.0, SecLion(rate=rate / 10)),
    }


def divided(images: int, classes: int) -> ClassDirichlet | ClientDirichlet:
    """Dirichlet 0.5 class by class, as the paper's; client by client where a class has too few images to be divided.

    Our Tiny-ImageNet has two images a class: among ten clients the first would nearly always get none.
    """
    if images < 4 * classes:
        return ClientDirichlet(alpha=0.5)
    return ClassDirichlet(alpha=0.5, min_size=min(10, images // 40))


@dataclass(frozen=True)
class Training:
    """Accuracy and loss after federated training: ten clients, Dirichlet 0.5 by class, one step a round."""

    dataset: str
    network: Network
    algorithms: Mapping[str, tuple[float, Defence | None]]
    table: str = "performance"

    def measure(self, effort: Effort) -> dict[str, Any]:
        network = replace(self.network, trained=False)
        task = network.task(effort)
        data, test = network.stored(effort, "train"), network.stored(effort, "test")
        examples = 32 if network.data in ("fashion-mnist", "cifar10") else 8
        split = divided(len(data), len(data.tensors["y"].unique()))
        cells = {}
        for name, (lr, defence) in self.algorithms.items():
            federation = Federation(
                clients=10,
                training=gl.LocalTraining(lr=lr),
                examples=min(examples, len(data) // 40),
                seed=effort.seed,
                split=split,
                weighting="uniform",
            )
            done = federation.train(
                task, data, effort.rounds, defence=defence, test=test, every=effort.rounds, engine=effort.engine
            )
            last = [row for row in done.metrics if "test_loss" in row][-1]
            cells[name] = {
                "accuracy": 100 * last["test_accuracy"],
                "loss": last["test_loss"],
                "guarantee": None
                if defence is None
                else str(defence.guarantee(federation.exposure(effort.rounds, data))),
                "paper": self._printed(name),
            }
        return {**network.described(effort), "rounds": effort.rounds, "split": repr(split), "cells": cells}

    def _printed(self, name: str) -> dict[str, Any]:
        if self.table == "performance":
            return printed("performance", dataset=self.dataset, algorithm=name)
        algorithm, clip, noise = name.split(", ")
        numbers = {"clip": float(clip.split()[1]), "noise scale": float(noise.split()[1])}
        table = {"DP-FedAVG": "dp_fedavg", "DP-SecAdam": "dp_secadam"}[algorithm]
        return printed(table, dataset=self.dataset, **numbers)


def grid(rate: float, clip: float) -> dict[str, tuple[float, Defence | None]]:
    found: dict[str, tuple[float, Defence | None]] = {}
    for noise in NOISES:
        found[f"DP-FedAVG, clip {clip:g}, noise {noise:g}"] = (rate, DPFedAvgLewis(clip=clip, noise=noise))
        found[f"DP-SecAdam, clip {clip:g}, noise {noise:g}"] = (1.0, DPSecAdam(rate=rate, clip=clip, noise=noise))
    return found


@dataclass(frozen=True)
class Ablation:
    """The CNN of three convolutions, activation by activation with and without LayerNorm; SGD, the plain update."""

    pool: str
    start: str
    examples: int
    activations: Sequence[str] = ACTIVATIONS
    length: float = 1.0

    def measure(self, effort: Effort) -> dict[str, Any]:
        cells: dict[str, Any] = {}
        method = replace(
            representation("cifar10", effort, self.start, rate=0.01),
            settings={"steps": effort.steps, "lr": 0.01, "decay": False, "weight_decay": 0.0},
        )
        for activation in self.activations:
            for norm in NORMS:
                options = tuple({**POOLS[self.pool], "activation": activation, "norm": norm}.items())
                network = Network("cifar10", "cnn", options=options, recipe="sgd", length=self.length)
                cell = attacked(method, network, effort, network.victims(effort, self.examples), None)
                cells[f"{activation}, {norm}"] = {**cell, "test_accuracy": network.accuracy(effort)}
        every = [run for cell in cells.values() for run in cell["s004_of_each"]]
        pairs = torch.tensor([[run["oracle_ssim"], run["oracle_psnr"]] for run in every])
        return {
            "data": images_of(effort),
            "cells": cells,
            "correlation_of_ssim_and_psnr": float(torch.corrcoef(pairs.T)[0, 1]) if len(pairs) > 2 else None,
            "paper": references()["ablation"],
        }


def images_of(effort: Effort) -> str:
    return Network("cifar10", "cnn").images(effort, "train").source


# --- everything that is measured --------------------------------------------------------------------------------------


def rows() -> dict[str, Row]:
    """Everything by name, in the order in which it is worth having."""
    found: dict[str, Row] = {"clients cifar10": Cohorts(), "clients fashion-mnist": Cohorts("fashion-mnist")}
    found["exact cifar10"] = Exact()
    found["rounds cifar10"] = OverRounds()
    found["state cifar10, B 1"] = State()
    found["state cifar10, B 8"] = State(examples=8)
    found["state cifar10, inverted"] = State(inverted=True)
    for data, model in (("cifar10", "lenet-zhu"), ("fashion-mnist", "lenet"), ("cifar10", "cnn")):
        for trained in (False, True):
            name = f"labels {data}, {model}, {'trained' if trained else 'untrained'}"
            found[name] = Labels(data, model, trained)
    table = {"FMNIST": Network(model="lenet")}
    table |= {name: Network(data, "convnext") for name, data in SETS.items() if name != "FMNIST"}
    for name, network in table.items():
        found[f"inversion {name}, {network.model}"] = Inversion(name, network)
    found["inversion FMNIST, cnn"] = Inversion("FMNIST", Network(model="cnn"), paper=False)
    for name, data in list(SETS.items())[1:]:
        found[f"inversion {name}, resnetv2"] = Inversion(name, Network(data, "resnetv2"), paper=False)
    for model in ("cnn", "lenet"):
        network = Network(model=model, trained=False)
        found[f"gradients FMNIST, {model}"] = Gradients("FMNIST", network)
        found[f"gradients FMNIST, {model}, from class images"] = Gradients("FMNIST", network, start="class")
    for name, data in list(SETS.items())[1:]:
        found[f"gradients {name}, resnetv2"] = Gradients(name, Network(data, "resnetv2", trained=False))
    for name, data in SETS.items():
        network = Network(data, "lenet" if name == "FMNIST" else "convnext")
        rate = 1e-3 if data in ("fashion-mnist", "cifar10") else 1e-4
        found[f"performance {name}, {network.model}"] = Training(name, network, trainings(rate))
    for name, data in SETS.items():
        network = Network(data, "cnn" if name == "FMNIST" else "resnetv2")
        rate = 1e-3 if data in ("fashion-mnist", "cifar10") else 1e-4
        for clip in CLIPS:
            found[f"grid {name}, {network.model}, clip {clip:g}"] = Training(name, network, grid(rate, clip), "grid")
    for examples in (8, 1):
        for start in ("uniform", "mosaic-8", "red"):
            for pool in POOLS:
                found[f"ablation {pool}, {start}, B {examples}"] = Ablation(pool, start, examples)
    found["ablation sigmoid, 30 epochs"] = Ablation("no pool", "uniform", 8, ("sigmoid",), length=3.0)
    return found


def told_in_a_line(row: dict[str, Any]) -> str:
    """What a row found, for whoever waits."""
    parts = []
    for name, cell in row["cells"].items():
        if "SecLion, one round" in cell:
            last = list(cell)[-2]
            tracked = cell[last]["tracked (v forgets by beta2)"]
            parts.append(f"{name}, {last}: sizes to {tracked['median_error_of_sizes']:.1%}")
        elif "psnr" in cell:
            parts.append(f"{name} {cell['psnr']['mean']:.1f} dB")
        elif "accuracy" in cell:
            parts.append(f"{name} {cell['accuracy']:.1f} %")
        elif all(isinstance(value, float) for value in cell.values()):
            parts.append(f"{name} " + ", ".join(f"{rule} {value:.0%}" for rule, value in cell.items()))
        else:
            inner = [
                f"{view.split(' (')[0]}/{label} {held['psnr']['mean']:.1f}"
                for view, methods in cell.items()
                if isinstance(methods, dict) and view != "mid-grey"
                for label, held in methods.items()
                if isinstance(held, dict) and "psnr" in held
            ]
            parts.append(f"n {name}: {', '.join(inner)}")
    return "; ".join(parts)


def run(options: Namespace) -> dict[str, Any]:
    """The rows that `only` picks, until the budget is spent."""
    return with_effort(options, Effort, rows(), told_in_a_line)


def main() -> None:
    options = effort_arguments(__doc__ or "", Effort)
    if options.small:  # a minute or so on a CPU, unless something else is said
        for name, value in SMALL.items():
            if getattr(options, name) == getattr(Effort, name):
                setattr(options, name, value)
    record(options, EXPECTED, run(options))


if __name__ == "__main__":
    main()
