"""Parts of an attack: every member has a default, and a part that holds another one passes every member on."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from typing import Any, get_args, get_type_hints

import pytest
import torch

import gradleak as gl
from conftest import moment, perceptron, private, scene_of, tiny
from gradleak.attack import Composed
from gradleak.attacks.dlfa.epochs import Copies, LocalSteps, Over, Ramp
from gradleak.attacks.fedleak.blended import Blended
from gradleak.attacks.generative.latent import Latent
from gradleak.attacks.second_order.peeling import Peeled
from gradleak.core.random import Draws, key
from gradleak.engine import Engine
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.matches import Cosine, RowCosine, Scaled
from gradleak.parts.optimisers import Adam, FirstOrder
from gradleak.parts.predictions import Replay, Representation
from gradleak.parts.priors import Smoothness, TotalVariation
from gradleak.parts.protocols import BASES, LaneObjective, Optimiser, base_of, defines, delegates, members
from gradleak.parts.spaces import JointSpace, Normal, Pixels, SoftField, Uniform, unknowns_of
from gradleak.parts.stage import Stage
from gradleak.parts.surrogates import Inside, Rescaled, Within
from gradleak.scenario.client import LocalTraining

# --- four members that wrappers dropped -------------------------------------------------------------------------------


def stage(**parts: Any) -> Stage:
    plain = {"space": Pixels(), "predict": Replay(), "match": Cosine(), "priors": (), "optimiser": Adam(steps=3)}
    return Stage(**{**plain, **parts})


def test_a_joint_space_needs_what_its_spaces_need() -> None:
    assert stage(space=Latent()).needs == {"generator"}
    assert stage(space=JointSpace((Latent(),))).needs == {"generator"}


def test_a_rescaled_prediction_needs_what_the_plain_one_needs() -> None:
    assert stage(predict=LocalSteps()).needs == {"training"}
    assert stage(predict=Rescaled(LocalSteps())).needs == {"training"}


def test_a_scaled_match_still_chooses_example_by_example() -> None:
    """Every example comes from the restart that matches it best, so the examples come from several restarts."""
    task, batch = perceptron(), private(3)
    seen = gl.observe(task, batch, LocalTraining(lr=0.1))

    def restarts_of(match: Any) -> list[int]:
        parts = {"space": Pixels(Normal()), "predict": Representation(), "match": match}
        attack = Composed("toy", (stage(**parts),), Labels(label_rule("auto")), restarts=6)
        result = attack.run(task, seen, gl.Knowledge(given={"y": batch["y"]}), engine=Engine(precision="double"))
        same = (result.candidates["x"][0] == result.batch["x"][0]).flatten(2).all(2)  # (restarts, examples)
        assert same.sum(0).tolist() == [1, 1, 1]
        return same.long().argmax(0).tolist()

    assert len(set(restarts_of(RowCosine()))) > 1
    assert len(set(restarts_of(Scaled(RowCosine(), 2.0)))) > 1


def test_a_rescaled_prediction_has_no_noise_level_where_the_plain_one_has_none() -> None:
    task, batch = perceptron(), private(2)
    scene = scene_of(task, gl.observe(task, batch, LocalTraining(lr=0.1)), y=batch["y"])
    source = Draws(key("noise"))
    assert Representation().disturbed(scene, source) is None
    assert Rescaled(Representation()).disturbed(scene, source) is None
    assert Rescaled(Replay()).disturbed(scene, source).keys() == scene.update.keys()


def test_an_attack_with_a_rescaled_representation_runs_under_a_noisy_defence() -> None:
    task, batch = perceptron(), private(2)
    training, noisy = LocalTraining(lr=0.1), gl.defences.get("local-gaussian", sigma=1e-3)
    seen = gl.observe(task, batch, training, defence=noisy)
    knows = gl.Knowledge(training=training, defence=noisy, given={"y": batch["y"]})
    parts = {"predict": Rescaled(Representation()), "match": RowCosine()}
    attack = Composed("toy", (stage(**parts),), Labels(label_rule("auto")))
    result = attack.run(task, seen, knows, engine=Engine(precision="double"))
    assert result.noise is not None
    assert float(result.noise[0, 0]) == 0.0


# --- every wrapper, every member --------------------------------------------------------------------------------------


def every_part() -> list[type]:
    """All parts of the package, private ones included."""
    for module in pkgutil.walk_packages(gl.__path__, "gradleak."):
        if module.name.split(".")[1] in ("parts", "engine", "attack", "attacks", "auto"):
            importlib.import_module(module.name)

    def below(kind: type) -> list[type]:
        return [each for child in kind.__subclasses__() for each in (child, *below(child))]

    return [part for base in BASES for part in dict.fromkeys(below(base)) if part.__module__.startswith("gradleak.")]


def inner_parts(part: type) -> dict[str, type]:
    """The fields that hold another part, or several, each with its base class."""

    def classes(hint: Any) -> list[type]:
        return [hint] if isinstance(hint, type) else [each for own in get_args(hint) for each in classes(own)]

    hints = get_type_hints(part)
    held = {name: [each for each in classes(hint) if issubclass(each, BASES)] for name, hint in hints.items()}
    return {name: base_of(found[0]) for name, found in held.items() if found and name in part.__dataclass_fields__}


def is_wrapper(part: type) -> bool:
    """Is the class, right below its base, made around another part of the same kind?

    One that inherits a whole part, such as `Pixels`, and holds another beside answers for itself.
    """
    base = base_of(part)
    root = next(each for each in part.__mro__ if base in each.__bases__)
    return dataclasses.is_dataclass(root) and base in inner_parts(root).values()


PARTS = every_part()
HOLDING = [part for part in PARTS if dataclasses.is_dataclass(part) and inner_parts(part)]
WRAPPERS = [part for part in HOLDING if is_wrapper(part)]
DELEGATED = [(part, name) for part in WRAPPERS for name in members(base_of(part))]


def test_the_wrappers_are_found() -> None:
    names = {part.__name__ for part in WRAPPERS}
    assert {"JointSpace", "NoisedResidual", "Rescaled", "Wrapped", "Scaled", "Sketched", "Over", "Mixed"} <= names
    assert {"Granted", "Blended", "_Steered", "SpectralPair", "Strongest", "AsObserved"} <= names


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_every_member_that_the_engine_may_ask_has_a_default(base: type) -> None:
    """Declared without a value: `steps` alone, since no number of steps suits every optimiser."""
    assert [name for name in members(base) if not hasattr(base, name)] == (["steps"] if base is Optimiser else [])


@pytest.mark.parametrize(("part", "name"), DELEGATED, ids=lambda each: getattr(each, "__name__", each))
def test_no_wrapper_falls_back_to_the_default_of_its_base(part: type, name: str) -> None:
    assert defines(part, name), f"{part.__name__} drops {name} of the part it holds: decorate it with @delegates(...)"


@pytest.mark.parametrize("part", [part for part in HOLDING if base_of(part) is not LaneObjective])
def test_who_holds_a_part_needs_what_it_needs(part: type) -> None:
    assert defines(part, "needs"), f"{part.__name__} holds {list(inner_parts(part))} and says nothing of their needs"


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_a_wrapper_that_overrides_nothing_answers_as_its_inner_part(base: type) -> None:
    """Methods get all arguments and return the inner result; attributes are the inner ones."""
    calls: list[Any] = []

    def method(name: str) -> Any:
        def answer(self: Any, *given: Any) -> Any:
            calls.append((name, given))
            return f"answer of {name}"

        return answer

    answers = {
        name: method(name) if inspect.isfunction(getattr(base, name, None)) else f"value of {name}"
        for name in members(base)
    }
    inner = type("Inner", (base,), answers)()
    wrapper = delegates("inner")(type("Wrapper", (base,), {"inner": inner}))()
    for name, answer in answers.items():
        if isinstance(answer, str):
            assert getattr(wrapper, name) == answer
        else:
            assert getattr(wrapper, name)(1, 2) == f"answer of {name}"
            assert calls.pop() == (name, (1, 2))


def test_a_blended_optimiser_stays_blended_when_it_is_sized() -> None:
    assert Blended(Adam(steps=3), lam=0.3).sized(4) == Blended(Adam(steps=3), lam=0.3)


def test_an_optimiser_without_steps_cannot_be_made() -> None:
    """A base class must not lend a dataclass field its value."""
    with pytest.raises(TypeError, match="steps"):
        FirstOrder(lr=0.1)


def test_a_joint_space_counts_what_its_spaces_state() -> None:
    task, batch = perceptron(), private(2)
    scene = scene_of(task, gl.observe(task, batch, LocalTraining(lr=0.1)), gl.Knowledge(training=LocalTraining(lr=1.0)))
    copies = Copies(Normal())
    assert JointSpace((Pixels(), Within("alpha", 0.0, 1.0))).unknowns(scene) == unknowns_of(task, 2) == 32
    assert JointSpace((Pixels(), SoftField())).unknowns(scene) is None
    assert JointSpace((copies, Within("alpha", 0.0, 1.0))).unknowns(scene) == copies.unknowns(scene)


def test_the_peak_of_a_start_is_counted_wherever_it_stands() -> None:
    task = tiny()
    peeled = Peeled(Uniform())
    alone = Pixels(peeled).entries(task)
    assert alone > 0
    assert JointSpace((SoftField(), Pixels(Inside(peeled)))).entries(task) == alone


@pytest.mark.parametrize("place", ["space", "predict", "match", "priors", "optimiser"])
def test_a_part_that_inherits_no_base_class_is_refused_when_the_stage_is_made(place: str) -> None:
    class Mine:
        pass

    base = {"space": "Space", "predict": "Prediction", "match": "Match", "priors": "Prior", "optimiser": "Optimiser"}
    told = rf"{place} takes a {base[place]}; given a Mine.*inherit gradleak.parts.protocols.{base[place]}"
    with pytest.raises(TypeError, match=told):
        stage(**{place: (Mine(),) if place == "priors" else Mine()})


def test_a_rule_for_fields_that_inherits_no_base_class_is_refused() -> None:
    with pytest.raises(TypeError, match="fields takes a FieldRule; given a function"):
        Composed("toy", (stage(),), lambda scene: {})


def test_a_prior_over_a_ramp_has_terms_for_least_squares() -> None:
    """The sum of their squares is the prior itself: the inner one over the ramp."""
    task, batch = tiny(), private(2)
    scene = scene_of(task, gl.observe(task, batch, LocalTraining(lr=0.1)))
    over = Over(Smoothness(3.0), Ramp(0.5, 2.0, over=4))
    for step in (0, 1, 9):
        value, terms = (each(batch, {}, scene, moment(step)) for each in (over, over.terms))
        torch.testing.assert_close(terms.square().sum(), value, rtol=1e-6, atol=0.0)  # the ramp is in float32
        assert value != over.prior(batch, {}, scene, moment(step))


def test_a_prior_without_terms_says_so_to_least_squares() -> None:
    with pytest.raises(ValueError, match="needs priors with terms; TotalVariation.* has none"):
        TotalVariation(1.0).terms({}, {}, None, moment())


def test_a_scene_says_what_is_computed_in() -> None:
    for dtype in (torch.float32, torch.float64):
        task = tiny(dtype=dtype)
        scene = scene_of(task, gl.observe(task, private(1, dtype=dtype), LocalTraining(lr=0.1)))
        assert scene.like is next(iter(scene.weights.values()))
        assert (scene.like.dtype, scene.to(torch.float64).like.dtype) == (dtype, torch.float64)
