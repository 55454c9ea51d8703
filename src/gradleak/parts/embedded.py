"""Texts as the vectors that a model looks up for them: one for each place, searched for, then the nearest tokens.

A token is an id, which no gradient moves. The vector behind it moves. The client's gradient is replayed with the
searched vectors in place of those that the word embedding looks up. Positions, types and norms are added by the model
as usual, so the user's model is not touched: a forward hook gives the vectors, only while its objective is called.

    e_i = s z_i        z_i ~ N(0, 1) at the start, s the root mean square of the embedding's entries
    token_i = argmax over v of cos(e_i, E_v)        padding left out

Where a model predicts its own next token, the targets are unknown too. They are shares of the vocabulary,

    q_i = softmax_v(c log V cos(e_i, E_v))        c = 2.5, V tokens

through which the gradient goes: cross-entropy is linear in its targets. At a token's own vector q_i is nearly that
token alone. A loss that takes ids only gets the nearest tokens of the moment; then a search often stays where it began.

The gradient of the word embedding is never compared: with looked-up vectors replaced, its part through the lookup is
not replayed. If the embedding is also the output layer, the part through the output is left out with it.

Over several local steps the vectors stay where they are, while a client that trains its embedding moves it a little.

A public mask of the shape of x says which places hold padding: those are not searched for.

References: Deng et al., TAG, Findings of EMNLP 2021; Balunovic et al., LAMP, NeurIPS 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.parts.embeddings import embeddings_of
from gradleak.parts.predictions import ReplayedGradient
from gradleak.parts.priors import one_hot
from gradleak.parts.protocols import Prior, Space
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.kinds import Mask, Tokens
from gradleak.scenario.objectives import NextToken, Supervised, prediction_of
from gradleak.scenario.task import Batch, Objective, Task

VECTORS = "embedded"  # the unknown: (examples, places, width), in units of the embedding's entries
LOOKED_UP = "x/embedded"  # in a batch: the vectors themselves
SHARES = "x/shares"  # in a batch: shares of the vocabulary as targets
ORDER = "order"  # the unknown of a re-ordering: (examples, places), smaller first
SHARPNESS = 2.5  # c: chosen on 8 texts of small models: all tokens were found, with a third of it 84 %


# --- the embedding ----------------------------------------------------------------------------------------------------


def unembedded(task: Task) -> str:
    """Why texts cannot be searched for as vectors, in words that follow "unsupported: "; empty if they can."""
    field = task.fields.get("x")
    if field is None:
        return "it searches for tokens, and the task has no x"
    if not isinstance(field.kind, Tokens):
        return f"it searches for tokens of texts that a model embeds, and x holds {field.kind.noun[1]}"
    return "" if _lookup(task) else "no embedding sees the ids of all places of x at once"


def embedding_of(task: Task) -> str:
    """The name of the module that looks up the tokens of x, where `unembedded` found nothing against it."""
    layer = _lookup(task)
    assert layer is not None
    return layer


def _lookup(task: Task) -> str | None:
    every = tuple(range(task.fields["x"].shape[0]))
    layers = (layer for layer, places in embeddings_of(task, "x").items() if places == every)
    return next((layer for layer in layers if isinstance(task.model.get_submodule(layer), nn.Embedding)), None)


def name_of(task: Task, layer: str) -> str:
    """The name of the embedding's matrix among the parameters: that of the output layer, where it shares one."""
    weight = task.model.get_submodule(layer).weight
    return next(name for name, parameter in task.model.named_parameters() if parameter is weight)


def vocabulary(scene: TargetView, layer: str) -> Tensor:
    """The vectors of all tokens as they were sent, (tokens, width)."""
    name = name_of(scene.task, layer)
    return scene.weights[name] if name in scene.weights else (scene.buffers or {})[name]


def padding_of(task: Task, layer: str) -> int | None:
    """The id of padding, by the kind of x or by its embedding."""
    kind, module = task.fields["x"].kind, task.model.get_submodule(layer)
    if isinstance(kind, Tokens) and kind.padding is not None:
        return kind.padding
    return module.padding_idx if isinstance(module, nn.Embedding) else None


def counted(scene: TargetView) -> Tensor:
    """Which places hold tokens, (examples, places), by a public mask that is known; else all of them."""
    field = scene.task.fields["x"]
    for name, other in scene.task.fields.items():
        if other.public and isinstance(other.kind, Mask) and other.shape == field.shape and name in scene.fields:
            return scene.fields[name] != 0
    return torch.ones((scene.num_examples, *field.shape), dtype=torch.bool, device=scene.like.device)


def unit_of(vectors: Tensor) -> Tensor:
    """The unit of the unknowns: the root mean square of the embedding's entries."""
    return vectors.square().mean().sqrt()


def likeness(embedded: Tensor, vectors: Tensor, padding: int | None) -> Tensor:
    """The cosine of each place with each token, (examples, places, tokens); minus infinity for the padding."""
    cosines = F.normalize(embedded, dim=-1) @ F.normalize(vectors, dim=-1).T
    if padding is None:
        return cosines
    return torch.where(torch.arange(len(vectors), device=vectors.device) == padding, -torch.inf, cosines)


def nearest(embedded: Tensor, vectors: Tensor, padding: int | None) -> Tensor:
    """The token whose vector has the largest cosine with each place, (examples, places); never the padding."""
    return likeness(embedded, vectors, padding).argmax(-1)


# --- spaces -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Places(Space):
    """What spaces of vectors share. `layer`: the embedding."""

    layer: str

    @property
    def decoded(self) -> frozenset[str]:
        return frozenset({"x"})

    def refuses(self, task: Task) -> str:
        return unembedded(task)

    def unknowns(self, scene: TargetView) -> int:
        return scene.num_examples * scene.task.fields["x"].shape[0] * vocabulary(scene, self.layer).shape[1]

    def decoding(self, scene: TargetView) -> int:
        return scene.num_examples * scene.task.fields["x"].shape[0] * len(vocabulary(scene, self.layer))

    def shown(self, embedded: Tensor, scene: TargetView) -> Batch:
        """The batch of these vectors: padding in its places, and the nearest token of every other."""
        vectors, padding = vocabulary(scene, self.layer), padding_of(scene.task, self.layer)
        kept, filler = counted(scene), scene.task.fields["x"].kind.blank() if padding is None else padding
        ids = torch.where(kept, nearest(embedded.detach(), vectors, padding), filler)
        return {"x": ids, LOOKED_UP: torch.where(kept[..., None], embedded, vectors[filler])}


@dataclass(frozen=True)
class Embedded(_Places):
    """A vector for each place, from N(0, 1) in units of the embedding's entries."""

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        if before is not None and VECTORS in before:
            return {VECTORS: before[VECTORS]}
        vectors = vocabulary(scene, self.layer)
        shape = (scene.num_examples, *scene.task.fields["x"].shape, vectors.shape[1])
        own = draws.child(list(scene.task.fields).index("x"))
        return {VECTORS: own.normal(shape, dtype=scene.like.dtype)}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return self.shown(unit_of(vocabulary(scene, self.layer)) * v[VECTORS], scene)


@dataclass(frozen=True)
class Reordered(_Places):
    """The vectors that the last stage left, in another order: the unknown is a number for each, smallest first.

    Places of padding keep theirs.
    """

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        places, like = scene.task.fields["x"].shape[0], scene.like
        order = torch.arange(places, device=like.device, dtype=like.dtype)
        return {ORDER: order.expand(scene.num_examples, places).clone()}

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {VECTORS: _left(before)}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return self.shown(unit_of(vocabulary(scene, self.layer)) * self._ordered(v, scene), scene)

    def left(self, v: Tree, scene: TargetView) -> Tree:
        return {VECTORS: self._ordered(v, scene)}

    def _ordered(self, v: Tree, scene: TargetView) -> Tensor:
        vectors = scene.constants[VECTORS]
        source = sources(v[ORDER], counted(scene))
        return vectors.gather(1, source[..., None].expand_as(vectors))


@dataclass(frozen=True)
class NearestTokens(_Places):
    """The nearest tokens of the vectors that the last stage left. Nothing is unknown any more."""

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        return {"x": self.shown(_left(before), scene)["x"]}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        return {"x": scene.constants["x"]}


def _left(before: Tree | None) -> Tensor:
    if before is None or VECTORS not in before:
        raise ValueError(f"The stage before must leave {VECTORS!r}: begin with a stage whose space is Embedded.")
    left: Tensor = before[VECTORS]
    return left


def sources(order: Tensor, kept: Tensor) -> Tensor:
    """The place that each place takes its vector from, (examples, places): places that are kept, by their numbers."""
    count = order.shape[1]
    places = torch.arange(count, device=order.device)
    free = torch.where(kept, places, places + count).argsort(1)  # places with tokens first, in turn
    ranked = torch.where(kept, order, places + order.amax() + 1).argsort(1)  # the same places, by their numbers
    return ranked.gather(1, free.argsort(1))


# --- prediction -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NextShares:
    """`NextToken` for targets that are shares of the vocabulary, (examples, places, vocabulary)."""

    classes_first: bool

    def __call__(self, prediction: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
        both = prediction[:, :-1], shares[:, 1:]
        return (both[0].movedim(-1, 1), both[1].movedim(-1, 1)) if self.classes_first else both


def next_token(task: Task) -> NextToken | None:
    """How a model that predicts its own tokens meets them; None for any other."""
    objective = task.objective
    if not isinstance(objective, Supervised) or objective.target != "x":
        return None
    return objective.meet if isinstance(objective.meet, NextToken) else None


def spread(shares: Tensor, ids: Tensor, meet: NextToken) -> Tensor:
    """Shares as a mean over all places takes them: none where the token is left out, and more for all the others."""
    used = torch.ones_like(ids, dtype=torch.bool) if meet.padding is None else ids != meet.padding
    following = used[:, 1:]
    return shares * (used * (following.numel() / following.sum().clamp_min(1)))[..., None].to(shares.dtype)


def takes_shares(task: Task) -> bool:
    """Does a loss of the next token take shares of the vocabulary, and give for whole ones what it gives for ids?"""
    meet, classes = next_token(task), task.fields["x"].classes or 0
    if meet is None or not isinstance(task.objective, Supervised):
        return False
    batch = task.blank(2)
    ids = torch.arange(batch["x"].numel(), device=batch["x"].device).reshape(batch["x"].shape) % classes
    if meet.padding is not None:
        ids[0, -1] = meet.padding
    try:
        with torch.no_grad():
            output = task.objective.output(task.call(task.weights()), {**batch, "x": ids})
            prediction = prediction_of(output)
            whole = spread(one_hot(ids, classes, prediction.dtype), ids, meet)
            hard = task.objective.loss(*meet(prediction, ids))
            soft = task.objective.loss(*NextShares(meet.classes_first)(prediction, whole))
    except Exception:  # a user's loss can raise anything; here that is the answer
        return False
    return bool(torch.isclose(hard, soft, rtol=1e-4).all())


@dataclass(frozen=True, eq=False)
class LookedUp:
    """An objective whose model gets the vectors of the batch instead of those that its embedding looks up.

    meet   of a model that predicts its own tokens and takes shares of the vocabulary: they are made of the vectors
    """

    objective: Objective
    module: nn.Module
    vectors: Tensor
    padding: int | None = None
    meet: NextToken | None = None

    def __call__(self, call: Callable[..., Any], batch: Mapping[str, Tensor]) -> Tensor:
        rest = {name: value for name, value in batch.items() if name != LOOKED_UP}
        vectors, objective = batch[LOOKED_UP], self.objective
        if self.meet is not None and isinstance(objective, Supervised):
            objective = replace(objective, target=SHARES, meet=NextShares(self.meet.classes_first))
            rest[SHARES] = spread(self._shares(vectors, rest["x"]), rest["x"], self.meet)

        def instead(module: nn.Module, given: Any, output: Tensor) -> Tensor:
            return vectors if output.shape == vectors.shape else output

        handle = self.module.register_forward_hook(instead)
        try:
            return objective(call, rest)
        finally:
            handle.remove()

    def _shares(self, vectors: Tensor, ids: Tensor) -> Tensor:
        tokens = len(self.vectors)
        shares = (SHARPNESS * math.log(tokens) * likeness(vectors, self.vectors, self.padding)).softmax(-1)
        if self.padding is None:
            return shares
        return torch.where((ids == self.padding)[..., None], one_hot(ids, tokens, shares.dtype), shares)


@dataclass(frozen=True, eq=False)
class EmbeddedReplay(ReplayedGradient):
    """The client's gradients at vectors, or at tokens where the batch has no vectors; the word embedding's left out.

    In the unit of a gradient, as `ReplayedGradient`.

    layer   the embedding
    soft    a model of the next token is given shares of the vocabulary as targets (`takes_shares`)
    """

    layer: str = ""
    soft: bool = False

    def target(self, scene: TargetView) -> Params:
        return self._compared(super().target(scene), scene)

    def disturbed(self, scene: TargetView, draws: Draws) -> Params:
        return self._compared(super().disturbed(scene, draws), scene)

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Params:
        if LOOKED_UP in batch:
            task = scene.task
            module, padding = task.model.get_submodule(self.layer), padding_of(task, self.layer)
            meet = next_token(task) if self.soft else None
            looked_up = LookedUp(task.objective, module, vocabulary(scene, self.layer), padding, meet)
            scene = replace(scene, task=replace(task, objective=looked_up))
        return self._compared(super().__call__(batch, v, scene, now), scene)

    def _compared(self, update: Params, scene: TargetView) -> Params:
        left_out = name_of(scene.task, self.layer)
        return {name: value for name, value in update.items() if name.rpartition("/")[2] != left_out}


# --- priors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeanLength(Prior):
    """weight * (mean length of the vectors / mean length of the vocabulary's - 1)^2 (LAMP, there in lengths)."""

    weight: float
    layer: str

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        usual = vocabulary(scene, self.layer).norm(dim=1).mean()
        kept = counted(scene)
        lengths = tree.safe_sqrt(batch[LOOKED_UP].square().sum(-1))
        mean = torch.where(kept, lengths, 0.0).sum() / kept.sum().clamp_min(1)
        return self.weight * (mean / usual - 1).square()
