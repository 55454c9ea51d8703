"""Does the verdict say `leaks` where nothing can, and where everything does?

    python benchmarks/false_alarms.py        # benchmarks/results/false-alarms.json; half an hour on one core

One untrained LeNet, one example per update, no defence, `auto:preset=quick`, grey faces and other patches,
reduced to 14 x 14: many look alike, so that a wrong one has a chance to pass. Every image is attacked once, and judged
in two ways.

undefended   scored against the image that it is of, beside the reconstruction of another as the no-gradient baseline
unrelated    scored against ANOTHER image, as if that client had sent this update: what an audit would see whose update
             has nothing to do with the data. The verdict must not say `leaks`

A case is a verdict on one target, the kind with the least evidence; the same figures for cells of eight targets.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradleak as gl
from gradleak.audit.scoring import scores_of
from gradleak.audit.summary import summaries_of
from gradleak.core.environment import describe
from gradleak.scenario.task import Batch

CELL = 8
GALLERY = 50


def task_of(images: Any) -> gl.Task:
    network = gl.models.lenet_zhu(
        shape=tuple(images.x.shape[1:]), classes=images.classes, generator=torch.Generator().manual_seed(0)
    )
    return gl.Task.supervised(network, torch.nn.functional.cross_entropy, like=(images.x[:1], images.y[:1]))


def reconstructions(
    task: gl.Task, images: Any, attack: str, seed: int, at_once: int = 20
) -> tuple[Tensor, list[bool], list[str]]:
    """(images, C, H, W), whether each search converged, and which member won."""
    training = gl.LocalTraining(lr=1.0)
    method = gl.registry.parse("attack", attack)
    found: list[Tensor] = []
    converged: list[bool] = []
    winners: list[str] = []
    for start in range(0, len(images.x), at_once):
        rows = range(start, min(start + at_once, len(images.x)))
        seen = [
            gl.observe(task, {"x": images.x[i : i + 1], "y": images.y[i : i + 1]}, training, key=f"image{i}")
            for i in rows
        ]
        result = method.run(task, seen, gl.Knowledge(training=training), seed)
        found.append(result.batch["x"][:, 0])
        converged += result.checks.converged
        winners += result.settings.get("winner", [method.name] * len(seen))
        print(f"{rows.stop} of {len(images.x)} reconstructed", flush=True)
    return torch.cat(found), converged, winners


def words(task: gl.Task, found: Tensor, truth: Tensor, blind: Tensor, converged: list[bool], cell: int) -> list[str]:
    """The word of every cell of so many targets, each scored among other real images."""
    said = []
    for start in range(0, len(truth) - cell + 1, cell):
        rows = torch.arange(start, start + cell)
        others = torch.tensor([i for i in range(len(truth)) if i not in set(rows.tolist())])[:GALLERY]
        gallery: Batch = {"x": truth[others]}
        scored = scores_of(
            {"x": found[rows][:, None]},
            {"x": truth[rows][:, None]},
            blind[rows][:, None],
            gallery,
            {"x": task.fields["x"]},
            torch.zeros(cell, dtype=torch.bool),
        )
        about = {"cell": "0" * 16, "status": "done", "control": False, "attack": "auto", "defence": "none"}
        about |= {"form": "undefended", "round": 0, "seed": 0, "examples": 1, "targets": cell}
        rows_of_cell = [
            {
                **about,
                "target": t,
                **held,
                "converged": converged[start + t],
                "match": None,
                "checks": [],
                "seconds": 0.0,
            }
            for t, held in enumerate(scored)
        ]
        said.append(summaries_of(rows_of_cell)[0].word)
    return said


def measure(data: str, attack: str, count: int, size: int, seed: int) -> dict[str, Any]:
    images = gl.data.load(data)[torch.arange(count)]
    images = replace(images, x=torch.nn.functional.adaptive_avg_pool2d(images.x, size))
    task, began = task_of(images), time.perf_counter()
    found, converged, winners = reconstructions(task, images, attack, seed)
    truth, one, two = images.x, torch.roll(torch.arange(count), 1), torch.roll(torch.arange(count), 7)
    told: dict[str, Any] = {
        "data": data,
        "attack": attack,
        "images": count,
        "size": size,
        "seeds": [seed],
        "seconds": time.perf_counter() - began,
    }
    told |= {"winners": dict(Counter(winners)), "gallery": GALLERY}
    psnr = lambda a, b: -10 * (a.double().clamp(0, 1) - b).square().flatten(1).mean(1).clamp_min(1e-12).log10()  # noqa: E731
    told["psnr"] = {
        "undefended": {"mean": float(psnr(found, truth).mean()), "least": float(psnr(found, truth).min())},
        "unrelated": {"mean": float(psnr(found[one], truth).mean()), "most": float(psnr(found[one], truth).max())},
    }
    for cell in (1, CELL):
        for name, own, blind, done in (
            ("undefended", found, found[one], converged),
            ("unrelated", found[one], found[two], [converged[int(i)] for i in one]),
        ):
            said = words(task, own, truth, blind, done, cell)
            told[f"{name}, {cell} per cell"] = {
                "cases": len(said),
                "words": dict(Counter(said)),
                "leaks": said.count("leaks") / len(said),
            }
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="faces")
    parser.add_argument("--attack", default="auto:preset=quick,certify=False")
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--size", type=int, default=14)
    parser.add_argument("--seed", type=int, default=0, help="of the attacks; the network's weights are drawn with 0")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "false-alarms.json")
    given = parser.parse_args()
    told = {"environment": describe(), **measure(given.data, given.attack, given.images, given.size, given.seed)}
    print(json.dumps({name: value for name, value in told.items() if name != "environment"}, indent=1))
    given.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
