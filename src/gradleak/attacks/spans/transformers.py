"""One image off the patch embedding of a vision transformer, in closed form: gradleak's own, after APRIL."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradleak.attack import Composed, ReadOff, Reconstruction, missing_fields, require, supported, too_many
from gradleak.attack.cascade import given_of, part
from gradleak.attacks.spans import completion
from gradleak.attacks.spans.completion import LEVELS, Open, smoothest
from gradleak.attacks.spans.pairs import Pair, Plan, rounding, unpaired
from gradleak.attacks.spans.patches import PatchEmbedding, PatchEquations, Positions, patch_embedding
from gradleak.core.listeners import Share
from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.engine import Engine
from gradleak.identify import rounding_of
from gradleak.identify.span_certificate import LayerCertificate, SpanCertificate
from gradleak.parts.fields import Labels, ReadBy, label_rule
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Still, require_positive
from gradleak.parts.predictions import Replay, gradient, sent_entries
from gradleak.parts.protocols import Needs
from gradleak.parts.spaces import Pixels, as_given
from gradleak.parts.stage import Stage
from gradleak.parts.view import TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.fields import UnsupportedTask
from gradleak.scenario.fit import fits
from gradleak.scenario.observation import Knowledge, MissingKnowledge, Observation, Seen, as_targets
from gradleak.scenario.task import Batch, Task, TaskError

INDEPENDENT = 1e-4  # singular values of positions below this share of the largest do not tell them apart
LOST = 32.0  # grey levels: a mixture of patches with a larger error is open
WEAK = 0.25  # grey levels: a mixture with a larger error is settled again, by whole levels
MET, NEAR = 1e-3, 0.5  # of a proved image: the most residual of its equations, and expected error in grey levels


@dataclass(frozen=True, eq=False)
class Solved:
    """Patches, (patches, inputs) in model-input space, and what is not known of them.

    basis    (patches, k), mixtures of patches that are open or badly known
    errors   (k,), their expected errors in grey levels; infinite: open
    record   numbers of this target by name
    """

    patches: Tensor
    basis: Tensor
    errors: Tensor
    record: Mapping[str, float]


@named("vit", kind="attack", paper="gradleak's own; for learned positions after Lu et al., APRIL, CVPR 2022")
@dataclass(frozen=True)
class ViT(ReadOff):
    """Read one image off the patch embedding of a vision transformer: no optimisation, exact where patches <= width.

    tokens_p = W patch_p + b + position_p. With learned positions dL/dposition_p = dL/dtoken_p = delta_p is sent, and
    dL/dW = sum_p delta_p patch_p^T is a linear system in the patches. It holds summed over any number of SGD steps.
    Behind the usual first norm all delta_p have mean zero, so it tells width - 1 mixtures of patches. With more patches
    the others are invisible to the whole network, but for what W passes: the smoothest image is chosen and, if all
    pixels can then be whole levels of 8 bits, that image (`completion`). This proves itself: hundreds of pixels do not
    meet whole levels by chance.

    With fixed positions the gradient of the linear layers behind the first LayerNorm gives the span of the normed
    tokens (`parts.row_space`), and that of the patch embedding the span of the patches. W patch_p + constant_p lies in
    the first up to its mean, patch_p in the second: linear equations again. They need fewer tokens than the width, and
    independent positions: two-dimensional sines and cosines are not.

    Two images in one update are searched for (`pairs`). This needs learned positions, class labels, one local step, and
    fewer tokens in two images than a token has numbers. The images are proved only if they explain the whole update to
    rounding. All other updates of several images are refused: the differences of the images at every place lie in the
    spans of tokens and of patches, so every patch may move by all of them. `open_of_batch` counts these directions.

    `settings` of the result hold, per target: "positions", their weight, or "fixed"; "patches"; "rank", the number of
    mixtures of patches that are told; "smallest", the smallest of their singular values as a share of the largest, to
    be compared with "rounding", that of the observation; "residual", the relative distance from the equations; "open",
    the dimensions of the image that neither equations nor whole levels settle; "error", the expected root mean
    square error of the told part, in [0, 1] pixels; "spans", all this as a certificate (`identify.span_certificate`).
    Of two images, "residual" is the relative distance from the whole update, "starts" counts the searches, and what is
    of equations is None.

    labels     the rule by which labels are read, for a task that has some
    whole      settle what is open by whole grey levels, if that is possible
    restarts   starts at most of the search for two images, while a start does not explain the update
    """

    whole: bool = True
    restarts: int = 3

    gradients_only: ClassVar[bool] = True
    most_examples: ClassVar[int | None] = 2

    def __post_init__(self) -> None:
        require_positive(self, whole=("restarts",))

    @property
    def name(self) -> str:
        return "vit"

    @property
    def work(self) -> int | None:
        return 0

    def needs_on(self, examples: int | None) -> Needs:
        return self.needs | {"training"} if examples == 2 else self.needs

    def work_on(self, examples: int | None) -> int | None:
        return self.work if examples in (None, 1) else None

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        if reason := Pixels().refuses(task):
            return reason
        if unread := missing_fields(task, {"x", *Labels(label_rule(self.labels)).reads(task), *given}):
            return f"it finds x and reads class labels; this task also has {', '.join(unread)}"
        try:
            embedding = patch_embedding(task)
        except TaskError as problem:
            return str(problem)
        return "" if embedding.positions else _untold(task, embedding)

    def most(self, task: Task, training: LocalTraining | None = None) -> int | None:
        return 1 if unpaired(task, patch_embedding(task), training) else self.most_examples

    def run(
        self,
        task: Task,
        seen: Seen,
        knows: Knowledge = Knowledge(),
        seed: int = 0,
        *,
        engine: Engine | None = None,
        progress: Share | None = None,
    ) -> Reconstruction:
        """Read every target, then replay the client on it: `match` is the cosine distance that other attacks report."""
        supported(self, task, knows)
        require(self, knows)
        embedding, targets, engine = patch_embedding(task), as_targets(seen), engine or Engine()
        fits(task, [observation for target in targets for observation in target.observations])
        if reason := self._too_many(task, embedding, max(target.num_examples for target in targets), knows):
            raise UnsupportedTask(f"unsupported: vit cannot attack this update: {reason} Use 'spectral' or 'ig'.")
        rows = [row for row, target in enumerate(targets) if target.num_examples == 2]
        if rows:
            if knows.training is None:
                raise MissingKnowledge(
                    "vit needs training for two images in an update, which the threat model does not grant: it "
                    "subtracts the gradient of one. Pass Knowledge(training=LocalTraining(lr=...))."
                )
            some, known = [targets[row] for row in rows], given_of(task, knows, rows, len(targets))
            how, progress = (seed, engine, part(progress, 0, 2)), part(progress, 1, 2)
            pairs = dict(
                zip(rows, Plan(self.labels, self.restarts).run(task, some, known, embedding, how), strict=True)
            )
        else:
            pairs = {}
        labels, records = Labels(label_rule(self.labels)), list[Mapping[str, Any]]()

        def read(scene: TargetView) -> Batch:
            row = len(records)
            if row in pairs:
                fields, record = _of_pair(pairs[row], embedding, scene, targets[row].last)
            else:
                x, record = self.image(scene, embedding)
                fields = {**labels(scene), "x": x}
            records.append(record)
            return {**fields, **scene.fields}

        attack = Composed(self.name, (Stage(Pixels(as_given), Replay(), Cosine(), (), Still()),), ReadBy(read))
        result = attack.run(task, targets, knows, seed, engine=engine, progress=progress)
        names = dict.fromkeys(name for record in records for name in record)
        columns = {name: [record.get(name) for record in records] for name in names}
        return replace(result, settings={**result.settings, "attack": repr(self), **columns})

    def _too_many(self, task: Task, embedding: PatchEmbedding, examples: int, knows: Knowledge) -> str:
        """Why an update of so many examples is refused, in sentences, with the count of what is open."""
        if examples == 1 or not (reason := too_many(self, examples, task, knows.training)):
            return ""
        count, inputs = open_of_batch(embedding, examples), embedding.places.shape[1]
        sums = "Learned positions tell sums over the images." if embedding.positions else ""
        spans = (
            "Spans of the first block hold all differences of the images, and leave "
            f"{count} of {inputs} numbers of every patch open."
        )
        why = unpaired(task, embedding, knows.training) if examples == 2 else ""
        return " ".join(filter(None, (f"{reason}.", why, sums, spans)))

    def image(self, scene: TargetView, embedding: PatchEmbedding) -> tuple[Tensor, dict[str, Any]]:
        """The image of one target, (1, ...) in model-input space, and the record."""
        positions = embedding.positions
        solved = _by_positions(scene, embedding, positions) if positions else _by_spans(scene, embedding)
        low, high = scene.limits["x"]
        x = scene.task.blank(1)["x"][0].double().cpu()
        places = embedding.places.cpu()
        x.view(-1)[places] = solved.patches
        missing = x.numel() - places.numel()
        free = int(solved.errors.isinf().sum())
        record = {"positions": positions.name if positions else "fixed", "patches": len(places), **solved.record}
        if len(solved.errors) and scene.task.fields["x"].bounded:
            x, settled = self._completed(x, solved, places, scene)
        else:
            settled = 0
        record["open"] = missing + free * (places.shape[1] - settled)
        record["spans"] = _certificate(embedding.layer, record, x.numel(), settled == places.shape[1]).record()
        return x[None].to(low).clamp(low, high), record

    def _completed(self, x: Tensor, solved: Solved, places: Tensor, scene: TargetView) -> tuple[Tensor, int]:
        """The image with what was open filled in, and how many columns whole levels settle."""
        field = scene.task.fields["x"]
        case = Open(LEVELS * field.unit(x), places, solved.basis, solved.errors)
        if not self.whole or not completion.provable(case):
            return field.model(case.moved(smoothest(case)) / LEVELS), 0
        step, settled = completion.whole(case)
        levels = case.moved(step)
        sure = places[:, settled]
        levels.view(-1)[sure] = levels.view(-1)[sure].round()
        return field.model(levels / LEVELS), int(settled.sum())


def _of_pair(
    pair: Pair, embedding: PatchEmbedding, scene: TargetView, seen: Observation
) -> tuple[Batch, dict[str, Any]]:
    """The fields of two images, and the record. They are proved if they explain the whole update to rounding."""
    assert embedding.positions is not None
    proved = pair.residual <= rounding(seen)
    reason = "" if proved else f"The search stopped short: of the whole update {pair.residual:.0e} is unexplained."
    layers = tuple(LayerCertificate(layer.name, rows=layer.rows) for layer in pair.layers)
    certificate = SpanCertificate(2, pair.layers[-1].name, pair.outside, 2 * proved, layers, reason)
    record = {
        "positions": embedding.positions.name,
        "patches": len(embedding.places),
        "rank": None,
        "smallest": None,
        "rounding": rounding_of(seen).wire,
        "residual": pair.residual,
        "error": None,
        "open": 0 if proved else None,
        "starts": pair.starts,
        "spans": certificate.record(),
    }
    return {"x": pair.x.to(scene.like), "y": pair.y}, record


def _certificate(layer: str, record: Mapping[str, Any], values: int, whole: bool) -> SpanCertificate:
    """What the patch embedding tells of the image. `whole`: all its pixels were found to be whole grey levels."""
    residual, error = record["residual"], LEVELS * record["error"]
    reason = ""
    if record["open"]:
        reason = f"{record['open']:,} of {values:,} values of the image are open."
    elif not residual <= MET:
        reason = f"The equations of its patches are met to {residual:.0e} only."
    elif not (whole or error <= NEAR):
        reason = f"Rounding alone makes an error of {error:.1f} grey levels."
    told = LayerCertificate(layer, record["rank"], record["patches"], unexplained=residual)
    return SpanCertificate(1, layer, (residual,), int(not reason), (told,), reason)


def open_of_batch(embedding: PatchEmbedding, examples: int) -> int:
    """The directions in which every patch can move within the spans of tokens and patches; zero: they are determined.

    The span of the centred tokens, behind the first norm, holds W (patch_bp - patch_ap) for all images a, b and places
    p: these examples - 1 times patches differences are open at every place, not only at p. More is open where the span
    of the tokens fills so much of the width that it meets that of W times the patches by count alone.
    """
    patches, inputs = embedding.places.shape
    others = embedding.tokens - patches  # the same for all images
    span = min(examples * patches, inputs)
    tokens = others + min(examples * patches, patches + inputs)
    differences = min((examples - 1) * patches, inputs)
    return min(span, max(differences, span + tokens - (embedding.width - 1)))


# --- learned positions ------------------------------------------------------------------------------------------------


def _by_positions(scene: TargetView, embedding: PatchEmbedding, positions: Positions) -> Solved:
    """The patches by least squares: dL/dW = sum_p delta_p patch_p^T, with delta_p = dL/dposition_p."""
    observed, sent = _observed(scene, (embedding.layer, positions.name))
    weight, bias = f"{embedding.layer}.weight", f"{embedding.layer}.bias"
    told = positions.of(sent).all(0) & sent[weight].flatten(1).all(1)  # outputs with all that their equations need
    whole = PatchEquations.of(observed, embedding)
    equations = PatchEquations(whole.deltas[told], whole.sums[told])
    deltas, target = equations.deltas, equations.sums
    if not deltas.any():
        raise TaskError(
            f"vit needs all rows of {positions.name} and of {weight} for some outputs; this update has none. What a "
            "defence drops here cannot be read: use 'ig' with the defence known."
        )
    left, values, right = equations.factors
    wire = _rounding(scene, (weight, positions.name))
    noise = 2 * wire * _size(target)
    if bias in observed:  # these two are zero but for rounding, and for what a defence adds
        noise += _size(deltas.sum(1) - observed[bias][told])
    if len(deltas) > len(values):
        noise += _size(left[:, len(values) :].T @ target)
    errors = target.new_full((len(right),), torch.inf)
    errors[: len(values)] = noise * _levels(scene) / values
    errors = torch.where(errors > LOST, torch.inf, errors)
    rank = int(errors.isfinite().sum())
    patches = equations.patches(rank)
    record = {
        "rank": rank,
        "smallest": float(values[rank - 1] / values[0]) if rank else 0.0,
        "rounding": wire,
        "residual": _size(deltas @ patches - target) / _size(target),
        "error": float((errors[:rank].square().sum() / len(right)).sqrt()) / LEVELS if rank else 1.0,
    }
    weak = errors > WEAK
    return Solved(patches, right[weak].T.contiguous(), errors[weak], record)


def _observed(scene: TargetView, layers: Collection[str]) -> tuple[Params, Params]:
    """The gradient of these layers, on the CPU in double precision, and which of its entries the client sent."""
    here = {name: u for name, u in scene.update.items() if name in layers or name.rpartition(".")[0] in layers}
    observed = {name: u.detach().cpu().double() for name, u in gradient(replace(scene, update=here)).items()}
    sent = sent_entries(scene)
    return observed, {name: sent[name].detach().cpu() for name in here}


def _rounding(scene: TargetView, names: Collection[str]) -> float:
    """The rounding of these tensors on the wire, as a share of their size."""
    weights, update = ({name: tree[name] for name in names} for tree in (scene.weights, scene.update))
    return rounding_of(Observation(weights, update, 1)).wire


def _levels(scene: TargetView) -> float:
    """Grey levels in a unit of the model's input."""
    low, high = scene.extent("x")
    return LEVELS / float((high - low).mean())


def _size(value: Tensor) -> float:
    return float(value.square().mean().sqrt())


# --- fixed positions --------------------------------------------------------------------------------------------------


def _untold(task: Task, embedding: PatchEmbedding) -> str:
    """Why the equations of fixed positions do not determine the patches; empty if they may."""
    if not embedding.norm or not embedding.readers:
        return "its positions are not trained, and no linear layer reads the tokens behind a LayerNorm: nothing is told"
    unknowns = min(embedding.places.shape)
    equations = embedding.width - 1 - embedding.tokens
    if equations < unknowns:
        return (
            f"its positions are not trained, and {embedding.tokens} tokens of width {embedding.width} leave "
            f"{max(equations, 0)} equations for {unknowns} unknowns of a patch"
        )
    constants = _centred(embedding.constants(task, task.weights()).double())
    values = torch.linalg.svdvals(constants)
    rank = int((values > INDEPENDENT * values[0]).sum())
    if rank < unknowns:
        return (
            f"its fixed positions have rank {rank}, and telling patches apart takes {unknowns} (two-dimensional sines "
            "and cosines depend on each other)"
        )
    return ""


def _by_spans(scene: TargetView, embedding: PatchEmbedding) -> Solved:
    """The patches from two spans: patch_p in that of dL/dW, W patch_p + constant_p in that of the tokens."""
    observed, sent = _observed(scene, (embedding.layer, *embedding.readers))
    name = f"{embedding.layer}.weight"
    names = [name, *(f"{reader}.weight" for reader in embedding.readers)]
    if not all(bool(sent[each].all()) and bool(observed[each].any()) for each in names):
        raise TaskError(f"vit needs all of {', '.join(names)} in the update. Use 'ig' with the defence known.")
    weight = scene.weights[name].flatten(1).cpu().double()
    constants = embedding.constants(scene.task, scene.weights, scene.buffers).cpu().double()
    count = min(embedding.places.shape)
    patches = torch.linalg.svd(observed[name].flatten(1), full_matrices=False)[2][:count]  # (count, inputs)
    tokens = _token_span(scene, embedding, observed)
    outside = lambda rows: _centred(rows) - _centred(rows) @ tokens.T @ tokens  # noqa: E731
    system = outside(patches @ weight.T).T  # (width, count)
    left, values, right = torch.linalg.svd(system, full_matrices=False)
    found = -(outside(constants) @ left / values @ right) @ patches
    z = found @ weight.T + constants
    wire = _rounding(scene, names)
    record = {
        "rank": int((values > wire * values[0]).sum()),
        "smallest": float(values[-1] / values[0]),
        "rounding": wire,
        "residual": _size(outside(z)) / _size(_centred(z)),
        "error": wire * float(values[0] / values[-1]) * _size(found) * _levels(scene) / LEVELS,
    }
    return Solved(found, found.new_zeros(len(found), 0), found.new_zeros(0), record)


def _token_span(scene: TargetView, embedding: PatchEmbedding, observed: Params) -> Tensor:
    """Orthonormal rows (k, width) whose span holds the tokens minus their means.

    A layer behind the norm reads a = g * normed + h, so dL/dW - dL/db h^T = sum_t q_t (g * normed_t)^T. Without a bias,
    h joins the span. Layers that read the same tokens are stacked, each with length one.
    """
    state = {**(scene.buffers or {}), **scene.weights}
    like = observed[f"{embedding.layer}.weight"]
    scale, shift = (
        state[name].cpu().double() if (name := f"{embedding.norm}.{part}") in state else like.new_full((1,), default)
        for part, default in (("weight", 1.0), ("bias", 0.0))
    )
    rows, shifted = list[Tensor](), False
    for reader in embedding.readers:
        weight, bias = observed[f"{reader}.weight"], observed.get(f"{reader}.bias")
        length = weight.norm()
        shifted = shifted or bias is None
        rows.append((weight - (0 if bias is None else torch.outer(bias, shift.expand(weight.shape[1])))) / length)
    span = torch.linalg.svd(_centred(torch.cat(rows) / scale), full_matrices=False)[2][: embedding.tokens]
    if shifted and bool(shift.any()):
        span = torch.linalg.qr(torch.cat([span, _centred((shift / scale)[None])]).T)[0].T
    return span


def _centred(rows: Tensor) -> Tensor:
    return rows - rows.mean(1, keepdim=True)
