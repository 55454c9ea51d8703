"""What only a GPU can show: the captured step is the eager one, nothing in the loop waits, precision is as asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import gradleak as gl
import gradleak.parts.spaces
from gradleak.engine import Search, lanes_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def scene_of_targets(count: int, name: str = "lenet") -> tuple[gl.Task, list[gl.Observation], gl.Knowledge]:
    generator = torch.Generator().manual_seed(0)
    model = (
        gl.models.lenet_zhu(generator=generator)
        if name == "lenet"
        else gl.models.resnet((1, 1), 16, norm=name, generator=generator)
    )
    x, y = torch.rand(count, 1, 3, 32, 32, generator=generator), torch.randint(10, (count, 1), generator=generator)
    task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(x[0], y[0]))
    training = gl.LocalTraining(lr=1.0)
    weights = task.weights()
    seen = [gl.observe(task, {"x": x[i], "y": y[i]}, training, weights=weights, key=f"target{i}") for i in range(count)]
    return task, seen, gl.Knowledge(training=training)


@pytest.mark.parametrize("attack", ["ig", "idlg", "dlg", "gi", "cpl", "representation"])
def test_the_captured_step_is_the_eager_one(attack: str) -> None:
    task, seen, knows = scene_of_targets(3)
    made = gl.attacks.get(attack, steps=20, restarts=2)
    runs = [made.run(task, seen, knows, engine=gl.Engine(precision="double", graph=graph)) for graph in (True, False)]
    torch.testing.assert_close(runs[0].batch["x"], runs[1].batch["x"], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(runs[0].trace["match"], runs[1].trace["match"], rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("norm", ["lenet", "group", "batch"])
def test_a_gpu_computes_what_a_cpu_computes(norm: str) -> None:
    task, seen, knows = scene_of_targets(2, norm)
    made = gl.attacks.get("ig", steps=10)
    runs = [made.run(task, seen, knows, engine=gl.Engine(device=d, precision="double")) for d in ("cuda", "cpu")]
    torch.testing.assert_close(runs[0].batch["x"], runs[1].batch["x"], rtol=1e-6, atol=1e-6)


def test_nothing_in_the_loop_waits_for_the_device() -> None:
    task, seen, knows = scene_of_targets(2)
    engine = gl.Engine()
    made = gl.attacks.get("ig", steps=50)
    with engine.settings():
        work = task.to(engine.where, engine.dtype)
        scenes = [gl.TargetView.of(work, target, knows) for target in seen]
        for scene in scenes:
            scene.fields["y"] = torch.zeros(1, dtype=torch.long, device="cuda")
        template, lane = lanes_of(scenes, [[torch.tensor([1, i])] for i in range(2)])
        search = Search(made.stages[0], template, lane, (2, 1), engine, None)  # type: ignore[attr-defined]
        advance = search.captured()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(50):
                advance()
            search.tick()  # the step itself holds no host read either
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_strict_precision_keeps_digits_that_fast_gives_up() -> None:
    task, seen, knows = scene_of_targets(1, "group")
    made = gl.attacks.get("ig", steps=1)
    exact, strict, fast = (
        made.run(task, seen, knows, engine=gl.Engine(precision=precision)).match.item()
        for precision in ("double", "strict", "fast")
    )
    assert abs(strict - exact) < 1e-4 * exact
    assert abs(fast - exact) < 1e-1 * exact


def test_a_client_of_several_minibatches_can_be_captured() -> None:
    task, seen, _ = scene_of_targets(2)
    training = gl.LocalTraining(lr=0.1, epochs=2, batch_size=1)
    x, y = torch.rand(2, 3, 32, 32), torch.randint(10, (2,))
    seen = gl.observe(task, {"x": x, "y": y}, training)
    found = gl.attacks.get("ig", steps=20).run(task, seen, gl.Knowledge(training=training, given={"y": y}))
    assert found.match.item() < found.trace["match"][0].item()


def test_a_client_on_the_gpu_is_matched_exactly() -> None:
    """The client's convolutions must not run in TF32 while the attack is strict: zero at the truth, to float32."""
    task, _, _ = scene_of_targets(1, "group")
    work = task.to("cuda", torch.float32)
    batch = {"x": torch.rand(1, 3, 32, 32, device="cuda"), "y": torch.zeros(1, dtype=torch.long, device="cuda")}
    training = gl.LocalTraining(lr=1.0)
    seen = gl.observe(work, batch, training)
    start = gl.parts.spaces.Surrogate(batch["x"])
    found = gl.attacks.get("cpl", steps=1, start=start).run(work, seen, gl.Knowledge(training=training))
    assert found.match.item() < 1e-9 * sum(float(u.square().sum()) for u in seen.update.values())


def small_targets(activation: str, count: int = 3) -> tuple[gl.Task, list[gl.Observation], gl.Knowledge, torch.Tensor]:
    make = torch.Generator().manual_seed(0)
    model = gl.models.lenet_zhu(shape=(3, 12, 12), activation=activation, init="torch", generator=make).double()
    coarse = torch.rand(count, 3, 4, 4, generator=make, dtype=torch.float64)
    x = torch.nn.functional.interpolate(coarse, size=(12, 12), mode="bilinear")[:, None]
    y = torch.randint(10, (count, 1), generator=make)
    task = gl.Task.supervised(model, torch.nn.functional.cross_entropy, like=(x[0], y[0]))
    training, weights = gl.LocalTraining(lr=1.0), task.weights()
    seen = [gl.observe(task, {"x": x[i], "y": y[i]}, training, weights=weights, key=str(i)) for i in range(count)]
    return task, seen, gl.Knowledge(training=training), x


@pytest.mark.parametrize("activation", ["sigmoid", "gelu", "relu"])
def test_least_squares_is_exact_on_a_gpu_too(activation: str) -> None:
    """Dense Levenberg-Marquardt, and for ReLUs the peeled start, over lanes."""
    task, seen, knows, x = small_targets(activation)
    found = gl.attacks.get("second-order").run(task, seen, knows)
    assert gl.metrics.compare(found, {"x": x, "y": found.batch["y"]}).psnr.min() > 100
    assert found.certificates is not None
    assert all(certificate.verdict == "determined" for certificate in found.certificates)


def test_the_matrix_free_step_can_be_captured() -> None:
    task, seen, knows, _ = small_targets("sigmoid")
    made = gl.attacks.get("second-order", method="krylov", steps=6, vectors=20, certify=False)
    runs = [made.run(task, seen, knows, engine=gl.Engine(graph=graph)) for graph in (True, False)]
    torch.testing.assert_close(runs[0].match, runs[1].match, rtol=1e-3, atol=1e-12)
    assert runs[0].match.max() < 1e-4


@pytest.mark.parametrize("defence", ["pruning:keep=0.3", "soteria", "tip", "dp-sgd:noise_multiplier=0.01", "pgd"])
def test_attackers_of_a_defence_are_captured_over_one_round_and_several(defence: str) -> None:
    """A2 over a track: the captured step does what the eager one does, and clients draw their noise on the GPU."""
    task, _, _, x = small_targets("sigmoid", count=1)
    task, training = task.to("cuda", torch.float64), gl.LocalTraining(lr=1.0)
    known = gl.registry.parse("defence", defence)
    batch = {"x": x[0].cuda(), "y": torch.tensor([3], device="cuda")}
    rounds = [gl.observe(task, batch, training, known, key=f"round{i}", seed=i) for i in range(3)]
    track = gl.Track(tuple(replace(seen, round=i) for i, seen in enumerate(rounds)))
    knows = gl.Knowledge(training=training, defence=known)
    for seen in (rounds[0], track):
        runs = [
            gl.attacks.get("ig", steps=20).run(task, seen, knows, engine=gl.Engine(precision="double", graph=graph))
            for graph in (True, False)
        ]
        torch.testing.assert_close(runs[0].batch["x"], runs[1].batch["x"], rtol=0, atol=1e-6)
