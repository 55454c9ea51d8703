"""The figures of a results file as Markdown: `python papers/tip/table.py papers/tip/results/NAME.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LEVELS = ("A0", "A1", "A2", "A0'")
FIDELITY = ("mse", "psnr", "ssim", "rank_correlation", "top_overlap", "overlay_mse", "overlay_psnr", "overlay_ssim")


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, body)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def attacks(row: dict[str, Any]) -> str:
    """PSNR / SSIM of every defence and attacker, and what the paper prints for IG."""
    paper = (row.get("paper") or {}).get("IG", {})
    levels = [level for level in LEVELS if level in row]
    body = []
    for label in row["defences"]:
        cells = [row[level].get(label) for level in levels]
        scores = ["-" if c is None else f"{c['psnr']['mean']:.2f} / {c['ssim']['mean']:.3f}" for c in cells]
        printed = paper.get(label)
        ratio = row["defences"][label].get("beta_over_std_of_weights", {}).get("median")
        body.append(
            [
                label,
                number(ratio),
                *scores,
                "-" if printed is None else f"{printed['psnr']:.2f} / {printed['ssim']:.3f}",
            ]
        )
    other = row["A0"]["No DP"].get("psnr_of_another_image", {}).get("mean")
    note = f"{row['images']} images, {row['iterations']} iterations, test accuracy {row['test_accuracy']:.3f}; "
    note += f"an update of another image: {number(other)} dB."
    return table(["defence", "beta / std(w)", *levels, "paper"], body) + "\n\n" + note


def maps(row: dict[str, Any]) -> str:
    """Fidelity of the maps themselves, then of the 8-bit pictures; the paper's are pictures."""
    printed = row.get("paper") or {}
    body = []
    for label, cell in row.items():
        if isinstance(cell, dict) and "overlay_ssim" in cell:
            theirs = printed.get(label)
            beside = "-" if theirs is None else f"{theirs['mse']:.0f} / {theirs['psnr']:.1f} / {theirs['ssim']:.2f}"
            body.append([label, *(number(cell[name]) for name in FIDELITY), number(cell["test_accuracy"]), beside])
    heads = [name.replace("_", " ") for name in FIDELITY]
    return table(["defence", *heads, "test accuracy", "paper: MSE / PSNR / SSIM"], body)


def accuracies(row: dict[str, Any]) -> str:
    held = {label: cell for label, cell in row.items() if isinstance(cell, dict) and "final_accuracy" in cell}
    first = next(iter(held.values()))
    places = sorted({round(share * (len(first["round"]) - 1)) for share in (0, 0.25, 0.5, 0.75, 1)})
    body = [[label, *(f"{cell['test_accuracy'][place]:.3f}" for place in places)] for label, cell in held.items()]
    return table(["defence", *(f"round {first['round'][place]}" for place in places)], body)


def main() -> None:
    held = json.loads(Path(sys.argv[1]).read_text())
    kinds = {"table": attacks, "sweep": attacks, "maps": maps, "accuracy": accuracies}
    for name, row in held.get("figures", held).items():
        print(f"### {name}\n\n{kinds[name.split()[0]](row)}\n")


if __name__ == "__main__":
    main()
