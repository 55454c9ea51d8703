"""Checks tell an attack that failed from a defence that works. None of them sees the truth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import gradleak as gl
from conftest import private, tiny
from gradleak import attacks
from gradleak.attack import Reconstruction
from gradleak.attack.checks import Checks, checks_of, observation_checks
from gradleak.scenario.task import Field

FIELD = Field((1, 2, 2))


def reconstruction(curves: Tensor, **changes: Any) -> Reconstruction:
    """By hand: `curves` (points, targets, restarts) is the match along the search; all restarts show the same image."""
    points, targets, restarts = curves.shape
    candidates = torch.full((targets, restarts, 1, 1, 2, 2), 0.5)
    match = curves.nan_to_num(torch.inf).min(0).values
    chosen = match.argmin(1)
    standard: dict[str, Any] = {
        "batch": {"x": candidates[torch.arange(targets), chosen]},
        "candidates": {"x": candidates},
        "objective": match,
        "match": match,
        "chosen": chosen,
        "diverged": torch.zeros(targets, restarts, dtype=torch.bool),
        "trace": {"step": torch.arange(points), "match": curves, "objective": curves},
        "fields": {"x": FIELD},
        "keys": tuple(f"t{i}" for i in range(targets)),
        "examples": (1,) * targets,
        "seconds": 0.0,
        "evaluations": 1000,
    }
    return Reconstruction(**{**standard, **changes})


def curve(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def names(checks: Checks) -> list[str]:
    return [check.name for check in checks.found]


def falling(end: float, points: int = 100, settle: float = 0.4) -> Tensor:
    """From 1 to `end`, all of it within the first `settle` of the steps."""
    share = (torch.linspace(0, 1, points, dtype=torch.float64) / settle).clamp(max=1)
    return (end**share)[:, None, None]


@pytest.mark.parametrize(
    ("curves", "found", "converged"),
    [
        (falling(1e-3), [], True),
        (falling(0.3), [], True),
        (falling(1e-8, settle=1.0), [], True),  # solved, however steep the tail
        (falling(1e-3, settle=1.0), ["not converged"], False),
        (falling(0.8), ["not fitted"], False),
        (curve(1.0, 1.0, 1.0), ["flat"], False),
        (curve(0.0, 0.0), ["flat"], False),
        (curve(1.0, 2.0, 3.0), ["not fitted"], False),
        (curve(1.0, 0.4, 0.4, 0.399), ["stuck"], False),  # a projection, and nothing after it
        (curve(0.1), [], True),  # a closed form
    ],
)
def test_the_curve_decides(curves: Tensor, found: list[str], converged: bool) -> None:
    checks = checks_of(reconstruction(curves))
    assert names(checks) == found
    assert checks.converged == (converged,)
    assert checks.ok == (not found)
    assert all(check.fix and check.text for check in checks.found)


@dataclass(frozen=True)
class Told:
    """As much of a certificate as the checks ask for."""

    solved: bool


@pytest.mark.parametrize("solved", [True, False])
def test_a_search_that_began_at_a_proved_solution_is_not_flat(solved: bool) -> None:
    """A start in closed form may leave nothing to search for; a certificate tells that apart from no slope."""
    checks = checks_of(reconstruction(curve(1e-29, 1e-29), certificates=(Told(solved),)))
    assert names(checks) == ([] if solved else ["flat"])
    assert checks.converged == (solved,)


def test_a_schedule_that_ends_in_tiny_steps_is_not_convergence() -> None:
    """IG stops moving in the last eighth of any budget: what counts is what the second half still brought."""
    curves = torch.cat([torch.linspace(1, 0.2, 88), torch.full((12,), 0.2)]).double()[:, None, None]
    assert names(checks_of(reconstruction(curves))) == ["not converged"]


def test_few_steps_show_nothing() -> None:
    assert names(checks_of(reconstruction(falling(0.3), evaluations=49))) == ["not converged"]
    assert names(checks_of(reconstruction(falling(1e-8), evaluations=49))) == []


def test_diverged_lanes_are_said_and_all_of_them_is_an_error() -> None:
    curves = falling(1e-3).expand(-1, 2, 2).clone()
    curves[50:, :, 1] = torch.nan
    diverged = torch.tensor([[False, True], [True, True]])
    checks = checks_of(reconstruction(curves, diverged=diverged))
    assert [(check.name, check.severity, check.target) for check in checks.found] == [
        ("diverged", "error", 1),
        ("diverged", "warning", 0),
    ]
    assert checks.converged == (True, False)
    assert "target 1" in str(checks)
    assert "1 of 2 targets converged" in str(checks)
    assert [check.target for check in checks.of(0)] == [0]


def test_a_match_that_is_not_finite_is_not_fitted() -> None:
    lost = reconstruction(falling(1e-3), match=torch.tensor([[torch.nan]]))
    assert names(checks_of(lost)) == ["not fitted"]


def test_restarts_that_disagree() -> None:
    curves = falling(1e-3).expand(-1, 1, 3)
    same = torch.rand(1, 3, 2, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    same[:, 1:] = same[:, :1].flip(2)  # the same two images in another order
    agreeing = reconstruction(curves, candidates={"x": same}, examples=(2,))
    assert names(checks_of(agreeing)) == []
    other = torch.stack([torch.zeros(2, 1, 2, 2), torch.ones(2, 1, 2, 2), torch.full((2, 1, 2, 2), 0.5)])[None]
    assert names(checks_of(reconstruction(curves, candidates={"x": other}, examples=(2,)))) == ["restarts disagree"]
    broken = torch.full_like(other, torch.nan)
    assert names(checks_of(reconstruction(curves, candidates={"x": broken}, examples=(2,)))) == []


def test_restarts_are_compared_as_the_pictures_they_are_shown_as() -> None:
    """Nobody sees how far beyond white a pixel lies: such restarts show the same picture."""
    curves = falling(1e-3).expand(-1, 1, 2)
    beyond = torch.stack([torch.full((1, 1, 2, 2), 1.0), torch.full((1, 1, 2, 2), 3.0)])[None]
    assert names(checks_of(reconstruction(curves, candidates={"x": beyond}))) == []
    assert names(checks_of(reconstruction(curves, candidates={"x": 1 - beyond}))) == []


def test_a_real_attack_reports_itself(double: gl.Engine) -> None:
    task = tiny()
    seen = gl.observe(task, private(1), gl.LocalTraining(lr=1.0))
    knows = gl.Knowledge(training=gl.LocalTraining(lr=1.0))
    good = attacks.get("idlg", steps=80).run(task, seen, knows, engine=double)
    assert good.checks.converged == (True,), good.checks
    assert "nothing to report" in str(good.checks)
    short = attacks.get("ig", steps=4, lr=1e-6).run(task, seen, knows, engine=double)
    assert names(short.checks) == ["stuck"]
    assert short.checks.converged == (False,)


def test_checks_do_not_depend_on_the_truth(double: gl.Engine) -> None:
    """They are a function of the reconstruction, which has no field for it."""
    task = tiny()
    seen = gl.observe(task, private(1), gl.LocalTraining(lr=1.0))
    found = attacks.get("ig", steps=10).run(task, seen, engine=double)
    assert checks_of(found) == checks_of(replace(found, keys=("another name",)))


def observation(change: Any) -> gl.Observation:
    task = tiny()
    seen = gl.observe(task, private(1), gl.LocalTraining(lr=1.0))
    return replace(seen, update={name: change(value) for name, value in seen.update.items()})


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (lambda value: value, set()),
        (torch.zeros_like, {"zero update"}),
        (torch.ones_like, {"constant update", "unclear label"}),
        (lambda value: 1e-15 * value, {"tiny update"}),
        (lambda value: -value, {"unclear label"}),
    ],
)
def test_odd_observations(change: Any, wanted: set[str]) -> None:
    found = observation_checks(observation(change), tiny())
    assert {check.name for check in found} == wanted
    assert all(check.fix for check in found)


def test_a_pruned_update_is_noted() -> None:
    def pruned(value: Tensor) -> Tensor:
        return torch.where(value.abs() >= value.abs().flatten().quantile(0.7), value, 0.0)

    found = {check.name: check.severity for check in observation_checks(observation(pruned), tiny())}
    assert found["sparse update"] == "note"


def test_a_model_without_a_classifier_is_no_error() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 4), torch.nn.Flatten())
    like = (torch.zeros(1, 1, 4, 4), torch.zeros(1, dtype=torch.long))
    task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=like)
    seen = gl.observe(task, private(1, dtype=torch.float32), gl.LocalTraining(lr=1.0))
    assert observation_checks(seen, task) == []
