"""LAMP: the vectors of a text by the direction of the gradient, and their order by a language model in turns."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradleak.attack import Attack, Composed, Reconstruction
from gradleak.attacks.settings import SearchSettings
from gradleak.attacks.tag import TagDistance, TextSearch, projection
from gradleak.core import tree
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.core.settings import takes
from gradleak.core.tree import Params, Tree
from gradleak.engine import Engine
from gradleak.parts.embedded import (
    ORDER,
    VECTORS,
    Embedded,
    EmbeddedReplay,
    MeanLength,
    Reordered,
    counted,
)
from gradleak.parts.frozen import frozen
from gradleak.parts.optimisers import Adam, require_positive
from gradleak.parts.protocols import LaneObjective, Match, Optimiser, Prior, Scored
from gradleak.parts.stage import Stage
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.objectives import prediction_of
from gradleak.scenario.observation import Knowledge, MissingKnowledge, Seen
from gradleak.scenario.task import Batch, Task

PAPER = "Balunovic, Dimitrov, Jovanovic, Vechev, LAMP: Extracting Text from Gradients with Language Model Priors, "
PAPER += "NeurIPS 2022"
MATCHES = ("cosine", "l1l2")
BURN_IN = 0.1  # of the steps, before the first re-ordering
FALL, EVERY = 0.89, 50  # the rate is multiplied by the one after so many steps
ROUNDING = 1e-6  # of the longest tensor: a shorter one has no direction but that of its rounding
MOVES = 4  # kinds of re-ordering


# --- match ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerCosine(Match):
    """Mean over tensors of 1 - cos, as half the squared distance of unit vectors.

    Tensors that are observed shorter than `ROUNDING` of the longest are left out: the gradient of the bias of attention
    keys is zero, and what is sent for it is rounding.
    """

    scale_free: ClassVar[bool] = True

    def prepare(self, observed: Params) -> Params:
        lengths = {name: tree.norm({"": value}) for name, value in observed.items()}
        least = ROUNDING * torch.stack(list(lengths.values())).amax()
        inverse = {name: torch.where(each > least, tree.safe_inverse(each), 0.0) for name, each in lengths.items()}
        return {name: value * inverse[name] for name, value in observed.items()}

    def residual(self, predicted: Params, observed: Params) -> Params:
        used = {name: (value != 0).any() for name, value in observed.items()}
        count = torch.stack(list(used.values())).sum().clamp_min(1)
        share = (0.5 / count).sqrt()

        def of_tensor(name: str, value: Tensor) -> Tensor:
            unit = value * tree.safe_inverse(tree.norm({"": value}))
            return torch.where(used[name], share.to(value.dtype) * (unit - observed[name]), 0.0)

        return {name: of_tensor(name, value) for name, value in predicted.items()}


# --- the language model -----------------------------------------------------------------------------------------------


def log_perplexity(scores: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
    """Mean of -log p(token | tokens before it) over all tokens that have one before them.

    scores   of a causal model for the next token, (examples, places, vocabulary)
    kept     the places that hold tokens, (examples, places)
    """
    told = -scores[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    both = kept[:, 1:] & kept[:, :-1]
    return torch.where(both, told, 0.0).sum() / both.sum().clamp_min(1)


@dataclass(frozen=True)
class Perplexity(Prior):
    """weight * the log-perplexity of the nearest tokens under the language model of `Knowledge.generator`."""

    weight: float

    def __call__(self, batch: Batch, v: Tree, scene: TargetView, now: Step) -> Tensor:
        scores = prediction_of(frozen(scene.knows.generator, scene.like)(batch["x"]))
        return self.weight * log_perplexity(scores, batch["x"], counted(scene))


def unfit(generator: Any, task: Task) -> str:
    """Why a generator is no language model for the texts of this task; empty if it is one."""
    if not isinstance(generator, nn.Module):
        return f"it is a {type(generator).__name__} and no network"
    classes, device = task.fields["x"].classes or 0, next((p.device for p in generator.parameters()), None)
    try:
        with torch.no_grad():
            scores = prediction_of(generator(torch.zeros((1, 2), dtype=torch.long, device=device)))
    except Exception as problem:  # a user's network can raise anything; here that is the answer
        return f"it takes no token ids ({type(problem).__name__}: {problem})"
    if scores.shape[:2] != (1, 2) or scores.dim() != 3 or scores.shape[2] < classes:
        return f"of ids (1, 2) it makes {tuple(scores.shape)}; wanted scores (1, 2, {classes}) of the same vocabulary"
    return ""


# --- discrete steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proposals(Optimiser):
    """Tries `steps` points, the one it starts from first, and ends at the best by the whole objective.

    stream   of random numbers: stages that follow each other draw different ones
    """

    steps: int
    stream: int = 0
    graphable: bool = True

    def proposed(self, v: Tree, draws: Draws, now: Step) -> Tree:
        """Another point, made of the best one so far."""
        raise NotImplementedError

    def init(self, problem: LaneObjective, v: Tree) -> Tree:
        like = tree.like(v)
        return {
            "best": v,
            "objective": torch.full((), torch.inf, dtype=like.dtype, device=like.device),
            "key": problem.key,
        }

    def step(self, problem: LaneObjective, v: Tree, state: Tree, now: Step) -> tuple[Tree, Tree, Scored]:
        draws = Draws(state["key"]).child(self.stream)
        trial = tree.where(now.step == 0, state["best"], self.proposed(state["best"], draws, now))
        scored = problem.value(trial)
        better = scored.objective < state["objective"]  # false for NaN
        best = tree.where(
            better,
            {"at": trial, "objective": scored.objective},
            {"at": state["best"], "objective": state["objective"]},
        )
        return trial, {"best": best["at"], "objective": best["objective"], "key": state["key"]}, scored

    def final(self, v: Tree, state: Tree) -> Tree:
        best: Tree = state["best"]
        return best


@dataclass(frozen=True)
class Starts(Proposals):
    """Random vectors."""

    def proposed(self, v: Tree, draws: Draws, now: Step) -> Tree:
        vectors = v[VECTORS]
        return {**v, VECTORS: draws.normal(tuple(vectors.shape), step=now.step.long(), dtype=vectors.dtype)}


@dataclass(frozen=True)
class Reorderings(Proposals):
    """Re-orderings of one text of the batch, of the four kinds in turn (`moved`)."""

    def proposed(self, v: Tree, draws: Draws, now: Step) -> Tree:
        order = v[ORDER]
        texts, places = order.shape
        numbers = draws.uniform((4,), step=now.step.long(), dtype=torch.float64)
        text = (numbers[0] * texts).floor()
        kind = torch.remainder(now.step, MOVES)
        permuted = order.argsort(1).index_select(1, moved(kind, numbers[1:], places)).argsort(1).to(order.dtype)
        this = torch.arange(texts, device=order.device)[:, None] == text
        return {**v, ORDER: torch.where(this, permuted, order)}


def moved(kind: Tensor, numbers: Tensor, places: int) -> Tensor:
    """A permutation of so many places, (places,), drawn with three numbers of U(0, 1).

    kind   0: two tokens change places; 1: a token moves; 2: a run of tokens moves; 3: the first ones go to the end
    """
    at = torch.arange(places, device=numbers.device, dtype=numbers.dtype)
    first, second = (numbers[:2] * places).floor().unbind()
    swapped = torch.where(at == first, second, torch.where(at == second, first, at))
    side = torch.where(second > first, 0.5, -0.5)
    single = torch.where(at == first, second + side, at)
    begin, last = torch.minimum(first, second), torch.maximum(first, second)
    size = last - begin + 1
    inside = (at >= begin) & (at <= last)
    goal = (numbers[2] * (places - size + 1)).floor()  # tokens that stay and come before the run
    rest = torch.where(at > last, at - size, at)
    run = torch.where(inside, goal - 0.5 + (at - begin) / (2 * places), rest)
    turned = torch.where(at <= first, at + places, at)
    return torch.stack([swapped, single, run, turned]).index_select(0, kind.long()[None])[0].argsort()


@dataclass(frozen=True)
class FallingRate:
    """Times `FALL` after every `EVERY` steps, in a stage that begins after `before` steps of the same search."""

    before: int = 0

    def __call__(self, now: Step) -> Tensor:
        return torch.exp(math.log(FALL) * torch.floor((now.step + self.before) / EVERY))


# --- the attack -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LampSettings(SearchSettings):
    """The match, the steps of either sort, and the weights of the priors."""

    steps: int = 2000
    lr: float = 0.2
    match: str = "cosine"
    every: int = 75
    candidates: int = 200
    starts: int = 500
    language: float = 0.2
    length: float = 1.0
    alpha: float = 0.01
    keep: str = "last"

    def __post_init__(self) -> None:
        whole = ("steps", "every", "candidates", "starts", "restarts")
        require_positive(self, whole=whole, real=("lr",))
        if self.match not in MATCHES:
            raise ValueError(f"match must be {' or '.join(map(repr, MATCHES))}; given {self.match!r}.")
        if self.keep != "last":
            raise ValueError(f"lamp keeps the order with the lowest objective, so keep is 'last'; given {self.keep!r}.")
        for name in ("language", "length", "alpha"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be a number from 0; given {getattr(self, name)!r}.")


@named("lamp", kind="attack", paper=PAPER)
@takes(LampSettings)
def lamp(settings: LampSettings) -> Attack:
    """Search a vector for each place of a text by the gradient's direction, and try orders that read well in between.

    Continuous steps: min over E of D(grad(E, y), observed) + length * (mean |E_i| / mean |vocabulary| - 1)^2 with Adam.
    D is the mean over tensors of 1 - cos ("cosine", LAMP_cos), or TAG's squares and absolute differences with one
    weight `alpha` for all layers ("l1l2"). Discrete steps, after every `every` of them from a tenth of all on: of
    `candidates` re-orderings (two tokens swapped, a token moved, a run of tokens moved, the first ones put at the end)
    the one with the lowest D + language * log-perplexity of the nearest tokens. In the end each place gets the token of
    the largest cosine, and the match is that of the tokens.

    The language model is the attacker's own, `Knowledge.generator`: a causal network over the same vocabulary, from ids
    (examples, places) to scores (examples, places, vocabulary). Without one this prior is off, and
    `settings["language_model"]` of the result says so: what remains re-orders by the match alone.

    lr       in units of the embedding's root mean square (the authors': 0.01 at width 768 and length 1.4); times 0.89
             after every 50 steps
    starts   random starts, of which the best by match is taken
    keep     "last", always: the best iterate by match would undo what the language model chose

    Labels of a sequence classifier are read off or given. Where the model predicts its own next token, the targets are
    shares of the vocabulary by nearness, and the nearest tokens where the loss takes no shares: `settings["targets"]`
    of the result says which. Masked language models need `y`.
    The word embedding's own gradient is not compared (`parts.embedded`): with tied weights it would mislead.

    Differs: start, rate and lengths are in units of the embedding; the starts are not re-ordered; a candidate re-orders
    the best so far and one text drawn from the batch, not the text before it and each in turn; Adam starts anew after
    each re-ordering; special tokens are searched for like any other; tensors of rounding alone are not compared; the
    language model must share the vocabulary; the client's steps are replayed where its recipe is known; the last
    vectors are projected, not the best ones.
    """
    return Lamp(settings)


@dataclass(frozen=True)
class Lamp(TextSearch):
    """Continuous and discrete stages in turn, then the projection. `reads`: is there a language model?"""

    options: LampSettings
    reads: bool = False

    @property
    def name(self) -> str:
        return "lamp"

    def composed(self, layer: str, soft: bool = False) -> Composed:
        options = self.options
        predict = EmbeddedReplay(layer=layer, soft=soft)
        match: Match = LayerCosine() if options.match == "cosine" else TagDistance(options.alpha, falling=False)
        lengths = (MeanLength(options.length, layer),) if options.length else ()
        fluent = (Perplexity(options.language),) if self.reads else ()
        stages = [Stage(Embedded(layer), predict, match, (), Starts(options.starts))]
        done = 0
        for number, steps in enumerate(turns(options.steps, options.every), start=1):
            moving = Adam(lr=options.lr, steps=steps, schedule=FallingRate(done))
            stages.append(Stage(Embedded(layer), predict, match, lengths, moving))
            ordering = Reorderings(options.candidates, number)
            stages.append(Stage(Reordered(layer), predict, match, fluent, ordering))
            done += steps
        return options.attack(self.name, *stages, projection(predict, match, layer))

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
        """Attack one target or several, with the language model of `knows`, if there is one."""
        model, used = knows.generator, bool(self.options.language) and knows.generator is not None
        if used and not self.refuses(task, knows.given) and (reason := unfit(model, task)):
            raise MissingKnowledge(
                f"lamp takes a language model as Knowledge(generator=...), and this is none for these texts: {reason}. "
                "Give a causal network over the same token ids, or none: then it searches without one."
            )
        search = replace(self, reads=used)
        result = TextSearch.run(search, task, seen, knows, seed, engine=engine, progress=progress)
        told = f"{type(model).__name__}, weight {self.options.language:g}" if used else off(model)
        return replace(result, settings={**result.settings, "language_model": told})


def off(model: Any) -> str:
    """Why the language prior was not used."""
    return "off: Knowledge has none (generator)" if model is None else "off: its weight (language) is 0"


def turns(steps: int, every: int) -> list[int]:
    """How many continuous steps precede each re-ordering; the first one waits until the burn-in is over."""
    first = min(steps, every * max(1, math.ceil(BURN_IN * steps / every)))
    rest = steps - first
    return [first, *[every] * (rest // every), *([rest % every] if rest % every else [])]
