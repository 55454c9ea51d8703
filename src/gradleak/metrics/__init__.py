"""How much was recovered: image scores, label scores, baselines, re-identification. Only here is the truth used.

Images are float tensors (N, C, H, W), clamped to [0, 1]; every score is per image, (N,). Means over images are taken
last: the PSNR of a mean MSE is lower than the mean PSNR (Jensen). Default scores never use an oracle; a paper's oracle
score has an explicit name (`s004_compat`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from gradleak.core.assignment import Distance, cost_matrix, identification_rank, match, pairwise_mse
from gradleak.core.similarity import (
    EXACT,
    capped,
    grey,
    mse,
    pairwise_ssim_distance,
    precise,
    psnr,
    psnr_ggl,
    s004_compat,
    ssim,
    ssim_skimage,
    ssim_zero_pad_gauss,
    to_unit,
)

if TYPE_CHECKING:
    from gradleak.metrics.perceptual import LPIPS

__all__ = ["DISTANCES", "EXACT", "IMAGE_SCORES", "Scores", "baselines", "capped", "compare", "grey", "image_scores"]
__all__ += ["label_scores", "mse", "psnr", "psnr_ggl", "s004_compat", "ssim", "ssim_skimage", "ssim_zero_pad_gauss"]
__all__ += ["to_unit"]

# --- labels ----------------------------------------------------------------------------------------------------------


def _indices(labels: Tensor) -> Tensor:
    """Indices from indices or, if floating point, from a simplex; -1 means no label (padding, or NaN)."""
    if not labels.is_floating_point():
        return labels.long()
    return labels.argmax(-1).masked_fill(labels.isnan().any(-1), -1)


def label_scores(found: Tensor, truth: Tensor, classes: int | None = None) -> dict[str, Tensor]:
    """Scores of the multiset of labels; arguments (..., B) indices or (..., B, classes) simplex, results (...).

    An index of -1 is no label.

    With true counts n and recovered counts m per class: `multiset_accuracy` = sum_c min(m_c, n_c) / B, iLRG's `irec`;
    `leacc`: share of classes whose presence is right; `lnacc`: share of classes with the right count, over all
    classes, and `lnacc_present` over the present ones (iLRG: Ma et al. 2023); `misplaced`: number of wrong labels,
    sum_c |m_c - n_c| / 2 (DLFA: Dimitrov et al. 2022).
    """
    found, truth = _indices(found), _indices(truth)
    classes = max(classes or 0, int(found.max()) + 1, int(truth.max()) + 1)
    guessed, true = (one_hot(y + 1, classes + 1)[..., 1:].sum(-2) for y in (found, truth.to(found.device)))
    recovered = torch.minimum(guessed, true).sum(-1) / true.sum(-1)
    present, exact = true > 0, guessed == true
    return {
        "multiset_accuracy": recovered,
        "leacc": ((guessed > 0) == present).double().mean(-1),
        "lnacc": exact.double().mean(-1),
        "lnacc_present": (exact & present).sum(-1) / present.sum(-1),
        "irec": recovered,
        "misplaced": (guessed - true).abs().sum(-1) / 2,
    }


# --- baselines -------------------------------------------------------------------------------------------------------

DISTANCES: dict[str, Distance] = {"mse": pairwise_mse, "ssim": pairwise_ssim_distance}
IMAGE_SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mse": mse, "psnr": psnr, "ssim": ssim}


def _distance(which: str | Distance, lpips: LPIPS | None) -> Distance:
    if callable(which):
        return which
    known = DISTANCES if lpips is None else {**DISTANCES, "lpips": lpips.pairwise}
    if which not in known:
        raise ValueError(f"Known distances are {', '.join(known)}; given {which!r} (lpips needs lpips=LPIPS('vgg')).")
    return known[which]


def image_scores(found: Tensor, truth: Tensor, *, lpips: LPIPS | None = None) -> dict[str, Tensor]:
    """Every image score by name, each (N,)."""
    scores = {name: score(found, truth) for name, score in IMAGE_SCORES.items()}
    return scores if lpips is None else {**scores, "lpips": lpips(to_unit(found), to_unit(truth)).to(scores["mse"])}


def baselines(
    truth: Tensor,
    others: Tensor | None = None,
    *,
    labels: tuple[Tensor, Tensor] | None = None,
    lpips: LPIPS | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Scores that need no gradient, to compare an attack with.

    A mid-grey image; with `others` (M, C, H, W), real images that are not the client's, their mean and, for each
    private image, the nearest of them by MSE (an oracle's choice: the best possible lookup); with `labels=((N,), (M,))`
    also the nearest of the same class, NaN if there is none. Copies of the private image do not count as others.
    """
    truth = to_unit(truth)
    result = {"mid-grey": image_scores(torch.full_like(truth, 0.5), truth, lpips=lpips)}
    if others is None:
        return result
    others = to_unit(others).to(truth.device)
    result["mean image"] = image_scores(others.mean(0).expand_as(truth), truth, lpips=lpips)
    cost = pairwise_mse(truth, others)
    cost = cost.masked_fill(cost < EXACT, torch.inf)
    costs = {"nearest other": cost}
    if labels is not None:
        different = labels[0].to(cost.device)[:, None] != labels[1].to(cost.device)
        costs["nearest of class"] = cost.masked_fill(different, torch.inf)
    for name, allowed in costs.items():
        least, nearest = allowed.min(1)
        scores = image_scores(others[nearest], truth, lpips=lpips)
        result[name] = {key: value.masked_fill(least.isinf(), torch.nan) for key, value in scores.items()}
    return result


# --- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of a reconstruction. Per-image tensors are (targets, examples), in the order of the private images.

    If targets have different numbers of examples, missing ones have `present` false and scores NaN.
    """

    mse: Tensor
    psnr: Tensor
    ssim: Tensor
    assignment: Tensor  # which reconstruction was matched to the private example
    finite: Tensor  # whether that reconstruction had finite pixels only
    diverged: Tensor  # (targets,): reported by the attack, or non-finite pixels
    lpips: Tensor | None = None
    rank: Tensor | None = None  # of the true image in the gallery; 1 = re-identified (a float, for NaN)
    gallery_size: Tensor | None = None
    labels: dict[str, Tensor] = field(default_factory=dict)  # each (targets,)
    baselines: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # baseline -> score -> (targets, examples)
    notes: tuple[str, ...] = ()

    @property
    def present(self) -> Tensor:
        return ~self.mse.isnan()

    def images(self) -> dict[str, Tensor]:
        """The image scores by name."""
        return {name: value for name in (*IMAGE_SCORES, "lpips") if (value := getattr(self, name)) is not None}

    def hits(self) -> dict[str, Tensor]:
        """Which images pass each named threshold, (targets, examples).

        A non-finite image passes none: it is scored as black, which can look similar to a dark image.
        """
        passed = {"ssim>0.5": self.ssim > 0.5, "psnr>18": self.psnr > 18, "psnr>20": self.psnr > 20}
        if self.rank is not None:
            passed["rank1"] = self.rank == 1
            passed["recovered"] = passed["ssim>0.5"] & passed["psnr>18"] & passed["rank1"]
        return {name: value & self.finite for name, value in passed.items()}

    def summary(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON: mean, std and median of each score, rates, labels, baselines."""
        result: dict[str, Any] = {
            name: {"mean": float(v.mean()), "std": float(v.std(correction=0)), "median": float(v.quantile(0.5))}
            for name, v in ((name, value[self.present]) for name, value in self.images().items())
        }
        result["rates"] = {name: float(value[self.present].double().mean()) for name, value in self.hits().items()}
        if self.rank is not None and self.gallery_size is not None:
            result["rank"] = {"median": float(self.rank.nanquantile(0.5))}
            result["chance"] = float((1 / self.gallery_size).nanmean())
        result["diverged"] = float(self.diverged.double().mean())
        result["capped"] = int((self.mse < EXACT).sum())
        result["labels"] = {name: float(value.double().mean()) for name, value in self.labels.items()}
        result["baselines"] = {
            name: {key: float(value.nanmean()) for key, value in scores.items()}
            for name, scores in self.baselines.items()
        }
        return result

    def __str__(self) -> str:
        summary = self.summary()
        columns = ("mean", "std", "median")
        heads = "".join(f"{name:>10}" for name in columns) + "".join(f"{name:>18}" for name in self.baselines)
        lines = ["targets x examples: {} x {}".format(*self.mse.shape), f"{'':6}{heads}"]
        for name in self.images():
            columns_text = "".join(f"{summary[name][column]:10.4g}" for column in columns)
            baselines_text = "".join(f"{scores[name]:18.4g}" for scores in summary["baselines"].values())
            lines.append(f"{name:6}{columns_text}{baselines_text}")
        lines.append("rates: " + ", ".join(f"{name} {value:.0%}" for name, value in summary["rates"].items()))
        if "chance" in summary:
            lines[-1] += f" (rank 1 by chance {summary['chance']:.1%})"
        if self.labels:
            lines.append("labels: " + ", ".join(f"{name} {value:.3g}" for name, value in summary["labels"].items()))
        lines.append(f"diverged: {summary['diverged']:.0%} of targets; at the cap of 120 dB: {summary['capped']}")
        return "\n".join([*lines, *self.notes])


def compare(
    found: Any,
    truth: Mapping[str, Tensor],
    *,
    fields: Mapping[str, Any] | None = None,
    gallery: Mapping[str, Tensor] | None = None,
    lpips: LPIPS | None = None,
    matching: str | Distance = "mse",
    identify_by: str | Distance = "ssim",
) -> Scores:
    """Score a reconstruction: match images one-to-one per target, then score the matched pairs; labels separately.

    `found.batch["x"]` is (targets, examples, C, H, W); `truth["x"]` the same or, shared by all targets, without the
    first axis; `gallery["x"]` (M, C, H, W) are real images that are not the client's, with `gallery["y"]` for the
    same-class baseline. All are in model-input space, and `fields["x"].unit` (those of `found` by default) maps them
    to [0, 1]. `matching` and `identify_by` are "mse", "ssim", "lpips" or a `Distance`.
    """
    fields = found.fields if fields is None else fields
    raw = found.batch["x"].detach()
    if raw.dim() != 5:
        raise ValueError(f'compare takes images, batch["x"] (targets, examples, C, H, W); given {tuple(raw.shape)}.')
    exact = truth["x"].detach().to(raw.device)
    if exact.shape not in (raw.shape, raw.shape[1:]):
        raise ValueError(f"The reconstruction is {tuple(raw.shape)} but the truth {tuple(exact.shape)}.")

    def unit(images: Tensor) -> Tensor:
        return to_unit(fields["x"].unit(precise(images)))  # in double precision the conversion costs no digits

    guess, real = unit(raw), unit(exact).expand_as(raw)
    targets, most = raw.shape[:2]
    examples = getattr(found, "examples", (most,) * targets)  # the rest is padding
    place = torch.arange(most, device=raw.device).expand(targets, most)
    present = place < torch.tensor(examples, device=raw.device)[:, None]
    distance = _distance(matching, lpips)
    assignment = place.clone()
    for row, n in enumerate(examples):  # the cost's rows are private images, so everything below is in their order
        assignment[row, :n] = match(cost_matrix(real[row, :n], guess[row, :n], distance=distance))
    matched = torch.arange(targets, device=raw.device)[:, None], assignment
    finite = raw.isfinite().flatten(2).all(2)[matched]
    diverged = (~finite & present).any(1)
    if (reported := getattr(found, "diverged", None)) is not None:  # per target, or per target and restart
        diverged |= (reported if reported.dim() == 1 else reported.gather(1, found.chosen[:, None])[:, 0]).to(
            raw.device
        )

    answers, others, both = real[present], None, None
    measured = image_scores(guess[matched][present], answers, lpips=lpips)
    if gallery is not None:
        others = unit(gallery["x"].to(raw.device))
        ranking = identification_rank(guess[matched][present], answers, others, distance=_distance(identify_by, lpips))
        measured["rank"], measured["gallery_size"] = ranking
    labels: dict[str, Tensor] = {}
    if "y" in found.batch and "y" in truth and (fields.get("y") is None or fields["y"].classes is not None):
        guessed, true = (_indices(y.to(raw.device)) for y in (found.batch["y"], truth["y"]))
        true = true.expand_as(assignment).masked_fill(~present, -1)
        labels = label_scores(guessed.masked_fill(~present, -1), true, getattr(fields.get("y"), "classes", None))
        labels["matched"] = ((guessed[matched] == true) & present).sum(1) / present.sum(1)
        if gallery is not None and "y" in gallery:
            both = true[present], _indices(gallery["y"])

    def spread(value: Tensor) -> Tensor:
        return real.new_full(present.shape, torch.nan).masked_scatter(present, value.to(real))

    compared = baselines(answers, others, labels=both, lpips=lpips)
    return Scores(
        **{name: spread(value) for name, value in measured.items()},
        assignment=assignment,
        finite=finite,
        diverged=diverged,
        labels=labels,
        baselines={name: {key: spread(value) for key, value in scores.items()} for name, scores in compared.items()},
        notes=() if lpips is None else (lpips.note(*raw.shape[-2:]),),
    )
