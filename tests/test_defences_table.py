"""Every registered defence with its default settings, on a tiny convolutional network: the contract of `Defence`."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

import gradleak as gl
from conftest import largest_difference, moment, private, scene_of, short, tiny
from gradleak.audit.cells import FORMS, forms_of
from gradleak.core import tree
from gradleak.core.tree import Params
from gradleak.parts.matches import SquaredError
from gradleak.parts.predictions import Replay
from gradleak.scenario.client import ClientState, LocalTraining
from gradleak.scenario.defence import Defence, overrides
from gradleak.scenario.forms import AttackerForm
from test_engine import gate, searches

ROOT = Path(__file__).parents[1]
TRAINING = LocalTraining(lr=0.5)
NAMES = [entry.name for entry in gl.registry.entries("defence")]
SETTINGS: dict[str, dict[str, Any]] = {"agp": {"layers": "0"}}  # its target layers have other names in ResNets
GUARANTEED = {"dp-sgd": "local", "local-gaussian": "local", "dp-fedavg": "central", "ldp-secadam": "local"}


def made(name: str) -> Defence:
    return gl.registry.get("defence", name, **SETTINGS.get(name, {}))


def observed(name: str, *, examples: int = 2, seed: int = 0) -> gl.Observation:
    return gl.observe(tiny(), private(examples), TRAINING, made(name), key="client", seed=seed)


def depends_on_chance(name: str) -> bool:
    """Does what the server sees of a client differ between two seeds?"""
    first, other = (gl.observe(tiny(), private(3), TRAINING, made(name), key="other", seed=seed) for seed in (7, 8))
    return largest_difference(first.update, other.update) > 0


# The attacker of these cannot match an update to the last digit. docs/defences.md says of each whether it is one.
RANDOM = {name for name in NAMES if depends_on_chance(name)}
DETERMINISTIC = [name for name in NAMES if name not in RANDOM]


def knowing(name: str, form: str) -> gl.Knowledge:
    given = {"y": private(2)["y"]}
    return gl.Knowledge(given=given, training=TRAINING, defence=AttackerForm(form).known(made(name)))


@pytest.mark.parametrize("name", NAMES)
def test_a_client_uploads_what_the_server_can_use(name: str) -> None:
    seen, weights = observed(name), tiny().weights()
    assert {key: value.shape for key, value in seen.update.items()} == {k: v.shape for k, v in weights.items()}
    assert all(bool(value.isfinite().all()) for value in seen.update.values())
    assert float(tree.norm(seen.update)) > 0
    assert seen.num_examples == 2


@pytest.mark.parametrize("name", NAMES)
def test_only_the_seed_of_a_random_defence_changes_the_upload(name: str) -> None:
    first, again, other = (observed(name, seed=seed).update for seed in (0, 0, 1))
    assert largest_difference(first, again) == 0
    assert (largest_difference(first, other) > 0) == (name in RANDOM)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_every_attacker_takes_a_step(name: str, form: str, double: gl.Engine) -> None:
    found = short("idlg", steps=1, restarts=1).run(tiny(), observed(name), knowing(name, form), engine=double)
    assert bool(found.match.isfinite().all())
    assert not bool(found.diverged.any())


@pytest.mark.parametrize("name", NAMES)
def test_an_informed_attacker_differs_from_a_naive_one_where_there_is_something_to_know(name: str) -> None:
    forms = forms_of(made(name), tuple(FORMS))
    assert forms[0] == "naive"
    assert ("adaptive" in forms) == any(overrides(made(name), hook) for hook in ("gradient", "upload"))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_attacker_assumes_asks_for_no_random_numbers(name: str) -> None:
    task, seen = tiny(), observed(name)
    assumed = made(name).assumed(scene_of(task, seen, knowing(name, "adaptive")), task)

    def replayed() -> Params:
        upload, _ = TRAINING.run(task, task.weights(), private(2), assumed, ClientState())
        return assumed.reveal([upload], [upload.num_examples])

    torch.manual_seed(0)
    first = replayed()
    torch.manual_seed(1)
    assert largest_difference(first, replayed()) == 0


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_adaptive_match_is_zero_at_the_truth_and_not_beside_it(name: str) -> None:
    scene = scene_of(tiny(), observed(name), knowing(name, "adaptive"))
    predict, batch = Replay(), private(2)

    def distance(guess: dict[str, torch.Tensor]) -> float:
        return float(SquaredError().distance(predict(guess, {}, scene, moment()), predict.target(scene)))

    assert distance(batch) < 1e-24
    assert distance({**batch, "x": private(2, seed=1)["x"]}) > 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_an_epsilon_or_no_formal_guarantee(name: str) -> None:
    federation = gl.Federation(clients=4, training=TRAINING)
    proved = made(name).guarantee(federation.exposure(3, 20))
    if f"| `{name}` |" in (ROOT / "docs" / "defences.md").read_text():  # what is documented claims what is pinned here
        assert (proved.model if proved.epsilon is not None else None) == GUARANTEED.get(name)
    # Without noise of its own, in the client or in the server's sum, a defence cannot prove an epsilon.
    noisy = name in RANDOM or overrides(made(name), "aggregate")
    assert proved.epsilon is None or noisy
    told = str(proved)
    if proved.epsilon is None:
        assert told.startswith("no formal guarantee (")
        assert "epsilon" not in told.replace("for epsilon < 1", "")  # of tip-dp-baseline, which says why it has none
    else:
        assert ", 1e-05)-differential privacy of one" in told
        assert ("does not protect against the aggregating server" in told) == (proved.model == "central")


@pytest.mark.parametrize("form", ["masked", "adaptive"])
@pytest.mark.parametrize("name", NAMES)
def test_the_step_of_an_informed_attacker_can_be_captured(name: str, form: str, double: gl.Engine) -> None:
    for search in searches(short("ig", steps=50), tiny(), observed(name), knowing(name, form), double):
        gate(search)


def test_the_captured_step_is_the_informed_one(double: gl.Engine) -> None:
    """The gate would also pass a search that had forgotten the defence."""
    [plain], [informed] = (
        searches(short("ig", steps=50), tiny(), observed("pgd"), knowing("pgd", form), double)
        for form in ("naive", "adaptive")
    )
    for search in (plain, informed):
        search.tick()
    assert largest_difference(plain.moving["v"], informed.moving["v"]) > 0


# --- chains ---------------------------------------------------------------------------------------------------------

SMALL = {"clipping": {"norm": 0.05}, "dp-fedavg": {"clip": 0.05}, "pruning": {"keep": 0.5}}  # so that all of them act


def chained(first: str, second: str) -> gl.Chain | None:
    """The two as one, or None where a chain cannot hold both."""
    made = [gl.registry.get("defence", name, **SMALL.get(name, {})) for name in (first, second)]
    try:
        return gl.Chain(*made)
    except ValueError:
        return None


PAIRS = [pair for pair in permutations(DETERMINISTIC, 2) if chained(*pair) is not None]  # a chain holds one server rule


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_attacker_of_a_chain_matches_at_the_truth(first: str, second: str) -> None:
    """The observation shows what the LAST member put out: the others must not read it as theirs."""
    chain = chained(first, second)
    assert chain is not None
    batch = private(2)
    seen = gl.observe(tiny(), batch, TRAINING, chain, key="client")
    scene = scene_of(tiny(), seen, gl.Knowledge(given={"y": batch["y"]}, training=TRAINING, defence=chain))
    predicted, target = Replay()(batch, {}, scene, moment()), Replay().target(scene)
    assert float(SquaredError().distance(predicted, target)) < 1e-18 * float(tree.squared_norm(target))


def test_a_clip_before_noise_is_not_scaled_to_the_noise() -> None:
    chain = gl.Chain(gl.defences.Clipping(0.05), gl.defences.LocalGaussian(sigma=0.05))
    batch = private(2)
    seen = gl.observe(tiny(), batch, TRAINING, chain, key="client")
    scene = scene_of(tiny(), seen, gl.Knowledge(given={"y": batch["y"]}, training=TRAINING, defence=chain))
    plain = gl.observe(tiny(), batch, TRAINING, gl.defences.Clipping(0.05), key="client").update
    assumed = chain.assumed(scene, tiny())
    upload, _ = TRAINING.run(tiny(), tiny().weights(), batch, assumed)
    assert largest_difference(upload.payload["update"], plain) < 1e-12


@pytest.mark.parametrize("other", ["soteria", "tip", "pruning"])
def test_nobody_may_touch_the_upload_of_a_proof_that_lies_in_the_gradients(other: str) -> None:
    """Masks and scores are functions of the private batch: with them the noise of the steps proves nothing."""
    pytest.importorskip("dp_accounting", reason="needs the extra dp")
    exposure = gl.Exposure(training=TRAINING)
    assert made("dp-sgd").guarantee(exposure).epsilon is not None
    assert gl.Chain(made(other), made("dp-sgd")).guarantee(exposure).epsilon is None
    assert gl.Chain(made("pruning"), made("local-gaussian")).guarantee(exposure).epsilon is not None
