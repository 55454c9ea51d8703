"""Does the risk score order settings as attacks do?

    python benchmarks/risk_score.py          # benchmarks/results/risk-score.json; some ten minutes on one core

Settings: an untrained LeNet on handwritten digits (8 x 8), batches of 1 to 16, noise of several sizes, pruning and
clipping. For each, the score of every target's update before any attack (at a picture of noise, so without the truth),
and the PSNR of `auto:preset=quick` with knowledge of the defence. Spearman's rank correlation over settings.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import gradleak as gl
from gradleak.audit.cells import defence_of
from gradleak.core.environment import describe
from gradleak.identify.risk import Risk, risk

SETTINGS: tuple[tuple[str, int], ...] = tuple(
    (defence, examples)
    for defence in (
        "none",
        "local-gaussian:sigma=0.0001",
        "local-gaussian:sigma=0.001",
        "local-gaussian:sigma=0.01",
        "local-gaussian:sigma=0.1",
        "pruning:keep=0.5",
        "pruning:keep=0.1",
        "clipping",
    )
    for examples in (1, 4)
) + (("none", 8), ("none", 16))


def network(shape: gl.models.Shape, classes: int) -> torch.nn.Module:
    return gl.models.lenet_zhu(shape=shape, classes=classes, generator=torch.Generator().manual_seed(0))


def measure(targets: int, attack: str) -> list[dict[str, Any]]:
    images = gl.data.load_images("digits")
    channels, height, width = images.x.shape[1:]
    task = gl.Task.supervised(
        network((channels, height, width), images.classes),
        torch.nn.functional.cross_entropy,
        like=(images.x[:1], images.y[:1]),
    )
    training, method = gl.LocalTraining(lr=1.0), gl.registry.parse("attack", attack)
    rows = []
    for name, examples in SETTINGS:
        defence, began = defence_of(name), time.perf_counter()
        knows = gl.Knowledge(training=training, defence=defence)
        batches = [
            {"x": images.x[n * examples : (n + 1) * examples], "y": images.y[n * examples : (n + 1) * examples]}
            for n in range(targets)
        ]
        seen = [gl.observe(task, batch, training, defence, key=f"target{n}") for n, batch in enumerate(batches)]
        scores = [score for each in seen if isinstance(score := risk(task, each, knows), Risk)]
        spent = time.perf_counter() - began
        found = method.run(task, seen, knows)
        truth = {name: torch.stack([batch[name] for batch in batches]) for name in ("x", "y")}
        compared = gl.metrics.compare(found, truth)
        rows.append(
            {
                "defence": name,
                "examples": examples,
                "score": fmean(each.score for each in scores),
                "effective_rank": fmean(each.effective_rank for each in scores),
                "log_det": fmean(each.log_det for each in scores),
                "gradient_norm": fmean(each.gradient_norm for each in scores),
                "psnr": float(compared.psnr.mean()),
                "ssim": float(compared.ssim.mean()),
                "seconds_of_score": spent / targets,
                "seconds_of_attack": (time.perf_counter() - began - spent) / targets,
            }
        )
        last = rows[-1]
        print(f"{name:<30} B={examples:<3} {last['score']:6.2f} bits  {last['psnr']:6.1f} dB", flush=True)
    return rows


def correlations(rows: list[dict[str, Any]]) -> dict[str, float]:
    from scipy.stats import spearmanr

    names = ("score", "effective_rank", "log_det", "gradient_norm")
    psnr = [row["psnr"] for row in rows]
    return {name: float(spearmanr([row[name] for row in rows], psnr).statistic) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--targets", type=int, default=4)
    parser.add_argument("--attack", default="auto:preset=quick,certify=False")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "risk-score.json")
    given = parser.parse_args()
    rows = measure(given.targets, given.attack)
    told = {"environment": describe(), "targets": given.targets, "attack": given.attack, "spearman": correlations(rows)}
    print(json.dumps(told["spearman"], indent=1))
    given.out.write_text(json.dumps({**told, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
