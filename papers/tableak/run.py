"""TabLeak on Adult and on breast cancer: rows, categories and numbers recovered from the updates of a small perceptron.

The attacker knows the encoding of the table: categories, and mean, standard deviation, least and largest value of every
column, all of the whole data. Some rows also give it the labels. Private rows are of the test part, which no network
was trained on. Intervals are over batches.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import arguments, record, row_by_row

import gradleak as gl
from gradleak.audit.intervals import rate
from gradleak.core.assignment import match
from gradleak.scenario.task import Supervised

if TYPE_CHECKING:
    from gradleak.data import Records

TRAINED = {"adult": 3000, "breast-cancer": 300}  # steps of SGD with momentum, 64 rows each
ONE_STEP, LOCAL = gl.LocalTraining(lr=0.1), gl.LocalTraining(lr=0.1, steps=3)
Attacks = Mapping[str, Mapping[str, Any]]  # by name in the table: "attack", and its settings
SHORT: Attacks = {"tableak": {"attack": "tableak", "restarts": 8, "steps": 400, "exact": False}}
PAPER: Attacks = {
    "tableak": {"attack": "tableak", "exact": False},
    "tableak, pooled": {"attack": "tableak", "answer": "pooled", "exact": False},
}
SPEAR: Attacks = {"spear": {"attack": "sparse-span", "waves": 2}}  # its name when the figures were stored
AFTER: Attacks = {"spear, then tableak": {"attack": "tableak", "restarts": 4, "steps": 250, "waves": 2}}
GENERIC: Attacks = {"analytic": {"attack": "analytic"}, "idlg": {"attack": "idlg", "steps": 500, "restarts": 2}}


@dataclass(frozen=True)
class Row:
    """One client, one network, how many batches of it are attacked, and by what."""

    data: str = "adult"
    width: int = 100  # of both hidden layers
    examples: int = 8
    trained: bool = False
    training: gl.LocalTraining = ONE_STEP
    labels: bool = True  # are they known?
    batches: int = 10
    attacks: Attacks = field(default_factory=lambda: SHORT)

    @property
    def name(self) -> str:
        trained = "trained" if self.trained else "untrained"
        steps = "one step" if self.training is ONE_STEP else "FedAvg"
        labels = "labels known" if self.labels else "labels read off"
        return f"{self.data} {self.width}, {self.examples} rows, {trained}, {steps}, {labels}"


def rows() -> dict[str, Row]:
    """Everything that is measured, by name."""
    found = [
        Row(data, examples=examples, trained=trained, attacks={**SHORT, **_beside(data, examples)})
        for data, examples, trained in product(TRAINED, (1, 8, 32), (False, True))
    ]
    local = [replace(row, training=LOCAL, attacks={**_few(4, 250), **_after(row)}) for row in found]
    found += [replace(row, labels=False, attacks=SHORT) for row in found if row.examples > 1]  # of one row it is exact
    found += local
    wide = Row(width=512, batches=5, attacks={**_few(4, 300), **SPEAR, **AFTER})
    found += [replace(wide, examples=examples) for examples in (1, 8, 32)]
    found += [replace(wide, trained=True), replace(wide, data="breast-cancer")]
    named = {row.name: row for row in found}
    named["paper's settings"] = Row(attacks=PAPER)
    return named


def _few(restarts: int, steps: int) -> Attacks:
    return {"tableak": {"attack": "tableak", "restarts": restarts, "steps": steps, "exact": False}}


def _after(row: Row) -> Attacks:
    return {name: settings for name, settings in row.attacks.items() if name in {**SPEAR, **AFTER}}


def _beside(data: str, examples: int) -> Attacks:
    """The generic attacks for one row, and the exact search where a row has as many entries as there are rows."""
    exact = {} if (data, examples) == ("breast-cancer", 32) else {**SPEAR, **AFTER}
    return {**exact, **(GENERIC if examples == 1 else {})}


@cache
def part(data: str, split: str) -> Records:
    """Rows of a part; those with a missing value are left out."""
    found: Records = gl.data.load(data, split=split, missing="drop", bounds=True)
    return found


@cache
def network(data: str, width: int, trained: bool, seed: int) -> tuple[nn.Module, float]:
    """A perceptron, trained on the training part or not at all, and its accuracy on the test part."""
    train, test = part(data, "train"), part(data, "test")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hidden = (nn.Linear(train.kind.width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        model = nn.Sequential(*hidden, nn.Linear(width, 2))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(TRAINED[data] if trained else 0):
        chosen = torch.randint(len(train), (64,), generator=draw)
        optimiser.zero_grad()
        F.cross_entropy(model(train.x[chosen]), train.y[chosen]).backward()
        optimiser.step()
    with torch.no_grad():
        return model, (model(test.x).argmax(1) == test.y).double().mean().item()


def scores(records: Records, found: Tensor, truth: Tensor) -> dict[str, Any]:
    """Shares with their intervals over batches, of rows (batches, rows, width)."""
    kind, field = records.kind, records.field
    batches = []
    for one, true in zip(found, truth, strict=True):
        one, true = kind.comparable(one, field), kind.comparable(true, field)
        batches.append(kind.scores(one[match(kind.distance(true, one))], true))
    shares = {name: [each[name].tolist() for each in batches] for name in ("right", "categorical", "numeric")}
    shares["exact_rows"] = [(each["right"] == 1).double().tolist() for each in batches]
    sound = {name: values for name, values in shares.items() if values[0][0] == values[0][0]}  # a table has both sorts
    figures: dict[str, Any] = {name: rate(values).record() for name, values in sound.items()}
    return {**figures, "rmse": torch.cat([each["rmse"] for each in batches]).mean().item()}


def measure(row: Row, options: Any) -> dict[str, Any]:
    """Every attack of a row, and what the marginals alone and other real rows would give."""
    test, train = part(row.data, "test"), part(row.data, "train")
    model, accuracy = network(row.data, row.width, row.trained, options.network)
    task = gl.Task(model, Supervised(F.cross_entropy), {"x": test.field, "y": gl.Field((), classes=2)})
    count = min(row.batches, options.batches)
    draw = torch.Generator().manual_seed(options.seed)
    chosen = [torch.randperm(len(test), generator=draw)[: row.examples] for _ in range(count)]
    seen = [gl.observe(task, test.batch(one), row.training, key=f"batch {i}") for i, one in enumerate(chosen)]
    x, y = (torch.stack([value[one] for one in chosen]) for value in (test.x, test.y))
    knows = gl.Knowledge(training=row.training, given={"y": y} if row.labels else {})
    cells: dict[str, Any] = {}
    for name, settings in row.attacks.items():
        if not re.search(options.attacks, name):
            continue
        given = {key: value for key, value in settings.items() if key != "attack"}
        if options.steps and "steps" in given:
            given["steps"] = options.steps
        result = gl.attacks.get(settings["attack"], **given).run(task, seen, knows, seed=options.seed)
        cells[name] = {**scores(test, result.batch["x"], x), "seconds": result.seconds}
        if "certain" in result.settings:
            cells[name]["certain"] = sum(result.settings["certain"]) / (count * row.examples)
        if not row.labels:
            counts = [(one.bincount(minlength=2) == true.bincount(minlength=2)).all() for one, true in zip(
                result.batch["y"], y, strict=True
            )]  # fmt: skip
            cells[name]["label_counts"] = rate([[float(one)] for one in counts]).record()
    others = torch.randint(len(train), (count, row.examples), generator=draw)
    kind, reference = train.kind, train.kind.comparable(train.x, train.field)
    guess = kind.guesses(x[0].double(), reference)["marginal modes"]
    guesses = {"marginal modes": guess.expand(count, -1, -1), "other rows": train.x[others]}
    cells |= {name: scores(test, rows, x) for name, rows in guesses.items() if re.search(options.attacks, name)}
    return {"targets": count, "test_accuracy": accuracy, "cells": cells}


def told(figures: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} {cell['right']['value']:.0%} of columns, {cell['exact_rows']['value']:.0%} of rows"
        for name, cell in figures["cells"].items()
    )


def main() -> None:
    options = arguments(__doc__, only="", attacks="", budget=3600, batches=10, steps=0, network=0, seed=0)
    figures = row_by_row(options, rows(), lambda row: measure(row, options), told)
    record(options, Path(__file__).with_name("expected.json"), figures)


if __name__ == "__main__":
    main()
