"""TAG: the vectors of a text by the gradient they give, in squared and absolute differences, the first layers most."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradleak.attack import Attack, Composed, Reconstruction, require, supported
from gradleak.attacks.settings import SearchSettings
from gradleak.core import tree
from gradleak.core.listeners import Share
from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.core.tree import Params
from gradleak.engine import Engine
from gradleak.parts.embedded import (
    Embedded,
    EmbeddedReplay,
    NearestTokens,
    embedding_of,
    next_token,
    takes_shares,
    unembedded,
)
from gradleak.parts.matches import layers_of
from gradleak.parts.optimisers import Adam, Still, require_positive
from gradleak.parts.protocols import Match, Needs, Prediction
from gradleak.parts.stage import Stage
from gradleak.scenario.observation import Knowledge, Seen
from gradleak.scenario.task import Task

PAPER = "Deng et al., TAG: Gradient Attack on Transformer-based Language Models, Findings of EMNLP 2021"


@dataclass(frozen=True)
class TagDistance(Match):
    """sum over tensors of ||p - o||_2^2 + a_l ||p - o||_1.

    falling   a_l = alpha (1 - l / L) for layer l = 0, 1, ... of L: the layers nearest to the input count most. False:
              a_l = alpha in all
    """

    alpha: float = 0.01
    falling: bool = True
    squares: ClassVar[bool] = False

    def reduce(self, residual: Params) -> Tensor:
        absolute = [weight * residual[name].abs().sum() for name, weight in self.weights(residual).items()]
        return tree.squared_norm(residual) + torch.stack(absolute).sum()

    def weights(self, params: Params) -> dict[str, float]:
        """a_l of each tensor. Layers are in the order of the model's parameters."""
        layers = layers_of(params)
        count = 1 + max(layers.values())
        return {name: self.alpha * (1 - layer / count if self.falling else 1) for name, layer in layers.items()}


@dataclass(frozen=True)
class TextSearch(Attack):
    """A search for the vectors of texts. What its stages are depends on which module embeds the tokens."""

    @property
    def work(self) -> int:
        return self.composed("").work

    @property
    def search_needs(self) -> Needs:
        return self.composed("").search_needs

    @property
    def needs(self) -> Needs:
        return self.composed("").needs

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        return unembedded(task) or self.composed(embedding_of(task)).refuses(task, given)

    def composed(self, layer: str, soft: bool = False) -> Composed:
        """The stages for a model whose module `layer` embeds the tokens; `soft`: its loss takes shares of them."""
        raise NotImplementedError

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
        """Attack one target or several. `batch["x"]` of the result holds ids."""
        supported(self, task, knows)
        require(self, knows)
        soft = takes_shares(task)
        attack = self.composed(embedding_of(task), soft)
        result = attack.run(task, seen, knows, seed, engine=engine, progress=progress)
        targets = {} if next_token(task) is None else {"targets": "shares" if soft else "nearest tokens"}
        return replace(result, settings={**result.settings, "attack": repr(self), **targets})


def projection(predict: Prediction, match: Match, layer: str) -> Stage:
    """The last stage: the nearest tokens, and how well they match."""
    return Stage(NearestTokens(layer), predict, match, (), Still())


@dataclass(frozen=True, kw_only=True)
class TagSettings(SearchSettings):
    """Steps, rate and the weight of absolute differences."""

    steps: int = 1000
    lr: float = 0.1
    alpha: float = 0.01

    def __post_init__(self) -> None:
        require_positive(self, whole=("steps", "restarts"), real=("lr",))
        if not self.alpha >= 0:
            raise ValueError(f"alpha must be a number from 0; given {self.alpha!r}.")


@named("tag", kind="attack", paper=PAPER)
@takes(TagSettings)
def tag(settings: TagSettings) -> Attack:
    """Search a vector for each place of a text by the gradient it gives, squared and absolute; then the nearest tokens.

    min over E of sum over layers l of ||grad_l(E, y) - observed_l||_2^2 + a_l ||grad_l(E, y) - observed_l||_1 with
    Adam, E from N(0, s^2), s the root mean square of the word embedding's entries. a_l falls linearly from `alpha` at
    the first layer. In the end each place gets the token of the largest cosine, and the match is that of the tokens.

    lr      in units of s: it fits models of any scale
    alpha   0 gives DLG on texts

    Labels of a sequence classifier are read off or given. Where the model predicts its own next token, the targets are
    shares of the vocabulary by nearness, and the nearest tokens where the loss takes no shares: `settings["targets"]`
    of the result says which. Masked language models need `y`.
    The word embedding's own gradient is not compared (`parts.embedded`): with tied weights it would mislead.

    Differs: the paper gives no formula for a_l, only that layers nearer to the input weigh more; start and rate are in
    units of the embedding; labels are not searched for where they can be read; special tokens are searched for like
    any other; the client's steps are replayed where its recipe is known; the iterate with the best match is projected.
    """
    return Tag(settings)


@dataclass(frozen=True)
class Tag(TextSearch):
    """The search, then the projection."""

    options: TagSettings

    @property
    def name(self) -> str:
        return "tag"

    def composed(self, layer: str, soft: bool = False) -> Composed:
        options = self.options
        predict, match = EmbeddedReplay(layer=layer, soft=soft), TagDistance(options.alpha)
        search = Stage(Embedded(layer), predict, match, (), Adam(lr=options.lr, steps=options.steps))
        return options.attack(self.name, search, projection(predict, match, layer))
