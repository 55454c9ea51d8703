"""The step of a diffusion client: read off the gradient of the time MLP, or an unknown of the search.

The input for step t is a row E[t] of a table, which a linear layer takes: a = W E[t] + b. For one example
dL/dW = delta E[t]^T and dL/db = delta, so the gradient contains E[t], whatever the image and the noise are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.core.random import Draws
from gradleak.core.tree import Tree
from gradleak.diffusion import Denoising
from gradleak.parts.fields import Nothing, RuleDoesNotApply
from gradleak.parts.predictions import gradient
from gradleak.parts.protocols import FieldRule, Needs, Space, delegates
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.task import Batch, Task, TaskError

PROBED = 100  # steps in one pass, when the inputs of the layers are computed for every step
ROUNDING = 3e-6  # singular values below this share of the largest are the rounding of float32


def denoising(task: Task) -> Denoising:
    """The task's objective, which must be that of a denoiser."""
    if not isinstance(task.objective, Denoising):
        raise TaskError(
            "This attack is on denoisers: it looks for an image, a noise and a step. The task trains something else "
            f"({type(task.objective).__name__}); build it with gradleak.diffusion.denoising(model, like=...)."
        )
    return task.objective


def step_count(task: Task) -> int:
    """T, the number of diffusion steps."""
    denoising(task)
    classes = task.fields["t"].classes
    assert classes is not None
    return classes


# --- read off ---------------------------------------------------------------------------------------------------------


@delegates("rule")
@dataclass(frozen=True)
class Granted(FieldRule):
    """Another rule for a search that needs more knowledge than its parts say (`more`)."""

    more: Needs
    rule: FieldRule = Nothing()

    @property
    def needs(self) -> Needs:
        return self.more | self.rule.needs

    def __call__(self, scene: TargetView) -> Batch:
        denoising(scene.task)
        return self.rule(scene)


@dataclass(frozen=True)
class ReadSteps(FieldRule):
    """The steps of all examples, in ascending order, from the time MLP's first layer; nothing if steps are given.

    With G = [dL/dW, dL/db] = sum_i delta_i e(t_i)^T and e(t) = (E[t], 1), the rows of G span what the e(t_i) span: the
    steps are those whose e(t) lies in the span of the B leading right singular vectors of G (`evidence`). For one
    example that is E[t] = dL/dW^T delta / |delta|^2. Without a bias e(t) = E[t]. The learning rate does not matter. It
    needs fewer examples than E[t] has entries, and one local step: later ones draw new diffusion steps. If the client
    withholds the gradient of that layer, a later layer whose input depends on the step alone will do.

    Steps that appear twice lower the rank of G; the lengths of their deltas then say which ones those are.
    """

    def reads(self, task: Task) -> frozenset[str]:
        return frozenset({"t"})

    def __call__(self, scene: TargetView) -> Batch:
        if "t" in scene.fields:
            return {}
        if scene.num_examples > 1 and "noise" in scene.fields:
            raise RuleDoesNotApply(
                f"The noise of {scene.num_examples} examples is given in their order, but steps that are read off have "
                "no order: give both in Knowledge(given={'noise': ..., 't': ...}), or attack one example."
            )
        layer = time_layer(scene)
        _, values, right = torch.linalg.svd(layer.gradient, full_matrices=False)
        rank = min(scene.num_examples, int((values > ROUNDING * values[0]).sum()))
        best = shares(layer.table, right[:rank]).topk(rank).indices
        if rank < scene.num_examples:
            lengths = torch.linalg.lstsq(layer.table[best].T, layer.gradient.T).solution.norm(dim=1)
            again = best[lengths.argsort(descending=True)].repeat(scene.num_examples)
            best = torch.cat([best, again[: scene.num_examples - rank]])
        where = scene.like.device
        return {"t": best.sort().values.to(where)}


def evidence(scene: TargetView) -> Tensor:
    """How well each step explains the time MLP's gradient: the share of e(t) in its leading row space, (T,) in [0, 1].

    1 for the steps of the batch if nothing disturbs the gradient. Under noise or pruning the best few are candidates,
    and their matches tell them apart.
    """
    layer = time_layer(scene)
    return shares(layer.table, torch.linalg.svd(layer.gradient, full_matrices=False)[2][: scene.num_examples])


def shares(table: Tensor, basis: Tensor) -> Tensor:
    """The share of each row of the table, squared, that lies in the span of orthonormal rows."""
    return (table @ basis.T).square().sum(1) / table.square().sum(1)


@dataclass(frozen=True, eq=False)
class TimeLayer:
    """A layer that takes the step, on the CPU in double precision; a bias adds a column."""

    table: Tensor  # e(t), (T, entries)
    gradient: Tensor  # [dL/dW, dL/db], (outputs, entries)


def time_layer(scene: TargetView) -> TimeLayer:
    """The first layer that takes the step and whose gradient was sent.

    An input that depends on the step alone can be computed by the server, for every step.
    """
    denoising(scene.task)
    otherwise = "Give the steps in Knowledge(given={'t': ...}), or search for them (t='soft')."
    training = scene.knows.training
    if training is not None and len(training.order(scene.num_examples)) > 1:
        raise RuleDoesNotApply(
            "The client takes several local steps, each at diffusion steps of its own, so they add up in the update. "
            f"{otherwise}"
        )
    observed = gradient(scene)
    sent = (
        (name, table)
        for name, table in _step_layers(scene)
        if bool(observed.get(f"{name}.weight", torch.zeros(1)).any())
    )
    name, table = next(sent, ("", None))
    if table is None:
        raise RuleDoesNotApply(
            "The gradient of every linear layer that takes the step and nothing else is withheld, or there is none "
            f"(a denoiser names it as time_layer), so no step can be read off. {otherwise}"
        )
    values = [observed[each] for each in (f"{name}.weight", f"{name}.bias") if each in observed]
    columns = [value.detach().to("cpu", torch.float64).reshape(values[0].shape[0], -1) for value in values]
    known = table.detach().to("cpu", torch.float64)
    if len(values) > 1:
        known = torch.cat([known, known.new_ones(len(known), 1)], dim=1)
    if scene.num_examples >= known.shape[1]:
        raise RuleDoesNotApply(
            f"{scene.num_examples} examples are too many for an embedding of {known.shape[1]} entries: every step lies "
            f"in the span of that many. {otherwise}"
        )
    return TimeLayer(known, torch.cat(columns, dim=1))


def _step_layers(scene: TargetView) -> Iterator[tuple[str, Tensor]]:
    """Linear layers whose input depends on the step alone, and that input for every step: (T, entries)."""
    model: Any = scene.task.model
    first, table = getattr(model, "time_layer", ""), getattr(model, "table", None)
    if first and table is not None:
        yield first, table
    others = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and name != first]

    def inputs(names: Sequence[str], t: Tensor, image: Tensor) -> Batch:
        batch = {"x": image, "t": t, "noise": torch.zeros_like(image)}
        with torch.no_grad():
            return scene.task.inputs_of(names, scene.weights, batch, scene.buffers)

    like, shape = scene.like, scene.task.fields["x"].shape
    blank = torch.zeros((PROBED, *shape), device=like.device, dtype=like.dtype)
    two = torch.stack([blank[0], torch.linspace(-1, 1, blank[0].numel()).reshape(shape).to(blank)])
    caught = inputs(others, torch.zeros(2, dtype=torch.long, device=like.device), two)
    for name in others:
        if name in caught and caught[name].dim() == 2 and torch.equal(*caught[name]):
            parts = torch.arange(step_count(scene.task), device=like.device).split(PROBED)
            yield name, torch.cat([inputs([name], t, blank[: len(t)])[name] for t in parts])


# --- unknowns of the search -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scores(Space):
    """A score for every step of every example, from U(0, 1). If the threat model gives t, there are no unknowns.

    `speed`: a score is so many times its unknown. With one learning rate for all, a method would need a thousand steps
    to raise one of a thousand scores above the rest.
    """

    speed: float = 10.0

    @property
    def decoded(self) -> frozenset[str]:
        return frozenset({"t"})

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        steps = step_count(scene.task)
        if "t" in scene.fields:
            return {}
        if before is not None and "t" in before:
            return {"t": before["t"]}
        like = scene.like
        source = draws.child(list(scene.task.fields).index("t"))
        return {"t": source.uniform((scene.num_examples, steps), dtype=like.dtype) / self.speed}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return {"t": self.chosen(self.speed * v["t"], now)} if "t" in v else {}

    def chosen(self, scores: Tensor, now: Step) -> Tensor:
        """What the objective takes: a step, or a share of each."""
        raise NotImplementedError


@dataclass(frozen=True)
class SoftSteps(_Scores):
    """Shares of all steps, p = softmax(scores / temperature); the temperature falls geometrically over the stage.

    The objective mixes alpha-bar and the embedding with these shares, so the search can pass between steps. A
    continuous index would not work: the embedding oscillates, and the match with it.
    """

    first: float = 1.0
    last: float = 0.1

    def shares(self, scores: Tensor, now: Step) -> Tensor:
        temperature = self.first * torch.exp(now.fraction.to(scores.dtype) * math.log(self.last / self.first))
        return (scores / temperature).softmax(-1)

    def chosen(self, scores: Tensor, now: Step) -> Tensor:
        return self.shares(scores, now)


@dataclass(frozen=True)
class StraightThrough(SoftSteps):
    """The best step alone, with the derivative of the shares: always a real step, but a biased gradient.

    Reference: Bengio, Leonard, Courville, arXiv 1308.3432, 2013.
    """

    def chosen(self, scores: Tensor, now: Step) -> Tensor:
        p = self.shares(scores, now)
        best = torch.arange(p.shape[-1], device=p.device) == p.argmax(-1, keepdim=True)
        return best.to(p.dtype) + (p - p.detach())


@dataclass(frozen=True)
class SettledSteps(_Scores):
    """The best step of an earlier stage, as an index. The scores get no gradient and stay."""

    def chosen(self, scores: Tensor, now: Step) -> Tensor:
        return scores.argmax(-1)


@dataclass(frozen=True)
class Drawn(Space):
    """A field drawn once for each lane, even if it is given: for an attacker without knowledge.

    A step is uniform, anything else N(0, 1).
    """

    field: str

    @property
    def decoded(self) -> frozenset[str]:
        return frozenset({self.field})

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        known, like = scene.task.fields[self.field], scene.like
        source, shape = draws.child(list(scene.task.fields).index(self.field)), (scene.num_examples, *known.shape)
        if known.classes is None:
            return {self.field: source.normal(shape, dtype=like.dtype)}
        return {self.field: (source.uniform(shape, dtype=torch.float64) * known.classes).long()}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return {self.field: scene.constants[self.field]}
