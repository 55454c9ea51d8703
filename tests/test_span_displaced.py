"""`span` against clients that take their gradient at other weights than they received."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gradleak as gl
from gradleak.attacks.spans import classifiers
from gradleak.attacks.spans.displaced import displaced, displaces
from gradleak.core import tree
from gradleak.core.registry import parse
from gradleak.parts.predictions import gradient as observed_gradient
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Chain, Defence
from gradleak.scenario.forms import AttackerForm
from gradleak.scenario.observation import Knowledge, Track
from gradleak.scenario.rules import SGD
from test_span import GRADIENT, KNOWS, net, pictures


def target(defence: Defence, training: gl.LocalTraining = GRADIENT) -> Track:
    return Track((gl.observe(net(), pictures(2, seed=2), training, defence, key="target"),))


def knowing(defence: Defence, form: AttackerForm = AttackerForm.ADAPTIVE) -> Knowledge:
    return replace(KNOWS, defence=form.known(defence))


@pytest.mark.parametrize("name", ["fedsam", "fedasam", "fedgf"])
def test_behind_the_true_images_the_weights_are_those_of_the_gradient(name: str) -> None:
    defence = parse("defence", name)
    seen, knows = target(defence), knowing(defence)
    assert displaces(net(), seen, knows)
    moved = displaced(net(), seen, knows, pictures(2, seed=2)).last
    gradient = net().gradient(moved.weights, pictures(2, seed=2))
    assert float(tree.norm(tree.subtract(gradient, seen.last.update))) < 1e-9 * float(tree.norm(gradient))
    assert moved.update is seen.last.update


def test_the_clients_weight_decay_is_of_the_weights_that_it_received() -> None:
    defence, training = parse("defence", "fedsam"), gl.LocalTraining(lr=0.5, optimiser=SGD(weight_decay=0.1))
    knows = replace(knowing(defence), training=training)
    moved = displaced(net(), target(defence, training), knows, pictures(2, seed=2))
    seen = observed_gradient(TargetView.of(net(), moved, knows))
    true = net().gradient(moved.last.weights, pictures(2, seed=2))
    assert float(tree.norm(tree.subtract(true, seen))) < 1e-9 * float(tree.norm(true))


def test_targets_of_different_sizes_are_looked_at_again(double: gl.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classifiers, "LOOKS", 1)
    defence = parse("defence", "fedsam")
    seen = [gl.observe(net(), pictures(size, seed=size), GRADIENT, defence, key=f"of {size}") for size in (2, 1)]
    found = gl.attacks.get("span", steps=6, repairs=0, fine_steps=0).run(net(), seen, knowing(defence), engine=double)
    assert torch.isfinite(found.batch["x"][0]).all()
    assert torch.isfinite(found.batch["x"][1, :1]).all()
    assert not torch.isfinite(found.batch["x"][1, 1:]).any()
    assert found.batch["y"][1, 1:].tolist() == [-1]


def test_the_observed_gradient_tells_the_weights_about() -> None:
    defence = parse("defence", "fedsam:rho=0.01")
    seen, knows = target(defence), knowing(defence)
    true = displaced(net(), seen, knows, pictures(2, seed=2)).last.weights
    guess = displaced(net(), seen, knows).last.weights
    sent = seen.last.weights
    assert float(tree.norm(tree.subtract(guess, true))) < 0.2 * float(tree.norm(tree.subtract(sent, true)))


@pytest.mark.parametrize("name", ["clipping:norm=1.0", "clipping:norm=1.0,per=example", "dp-sgd", "pruning", "pgd"])
def test_other_defences_take_it_at_the_weights_that_were_sent(name: str) -> None:
    defence = parse("defence", name)
    assert not displaces(net(), target(defence), knowing(defence))


def test_one_who_does_not_know_the_defence_stays_at_the_weights_that_were_sent() -> None:
    defence, steps = parse("defence", "fedsam"), gl.LocalTraining(lr=1.0, steps=2)
    for form in (AttackerForm.NAIVE, AttackerForm.MASKED):
        assert not displaces(net(), target(defence), knowing(defence, form))
    assert displaces(net(), target(Chain(defence, Defence())), knowing(Chain(defence, Defence())))
    several = replace(knowing(defence), training=steps)
    assert not displaces(net(), target(defence, steps), several)  # each step has weights of its own


def test_looks_explain_the_update_better(double: gl.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    defence = parse("defence", "fedsam")
    attack = gl.attacks.get("span", steps=30, repairs=0, fine_steps=0)
    found = [attack.run(net(), target(defence), knowing(defence), engine=double)]
    monkeypatch.setattr(classifiers, "LOOKS", 0)
    found.append(attack.run(net(), target(defence), knowing(defence), engine=double))
    assert float(found[0].match.min()) < float(found[1].match.min())
    assert torch.isfinite(found[0].batch["x"]).all()
