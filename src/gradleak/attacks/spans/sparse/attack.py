"""Whole batches, exactly, from the gradient of a linear layer before a ReLU; images from what that layer sees."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradleak.attack import Composed, ReadOff, Reconstruction, missing_fields, require, scenes_of, supported
from gradleak.attack.cascade import matches, part
from gradleak.attacks.spans.sparse.directions import Layer, factorise
from gradleak.attacks.spans.sparse.layers import FEATURES, LayerInput, Place, by_class, seen_by, sparse_layer
from gradleak.attacks.spans.sparse.selection import Basis, recover
from gradleak.attacks.spectral import Spectral
from gradleak.core import assignment
from gradleak.core import random as randomness
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.engine import Engine
from gradleak.identify.span_certificate import LayerCertificate, SpanCertificate
from gradleak.parts.fields import Labels, ReadBy, label_rule
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import Cosine, Relative
from gradleak.parts.optimisers import Still, require_positive
from gradleak.parts.predictions import Replay, gradient
from gradleak.parts.priors import TotalVariation, one_hot
from gradleak.parts.protocols import Match, Prediction
from gradleak.parts.spaces import Pixels, as_given
from gradleak.parts.stage import Stage
from gradleak.parts.view import TargetView
from gradleak.scenario.fit import fits
from gradleak.scenario.observation import Knowledge, Seen, Track, as_targets
from gradleak.scenario.task import Batch, Task, TaskError

PRECISE = 1e-3  # expected relative error of an example that may be called certain
SHARES = ("certain", "agreement", "rounding")  # numbers of each example
HISTORY = 50  # pairs of L-BFGS
START, POWER = 0.01, 1.0  # of `Spectral`: near grey, and falling as in photographs, since features leave much open
SHOWN = 0.9  # agreement below which an example is not shown: the zeros of chance agree in about half


@dataclass(frozen=True, eq=False)
class Recovered:
    """What the layer saw of the examples that were found, and the record of the search; m outputs, n inputs.

    rows          (shown, n)
    derivatives   (shown, m), dL/dZ of the same examples
    shares        (3, B): "certain", "agreement", "rounding"; those that were found come first
    record        numbers of this target by name
    """

    rows: Tensor
    derivatives: Tensor
    shares: Tensor
    record: Mapping[str, float]


@named(
    "sparse-span",
    kind="attack",
    paper="Dimitrov et al., SPEAR, NeurIPS 2024; L1 search of our own",
    formerly="spear",
)
@dataclass(frozen=True)
class SparseSpan(ReadOff):
    """Read a whole batch off a linear layer with a bias that is followed by ReLU: exact rows, no labels needed.

    With Z = W X^T + b before the ReLU and D = dL/dZ, [dL/dW, dL/db] = D [X, 1]. An SVD gives D = L Q and X = Q^-1 R up
    to an invertible Q. ReLU makes every column of D zero where the example leaves an output off: the sparse vectors
    L q are found from many starts at once (`directions`). A basis of them is right where the zeros of D are those of
    ReLU(Z(X)) (`selection`). The bias fixes the scale.

    The layer is the first that sees one row for each example. Where that is the example itself, this is all. Behind
    convolutions the rows are features f(x). Each image is then searched for by itself, min |f(x) - row|^2 / |row|^2
    plus total variation, by L-BFGS on weighted cosine coefficients, and the best start is the one with the lowest
    match. A last search from there matches the whole update. Features are exact, images as far as these determine them.

    The client may take several steps of SGD: the update is a sum of such products with the same X. An output that
    switches on the way has no zero, so the record is approximate there. (Features of a network that trains move too.)
    Equal examples, and examples whose gradient is below the rounding of the others, lower the rank; what is not found
    is blank. So are all of more examples than the layer has outputs, or one more than it has inputs: the gradient does
    not tell those apart.

    `settings` of the result hold the "layer" and, per target: "rank", the number of examples that the gradient tells
    apart; "agreement", the mean over them; "certain"; "padded", those that are blank; "residual", the relative distance
    of D X from the gradient; and "waves" of starts. `unknowns` hold, per example: "agreement", the share of outputs
    that are on where its derivative is not zero; "rounding", the relative error that the noise of the gradient makes in
    its row; "certain", 1 if all examples of the target agree everywhere (one wrong direction changes the others) and
    its rounding is below 0.1 %; behind other layers "feature_error", |f(x) - row| / |row|. There "certain" is said of
    the row, not of the image.

    Differs from the paper: it samples sets of b - 1 outputs, 2^(b - 1) of them for one hit. This one adds alternating
    directions in windows of outputs that are mostly off, takes out the examples that agree everywhere, and starts on
    the flat through the others (`selection`). Features behind convolutions are ours.

    labels       the rule by which labels are read, for a task that has some
    waves        waves of starts at most
    relu         false: any linear layer with a bias will do, and clients have one example each
    steps        of one start of the search for an image: passes forward and back up to the layer
    fine_steps   of the last search, on the whole update; 0: none
    restarts     starts for each image
    tv           weight of total variation in both searches
    """

    waves: int = 20
    relu: bool = True
    steps: int = 300
    fine_steps: int = 300
    restarts: int = 4
    tv: float = 1e-3

    gradients_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, whole=("waves", "steps", "restarts"))
        if self.fine_steps < 0 or not self.tv >= 0:
            raise ValueError(f"fine_steps and tv must not be negative; given {self.fine_steps} and {self.tv}.")

    @property
    def name(self) -> str:
        return "sparse-span"

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        if reason := Pixels().refuses(task):
            return reason
        try:
            place = sparse_layer(task, self.relu)
        except TaskError as problem:
            return str(problem).removesuffix(".")
        if unread := missing_fields(task, {"x", "y", *(given if place.first else ())}):
            return f"it finds x and reads labels y; this task also has {', '.join(unread)}"
        return "" if place.first else Spectral().refuses(task)

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
        engine, targets, place = engine or Engine(), as_targets(seen), sparse_layer(task, self.relu)
        fits(task, [observation for target in targets for observation in target.observations])
        most = max(target.num_examples for target in targets)
        if not self.relu and most > 1:
            raise TaskError(f"sparse-span:relu=false reads clients of one example; given {most}. Leave relu=true.")
        readings = self._readings(task, targets, knows, seed, engine)
        shares = {name: [each.shares[number] for each in readings] for number, name in enumerate(SHARES)}
        if place.first:
            images = [each.rows.unflatten(1, task.fields["x"].shape) for each in readings]
        else:
            images, errors = self._images(task, targets, readings, (seed, engine, part(progress, 0, 2)))
            shares["feature_error"], progress = errors, part(progress, 1, 2)
        orders, waiting = list[Tensor](), iter(zip(readings, images, strict=True))

        def read(scene: TargetView) -> Batch:
            reading, found = next(waiting)
            low, high = scene.limits["x"]
            blank = scene.task.blank(scene.num_examples)["x"].to(low)
            x = torch.cat([found.to(low).clamp(low, high), blank[len(found) :]])
            y, order = labelled(scene, place, reading, Labels(label_rule(self.labels)))
            orders.append(order)
            return {"x": x[order.to(x.device)], **y}

        stages: tuple[Stage, ...] = (Stage(Pixels(as_given), Replay(), Cosine(), (), Still()),)
        if not place.first and self.fine_steps:
            stages += (self._search(Replay(), Cosine(), self.fine_steps),)
        output = "best_stage" if len(stages) > 1 else "last_stage"
        attack = Composed(self.name, stages, ReadBy(read), output=output)
        result = attack.run(task, targets, knows, seed, engine=engine, progress=progress)
        records: dict[str, Any] = {name: [each.record[name] for each in readings] for name in readings[0].record}
        apart = shares["feature_error"] if "feature_error" in shares else [1 - each.shares[1] for each in readings]
        records["spans"] = [_certificate(place, *each).record() for each in zip(readings, apart, strict=True)]
        ordered = {
            name: pad_sequence([each[order] for each, order in zip(values, orders, strict=True)], True, torch.nan)
            for name, values in shares.items()
        }
        return replace(
            result,
            settings={**result.settings, "attack": repr(self), "layer": place.name, **records},
            unknowns={**result.unknowns, **{name: value[:, None] for name, value in ordered.items()}},
        )

    def _readings(
        self, task: Task, targets: Sequence[Track], knows: Knowledge, seed: int, engine: Engine
    ) -> list[Recovered]:
        """What the layer saw, target by target."""
        readings = list[Recovered]()

        def read(scene: TargetView) -> Batch:
            readings.append(self.recovered(scene, seed))
            return {}

        with engine.settings():
            scenes_of(task.to(engine.where, engine.dtype), targets, knows, ReadBy(read))
        return readings

    def recovered(self, scene: TargetView, seed: int = 0) -> Recovered:
        """The rows that the layer saw of one target."""
        place, draws = sparse_layer(scene.task, self.relu), Draws(randomness.key("spear", seed))
        layer = read_layer(scene, place)
        shares = torch.tensor([[0.0], [0.0], [1.0]], dtype=torch.float64).repeat(1, scene.num_examples)
        outputs, inputs = layer.weight.shape
        separable = scene.num_examples <= min(outputs, inputs + 1) and bool(layer.deltas.any())
        factors = factorise(layer, scene.num_examples, draws.child(0)) if separable else None
        if factors is None or not factors.rank:
            return Recovered(layer.rows[:0], layer.weight.T[:0], shares, _record(0, shares, 1.0, 0))
        basis, waves = recover(factors, draws.child(1), self.waves)
        if not self.relu:  # one example: every direction is its own
            basis = replace(basis, agreement=torch.ones_like(basis.agreement))
        shown = _shown(basis)
        rows = basis.points[shown] @ factors.right
        noise = factors.right_noise * basis.points[shown].norm(dim=1) / rows.square().mean(1).sqrt()
        certain = (noise < PRECISE) & (basis.agreement == 1).all()  # one wrong direction changes the other examples
        shares[:, : len(rows)] = torch.stack([certain.double(), basis.agreement[shown], noise.clamp(max=1)])
        derivatives = factors.left @ torch.linalg.inv(basis.points)[:, shown]  # D, (m, shown)
        residual = float((layer.rows - derivatives @ rows).norm() / layer.rows.norm())
        return Recovered(rows, derivatives.T, shares, _record(factors.rank, shares, residual, waves))

    def _images(
        self, task: Task, targets: Sequence[Track], readings: Sequence[Recovered], how: tuple[int, Engine, Share | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The images behind the rows of each target, and how far their features are from these, (B,)."""
        seed, engine, progress = how
        counts = [len(each.rows) for each in readings]
        single = [
            example for target, count in zip(targets, counts, strict=True) for example in target.one_by_one()[:count]
        ]
        errors = [torch.ones(target.num_examples, dtype=torch.float64) for target in targets]
        if not single:
            return [torch.zeros(0, *task.fields["x"].shape)] * len(targets), errors
        rows = iter(torch.cat([each.rows for each in readings]))

        def read(scene: TargetView) -> Batch:
            return {**scene.task.blank(1), FEATURES: next(rows)[None].to(scene.like)}

        behind = LayerInput(sparse_layer(task, self.relu).name)
        search = self._search(behind, Relative(whole=True), self.steps)
        attack = Composed(self.name, (search,), ReadBy(read), restarts=self.restarts)
        result = attack.run(task, single, Knowledge(), seed, engine=engine, progress=progress)
        for error, apart in zip(errors, matches(result).sqrt().split(counts), strict=True):
            error[: len(apart)] = apart
        return list(result.batch["x"][:, 0].split(counts)), errors

    def _search(self, predict: Prediction, match: Match, steps: int) -> Stage:
        priors = (TotalVariation(self.tv),) if self.tv else ()
        return Stage(Spectral(START, POWER), predict, match, priors, LBFGS(steps=steps, history=HISTORY))


def labelled(scene: TargetView, place: Place, result: Recovered, rule: Labels) -> tuple[Batch, Tensor]:
    """Labels, and which example belongs to each: the class whose dL/dZ has the direction of the example's own.

    Given labels keep their order. Labels of blank examples are those that the rule reads and no other example has.
    """
    shown, count = len(result.derivatives), scene.num_examples
    if not scene.task.class_index:
        return {}, torch.arange(count)
    alike = torch.zeros(count, scene.task.fields["y"].classes or 0, dtype=torch.float64)
    if shown:
        slopes = by_class(scene, place, result.rows).cpu().double()
        alike[:shown] = torch.cosine_similarity(slopes, result.derivatives, dim=-1).T
    if "y" in scene.fields:
        y = scene.fields["y"]
        wanted = y.cpu().double() if y.is_floating_point() else one_hot(y.cpu(), alike.shape[1], alike.dtype)
        return {"y": y}, assignment.match(-wanted @ alike.T)  # (labels, examples)
    labels = alike[:shown].argmax(1).tolist()
    if shown < count:
        left = rule(scene)["y"].tolist()
        for label in labels:
            if label in left:
                left.remove(label)
        labels += left[: count - shown]
    return {"y": torch.tensor(labels, device=scene.like.device)}, torch.arange(count)


def read_layer(scene: TargetView, place: Place) -> Layer:
    """The layer and its gradient, on the CPU in double precision."""
    names, observed = [place.parameter(part) for part in ("weight", "bias")], gradient(scene)
    values = [*(scene.weights[name] for name in names), *(observed[name] for name in names)]
    with torch.no_grad():
        middle = seen_by(place.name, scene, scene.task.blank(1))[0]
    return Layer(*(value.detach().cpu().double() for value in (*values, middle)))


def _shown(basis: Basis) -> Tensor:
    """Numbers of the examples that agree well, the best first.

    With two or more directions missing, what fills the basis says nothing of an example.
    """
    missing = len(basis.directions) - basis.found
    meant = torch.arange(len(basis.directions)) < (basis.found if missing > 1 else len(basis.directions))
    order = basis.agreement.argsort(descending=True, stable=True)
    return order[(meant & (basis.agreement >= SHOWN))[order]]


def _record(rank: int, shares: Tensor, residual: float, waves: int) -> dict[str, float]:
    certain, padded, agreement = int(shares[0].sum()), int((shares[1] == 0).sum()), float(shares[1].sum())
    record = {"rank": rank, "certain": certain, "padded": padded, "agreement": agreement / max(rank, 1)}
    return {**record, "residual": residual, "waves": waves}


def _certificate(place: Place, reading: Recovered, outside: Tensor) -> SpanCertificate:
    """What the layer tells of one target. Images behind it are searched for: of these nothing is proved."""
    count, certain, padded = len(reading.shares[0]), int(reading.record["certain"]), int(reading.record["padded"])
    shown = len(reading.rows)
    reasons = []
    if not place.first:
        reasons += [f"It saw {certain} of its inputs for certain, and the examples behind them were searched for."]
    elif certain < shown:
        reasons += [f"The zeros of the gradient or its rounding leave {shown - certain} in doubt."]
    if padded:
        reasons += [f"{padded} of {count} were not found, and are blank."]
    told = LayerCertificate(
        place.name, int(reading.record["rank"]), count, reading.record["residual"] if shown else None
    )
    proved = certain if place.first else 0
    return SpanCertificate(
        count, place.name if shown else "", tuple(outside[:shown].tolist()), proved, (told,), " ".join(reasons)
    )
