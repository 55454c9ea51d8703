"""The papers' figures beside ours: read from `papers/*/expected.json` and `papers/*/results.csv`, never typed in.

Two kinds of figures. `Printed`: a number that a paper prints, and where ours stands among the figures of its folder.
`Bound`: what was to hold of ours, set before the measurement. Where several runs have a figure one is shown, and never
by its outcome: one at full size before a `small` one, then the one with more targets, then the later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from papers import results
from papers.results import Steps

NOT_MEASURED = "not measured yet"
FEW = 20  # fewer targets are called small, here as in every other table


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
class Comparison:
    """One line of the page: the wanted figure, ours, and what ours was measured on."""

    wanted: Printed | Bound
    figure: results.Figure | None = None
    value: float | None = None  # of the figure: itself, or an end of its interval

    @property
    def theirs(self) -> str:
        return f"{self.wanted.value:.4g}" if isinstance(self.wanted, Printed) else str(self.wanted)

    @property
    def ours(self) -> str:
        return NOT_MEASURED if self.value is None else f"{self.value:.4g}"

    @property
    def outcome(self) -> str:
        """Of a bound: holds, fails, or nothing yet. A `small` run decides nothing."""
        if self.value is None or self.figure is None or not isinstance(self.wanted, Bound):
            return ""
        return "not decided" if self.figure.small else "holds" if self.wanted.holds(self.value) else "fails"

    @property
    def size(self) -> str:
        if self.figure is None:
            return ""
        count = self.figure.n
        size = "not recorded" if count is None else f"{count}{' (small)' if count < FEW else ''}"
        return f"{size}, cut short: no reproduction" if self.figure.small else size

    def cells(self) -> tuple[str, ...]:
        """What, theirs, ours, outcome, targets, seed, hardware, run."""
        if self.figure is None:
            return self.wanted.what, self.theirs, self.ours, "", "", "", "", ""
        seed = self.figure.seed or "not recorded"
        source = (seed, self.figure.hardware, self.figure.run)
        return self.wanted.what, self.theirs, self.ours, self.outcome, self.size, *source


HEAD = ("figure", "paper", "ours", "", "targets", "seed", "hardware", "run")


@dataclass(frozen=True)
class Claims:
    """All figures of one folder of `papers/`."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def expected(self) -> Mapping[str, Any]:
        expected: Mapping[str, Any] = json.loads((self.folder / "expected.json").read_text(encoding="utf-8"))
        return expected

    @cached_property
    def figures(self) -> list[results.Figure]:
        file = self.folder / "results.csv"
        return results.read(file) if file.is_file() else []

    @property
    def printed(self) -> list[Comparison]:
        """The paper's figures; empty where it prints none, or where they are nothing that we measure."""
        printed = PRINTED.get(self.name)
        return [self._beside(each) for each in printed(self.expected.get("reference", {}))] if printed else []

    @property
    def bounds(self) -> list[Comparison]:
        """What was to hold, in the order of expected.json."""
        return [
            self._beside(Bound(name, results.steps_of(name), bound.get("at_least"), bound.get("at_most")))
            for name, bound in self.expected["figures"].items()
        ]

    def _beside(self, wanted: Printed | Bound) -> Comparison:
        having = list(results.find(self.figures, self.name, wanted.steps)) if wanted.steps else []
        order = lambda place: (not having[place][0].small, having[place][0].n or 0, place)  # noqa: E731
        last = max(range(len(having)), key=order, default=None)
        return Comparison(wanted) if last is None else Comparison(wanted, *having[last])

    def counts(self) -> str:
        """In one line: how much of it there is."""
        printed = self.printed
        at_hand = [each.figure for each in printed if each.figure is not None]
        short = sum(figure.small for figure in at_hand)
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


def _tableak(reference: Mapping[str, Any]) -> Iterator[Printed]:
    for place, entry in reference.items():
        steps = ("paper's settings", "cells", "tableak, pooled", "right")
        yield Printed(f"{place}: share of features", entry["right"], steps)


def _tip(reference: Mapping[str, Any]) -> Iterator[Printed]:
    for data, attacks in reference["attacks"].items():
        for attack, defences in attacks.items():
            # One attack of the paper, GIFD, has no row here.
            yield from _psnr(f"{data}, {attack}, A0", defences, (f"table {data}", "A0") if attack == "IG" else ())
    for data, defences in reference["heat maps"].items():
        for defence, entry in defences.items():
            what = f"{data}, heat maps, {defence}: PSNR of the overlay"
            yield Printed(what, entry["psnr"], (f"maps {data}, local", defence, "overlay_psnr"))


def _flat_minima(reference: Mapping[str, Any]) -> Iterator[Printed]:
    for method, rounds in reference["table"].items():
        mode = "a" if method == "FedAvg" else "b"  # the attacker ignores the rule; FedAvg has none to ignore
        for number, attacks in rounds.items():
            for attack, entry in attacks.items():
                steps = (f"table, round {number}", "cells", method, attack, mode, "psnr", "mean")
                yield Printed(f"{method}, round {number}, {attack}: PSNR", entry["psnr"], steps)


def _secadam(reference: Mapping[str, Any]) -> Iterator[Printed]:
    """PSNR in the supplement's own convention, which our rows keep beside the usual one."""
    convention: Steps = ("s004_compat", "oracle_psnr", "mean")
    for entry in reference["inversion"]:
        data = entry["dataset"].replace("Imagenet", "ImageNet")  # spelled both ways there
        row = f"inversion {data}, {'lenet' if data == 'FMNIST' else 'convnext'}"
        yield Printed(
            f"{row}, {entry['algorithm']}: PSNR", entry["psnr"], (row, "cells", entry["algorithm"], *convention)
        )
    for place, attacks in reference["gradients"].items():
        row = "gradients " + ", ".join(place.rsplit(" ", 1))
        for attack, algorithms in attacks.items():
            for algorithm, entry in algorithms.items():
                cell = f"{attack}, {algorithm}"
                yield Printed(f"{row}, {cell}: PSNR", entry["psnr"], (row, "cells", cell, *convention))
    for entry in reference["performance"]:
        row = f"performance {entry['dataset']}, {'lenet' if entry['dataset'] == 'FMNIST' else 'convnext'}"
        steps = (row, "cells", entry["algorithm"], "accuracy")
        yield Printed(f"{row}, {entry['algorithm']}: accuracy (%)", entry["accuracy"], steps)
    for name, algorithm in (("dp_fedavg", "DP-FedAVG"), ("dp_secadam", "DP-SecAdam")):
        for entry in reference[name]:
            model = "cnn" if entry["dataset"] == "FMNIST" else "resnetv2"
            row = f"grid {entry['dataset']}, {model}, clip {entry['clip']:g}"
            cell = f"{algorithm}, clip {entry['clip']:g}, noise {entry['noise scale']:g}"
            yield Printed(f"{row}, {cell}: accuracy (%)", entry["accuracy"], (row, "cells", cell, "accuracy"))


def _psnr(place: str, cells: Mapping[str, Mapping[str, float]], steps: Steps) -> Iterator[Printed]:
    for name, entry in cells.items():
        yield Printed(f"{place}, {name}: PSNR", entry["psnr"], (*steps, name, "psnr", "mean") if steps else ())


# Folders that are not here print no number that we measure; their `about` says why.
PRINTED: dict[str, Callable[[Mapping[str, Any]], Iterable[Printed]]] = {
    "flat_minima": _flat_minima,
    "idlg": _idlg,
    "ig": _ig,
    "ilrg": _ilrg,
    "nl_sme": _nl_sme,
    "secadam": _secadam,
    "tableak": _tableak,
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
        head = (HEAD[0], "was to be", *HEAD[2:])
        lines += ["", "### What was to hold", "", *_table(head, (figure.cells() for figure in each.bounds))]
        if each.figures:
            runs = {figure.run: (figure.run, figure.commit, figure.hardware, figure.command) for figure in each.figures}
            lines += ["", "### Runs", "", *_table(("run", "commit", "hardware", "command"), runs.values())]
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
            what, theirs, ours, outcome, size, seed, hardware, run = figure.cells()
            where = f"targets {size}, seed {seed}, {hardware}, {run}" if run else ""
            details = "; ".join(part for part in (outcome, where) if part)
            lines.append(f"  {what}: {word} {theirs}, ours {ours}{f' ({details})' if details else ''}")
    return "\n".join(lines)
