"""Whole batches, exactly, from the gradient of a linear layer before a ReLU: SPEAR, with a search of our own.

`layers` finds the layer, `directions` the sparse vectors of its gradient, `selection` those that are examples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradleak.attack import Composed, ReadOff, Reconstruction, missing_fields, require, supported
from gradleak.attacks.spans.sparse.directions import Layer, factorise
from gradleak.attacks.spans.sparse.layers import by_class, relu_layer
from gradleak.attacks.spans.sparse.selection import Basis, recover
from gradleak.core import assignment
from gradleak.core import random as randomness
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.engine import Engine
from gradleak.parts.fields import Labels, ReadBy, label_rule
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Still, require_positive
from gradleak.parts.predictions import Replay, gradient
from gradleak.parts.priors import one_hot
from gradleak.parts.spaces import Pixels, as_given
from gradleak.parts.stage import Stage
from gradleak.parts.view import TargetView
from gradleak.scenario.observation import Knowledge, Seen
from gradleak.scenario.task import Batch, Task, TaskError

PRECISE = 1e-3  # expected relative error of an example that may be called certain
SHARES = ("certain", "agreement", "rounding")  # numbers of each example
SHOWN = 0.9  # agreement below which an example is not shown: the zeros of chance agree in about half


@dataclass(frozen=True, eq=False)
class Recovered:
    """Examples in model-input space, (B, ...), blank where none was found, and the record of the search.

    derivatives   (shown, m), dL/dZ of the examples that are not blank: these come first
    shares        (3, B): "certain", "agreement", "rounding"
    record        numbers of this target by name
    """

    examples: Tensor
    derivatives: Tensor
    shares: Tensor
    record: Mapping[str, float]


@named("sparse-span", kind="attack", paper="Dimitrov et al., SPEAR, NeurIPS 2024; the search is gradleak's own")
@dataclass(frozen=True)
class Spear(ReadOff):
    """Read a whole batch off a first layer that is linear, with a bias, and followed by ReLU: exact, no labels needed.

    With Z = W X^T + b before the ReLU and D = dL/dZ, [dL/dW, dL/db] = D [X, 1]. An SVD gives D = L Q and X = Q^-1 R up
    to an invertible Q. ReLU makes every column of D zero where the example leaves an output off: the sparse vectors
    L q are found by an L1 search from many starts at once (`directions`). A basis of them is right where the zeros of
    D are those of ReLU(Z(X)) (`selection`). The bias fixes the scale.

    The client may take several steps of SGD: the update is a sum of such products with the same X. An output that
    switches on the way has no zero, so the record is approximate there. Equal examples, and examples whose gradient is
    below the rounding of the others, lower the rank; what is not found is blank. So are all of more examples than the
    layer has outputs, or one more than it has inputs: the gradient does not tell those apart.

    `settings` of the result hold, per target: "rank", the number of examples that the gradient tells apart; "certain",
    "padded", those that are blank; "residual", the relative distance of D X from the gradient; and "waves" of starts.
    `unknowns` hold, per example: "agreement", the share of outputs that are on where its derivative is not zero;
    "rounding", the relative error that the noise of the gradient makes in it; "certain", 1 if all examples of the
    target agree everywhere (one wrong direction changes the others) and its rounding is below 0.1 %.

    Differs from the paper: it samples sets of b - 1 outputs, 2^(b - 1) of them for one hit. This one adds the L1 search
    and, once some examples are found, starts on the flat through the others (`selection`).

    labels   the rule by which labels are read, for a task that has some
    waves    waves of starts at most
    """

    waves: int = 20

    gradients_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, whole=("waves",))

    @property
    def name(self) -> str:
        return "sparse-span"

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        if reason := Pixels().refuses(task):
            return reason
        try:
            relu_layer(task)
        except TaskError as problem:
            return str(problem).removesuffix(".")
        if unread := missing_fields(task, {"x", "y", *given}):
            return f"it finds x and reads labels y; this task also has {', '.join(unread)}"
        return ""

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
        labels, results = Labels(label_rule(self.labels)), list[Recovered]()

        def read(scene: TargetView) -> Batch:
            result = self.recovered(scene, seed)
            if not task.class_index:
                results.append(result)
                return {"x": result.examples}
            y, order = labelled(scene, result, labels)
            results.append(replace(result, shares=result.shares[:, order]))
            return {"x": result.examples[order.to(y.device)], "y": y}

        attack = Composed(self.name, (Stage(Pixels(as_given), Replay(), Cosine(), (), Still()),), ReadBy(read))
        result = attack.run(task, seen, knows, seed, engine=engine, progress=progress)
        records: dict[str, Any] = {name: [each.record[name] for each in results] for name in results[0].record}
        padded = torch.nn.utils.rnn.pad_sequence([each.shares.T for each in results], True, torch.nan)  # (T, B, 3)
        shares = {name: padded[:, None, :, place] for place, name in enumerate(SHARES)}
        return replace(
            result,
            settings={**result.settings, "attack": repr(self), **records},
            unknowns={**result.unknowns, **shares},
        )

    def recovered(self, scene: TargetView, seed: int = 0) -> Recovered:
        """The examples of one target."""
        layer, draws = read_layer(scene), Draws(randomness.key("spear", seed))
        low, high = scene.limits["x"]
        blank = scene.task.blank(scene.num_examples)["x"].to(low)
        shares = torch.tensor([[0.0], [0.0], [1.0]], dtype=torch.float64).repeat(1, len(blank))
        outputs, inputs = layer.weight.shape
        separable = scene.num_examples <= min(outputs, inputs + 1) and bool(layer.deltas.any())
        factors = factorise(layer, scene.num_examples, draws.child(0)) if separable else None
        if factors is None or not factors.rank:
            return Recovered(blank, layer.weight[:0, :0], shares, _record(0, shares, 1.0, 0))
        basis, waves = recover(factors, draws.child(1), self.waves)
        shown = _shown(basis)
        rows = basis.points[shown] @ factors.right
        noise = factors.right_noise * basis.points[shown].norm(dim=1) / rows.square().mean(1).sqrt()
        certain = (noise < PRECISE) & (basis.agreement == 1).all()  # one wrong direction changes the other examples
        shares[:, : len(rows)] = torch.stack([certain.double(), basis.agreement[shown], noise.clamp(max=1)])
        derivatives = factors.left @ torch.linalg.inv(basis.points)[:, shown]  # D, (m, shown)
        residual = float((layer.rows - derivatives @ rows).norm() / layer.rows.norm())
        bounded = rows.unflatten(1, scene.task.fields["x"].shape).to(low).clamp(low, high)
        record = _record(factors.rank, shares, residual, waves)
        return Recovered(torch.cat([bounded, blank[len(rows) :]]), derivatives.T, shares, record)


def labelled(scene: TargetView, result: Recovered, rule: Labels) -> tuple[Tensor, Tensor]:
    """Labels, and which example belongs to each: the class whose dL/dZ has the direction of the example's own.

    Given labels keep their order. Labels of blank examples are those that the rule reads and no other example has.
    """
    shown, count = len(result.derivatives), scene.num_examples
    alike = torch.zeros(count, scene.task.fields["y"].classes or 0, dtype=torch.float64)
    if shown:
        slopes = by_class(scene, relu_layer(scene.task), result.examples[:shown]).cpu().double()
        alike[:shown] = torch.cosine_similarity(slopes, result.derivatives, dim=-1).T
    if "y" in scene.fields:
        y = scene.fields["y"]
        wanted = y.cpu().double() if y.is_floating_point() else one_hot(y.cpu(), alike.shape[1], alike.dtype)
        return y, assignment.match(-wanted @ alike.T)  # (labels, examples)
    labels = alike[:shown].argmax(1).tolist()
    if shown < count:
        left = rule(scene)["y"].tolist()
        for label in labels:
            if label in left:
                left.remove(label)
        labels += left[: count - shown]
    return torch.tensor(labels, device=scene.like.device), torch.arange(count)


def read_layer(scene: TargetView) -> Layer:
    """The first layer and its gradient, on the CPU in double precision."""
    name, observed = relu_layer(scene.task), gradient(scene)
    sent = [scene.weights[f"{name}{part}"] for part in ("weight", "bias")]
    gradients = [observed[f"{name}{part}"] for part in ("weight", "bias")]
    weight, bias, rows, deltas = (value.detach().cpu().double() for value in (*sent, *gradients))
    middle = scene.task.inputs_of([name.removesuffix(".")], scene.weights, scene.task.blank(1), scene.buffers)
    return Layer(weight, bias, rows, deltas, next(iter(middle.values()))[0].detach().cpu().double())


def _shown(basis: Basis) -> Tensor:
    """Numbers of the examples that agree well, the best first.

    With two or more directions missing, what fills the basis says nothing of an example.
    """
    missing = len(basis.directions) - basis.found
    meant = torch.arange(len(basis.directions)) < (basis.found if missing > 1 else len(basis.directions))
    order = basis.agreement.argsort(descending=True, stable=True)
    return order[(meant & (basis.agreement >= SHOWN))[order]]


def _record(rank: int, shares: Tensor, residual: float, waves: int) -> dict[str, float]:
    certain, padded = int(shares[0].sum()), int((shares[1] == 0).sum())
    return {"rank": rank, "certain": certain, "padded": padded, "residual": residual, "waves": waves}
