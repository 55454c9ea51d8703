"""How much was recovered: scores by the kind of data, labels, baselines, re-identification. Only here is truth used.

The kind of a field (`scenario.kinds`) says how examples are compared; every score is per example, (N,). Images are
float tensors (N, C, H, W), clamped to [0, 1]. Means over examples are taken last: the PSNR of a mean MSE is lower than
the mean PSNR (Jensen). Default scores never use an oracle; a paper's oracle score has an explicit name (`s004_compat`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
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
from gradleak.scenario.kinds import Category, Image, Kind

if TYPE_CHECKING:
    from gradleak.metrics.perceptual import LPIPS
    from gradleak.scenario.fields import Field

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


def _distance(which: str | Distance | None, usual: Distance, kind: Kind, lpips: LPIPS | None) -> Distance:
    """A distance by its name, which only those of images have; None: the usual one of the kind."""
    if which is None or callable(which):
        return which or usual
    known = DISTANCES if lpips is None else {**DISTANCES, "lpips": lpips.pairwise}
    if not kind.pictures:
        raise ValueError(f"Named distances compare images; x is of kind {kind.name!r}, given {which!r}. Leave it out.")
    if which not in known:
        raise ValueError(f"Known distances are {', '.join(known)}; given {which!r} (lpips needs lpips=LPIPS('vgg')).")
    return known[which]


def image_scores(found: Tensor, truth: Tensor, *, lpips: LPIPS | None = None) -> dict[str, Tensor]:
    """Every image score by name, each (N,)."""
    return _scores(Image(), lpips, found, truth)


def _scores(kind: Kind, lpips: LPIPS | None, found: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Every score of comparable pairs by name, each (N,)."""
    scores = kind.scores(found, truth)
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
    others = None if others is None else to_unit(others).to(truth.device)
    return _baselines(Image(), to_unit(truth), others, labels, lpips)


def _baselines(
    kind: Kind, truth: Tensor, others: Tensor | None, labels: tuple[Tensor, Tensor] | None, lpips: LPIPS | None
) -> dict[str, dict[str, Tensor]]:
    """The guesses of the kind, and the nearest of `others`; all comparable."""
    score = partial(_scores, kind, lpips)
    result = {name: score(guess, truth) for name, guess in kind.guesses(truth, others).items()}
    if others is None:
        return result
    cost = kind.distance(truth, others).masked_fill(kind.same(truth, others), torch.inf)
    costs = {"nearest other": cost}
    if labels is not None:
        different = labels[0].to(cost.device)[:, None] != labels[1].to(cost.device)
        costs["nearest of class"] = cost.masked_fill(different, torch.inf)
    for name, allowed in costs.items():
        least, nearest = allowed.min(1)
        scores = score(others[nearest], truth)
        result[name] = {key: value.masked_fill(least.isinf(), torch.nan) for key, value in scores.items()}
    return result


# --- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scores:
    """The scores of a reconstruction. Per-example tensors are (targets, examples), in the order of the private ones.

    `values` has the measures of the kind by name (and lpips, if asked for); for images `psnr`, `ssim`, `mse` and
    `lpips` are shorthands. If targets have different numbers of examples, missing ones have `present` false and NaN.
    """

    values: dict[str, Tensor]
    assignment: Tensor  # which reconstruction was matched to the private example
    finite: Tensor  # whether that reconstruction had finite values only
    diverged: Tensor  # (targets,): reported by the attack, or non-finite values
    rank: Tensor | None = None  # of the true example in the gallery; 1 = re-identified (a float, for NaN)
    gallery_size: Tensor | None = None
    labels: dict[str, Tensor] = field(default_factory=dict)  # each (targets,)
    baselines: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # baseline -> score -> (targets, examples)
    notes: tuple[str, ...] = ()
    kind: Kind = Image()
    further: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # other fields -> score -> (targets, examples)

    @property
    def psnr(self) -> Tensor:
        return self.values["psnr"]

    @property
    def ssim(self) -> Tensor:
        return self.values["ssim"]

    @property
    def mse(self) -> Tensor:
        return self.values["mse"]

    @property
    def lpips(self) -> Tensor | None:
        return self.values.get("lpips")

    @property
    def present(self) -> Tensor:
        return ~self.values[self.kind.headline.name].isnan()

    def hits(self) -> dict[str, Tensor]:
        """Which examples pass each named threshold, (targets, examples).

        A non-finite one passes none: an image is scored as black then, which can look similar to a dark image.
        """
        first = None if self.rank is None else self.rank == 1
        return {name: value & self.finite for name, value in self.kind.hits(self.values, first).items()}

    def summary(self) -> dict[str, Any]:
        """Plain numbers, ready for JSON: mean, std and median of each score, rates, labels, baselines."""
        result: dict[str, Any] = {
            name: {"mean": float(v.mean()), "std": float(v.std(correction=0)), "median": float(v.quantile(0.5))}
            for name, v in ((name, value[self.present]) for name, value in self.values.items())
        }
        result["rates"] = {name: float(value[self.present].double().mean()) for name, value in self.hits().items()}
        if self.rank is not None and self.gallery_size is not None:
            result["rank"] = {"median": float(self.rank.nanquantile(0.5))}
            result["chance"] = float((1 / self.gallery_size).nanmean())
        result["diverged"] = float(self.diverged.double().mean())
        if self.kind.pictures:
            result["capped"] = int((self.mse < EXACT).sum())
        result["labels"] = {name: float(value.double().mean()) for name, value in self.labels.items()}
        if self.further:
            result["further"] = {
                name: {measure: float(value.nanmean()) for measure, value in scores.items()}
                for name, scores in self.further.items()
            }
        result["baselines"] = {
            name: {key: float(value.nanmean()) for key, value in scores.items()}
            for name, scores in self.baselines.items()
        }
        return result

    def __str__(self) -> str:
        summary, wide = self.summary(), max(6, *(len(name) + 1 for name in self.values))
        columns = ("mean", "std", "median")
        heads = "".join(f"{name:>10}" for name in columns) + "".join(f"{name:>18}" for name in self.baselines)
        lines = ["targets x examples: {} x {}".format(*self.finite.shape), f"{'':{wide}}{heads}"]
        for name in self.values:
            columns_text = "".join(f"{summary[name][column]:10.4g}" for column in columns)
            baselines_text = "".join(f"{scores[name]:18.4g}" for scores in summary["baselines"].values())
            lines.append(f"{name:{wide}}{columns_text}{baselines_text}")
        lines.append("rates: " + ", ".join(f"{name} {value:.0%}" for name, value in summary["rates"].items()))
        if "chance" in summary:
            lines[-1] += f" (rank 1 by chance {summary['chance']:.1%})"
        if self.labels:
            lines.append("labels: " + ", ".join(f"{name} {value:.3g}" for name, value in summary["labels"].items()))
        for name, means in summary.get("further", {}).items():
            lines.append(f"{name}: " + ", ".join(f"{measure} {value:.3g}" for measure, value in means.items()))
        capped = f"; at the cap of 120 dB: {summary['capped']}" if "capped" in summary else ""
        lines.append(f"diverged: {summary['diverged']:.0%} of targets{capped}")
        return "\n".join([*lines, *self.notes])


def compare(
    found: Any,
    truth: Mapping[str, Tensor],
    *,
    fields: Mapping[str, Any] | None = None,
    gallery: Mapping[str, Tensor] | None = None,
    lpips: LPIPS | None = None,
    matching: str | Distance | None = None,
    identify_by: str | Distance | None = None,
) -> Scores:
    """Score a reconstruction: match examples one-to-one per target, then score the matched pairs; labels separately.

    `found.batch["x"]` is (targets, examples, ...); `truth["x"]` the same or, shared by all targets, without the first
    axis; `gallery["x"]` (M, ...) are real examples that are not the client's, with `gallery["y"]` for the same-class
    baseline. All are in model-input space, and `fields["x"].kind` (of the fields of `found` by default) says how they
    are compared. Other private fields are scored by their kinds in the order of x, a class label also as a multiset.

    `matching` and `identify_by` are a `Distance` or, for images, "mse", "ssim" or "lpips"; None: those of the kind.
    """
    fields = found.fields if fields is None else fields
    pairs = _Pairs.of(found, truth, fields, gallery)
    kind, present = pairs.kind, pairs.present
    if lpips is not None and not kind.pictures:
        raise ValueError(f"LPIPS compares images; x is of kind {kind.name!r}. Leave lpips out.")
    assignment = pairs.assignment(_distance(matching, kind.distance, kind, lpips))
    matched = torch.arange(len(present), device=present.device)[:, None], assignment
    finite = pairs.finite[matched]
    answers, guesses, both = pairs.truth[present], pairs.guess[matched][present], None
    measured = _scores(kind, lpips, guesses, answers)
    ranking: dict[str, Tensor] = {}
    if pairs.others is not None:
        look_up = _distance(identify_by, kind.look_up, kind, lpips)
        ranks = identification_rank(guesses, answers, pairs.others, distance=look_up, same=kind.same)
        ranking = {name: pairs.spread(value) for name, value in zip(("rank", "gallery_size"), ranks, strict=True)}
    labels: dict[str, Tensor] = {}
    labelled = _is_label(fields.get("y"))
    if "y" in found.batch and "y" in truth and labelled:
        guessed, true = (_indices(y.to(present.device)) for y in (found.batch["y"], truth["y"]))
        true = true.expand_as(assignment).masked_fill(~present, -1)
        labels = label_scores(guessed.masked_fill(~present, -1), true, getattr(fields.get("y"), "classes", None))
        labels["matched"] = ((guessed[matched] == true) & present).sum(1) / present.sum(1)
        if gallery is not None and "y" in gallery:
            both = true[present], _indices(gallery["y"])
    rest = [name for name in fields if name in found.batch and name in truth and not fields[name].public]
    further = {
        name: _further(name, fields[name], (found.batch[name], truth[name], (gallery or {}).get(name)), pairs, matched)
        for name in rest
        if name != "x" and not (name == "y" and labelled)
    }
    compared = _baselines(kind, answers, pairs.others, both, lpips)
    return Scores(
        {name: pairs.spread(value) for name, value in measured.items()},
        assignment=assignment,
        finite=finite,
        diverged=_diverged(found, (~finite & present).any(1)),
        **ranking,
        labels=labels,
        baselines={
            name: {key: pairs.spread(value) for key, value in scores.items()} for name, scores in compared.items()
        },
        notes=() if lpips is None else (lpips.note(*pairs.truth.shape[-2:]),),
        kind=kind,
        further=further,
    )


def _is_label(target: Field | None) -> bool:
    """Is y one class for each example? Only then is it a multiset of labels."""
    return target is None or target.kind.name == Category.name


@dataclass(frozen=True, eq=False)
class _Pairs:
    """x of a reconstruction and of the truth, (targets, examples, ...), and of the gallery (M, ...); all comparable."""

    kind: Kind
    guess: Tensor
    truth: Tensor
    others: Tensor | None
    finite: Tensor  # (targets, examples), in the order of the reconstruction
    examples: tuple[int, ...]  # of each target; the rest is padding

    @staticmethod
    def of(
        found: Any, truth: Mapping[str, Tensor], fields: Mapping[str, Any], gallery: Mapping[str, Tensor] | None
    ) -> _Pairs:
        field, raw = fields["x"], found.batch["x"].detach()
        if raw.dim() != 2 + len(field.shape):
            shape = "C, H, W" if field.kind.pictures else ", ".join(map(str, field.shape))
            given = f'batch["x"] (targets, examples, {shape}); given {tuple(raw.shape)}'
            raise ValueError(f"compare takes {field.kind.noun[1]}, {given}.")
        exact = truth["x"].detach().to(raw.device)
        if exact.shape not in (raw.shape, raw.shape[1:]):
            raise ValueError(f"The reconstruction is {tuple(raw.shape)} but the truth {tuple(exact.shape)}.")
        reference = None if gallery is None else gallery["x"].to(raw.device)
        comparable = partial(field.kind.comparable, field=field, reference=reference)
        return _Pairs(
            field.kind,
            comparable(raw),
            comparable(exact).expand_as(raw),
            None if reference is None else comparable(reference),
            raw.isfinite().reshape(*raw.shape[:2], -1).all(2),
            tuple(getattr(found, "examples", raw.shape[1:2] * len(raw))),
        )

    @property
    def present(self) -> Tensor:
        """Which examples are no padding, (targets, examples)."""
        counts = torch.tensor(self.examples, device=self.finite.device)
        return torch.arange(self.finite.shape[1], device=counts.device) < counts[:, None]

    def assignment(self, distance: Distance) -> Tensor:
        """The reconstruction of each private example, (targets, examples); padding stays where it is."""
        assignment = torch.arange(self.finite.shape[1], device=self.finite.device).repeat(len(self.finite), 1)
        for row, n in enumerate(self.examples):  # the cost's rows are private examples, so all is in their order
            assignment[row, :n] = match(cost_matrix(self.truth[row, :n], self.guess[row, :n], distance=distance))
        return assignment

    def spread(self, value: Tensor) -> Tensor:
        """One value for each example as (targets, examples), with NaN for padding."""
        blank = precise(self.present)
        return blank.new_full(blank.shape, torch.nan).masked_scatter(self.present, value.to(blank))


def _further(
    name: str,
    field: Field,
    values: tuple[Tensor, Tensor, Tensor | None],
    pairs: _Pairs,
    matched: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """Scores of another private field by its kind, in the order of x. `values`: found, true, and of the gallery."""
    found, truth, reference = (None if value is None else value.detach().to(pairs.finite.device) for value in values)
    assert found is not None
    assert truth is not None
    guess, real = (field.kind.comparable(value, field, reference) for value in (found, truth))
    if real.shape not in (guess.shape, guess.shape[1:]):
        raise ValueError(f"{name} of the reconstruction is {tuple(guess.shape)} but the truth {tuple(real.shape)}.")
    here = pairs.present
    scores = field.kind.scores(guess[matched][here], real.expand_as(guess)[here])
    return {measure: pairs.spread(value) for measure, value in scores.items()}


def _diverged(found: Any, unscored: Tensor) -> Tensor:
    """Targets that the attack reports as diverged, or whose reconstruction is not finite."""
    reported = getattr(found, "diverged", None)
    if reported is None:
        return unscored
    reported = reported if reported.dim() == 1 else reported.gather(1, found.chosen[:, None])[:, 0]
    return unscored | reported.to(unscored.device)
