"""Attacks on diffusion clients: DLG-dm, InvG-dm and GIDM, and the parts that only they have. Toys of 8 x 8."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gradleak as gl
from conftest import largest_difference, moment, scene_of, tiny
from conftest import private as labelled
from gradleak.attack import Composed, Reconstruction
from gradleak.attacks.gidm import StepSearch
from gradleak.attacks.gidm.sampled import Refined, Sampled
from gradleak.core import tree
from gradleak.core.random import Draws, key
from gradleak.diffusion import ddim
from gradleak.engine import Engine, chunk_size
from gradleak.parts.coarse import OnwardsWindow
from gradleak.parts.matches import Cosine, Relative
from gradleak.parts.optimisers import OddBlocks, constant
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import TotalVariation
from gradleak.parts.residual import (
    FreeNoise,
    NoisedResidual,
    NoiseShell,
    image_and_noise,
    noised_and_residual,
)
from gradleak.parts.spaces import Pixels, Uniform
from gradleak.parts.steps import SettledSteps, SoftSteps
from gradleak.parts.view import TargetView
from gradleak.scenario.observation import Knowledge, MissingKnowledge, Observation
from gradleak.scenario.task import Batch, Task, TaskError
from test_engine import gate, searches
from test_steps import SCHEDULE, TRAINING, Small, drawn, pictures, toy

CPU = Engine(device="cpu")
KNOWS = Knowledge(training=TRAINING)


def trained(task: Task, steps: int = 300) -> Task:
    """The same task after a few steps of Adam on other smooth images."""
    model = copy.deepcopy(task.model)
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(steps):
        batch = task.completed({"x": pictures(16, seed=1000 + step)}, Draws(key("training", step)))
        optimiser.zero_grad()
        task.objective(model, batch).backward()
        optimiser.step()
    return replace(task, model=model)


def observed(task: Task, *steps: int) -> tuple[list[Batch], list[Observation], Batch]:
    """Clients of one example each, at these steps: what they had, what is seen, and their noise and steps."""
    had = [drawn(t, seed=place) for place, t in enumerate(steps)]
    seen = [gl.observe(task, batch, TRAINING, key=f"step {t}") for t, batch in zip(steps, had, strict=True)]
    return had, seen, {name: torch.stack([batch[name] for batch in had]) for name in ("noise", "t")}


def knowing(given: Batch, *names: str) -> Knowledge:
    return replace(KNOWS, given={name: given[name] for name in names})


def decibels(found: Reconstruction, had: list[Batch]) -> list[float]:
    """PSNR of each target's image, both mapped to [0, 1]; at most 130."""
    errors = [
        float(((image.double().clamp(-1, 1) - batch["x"]) / 2).square().mean())
        for image, batch in zip(found.batch["x"], had, strict=True)
    ]
    return [-10 * math.log10(max(error, 1e-13)) for error in errors]


# --- identities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["eps", "v"])
@pytest.mark.parametrize("t", [0, 50, 99])
def test_the_truth_matches_to_rounding(target: str, t: int) -> None:
    task, batch = toy(target=target), drawn(t)
    scene = scene_of(task, gl.observe(task, batch, TRAINING), KNOWS)
    target_ = Replay().target(scene)

    def distance(guess: Batch) -> float:
        return float(Relative(whole=True).distance(Replay()(guess, {}, scene, moment()), target_))

    assert distance(batch) < 1e-24
    assert distance({**batch, "noise": drawn(t, seed=1)["noise"]}) > 1e-3
    assert distance({**batch, "t": (batch["t"] + 50) % 100}) > 1e-3


@pytest.mark.parametrize("target", ["eps", "v"])
@pytest.mark.parametrize("steps", [(1,), (3, 50, 85)])
def test_noised_image_and_residual_stand_for_image_and_noise(target: str, steps: tuple[int, ...]) -> None:
    task, batch = toy(target=target), drawn(*steps)
    scene = scene_of(task, gl.observe(task, batch, TRAINING), KNOWS, t=batch["t"])
    x_t, q = noised_and_residual(batch, scene)
    back = image_and_noise(x_t, q, batch["t"], scene)
    assert largest_difference(back, {name: batch[name] for name in back}) < 1e-12
    decoded = NoisedResidual().decode({"x_t": x_t, "q": q}, scene, moment())
    assert largest_difference(Replay()({**scene.fields, **decoded}, {}, scene, moment()), scene.update) < 1e-12


@pytest.mark.parametrize("target", ["eps", "v"])
def test_the_gradient_is_the_networks_jacobian_times_the_residual(target: str) -> None:
    """g = 2 w / m J(x_t)^T q, with w = 1 or alpha-bar; as a cotangent that has a derivative of its own."""
    task, batch = toy(target=target), drawn(30)
    scene = scene_of(task, gl.observe(task, batch, TRAINING), KNOWS, t=batch["t"])
    x_t, q = noised_and_residual(batch, scene)
    weight = 1.0 if target == "eps" else float(SCHEDULE.alpha_bar[30])
    output, pull = torch.func.vjp(lambda w: task.call(w)(x_t, batch["t"]), task.weights())
    by_hand = tree.scale(pull(2 * weight * q / q.numel())[0], 0.5)  # the learning rate
    assert largest_difference(by_hand, scene.update) < 1e-14


def test_the_match_depends_on_the_residual_and_not_only_through_the_weights() -> None:
    """Were the noise made inside the client's loss, the gradient would be zero and the match stuck at 1."""
    task, batch = toy(), drawn(30)
    scene = scene_of(task, gl.observe(task, batch, TRAINING), KNOWS, t=batch["t"])
    x_t, q = noised_and_residual(batch, scene)

    def distance(q: Tensor) -> Tensor:
        decoded = NoisedResidual().decode({"x_t": x_t, "q": q}, scene, moment())
        return Relative(whole=True).distance(Replay()({**scene.fields, **decoded}, {}, scene, moment()), scene.update)

    assert float(distance(0.5 * q)) == pytest.approx(0.25)  # linear in q
    assert float(torch.func.grad(distance)(0.5 * q).abs().max()) > 1e-3


def test_the_shell_is_where_noise_lies() -> None:
    at = lambda noise: float(NoiseShell(1.0)({"noise": noise}, {}, None, moment()))  # type: ignore[arg-type] # noqa: E731
    assert at(torch.ones(2, 1, 8, 8)) == 0
    assert at(2 * torch.ones(2, 1, 8, 8)) == 9
    assert at(torch.stack([torch.ones(1, 8, 8), torch.zeros(1, 8, 8)])) == 0.5


# --- what moves, and when ---------------------------------------------------------------------------------------------


def test_noise_moves_in_odd_blocks_only() -> None:
    task = toy()
    _, seen, given = observed(task, 30)
    attack = gl.attacks.get("dlg-dm", steps=20, lr=0.05, noise="unknown", t="given", interval=4)
    (search,) = searches(attack, task, seen[0], knowing(given, "t"), replace(CPU, precision="double"))
    for step in range(16):
        before = {name: value.clone() for name, value in search.v.items()}
        search.tick()
        assert not torch.equal(search.v["x"], before["x"])
        assert torch.equal(search.v["noise"], before["noise"]) == (step // 4 % 2 == 0)


def test_a_settled_step_stays_while_the_rest_moves() -> None:
    task = toy()
    _, seen, given = observed(task, 30)
    attack = gl.attacks.get("dlg-dm", steps=20, lr=0.05, t="soft")
    soft, settled = searches(attack, task, seen[0], knowing(given, "noise"), CPU)
    for search, moves in ((soft, True), (settled, False)):
        before = {name: value.clone() for name, value in search.v.items()}
        for _ in range(3):
            search.tick()
        assert not torch.equal(search.v["x"], before["x"])
        assert torch.equal(search.v["t"], before["t"]) != moves


def test_settling_the_step_does_not_begin_the_phase_anew() -> None:
    """Of 20 steps the last 4 have the step settled: blocks of 3 and the falling rate go on through both stages."""
    task = toy()
    _, seen, _ = observed(task, 30)
    settings: dict[str, Any] = {"noise": "unknown", "interval": 3, "decay": True, "lr": 0.05}
    stages = searches(gl.attacks.get("dlg-dm", steps=20, t="soft", **settings), task, seen[0], KNOWS, CPU)
    moved, rates = [], []
    for search in stages:
        rule = search.stage.optimiser
        for step in range(rule.steps):
            before = search.v["noise"].clone()
            search.tick()
            moved.append(not torch.equal(search.v["noise"], before))
            rates.append(float(rule.schedule(moment(step, rule.steps))))
    assert [search.stage.optimiser.steps for search in stages] == [16, 4]
    assert moved == [step // 3 % 2 == 1 for step in range(20)]
    assert rates == pytest.approx([0.5 * (1 + math.cos(math.pi * step / 20)) for step in range(20)], abs=1e-6)


def test_baselines_have_the_budget_of_both_phases_and_the_papers_rate() -> None:
    uniform = Pixels(Uniform())
    for name, image, priors, match in (
        ("dlg-dm", uniform, (), Relative(whole=True)),
        ("invg-dm", replace(uniform, boxed=True), (TotalVariation(1e-4),), Cosine()),
    ):
        attack = gl.attacks.get(name)
        assert isinstance(attack, Composed)
        [stage] = attack.stages
        assert (stage.optimiser.steps, stage.optimiser.lr, stage.optimiser.schedule) == (6500, 0.01, constant)
        assert stage.space.spaces[0] == image
        assert (stage.priors, stage.match) == (priors, match)
    free = gl.attacks.get("gidm")
    assert isinstance(free, Composed)
    assert free.restarts == 4
    assert all(stage.optimiser.windows == {"noise": OnwardsWindow(OddBlocks(50), 0)} for stage in free.stages)
    assert free.stages[0].space.spaces[0] == Sampled(16)
    assert all(stage.priors == () for stage in free.stages)


def test_the_papers_preset_searches_for_the_step_without_annealing() -> None:
    """One rate for image, noise and scores, 5,000 + 1,500 steps; other presets read the step off."""
    paper, usual = gl.attacks.get("gidm", preset="paper"), gl.attacks.get("gidm")
    assert isinstance(paper, Composed)
    assert isinstance(usual, Composed)
    assert [stage.optimiser.steps for stage in paper.stages] == [4000, 1000, 1200, 300]
    assert all(stage.optimiser.lr == 0.01 and stage.optimiser.rates == {} for stage in paper.stages)
    soft, settled = (stage.space.spaces[-1] for stage in paper.stages[:2])
    assert soft == SoftSteps(speed=1.0, first=1.0, last=1.0)
    assert settled == SettledSteps(speed=1.0)
    assert [stage.optimiser.steps for stage in usual.stages] == [2000, 1500]
    assert repr(usual) == repr(gl.attacks.get("gidm", t="analytic"))
    read = gl.attacks.get("gidm", preset="paper", t="analytic")
    assert isinstance(read, Composed)
    assert [stage.optimiser.steps for stage in read.stages] == [5000, 1500]


@pytest.mark.parametrize(
    "settings",
    [
        {"noise": "unknown", "t": "soft"},
        {"noise": "unknown", "t": "straight-through", "param": "xt_q"},
        {"noise": "random", "t": "random", "shell": 0.1},
        {"noise": "unknown", "t": "analytic", "shell": 0.1, "tv": 1e-3, "distance": "cosine"},
    ],
)
def test_every_step_of_every_mode_can_be_captured(settings: dict[str, Any]) -> None:
    task = toy()
    _, seen, _ = observed(task, 30)
    attack = gl.attacks.get("gidm", steps=10, sampler_steps=2, fine_steps=10, restarts=2, **settings)
    knows = replace(KNOWS, generator=Small(seed=1))
    for search in searches(attack, task, seen[0], knows, CPU):
        gate(search)


# --- the sampler as a space -------------------------------------------------------------------------------------------


def test_latents_are_decoded_by_the_prior_and_not_by_the_victim() -> None:
    task, prior = toy(), Small(seed=1)
    _, seen, _ = observed(task, 30)
    scene = scene_of(task, seen[0], replace(KNOWS, generator=prior))
    v = Sampled(4).variables(scene, Draws(key("lane")), None)
    decoded = Sampled(4).decode(v, scene, moment())["x"]
    with torch.no_grad():
        assert largest_difference(decoded, ddim(prior, v["z"], SCHEDULE, 4)) < 1e-12
        assert largest_difference(decoded, ddim(task.model, v["z"], SCHEDULE, 4)) > 1e-3
        prior.last.bias += 1.0  # trained on: the copy of before must not be used
        assert largest_difference(Sampled(4).decode(v, scene, moment())["x"], decoded) > 1e-2


@pytest.mark.parametrize("recompute", [True, False])
def test_latents_have_the_samplers_derivative(recompute: bool) -> None:
    task, prior = toy(), Small(seed=1)
    scene = scene_of(task, observed(task, 30)[1][0], replace(KNOWS, generator=prior))
    z = Draws(key("z")).normal((1, 1, 8, 8), dtype=torch.float64)
    gradient = torch.func.grad(lambda z: Sampled(3, recompute).decode({"z": z}, scene, moment())["x"].square().sum())(z)
    leaf = z.clone().requires_grad_()
    (plain,) = torch.autograd.grad(ddim(prior, leaf, SCHEDULE, 3).square().sum(), leaf)
    assert largest_difference(gradient, plain) < 1e-10


def test_pixels_go_on_from_the_sampled_image_with_noise_and_step_as_they_were() -> None:
    task = toy()
    scene = scene_of(task, observed(task, 30)[1][0], replace(KNOWS, generator=Small(seed=1)))
    before = {**Sampled(4).variables(scene, Draws(key("lane")), None), "noise": torch.full((1, 1, 8, 8), 0.5)}
    begun = Refined(sampler=Sampled(4)).variables(scene, Draws(key("lane")), before)
    sampled = Sampled(4).decode(before, scene, moment())["x"]
    assert largest_difference(begun["x"], sampled.clamp(-1, 1)) == 0
    assert FreeNoise().variables(scene, Draws(key("lane")), before)["noise"] is before["noise"]


def test_the_second_phase_starts_where_the_first_ended() -> None:
    """In the variables of image and noise, and in those of noised image and residual: the match goes on."""
    task = toy()
    had, seen, given = observed(task, 30)
    knows = replace(knowing(given, "t"), generator=Small(seed=1))
    for param in ("x0_eps", "xt_q"):
        attack = gl.attacks.get("gidm", preset="smoke", steps=20, fine_steps=20, param=param, restarts=1)
        assert isinstance(attack, Composed)
        only = replace(attack, stages=attack.stages[:1])
        first, both = (each.run(task, seen, knows, engine=CPU) for each in (only, attack))
        begins = both.trace["match"][both.trace["step"] >= 20][0].item()
        if param == "xt_q":  # no clamp: the very same point
            assert begins == pytest.approx(first.match.item(), rel=1e-3)
        assert both.match.item() < first.match.item()
        assert both.batch["noise"].shape == (1, 1, 1, 8, 8)


# --- the threat model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "wanted"),
    [
        ("dlg-dm", {}, {"training", "noise", "t"}),
        ("dlg-dm", {"t": "analytic"}, {"training", "noise"}),
        ("dlg-dm", {"noise": "unknown", "t": "soft"}, {"training"}),
        ("dlg-dm", {"noise": "random", "t": "random"}, {"training"}),
        ("dlg-dm", {"t": "grid"}, {"training", "noise"}),
        ("invg-dm", {}, {"noise", "t"}),
        ("gidm", {}, {"training", "generator"}),
        ("gidm", {"noise": "given", "t": "given"}, {"training", "generator", "noise", "t"}),
    ],
)
def test_an_attack_says_what_it_must_be_given(name: str, settings: dict[str, Any], wanted: set[str]) -> None:
    assert gl.attacks.get(name, **settings).needs == wanted


def test_what_is_not_granted_is_asked_for() -> None:
    task = toy()
    _, seen, given = observed(task, 30)
    with pytest.raises(MissingKnowledge, match="dlg-dm needs noise, t"):
        gl.attacks.get("dlg-dm", steps=1).run(task, seen, KNOWS)
    with pytest.raises(MissingKnowledge, match="gidm needs generator"):
        gl.attacks.get("gidm", steps=1).run(task, seen, KNOWS)
    with pytest.raises(MissingKnowledge, match="a trained network"):
        gl.attacks.get("gidm", steps=1).run(task, seen, replace(KNOWS, generator=3.0), engine=CPU)
    supervised, blind = tiny(), gl.attacks.get("dlg-dm", steps=1, noise="random", t="random")
    labels = gl.observe(supervised, labelled(1), TRAINING)
    with pytest.raises(TaskError, match="unsupported: dlg-dm .* made for denoisers"):
        blind.run(supervised, labels, KNOWS, engine=CPU)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"noise": "know"}, "noise cannot be 'know'.*unknown"),
        ({"t": "softly"}, "Did you mean 'soft'"),
        ({"param": "xt_q"}, "noise='unknown'"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        gl.attacks.get("dlg-dm", **settings)


@pytest.mark.parametrize(
    ("name", "settings", "given"),
    [
        ("dlg-dm", {"steps": 5}, ("noise", "t")),
        ("dlg-dm", {"steps": 5, "t": "analytic", "noise": "unknown", "param": "xt_q"}, ()),
        ("dlg-dm", {"steps": 5, "t": "candidates"}, ("noise",)),
        ("invg-dm", {"steps": 5, "t": "soft"}, ("noise",)),
        ("gidm", {"steps": 4, "fine_steps": 4, "sampler_steps": 2, "t": "soft"}, ()),
        ("gidm", {"steps": 4, "fine_steps": 4, "sampler_steps": 2, "noise": "random", "t": "random"}, ("noise", "t")),
    ],
)
def test_noise_and_step_reach_the_attacker_through_knowledge_alone(
    name: str, settings: dict[str, Any], given: tuple[str, ...]
) -> None:
    """The private tensors are overwritten in place: what was not given has no say, what was given is a copy."""
    task = toy()
    had, seen, held = observed(task, 30)
    granted = {field: held[field].clone() for field in given}
    knows = replace(KNOWS, given=granted, generator=Small(seed=1))
    attack = gl.attacks.get(name, **settings)
    if isinstance(attack, StepSearch):
        attack = replace(attack, read_width=2)
    first = attack.run(task, seen, knows, engine=CPU)
    for batch in had:
        batch["x"].fill_(0.3)
        batch["noise"].mul_(-1)
        batch["t"].fill_(7)
    again = attack.run(task, seen, knows, engine=CPU)
    assert all(torch.equal(first.candidates[field], again.candidates[field]) for field in first.candidates)
    if settings.get("noise") == "random":  # the floor: not even what is given
        assert largest_difference(first.batch["noise"].double(), held["noise"]) > 0.1
        assert first.batch["t"].tolist() != held["t"].tolist()
    else:
        for field in given:
            assert largest_difference(first.batch[field].double(), held[field].double()) < 1e-6


def test_what_is_given_is_used_by_an_attack_that_could_do_without() -> None:
    task = toy()
    _, seen, given = observed(task, 30)
    attack = gl.attacks.get("gidm", preset="smoke", steps=4, fine_steps=4, t="soft", restarts=1)
    found = attack.run(task, seen, replace(knowing(given, "noise", "t"), generator=Small(seed=1)), engine=CPU)
    assert torch.equal(found.batch["t"], given["t"])
    assert largest_difference(found.batch["noise"].double(), given["noise"]) < 1e-6


# --- the smoke run ----------------------------------------------------------------------------------------------------


def test_known_noise_and_step_give_the_image_away() -> None:
    task = toy()
    had, seen, given = observed(task, 1, 20, 50, 85)
    found = gl.attacks.get("dlg-dm", steps=150, lr=0.1).run(task, seen, knowing(given, "noise", "t"), engine=CPU)
    assert min(decibels(found, had)) > 60
    assert (found.match < 1e-6).all()


def test_the_step_read_off_is_as_good_as_given() -> None:
    task = toy()
    had, seen, given = observed(task, 1, 20, 50)
    attack = gl.attacks.get("invg-dm", steps=150, lr=0.1, tv=1e-6, t="analytic")
    found = attack.run(task, seen, knowing(given, "noise"), engine=CPU)
    assert torch.equal(found.batch["t"], given["t"])
    assert min(decibels(found, had)) > 50


def test_shares_of_steps_find_the_step() -> None:
    task = toy()
    had, seen, given = observed(task, 20, 50, 85)
    found = gl.attacks.get("dlg-dm", steps=200, lr=0.1, t="soft").run(task, seen, knowing(given, "noise"), engine=CPU)
    assert torch.equal(found.batch["t"], given["t"])
    assert min(decibels(found, had)) > 25


def test_residual_variables_win_at_small_steps_of_a_trained_network() -> None:
    task = trained(toy())
    had, seen, _ = observed(task, 0, 3)
    scores = {}
    for param in ("x0_eps", "xt_q"):
        attack = gl.attacks.get(
            "dlg-dm", steps=150, lr=0.3, t="analytic", noise="unknown", param=param, decay=True, restarts=3
        )
        found = attack.run(task, seen, KNOWS, engine=CPU)
        assert found.batch["t"].flatten().tolist() == [0, 3]
        scores[param] = decibels(found, had)
    assert all(better > worse + 5 for better, worse in zip(scores["xt_q"], scores["x0_eps"], strict=True))


def test_an_attacker_without_knowledge_is_the_floor() -> None:
    task = toy()
    had, seen, _ = observed(task, 20, 50, 85)
    found = gl.attacks.get("dlg-dm", steps=60, lr=0.1, noise="random", t="random").run(task, seen, KNOWS, engine=CPU)
    assert max(decibels(found, had)) < 15


def test_steps_are_found_by_trial() -> None:
    task = toy()
    had, seen, given = observed(task, 20, 50)
    attack = gl.attacks.get("dlg-dm", steps=100, lr=0.1, t="candidates")
    assert isinstance(attack, StepSearch)
    attack = replace(attack, read_width=3)
    found = attack.run(task, seen, knowing(given, "noise"), engine=CPU)
    assert torch.equal(found.batch["t"], given["t"])
    assert min(decibels(found, had)) > 35


def test_a_grid_is_narrowed_down_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """With trials that rank candidates by their distance to the step: every step of the schedule is reached."""
    truth = torch.arange(100)
    ranked = lambda self, tried, *rest: tried.gather(1, (tried - truth[:, None]).abs().argmin(1, keepdim=True))[:, 0]  # noqa: E731
    monkeypatch.setattr(StepSearch, "_winner", ranked)
    search = gl.attacks.get("dlg-dm", t="grid")
    assert isinstance(search, StepSearch)
    spread = torch.logspace(0, 2, 32).round().long().unique() - 1
    assert torch.equal(search._narrowed(spread.expand(100, -1), 100), truth)


def test_a_clipped_and_noised_gradient_still_shows_something() -> None:
    """Clipping alone changes nothing that an attack sees; with noise the image blurs."""
    task = toy()
    had, _, given = observed(task, 20)
    scores = []
    for defence in (gl.defences.Clipping(norm=0.1), gl.defences.LocalGaussian(clip=0.1, noise_multiplier=0.01)):
        seen = gl.observe(task, had[0], TRAINING, defence)
        knows = replace(knowing(given, "noise", "t"), defence=defence)
        found = gl.attacks.get("dlg-dm", steps=120, lr=0.1).run(task, seen, knows, engine=CPU)
        scores += decibels(found, had)
    assert scores[0] > 40
    assert scores[1] < scores[0] - 15


# --- second order without a first attack ------------------------------------------------------------------------------


def test_second_order_is_exact_from_grey_where_noise_and_step_are_known() -> None:
    task = toy()
    had, seen, given = observed(task, 5, 60)
    attack = gl.attacks.get("second-order", steps=40, certify=False)
    assert min(decibels(attack.run(task, seen, knowing(given, "noise", "t"), engine=CPU), had)) > 60
    read = attack.run(task, seen, knowing(given, "noise"), engine=CPU)  # the step off the time MLP
    assert min(decibels(read, had)) > 60


def test_an_update_says_less_about_the_image_where_the_noise_is_unknown_too() -> None:
    """The floor is of pixels alone, whatever else is unknown."""
    task = toy()
    had, seen, given = observed(task, 60)
    known, unknown = knowing(given, "noise", "t"), knowing(given, "t")
    told, hidden = (
        gl.identify.noise_floor(task, seen[0], had[0], knows, noise=1e-3, engine=CPU) for knows in (known, unknown)
    )
    assert 0 < told.mse < hidden.mse < 1
    certificates = [gl.identify.certify(task, seen[0], had[0], knows, engine=CPU) for knows in (known, unknown)]
    entries = had[0]["x"].numel()
    assert [len(each.singular_values) for each in certificates] == [entries, 2 * entries]


def test_a_sampler_that_keeps_its_graphs_makes_chunks_smaller() -> None:
    task = toy()
    _, seen, given = observed(task, 60)
    scene = TargetView.of(task, seen[0], replace(knowing(given, "noise", "t"), generator=task.model))
    held = [Sampled(steps=8, recompute=each).decoding(scene) for each in (False, True)]
    image = given["noise"][0].numel()
    assert held[0] / 8 + 8 * image == held[1] < held[0]
    assert held[0] / 8 > 10 * image  # a U-Net has many activations
    assert Sampled(steps=8, recompute=False, last=2).decoding(scene) == held[0] / 4
    lanes = [chunk_size(gidm_stages(recompute=each), scene, Engine(device="cpu")) for each in (False, True)]
    assert lanes[0] < lanes[1]


def gidm_stages(**settings: Any) -> tuple[Any, ...]:
    attack = gl.attacks.get("gidm", steps=2, fine_steps=0, sampler_steps=100_000, noise="given", t="given", **settings)
    assert isinstance(attack, Composed)
    return attack.stages
