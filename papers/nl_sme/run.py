"""NL-SME: what a server sees in the updates of clients that trained for many steps, method by method.

Rows by the first word of their names: `table` and `coarse` (the grid of the paper; coarse replay is ours, and dearer),
`lanes` (ten clients in one run against ten runs), `ablation`, `frozen` (the control), `original` and `enhanced`
(pseudo-writers), `scale` (N), `architecture`, `dlfa`, `labels`, `real` (other client rules), `trajectory` (the theory,
measured) and `tune` (on a client that is in no table). Rows are written one by one. The paper: see README.md.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from nl_sme import trajectory
from nl_sme.attacks import METHODS, Bench, Method, absent, attacked, scored, spread, variant
from nl_sme.clients import RECIPES, Effort, Setting, apart
from record import reproduce

import gradleak as gl
from gradleak.core import registry
from gradleak.parts.fields import RuleDoesNotApply
from gradleak.parts.view import TargetView
from gradleak.scenario.observation import MissingKnowledge

EXPECTED = Path(__file__).with_name("expected.json")
CHEAP = ("fedleak", "ig-ms", "sme", "nl-sme")
MOST_UNROLLED = 100  # local steps that DLFA is asked to unroll
SIZES = (10, 20, 50, 100, 200)
GRID = ((20, 10), (50, 10), (20, 20), (50, 20))  # epochs, batch size
UNROLLED = ((10, 5), (1, 5), (5, 5), (10, 10), (10, 1))
CIFAR, LETTERS = Setting(), Setting("letters", "cnn-mnist")


class Row(Protocol):
    """One thing that is measured."""

    def measure(self, effort: Effort) -> dict[str, Any]: ...


def references() -> dict[str, Any]:
    """The paper's own numbers, to stand beside ours."""
    held: dict[str, Any] = json.loads(EXPECTED.read_text())["reference"]
    return held


def named(*labels: str) -> dict[str, Method]:
    return {label: METHODS[label] for label in labels}


@dataclass(frozen=True)
class Table:
    """Methods on all clients of a setting, and what the paper prints for it."""

    setting: Setting
    methods: Sequence[str] = CHEAP
    paper: str = ""  # the name of the setting among the references
    kind: str = "table"  # and of their table
    apart: bool = False  # on the one client that is in no table
    variants: Mapping[str, Method] | None = None

    def measure(self, effort: Effort) -> dict[str, Any]:
        effort = apart(effort) if self.apart else effort
        bench = Bench(self.setting, effort)
        bench.run(self.variants or named(*self.methods))
        printed = references()[self.kind].get(self.paper, {})
        for label, each in bench.measured.items():
            if label in printed:
                each["paper"] = printed[label]
                each["psnr_from_the_paper"] = abs(each["psnr"]["mean"] - printed[label]["psnr"])
        title = (
            f"{self.kind} {self.setting.data} {self.setting.model} E {self.setting.epochs} N {self.setting.examples} "
        )
        title += f"B {self.setting.batch_size} {self.setting.rule} {'-'.join(bench.cells)[:40]} seed {effort.seed}"
        return {
            **self.setting.described(effort),
            "cells": bench.cells,
            "paired": bench.paired(),
            "gap": bench.gap(),
            "paper": printed,
            "picture": bench.draw(title),
        }


@dataclass(frozen=True)
class Unrolled:
    """DLFA beside attacks that do not unroll; left out where the client makes too many steps."""

    setting: Setting

    def measure(self, effort: Effort) -> dict[str, Any]:
        steps = self.setting.steps(effort)
        labels = ("ig-ms", "sme", "dlfa", "coarse-replay")
        if steps > MOST_UNROLLED:
            found = Table(self.setting, tuple(label for label in labels if label != "dlfa")).measure(effort)
            found["cells"]["dlfa"] = {"skipped": f"{steps} local steps; at most {MOST_UNROLLED} are unrolled (cost)"}
            return found
        return Table(self.setting, labels).measure(effort)


@dataclass(frozen=True)
class Memory:
    """What one lane of DLFA holds on the GPU at its peak, over a few steps."""

    setting: Setting

    def measure(self, effort: Effort) -> dict[str, Any]:
        one = replace(effort, clients=1, steps=min(effort.steps, 25), methods="", pictures="")
        found = Table(self.setting, ("ig-ms", "dlfa", "coarse-replay")).measure(one)
        held = {label: each.get("memory_gib") for label, each in found["cells"].items()}
        return {**self.setting.described(one), "cells": found["cells"], "memory_gib": held}


@dataclass(frozen=True)
class Lanes:
    """All clients as lanes of one captured run, against one eager run after another; the same steps for both."""

    setting: Setting
    method: str = "sme"
    most: int = 1000  # steps, for both

    def measure(self, effort: Effort) -> dict[str, Any]:
        effort = replace(effort, steps=min(effort.steps, self.most))
        method, task, seen = METHODS[self.method], self.setting.task(effort), self.setting.observed(effort)
        if reason := absent(method):
            return {**self.setting.described(effort), "skipped": reason}
        attack, truth = method.attack(self.setting, effort), self.setting.truth(effort)
        lanes = effort.engine
        eager = replace(lanes, graph=False, batched=False, chunk=1)
        short = method.attack(self.setting, replace(effort, steps=8))
        every = [method.knowledge(self.setting, effort, y) for y in truth["y"]]
        together = method.knowledge(self.setting, effort, truth["y"])
        # What a first call costs, loading kernels and the like, is nobody's.
        short.run(task, seen, together, seed=effort.seed, engine=lanes)
        short.run(task, seen[:1], every[0], seed=effort.seed, engine=eager)
        one = attack.run(task, seen, together, seed=effort.seed, engine=lanes)
        began = time.perf_counter()
        alone = [
            attack.run(task, [each], knows, seed=effort.seed, engine=eager).batch["x"][0]
            for each, knows in zip(seen, every)
        ]
        seconds = time.perf_counter() - began
        held = gl.metrics.compare(one, truth).psnr.mean(1)
        apart = gl.metrics.compare(replace(one, batch={**one.batch, "x": torch.stack(alone)}), truth).psnr.mean(1)
        return {
            **self.setting.described(effort),
            "method": self.method,
            "steps": effort.steps,
            "engines": {"lanes": repr(lanes), "one by one": repr(eager)},
            "seconds_of_lanes": one.seconds,
            "seconds_one_by_one": seconds,
            "share": one.seconds / seconds,
            "psnr": {"lanes": spread(held), "one by one": spread(apart)},
        }


@dataclass(frozen=True)
class Labels:
    """How many labels each rule puts in the wrong place, and what that costs SME."""

    setting: Setting
    rules: tuple[str, ...] = ("path-bias", "path-bias:at=average", "path-rows", "lowest-sums", "bias-corrected", "auto")

    def measure(self, effort: Effort) -> dict[str, Any]:
        found: dict[str, Any] = {**self.setting.described(effort), "epochs_of": {}}
        for epochs in (20, 50):
            setting = replace(self.setting, epochs=epochs)
            found["epochs_of"][str(epochs)] = {rule: self.errors(rule, setting, effort) for rule in self.rules}
        given = scored(attacked(METHODS["sme"], self.setting, effort), self.setting.truth(effort))[0]
        read = replace(METHODS["sme"], settings=(("labels", "path-bias"),))
        guessed = scored(attacked(read, self.setting, effort, labels=False), self.setting.truth(effort))[0]
        kept = ("psnr", "ssim", "psnr_of_each", "ssim_of_each", "seconds")
        found["cells"] = {
            "sme": {name: given[name] for name in kept},
            "sme, labels by path-bias": {name: guessed[name] for name in kept},
        }
        return found

    def errors(self, rule: str, setting: Setting, effort: Effort) -> dict[str, Any]:
        """Labels in the wrong place, sum |found - true| / 2, client by client."""
        task, knows = setting.task(effort), gl.Knowledge(training=setting.recipe(effort))
        made, wrong = registry.parse("labels", rule), []
        for seen, y in zip(setting.observed(effort), setting.truth(effort)["y"]):
            try:
                counts = made.counts(TargetView.of(task, seen, knows)).cpu()
            except (RuleDoesNotApply, MissingKnowledge) as problem:
                return {"skipped": str(problem)}
            true = torch.bincount(y.cpu(), minlength=len(counts))
            wrong.append((counts - true).abs().sum().item() / 2)
        return {"of": setting.size(effort), "wrong": spread(torch.tensor(wrong)), "wrong_of_each": wrong}


@dataclass(frozen=True)
class Way:
    """The theory, measured: how straight the clients' paths are, and what one gradient near them says."""

    setting: Setting
    replays: tuple[int, ...] = (1, 2, 5, 10, 20)

    def measure(self, effort: Effort) -> dict[str, Any]:
        task, recipe, total = self.setting.task(effort), self.setting.recipe(effort), self.setting.steps(effort)
        epochs = recipe.epochs or 1
        # Whole epochs: within one, an update is of some of the examples more than of others.
        lengths = [total // epochs * count for count in sorted({max(2, epochs // part) for part in (10, 5, 2, 1)})]
        replays = tuple(count for count in self.replays if count <= total)
        every = []
        for number, batch in enumerate(self.setting.batches(effort)):
            key = self.setting.key(effort, number)
            path = trajectory.recorded(task, batch, recipe, key=key, seed=effort.seed)
            grown = trajectory.growth(path, lengths, training=recipe, replays=replays)
            every.append([each.record() for each in grown])
        return {
            **self.setting.described(effort),
            "lengths": lengths,
            "end": averaged([client[-1] for client in every]),
            "growth": [averaged([client[place] for client in every]) for place in range(len(lengths))],
            "order": {
                name: trajectory.order(lengths, [mean(every, place, name) for place in range(len(lengths))])
                for name in ("line", "bezier")
            },
            "clients_where": {
                name: sum(bool(client[-1][name]) for client in every)
                for name in ("line_bound_holds", "bezier_bound_holds")
            },
            "clients_of_the_end": [client[-1] for client in every],
        }


def mean(every: Sequence[Sequence[Mapping[str, Any]]], place: int, name: str) -> float:
    return sum(client[place][name]["rms"] for client in every) / len(every)


def averaged(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean over clients of every number that all of them have, by the same names."""
    found: dict[str, Any] = {}
    for name, first in records[0].items():
        values = [each[name] for each in records]
        if isinstance(first, Mapping):
            found[name] = averaged(values)
        elif isinstance(first, (int, float)) and not isinstance(first, bool) and None not in values:
            found[name] = sum(values) / len(values)
    return found


# --- everything that is measured --------------------------------------------------------------------------------------


def tuned(name: str, usual: Mapping[str, Any], **others: Sequence[Any]) -> dict[str, Method]:
    """The usual settings, and each of the others in turn."""
    found = {f"{name}, as it is": variant(name, **usual)}
    for setting, values in others.items():
        found |= {f"{name}, {setting} {value}": variant(name, **{**usual, setting: value}) for value in values}
    return found


def rows() -> dict[str, Row]:
    """Everything by name, in the order in which it is worth having."""
    found: dict[str, Row] = {}
    both = {"cifar100": CIFAR, "letters": LETTERS}
    ours = ("nl-sme", "coarse-replay")

    def at(setting: Setting, epochs: int, size: int) -> Setting:
        return replace(setting, epochs=epochs, batch_size=size)

    def grid(kind: str, methods: Sequence[str], places: Sequence[tuple[int, int]]) -> None:
        for data, setting in both.items():
            for epochs, size in places:
                name = f"{data}, E {epochs}, B {size}"
                found[f"{kind} {name}"] = Table(at(setting, epochs, size), methods, paper=name)

    grid("table", CHEAP, GRID[:1])
    grid("coarse", ours, GRID[:1])
    found["lanes cifar100, sme"] = Lanes(CIFAR)
    grid("table", CHEAP, GRID[1:])
    grid("coarse", ours, GRID[1:])
    for data, setting in both.items():
        found[f"ablation {data}"] = Table(
            setting, ("sme", "nl-sme-b", "nl-sme-a", "nl-sme", "nl-sme, element", "sme, 3 nodes"), data, "ablation"
        )
        stills = ("ig-ms", "sme", "nl-sme", "nl-sme, element")
        frozen = tuple(f"{name}, frozen" for name in stills)
        found[f"frozen noise {data}"] = Table(setting, ("sme", "nl-sme", "nl-sme, element", *frozen))
    for epochs, size in GRID[:2]:
        for data in ("original", "enhanced"):
            setting = Setting(data, "cnn-mnist", epochs, batch_size=size)
            methods = ("ig-ms", "sme", "nl-sme", "coarse-replay")
            found[f"{data}, E {epochs}, B {size}"] = Table(setting, methods, f"{data}, E {epochs}, B {size}")
    found["ablation enhanced, E 50"] = Table(
        Setting("enhanced", "cnn-mnist", 50), ("sme", "nl-sme-b", "nl-sme-a", "nl-sme"), "enhanced", "ablation"
    )
    for data, setting in both.items():
        for epochs, size in GRID[:2]:
            found[f"trajectory {data}, E {epochs}, B {size}"] = Way(at(setting, epochs, size))
    for count in SIZES:
        found[f"scale {count}"] = Table(replace(CIFAR, examples=count), ("ig-ms", "sme", "nl-sme", "coarse-replay"))
    for model in ("cnn-mnist", "mlp-sme", "resnet8", "vit-sme", "vit"):
        found[f"architecture {model}"] = Table(
            replace(LETTERS, model=model), ("ig-ms", "sme", "nl-sme", "coarse-replay")
        )
    for data, setting in both.items():
        found[f"labels {data}"] = Labels(setting)
    found["dlfa memory"] = Memory(at(LETTERS, 10, 5))
    for data, setting in both.items():
        for epochs, size in UNROLLED:
            found[f"dlfa {data}, E {epochs}, B {size}"] = Unrolled(at(setting, epochs, size))
    for rule in list(RECIPES)[1:]:
        methods = (
            "sme",
            "nl-sme",
            "coarse-replay, plain SGD assumed",
            "coarse-replay, recipe unknown",
            "coarse-replay",
        )
        found[f"real client, {rule}"] = Table(replace(CIFAR, rule=rule), methods)
    # Ten eager coarse replays of 1,000 steps would take a quarter of an hour, to say the same.
    for method, most in (("ig-ms", 1000), ("nl-sme", 1000), ("coarse-replay", 50)):
        found[f"lanes cifar100, {method}"] = Lanes(CIFAR, method, most)
    found["tune nl-sme"] = Table(
        CIFAR,
        apart=True,
        variants=tuned(
            "nl-sme", {}, control=(1e-3, 0.1), control_lr=(0.005, 0.08), scaling=(1e-3, 0.1), scaling_lr=(1e-2,)
        ),
    )
    found["tune coarse-replay"] = Table(
        CIFAR, apart=True, variants=tuned("coarse-replay", {}, tv=(0.003, 0.007, 0.01), coarse=(5, 10), path=((5,),))
    )
    return found


def told_in_a_line(row: dict[str, Any]) -> str:
    """What a row found, for whoever waits."""
    parts = []
    for label, each in row.get("cells", {}).items():
        if "skipped" in each:
            parts.append(f"{label} skipped: {each['skipped']}")
            continue
        raw = each.get("l_sim_raw")
        parts.append(f"{label} {each['psnr']['mean']:.2f} dB / {each['ssim']['mean']:.3f}")
        parts[-1] += "" if raw is None else f" / L_sim {raw['mean']:.4f}"
    if "share" in row:
        parts.append(f"lanes {row['seconds_of_lanes']:.1f} s, one by one {row['seconds_one_by_one']:.1f} s")
    if "end" in row:
        end = row["end"]
        parts.append(f"line {end['line']['rms']:.4f}, Bezier {end['bezier']['rms']:.4f} of the update")
        parts.append(f"mismatch {end['mismatch']['start']:.4f} at w0, {end['mismatch']['line']:.4f} on the line")
    for epochs, rules in row.get("epochs_of", {}).items():
        wrong = {rule: each["wrong"]["mean"] for rule, each in rules.items() if "wrong" in each}
        parts.append(f"E {epochs}: " + " ".join(f"{rule} {count:.1f}" for rule, count in wrong.items()))
    return "; ".join(parts)


def main() -> None:
    reproduce(__doc__ or "", Effort, rows(), told_in_a_line, EXPECTED)


if __name__ == "__main__":
    main()
