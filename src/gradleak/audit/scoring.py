"""From arrays to scores: the same function scores a cell when it is run and when its folder is read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradleak import metrics
from gradleak.core.files import finite
from gradleak.scenario.task import Batch, Field

if TYPE_CHECKING:
    from gradleak.metrics.perceptual import LPIPS

UNRELATED = "unrelated update"


@dataclass(frozen=True, eq=False)
class Found:
    """What `metrics.compare` needs to know of a reconstruction."""

    batch: Batch
    fields: Mapping[str, Field]
    diverged: Tensor  # (targets,)


def scores_of(
    found: Batch,
    truth: Batch,
    unrelated: Tensor | None,
    gallery: Batch,
    fields: Mapping[str, Field],
    diverged: Tensor,
    lpips: LPIPS | None = None,
) -> list[dict[str, Any]]:
    """The scored part of the rows, one per target. Batches are (targets, examples, ...), in model-input space.

    `unrelated` (any number, examples, ...) are reconstructions from updates of other people's images, by the same
    attack. Target t is compared with the one of number t modulo their number: what an attack shows of a target that it
    has seen nothing of, by its prior, its start and luck alone.
    """
    scores = metrics.compare(Found(found, fields, diverged), truth, gallery=gallery, lpips=lpips)
    hits = scores.hits()
    assert scores.rank is not None  # there is always a gallery
    assert scores.gallery_size is not None
    baselines = {name: dict(values) for name, values in scores.baselines.items()}
    if unrelated is not None and len(unrelated):
        nothing = unrelated[torch.arange(len(truth["x"])) % len(unrelated)]
        quiet = torch.zeros(len(nothing), dtype=torch.bool)
        blind = metrics.compare(Found({"x": nothing}, fields, quiet), truth, gallery=gallery, lpips=lpips)
        told = blind.hits()
        baselines[UNRELATED] = {**blind.images(), "rank1": told["rank1"], "recovered": told["recovered"]}
    return [
        finite(
            {
                "scores": {**_at(scores.images(), target), "rank": scores.rank[target].long().tolist()},
                "gallery_size": scores.gallery_size[target].long().tolist(),
                "hits": _at(hits, target),
                "assignment": scores.assignment[target].tolist(),
                "labels": _at(scores.labels, target),
                **({"drawn": drawn} if (drawn := _drawn(found, truth, fields, scores.assignment, target)) else {}),
                "baselines": {name: _at(values, target) for name, values in baselines.items()},
                "diverged": bool(scores.diverged[target]),
            }
        )
        for target in range(len(truth["x"]))
    ]


def _drawn(
    found: Batch, truth: Batch, fields: Mapping[str, Field], assignment: Tensor, target: int
) -> dict[str, dict[str, float]]:
    """How close the fields that are neither image nor label came, such as step and noise of a denoiser's client.

    Of a whole number how often it is right and the mean distance, of a tensor the cosine; examples as images matched.
    """
    told: dict[str, dict[str, float]] = {}
    for name in (name for name in fields if name not in ("x", "y") and name in found and name in truth):
        guess = found[name][target][assignment[target].to(found[name].device)]
        real = truth[name][target].to(guess.device)
        if fields[name].classes is None:
            pair = guess.flatten(1).double(), real.flatten(1).double()
            told[name] = {"cosine": float(torch.cosine_similarity(*pair).mean())}
        else:
            off = ((guess.argmax(-1) if guess.is_floating_point() else guess) - real).abs().double()
            told[name] = {"right": float((off == 0).double().mean()), "off_by": float(off.mean())}
    return told


def _at(values: Mapping[str, Tensor], target: int) -> dict[str, Any]:
    return {name: value[target].tolist() for name, value in values.items()}
