"""The figures of results files as Markdown: `python papers/nl_sme/table.py RESULTS.json ...`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, body)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: Any, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def mean(cell: Mapping[str, Any], name: str, form: str) -> str:
    return number((cell.get(name) or {}).get("mean"), form)


def interval(estimate: Mapping[str, Any]) -> str:
    return f"{estimate['value']:+.2f} [{estimate['low']:+.2f}, {estimate['high']:+.2f}]"


def methods(row: Mapping[str, Any]) -> str:
    """Scores first, then the match with and without factors, cost, and what the paper prints."""
    body, skipped = [], []
    for label, cell in row["cells"].items():
        if "skipped" in cell:
            skipped.append(f"{label}: {cell['skipped']}.")
            continue
        paper = cell.get("paper")
        printed = "-" if paper is None else f"{paper['psnr']:.2f} / {paper['ssim']:.3f} / {paper['l_sim']:.4f}"
        std = cell["psnr"]["std"]
        body.append(
            [
                label,
                f"{cell['psnr']['mean']:.2f} +- {std:.2f}",
                mean(cell, "ssim", ".3f"),
                f"{mean(cell, 'l_sim_obj', '.4f')} / {mean(cell, 'l_sim_raw', '.4f')}",
                number((cell.get("share_above") or {}).get("20 dB"), ".2f"),
                number(cell.get("seconds_per_client"), ".1f"),
                number(cell.get("memory_gib"), ".2f"),
                number((cell.get("steps_to") or {}).get("0.5 dB below the end"), "d"),
                printed,
            ]
        )
    head = ["method", "PSNR", "SSIM", "L_sim obj / raw", "above 20 dB", "s per client", "GiB", "steps to end - 0.5 dB"]
    lines = [table([*head, "paper: PSNR / SSIM / L_sim"], body)]
    if paired := row.get("paired"):
        lines.append("Paired, dB: " + "; ".join(f"{name} {interval(each['psnr'])}" for name, each in paired.items()))
    if gaps := row.get("gap"):
        told = (
            f"{label} " + " / ".join(f"{each['gap_percent']:.1f} %" for each in held.values())
            for label, held in gaps.items()
        )
        lines.append("Gap to SME in L_sim, obj / raw: " + "; ".join(told))
    lines += [f"Skipped: {' '.join(skipped)}"] if skipped else []
    return "\n\n".join(lines)


def lanes(row: Mapping[str, Any]) -> str:
    if "skipped" in row:
        return str(row["skipped"])
    together, alone = (row["psnr"][name]["mean"] for name in ("lanes", "one by one"))
    told = f"{row['method']}, {row['steps']} steps: {row['seconds_of_lanes']:.1f} s as lanes, "
    told += f"{row['seconds_one_by_one']:.1f} s one by one, which is a share of {row['share']:.3f}. "
    return told + f"PSNR {together:.2f} and {alone:.2f}."


def labels(row: Mapping[str, Any]) -> str:
    def told(each: Mapping[str, Any]) -> str:
        return each["skipped"] if "skipped" in each else f"{each['wrong']['mean']:.1f} of {each['of']}"

    rules = list(next(iter(row["epochs_of"].values())))
    body = [[rule, *(told(held[rule]) for held in row["epochs_of"].values())] for rule in rules]
    found = table(["rule", *(f"wrong, E {epochs}" for epochs in row["epochs_of"])], body)
    return found + "\n\n" + methods({"cells": row["cells"]})


def way(row: Mapping[str, Any]) -> str:
    """How the errors grow along the path, then the mismatches at its end."""
    body = []
    for steps, each in zip(row["lengths"], row["growth"], strict=True):
        wrong, curvature = each["mismatch"], each.get("curvature", {})
        body.append(
            [
                str(steps),
                f"{each['line']['rms']:.4f} / {each['bezier']['rms']:.4f}",
                f"{each['gain']:.2f}",
                f"{number(curvature.get('lowest'))} - {number(curvature.get('highest'))}",
                f"{wrong['start']:.4f}",
                f"{wrong['midpoint']:.4f}",
                f"{wrong['line']:.4f} at {wrong['line_at']:.2f}",
                f"{wrong['bezier']:.4f} at {wrong['bezier_at']:.2f}",
                f"{wrong['along_line']:.4f} / {wrong['along_bezier']:.4f} / {wrong['along_path']:.4f}",
                " ".join(f"{count}: {value:.4f}" for count, value in wrong["replays"].items()),
            ]
        )
    head = ["T", "error of line / Bezier", "gain of E^2", "curvature", "mismatch at w0", "midpoint", "best on line"]
    head += ["best on Bezier", "mean along line / Bezier / path", "coarse replay, K"]
    orders = ", ".join(f"{name} T^{number(value, '.2f')}" for name, value in row["order"].items())
    holds = ", ".join(f"{name.replace('_', ' ')} for {count}" for name, count in row["clients_where"].items())
    return table(head, body) + f"\n\n{row['clients']} clients; growth: {orders}; {holds}."


KINDS: dict[str, Callable[[Mapping[str, Any]], str]] = {"lanes": lanes, "labels": labels, "trajectory": way}


def main() -> None:
    for name in sys.argv[1:]:
        file = json.loads(Path(name).read_text())
        for title, row in file.get("figures", file).items():
            kind = KINDS.get(title.split()[0], methods)
            about = f"{row['data']}; {row['clients']} clients of {row['examples']}, {row['local_steps']} local steps, "
            about += f"{row['model']} ({row['parameters']:,}), {row['client_rule']}, seed {row['seed']}."
            print(f"### {title}\n\n{about}\n\n{kind(row)}\n")


if __name__ == "__main__":
    main()
