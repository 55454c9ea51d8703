"""What an update determines: ranks, shares and floors known by hand, and certificates on their way to a report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

import gradleak as gl
from conftest import Linear, normal, perceptron, private, tiny, uniform
from gradleak.audit.output import describe
from gradleak.core import tree
from gradleak.core.linear import jacobian
from gradleak.engine import EngineError
from gradleak.identify import Certificate, Identifiability, certify, noise_floor, rounding_of
from gradleak.identify import floors as module
from gradleak.scenario.task import Batch, Field, TaskError

TRAINING = gl.LocalTraining(lr=0.5)
KNOWS = gl.Knowledge(training=TRAINING)


def linear(matrix: Tensor, **field: Any) -> gl.Task:
    held = Field((1, 1, matrix.shape[1]), **field)
    return gl.Task(Linear(matrix), lambda call, batch: call(batch["x"]).sum(), {"x": held})


def at_truth(task: gl.Task, batch: Batch, **settings: Any) -> Certificate:
    return certify(task, gl.observe(task, batch, TRAINING), batch, KNOWS, **settings)


# --- the Jacobian -----------------------------------------------------------------------------------------------------


def curved(x: Tensor, matrix: Tensor) -> Tensor:
    inner = matrix @ x.flatten()
    return torch.stack([inner.sin(), inner.square()])


@pytest.mark.parametrize("block", [1, 4, 64])
def test_the_jacobian_is_that_of_finite_differences(block: int) -> None:
    x, matrix = normal(2, 3), normal(7, 6, seed=1)
    found = jacobian(lambda z: curved(z, matrix), x, block)
    assert found.shape == (6, 14)
    for entry, row in enumerate(found):
        along = torch.zeros(6, dtype=x.dtype)
        along[entry] = 1e-6
        along = along.reshape(2, 3)
        difference = (curved(x + along, matrix) - curved(x - along, matrix)).flatten() / 2e-6
        assert torch.allclose(row, difference, atol=1e-8)


def test_the_jacobian_runs_under_an_outer_vmap() -> None:
    x, matrix = normal(3, 2, 3), normal(3, 7, 6, seed=1)
    together = vmap(lambda x, matrix: jacobian(lambda z: curved(z, matrix), x, 4))(x, matrix)
    alone = [jacobian(lambda z, m=m: curved(z, m), one) for one, m in zip(x, matrix)]
    assert torch.allclose(together, torch.stack(alone))


def test_the_jacobian_of_a_client_is_that_of_finite_differences() -> None:
    task, batch = tiny(mean=0.4, std=0.3), private(1)
    seen = gl.observe(task, batch, TRAINING)
    local = module.Local.at(task, seen, batch, KNOWS, module.Linearisation(block=5))
    lengths = tree.map(lambda value: value.norm(), seen.update)

    def residual(x: Tensor) -> Tensor:
        moved = gl.observe(task, {**batch, "x": x}, TRAINING).update
        return tree.flatten({n: (moved[n] - seen.update[n]) / lengths[n] for n in seen.weights})

    for entry in (0, 7, 15):
        along = torch.zeros(16, dtype=torch.float64)
        along[entry] = 1e-5 / 0.3  # of a pixel in [0, 1], where the field is normalised
        along = along.reshape(batch["x"].shape)
        difference = (residual(batch["x"] + along) - residual(batch["x"] - along)) / 2e-5
        assert torch.allclose(local.rows[entry], difference, atol=1e-8)


# --- verdicts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [tiny(), perceptron(), tiny(norm="eval"), tiny(norm="train")])
@pytest.mark.parametrize("examples", [1, 2])
def test_a_smooth_network_gives_its_data_away(task: gl.Task, examples: int) -> None:
    found = at_truth(task, private(examples))
    assert found.verdict == "determined"
    assert (found.unknowns, found.null, found.share) == (16 * examples, 0, pytest.approx(1.0))
    assert found.singular_values.dtype == torch.float64
    assert found.singular_values.shape == (found.unknowns,)
    assert "fixes all" in found.reason
    assert "tolerance of 1e-10" in str(found)


def test_pixels_that_the_model_ignores_are_counted_exactly() -> None:
    matrix = normal(40, 10)
    matrix[:, 7:] = 0
    x = uniform(2, 1, 1, 10)
    found = at_truth(linear(matrix), {"x": x})
    # The sum over the examples is all that a linear update holds: 7 of 20 directions.
    assert (found.rank, found.null, found.verdict) == (7, 13, "not determined")
    assert "Fewer than half" in found.reason
    found = at_truth(linear(matrix), {"x": x[:1]})
    assert (found.rank, found.null) == (7, 3)
    assert found.verdict == "determined up to 3 dimensions"
    about = (x[0] - x[0].mean()).flatten()
    assert found.share == pytest.approx(float(about[:7].square().sum() / about.square().sum()))
    assert f"{found.share:.0%}" in found.reason


def test_fewer_equations_than_unknowns() -> None:
    found = at_truth(linear(normal(6, 10)), {"x": uniform(1, 1, 1, 10)})
    assert (found.rank, found.null, found.equations) == (6, 4, 6)
    assert found.singular_values.shape == (10,)
    assert found.smallest == 0.0


def test_a_first_layer_of_known_rank() -> None:
    """Only what the first layer passes on can be fixed: its own gradient is an outer product with the input."""
    task = tiny()
    projector = torch.linalg.qr(normal(16, 16)).Q[:, :11]

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("basis", projector)
            self.inner = nn.Sequential(nn.Linear(11, 24), nn.Sigmoid(), nn.Linear(24, 3)).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.flatten(1) @ self.basis)

    found = at_truth(replace(task, model=Narrow()), private(1))
    assert found.verdict == "determined up to 5 dimensions"


def test_a_point_that_is_no_solution_certifies_nothing() -> None:
    task, batch = tiny(), private(1)
    seen = gl.observe(task, batch, TRAINING)
    wrong = certify(task, seen, {**batch, "x": batch["x"] + 0.05}, KNOWS)
    assert wrong.verdict == "not determined"
    assert wrong.null == 0
    assert "no solution" in wrong.reason
    assert "nothing is certified" in wrong.reason
    assert wrong.shift == pytest.approx(0.05, rel=0.2), "the step from here leads to the solution"
    scaled = certify(task, seen, batch, gl.Knowledge())  # the client's learning rate is not 1
    assert scaled.verdict == "not determined"
    assert "recipe" in scaled.reason


def test_points_that_are_not_finite_certify_nothing() -> None:
    task, batch = tiny(), private(1)
    seen = gl.observe(task, batch, TRAINING)
    found = certify(task, seen, {**batch, "x": batch["x"] * torch.nan}, KNOWS)
    assert (found.verdict, found.rank) == ("not determined", 0)
    assert "not finite" in found.reason
    assert not math.isnan(found.share)
    with pytest.raises(ValueError, match="no floor"):
        noise_floor(task, seen, {**batch, "x": batch["x"] * torch.nan}, KNOWS, noise=0.1)


def test_tensors_of_zeros_and_plain_images_give_no_nan() -> None:
    matrix = normal(12, 4)
    for x in (torch.full((1, 1, 1, 4), 0.5, dtype=torch.float64), torch.zeros((1, 1, 1, 4), dtype=torch.float64)):
        found = at_truth(linear(matrix), {"x": x}, noise=0.1)
        numbers = [found.residual, found.share, found.shift, found.floor.mse if found.floor else math.nan]
        assert all(map(math.isfinite, numbers))
        assert found.verdict == "determined"
    task, batch = tiny(), private(1)
    seen = gl.observe(task, batch, TRAINING)
    held = {**seen.update, "0.bias": torch.zeros_like(seen.update["0.bias"])}
    found = certify(task, replace(seen, update=held), batch, KNOWS)
    assert math.isfinite(found.residual)
    assert found.verdict == "not determined"


def test_the_defence_is_looked_through() -> None:
    @dataclass(frozen=True)
    class Halve(gl.Defence):
        def upload(self, upload: Any, client: Any) -> Any:
            return upload.map(lambda update: tree.scale(update, 0.5))

    task, batch = tiny(), private(1)
    seen = gl.observe(task, batch, TRAINING, Halve())
    assert certify(task, seen, batch, KNOWS).verdict == "not determined"
    assert certify(task, seen, batch, replace(KNOWS, defence=Halve())).verdict == "determined"


# --- digits -----------------------------------------------------------------------------------------------------------


def test_digits_are_read_off_the_update() -> None:
    batch = private(1, dtype=torch.float32)
    single, double = tiny(dtype=torch.float32), tiny()
    fine = gl.observe(double, private(1), TRAINING)
    coarse = gl.observe(single, batch, TRAINING)
    wire = gl.observe(single, batch, replace(TRAINING, lr=1e-3), wire="weights")
    assert (rounding_of(fine).residual, rounding_of(fine).rank) == (1e-9, 1e-10)
    assert 1e-6 < rounding_of(coarse).rank < rounding_of(coarse).residual < 1e-5
    widened = replace(coarse, update=tree.to(coarse.update, None, torch.float64))
    assert rounding_of(widened) == rounding_of(coarse), "a cast adds no digits"
    assert rounding_of(wire).wire > 100 * rounding_of(coarse).wire
    halved = {name: value.half().float() for name, value in coarse.update.items()}
    assert 5e-4 < rounding_of(replace(coarse, update=halved)).residual < 2e-3


@pytest.mark.parametrize(("lr", "wire"), [(0.5, "update"), (0.5, "weights"), (1e-3, "weights")])
def test_float32_clients_are_certified_to_their_digits(lr: float, wire: str) -> None:
    task, batch = tiny(dtype=torch.float32), private(1, dtype=torch.float32)
    training = gl.LocalTraining(lr=lr)
    found = certify(task, gl.observe(task, batch, training, wire=wire), batch, gl.Knowledge(training=training))
    assert found.verdict == "determined"
    assert 0 < found.residual < found.rounding < 1e-2
    assert found.shift < 1e-2


def test_an_update_lost_in_the_rounding_of_the_weights_determines_nothing() -> None:
    task, batch = tiny(dtype=torch.float32), private(1, dtype=torch.float32)
    training = gl.LocalTraining(lr=1e-7)
    found = certify(task, gl.observe(task, batch, training, wire="weights"), batch, gl.Knowledge(training=training))
    assert found.verdict == "not determined"


def test_the_tolerance_is_an_argument() -> None:
    task, batch = tiny(), private(1)
    values = at_truth(task, batch).singular_values
    between = float((values[7] + values[8]) / 2 / values[0])
    found = at_truth(task, batch, tolerance=between)
    assert (found.rank, found.tolerance, found.verdict) == (8, between, "determined up to 8 dimensions")
    with pytest.raises(ValueError, match="tolerance"):
        at_truth(task, batch, tolerance=-1.0)


# --- the floor --------------------------------------------------------------------------------------------------------

SMOOTH = 4.0 * (2 * torch.eye(5) - torch.diag(torch.ones(4), 1) - torch.diag(torch.ones(4), -1)).double()


@pytest.mark.parametrize("precision", [None, SMOOTH])
def test_the_floor_of_a_linear_client_is_the_closed_form_and_is_reached(precision: Tensor | None) -> None:
    """Where update and prior are linear and Gaussian the bound is exact: the MAP estimate attains it."""
    matrix, x, noise = normal(8, 5), uniform(1, 1, 1, 5), 0.5
    task = linear(matrix, bounds=(0.0, 2.0), mean=(0.3,), std=(0.5,))  # pixels of [0, 1] are four units of the model
    seen = gl.observe(task, {"x": x}, TRAINING)
    found = noise_floor(task, seen, {"x": x}, KNOWS, noise=noise, precision=precision)
    prior = torch.eye(5, dtype=torch.float64) / 0.25**2 if precision is None else precision
    forward = TRAINING.lr * matrix * 4.0
    deviation = noise * float(seen.update["weight"].square().mean().sqrt())
    fisher = forward.T @ forward / deviation**2
    posterior = torch.linalg.inv(fisher + prior)
    assert found.mse == pytest.approx(float(posterior.trace()) / 5)
    assert float(found) == found.mse
    gain = torch.eye(5, dtype=torch.float64) + torch.linalg.solve(prior, fisher)
    assert found.information == pytest.approx(0.5 * float(torch.logdet(gain)))
    assert found.effective_rank == pytest.approx(float((fisher @ posterior).trace()))
    truths = normal(20_000, 5, seed=1) @ torch.linalg.cholesky(torch.linalg.inv(prior)).T
    updates = truths @ forward.T + deviation * normal(20_000, 8, seed=2)
    estimates = updates @ (posterior @ forward.T / deviation**2).T
    assert float((estimates - truths).square().mean()) == pytest.approx(found.mse, rel=0.02)


def test_a_prior_of_differences_is_not_proper() -> None:
    matrix, x = normal(8, 5), uniform(1, 1, 1, 5)
    differences = torch.diff(torch.eye(5, dtype=torch.float64), dim=0)
    seen = gl.observe(linear(matrix), {"x": x}, TRAINING)
    found = noise_floor(linear(matrix), seen, {"x": x}, KNOWS, noise=0.1, precision=differences.T @ differences)
    assert math.isfinite(found.mse)
    assert found.information == math.inf
    task = linear(torch.zeros(8, 5, dtype=torch.float64))
    seen = gl.observe(task, {"x": x}, TRAINING)
    blind = noise_floor(task, seen, {"x": x}, KNOWS, noise=0.1, precision=differences.T @ differences)
    assert (blind.mse, blind.psnr) == (math.inf, -math.inf)
    assert noise_floor(task, seen, {"x": x}, KNOWS, noise=0.1).mse == pytest.approx(0.25**2), "the prior is left"
    with pytest.raises(ValueError, match="precision must be"):
        noise_floor(task, seen, {"x": x}, KNOWS, noise=0.1, precision=torch.eye(3))
    with pytest.raises(ValueError, match="negative eigenvalue"):
        noise_floor(task, seen, {"x": x}, KNOWS, noise=0.1, precision=-torch.eye(5))


def test_the_noise_of_a_defence_counts() -> None:
    """Declared noise and the same noise as an argument give one floor; entries that are dropped tell nothing."""

    @dataclass(frozen=True)
    class Noisy(gl.Defence):
        variance: float = 0.0

        def noise_variance(self, scene: Any) -> Any:
            return tree.map(lambda value: torch.full_like(value, self.variance), scene.update)

    matrix, x = normal(8, 5), uniform(1, 1, 1, 5)
    task = linear(matrix)
    seen = gl.observe(task, {"x": x}, TRAINING)
    level = float(seen.update["weight"].square().mean())
    asked = noise_floor(task, seen, {"x": x}, KNOWS, noise=0.3)
    declared = noise_floor(task, seen, {"x": x}, replace(KNOWS, defence=Noisy(0.3**2 * level)))
    assert declared.mse == pytest.approx(asked.mse)
    dropped = noise_floor(task, seen, {"x": x}, replace(KNOWS, defence=Noisy(math.inf)))
    assert dropped.mse == pytest.approx(0.25**2)


def test_without_noise_the_prior_decides_what_the_update_leaves_open() -> None:
    matrix, x = normal(40, 10), uniform(1, 1, 1, 10)
    matrix[:, 7:] = 0
    seen = gl.observe(linear(matrix), {"x": x}, TRAINING)
    found = noise_floor(linear(matrix), seen, {"x": x}, KNOWS)
    assert found.mse == pytest.approx(0.3 * 0.25**2)
    assert found.effective_rank == pytest.approx(7)


def test_more_noise_means_a_higher_floor() -> None:
    task, batch = tiny(), private(2)
    floors = [at_truth(task, batch, noise=noise).floor for noise in (1e-3, 1e-2, 1e-1, 1e6)]
    errors = [floor.mse for floor in floors if floor is not None]
    assert errors == sorted(errors)
    assert errors[-1] == pytest.approx(0.25**2)


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_a_jacobian_that_memory_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "memory_of", lambda engine: 2000.0)
    with pytest.raises(EngineError, match="fewer examples"):
        at_truth(tiny(), private(1))


def test_batches_that_do_not_fit_are_refused() -> None:
    task, batch = tiny(), private(2)
    seen = gl.observe(task, batch, TRAINING)
    with pytest.raises(TaskError, match=r"Reconstruction\.target"):
        certify(task, seen, private(3), KNOWS)
    with pytest.raises(TaskError, match="'y'"):
        certify(task, seen, {"x": batch["x"]}, KNOWS)
    with pytest.raises(TaskError, match="nothing left"):
        certify(task, seen, batch, replace(KNOWS, given={"x": batch["x"]}))


# --- on the way to a report -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Certifying:
    """An attack of somebody else's with certificates."""

    inner: gl.Attack

    @property
    def name(self) -> str:
        return "certifying"

    @property
    def needs(self) -> frozenset[str]:
        return self.inner.needs

    def run(self, task: gl.Task, seen: Any, knows: gl.Knowledge = KNOWS, seed: int = 0, **how: Any) -> Any:
        found = self.inner.run(task, seen, knows, seed, **how)
        several: Sequence[gl.Observation] = [seen] if isinstance(seen, gl.Observation) else seen
        made = [certify(task, one, found.target(index), knows) for index, one in enumerate(several)]
        return replace(found, certificates=tuple(made))


def test_certificates_reach_rows_summaries_and_the_report(tmp_path: Any) -> None:
    engine = gl.Engine(device="cpu", precision="double")
    analysis = Identifiability(KNOWS, noise=0.01)
    data = (private(12)["x"], private(12)["y"])
    audit = gl.Audit(
        perceptron(),
        data,
        attacks=[Certifying(gl.attacks.get("analytic"))],
        federation=gl.Federation(training=TRAINING),
        targets=3,
        engine=engine,
        analyses=[analysis],
    )
    result = audit.run(tmp_path / "run")
    again = gl.AuditResult.load(tmp_path / "run")
    assert again.rows == json.loads(json.dumps(result.rows))
    assert [row["certificate"]["verdict"] for row in again.rows] == ["determined"] * 3
    assert all(row["analyses"]["rank"] == 16 and row["analyses"]["null"] == 0 for row in again.rows)
    assert all(0 < row["analyses"]["floor"] < 0.25**2 for row in again.rows)
    assert str(again.summaries[0].certified).startswith("3 of 3 determined: the update fixes every pixel; residual ")
    assert "Proved, without the truth: 3 of 3 updates" in again.verdict.paragraph
    page = again.report(tmp_path / "report.html").read_text()
    assert "3 of 3 determined: the update fixes every pixel" in page
    assert "no other images nearby give it" in page
    assert audit.run(tmp_path / "run").rows == result.rows, "the analysis has one name in every process"


def test_certificates_are_described() -> None:
    task, batch = perceptron(), private(1)
    seen = gl.observe(task, batch, TRAINING)
    engine = gl.Engine(device="cpu", precision="double")
    plain = gl.attacks.get("analytic").run(task, seen, KNOWS, engine=engine)
    assert "nobody can tell how close" in describe(plain)
    told = describe(Certifying(gl.attacks.get("analytic")).run(task, seen, KNOWS, engine=engine))
    assert "determined. The update fixes all 16 values" in told
    assert "nobody can tell" not in told


def test_an_analysis_names_itself_without_addresses() -> None:
    assert " at 0x" not in repr(Identifiability(KNOWS))
    assert repr(Identifiability(KNOWS)) == repr(Identifiability(gl.Knowledge(training=gl.LocalTraining(lr=0.5))))


def test_what_torch_says_comes_in_words_that_say_what_to_change() -> None:
    full = module._explained(torch.OutOfMemoryError("Tried to allocate 2 GiB.\nAnd much more."), 64)
    assert str(full) == "Out of memory with blocks of 64: pass a smaller block. (Tried to allocate 2 GiB.)"
    backward = module._explained(NotImplementedError("aten::x does not support forward AD\nover many lines"), 64)
    assert isinstance(backward, EngineError)
    assert "does not support forward AD Run task.check()" in str(backward)
    other = RuntimeError("shapes do not fit")
    assert module._explained(other, 64) is other
