"""What an attack asks of its inputs, and that it compares like with like."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import gradleak as gl
from conftest import CLASSES, SHAPE, private, tiny
from gradleak.attacks.second_order.peeling import Peeled
from gradleak.core import tree
from gradleak.engine import Engine, EngineError, activations, chunk_size, lanes_of
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import Cosine, SquaredError
from gradleak.parts.optimisers import Adam, Lion, sign
from gradleak.parts.predictions import Replay, gradient
from gradleak.parts.protocols import Footprint, Prediction
from gradleak.parts.spaces import Pixels, Uniform
from gradleak.parts.stage import Stage
from gradleak.parts.surrogates import Line, Rescaled
from gradleak.parts.view import TargetView
from gradleak.scenario.client import LocalTraining, observe
from gradleak.scenario.defence import Client, Guarantee
from gradleak.scenario.fit import MOST_ENTRIES
from gradleak.scenario.observation import BadObservation, Knowledge, MissingKnowledge, Track
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import TaskError

TRAINING = LocalTraining(lr=0.5)
DOUBLE = Engine(device="cpu", precision="double")


def seen_of(task: gl.Task, examples: int = 1, training: LocalTraining = TRAINING) -> gl.Observation:
    return observe(task, private(examples), training)


@pytest.mark.parametrize("match", [SquaredError(), Cosine()])
def test_the_order_of_names_in_an_update_does_not_matter(match: SquaredError | Cosine) -> None:
    task, batch = tiny(), private(1)
    seen = observe(task, batch, TRAINING)
    turned = replace(seen, update=dict(reversed(seen.update.items())))
    scene = replace(TargetView.of(task, turned, Knowledge(training=TRAINING)), fields={"y": batch["y"]})
    predicted = Replay()(batch, {}, scene, None)  # type: ignore[arg-type]
    assert match.distance(predicted, match.prepare(turned.update)) < 1e-12
    assert match.distance(predicted, match.prepare(scene.update)) < 1e-12


def test_a_prediction_of_zero_is_as_far_as_an_orthogonal_one() -> None:
    observed = Cosine().prepare({"w": torch.tensor([3.0, 4.0])})
    assert Cosine().distance({"w": torch.zeros(2)}, observed) == 1


@pytest.mark.parametrize(
    "rule", [SGD(weight_decay=0.1), SGD(momentum=0.9), SGD(momentum=0.9, nesterov=True, weight_decay=0.1)], ids=str
)
def test_the_gradient_behind_one_step_is_exact_for_every_sgd(rule: SGD) -> None:
    task, batch = tiny(), private(2)
    training = LocalTraining(lr=0.3, optimiser=rule)
    scene = TargetView.of(task, observe(task, batch, training), Knowledge(training=training))
    plain = task.gradient(task.weights(), batch)
    for name, value in gradient(scene).items():
        torch.testing.assert_close(value, plain[name])


def test_what_a_defence_does_not_upload_is_not_observed() -> None:
    @dataclass(frozen=True)
    class KeepsStatistics(gl.Defence):
        def upload(self, upload: gl.Upload, client: Client) -> gl.Upload:
            return replace(upload, buffers=None)

    task = tiny(norm="train")
    assert observe(task, private(3), TRAINING).returned_buffers is not None
    assert observe(task, private(3), TRAINING, KeepsStatistics()).returned_buffers is None


def test_a_chain_claims_an_epsilon_only_where_nothing_can_undo_it() -> None:
    @dataclass(frozen=True)
    class Private(gl.Defence):
        def guarantee(self, exposure: gl.Exposure) -> Guarantee:
            return Guarantee(1.0, 1e-5)

    @dataclass(frozen=True)
    class Curious(gl.Defence):
        def gradient(self, compute, weights, batch, client):  # type: ignore[no-untyped-def]
            return compute(weights, batch)

    assert gl.Chain(gl.Defence(), Private()).guarantee(gl.Exposure()).epsilon == 1.0
    assert gl.Chain(Private(), gl.Defence()).guarantee(gl.Exposure()).epsilon is None
    assert gl.Chain(Curious(), Private()).guarantee(gl.Exposure()).epsilon is None


def test_given_labels_win_over_those_that_would_be_optimised() -> None:
    task = tiny()
    seen = seen_of(task)
    labels = torch.tensor([CLASSES - 1])
    found = gl.attacks.get("dlg", steps=5).run(task, seen, Knowledge(given={"y": labels}, training=TRAINING))
    assert found.batch["y"].tolist() == [[CLASSES - 1]]


def test_labels_of_targets_of_different_sizes_are_given_padded() -> None:
    task = tiny()
    seen = [observe(task, private(n), TRAINING, key=f"t{n}") for n in (1, 3)]
    given = torch.tensor([[1, -1, -1], [0, 1, 2]])
    found = gl.attacks.get("ig", steps=2).run(task, seen, Knowledge(given={"y": given}))
    assert found.batch["y"].tolist() == [[1, -1, -1], [0, 1, 2]]
    with pytest.raises(MissingKnowledge, match="no padding among"):
        gl.attacks.get("ig", steps=2).run(task, seen, Knowledge(given={"y": given[:, [2, 1, 0]]}))


def test_given_labels_spare_what_the_rule_would_need() -> None:
    attack = gl.attacks.get("ig", steps=2, labels="ilrg")
    task = tiny()
    with pytest.raises(MissingKnowledge, match="training"):
        attack.run(task, seen_of(task, 2))
    attack.run(task, seen_of(task, 2), Knowledge(given={"y": torch.tensor([0, 1])}))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([1], "must be a tensor; given list"),
        (torch.tensor([CLASSES]), f"classes 0 to {CLASSES - 1}"),
        (torch.tensor([0, 1]), "wanted \\(1, ...\\)"),
    ],
)
def test_labels_that_cannot_be_are_refused(given: object, told: str) -> None:
    task = tiny()
    with pytest.raises(MissingKnowledge, match=told):
        gl.attacks.get("ig", steps=2).run(task, seen_of(task), Knowledge(given={"y": given}))  # type: ignore[dict-item]


def test_one_label_beyond_the_classes_among_others_is_refused() -> None:
    task = tiny()
    with pytest.raises(MissingKnowledge, match=f"holds {CLASSES}; the model has classes 0 to {CLASSES - 1}"):
        gl.attacks.get("ig", steps=2).run(task, seen_of(task, 2), Knowledge(given={"y": torch.tensor([0, CLASSES])}))


def test_a_number_of_examples_that_no_machine_can_hold_is_refused() -> None:
    task = tiny()
    seen = replace(seen_of(task), num_examples=MOST_ENTRIES)
    with pytest.raises(MissingKnowledge, match="more than the 1e\\+08 that one attack takes on"):
        gl.attacks.get("ig", steps=2).run(task, seen)


def test_buffers_of_another_model_are_refused() -> None:
    task = tiny(norm="train")
    seen = seen_of(task, 2)
    assert seen.buffers is not None
    name = next(iter(seen.buffers))
    for odd in ({**seen.buffers, "zzz": torch.zeros(1)}, {**seen.buffers, name: torch.zeros(99)}):
        with pytest.raises(MissingKnowledge, match="has a buffer"):
            gl.attacks.get("ig", steps=2).run(task, replace(seen, buffers=odd))
    with pytest.raises(BadObservation, match="buffers holds NaN"):
        replace(seen, buffers={**seen.buffers, name: torch.full_like(seen.buffers[name], torch.nan)})


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"x": torch.zeros(1, *SHAPE)}, "has fields x; the task has x, y"),
        ({"x": torch.zeros(1, 9, 4, 4), "y": torch.zeros(1).long()}, "examples of shape \\(9, 4, 4\\)"),
        ({"x": torch.zeros(1, *SHAPE), "y": torch.tensor([CLASSES])}, "the classes are 0 to"),
        ({"x": torch.zeros(2, *SHAPE), "y": torch.zeros(1).long()}, "same number of examples"),
    ],
)
def test_a_client_batch_that_does_not_fit_the_task_is_refused(batch: gl.Batch, told: str) -> None:
    with pytest.raises(TaskError, match=told):
        observe(tiny(), batch, TRAINING)


@pytest.mark.parametrize("settings", [{"steps": 0}, {"steps": -3}, {"steps": 2.5}, {"lr": -1.0}, {"lr": "a"}], ids=str)
def test_settings_that_no_search_can_run_with_are_refused(settings: dict) -> None:
    for optimiser in (Adam, Lion, LBFGS):
        with pytest.raises(ValueError, match="must be a positive"):
            optimiser(**settings)


def test_a_device_that_is_not_there_is_said_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(EngineError, match="no CUDA device"):
        gl.attacks.get("ig", steps=2).run(tiny(), seen_of(tiny()), engine=Engine(device="cuda"))


def test_a_gradient_that_is_no_number_does_not_pass_for_a_zero() -> None:
    assert sign(torch.tensor([torch.nan, -2.0, 0.0]), None).isnan().tolist() == [True, False, False]  # type: ignore[arg-type]


def test_frozen_parameters_are_held_once_for_all_lanes() -> None:
    model = (
        nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))
        .double()
        .eval()
    )
    model[1].requires_grad_(False)
    task = gl.Task.supervised(model, nn.functional.cross_entropy, like=(torch.zeros(1, *SHAPE), torch.zeros(1).long()))
    batch = private(1)
    seen = observe(task, batch, TRAINING)
    scene = TargetView.of(task, seen, Knowledge())
    _, lane = lanes_of([scene], [[torch.zeros(2).long()] * 3])
    assert set(lane["buffers"]) == {name for name, _ in model.named_buffers()}
    found = gl.attacks.get("idlg", steps=20).run(task, seen, Knowledge(training=TRAINING), engine=DOUBLE)
    assert found.match.item() < found.trace["match"][0].item()


def test_a_long_history_makes_chunks_smaller() -> None:
    task = tiny()
    scene = TargetView.of(task, seen_of(task), Knowledge())
    sizes = [
        chunk_size(gl.attacks.get("idlg", history=history).stages, scene, DOUBLE)  # type: ignore[attr-defined]
        for history in (1, 10**6)
    ]
    assert sizes[0] > sizes[1]


def test_a_start_that_takes_memory_makes_chunks_smaller() -> None:
    """Peeling holds square matrices of a whole layer, beside which a first-order step is nothing."""
    shape = (1, 28, 28)
    task = gl.Task.supervised(
        gl.models.lenet_zhu(shape=shape, activation="relu"),
        nn.functional.cross_entropy,
        like=(torch.zeros(1, *shape), torch.zeros(1).long()),
    )
    seen = observe(task, {"x": torch.rand(1, *shape), "y": torch.zeros(1).long()}, TRAINING)
    scene = TargetView.of(task, seen, Knowledge())
    sizes = [
        chunk_size([Stage(Pixels(start), Replay(), SquaredError(), (), Adam())], scene, DOUBLE)
        for start in (Uniform(), Peeled(Uniform()))
    ]
    assert sizes[0] > sizes[1]


def wide() -> tuple[gl.Task, TargetView]:
    """A million parameters, and hardly any activations."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 250), nn.ReLU(), nn.Linear(250, 4000))
    task = gl.Task.supervised(model, nn.functional.cross_entropy, like=(torch.zeros(1, *SHAPE), torch.zeros(1).long()))
    return task, TargetView.of(task, observe(task, private(1, dtype=torch.float32), TRAINING), Knowledge())


def test_unknowns_of_a_prediction_make_chunks_smaller() -> None:
    """A control point has as many entries as the network, each with Adam's moments: counted like any unknown."""
    task, scene = wide()
    entries, engine = tree.size(scene.update), Engine(device="cpu")
    forms = ({"curved": False, "factors": "off"}, {"factors": "off"}, {"factors": "element"})
    line, curve, factors = (gl.attacks.get("nl-sme", **form).stages for form in forms)  # type: ignore[attr-defined]
    sizes = [chunk_size(stages, scene, engine) for stages in (line, curve, factors)]
    # Two of the update and six of the gradient in all three; eight copies of an unknown, and four of Adam's.
    expected = [2.0e9 / (4 * held * entries) for held in (8, 8 + 12, 8 + 24)]
    assert sizes == pytest.approx(expected, rel=0.05)
    seen = observe(task, private(1, dtype=torch.float32), TRAINING)
    track = Track((seen, replace(seen, round=1)))
    assert chunk_size(curve, TargetView.of(task, track, Knowledge()), engine) == pytest.approx(sizes[1] / 2, rel=0.1)


@dataclass(frozen=True, eq=False)
class Steps(Replay):
    """A replay that says how much it holds."""

    held: Footprint = Footprint()

    def footprint(self, scene: TargetView) -> Footprint:
        return self.held


def test_gradients_that_are_held_at_once_make_chunks_smaller() -> None:
    _, scene = wide()
    engine, entries = Engine(device="cpu"), tree.size(scene.update)
    outputs = activations(scene.task, scene.weights, scene.task.blank(1), scene.buffers)

    def lanes(predict: Prediction) -> int:
        return chunk_size([Stage(Pixels(), predict, Cosine(), (), Adam())], scene, engine)

    assert lanes(Line(nodes=1)) == lanes(Replay()) == lanes(Steps())
    for count in (2, 10, 50):
        # One pass is in work, with patches and cotangents; the graphs of the others wait.
        held = 2 * entries + count * 6 * entries + (24 + 8 * (count - 1)) * outputs
        assert lanes(Line(nodes=count)) == pytest.approx(2.0e9 / (4 * held), abs=1)
    assert lanes(Rescaled(Line(nodes=10))) == lanes(Line(nodes=10)) == lanes(Steps(held=Footprint(10, 10)))
    assert lanes(Steps(held=Footprint(passes=1.0e9 / (4 * 8 * outputs)))) == 1  # two gigabytes hold one such lane


def test_a_replay_holds_a_graph_for_every_step() -> None:
    scene = TargetView.of(tiny(), seen_of(tiny(), 5), Knowledge(training=LocalTraining(lr=0.1, epochs=3, batch_size=2)))
    assert Replay().footprint(scene) == Footprint(passes=3.0, gradients=9)
    assert Replay(LocalTraining(lr=1.0)).footprint(scene) == Footprint()
    assert Replay(order=[None, torch.tensor([0, 3]), slice(0, 3)]).footprint(scene) == Footprint(2.0, 3)
    _, large = wide()
    known = (Knowledge(training=LocalTraining(lr=0.1, steps=steps)) for steps in (1, 10))
    one, ten = (
        chunk_size([Stage(Pixels(), Replay(), Cosine(), (), Adam())], replace(large, knows=knows), Engine(device="cpu"))
        for knows in known
    )
    assert one / ten == pytest.approx((2 + 60) / (2 + 6), rel=0.2)


def test_a_space_of_copies_makes_chunks_smaller() -> None:
    _, scene = wide()

    @dataclass(frozen=True)
    class Copies(Pixels):
        def unknowns(self, scene: TargetView) -> int:
            return 10**6

    sizes = [
        chunk_size([Stage(s, Replay(), Cosine(), (), Adam())], scene, Engine(device="cpu"))
        for s in (Pixels(), Copies())
    ]
    assert sizes[0] / sizes[1] == pytest.approx((8 + 12) / 8, rel=0.1)


def test_the_last_iterate_of_lbfgs_is_one_that_was_accepted() -> None:
    """The point in `v` is a trial: keep="last" must not return it."""
    task = tiny()
    for steps in range(3, 12):
        found = gl.attacks.get("idlg", steps=steps, keep="last").run(
            task, seen_of(task), Knowledge(training=TRAINING), engine=DOUBLE
        )
        assert found.match.item() <= found.trace["match"].min().item() + 1e-12


def test_an_augmented_client_is_replayed_without_its_augmentation() -> None:
    task = tiny()
    noisy = LocalTraining(lr=0.5, augmentation=lambda batch, draws, step: batch)
    found = gl.attacks.get("ig", steps=2).run(task, seen_of(task, training=noisy), Knowledge(training=noisy))
    assert found.match.isfinite().all()
