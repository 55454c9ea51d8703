"""The generative prior at 32 x 32: a compact StyleGAN2 on CIFAR-10, in about 8 minutes on an H200.

It learns from the training part only, without the rows that --attacked names; the file remembers every image it saw, so
that `gradleak prior check` can tell whether an audit attacks one of them. The same folder goes on where a run stopped.
Of the steps that are scored (--every, and the last) the one with the lowest score is kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from gradleak.core import registry
from gradleak.core.environment import describe
from gradleak.generators import Card
from gradleak.priors import recipes  # noqa: F401 (registers them)
from gradleak.priors.splits import Split
from gradleak.priors.training import PriorTraining, train


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--size", type=int, help="of the images; not given: their own")
    parser.add_argument("--attacked", default="", help="rows of the training part that stay unseen: 7000-9999")
    parser.add_argument("--generator", default="stylegan2")
    parser.add_argument("--conditional", action="store_true")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--r1", type=float, default=0.1)
    parser.add_argument("--average", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=2500)
    parser.add_argument("--score-images", type=int, default=5000)
    parser.add_argument("--precision", default="half")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("runs/prior-cifar10"))
    return parser.parse_args()


def main() -> None:
    given = options()
    rows = None
    if given.attacked:
        low, _, high = given.attacked.partition("-")
        unseen = set(range(int(low), int(high or low) + 1))
        whole, _ = Split(given.data, size=given.size).taken()
        rows = [row for row in range(len(whole)) if row not in unseen]
    images, told = Split(given.data, rows=rows, size=given.size).taken()
    how = PriorTraining(
        registry.parse("generator", given.generator),
        conditional=given.conditional,
        batch=given.batch,
        r1=given.r1,
        mirror=True,
        average=given.average,
        precision=given.precision,
    )
    print(f"{len(images):,} images, {given.generator}, on {given.device}", flush=True)
    done = train(
        how,
        images.x,
        images.y,
        classes=images.classes,
        steps=given.steps,
        most_seconds=60 * given.minutes,
        out=given.out,
        every=given.every,
        report=500,
        score_images=given.score_images,
        device=torch.device(given.device),
        card=Card(images.source, told),
        progress=lambda row: print(json.dumps(row), flush=True),
    )
    last = done.metrics[-1]
    summary = {
        "images_a_second": round(last["images"] / last["seconds"]),
        "steps": last["step"],
        "seconds": last["seconds"],
        "megabytes": round(done.path.stat().st_size / 1e6, 2),
        "score": dict(done.card.score),
        "environment": describe(),
    }
    (done.folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(done.table())
    print(json.dumps({name: value for name, value in summary.items() if name != "environment"}, indent=2))


if __name__ == "__main__":
    main()
