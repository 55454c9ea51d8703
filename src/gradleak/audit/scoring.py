"""From arrays to scores: one function scores a cell when it runs and when its folder is read again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradleak import metrics
from gradleak.core.files import finite
from gradleak.core.tree import Params
from gradleak.scenario.objectives import NextToken, Supervised
from gradleak.scenario.task import Batch, Field, Task

if TYPE_CHECKING:
    from gradleak.metrics.perceptual import LPIPS

UNRELATED = "unrelated update"
GUESS = "next-token guess"


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
    guess: Tensor | None = None,
) -> list[dict[str, Any]]:
    """The scored part of the rows, one per target. Batches are (targets, examples, ...), in model-input space.

    `unrelated` (any number, examples, ...): reconstructions by the same attack from updates of other people's data.
    Target t is compared with number t modulo their number: what the attack shows of a target without its update, by
    prior, start and luck alone. `guess` (targets, examples, ...): what the attacked model guesses of each text.
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
        baselines[UNRELATED] = {**blind.values, "rank1": blind_hits["rank1"], "recovered": blind_hits["recovered"]}
    if guess is not None:
        none_diverged = torch.zeros(len(guess), dtype=torch.bool)
        baselines[GUESS] = metrics.compare(_Scorable({"x": guess}, fields, none_diverged), truth).values
    further = {
        name: {**values, **_distances(name, found, truth, fields, scores.assignment)}
        for name, values in scores.further.items()
    }
    return [
        finite(
            {
                "scores": {**_at(scores.values, target), "rank": scores.rank[target].long().tolist()},
                "gallery_size": scores.gallery_size[target].long().tolist(),
                "hits": _at(hits, target),
                "assignment": scores.assignment[target].tolist(),
                "labels": _at(scores.labels, target),
                **({"drawn": {name: _means(each, target) for name, each in further.items()}} if further else {}),
                "baselines": {name: _at(values, target) for name, values in baselines.items()},
                "diverged": bool(scores.diverged[target]),
            }
        )
        for target in range(len(truth["x"]))
    ]


def next_tokens(task: Task, weights: Params, buffers: Params, texts: Batch) -> Tensor | None:
    """Each token of texts (examples, ...) as a language model guesses it from the private tokens before it.

    What the model knows without any update, for somebody who is told all earlier tokens: an attack that orders tokens
    should be well above it. The first place has no guess (-1). None: the model does not predict the next token.
    """
    objective = task.objective
    if not isinstance(objective, Supervised) or not isinstance(objective.meet, NextToken):
        return None
    task = task.copied()
    each = ({name: value[row : row + 1] for name, value in texts.items()} for row in range(len(texts["x"])))
    with torch.no_grad():
        guesses = [task.output(weights, one, buffers).argmax(-1) for one in each]  # each (1, length)
    return torch.nn.functional.pad(torch.cat(guesses)[:, :-1], (1, 0), value=-1)


def _distances(
    name: str, found: Batch, truth: Batch, fields: Mapping[str, Field], assignment: Tensor
) -> dict[str, Tensor]:
    """How far a further field is off, (targets, examples): a class by its distance, unbounded numbers by the cosine.

    The step and the noise of a denoiser's client are judged by these. Examples are paired as x is.
    """
    field, place = fields[name], assignment.to(found[name].device)
    guess = found[name][torch.arange(len(place), device=place.device)[:, None], place]
    real = truth[name].to(guess.device)
    if field.shape and field.continuous and not field.bounded:
        return {"cosine": torch.cosine_similarity(guess.flatten(2).double(), real.flatten(2).double(), dim=-1)}
    if field.shape or field.continuous:
        return {}
    return {"off_by": ((guess.argmax(-1) if guess.is_floating_point() else guess) - real).abs().double()}


def _means(values: Mapping[str, Tensor], target: int) -> dict[str, float]:
    return {name: float(value[target].mean()) for name, value in values.items()}


def _at(values: Mapping[str, Tensor], target: int) -> dict[str, Any]:
    return {name: value[target].tolist() for name, value in values.items()}
