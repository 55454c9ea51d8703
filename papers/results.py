"""The table of a paper's results, `papers/NAME/results.csv`: one figure a line, with what is needed to get it again.

row       a row of run.py, by its name
setting   the run that measured it, then what tells its figures apart: "h200-curve-FedSAM; round 10"
attack, defence, form, metric    what was run against what, what the attacker assumed, what was measured
value     a mean where the metric has no statistic in its name ("psnr", "psnr lowest"); `low`, `high`: its 95 % interval
n         how many targets it is over
seed, commit, hardware, command  where it comes from; empty where it was not recorded. A command stands without the
          flags that name row and files: `python papers/NAME/run.py --only '^ROW$' ...` measures the line again

`tidy` makes such figures of the nested ones that run.py measures, `find` looks one up by the path of the nested one.
A run replaces what an earlier one of its name had for the same row; later runs stand below earlier ones.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

COUNTS = ("images", "targets", "trials", "runs", "clients")  # what results call the number of their targets
STATISTICS = ("median", "lowest", "highest")  # beside the mean
FEW = 8  # longer lists of numbers (one for each target, curves over steps) are not in the table
WITHOUT_ROWS = ("idlg", "ig", "ilrg")  # one measurement each: their row is the paper's name
COSTS = ("cost", "lanes", "budget")  # rows whose seconds mean something
# What a table has of a cell: scores, counts that are exact, costs. Everything else that a run measures (settings, times
# of a shared machine, curves over steps, one number for each target) is left to the run itself.
METRICS: dict[str, tuple[str, ...]] = {  # by paper and kind of row, or by paper
    "flat_minima, curve": (
        *("psnr", "test_accuracy", "gradient_norm", "curvature (excess|log_determinant error|extremes highest)"),
        *("curvature trace( standard_error)?", "associations.* (plain|partial)"),
    ),
    "flat_minima, exact": ("psnr", "order.*", "adaptive (share_of_undefended|share_of_plain|naive_share|exact)"),
    "flat_minima": (
        *("psnr", "ssim", "lpips", "psnr_of_another_image", "order.*", "flatness.*", "radius"),
        "adaptive (share_of_undefended|share_of_plain|naive_share|exact)",
        *("test_accuracy", "final_accuracy", "gradient_norm", "input floor psnr .", "index 1 .*", "channel.*"),
        *("curvature (excess|log_determinant error|extremes highest)", "covariance (trace_ratio|top_ratios 1)"),
        *("associations.* (plain|partial)",),
    ),
    "gidm, known": (
        *("psnr( median| lowest)?", "lpips", "above_40", "starts (median|highest)", "best above_40"),
        *("phases.*", "test_loss"),
    ),
    "gidm": (
        *("psnr", "ssim", "lpips", "noise_cosine", "(psnr_of_each|starts|outside) .", "psnr_of_examples.*"),
        *("above_prior best", "batch . .*", "test_loss", "final_test_loss"),
    ),
    "gidm, modes": ("psnr", "lpips", "t (right|off_by)", "above_prior.*"),
    "gidm, cost": ("seconds", "memory_gib", "psnr"),
    "nl_sme, trajectory": (
        *("growth (line|bezier) rms", "growth gain", "growth mismatch (start|midpoint|line|bezier|along.*)"),
        *("growth mismatch replays (2|5|10|20)", "clients_where.*"),
    ),
    "nl_sme, architecture": ("psnr", "ssim", "l_sim_(obj|raw)", "paired psnr", "parameters"),
    "nl_sme": (
        *("psnr", "ssim", "l_sim_(obj|raw)", "paired psnr", "psnr_from_the_paper", "epochs_of wrong"),
        *("seconds_of_lanes", "seconds_one_by_one", "share", "psnr (lanes|one by one)", "memory_gib .*"),
    ),
    "priors": (
        *("psnr", "ssim", "lpips", "above_prior.*", "(lpips_)?paired.*", "score.*", "seconds.*", "memory_gib"),
        *("label_accuracy", "images_a_second", "generator attacked.*"),
    ),
    "secadam, ablation": ("s004_compat oracle_ssim", "test_accuracy", "correlation_of_ssim_and_psnr"),
    "secadam, exact": ("psnr", "psnr lowest", "all_exact"),
    "secadam, inversion": ("psnr", "ssim", "s004_compat.*", "no update (psnr|ssim|oracle.*)", "test_accuracy"),
    "secadam, gradients": ("psnr", "ssim", "s004_compat.*", "no update (psnr|ssim|oracle.*)"),
    "secadam": (
        *("psnr", "ssim", "unrelated (psnr|ssim)", "(test_)?accuracy", "loss", "labels", "sign", "ratio-counts"),
        *("row-minimum", "median_error_of_sizes", "cosine_with_(the_gradient|c|the_mean.*)", "largest_error"),
        *("(ratio|r m), with the gradient",),
    ),
    "second_order": (
        *("(beside )?psnr", "psnr (median|lowest)", "above_60", "above_100", "(beside )?match", "seconds_per_image"),
        *("training_loss", "gain", "certificate (rank .|below_floor)", "psnr_of_each ."),
    ),
    "tip, table": (
        *("psnr", "ssim", "label_accuracy", "channels_found.*", "below_undefended", "share_of_undefended"),
        *("share_above_another_image", "psnr_of_another_image", "test_accuracy"),
    ),
    "tip": (
        *("psnr", "ssim", "mse", "rank_correlation", "top_overlap", "overlay_.*", "psnr_of_another_image"),
        *("(final_|test_)?accuracy", "beta_over_std_of_weights median"),
    ),
}
# Attack, form and metric of what another line tells as well, or what only stands beside a control.
REPEATED = (
    r"(?!best)[^|]*[|].*[|]adaptive .*",
    r".*[|][bc][|]psnr_of_another_image",
    r"(prior only|mid-grey|x_t itself|dlg-dm|gidm|invg-dm)[|].*[|]psnr_of_each .*",
    r".*(over ig-ms|over fedleak|frozen.*)[|].*[|]paired psnr",
    r".*[|](mean image|nearest other)[|].*",
)
ABSENT = ("paper", "ten", "settings", "federation", "end", "curve")  # of others, or what stands elsewhere too
# Where the steps of a path belong. s, a, d, f: setting, attack, defence, form; "f=A0,A1": one of these. The words
# `cells`, `points` and `methods` say nothing; every other step that no column takes becomes part of the metric.
LAYOUTS: dict[str, tuple[str, ...]] = {
    "flat_minima": (
        "points *s cells *a *f",
        "cells *d *a *f",
        "adaptive *d *a",
        "flatness *d *a",
        "order *a",
        "methods *d input *f",
        "methods *d",
        "points *s",
        "associations *a *f",
    ),
    "gidm, defended": ("cells *d",),
    "gidm": ("cells *a", "above_prior", "phases"),
    "nl_sme": ("cells *a", "paired *a", "gap *a", "epochs_of *s *a", "growth *s"),
    "priors": ("cells *a", "paired *a", "lpips_paired *a"),
    "secadam, clients": ("cells *s cosine_with_the_mean_gradient", "cells *s *f *a", "cells *s *f"),
    "secadam, state cifar10, inverted": ("cells *f",),
    "secadam, state": ("cells *s *s *f", "cells *s *f", "cells *f"),
    "secadam, exact": ("cells *f",),
    "secadam, rounds": ("cells *f",),
    "secadam, labels": ("cells *s",),
    "secadam, ablation": ("cells *s",),
    "secadam, gradients": ("cells *a", "no update *f"),
    "secadam, inversion": ("cells *d", "no update *f"),
    "secadam": ("cells *d",),
    "tableak": ("cells *a",),
    "tip": ("f=A0,A1,A2,A0' *d", "defences *d", "channels_found", "*d"),
}
SILENT = ("cells", "points", "methods")
Steps = tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """One line of a table."""

    row: str
    setting: str
    attack: str
    defence: str
    form: str
    metric: str
    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    seed: str = ""
    commit: str = ""
    hardware: str = ""
    command: str = ""

    @property
    def run(self) -> str:
        return self.setting.partition("; ")[0]

    @property
    def condition(self) -> str:
        return self.setting.partition("; ")[2]

    @property
    def small(self) -> bool:
        """Cut short (thin networks, few steps): it shows that a row runs, and reproduces nothing."""
        return "--small 1" in self.command

    @property
    def key(self) -> Steps:
        return self.row, self.condition, self.attack, self.defence, self.form, self.metric


COLUMNS = tuple(field.name for field in fields(Figure))
NUMBERS = ("value", "low", "high")


# --- the file ---------------------------------------------------------------------------------------------------------


def read(file: Path) -> list[Figure]:
    with file.open(encoding="utf-8", newline="") as stream:
        lines = csv.DictReader(stream)
        if tuple(lines.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{file} has the columns {lines.fieldnames}; a table of results has {list(COLUMNS)}.")
        return [_figure(line) for line in lines]


def _figure(line: Mapping[str, str]) -> Figure:
    numbers = {name: float(line[name]) if line[name] else None for name in NUMBERS}
    return Figure(**{**line, **numbers, "n": int(line["n"]) if line["n"] else None})  # type: ignore[arg-type]


def write(file: Path, figures: Iterable[Figure]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8", newline="") as stream:
        lines = csv.writer(stream, lineterminator="\n")
        lines.writerow(COLUMNS)
        for figure in figures:
            lines.writerow([_cell(value) for value in astuple(figure)])


def _cell(value: Any) -> str:
    """Seven digits of a number; all of them where it would else be rounded differently in a table."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    short = f"{value:.7g}"
    alike = all(f"{times * value:.{d}f}" == f"{times * float(short):.{d}f}" for times in (1, 100) for d in range(5))
    return short if alike else repr(value)


def add(file: Path, figures: Sequence[Figure]) -> None:
    """Put a run's figures below the others, in the place of what it had for the same rows."""
    new = {(figure.run, figure.row) for figure in figures}
    kept = read(file) if file.is_file() else []
    write(file, [*(each for each in kept if (each.run, each.row) not in new), *figures])


def command_of(words: str) -> str:
    """What `command` keeps of a call of run.py: not which rows (the line says it), for how long, where files go."""
    words = re.sub(r"(^|; )python papers/\w+/", r"\1", words)
    words = re.sub(r""" --only ('[^']*'|"[^"]*"|\S+)""", "", words)
    return re.sub(r" --(budget|work|pictures|device|out|name) ('[^']*'|\S+)", "", words)


# --- from nested figures ----------------------------------------------------------------------------------------------


def tidy(paper: str, run: str, stored: Mapping[str, Any]) -> list[Figure]:
    """The figures of one measurement: {"figures": nested, "settings": ..., "environment": ...}."""
    settings, environment = stored.get("settings") or {}, stored.get("environment") or {}
    rows = {paper: stored["figures"]} if paper in WITHOUT_ROWS else stored["figures"]
    figures = []
    for row, nested in rows.items():
        source = {
            "seed": _seed(settings, nested, environment),
            "commit": str((environment.get("git") or {}).get("commit") or "")[:7],
            "hardware": _hardware(environment),
            "command": command_of(environment.get("command") or ""),
        }
        for steps, numbers in _leaves(_shortened(nested), (), _count(settings)):
            place = _place(paper, row, steps)
            if not _wanted(paper, row, place):
                continue
            place["setting"] = "; ".join(part for part in (run, place["setting"]) if part)
            figures.append(Figure(row=row, **place, **numbers, **source))
    return figures


def _wanted(paper: str, row: str, place: Mapping[str, str]) -> bool:
    metric = place["metric"]
    if metric == "seconds" and not row.startswith(COSTS) and paper not in WITHOUT_ROWS:
        return False
    if any(re.fullmatch(each, f"{place['attack']}|{place['form']}|{metric}") for each in REPEATED):
        return False
    wanted = METRICS.get(_kind(paper, row)) or METRICS.get(paper, (".*",))
    return any(re.fullmatch(each, metric) for each in wanted)


def _kind(paper: str, row: str) -> str:
    return f"{paper}, {re.split('[ ,]', row)[0]}"


def steps_of(name: str) -> Steps:
    """The path that a bound of expected.json names: by slashes where there are any, since rows have dots in names."""
    return tuple(name.split("/" if "/" in name else "."))


def kept(paper: str, path: Steps) -> bool:
    """Whether a table has room for the figure at the end of a path of nested steps."""
    row, place, _ = _address(paper, path)
    return _wanted(paper, row, place)


def find(figures: Iterable[Figure], paper: str, path: Steps) -> Iterator[tuple[Figure, float]]:
    """The figures (of several runs) that a path of nested steps leads to, each with its number."""
    row, place, side = _address(paper, path)
    key = (row, *(place[name] for name in ("setting", "attack", "defence", "form", "metric")))
    for figure in figures:
        number = getattr(figure, side)
        if figure.key == key and number is not None:
            yield figure, number


def _address(paper: str, path: Steps) -> tuple[str, dict[str, str], str]:
    """Row, columns and side (value, low, high) of the figure at the end of a path."""
    row, steps = (paper, path) if paper in WITHOUT_ROWS else (path[0], path[1:])
    side = steps[-1] if steps[-1] in ("low", "high") else "value"
    return row, _place(paper, row, steps[:-1] if side != "value" else steps), side


def _place(paper: str, row: str, steps: Steps) -> dict[str, str]:
    """Columns of the figure at the end of these steps."""
    if steps and steps[-1] in ("mean", "value"):
        steps = steps[:-1]
    statistic = f" {steps[-1]}" if len(steps) > 1 and steps[-1] in STATISTICS else ""
    *way, metric = steps[:-1] if statistic else steps
    layouts = LAYOUTS.get(f"{paper}, {row}") or LAYOUTS.get(_kind(paper, row)) or LAYOUTS.get(paper, ())
    place = dict.fromkeys(("setting", "attack", "defence", "form"), "")
    words: list[str] = list(way)
    for layout in layouts:
        tokens = layout.split(" ") if layout != "no update *f" else ["no update", "*f"]
        if len(tokens) <= len(way) and all(_fits(token, step) for token, step in zip(tokens, way)):
            words = []
            for token, step in zip(tokens, way):
                column = {"s": "setting", "a": "attack", "d": "defence", "f": "form"}.get(token.strip("*")[:1])
                if column and (token.startswith("*") or "=" in token):
                    place[column] = "; ".join(part for part in (place[column], step) if part)
                else:
                    words += [step]
            words += way[len(tokens) :]
            break
    return {**place, "metric": " ".join(word for word in (*words, metric) if word not in SILENT) + statistic}


def _fits(token: str, step: str) -> bool:
    return token.startswith("*") or token == step or ("=" in token and step in token.split("=")[1].split(","))


def _leaves(nested: Any, steps: Steps, count: int | None) -> Iterator[tuple[Steps, dict[str, Any]]]:
    """Every figure of a nested one: its steps, its number, its interval, how many targets it is over."""
    if isinstance(nested, Mapping):
        count = _count(nested) or count
        if {"value", "low", "high"} <= nested.keys():
            if nested["value"] is not None:
                yield steps, {**{name: _float(nested[name]) for name in NUMBERS}, "n": nested.get("count") or count}
            return
        if {"mean", "lowest"} <= nested.keys():
            bounds = nested.get("interval") or (None, None)
            interval = {"n": count, "low": bounds[0], "high": bounds[1]}
            for name in ("mean", *(STATISTICS if steps[-1] in ("psnr", "cosine") else ())):
                if nested.get(name) is not None:
                    yield (
                        (*steps, name),
                        {"value": float(nested[name]), **(interval if name == "mean" else {"n": count})},
                    )
            return
        for name, each in nested.items():
            if name not in ABSENT and name not in COUNTS:
                yield from _leaves(each, (*steps, name), count)
    elif isinstance(nested, (int, float)) and not isinstance(nested, bool):
        yield steps, {"value": float(nested), "n": count}
    elif isinstance(nested, list) and 0 < len(nested) <= FEW and all(isinstance(each, (int, float)) for each in nested):
        for number, each in enumerate(nested, 1):
            yield (*steps[:-1], f"{steps[-1]} {number}"), {"value": float(each), "n": 1}


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def _shortened(nested: Any) -> Any:
    """The same with what lists hold by name: rounds of a curve, lengths of a path, bounds at one level of noise."""
    if isinstance(nested, list):
        return [_shortened(each) for each in nested]
    if not isinstance(nested, Mapping):
        return nested
    named = {name: _shortened(each) for name, each in nested.items()}
    for name, key, word in (("points", "round", "round"), ("growth", "steps", "T")):
        if isinstance(named.get(name), list) and named[name] and isinstance(named[name][0], dict):
            named[name] = {f"{word} {each.pop(key):g}": each for each in named[name]}
    if isinstance(named.get("psnr"), dict) and isinstance(named.get("psnr_interval"), list):
        named["psnr"] = {**named["psnr"], "interval": named.pop("psnr_interval")}
    if isinstance(named.get("starts"), list) and len(named["starts"]) > FEW:
        starts = sorted(named.pop("starts"))
        named.update({"starts median": starts[len(starts) // 2], "starts highest": starts[-1]})
    if isinstance(named.get("flatness"), dict):  # one interval for each method and attack
        gaps_of = named["flatness"].items()
        named["flatness"] = {name: {each: {"psnr": gap} for each, gap in gaps.items()} for name, gaps in gaps_of}
    if "nats" in named:  # the most releases, the most noise: 1 % of the release's own root mean square
        return {f"nats, {named['counts'][-1]} releases, noise {named['shares'][-1]:.0%}": named["nats"][-1][-1]}
    if isinstance(named.get("input"), dict):
        levels = {form: [each[-1] for each in targets] for form, targets in named["input"].items()}
        named["input"] = {form: {"floor psnr": [each["psnr"] for each in targets]} for form, targets in levels.items()}
    if isinstance(named.get("psnr_of_examples"), list):
        batches = named.pop("psnr_of_examples")
        named.update({f"psnr_of_examples, batch {number}": scores for number, scores in enumerate(batches, 1)})
    return named


def _count(nested: Any) -> int | None:
    """The number of targets that a part of a result states, itself or in its summary of PSNRs."""
    places = (nested, nested["psnr"]) if isinstance(nested.get("psnr"), Mapping) else (nested,)
    return next((place[name] for place in places for name in COUNTS if isinstance(place.get(name), int)), None)


def _seed(settings: Mapping[str, Any], nested: Any, environment: Mapping[str, Any]) -> str:
    command = re.search(r"--seed (\d+)", str(environment.get("command")))
    places = (settings, nested if isinstance(nested, Mapping) else {}, {"seed": command[1]} if command else {})
    return str(next((place["seed"] for place in places if "seed" in place), ""))


def _hardware(environment: Mapping[str, Any]) -> str:
    if gpus := environment.get("gpus"):
        return str(gpus[0]) if len(gpus) == 1 else f"{len(gpus)} x {gpus[0]}"
    threads = environment.get("threads")
    return "" if threads is None else f"CPU, {threads} thread{'' if threads == 1 else 's'}"
