"""The papers' figures beside ours: read from `papers/*/expected.json` and `papers/*/results/*.json`, never typed in.

Two kinds of figures. `Printed`: a number that a paper prints, and where ours stands among the figures of its folder.
`Bound`: what was to hold of ours, set before the measurement. Of several stored results that have a figure one is
shown, and never by its outcome: one at full size before a `small` one, then the one with more targets, then the later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

NOT_MEASURED = "not measured yet"
FEW = 20  # fewer targets are called small, here as in every other table
COUNTS = ("images", "targets", "trials", "runs", "clients")  # what results call the number of their targets
Steps = tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """One stored measurement: `papers/NAME/results/FILE.json`."""

    file: str
    stored: Mapping[str, Any]

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.stored.get("settings") or {}

    @property
    def small(self) -> bool:
        """Cut short (thin networks, few steps): it shows that a row runs, and reproduces nothing."""
        return bool(self.settings.get("small"))

    @property
    def time(self) -> str:
        return str(self.stored["environment"].get("time") or "")

    @property
    def hardware(self) -> str:
        environment = self.stored["environment"]
        if gpus := environment.get("gpus"):
            return str(gpus[0]) if len(gpus) == 1 else f"{len(gpus)} x {gpus[0]}"
        threads = environment.get("threads")
        return f"CPU, {threads} thread{'' if threads == 1 else 's'}"

    def value(self, steps: Steps) -> float | None:
        """The figure at the end of these steps; None where this result does not have it."""
        held: Any = self.stored["figures"]
        for step in steps:
            held = held.get(step) if isinstance(held, Mapping) else None
        return float(held) if isinstance(held, (int, float)) else None

    def targets(self, steps: Steps) -> int | None:
        """How many targets a figure is over: the nearest count on the way to it, else that of the settings."""
        found, held = _count(self.settings), self.stored["figures"]
        for step in (*steps, ""):
            if not isinstance(held, Mapping):
                break
            found, held = _count(held) or found, held.get(step)
        return found

    def seed(self, steps: Steps) -> str:
        row = self.stored["figures"].get(steps[0])
        command = re.search(r"--seed (\d+)", str(self.stored["environment"].get("command")))
        places = (self.settings, row if isinstance(row, Mapping) else {}, {"seed": command[1]} if command else {})
        return str(next((held["seed"] for held in places if "seed" in held), "not recorded"))

    @property
    def row(self) -> tuple[str, ...]:
        """File, date, commit, hardware, and what is to be known of it."""
        commit = str((self.stored["environment"].get("git") or {}).get("commit") or "not recorded")[:7]
        return self.file, self.time[:10], commit, self.hardware, str(self.stored.get("about") or "")


def _count(held: Mapping[str, Any]) -> int | None:
    """The number of targets that a part of a result states, itself or in its summary of PSNRs."""
    places = (held, held["psnr"]) if isinstance(held.get("psnr"), Mapping) else (held,)
    return next((place[name] for place in places for name in COUNTS if isinstance(place.get(name), int)), None)


@dataclass(frozen=True)
class Printed:
    """A figure of a paper, and the steps to ours; none where nothing of ours would be that figure."""

    what: str
    value: float
    steps: Steps = ()


@dataclass(frozen=True)
class Bound:
    """What was to hold: at least, or at most, so much."""

    what: str
    steps: Steps
    at_least: float | None = None
    at_most: float | None = None

    def holds(self, value: float) -> bool:
        return value >= self.at_least if self.at_least is not None else value <= float(self.at_most or 0)

    def __str__(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"


@dataclass(frozen=True)
class Figure:
    """One line of the page: the wanted figure, ours, and what ours was measured on."""

    wanted: Printed | Bound
    result: Result | None

    @property
    def value(self) -> float | None:
        return None if self.result is None else self.result.value(self.wanted.steps)

    @property
    def theirs(self) -> str:
        return f"{self.wanted.value:.4g}" if isinstance(self.wanted, Printed) else str(self.wanted)

    @property
    def ours(self) -> str:
        return NOT_MEASURED if self.value is None else f"{self.value:.4g}"

    @property
    def outcome(self) -> str:
        """Of a bound: holds, fails, or nothing yet. A `small` run decides nothing."""
        if self.value is None or self.result is None or not isinstance(self.wanted, Bound):
            return ""
        return "not decided" if self.result.small else "holds" if self.wanted.holds(self.value) else "fails"

    @property
    def size(self) -> str:
        if self.result is None:
            return ""
        count = self.result.targets(self.wanted.steps)
        told = "not recorded" if count is None else f"{count}{' (small)' if count < FEW else ''}"
        return f"{told}, cut short: no reproduction" if self.result.small else told

    def cells(self) -> tuple[str, ...]:
        """What, theirs, ours, outcome, targets, seed, hardware, file."""
        if self.result is None:
            return self.wanted.what, self.theirs, self.ours, "", "", "", "", ""
        return (
            self.wanted.what,
            self.theirs,
            self.ours,
            self.outcome,
            self.size,
            self.result.seed(self.wanted.steps),
            self.result.hardware,
            self.result.file,
        )


HEAD = ("figure", "paper", "ours", "", "targets", "seed", "hardware", "result")


@dataclass(frozen=True)
class Claims:
    """All figures of one folder of `papers/`."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def expected(self) -> Mapping[str, Any]:
        held: Mapping[str, Any] = json.loads((self.folder / "expected.json").read_text(encoding="utf-8"))
        return held

    @cached_property
    def results(self) -> list[Result]:
        files = sorted((self.folder / "results").glob("*.json"))
        files = [file for file in files if not file.name.endswith(".part.json")]  # those of a run that goes on
        return [Result(file.name, json.loads(file.read_text(encoding="utf-8"))) for file in files]

    @property
    def printed(self) -> list[Figure]:
        """The paper's figures; empty where it prints none, or where they are nothing that we measure."""
        found = PRINTED.get(self.name)
        return [self._beside(each) for each in found(self.expected.get("reference", {}))] if found else []

    @property
    def bounds(self) -> list[Figure]:
        """What was to hold, in the order of expected.json."""
        return [
            self._beside(Bound(name, _steps(name), bound.get("at_least"), bound.get("at_most")))
            for name, bound in self.expected["figures"].items()
        ]

    def _beside(self, wanted: Printed | Bound) -> Figure:
        having = [held for held in self.results if wanted.steps and held.value(wanted.steps) is not None]
        order = lambda held: (not held.small, held.targets(wanted.steps) or 0, held.time)  # noqa: E731
        return Figure(wanted, max(having, key=order, default=None))

    def counts(self) -> str:
        """In one line: how much of it there is."""
        printed = self.printed
        at_hand = [each.result for each in printed if each.result is not None]
        short = sum(result.small for result in at_hand)
        shown = (
            f"{len(at_hand) - short} of {len(printed)} printed figures measured" if printed else "no printed figures"
        )
        shown += f", {short} cut short" if short else ""
        outcomes = [each.outcome or NOT_MEASURED for each in self.bounds]
        kinds = {"holds": "hold", "fails": "fail", "not decided": "not decided", NOT_MEASURED: NOT_MEASURED}
        named = [f"{outcomes.count(kind)} {word}" for kind, word in kinds.items() if kind in outcomes]
        return f"{shown}; of {len(outcomes)} bounds {', '.join(named)}"


def all_claims(papers: Path) -> list[Claims]:
    """Every folder of `papers/` that says what is expected of it, by name."""
    return [Claims(file.parent) for file in sorted(papers.glob("*/expected.json"))]


def _steps(name: str) -> Steps:
    """As papers/record.py reads names: slashes where there are any, since rows have dots in their names."""
    return tuple(name.split("/" if "/" in name else "."))


# --- where the papers' figures stand among ours -----------------------------------------------------------------------


def _idlg(reference: Mapping[str, Any]) -> Iterator[Printed]:
    what = "mean PSNR of Euclidean matching with L-BFGS on LeNet-Zhu (46.25 +- 12.66 in Geiping et al. 2020)"
    yield Printed(what, 46.25, ("psnr", "mean"))


def _ig(reference: Mapping[str, Any]) -> Iterator[Printed]:
    what = "final cosine cost (theirs: the authors' notebook, one image; ours: median)"
    yield Printed(what, 0.0008, ("cosine", "median"))


def _ilrg(reference: Mapping[str, Any]) -> Iterator[Printed]:
    what = "share of classes with an exact count (LnAcc in the authors' logs)"
    yield Printed(what, 1.0, ("classes_with_exact_count", "ilrg"))


def _nl_sme(reference: Mapping[str, Any]) -> Iterator[Printed]:
    for place, methods in reference["table"].items():
        row = f"table {place}" if place.startswith(("cifar100", "letters")) else place
        yield from _psnr(place, methods, (row, "cells"))
    for data, methods in reference["ablation"].items():
        row = "ablation enhanced, E 50" if data == "enhanced" else f"ablation {data}"
        yield from _psnr(f"ablation {data}", methods, (row, "cells"))


def _tip(reference: Mapping[str, Any]) -> Iterator[Printed]:
    for data, attacks in reference["attacks"].items():
        for attack, defences in attacks.items():
            # One attack of the paper, GIFD, has no row here.
            yield from _psnr(f"{data}, {attack}, A0", defences, (f"table {data}", "A0") if attack == "IG" else ())
    for data, defences in reference["heat maps"].items():
        for defence, held in defences.items():
            what = f"{data}, heat maps, {defence}: PSNR of the overlay"
            yield Printed(what, held["psnr"], (f"maps {data}, local", defence, "overlay_psnr"))


def _flat_minima(reference: Mapping[str, Any]) -> Iterator[Printed]:
    for method, rounds in reference["table"].items():
        mode = "a" if method == "FedAvg" else "b"  # the attacker ignores the rule; FedAvg has none to ignore
        for number, attacks in rounds.items():
            for attack, held in attacks.items():
                steps = (f"table, round {number}", "cells", method, attack, mode, "psnr", "mean")
                yield Printed(f"{method}, round {number}, {attack}: PSNR", held["psnr"], steps)


def _secadam(reference: Mapping[str, Any]) -> Iterator[Printed]:
    """PSNR in the supplement's own convention, which our rows keep beside the usual one."""
    own: Steps = ("s004_compat", "oracle_psnr", "mean")
    for held in reference["inversion"]:
        data = held["dataset"].replace("Imagenet", "ImageNet")  # spelled both ways there
        row = f"inversion {data}, {'lenet' if data == 'FMNIST' else 'convnext'}"
        yield Printed(f"{row}, {held['algorithm']}: PSNR", held["psnr"], (row, "cells", held["algorithm"], *own))
    for place, attacks in reference["gradients"].items():
        row = "gradients " + ", ".join(place.rsplit(" ", 1))
        for attack, algorithms in attacks.items():
            for algorithm, held in algorithms.items():
                cell = f"{attack}, {algorithm}"
                yield Printed(f"{row}, {cell}: PSNR", held["psnr"], (row, "cells", cell, *own))
    for held in reference["performance"]:
        row = f"performance {held['dataset']}, {'lenet' if held['dataset'] == 'FMNIST' else 'convnext'}"
        steps = (row, "cells", held["algorithm"], "accuracy")
        yield Printed(f"{row}, {held['algorithm']}: accuracy (%)", held["accuracy"], steps)
    for name, algorithm in (("dp_fedavg", "DP-FedAVG"), ("dp_secadam", "DP-SecAdam")):
        for held in reference[name]:
            model = "cnn" if held["dataset"] == "FMNIST" else "resnetv2"
            row = f"grid {held['dataset']}, {model}, clip {held['clip']:g}"
            cell = f"{algorithm}, clip {held['clip']:g}, noise {held['noise scale']:g}"
            yield Printed(f"{row}, {cell}: accuracy (%)", held["accuracy"], (row, "cells", cell, "accuracy"))


def _psnr(place: str, cells: Mapping[str, Mapping[str, float]], steps: Steps) -> Iterator[Printed]:
    for name, held in cells.items():
        yield Printed(f"{place}, {name}: PSNR", held["psnr"], (*steps, name, "psnr", "mean") if steps else ())


# Folders that are not here print no number that we measure; their `about` says why.
PRINTED: dict[str, Callable[[Mapping[str, Any]], Iterable[Printed]]] = {
    "flat_minima": _flat_minima,
    "idlg": _idlg,
    "ig": _ig,
    "ilrg": _ilrg,
    "nl_sme": _nl_sme,
    "secadam": _secadam,
    "tip": _tip,
}


# --- as text ----------------------------------------------------------------------------------------------------------


def markdown(claims: Sequence[Claims], titles: Mapping[str, str]) -> str:
    """The page: a summary, then for every folder the paper's figures and the bounds, each beside ours."""
    lines = _table(
        ("folder", "paper", "what there is"),
        ((f"[`{each.name}`](#{each.name})", titles[each.name], each.counts()) for each in claims),
    )
    for each in claims:
        lines += ["", f"## {titles[each.name]} {{#{each.name}}}", "", each.expected["about"]]
        if each.printed:
            lines += ["", "### What the paper prints", "", *_table(HEAD, (figure.cells() for figure in each.printed))]
        own = (HEAD[0], "was to be", *HEAD[2:])
        lines += ["", "### What was to hold", "", *_table(own, (figure.cells() for figure in each.bounds))]
        if each.results:
            about = ("result", "date", "commit", "hardware", "to be known")
            lines += ["", "### Results", "", *_table(about, (result.row for result in each.results))]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    escaped = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *rows))
    lines = [f"| {row} |" for row in escaped]
    return [lines[0], "|" + "---|" * len(head), *lines[1:]]


def plain(claims: Claims) -> str:
    """The same of one folder, for a terminal."""
    lines = [claims.counts()]
    parts = (("What the paper prints", "paper", claims.printed), ("What was to hold", "wanted", claims.bounds))
    for title, word, figures in parts:
        lines += ["", title] if figures else []
        for figure in figures:
            what, theirs, ours, outcome, size, seed, hardware, file = figure.cells()
            where = f"targets {size}, seed {seed}, {hardware}, {file}" if file else ""
            told = "; ".join(part for part in (outcome, where) if part)
            lines.append(f"  {what}: {word} {theirs}, ours {ours}{f' ({told})' if told else ''}")
    return "\n".join(lines)
