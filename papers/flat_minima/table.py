"""The figures of results files as Markdown: `python papers/flat_minima/table.py RESULTS.json ...`.

Curves of the same name in several files are runs with other seeds: they are correlated with curvature together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from flat_minima.curves import associated

SCORES = {"psnr": ".2f", "ssim": ".3f", "lpips": ".3f", "mse_x100": ".3g"}
MODES = ("a", "b", "c")


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, body)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: Any, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def scores(cell: Mapping[str, Any] | None) -> str:
    """PSNR / SSIM / LPIPS / MSE x 100 of a cell of ours (means), or of the paper's (numbers)."""
    if cell is None:
        return "-"

    def of(name: str) -> float | None:
        held = cell.get(name)
        return held["mean"] if isinstance(held, Mapping) else held

    return " / ".join(number(of(name), form) for name, form in SCORES.items())


def attacks(row: Mapping[str, Any]) -> str:
    """One table an attack: the three modes over all targets; as the paper, with its ten targets; the paper."""
    parts = []
    for name in row["attacks"]:
        body = []
        for method, held in row["cells"].items():
            by_mode = held[name]
            printed = row["paper"].get(method, {}).get(str(row["round_of_the_paper"]), {}).get(name)
            ten = by_mode.get("b", by_mode["a"])["ten"]
            body.append([method, *(scores(by_mode.get(mode)) for mode in MODES), scores(ten), scores(printed)])
        head = ["method", "(a)", "(b)", "(c)", "ten targets, (b) or FedAvg", "paper"]
        parts.append(f"**{name}**\n\n{table(head, body)}")
    return "\n\n".join([*parts, findings(row)])


def findings(row: Mapping[str, Any]) -> str:
    """Order under A0, what A2 brings back, and what flatness alone does."""
    lines = [
        f"- order under A0, {name}: " + ", ".join(f"{pair} {gap:+.2f} dB" for pair, gap in gaps.items())
        for name, gaps in row["order"].items()
    ]
    body = []
    for method, name in ((method, name) for method in row["cells"] if method != "FedAvg" for name in row["attacks"]):
        share = row["adaptive"][method][name]
        shares = [share[of] for of in ("naive_share", "share_of_undefended", "share_of_plain", "exact")]
        gap = row["flatness"].get(method, {}).get(name)
        best = " (best on FedAvg)" if name == row["adaptive"]["best_attack"] else ""
        body.append([method, name + best, *(number(each, ".1%") for each in shares), f"{interval(gap)} dB"])
    head = ["method", "attack", "A0, of FedAvg's PSNR", "A2, of FedAvg's", "A2, of its own (a)", "A2 above 60 dB"]
    radii = ", ".join(f"{method} {held['radius']:.3f}" for method, held in row["methods"].items())
    note = f"{row['targets']} targets of {row['examples_of_a_target']}, round {row['round']}, init {row['init']}, "
    note += f"seed {row['seed']}; PSNR / SSIM / LPIPS / MSE x 100; LPIPS: {row['lpips']}. "
    note += f"Mean distance of a gradient's point from the weights: {radii}."
    return "\n".join([*lines, "", table([*head, "(a): FedAvg's weights leak more by"], body), "", note])


def curves(row: Mapping[str, Any]) -> str:
    """Round by round: accuracy, curvature, PSNR in every mode."""
    names = list(row["attacks"])
    letters = list(row["points"][0]["cells"][names[0]])
    body = []
    for point in row["points"]:
        held = point["curvature"]
        body.append(
            [
                str(point["round"]),
                number(point["test_accuracy"], ".3f"),
                number(held["log_determinant"]["value"], ".0f"),
                f"{number(held['excess'], '.0f')} +- {number(held['log_determinant']['error'], '.0f')}",
                number(held["extremes"]["highest"]),
                number(held["trace"]["value"]),
                number(point["gradient_norm"]),
                *(number(point["cells"][name][mode]["psnr"]["mean"], ".2f") for name in names for mode in letters),
            ]
        )
    head = ["round", "accuracy", "log det", "excess", "lambda max", "trace", "gradient norm"]
    head += [f"{name} ({mode})" for name in names for mode in letters]
    return table(head, body) + "\n\n" + associated_in_words(row["associations"])


def associated_in_words(found: Mapping[str, Any]) -> str:
    rows = [
        (name, mode, curve, each)
        for name, by_mode in found.items()
        for mode, held in by_mode.items()
        for curve, each in held.items()
    ]
    if not any(each["plain"] for *_, each in rows):
        return f"No correlations: {rows[0][-1]['reason']}"
    body = [
        [name, mode, curve, interval(each["plain"]), interval(each["partial"]), each["reason"] or "-"]
        for name, mode, curve, each in rows
    ]
    return table(["attack", "mode", "curve", "Spearman", "given gradient norm and round", "not defined because"], body)


def interval(estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    return f"{estimate['value']:+.2f} [{estimate['low']:+.2f}, {estimate['high']:+.2f}]"


def trainings(row: Mapping[str, Any]) -> str:
    places = sorted({round(share * (len(row["round"]) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)})
    return table([f"round {row['round'][place]}" for place in places], [[f"{row['accuracy'][p]:.3f}" for p in places]])


def informations(row: Mapping[str, Any]) -> str:
    """The printed index beside what holds: the middle of the three noise levels."""
    body = []
    for method, held in row["methods"].items():
        channel = held["channel"].get("sent", held["channel"]["plain"])
        points = held["input"].get("c", held["input"]["a"])
        body.append(
            [
                method,
                number(held["curvature"]["excess"], ".0f"),
                number(held["index"]["1"]["determinant"], ".0f"),
                number(held["index"]["1"]["ball"], ".0f"),
                number(held["covariance"]["trace_ratio"]),
                f"{channel['nats'][-1][1]:.0f} ({channel['counts'][-1]} releases)",
                number(sum(each[1]["effective_rank"] for each in points) / len(points), ".0f"),
                number(sum(each[1]["psnr"] for each in points) / len(points), ".1f"),
            ]
        )
    head = ["method", "excess", "index, theorem 3.1", "index, theorem 3.2", "tr Sigma / (tr H / B)", "channel, nats"]
    return table([*head, "pixels: effective rank", "floor, dB"], body)


KINDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "table": attacks,
    "exact": attacks,
    "batch": attacks,
    "init": attacks,
    "eta": attacks,
    "rate": attacks,
    "curve": curves,
    "long": curves,
    "rho": curves,
    "train": trainings,
    "information": informations,
}


def together(rows: Sequence[Mapping[str, Any]]) -> str:
    """Several seeds of one curve: each run's own correlation, averaged, and whole runs resampled."""
    first = rows[0]["points"][0]["cells"]
    runs = [row["points"] for row in rows]
    found = {name: {mode: associated(runs, name, mode) for mode in by_mode} for name, by_mode in first.items()}
    return associated_in_words(found)


def main() -> None:
    files = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    held: dict[str, list[Mapping[str, Any]]] = {}
    for file in files:
        for name, row in file.get("figures", file).items():
            held.setdefault(name, []).append(row)
    for name, rows in held.items():
        kind = name.replace(",", " ").split()[0]
        for row in rows:
            print(f"### {name}, seed {row['seed']}\n\n{KINDS[kind](row)}\n")
        if KINDS[kind] is curves and len(rows) > 1:
            print(f"### {name}, {len(rows)} seeds\n\n{together(rows)}\n")


if __name__ == "__main__":
    main()
