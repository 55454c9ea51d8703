"""TAG and LAMP: texts through the vectors that a model looks up for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl
from conftest import largest_difference, moment, perceptron, scene_of, seeded
from gradleak.attacks.lamp import MOVES, LayerCosine, Reorderings, log_perplexity, moved, turns
from gradleak.attacks.tag import TagDistance
from gradleak.auto import Case
from gradleak.auto.residual import residuals
from gradleak.engine import Engine
from gradleak.parts.embedded import (
    LOOKED_UP,
    ORDER,
    VECTORS,
    Embedded,
    EmbeddedReplay,
    MeanLength,
    NearestTokens,
    Reordered,
    embedding_of,
    nearest,
    sources,
    takes_shares,
    unembedded,
    unit_of,
)
from gradleak.parts.predictions import ReplayedGradient
from gradleak.parts.protocols import LaneObjective, Match, Scored
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.fields import UnsupportedTask
from gradleak.scenario.kinds import Mask, Tokens
from gradleak.scenario.objectives import Input, NextToken, Supervised
from gradleak.scenario.observation import Knowledge, MissingKnowledge, as_targets
from gradleak.scenario.task import Batch, Field, Task
from test_kinds import TextClassifier, text_task

WORDS, LENGTH, WIDTH = 60, 6, 24
TRAINING = LocalTraining(lr=0.1)
KNOWS = Knowledge(training=TRAINING)
CPU = Engine(device="cpu")
QUICK = {"steps": 150, "candidates": 12, "starts": 12}


class Encoder(nn.Module):
    """One block of attention over words and places; `causal`: a score for each next token, else a class of the mean."""

    def __init__(
        self, outputs: int = 2, *, causal: bool = False, placed: bool = True, padding: int | None = None
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding), nn.Embedding(LENGTH, WIDTH)
        nn.init.normal_(self.words.weight, std=0.05)
        nn.init.normal_(self.places.weight, std=0.05)
        self.norm, self.mixed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, outputs)
        self.causal, self.placed = causal, placed

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        x = self.norm(x + self.places(torch.arange(ids.shape[1])) if self.placed else x)
        query, key, value = self.mixed(x).chunk(3, -1)
        scores = query @ key.transpose(1, 2) / WIDTH**0.5
        kept = torch.ones_like(x[..., 0]) if attention_mask is None else attention_mask.to(x.dtype)
        scores = scores + (kept - 1)[:, None] * 1e4
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -1e4)
        x = x + scores.softmax(-1) @ value
        x = x + self.narrow(F.gelu(self.wide(x)))
        return self.head(x if self.causal else (x * kept[..., None]).sum(1) / kept.sum(1, keepdim=True))


TEXT = Field((LENGTH,), classes=WORDS, kind=Tokens())


@cache
def classifier(dtype: torch.dtype = torch.float64, seed: int = 0, placed: bool = True) -> Task:
    torch.manual_seed(seed)
    model = Encoder(placed=placed).to(dtype)
    return Task(model, Supervised(F.cross_entropy), {"x": TEXT, "y": Field((), classes=2)})


@cache
def predictor(tied: bool = False) -> Task:
    """A model of the next token."""
    torch.manual_seed(0)
    model = Encoder(WORDS, causal=True).double()
    if tied:
        model.head.weight = model.words.weight
    return Task(model, Supervised(F.cross_entropy, target="x", meet=NextToken()), {"x": TEXT})


@cache
def masked(dtype: torch.dtype = torch.float64) -> Task:
    """A classifier with a public mask; token 7 is padding."""
    torch.manual_seed(0)
    fields = {
        "x": replace(TEXT, kind=Tokens(padding=7)),
        "attention_mask": Field((LENGTH,), classes=2, kind=Mask(), public=True),
        "y": Field((), classes=2),
    }
    inputs = (Input("x", "ids"), Input("attention_mask", "attention_mask"))
    return Task(Encoder(padding=7).to(dtype), Supervised(F.cross_entropy, inputs), fields)


def texts(count: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(8, WORDS, (count, LENGTH), generator=seeded(seed))


def batch_of(task: Task, count: int = 1, seed: int = 0) -> Batch:
    batch = {"x": texts(count, seed), "y": torch.arange(count) % 2}
    return {name: batch[name] for name in batch if name in task.fields}


def padded(count: int = 1) -> Batch:
    """Texts of four tokens, filled with padding."""
    batch = {"x": texts(count), "attention_mask": torch.ones(count, LENGTH, dtype=torch.long), "y": torch.arange(count)}
    batch["x"][:, 4:], batch["attention_mask"][:, 4:] = 7, 0
    return batch


class Following(nn.Module):
    """A language model that knows that each token is followed by the next number."""

    def __init__(self, vocabulary: int = WORDS) -> None:
        super().__init__()
        self.scores = nn.Parameter(5.0 * torch.eye(vocabulary).roll(1, 1))

    def forward(self, ids: Tensor) -> Tensor:
        return self.scores[ids]


# --- identities -------------------------------------------------------------------------------------------------------

MATCHES = [TagDistance(0.1), TagDistance(0.1, falling=False), LayerCosine()]
TASKS = {"classifier": classifier, "next token": predictor, "tied": lambda: predictor(True)}


def match_at(task: Task, ids: Tensor, vectors: Tensor, match: Match, training: LocalTraining = TRAINING) -> float:
    """The match of these vectors with the update of a client that has these tokens."""
    batch = batch_of(task, len(ids)) | {"x": ids}
    scene = scene_of(task, gl.observe(task, batch, training), Knowledge(training=training))
    predict = EmbeddedReplay(layer="words")
    observed = match.prepare(predict.target(scene))
    return float(match.distance(predict({**batch, LOOKED_UP: vectors}, {}, scene, moment()), observed))


@pytest.mark.parametrize("match", MATCHES, ids=["tag", "l1l2", "cosine"])
@pytest.mark.parametrize("name", TASKS)
def test_the_match_is_zero_at_the_clients_vectors_and_only_there(name: str, match: Match) -> None:
    task, ids = TASKS[name](), texts(2)
    weight = task.model.get_submodule("words").weight.detach()
    assert match_at(task, ids, weight[ids], match) < 1e-12
    assert match_at(task, ids, weight[ids.roll(1, 1)], match) > 1e-4
    assert match_at(task, ids, weight[ids] * 1.1, match) > 1e-6


@pytest.mark.parametrize("name", TASKS)
def test_vectors_of_tokens_give_the_gradient_of_the_tokens_but_for_their_embedding(name: str) -> None:
    task = TASKS[name]()
    batch = batch_of(task, 3)
    scene = scene_of(task, gl.observe(task, batch, TRAINING), KNOWS)
    vectors = task.model.get_submodule("words").weight.detach()[batch["x"]]
    whole = ReplayedGradient()(batch, {}, scene, moment())
    found = EmbeddedReplay(layer="words")({**batch, LOOKED_UP: vectors}, {}, scene, moment())
    assert whole.keys() - found.keys() == {"words.weight"}
    for each, value in found.items():
        torch.testing.assert_close(value, whole[each], rtol=0, atol=1e-12)
    assert not task.model.get_submodule("words")._forward_hooks


def test_small_batches_take_the_vectors_of_their_own_texts() -> None:
    """Over several steps the vectors stay, so the replay is exact where the client does not train its embedding."""
    task = classifier(seed=3)
    task.model.get_submodule("words").weight.requires_grad_(False)
    training = LocalTraining(lr=0.1, epochs=2, batch_size=2)
    batch = batch_of(task, 4)
    scene = scene_of(task, gl.observe(task, batch, training), Knowledge(training=training))
    vectors = task.model.get_submodule("words").weight[batch["x"]]
    whole = ReplayedGradient()(batch, {}, scene, moment())
    found = EmbeddedReplay(layer="words")({**batch, LOOKED_UP: vectors}, {}, scene, moment())
    assert largest_difference(found, whole) < 1e-12
    other = EmbeddedReplay(layer="words")({**batch, LOOKED_UP: vectors.roll(1, 0)}, {}, scene, moment())
    assert largest_difference(other, whole) > 1e-4


def test_the_weights_of_tag_fall_from_the_first_layer_to_the_last() -> None:
    ones = {"a.weight": torch.ones(2), "a.bias": torch.ones(1), "b.weight": torch.ones(3), "c.weight": torch.ones(4)}
    zeros = {name: torch.zeros_like(value) for name, value in ones.items()}
    match = TagDistance(0.3)
    assert match.weights(ones) == pytest.approx({"a.weight": 0.3, "a.bias": 0.3, "b.weight": 0.2, "c.weight": 0.1})
    assert float(match.distance(ones, zeros)) == pytest.approx(10 + 0.3 * 3 + 0.2 * 3 + 0.1 * 4)
    assert float(TagDistance(0.3, falling=False).distance(ones, zeros)) == pytest.approx(10 + 0.3 * 10)
    assert float(TagDistance(0).distance(ones, zeros)) == pytest.approx(10)


def test_the_cosine_of_lamp_is_a_mean_over_tensors_without_those_of_rounding() -> None:
    make = seeded()
    p, o = ({"a": torch.randn(5, generator=make), "b": torch.randn(3, 2, generator=make)} for _ in range(2))
    wanted = sum(1 - F.cosine_similarity(p[n].flatten(), o[n].flatten(), 0) for n in p) / 2
    match = LayerCosine()
    torch.testing.assert_close(match.distance(p, match.prepare(o)), wanted)
    noise = {"c": torch.randn(4, generator=make)}
    torch.testing.assert_close(
        match.distance({**p, **noise}, match.prepare({**o, "c": torch.full((4,), 1e-9)})), wanted
    )
    scaled = {name: 3 * value for name, value in p.items()}
    torch.testing.assert_close(match.distance(scaled, match.prepare(o)), wanted)


def test_log_perplexity_is_that_of_a_known_model() -> None:
    """Two tokens; after 0 comes 1 with probability 0.9, after 1 comes 0 with probability 0.6."""
    scores = torch.tensor([[0.1, 0.9], [0.6, 0.4]]).log()
    ids = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]])
    every = torch.ones_like(ids, dtype=torch.bool)
    wanted = -sum(map(math.log, (0.9, 0.4, 0.6, 0.6, 0.9, 0.4))) / 6
    assert float(log_perplexity(scores[ids], ids, every)) == pytest.approx(wanted)
    some = torch.tensor([[True, True, True, False], [True, False, False, False]])
    assert float(log_perplexity(scores[ids], ids, some)) == pytest.approx(-math.log(0.9 * 0.4) / 2)


def test_lengths_are_compared_with_those_of_the_vocabulary() -> None:
    task = masked()
    batch = padded()
    scene = scene_of(task, gl.observe(task, batch, TRAINING), KNOWS, **batch)
    weight = task.model.get_submodule("words").weight.detach()
    vectors = torch.full((1, LENGTH, WIDTH), float(weight.norm(dim=1).mean() / WIDTH**0.5), dtype=torch.float64)
    prior = MeanLength(2.0, "words")
    vectors[:, 4:] = 100.0  # padding does not count
    assert float(prior({LOOKED_UP: vectors}, {}, scene, moment())) == pytest.approx(0, abs=1e-20)
    assert float(prior({LOOKED_UP: 1.5 * vectors}, {}, scene, moment())) == pytest.approx(2 * 0.25)


# --- orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", range(MOVES))
def test_every_reordering_is_a_permutation(kind: int) -> None:
    make, met = seeded(kind), set()
    for places in (1, 2, 3, 7):
        for _ in range(60):
            found = moved(torch.tensor(float(kind)), torch.rand(3, generator=make, dtype=torch.float64), places)
            assert sorted(found.tolist()) == list(range(places))
            met.add(tuple(found.tolist()))
    assert len([each for each in met if len(each) == 7]) > 5


@pytest.mark.parametrize(
    ("kind", "numbers", "wanted"),
    [
        (0, (0.21, 0.81, 0.0), [0, 4, 2, 3, 1]),  # tokens 1 and 4 change places
        (1, (0.21, 0.61, 0.0), [0, 2, 3, 1, 4]),  # token 1 goes to place 3
        (1, (0.61, 0.01, 0.0), [3, 0, 1, 2, 4]),  # token 3 goes to the front
        (2, (0.21, 0.41, 0.99), [0, 3, 4, 1, 2]),  # the run 1, 2 goes to the end
        (2, (0.61, 0.81, 0.26), [0, 3, 4, 1, 2]),  # the run 3, 4 goes behind the first
        (3, (0.21, 0.0, 0.0), [2, 3, 4, 0, 1]),  # the first two go to the end
    ],
)
def test_reorderings_do_what_they_are_called(kind: int, numbers: Any, wanted: list[int]) -> None:
    found = moved(torch.tensor(float(kind)), torch.tensor(numbers, dtype=torch.float64), 5)
    assert found.tolist() == wanted


def test_padding_keeps_its_place_in_every_order() -> None:
    order = torch.tensor([[3.0, 0.0, 2.0, 1.0, 4.0], [4.0, 3.0, 2.0, 1.0, 0.0]])
    kept = torch.tensor([[True, True, False, True, False], [False, True, True, True, True]])
    assert sources(order, kept).tolist() == [[1, 3, 2, 0, 4], [0, 4, 3, 2, 1]]
    start = torch.arange(5.0).expand(2, 5)
    assert sources(start, kept).tolist() == [[0, 1, 2, 3, 4]] * 2


class Sorting(LaneObjective):
    """Lowest where every text has its tokens in falling order."""

    def value(self, v: Any) -> Scored:
        wanted = torch.arange(v[ORDER].shape[1], dtype=torch.float64).flip(0)
        far = (v[ORDER] - wanted).abs().sum()
        return Scored(v, far, far)


def test_orders_only_get_better() -> None:
    optimiser, problem = Reorderings(300), Sorting()
    v = {ORDER: torch.arange(5.0, dtype=torch.float64).expand(2, 5).clone()}
    state, best = optimiser.init(problem, v), []
    for step in range(optimiser.steps):
        v, state, _ = optimiser.step(problem, v, state, moment(step, optimiser.steps))
        best.append(float(problem.value(optimiser.final(v, state)).objective))
    assert best[0] == 24  # the order that it began with
    assert all(later <= earlier for earlier, later in zip(best, best[1:], strict=False))
    assert best[-1] <= 4
    assert all(sorted(row) == [0, 1, 2, 3, 4] for row in optimiser.final(v, state)[ORDER].tolist())


def test_continuous_steps_come_in_turns_after_the_burn_in() -> None:
    assert turns(2000, 75) == [225, *[75] * 23, 50]
    assert turns(1, 75) == [1]
    assert turns(100, 100) == [100]
    assert sum(turns(1234, 75)) == 1234


# --- spaces -----------------------------------------------------------------------------------------------------------


def test_starts_have_the_scale_of_the_embedding_and_nearest_tokens_are_never_padding() -> None:
    task, batch = masked(), padded(2)
    scene = scene_of(task, gl.observe(task, batch, TRAINING), KNOWS, attention_mask=batch["attention_mask"])
    assert scene.draws is not None
    space = Embedded("words")
    v = space.variables(scene, scene.draws, None)
    assert v[VECTORS].shape == (2, LENGTH, WIDTH)
    shown, weight = space.decode(v, scene, moment()), task.model.get_submodule("words").weight.detach()
    assert float(shown[LOOKED_UP][:, :4].std()) == pytest.approx(float(unit_of(weight)), rel=0.2)
    assert torch.equal(shown[LOOKED_UP][:, 4:], weight[7].expand(2, 2, WIDTH))
    assert (shown["x"][:, 4:] == 7).all()
    assert not (shown["x"][:, :4] == 7).any()
    assert nearest(weight[[3, 7]][None], weight, None)[0, 0] == 3
    left = {VECTORS: weight[batch["x"]] * 3.0}
    constants = NearestTokens("words").constants(scene, scene.draws, left)
    assert torch.equal(
        NearestTokens("words").decode({}, replace(scene, constants=constants), moment())["x"], batch["x"]
    )


def test_an_order_moves_vectors_and_leaves_them_to_the_next_stage() -> None:
    task, batch = masked(), padded()
    scene = scene_of(task, gl.observe(task, batch, TRAINING), KNOWS, attention_mask=batch["attention_mask"])
    assert scene.draws is not None
    weight, space = task.model.get_submodule("words").weight.detach(), Reordered("words")
    before = {VECTORS: weight[batch["x"]] / unit_of(weight)}
    scene = replace(scene, constants=space.constants(scene, scene.draws, before))
    v = space.variables(scene, scene.draws, before)
    assert torch.equal(space.decode(v, scene, moment())["x"], batch["x"])
    turned = space.decode({ORDER: v[ORDER].flip(1)}, scene, moment())
    assert turned["x"].tolist() == [[*batch["x"][0, :4].flip(0).tolist(), 7, 7]]
    left = space.left({ORDER: v[ORDER].flip(1)}, scene)
    torch.testing.assert_close(left[VECTORS][:, :4], before[VECTORS][:, :4].flip(1))
    with pytest.raises(ValueError, match="must leave 'embedded'"):
        space.constants(scene, scene.draws, None)


# --- what they recover ------------------------------------------------------------------------------------------------


@cache
def recovered(name: str, **settings: Any) -> tuple[gl.Reconstruction, Tensor]:
    task = classifier(torch.float32)
    batch = batch_of(task, seed=1)
    attack = gl.attacks.get(name, **settings)
    return attack.run(task, gl.observe(task, batch, TRAINING), KNOWS, engine=CPU), batch["x"]


CASES: dict[str, Callable[[], tuple[gl.Reconstruction, Tensor]]] = {
    "tag": lambda: recovered("tag", steps=250),
    "lamp": lambda: recovered("lamp", **QUICK),
    "lamp, l1l2": lambda: recovered("lamp", **QUICK, match="l1l2"),
}


@pytest.mark.parametrize("name", CASES)
def test_most_tokens_of_a_short_text_come_back(name: str) -> None:
    found, ids = CASES[name]()
    assert found.batch["x"].dtype == torch.int64
    assert float((found.batch["x"][0] == ids).double().mean()) >= 0.8
    assert found.batch["y"].tolist() == [[0]]  # read off
    assert found.match[0, 0] < 0.2 * found.trace["match"][0, 0, 0]


@pytest.mark.parametrize("tied", [False, True])
def test_tokens_of_a_model_of_the_next_token_come_back(tied: bool) -> None:
    task = predictor(tied)
    batch = batch_of(task, seed=1)
    seen = gl.observe(task, batch, TRAINING)
    found = gl.attacks.get("tag", steps=250).run(task, seen, KNOWS, engine=CPU)
    assert set(found.batch) == {"x"}
    assert found.settings["targets"] == "shares"
    assert float((found.batch["x"][0] == batch["x"]).double().mean()) >= 0.8


def flat(scores: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of whole ids alone."""
    return F.cross_entropy(scores.transpose(1, 2).reshape(-1, WORDS), ids.reshape(-1))


@pytest.mark.parametrize("padding", [None, 7])
@pytest.mark.parametrize("first", [True, False])
def test_shares_of_the_vocabulary_are_targets_of_the_next_token(padding: int | None, first: bool) -> None:
    """At vectors that are tokens they give the gradient of the tokens, places that a loss leaves out included."""
    loss = (
        F.cross_entropy
        if first
        else lambda scores, target: F.cross_entropy(
            scores.movedim(-1, 1), target.movedim(-1, 1) if target.is_floating_point() else target
        )
    )
    objective = Supervised(loss, target="x", meet=NextToken(padding, classes_first=first))
    task = Task(predictor().model, objective, {"x": replace(TEXT, kind=Tokens(padding=padding))})
    assert takes_shares(task)
    batch = {"x": texts(2)}
    batch["x"][0, 4:] = 7 if padding is not None else batch["x"][0, 4:]
    scene = scene_of(task, gl.observe(task, batch, TRAINING), KNOWS)
    vectors = task.model.get_submodule("words").weight.detach()[batch["x"]]
    hard, soft = (
        EmbeddedReplay(layer="words", soft=soft)({**batch, LOOKED_UP: vectors}, {}, scene, moment())
        for soft in (False, True)
    )
    assert largest_difference(hard, soft) < 0.02 * max(float(value.abs().max()) for value in hard.values())
    assert largest_difference(hard, soft) > 0  # shares are never whole


def test_a_loss_that_takes_whole_ids_only_gets_the_nearest_tokens() -> None:
    task = Task(predictor().model, Supervised(flat, target="x", meet=NextToken()), {"x": TEXT})
    assert not takes_shares(task)
    assert not takes_shares(classifier())
    found = gl.attacks.get("tag", steps=2).run(task, gl.observe(task, batch_of(task), TRAINING), KNOWS, engine=CPU)
    assert found.settings["targets"] == "nearest tokens"
    assert "targets" not in recovered("tag", steps=1)[0].settings


def test_places_of_padding_are_given_back_as_padding() -> None:
    task, batch = masked(torch.float32), padded(2)
    given = {name: batch[name] for name in ("attention_mask", "y")}
    knows = Knowledge(given=given, training=TRAINING, inputs=frozenset({"attention_mask"}))
    seen = gl.observe(task, batch, TRAINING)
    for name in ("tag", "lamp"):
        found = gl.attacks.get(name, **({**QUICK, "steps": 4} if name == "lamp" else {"steps": 4}))
        ids = found.run(task, seen, knows, engine=CPU).batch["x"][0]
        assert (ids[:, 4:] == 7).all()
        assert not (ids[:, :4] == 7).any()


@pytest.mark.parametrize("name", ["tag", "lamp"])
def test_one_step_is_enough_to_run(name: str) -> None:
    settings = {"steps": 1, "candidates": 1, "starts": 1} if name == "lamp" else {"steps": 1}
    found, _ = recovered(name, **settings)
    assert ((found.batch["x"] >= 0) & (found.batch["x"] < WORDS)).all()
    assert found.match.isfinite().all()


# --- the language model -----------------------------------------------------------------------------------------------


def test_the_order_comes_from_the_language_model_where_the_gradient_is_blind_to_it() -> None:
    """Without places every order of the tokens gives the same gradient."""
    task = classifier(torch.float32, placed=False)
    batch = {"x": torch.arange(22, 22 + LENGTH)[None].flip(1), "y": torch.tensor([1])}
    seen = gl.observe(task, batch, TRAINING)
    attack = gl.attacks.get("lamp", steps=60, every=30, candidates=60, starts=20, language=1.0)
    ordered = attack.run(task, seen, replace(KNOWS, generator=Following()), engine=CPU)
    alone = attack.run(task, seen, KNOWS, engine=CPU)
    rising = [int((found.batch["x"][0, 0].diff() == 1).sum()) for found in (ordered, alone)]
    assert rising[0] >= 4
    assert rising[1] <= 2
    assert ordered.settings["language_model"] == "Following, weight 1"
    assert alone.settings["language_model"] == "off: Knowledge has none (generator)"
    assert "reads=True" in ordered.settings["attack"]
    assert "reads=False" in alone.settings["attack"]


def test_a_language_model_of_no_weight_is_said_to_be_off() -> None:
    task = classifier(torch.float32)
    seen = gl.observe(task, batch_of(task), TRAINING)
    attack = gl.attacks.get("lamp", steps=1, candidates=1, starts=1, language=0.0)
    found = attack.run(task, seen, replace(KNOWS, generator=Following()), engine=CPU)
    assert found.settings["language_model"] == "off: its weight (language) is 0"


@pytest.mark.parametrize(
    ("generator", "why"),
    [
        (Following(WORDS - 1), "wanted scores"),
        (nn.Linear(2, 3), "it takes no token ids"),
        ("gpt2", "it is a str and no network"),
    ],
)
def test_what_is_no_language_model_of_this_vocabulary_is_refused(generator: Any, why: str) -> None:
    task = classifier(torch.float32)
    seen = gl.observe(task, batch_of(task), TRAINING)
    with pytest.raises(MissingKnowledge, match=why):
        gl.attacks.get("lamp", steps=1).run(task, seen, replace(KNOWS, generator=generator), engine=CPU)


# --- refusals ---------------------------------------------------------------------------------------------------------


class Bagged(nn.Module):
    """No layer sees one token at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(WORDS, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids))


@pytest.mark.parametrize("name", ["tag", "lamp"])
def test_tasks_whose_x_no_model_embeds_as_tokens_are_refused(name: str) -> None:
    attack = gl.attacks.get(name)
    assert "x holds images" in attack.refuses(perceptron())
    bagged = Task(Bagged(), Supervised(F.cross_entropy), {"x": TEXT, "y": Field((), classes=2)})
    assert attack.refuses(bagged) == "no embedding sees the ids of all places of x at once"
    assert attack.refuses(Task(Bagged(), Supervised(F.cross_entropy), {"z": TEXT})) != ""
    assert attack.refuses(classifier()) == attack.refuses(predictor()) == attack.refuses(text_task(tied=True)) == ""
    with pytest.raises(UnsupportedTask, match=f"{name} cannot attack this task: it searches for tokens"):
        attack.run(
            perceptron(),
            gl.observe(perceptron(), {"x": torch.zeros(1, 1, 4, 4).double(), "y": torch.tensor([0])}, TRAINING),
            KNOWS,
        )


def test_masked_language_models_need_their_targets() -> None:
    fields = {"x": TEXT, "y": Field((LENGTH,), classes=WORDS, kind=Tokens(ignored=-100))}
    task = Task(predictor().model, Supervised(lambda p, y: F.cross_entropy(p.movedim(-1, 1), y)), fields)
    attack = gl.attacks.get("tag")
    assert "y holds texts" in attack.refuses(task)
    assert attack.refuses(task, given=("y",)) == ""


def test_tag_needs_the_recipe_and_the_cosine_does_not() -> None:
    assert gl.attacks.get("tag").needs == gl.attacks.get("lamp", match="l1l2").needs == {"training"}
    assert gl.attacks.get("lamp").needs == frozenset()
    assert gl.attacks.get("lamp", steps=100, candidates=10, starts=5, every=50).work == 5 + 100 + 2 * 10 + 1


@pytest.mark.parametrize(
    ("name", "settings", "told"),
    [
        ("tag", {"alpha": -1.0}, "alpha must be a number from 0"),
        ("tag", {"steps": 0}, "steps must be a positive whole number"),
        ("lamp", {"match": "l2"}, "match must be 'cosine' or 'l1l2'"),
        ("lamp", {"keep": "best_match"}, "keep is 'last'"),
        ("lamp", {"language": -0.1}, "language must be a number from 0"),
        ("lamp", {"candidates": 0}, "candidates must be a positive whole number"),
    ],
)
def test_impossible_settings_are_refused(name: str, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        gl.attacks.get(name, **settings)


def test_the_embedding_is_found_by_what_it_sees() -> None:
    assert embedding_of(classifier()) == "words"
    assert embedding_of(text_task()) == "embedding"
    assert unembedded(classifier()) == ""
    assert isinstance(text_task().model, TextClassifier)


# --- auto -------------------------------------------------------------------------------------------------------------


def test_auto_measures_texts_by_its_common_residual_where_places_are_empty_too() -> None:
    task = classifier()
    batch = batch_of(task)
    case = Case(task, tuple(as_targets(gl.observe(task, batch, TRAINING))), KNOWS, CPU)
    assert case.text
    empty = {**batch, "x": torch.where(torch.arange(LENGTH) == 2, -1, batch["x"])}
    nothing = {**batch, "x": torch.full_like(batch["x"], -1)}
    true, one, none = (residuals(case, [0], [each])[0].value for each in (batch, empty, nothing))
    assert true < 1e-12 < one < none
    assert not Case(perceptron(), (), KNOWS, CPU).text


def test_auto_runs_them_behind_the_rows_of_the_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradleak.auto.residual.NAMED", 0.0)  # nothing counts as solved, so that all of them run
    task = classifier(torch.float32)
    batch = batch_of(task, seed=1)
    seen = gl.observe(task, batch, TRAINING)
    found = gl.attacks.get("auto", steps=150).run(task, seen, KNOWS, engine=CPU)
    members = [each["member"] for each in found.settings["tried"]]
    assert members == ["span-text", "token-rows", "tag", "lamp"]
    assert {each["outcome"] for each in found.settings["tried"]} == {"ran"}
    assert torch.equal(found.batch["x"][0], batch["x"])
    quick = gl.attacks.get("auto", preset="quick").run(task, seen, KNOWS, engine=CPU)
    assert [each["member"] for each in quick.settings["tried"]] == ["span-text", "token-rows"]
