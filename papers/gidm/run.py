"""GIDM: what a server sees in one gradient of a federated diffusion model, by step, round and what it is granted.

Rows by the first word of their names: `train` (denoisers, kept in --work), `known` (noise and step are granted),
`steps` (steps read off the time MLP), `unknown` (noise is not granted, the step is read), `batch` (the same of several
images), `defended` (nor is the gradient what it was), `modes` (the paper's knowledge modes), `figure` (images on the
way), `budget` (what an iteration costs) and `cost` (GIDM on 32 lanes; 128 x 128). Rows are written one by one. The
paper: see README.md.
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
from gidm.attacks import KNOWN, MODES, UNKNOWN, Bench, Method, drawn
from gidm.clients import GRADIENT, STEPS, VICTIMS, Effort, Setting
from record import lpips_note, reproduce

import gradleak as gl
from gradleak.core import registry
from gradleak.parts.row_space import spanning_layers
from gradleak.scenario.task import Batch

EXPECTED = Path(__file__).with_name("expected.json")
CIFAR, FACES, FACES64, ROOMS64 = Setting(), Setting("celeba64", 32), Setting("celeba64", 64), Setting("houses64", 64)
ROOMS = Setting("houses64", 32)
VELOCITY = Setting(target="v")
DEEPER = (Setting("celeba64", 64, levels=4), Setting("houses64", 64, levels=4))
SETTINGS = (CIFAR, FACES, ROOMS, FACES64, ROOMS64)
SMALL = {"images": 2, "rounds": 2, "generative": 4, "fine": 20, "sampler": 3, "restarts": 1, "lpips": 0}
SMALL |= {"rate": 0.05, "decay": 0}


class Row(Protocol):
    """One thing that is measured."""

    def measure(self, effort: Effort) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Training:
    """A federated denoiser, trained and kept; rows that need it find it, with its sheet of samples over rounds."""

    setting: Setting

    def measure(self, effort: Effort) -> dict[str, Any]:
        done = self.setting.trained(effort)
        tested = [row for row in done.metrics if "test_loss" in row]
        federation = self.setting.federation(effort)
        return {
            **self.setting.described(effort),
            "federation": {**federation.settings(), "training": repr(federation.training)},
            "rounds": done.metrics[-1]["round"],
            "round": [row["round"] for row in tested],
            "test_loss": [row["test_loss"] for row in tested],
            "averaged_test_loss": [row.get("averaged_test_loss") for row in tested],
            "final_test_loss": tested[-1]["test_loss"],
            "seconds_of_training": sum(row["seconds"] for row in done.metrics),
            "samples": str(done.folder / "samples.png") if done.folder else "",
        }


@dataclass(frozen=True)
class Inversion:
    """Several methods on single-image gradients at one step, of one victim."""

    setting: Setting
    victim: str
    t: int  # of 1,000
    methods: Mapping[str, Method]
    controlled: bool = False  # beside images of the prior, which say nothing about the target

    def measure(self, effort: Effort) -> dict[str, Any]:
        t = effort.at(self.t)
        bench = Bench(self.setting, self.victim, effort, self.setting.truth(effort, [t]))
        bench.run(self.methods)
        if self.controlled:
            bench.controls()
        title = (
            f"{'unknown' if self.controlled else 'known'} {self.setting} {self.victim} t {self.t} seed {effort.seed}"
        )
        return {
            **self.setting.described(effort, self.victim),
            "t": t,
            "alpha_bar": float(effort.schedule.alpha_bar[t]),
            "t_of_thousand": self.t,
            "targets": len(bench.truth["x"]),
            "lpips": lpips_note(effort, *bench.truth["x"].shape[-2:]),
            "cells": bench.cells,
            "best": bench.best,
            "phases": bench.phases(),
            "above_prior": bench.above("prior only"),
            "picture": bench.draw(title),
        }


def defences(layer: str) -> tuple[str, ...]:
    """None; clipping; `layer` withheld, the first that tells the span of its inputs; noise; pruning."""
    return (
        "",
        "clipping:norm=0.01",
        f"withholding:layer={layer}",
        *(f"local-gaussian:clip=0.01,noise_multiplier={share}" for share in (1e-7, 1e-6, 1e-5, 1e-4)),
        *(f"pruning:keep={keep}" for keep in (0.9, 0.5, 0.1)),
    )


@dataclass(frozen=True)
class Defended:
    """`span-dm` on what a defence leaves of a gradient, by an attacker who knows the defence."""

    setting: Setting
    victim: str
    t: int  # of 1,000

    def measure(self, effort: Effort) -> dict[str, Any]:
        t, task = effort.at(self.t), self.setting.task(effort)
        truth, told = self.setting.truth(effort, [t]), {**self.setting.described(effort, self.victim), "t": t}
        if not (layers := spanning_layers(task, 1)):
            return {**told, "skipped": "no layer of this network tells the span of its inputs"}
        method, cells = {"span-dm": UNKNOWN["span-dm"]}, {}
        for spelled in defences(layers[0].name):
            defence = registry.parse("defence", spelled) if spelled else None
            bench = Bench(self.setting, self.victim, replace(effort, methods=""), truth, defence=defence)
            bench.run(method)
            cells[spelled or "none"] = bench.cells["span-dm"]
        bench.control("mid-grey", torch.zeros_like(truth["x"]))
        return {**told, "targets": len(truth["x"]), "cells": {**cells, "mid-grey": bench.cells["mid-grey"]}}


@dataclass(frozen=True)
class Batched:
    """`span-dm` on gradients of several images, each at a step of its own."""

    setting: Setting
    victim: str
    examples: int

    def measure(self, effort: Effort) -> dict[str, Any]:
        steps = [effort.at(t) for t in STEPS[1 : 1 + self.examples]]
        truth = self.setting.truth(effort, steps, self.examples)
        bench = Bench(self.setting, self.victim, replace(effort, methods=""), truth)
        bench.run({"span-dm": UNKNOWN["span-dm"]})
        bench.control("mid-grey", torch.zeros_like(truth["x"]))
        return {
            **self.setting.described(effort, self.victim),
            "t": steps,
            "targets": len(truth["x"]),
            "examples": self.examples,
            "cells": bench.cells,
        }


@dataclass(frozen=True)
class Modes:
    """The paper's knowledge modes, at steps in turn."""

    setting: Setting
    victim: str
    steps: Sequence[int] = (10, 200, 500)

    def measure(self, effort: Effort) -> dict[str, Any]:
        steps = [effort.at(t) for t in self.steps]
        bench = Bench(self.setting, self.victim, effort, self.setting.truth(effort, steps))
        bench.run(MODES)
        bench.controls()
        return {
            **self.setting.described(effort, self.victim),
            "t": steps,
            "targets": len(bench.truth["x"]),
            "cells": bench.cells,
            "above_prior": bench.above("prior only"),
            "picture": bench.draw(f"modes {self.setting} {self.victim} seed {effort.seed}"),
            "paper": references()["modes"],
        }


@dataclass(frozen=True)
class Read:
    """Steps read off the gradient of the time MLP's first layer: one image over all steps, and three at once."""

    setting: Setting
    victim: str

    def measure(self, effort: Effort) -> dict[str, Any]:
        attack = gl.attacks.get("dlg-dm", steps=1, noise="unknown", t="analytic")
        last = effort.schedule.steps - 1
        told: dict[str, Any] = self.setting.described(effort, self.victim)
        for examples in (1, 3):
            count = effort.images * examples
            spread = [round(last * place / max(1, count - 1)) for place in range(count)]
            truth = self.setting.truth(effort, spread, examples)
            seen = self.setting.observed(effort, self.victim, truth)
            knows = gl.Knowledge(training=GRADIENT)
            found = attack.run(self.setting.task(effort), seen, knows, seed=effort.seed, engine=effort.engine)
            same = _as_sets(found.batch["t"], truth)
            told[f"batch {examples}"] = {"targets": len(truth["x"]), "right": same, **_first_of(found.batch, truth)}
        return told


def _as_sets(found: torch.Tensor, truth: Batch) -> float:
    """The share of targets whose steps are all right, in whatever order."""
    steps = found.argmax(-1) if found.is_floating_point() and found.dim() == 3 else found
    pairs = zip(steps.cpu().long(), truth["t"], strict=True)
    return sum(sorted(guess.tolist()) == sorted(real.tolist()) for guess, real in pairs) / len(truth["t"])


def _first_of(found: Batch, truth: Batch) -> dict[str, Any]:
    if truth["x"].shape[1] > 1:
        return {}
    return {"off_by": drawn(found, truth, torch.zeros(len(truth["x"]), 1, dtype=torch.long))["t"]["off_by"]}


@dataclass(frozen=True)
class Figure:
    """Images on the way: the same search stopped earlier. One sheet."""

    setting: Setting
    victim: str
    t: int
    shares: Sequence[float] = (0.05, 0.2, 0.5, 1.0)

    def measure(self, effort: Effort) -> dict[str, Any]:
        t = effort.at(self.t)
        few = replace(effort, images=min(8, effort.images), methods="")
        bench = Bench(self.setting, self.victim, few, self.setting.truth(few, [t]))
        bench.control("x_t", self.setting.noised(few, bench.truth))
        told: dict[str, Any] = {}
        for phase, name in (("gidm, phase 1", "generative"), ("gidm", "fine")):
            for share in self.shares:
                until = max(1, round(share * getattr(few, name)))
                part = replace(few, **{name: until})
                one = Bench(self.setting, self.victim, part, bench.truth)
                one.run({phase: KNOWN[phase]})
                label = f"{name} {until}"
                told[label] = one.cells[phase].get("psnr", one.cells[phase])
                if phase in one.pictures:
                    bench.pictures[label] = one.pictures[phase]
        title = f"figure {self.setting} {self.victim} t {self.t} seed {effort.seed}"
        return {**self.setting.described(effort, self.victim), "t": t, "psnr": told, "picture": bench.draw(title)}


@dataclass(frozen=True)
class Budget:
    """Seconds of one forward pass of all targets, and of an iteration of each attack in units of it."""

    setting: Setting

    def measure(self, effort: Effort) -> dict[str, Any]:
        truth = self.setting.truth(effort, [effort.at(200)])
        forward = self._forward(effort, truth)
        told: dict[str, Any] = {
            **self.setting.described(effort),
            "targets": len(truth["x"]),
            "seconds_of_a_forward_pass": forward,
            "counted": {"pixels": effort.per_pixel_step, "sampled": effort.per_sampled_step},
        }
        for label, count in (("dlg-dm", "steps"), ("gidm, phase 1", "generative")):
            short, long = (4, 12) if effort.small else (20, 60)
            spent = {}
            for steps in (short, long):
                part = replace(effort, methods="", pictures="", lpips=0, **{count: steps})
                bench = Bench(self.setting, "r0", part, truth, untrained=True)
                bench.run({label: KNOWN[label]})
                spent[steps] = bench.cells[label].get("seconds")
            if None in spent.values():
                told[label] = bench.cells[label]
                continue
            each = max(0.0, spent[long] - spent[short]) / (long - short)
            told[label] = {"seconds_of_an_iteration": each, "forward_equivalents": each / forward}
        return told

    def _forward(self, effort: Effort, truth: Batch) -> float:
        """The victim's network on all targets at once, as lanes would have it."""
        where, task = effort.engine.where, self.setting.task(effort)
        model = task.to(where, torch.float32).model
        x, t = truth["x"].flatten(0, 1).to(where), truth["t"].flatten().to(where)
        times = []
        with torch.no_grad():
            for _ in range(5):
                began = time.perf_counter()
                model(x, t)
                if where.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - began)
        return min(times)


@dataclass(frozen=True)
class Cost:
    """Time and memory of one method, over a stated number of iterations; nothing is trained for it.

    With fewer (`--generative`) the seconds are in proportion, set-up included, and `extrapolated_from` says from what.
    """

    setting: Setting
    method: str
    lanes: int
    generative: int = 500
    fine: int = 0
    steps: int = 0

    def measure(self, effort: Effort) -> dict[str, Any]:
        counts = {"generative": self.generative, "fine": self.fine, "steps": self.steps}
        run = self.generative if self.steps else min(self.generative, effort.generative)
        own = replace(effort, images=self.lanes, sampler=16, **{**counts, "generative": run})
        own = replace(effort if effort.small else own, methods="", pictures="", lpips=0)
        bench = Bench(self.setting, "r0", own, self.setting.truth(own, [own.at(200)]), untrained=True)
        bench.run({self.method: KNOWN[self.method]})
        cell = bench.cells[self.method]
        kept = {name: cell.get(name) for name in ("seconds", "memory_gib", "skipped", "psnr") if name in cell}
        if "seconds" in kept and run < self.generative:
            kept |= {"seconds": kept["seconds"] * self.generative / run, "extrapolated_from": run}
        return {**self.setting.described(own), "lanes": len(bench.truth["x"]), "iterations": counts, **kept}


# --- everything that is measured --------------------------------------------------------------------------------------


def rows() -> dict[str, Row]:
    """Everything by name, in the order in which it is worth having."""
    found: dict[str, Row] = {f"train {setting}": Training(setting) for setting in (*SETTINGS, VELOCITY, *DEEPER)}
    found |= {f"steps, {CIFAR}, {victim}": Read(CIFAR, victim) for victim in VICTIMS}
    for setting in (*SETTINGS, VELOCITY, *DEEPER):
        for victim in VICTIMS:
            for t in STEPS:
                found[f"known, {setting}, {victim}, t {t}"] = Inversion(setting, victim, t, KNOWN)
    for setting in (*SETTINGS, VELOCITY, *DEEPER):
        for victim in VICTIMS:
            for t in STEPS:
                found[f"unknown, {setting}, {victim}, t {t}"] = Inversion(setting, victim, t, UNKNOWN, True)
    for victim in VICTIMS:
        found |= {f"batch, {CIFAR}, {victim}, {count} images": Batched(CIFAR, victim, count) for count in (2, 3, 4)}
        found[f"defended, {CIFAR}, {victim}, t 50"] = Defended(CIFAR, victim, 50)
    found |= {f"modes, {setting}, trained": Modes(setting, "trained") for setting in SETTINGS}
    found |= {f"figure, {setting}, trained, t 200": Figure(setting, "trained", 200) for setting in SETTINGS}
    found |= {f"budget, {setting}": Budget(setting) for setting in (CIFAR, FACES64)}
    found["cost, gidm, 32 lanes"] = Cost(CIFAR, "gidm, phase 1", 32)
    # Upsampled from 64 x 64: nothing to be said about pictures, only about time and memory.
    found["cost, 128 x 128"] = Cost(Setting("celeba64", 128), "dlg-dm", 4, steps=100)
    return found


def references() -> dict[str, Any]:
    """What the paper says, to stand beside ours: it prints no table of numbers."""
    held: dict[str, Any] = json.loads(EXPECTED.read_text())["reference"]
    return held


def told_in_a_line(row: dict[str, Any]) -> str:
    """What a row found, for whoever waits."""
    parts = [
        f"{label} {cell['psnr']['mean']:.1f} dB" if "psnr" in cell else f"{label} skipped"
        for label, cell in row.get("cells", {}).items()
    ]
    if "final_test_loss" in row:
        parts.append(f"test loss {row['final_test_loss']:.4f} after {row['rounds']} rounds")
    parts += [f"{name} {held['right']:.0%} right" for name, held in row.items() if name.startswith("batch ")]
    if "lanes" in row:
        parts.append(row.get("skipped") or f"{row['seconds']:.1f} s, {row['memory_gib'] or float('nan'):.1f} GiB")
    return ", ".join(parts)


def main() -> None:
    reproduce(__doc__ or "", Effort, rows(), told_in_a_line, EXPECTED, SMALL)


if __name__ == "__main__":
    main()
