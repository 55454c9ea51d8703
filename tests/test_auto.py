"""The ensemble: it picks what applies, compares by one residual, never loses to a member, and says what it did."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import gradleak as gl
from conftest import CLASSES, SHAPE, perceptron, private, tiny
from gradleak.auto import MEMBERS, PRESETS, VERSION, Auto, Case, turns_of
from gradleak.auto.residual import SOLVED, Residual, residuals
from gradleak.auto.tuning import proxies
from gradleak.core import registry
from gradleak.defences import TIP, Clipping, LocalGaussian, Pruning
from gradleak.engine import EngineError
from gradleak.parts.view import TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.defence import Chain
from gradleak.scenario.observation import Knowledge, MissingKnowledge, as_targets
from gradleak.scenario.rules import Adam
from test_latent import Toy, knowing
from test_latent import observed as images_of_it
from test_steps import TRAINING as DENOISING
from test_steps import drawn, toy

CPU = gl.Engine(device="cpu")
ONE = LocalTraining(lr=0.5)
KNOWS = Knowledge(training=ONE)


def relu(seed: int = 0) -> gl.Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(96, CLASSES)).double()
    like = (torch.zeros(1, *SHAPE), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(model, nn.functional.cross_entropy, like=like)


def case_of(task: gl.Task, training: LocalTraining = ONE, examples: int = 1, **knows: Any) -> Case:
    seen = gl.observe(task, private(examples), training)
    return Case(task, (gl.Track((seen,)),), Knowledge(training=training, **knows), CPU)


def picked(case: Case, preset: str = "thorough") -> set[str]:
    return {member.name for member in MEMBERS if member.fits(case, preset)}


# --- what applies -----------------------------------------------------------------------------------------------------


def test_members_are_picked_by_what_can_be_seen() -> None:
    smooth, kinked = picked(case_of(tiny())), picked(case_of(relu()))
    assert {"second-order", "cpl", "idlg", "ig", "polish"} <= smooth
    assert "analytic" not in smooth
    assert "analytic" in picked(case_of(perceptron()))
    assert {"ig, stronger prior", "second-order"} <= kinked
    assert not {"cpl", "idlg"} & kinked
    assert "gi" in picked(case_of(tiny(norm="eval")))
    assert "gi" not in smooth
    assert not {"coarse-replay", "sme", "dlfa", "dlg-dm", "gias"} & smooth


def test_updates_of_signs_are_told_by_their_sizes() -> None:
    assert not case_of(tiny()).signs
    adam = case_of(tiny(), LocalTraining(lr=0.1, optimiser=Adam()))
    assert adam.signs
    assert "sign-matching" in picked(adam)
    assert "sign-matching" not in picked(case_of(tiny()))


def test_several_steps_are_for_others_than_one() -> None:
    found = picked(case_of(tiny(), LocalTraining(lr=0.1, epochs=2, batch_size=1), 3))
    assert {"coarse-replay", "sme", "nl-sme", "dlfa"} <= found
    assert not {"cpl", "ig", "analytic"} & found
    # Three examples one by one in two epochs: 36 orders. Nobody can follow that, so nothing is fitted exactly.
    assert not {"second-order", "polish"} & found
    assert {"second-order", "polish"} <= picked(case_of(tiny(), LocalTraining(lr=0.1, steps=3), 3))


def test_without_the_recipe_both_kinds_apply_and_none_that_needs_it_runs() -> None:
    case = case_of(tiny())
    case = replace(case, knows=Knowledge())
    assert {"ig", "sme"} <= picked(case)
    assert not {"second-order", "polish"} & picked(case)
    found = Auto(preset="quick", steps=5).run(case.task, case.targets[0], Knowledge(), engine=CPU)
    outcome = {each["member"]: each["outcome"] for each in found.settings["tried"]}
    assert outcome["cpl"] == "refused"  # squared error of an unknown scale
    assert outcome["ig"] == "ran"


def test_a_sum_of_several_clients_is_followed_only_over_one_step() -> None:
    for steps, wanted in ((1, True), (3, False)):
        case = case_of(tiny(), LocalTraining(lr=0.1, steps=steps), 2)
        many = replace(case.targets[0].last, clients=4)
        assert Case(case.task, (gl.Track((many,)),), case.knows, CPU).followed is wanted


@pytest.mark.parametrize("member", MEMBERS, ids=lambda member: member.name)
def test_every_member_can_be_made_in_every_preset_that_names_it(member: Any) -> None:
    assert member.presets.keys() <= set(PRESETS)
    for preset in member.presets:
        if member.attack != "polish":
            assert member.make(member.settings(preset, 7)).name == member.attack
        settings = member.settings(preset, 7)
        assert all(settings[name] <= 7 for name in ("steps", "fine_steps", "weight_steps") if name in settings)


# --- a second look ----------------------------------------------------------------------------------------------------


def hidden(beta: float, key: str = "b") -> tuple[gl.Observation, torch.Tensor]:
    """An update with noise in one channel that does not show: its energy is not the largest; and that channel."""
    task, defence, batch = tiny(), TIP(beta=beta), private(1)
    seen, plain = (gl.observe(task, batch, ONE, own, key=key) for own in (defence, None))
    noised = (seen.update["0.weight"] - plain.update["0.weight"]).flatten(1).abs().amax(1) > 0
    return seen, noised


@pytest.mark.parametrize("known", [TIP(beta=1e-3), Chain(Clipping(9.0), TIP(beta=1e-3))])
def test_what_a_candidate_leaves_unexplained_shows_which_channels_are_noised(known: Any) -> None:
    seen, noised = hidden(1e-3)
    guess = TIP(beta=1e-3)._noised(TargetView.of(tiny(), seen, KNOWS))["0.weight"].flatten(1)[:, 0] > 0
    assert not torch.equal(guess, noised)  # the update alone misleads
    found = Auto(preset="quick", steps=10).run(tiny(), seen, replace(KNOWS, defence=known), engine=CPU)
    assert found.settings["winner"] == ["second look"]
    assert found.settings["tried"][0]["residual"][0] > 1e3 * SOLVED  # second-order itself, misled
    assert gl.metrics.compare(found, {n: v[None] for n, v in private(1).items()}).psnr.min() > 100
    assert found.certificates is not None
    assert str(found.certificates[0]).startswith("determined")


def test_a_second_look_counts_only_where_it_solves_the_update() -> None:
    """More noise than TIP is said to add, everywhere: no choice of channels explains it, and the first result stays."""
    seen, _ = hidden(1e-3)
    noise = torch.Generator().manual_seed(0)
    update = {n: u + 1e-2 * torch.randn(u.shape, generator=noise, dtype=u.dtype) for n, u in seen.update.items()}
    knows = replace(KNOWS, defence=TIP(beta=1e-3))
    found = Auto(preset="quick", steps=5).run(tiny(), replace(seen, update=update), knows, engine=CPU)
    [told] = [each for each in found.settings["tried"] if each["member"] == "second look"]
    assert told["outcome"] == "ran"
    assert told["residual"][0] > SOLVED
    assert found.settings["winner"] != ["second look"]


def test_a_second_look_that_is_refused_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise EngineError("out of memory")

    monkeypatch.setattr("gradleak.auto.reconsidered_case", refused)
    seen, _ = hidden(1e-3)
    found = Auto(preset="quick", steps=5).run(tiny(), seen, replace(KNOWS, defence=TIP(beta=1e-3)), engine=CPU)
    [told] = [each for each in found.settings["tried"] if each["member"] == "second look"]
    assert (told["outcome"], told["why"]) == ("refused", "out of memory")
    assert found.batch["x"].isfinite().all()


def test_nobody_looks_again_where_a_defence_guesses_nothing() -> None:
    seen = gl.observe(tiny(), private(1), ONE, LocalGaussian(0.01), key="a")
    found = Auto(preset="quick", steps=5).run(tiny(), seen, replace(KNOWS, defence=LocalGaussian(0.01)), engine=CPU)
    assert "second look" not in {each["member"] for each in found.settings["tried"]}


# --- what is used of a defence ----------------------------------------------------------------------------------------


def test_who_knows_a_defence_also_attacks_as_if_knowing_less() -> None:
    """A2, A1 and A0; what a defence does not tell apart is one form, and nobody uses more than is known."""
    pruning = Pruning(keep=0.5)
    assert list(case_of(tiny()).forms) == ["naive"]
    assert list(case_of(tiny(), defence=pruning).forms) == ["adaptive", "masked", "naive"]
    assert list(case_of(tiny(), defence=gl.OnlyVisible(pruning)).forms) == ["masked", "naive"]
    assert list(case_of(tiny(), defence=gl.registry.get("defence", "fedsam")).forms) == ["adaptive", "naive"]
    turns = [(member.name, form) for member, form in turns_of(case_of(tiny(), defence=pruning), "standard")]
    assert [form for name, form in turns if name == "ig"] == ["adaptive", "masked", "naive"]
    assert [form for name, form in turns if name == "second-order"] == ["adaptive", "masked", "naive"]
    assert turns[-1] == ("polish", "adaptive")
    quick = turns_of(case_of(tiny(), defence=pruning), "quick")
    assert [(member.name, form) for member, form in quick if form != "adaptive"] == [("ig", "masked"), ("ig", "naive")]


def test_what_a_less_informed_attacker_finds_is_measured_through_the_defence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defence whose own replay cannot be searched: the naive candidate wins, by the residual of who knows it."""
    task, batch = tiny(), private(1)
    noise = LocalGaussian(sigma=1e-6)
    knows = replace(KNOWS, defence=noise)
    seen = gl.observe(task, batch, ONE, noise)
    run = registry.get("attack", "ig").__class__.run

    def blinded(self: Any, task: Any, seen: Any, knows: Knowledge, *rest: Any, **settings: Any) -> Any:
        found = run(self, task, seen, knows, *rest, **settings)
        if knows.defence is None or self.name in ("residual", "polish"):
            return found
        return replace(found, batch={**found.batch, "x": torch.zeros_like(found.batch["x"])})

    monkeypatch.setattr("gradleak.attack.Composed.run", blinded)
    members = tuple(member for member in MEMBERS if member.name == "ig")
    monkeypatch.setattr("gradleak.auto.MEMBERS", members)
    found = Auto(preset="quick", steps=60, certify=False).run(task, seen, knows, engine=CPU)
    assert found.settings["winner"] == ["ig (naive)"]
    assert [each["form"] for each in found.settings["tried"]] == ["adaptive", "masked", "naive"]
    reached = [each["residual"][0] for each in found.settings["tried"]]
    assert float(found.match) == reached[2] < reached[0]


# --- one residual -----------------------------------------------------------------------------------------------------


def test_the_residual_is_the_relative_length_of_what_is_left() -> None:
    task, other = tiny(), private(2, seed=5)
    case = case_of(task, examples=2)
    seen = case.targets[0].last
    [at_truth], [elsewhere] = (residuals(case, [0], [batch]) for batch in (private(2), other))
    assert at_truth.value < 1e-12
    assert at_truth.solved
    predicted = gl.observe(task, other, ONE).update
    gap = gl.tree.norm(gl.tree.subtract(predicted, seen.update)) / gl.tree.norm(seen.update)
    assert elsewhere.value == pytest.approx(float(gap), rel=1e-9)
    # Without the recipe the scale is free: the sine of the angle.
    [free] = residuals(replace(case, knows=Knowledge()), [0], [other])
    flat, observed = gl.tree.flatten(predicted), gl.tree.flatten(seen.update)
    cosine = torch.cosine_similarity(flat, observed, dim=0)
    assert free.value == pytest.approx(float((1 - cosine.square()).sqrt()), rel=1e-6)


def test_the_best_order_of_minibatches_counts() -> None:
    task, training = tiny(), LocalTraining(lr=0.3, epochs=1, batch_size=1)
    for key in ("a", "b", "c", "d"):  # some of them shuffle
        seen = gl.observe(task, private(2), training, key=key)
        case = Case(task, (gl.Track((seen,)),), Knowledge(training=training), CPU)
        assert residuals(case, [0], [private(2)])[0].value < 1e-12


def test_below_the_noise_nothing_is_better_but_what_is_smoother() -> None:
    rough, smooth = Residual(0.08, 0.1, 0.3), Residual(0.1, 0.1, 0.1)
    far = Residual(0.2, 0.1, 0.0)
    assert smooth.rank < rough.rank < far.rank
    assert Residual(0.08, 0.0, 0.3).rank < Residual(0.1, 0.0, 0.1).rank  # without noise the lower one wins


def test_known_noise_has_a_level_that_the_truth_reaches() -> None:
    task, defence = tiny(), LocalGaussian(sigma=0.02)
    seen = gl.observe(task, private(1), ONE, defence)
    case = Case(task, (gl.Track((seen,)),), replace(KNOWS, defence=defence), CPU)
    [truth] = residuals(case, [0], [private(1)])
    assert truth.noise > 0
    assert 0.5 < truth.value / truth.noise < 2


def test_what_is_not_finite_never_wins() -> None:
    case = case_of(tiny())
    broken = {**private(1), "x": torch.full((1, *SHAPE), torch.nan, dtype=torch.float64)}
    assert residuals(case, [0], [broken])[0].value == float("inf")


# --- the ensemble -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "training", "defence", "examples"),
    [
        (tiny, ONE, None, 1),
        (tiny, ONE, Pruning(keep=0.6), 1),
        (relu, ONE, None, 1),
        (perceptron, ONE, None, 2),
        (tiny, LocalTraining(lr=0.1, steps=3), None, 2),
        (tiny, LocalTraining(lr=0.1, epochs=2, batch_size=1), None, 3),
        (tiny, ONE, LocalGaussian(sigma=0.02), 1),
    ],
    ids=["plain", "pruned", "relu", "two", "steps", "shuffled", "noise"],
)
def test_it_never_loses_to_a_member(task: Any, training: LocalTraining, defence: Any, examples: int) -> None:
    """At most 1.05 times the residual of its best member, each run alone with the same settings and measured alike."""
    model, knows = task(), Knowledge(training=training, defence=defence)
    seen = [gl.observe(model, private(examples, seed=s), training, defence, key=f"target{s}") for s in range(2)]
    found = Auto(preset="standard", steps=6).run(model, seen, knows, engine=CPU)
    case = Case(model, tuple(gl.Track((each,)) for each in seen), knows, CPU)
    alone = [member for member in MEMBERS if member.fits(case, "standard") and member.attack != "polish"]
    assert len(alone) > 1
    for member in alone:
        own = member.make(member.settings("standard", 6)).run(model, seen, knows, engine=CPU)
        for target, held in enumerate(residuals(case, [0, 1], [own.target(0), own.target(1)])):
            assert float(found.match[target, 0]) <= max(1.05 * held.value, 1.05 * held.noise, SOLVED), member.name


def test_an_exact_solution_is_found_certified_and_ends_the_search() -> None:
    task, batch = tiny(), private(1)
    found = Auto(preset="quick").run(task, gl.observe(task, batch, ONE), KNOWS, engine=CPU)
    assert gl.metrics.compare(found, batch).psnr.min() > 100
    assert float(found.match) < SOLVED
    assert found.certificates is not None
    assert found.certificates[0].solved
    assert found.checks.converged == (True,)
    assert found.settings["version"] == VERSION == "auto-2026.1"
    assert found.settings["winner"] == ["second-order"]
    assert {each["outcome"] for each in found.settings["tried"][1:]} == {"left out"}
    assert found.trace["match"].shape[1:] == (1, 1)
    assert (found.trace["match"].diff(dim=0) <= 0).all()


def test_polishing_takes_a_first_order_result_to_the_last_digit() -> None:
    """Where second-order is held to one step, the polish from the best candidate still arrives."""
    task, batch = tiny(), private(1)
    case = case_of(task)
    from gradleak.auto.polish import polished

    near = {**batch, "x": batch["x"] + 0.05 * private(1, seed=9)["x"]}
    before, after = residuals(case, [0], [near])[0], polished(case, [0], [near], None, 10, 0)
    assert residuals(case, [0], [after.target(0)])[0].value < 1e-6 * before.value


def test_targets_of_different_sizes_and_winners_are_put_together() -> None:
    task = tiny()
    seen = [gl.observe(task, private(n, seed=n), ONE, key=f"of {n}") for n in (1, 2)]
    found = Auto(preset="quick").run(task, seen, KNOWS, engine=CPU)
    assert found.batch["x"].shape == (2, 2, *SHAPE)
    assert found.batch["x"][0, 1].isnan().all()
    assert found.batch["y"][0, 1] == -1
    assert found.target(0)["x"].shape == (1, *SHAPE)
    assert len(found.checks.converged) == 2


def test_a_track_is_one_target() -> None:
    task, batch, noise = tiny(), private(1), LocalGaussian(sigma=0.02)
    rounds = [
        replace(gl.observe(task, batch, ONE, noise, key=f"round{n}", seed=n), round=n, key="client") for n in range(4)
    ]
    found = Auto(preset="quick", steps=5).run(task, gl.Track(tuple(rounds)), replace(KNOWS, defence=noise), engine=CPU)
    assert found.batch["x"].shape == (1, 1, *SHAPE)
    assert found.certificates is None
    assert found.noise is not None
    assert float(found.noise) > 0


def test_the_clock_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a member begins, and out of one that is running; what was found before then counts."""
    task, noise = tiny(), LocalGaussian(sigma=0.05)  # so that nothing is solved to rounding
    seen, knows = gl.observe(task, private(1), ONE, noise), replace(KNOWS, defence=noise)
    with pytest.raises(MissingKnowledge, match="s are over"):
        Auto(preset="quick", seconds=1e-6).run(task, seen, knows, engine=CPU)
    ended: list[tuple[str, ...]] = []
    for seconds in (20.0, 40.0, 60.0):
        now = iter(range(10**6))
        monkeypatch.setattr("gradleak.auto.time", SimpleNamespace(perf_counter=lambda now=now: float(next(now))))
        found = Auto(preset="quick", steps=40, seconds=seconds).run(task, seen, knows, engine=CPU)
        ended.append(tuple(each["outcome"] for each in found.settings["tried"]))
        assert ended[-1][0] == "ran"
    assert any("stopped" in outcomes for outcomes in ended)


def test_wrong_settings_are_refused_by_name() -> None:
    with pytest.raises(registry.BadSetting, match="Did you mean 'quick'"):
        registry.parse("attack", "auto:preset=quik")
    for text in ("auto:tune=-1", "auto:steps=0", "auto:seconds=0.0"):
        with pytest.raises(registry.BadSetting, match="must be"):
            registry.parse("attack", text)


# --- tuning -----------------------------------------------------------------------------------------------------------


def public(count: int = 12) -> dict[str, torch.Tensor]:
    return private(count, seed=40)


def test_settings_are_tuned_on_data_that_the_attacker_owns() -> None:
    task, batch = tiny(norm="eval"), private(1)
    noise = LocalGaussian(sigma=0.05)  # so that nothing is solved before the members that are tuned
    knows = replace(KNOWS, public=public(), defence=noise)
    seen = gl.observe(task, batch, ONE, noise)
    found = Auto(preset="standard", steps=3, tune=2).run(task, seen, knows, engine=CPU)
    by = {each["member"]: each.get("settings") for each in found.settings["tried"]}
    assert by["ig"]["tv"] in (1e-6, 1e-4, 1e-2)
    assert by["gi"]["batch_norm"] in (0.0, 0.1)
    with pytest.raises(MissingKnowledge, match="public"):
        Auto(tune=2).run(task, gl.observe(task, batch, ONE), KNOWS, engine=CPU)


def test_proxies_are_clients_of_public_images_like_the_real_one() -> None:
    training, defence = LocalTraining(lr=0.2, steps=2), Pruning(keep=0.5)
    case = case_of(tiny(), training, 2, defence=defence, public=public())
    seen, truth = proxies(case, 3, seed=0)
    assert [each.num_examples for each in seen] == [2, 2, 2]
    assert gl.tree.size(seen[0].update) == gl.tree.size(case.targets[0].last.update)
    pool = public()["x"]
    assert all(any(torch.equal(x, other) for other in pool) for batch in truth for x in batch["x"])
    again, _ = proxies(case, 3, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(seen[1].update.values(), again[1].update.values(), strict=True))
    with pytest.raises(MissingKnowledge, match="14 public ones; there are 12"):
        proxies(case, 7, seed=0)


# --- denoisers and generators -----------------------------------------------------------------------------------------


def test_a_denoiser_has_members_of_its_own() -> None:
    task = toy(width=4, dim=16)
    seen = gl.observe(task, drawn(20), DENOISING, key="step 20")
    found = Auto(preset="quick", steps=1).run(task, seen, Knowledge(training=DENOISING), engine=CPU)
    tried = {each["member"] for each in found.settings["tried"]}
    assert {"second-order", "dlg-dm", "dlg-dm, noised image and residual"} <= tried
    assert not {"ig", "cpl", "sme"} & tried
    assert float(found.match) < float(found.trace["match"][0])
    assert "span-dm" in tried


def test_steps_of_several_gradients_add_up_and_are_searched_for() -> None:
    task, training = toy(width=4, dim=16), replace(DENOISING, lr=0.1, steps=2)
    seen = gl.observe(task, {"x": drawn(20)["x"]}, training, key="two steps")
    found = Auto(preset="quick", steps=1).run(task, seen, Knowledge(training=training), engine=CPU)
    tried = {each["member"]: each for each in found.settings["tried"]}
    assert tried["second-order"]["outcome"] == "refused"
    assert "add up in the update" in tried["second-order"]["why"]
    assert tried["dlg-dm"]["settings"]["t"] == "soft"
    assert tried["dlg-dm"]["outcome"] == "ran"
    assert not {"spectral-dm", "span-dm"} & tried.keys()


def test_a_generator_brings_its_members(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Toy(CLASSES)
    task, seen, _ = images_of_it(generator, targets=1)
    case = Case(task, tuple(as_targets(seen)), knowing(generator), CPU)
    assert {"gias", "gifd", "ggl"} <= picked(case, "standard")
    # Alone, since least squares solve so small a case before anybody else is asked.
    monkeypatch.setattr("gradleak.auto.MEMBERS", tuple(m for m in MEMBERS if m.attack in ("gias", "gifd", "ggl")))
    found = Auto(preset="standard", steps=4, certify=False).run(task, seen, knowing(generator), engine=CPU)
    assert {each["attack"]: each["outcome"] for each in found.settings["tried"]} == dict.fromkeys(
        ("gias", "gifd", "ggl"), "ran"
    )
    [settings] = [each["settings"] for each in found.settings["tried"] if each["attack"] == "gifd"]
    assert settings["features"] == generator.blocks  # one stage for every block of this generator


# --- in an audit ------------------------------------------------------------------------------------------------------


def test_an_audit_takes_it_as_any_other_attack() -> None:
    data = {name: value.float() if name == "x" else value for name, value in private(12).items()}
    audit = gl.Audit(
        tiny(dtype=torch.float32), data, ["auto:preset=quick"], targets=2, unrelated=1, engine=CPU, seeds=(0,)
    )
    result = audit.run()
    assert not result.failed
    assert result.verdict.word == "leaks"
    [line] = result.summaries
    assert line.certified is not None
    assert line.converged == 1.0
    assert all(each["match"] < each["match_start"] for each in result.rows)
