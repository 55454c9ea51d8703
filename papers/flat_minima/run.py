"""Flat minima: do FedSAM and its kin hide the data, or only the point at which their gradients are taken?

Rows by the first word of their names: `train` (federations, kept in --work), `table` and `exact` (methods x attacks x
modes at a round; first-order attacks, and the second-order one), `curve` and `long` (over rounds, with log-dets), `rho`
and `batch` (sweeps), `init`, `eta` and `rate` (what the paper leaves open), `information`. Rows are written one by one.

The three modes of observation, (a), (b) and (c): see attacks.py. The paper: see README.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))
from flat_minima.attacks import Bench, adaptive, flatness, orders, radius, told
from flat_minima.curves import associated, curved, gradient_norm, informed
from flat_minima.training import (
    ATTACKED,
    HIGH_RATE,
    LONG,
    METHODS,
    RATE,
    SHORT,
    TEN,
    Course,
    Effort,
    private,
    targets,
)
from record import lpips_note, reproduce

EXPECTED = Path(__file__).with_name("expected.json")
RHOS = (0.0, 0.05, 0.1, 0.15, 0.2)


class Row(Protocol):
    """One thing that is measured."""

    def measure(self, effort: Effort) -> dict[str, Any]: ...


def setting(effort: Effort) -> dict[str, Any]:
    """What every row depends on."""
    return {
        "data": private(effort).source,
        "training_images": len(private(effort)),
        "init": effort.init,
        "seed": effort.seed,
        "lpips": lpips_note(effort, *private(effort).x.shape[-2:]),
    }


@dataclass(frozen=True)
class Training:
    """A federation, trained and kept; rows that need it find it."""

    course: Course
    until: int = SHORT

    def measure(self, effort: Effort) -> dict[str, Any]:
        metrics = self.course.trained(effort, effort.at(self.until)).metrics
        tested = [row for row in metrics if row.get("test_accuracy") is not None]
        return {
            **setting(effort),
            **self.course.described(effort, metrics[-1]["round"]),
            "federation": {
                **self.course.federation(effort).settings(),
                "training": repr(self.course.federation(effort).training),
            },
            "rounds": metrics[-1]["round"],
            "round": [row["round"] for row in tested],
            "accuracy": [row["test_accuracy"] for row in tested],
            "final_accuracy": tested[-1]["test_accuracy"],
            "seconds_of_training": sum(row["seconds"] for row in metrics),
        }


@dataclass(frozen=True)
class Table:
    """Methods x attacks x modes at one round of the paper."""

    number: int = 0
    names: Sequence[str] = METHODS
    attacks: Sequence[str] = ()  # those of the effort, unless given
    rate: float = RATE
    init: str = ""  # the effort's, unless given
    eta: float | None = None  # likewise
    examples: int = 1  # of a target
    exact: bool = False

    def measure(self, effort: Effort) -> dict[str, Any]:
        effort = replace(effort, init=self.init or effort.init, eta=effort.eta if self.eta is None else self.eta)
        number, attacks = effort.at(self.number), self.attacks or effort.attacks.split(",")
        bench = Bench(effort, targets(effort, effort.exact if self.exact else effort.images, self.examples))
        wanted = effort.methods.split(",") if effort.methods else list(self.names)
        if unknown := sorted(set(wanted) - set(METHODS)):
            raise ValueError(f"--methods has {', '.join(unknown)}; the paper's are {', '.join(METHODS)}.")
        if not set(wanted) & set(self.names):
            raise ValueError(f"--methods has {', '.join(wanted)}; this table is of {', '.join(self.names)}.")
        courses = {name: Course(name, self.rate) for name in self.names if name in ("FedAvg", *wanted)}
        found = bench.cells([(course, number) for course in courses.values()], attacks)
        cells = dict(zip(courses, found, strict=True))
        title = f"round {self.number} rate {self.rate:g} {effort.init} eta {effort.eta:g} batch {self.examples} "
        title += f"seed {effort.seed}"
        return {
            **setting(effort),
            "round": number,
            "round_of_the_paper": self.number,
            "targets": len(bench.truth["y"]),
            "examples_of_a_target": self.examples,
            "attacks": {name: told(name, effort) for name in attacks},
            "methods": {
                name: {
                    **course.described(effort, number),
                    "radius": radius(course, effort, number, bench.truth),
                }
                for name, course in courses.items()
            },
            "cells": cells,
            "order": orders(cells),
            "adaptive": adaptive(cells),
            "flatness": flatness(cells),
            "pictures": bench.draw(title),
            "paper": references()["table"],
        }


@dataclass(frozen=True)
class Curve:
    """One training over rounds: attacks on the paper's number of targets, and the curvature beside them."""

    course: Course
    numbers: Sequence[int]  # rounds of the paper

    def measure(self, effort: Effort) -> dict[str, Any]:
        numbers = sorted({effort.at(number) for number in self.numbers})
        truth, attacks = targets(effort, min(TEN, effort.images)), effort.along.split(",")
        self.course.trained(effort, numbers[-1])  # in one go
        cells = Bench(effort, truth).cells([(self.course, number) for number in numbers], attacks)
        points = []
        for number, found in zip(numbers, cells, strict=True):
            points.append(
                {
                    "round": number,
                    **self.course.described(effort, number),
                    "cells": found,
                    "curvature": curved(self.course, effort, number),
                    "gradient_norm": gradient_norm(self.course, effort, number, truth),
                }
            )
        return {
            **setting(effort),
            "course": repr(self.course),
            "targets": len(truth["y"]),
            "attacks": {name: told(name, effort) for name in attacks},
            "points": points,
            "associations": {
                name: {mode: associated([points], name, mode) for mode in points[0]["cells"][name]} for name in attacks
            },
        }


@dataclass(frozen=True)
class Information:
    """The paper's index and what can be said instead, for every method at one round."""

    number: int
    names: Sequence[str] = METHODS

    def measure(self, effort: Effort) -> dict[str, Any]:
        number = effort.at(self.number)
        held = {name: informed(Course(name), effort, number) for name in self.names}
        return {**setting(effort), "round": number, "round_of_the_paper": self.number, "methods": held}


# --- everything that is measured --------------------------------------------------------------------------------------


def rows() -> dict[str, Row]:
    """Everything by name, in the order in which it is worth having."""
    found: dict[str, Row] = {f"train {name}": Training(Course(name)) for name in METHODS}
    found |= {f"table, round {number}": Table(number) for number in ATTACKED}
    found |= {f"exact, round {number}": Table(number, attacks=("second-order",), exact=True) for number in ATTACKED}
    tens, hundreds = range(0, SHORT + 1, 10), range(0, LONG + 1, 100)
    found |= {f"curve {name}": Curve(Course(name), tens) for name in METHODS}
    found["train FedAvg, long"] = Training(Course("FedAvg"), LONG)
    found["long FedAvg"] = Curve(Course("FedAvg"), hundreds)
    for rho in RHOS:
        course = Course(f"rho {rho:g}", rho=rho)
        found |= {f"train rho {rho:g}": Training(course), f"rho {rho:g}": Curve(course, ATTACKED)}
    found |= {f"batch {size}": Table(names=("FedAvg", "FedSAM"), examples=size) for size in (1, 2, 4)}
    three = ("FedAvg", "FedSAM", "FedASAM")
    found |= {f"init {init}": Table(names=three, init=init) for init in ("uniform05", "torch")}
    found["eta 0.9"] = Table(names=three, eta=0.9)
    found |= {f"train {name}, rate 0.9": Training(Course(name, HIGH_RATE)) for name in METHODS}
    found |= {f"rate 0.9, round {number}": Table(number, rate=HIGH_RATE) for number in ATTACKED}
    found |= {f"information, round {number}": Information(number) for number in ATTACKED}
    return found


def references() -> dict[str, Any]:
    """The paper's own numbers, to stand beside ours."""
    held: dict[str, Any] = json.loads(EXPECTED.read_text())["reference"]
    return held


def told_in_a_line(row: dict[str, Any]) -> str:
    """What a row found, for whoever waits."""
    held = {"": row} if "cells" in row else {f"{point['round']} ": point for point in row.get("points", [])}
    parts = []
    for begin, each in held.items():
        by_method = each["cells"] if begin == "" else {begin + "round": each["cells"]}
        for method, attacks in by_method.items():
            for name, by_mode in attacks.items():
                levels = " ".join(f"({mode}) {cell['psnr']['mean']:.2f}" for mode, cell in by_mode.items())
                parts.append(f"{method} {name} {levels}")
    if "final_accuracy" in row:
        parts.append(f"accuracy {row['final_accuracy']:.3f} after {row['rounds']} rounds")
    if "methods" in row and "cells" not in row:
        parts += [f"{name} excess {each['curvature']['excess']:.0f}" for name, each in row["methods"].items()]
    return "; ".join(parts)


def main() -> None:
    reproduce(__doc__ or "", Effort, rows(), told_in_a_line, EXPECTED)


if __name__ == "__main__":
    main()
