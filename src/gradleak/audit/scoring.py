"""From arrays to scores: one function scores a cell when it runs and when its folder is read again."""

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
class _Scorable:
    """What `metrics.compare` needs of a reconstruction."""

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

    `unrelated` (any number, examples, ...): reconstructions by the same attack from updates of other people's images.
    Target t is compared with number t modulo their number: what the attack shows of a target without its update, by
    prior, start and luck alone.
    """
    scores = metrics.compare(_Scorable(found, fields, diverged), truth, gallery=gallery, lpips=lpips)
    hits = scores.hits()
    assert scores.rank is not None  # there is always a gallery
    assert scores.gallery_size is not None
    baselines = {name: dict(values) for name, values in scores.baselines.items()}
    if unrelated is not None and len(unrelated):
        nothing = unrelated[torch.arange(len(truth["x"])) % len(unrelated)]
        none_diverged = torch.zeros(len(nothing), dtype=torch.bool)
        blind = metrics.compare(_Scorable({"x": nothing}, fields, none_diverged), truth, gallery=gallery, lpips=lpips)
        blind_hits = blind.hits()
        baselines[UNRELATED] = {**blind.images(), "rank1": blind_hits["rank1"], "recovered": blind_hits["recovered"]}
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
    """Scores of fields that are neither image nor label, such as step and noise of a denoiser's client.

    For a whole number: how often it is right, and the mean distance. For a tensor: the cosine. Examples are paired as
    their images are.
    """
    scores: dict[str, dict[str, float]] = {}
    for name in (name for name in fields if name not in ("x", "y") and name in found and name in truth):
        guess = found[name][target][assignment[target].to(found[name].device)]
        real = truth[name][target].to(guess.device)
        if fields[name].classes is None:
            pair = guess.flatten(1).double(), real.flatten(1).double()
            scores[name] = {"cosine": float(torch.cosine_similarity(*pair).mean())}
        else:
            off = ((guess.argmax(-1) if guess.is_floating_point() else guess) - real).abs().double()
            scores[name] = {"right": float((off == 0).double().mean()), "off_by": float(off.mean())}
    return scores


def _at(values: Mapping[str, Tensor], target: int) -> dict[str, Any]:
    return {name: value[target].tolist() for name, value in values.items()}
