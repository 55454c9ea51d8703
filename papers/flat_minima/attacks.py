"""What the server does with what it sees: three modes of observation, the attacks, scores and image grids.

A single client with B images takes one step at the global model of a round, and its gradient is what the server sees:
learning rate and weight decay, which the server knows, are taken off. Modes:

(a)   the client's gradient at the weights of the round: what is left of a method once its step is taken away is the
      weights that it led to, flatness included
(b)   the client's step is the method's, and the attacker takes it for a plain gradient (A0)
(c)   the client's step is the method's, and the attacker predicts that step (A2)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flat_minima.training import TEN, Course, Effort, task_of
from record import lpips_of, prior_of, summary
from torch import Tensor

import gradleak as gl
from gradleak.core.configuration import digest
from gradleak.core.pictures import png, sheet
from gradleak.curvature.association import paired_difference
from gradleak.defences import FedSAM
from gradleak.federation import Remembered
from gradleak.scenario.task import Batch

GRADIENT = gl.LocalTraining(lr=1.0)
SHOWN = 8  # images in a row of a grid
EXACT = 60.0  # dB, above which no eye and no 8-bit file tells the difference


@dataclass(frozen=True)
class Mode:
    defended: bool  # is the client's step the method's?
    known: bool  # does the attacker predict that step?


MODES = {"a": Mode(False, False), "b": Mode(True, False), "c": Mode(True, True)}


def modes(course: Course, effort: Effort) -> dict[str, Mode]:
    """FedAvg's step is a plain gradient: its modes do not differ."""
    return {"a": MODES["a"]} if course.defence(effort) is None else MODES


# --- attacks ----------------------------------------------------------------------------------------------------------


def _second_order(effort: Effort) -> Any:
    return gl.attacks.get("second-order", certify=False)


def _idlg(effort: Effort) -> Any:
    return gl.attacks.get("idlg", steps=5 * effort.steps // 4)


def _gias(effort: Effort) -> Any:
    """A ninth of the steps on the latent, as in its 1,000 + 8,000."""
    return gl.attacks.get("gias", steps=effort.steps // 9, weight_steps=effort.steps - effort.steps // 9)


def _gifd(effort: Effort) -> Any:
    blocks = prior_of(effort.generator)[0].blocks
    return gl.attacks.get("gifd", steps=effort.steps // (blocks + 1), features=blocks)


def _prior_only(effort: Effort) -> Any:
    return gl.attacks.get("prior-only")


SPECIAL: dict[str, Callable[[Effort], Any]] = {
    "idlg": _idlg,
    "second-order": _second_order,
    "gias": _gias,
    "gifd": _gifd,
    "prior-only": _prior_only,
}


def attack(name: str, effort: Effort) -> Any:
    """By its registered name. Everything but the numbers of steps and restarts is the attack's own default."""
    usual = SPECIAL[name](effort) if name in SPECIAL else gl.attacks.get(name, steps=effort.steps)
    return replace(usual, restarts=effort.restarts) if effort.restarts else usual


def told(name: str, effort: Effort) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(attack(name, effort)))


# --- one cell ---------------------------------------------------------------------------------------------------------


def observed(course: Course, effort: Effort, number: int, truth: Batch, mode: Mode) -> list[gl.Observation]:
    """What the server sees of each target at a round."""
    sent, task = course.sent(effort, number), task_of(effort)
    releasing = replace(course.federation(effort), training=GRADIENT)
    defence = course.defence(effort) if mode.defended else None
    return [
        releasing.observe(
            task,
            {name: value[row] for name, value in truth.items()},
            sent.weights,
            defence,
            key=f"target {row}",
            round=number,
            seed=effort.seed,
            remembered=Remembered(server=dict(sent.server) or None),
        )
        for row in range(len(truth["y"]))
    ]


def knowledge(course: Course, effort: Effort, mode: Mode) -> gl.Knowledge:
    generator = prior_of(effort.generator)[0] if effort.generator else None
    return gl.Knowledge(training=GRADIENT, defence=course.defence(effort) if mode.known else None, generator=generator)


def radius(course: Course, effort: Effort, number: int, truth: Batch) -> float:
    """How far from the weights the targets' gradients are taken, in the mean: for FedASAM that is not its rho."""
    defence, sent, task = course.defence(effort), course.sent(effort, number), task_of(effort)
    if not isinstance(defence, FedSAM):
        return 0.0
    rows = ({name: value[row] for name, value in truth.items()} for row in range(len(truth["y"])))
    return sum(float(defence.radius(task, batch, sent.weights)) for batch in rows) / len(truth["y"])


@dataclass(frozen=True, eq=False)
class Bench:
    """Attacks on one set of targets; what would be the very same attack on the same updates is run once."""

    effort: Effort
    truth: Batch
    done: dict[str, tuple[dict[str, Any], Tensor]] = field(default_factory=dict)
    shown: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # attack -> what of -> images

    def cells(self, places: Sequence[tuple[Course, int]], attacks: Sequence[str]) -> list[dict[str, dict[str, Any]]]:
        """Of each course at a round: attack -> mode -> scores. What an attacker knows alike is attacked in one run."""
        found: list[dict[str, dict[str, Any]]] = [{name: {} for name in attacks} for _ in places]
        asked: dict[str, list[tuple[int, str, Mode]]] = {}
        for place, (course, _) in enumerate(places):
            for letter, mode in modes(course, self.effort).items():
                known = repr(course.defence(self.effort)) if mode.known else ""
                asked.setdefault(known, []).append((place, letter, mode))
        for some in asked.values():
            seen = [observed(*self._at(places[place]), self.truth, mode) for place, _, mode in some]
            knows = knowledge(places[some[0][0]][0], self.effort, some[0][2])
            for name in attacks:
                for (place, letter, _), (scores, images) in zip(some, self.row(name, seen, knows), strict=True):
                    found[place][name][letter] = dict(scores)
                    self.shown.setdefault(name, {})[f"{places[place][0].name} ({letter})"] = images
        return found

    def _at(self, place: tuple[Course, int]) -> tuple[Course, Effort, int]:
        return place[0], self.effort, place[1]

    def row(
        self, name: str, seen: Sequence[Sequence[gl.Observation]], knows: gl.Knowledge
    ) -> list[tuple[dict[str, Any], Tensor]]:
        """Scores and images of an attack on the targets, as they were seen in several places."""
        marks = []
        for each in seen:
            extras = [own.extras for own in each] if knows.defence is not None else []
            updates = [own.update for own in each]
            marks.append(digest([name, repr(knows.defence), each[0].weights, updates, extras]))
        new = {mark: each for mark, each in zip(marks, seen, strict=True) if mark not in self.done}
        if new:
            self.done.update(zip(new, self._measured(name, new, knows), strict=True))
        return [self.done[mark] for mark in marks]

    def _measured(
        self, name: str, seen: Mapping[str, Sequence[gl.Observation]], knows: gl.Knowledge
    ) -> list[tuple[dict[str, Any], Tensor]]:
        effort, task, count = self.effort, task_of(self.effort), len(self.truth["y"])
        # Lanes of one run draw their starts by unequal names: a target's differ from place to place, whatever company.
        everything = [replace(own, key=f"{own.key}, {mark}") for mark, each in seen.items() for own in each]
        found = attack(name, effort).run(task, everything, knows, seed=effort.seed, engine=effort.engine)
        wanted = {field: value.repeat(len(seen), *[1] * (value.dim() - 1)) for field, value in self.truth.items()}
        scores = gl.metrics.compare(found, wanted, lpips=lpips_of(effort))
        values = {"psnr": scores.psnr, "ssim": scores.ssim, "mse_x100": 100 * scores.mse}
        values |= {} if scores.lpips is None else {"lpips": scores.lpips}
        images = task.fields["x"].unit(found.batch["x"]).clamp(0, 1).cpu()
        real = task.fields["x"].unit(self.truth["x"]).cpu()
        measured = []
        for own in (slice(place * count, (place + 1) * count) for place in range(len(seen))):
            each = {score: value[own] for score, value in values.items()}
            figures: dict[str, Any] = {score: summary(value) for score, value in each.items()}
            figures |= {
                "ten": {score: value[:TEN].mean().item() for score, value in each.items()},
                "psnr_of_each": each["psnr"].flatten().tolist(),
                "above_60": (each["psnr"] > EXACT).double().mean().item(),
                "label_accuracy": scores.labels["matched"][own].double().mean().item(),
                "diverged": scores.diverged[own].double().mean().item(),
                "match": summary(found.match[own].min(1).values.nan_to_num(torch.inf).clamp_max(1e30)),
                "seconds_of_the_run": found.seconds,
                "targets_of_the_run": len(everything),
            }
            if count > 1:  # what an update of another image gives, as a level of no knowledge
                other = gl.metrics.psnr(images[own].roll(1, 0).flatten(0, 1), real.flatten(0, 1))
                figures["psnr_of_another_image"] = other.mean().item()
            measured.append((figures, images[own][:SHOWN, 0]))
        return measured

    def draw(self, title: str) -> list[str]:
        """One grid per attack: the truth, then each method and mode. Returns the files' names."""
        if not self.effort.pictures:
            return []
        home = Path(self.effort.pictures)
        home.mkdir(parents=True, exist_ok=True)
        real = task_of(self.effort).fields["x"].unit(self.truth["x"][:SHOWN, 0]).cpu()
        written = []
        for name, rows in self.shown.items():
            path = home / f"{re.sub(r'[^a-z0-9.]+', '-', title.lower())}-{name}.png"
            path.write_bytes(
                png(sheet([("private", list(real)), *((label, list(row)) for label, row in rows.items())]))
            )
            written.append(path.name)
        return written


# --- what a table says ------------------------------------------------------------------------------------------------

Cells = Mapping[str, Mapping[str, Mapping[str, Any]]]  # method -> attack -> mode -> scores


def mean(cell: Mapping[str, Any]) -> float:
    return float(cell["psnr"]["mean"])


def orders(cells: Cells) -> dict[str, dict[str, float]]:
    """By how many dB the attacker without knowledge (A0) does better on one method than on the next."""
    found = {}
    for name in cells["FedAvg"]:
        ladder = {"FedAvg": mean(cells["FedAvg"][name]["a"])}
        ladder |= {method: mean(cells[method][name]["b"]) for method in ("FedSAM", "FedASAM") if method in cells}
        pairs = zip(list(ladder)[:-1], list(ladder)[1:])
        found[name] = {f"{upper} over {lower}": ladder[upper] - ladder[lower] for upper, lower in pairs}
    return found


def adaptive(cells: Cells) -> dict[str, Any]:
    """What knowing the step (A2) brings back, of the attack that does best on FedAvg; the others beside it.

    share_of_undefended    PSNR in mode (c) over that of FedAvg's clients at the same round
    share_of_plain         the same over the method's own mode (a): what its step hides, whatever its weights do
    share_above_another    the same of what lies above the PSNR of an unrelated update: decibels flatter a failure
    """
    plain = cells["FedAvg"]
    best = max(plain, key=lambda name: mean(plain[name]["a"]))
    found: dict[str, Any] = {"best_attack": best}
    for method, attacks in cells.items():
        if method == "FedAvg":
            continue
        shares = {}
        for name, by_mode in attacks.items():
            reference, none = mean(plain[name]["a"]), plain[name]["a"].get("psnr_of_another_image")
            gained = None if none is None or reference <= none else (mean(by_mode["c"]) - none) / (reference - none)
            shares[name] = {
                "share_of_undefended": mean(by_mode["c"]) / reference,
                "share_of_plain": mean(by_mode["c"]) / mean(by_mode["a"]),
                "share_above_another": gained,
                "naive_share": mean(by_mode["b"]) / reference,
                "gain_of_knowing": mean(by_mode["c"]) - mean(by_mode["b"]),
                "exact": by_mode["c"]["above_60"],
            }
        found[method] = {"best": shares[best], **shares}
    return found


def flatness(cells: Cells) -> dict[str, Any]:
    """Mode (a): by how much FedAvg's own weights leak more than the method's, target by target, in dB of PSNR."""
    found: dict[str, Any] = {}
    for method, attacks in cells.items():
        if method == "FedAvg":
            continue
        for name, by_mode in attacks.items():
            ours, theirs = (held["a"]["psnr_of_each"] for held in (cells["FedAvg"][name], by_mode))
            if len(ours) > 1:
                found.setdefault(method, {})[name] = paired_difference(ours, theirs).record()
    return found
