"""The same attack in waves: who gets another start, how many, and what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import gradleak as gl
from conftest import private, tiny
from gradleak.attack import Composed, Reconstruction
from gradleak.attack.cascade import EscalatingRestarts, given_of, matches, taken, unsolved
from gradleak.attacks.spectral import spectral
from test_steps import drawn, toy

GRADIENT = gl.LocalTraining(lr=1.0)
KNOWS = gl.Knowledge(training=GRADIENT)
TASK = tiny()
SEEN = [gl.observe(TASK, private(1, seed=seed), GRADIENT, key=str(seed)) for seed in range(3)]


def once(steps: int = 12, **settings: Any) -> Composed:
    made = spectral(steps=steps, restarts=1, **settings)
    assert isinstance(made, Composed)
    return made


def run(attack: Any, seen: Any = SEEN, engine: gl.Engine | None = None) -> Reconstruction:
    found: Reconstruction = attack.run(TASK, seen, KNOWS, engine=engine)
    return found


def test_where_everything_is_solved_there_is_one_wave(double: gl.Engine) -> None:
    first, waves = run(once(), engine=double), run(EscalatingRestarts(once(), 4, solved=10.0), engine=double)
    torch.testing.assert_close(waves.batch, first.batch, rtol=0, atol=0)
    assert waves.settings["starts"] == [1, 1, 1]
    assert waves.evaluations == first.evaluations


def test_what_is_not_solved_gets_twice_as_many_starts_each_time_and_the_lowest_match_is_kept(double: gl.Engine) -> None:
    first = run(once(), engine=double)
    line = float(matches(first).sort().values[1])  # one target is below, two are not
    left = unsolved(first, line)
    assert len(left) == 2
    two = run(EscalatingRestarts(once(), 2, solved=line), engine=double)
    assert two.settings["starts"] == [3 if row in left else 1 for row in range(3)]
    (other,) = {0, 1, 2} - set(left)
    torch.testing.assert_close(two.batch["x"][other], first.batch["x"][other], rtol=0, atol=0)
    again = replace(once(), restarts=2).run(TASK, [SEEN[row] for row in left], KNOWS, 1 << 40, engine=double)
    best = torch.minimum(matches(first)[left], again.match.min(1).values)
    torch.testing.assert_close(matches(two)[left], best, rtol=0, atol=0)
    assert bool((best < matches(first)[left]).any())  # else nothing was tested
    assert two.evaluations == 2 * first.evaluations


def test_what_a_target_gets_does_not_depend_on_the_others(double: gl.Engine) -> None:
    attack = EscalatingRestarts(once(), 3, solved=1e-12)
    together = run(attack, engine=double)
    assert together.settings["starts"] == [7, 7, 7]
    alone = run(attack, SEEN[1], engine=double)
    torch.testing.assert_close(alone.batch["x"][0], together.batch["x"][1], rtol=1e-6, atol=1e-8)


def test_fields_that_are_given_for_each_target_stay_with_theirs() -> None:
    task, clients = toy(), [drawn(1, seed=seed) for seed in range(3)]
    seen = [gl.observe(task, batch, GRADIENT, key=str(number)) for number, batch in enumerate(clients)]
    truth = {name: torch.stack([batch[name] for batch in clients]) for name in clients[0]}
    knows = gl.Knowledge(training=GRADIENT, given={name: truth[name] for name in ("t", "noise")})
    torch.testing.assert_close(given_of(task, knows, [1], 3).given["noise"], truth["noise"][1:2])
    shared = gl.Knowledge(given={"noise": truth["noise"][:, 0]})  # of three examples, the same for all three targets
    assert given_of(task, shared, [1], 3).given["noise"].shape == shared.given["noise"].shape
    first = gl.attacks.get("spectral-dm", steps=25, restarts=1).run(task, seen, knows)
    line = float(matches(first).min()) * 1.01  # one is solved, two are searched for again, with their own noise
    again = gl.attacks.get("spectral-dm", steps=25, restarts=1, waves=3, solved=line).run(task, seen, knows)
    left = unsolved(first, line)
    assert len(left) == 2
    assert [again.settings["starts"][row] > 1 for row in range(3)] == [row in left for row in range(3)]
    assert bool((matches(again)[left] < matches(first)[left]).any())


def test_an_unknown_of_another_attack_is_not_kept_for_the_one_that_won() -> None:
    found = run(once())
    held = replace(found, unknowns={"alpha": torch.ones(3, 1), "other": torch.ones(3, 1, 2)})
    later = replace(found, match=found.match * 0.5, unknowns={"alpha": torch.zeros(3, 1)})
    merged = taken(held, later, [0, 1, 2], torch.tensor([False, True, False]))
    assert merged.unknowns["alpha"].flatten().tolist() == [1.0, 0.0, 1.0]
    assert merged.unknowns["other"].isnan().flatten().tolist() == [False, False, True, True, False, False]


def test_progress_ends_at_one() -> None:
    told: list[float] = []
    EscalatingRestarts(once(4), 2, 1e-12).run(TASK, SEEN[:1], KNOWS, progress=told.append)
    assert told[-1] == 1.0
    assert told == sorted(told)


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"waves": 0}, "waves must be at least 1; given 0"), ({"solved": 0.0}, "solved must be above 0")],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        gl.attacks.get("spectral-dm", **settings)
