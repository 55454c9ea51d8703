"""Curvature: products against second derivatives, and spectra from products against spectra known in full."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, mse_loss, nll_loss

import gradleak as gl
from conftest import SHAPE, normal, private, tiny
from gradleak.core import tree
from gradleak.curvature import hessian as module
from gradleak.curvature import lanczos
from gradleak.curvature.hessian import Operator, SampleMean, dense, density, exact, extremes, log_determinant, trace
from gradleak.curvature.lanczos import LanczosRun, Runs, signs, traces
from gradleak.engine import EngineError
from gradleak.scenario.task import Batch, Field, TaskError

CPU = gl.Engine(device="cpu")
hessian, ggn, curvature = (partial(each, engine=CPU) for each in (module.hessian, module.ggn, module.curvature))
LIKE = (torch.zeros(1, *SHAPE), torch.zeros(1, dtype=torch.long))


def symmetric(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """A matrix with these eigenvalues, in a random basis."""
    basis = torch.linalg.qr(normal(len(eigenvalues), len(eigenvalues), seed=seed)).Q
    return (basis * eigenvalues) @ basis.T


def double_backward(task: gl.Task, batch: Batch) -> Tensor:
    """The Hessian entry by entry, reverse over reverse: another route than the one under test."""
    like = task.weights()
    loss = lambda w: task.loss(tree.unflatten(w, like), batch)[0]  # noqa: E731
    found: Tensor = torch.autograd.functional.hessian(loss, tree.flatten(like))  # type: ignore[no-untyped-call]
    return found


def counted(matrix: Tensor) -> tuple[Operator, list[int]]:
    """The matrix as an operator, and the number of rows of every product."""
    rows: list[int] = []

    def product(vectors: Tensor) -> Tensor:
        rows.append(len(vectors))
        return vectors @ matrix

    return Operator(len(matrix), matrix.device, product), rows


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [None, "eval"])
def test_products_are_those_of_the_second_derivative(norm: str | None) -> None:
    task, batch = tiny(norm=norm), private(5)
    expected = double_backward(task, batch)
    vectors = normal(7, len(expected))
    operator = hessian(task, task.weights(), batch)
    assert torch.allclose(operator(vectors), vectors @ expected, atol=1e-13)
    assert torch.allclose(dense(operator), expected, atol=1e-13)
    assert exact(operator).asymmetry < 1e-10


def test_products_are_differences_of_gradients() -> None:
    task, batch = tiny(seed=3), private(4)
    w, like = tree.flatten(task.weights()), task.weights()
    v, step = normal(len(w)), 1e-5
    either = [tree.flatten(task.gradient(tree.unflatten(w + sign * step * v, like), batch)) for sign in (1, -1)]
    assert torch.allclose(hessian(task, like, batch)(v), (either[0] - either[1]) / (2 * step), atol=1e-8)


@pytest.mark.parametrize(
    "settings", [{"chunk": 1}, {"chunk": 2}, {"chunk": 99}, {"block": 1}, {"block": 3, "chunk": 3}, {"batched": False}]
)
def test_parts_of_examples_and_vectors_change_nothing(settings: dict[str, Any]) -> None:
    task, batch, engine = tiny(), private(5), gl.Engine(device="cpu", batched=settings.pop("batched", True))
    vectors = normal(7, tree.size(task.weights()))
    for kind in (hessian, ggn):
        whole = kind(task, task.weights(), batch, block=7, chunk=5)(vectors)
        cut = kind(task, task.weights(), batch, engine=engine, **settings)(vectors)
        assert torch.allclose(cut, whole, atol=1e-14)


def test_batchnorm_is_measured_in_evaluation_mode_and_the_model_is_left_alone() -> None:
    training, evaluating, batch = tiny(norm="train", dtype=torch.float32), tiny(norm="eval"), private(5)
    before = tree.detach(dict(training.model.state_dict()))
    weights, buffers = (tree.to(held, None, torch.float64) for held in (training.weights(), training.buffers()))
    v = normal(tree.size(weights))
    found = hessian(training, training.weights(), batch)(v)
    assert torch.allclose(found, hessian(evaluating, weights, batch, buffers)(v), atol=1e-14)
    assert training.model.training
    assert all(torch.equal(before[name], value) for name, value in training.model.state_dict().items())


def test_buffers_that_are_given_are_used() -> None:
    task, batch = tiny(norm="eval"), private(5)
    moved = {name: value + 1 for name, value in task.buffers().items()}
    own = replace(task, model=tiny(norm="eval").model)
    own.model.load_state_dict({**task.model.state_dict(), **moved})
    v = normal(tree.size(task.weights()))
    found = hessian(task, task.weights(), batch, moved)(v)
    assert torch.allclose(found, hessian(own, own.weights(), batch)(v))
    assert not torch.allclose(found, hessian(task, task.weights(), batch)(v))


# --- the Gauss-Newton matrix ------------------------------------------------------------------------------------------


def test_of_a_linear_softmax_model_the_gauss_newton_matrix_is_the_hessian() -> None:
    task = gl.Task.supervised(nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double(), cross_entropy, like=LIKE)
    both = [dense(kind(task, task.weights(), private(6))) for kind in (hessian, ggn)]
    assert torch.allclose(*both, atol=1e-14)
    assert float(both[0].abs().max()) > 0.01


def test_the_gauss_newton_matrix_is_that_of_the_softmax_and_has_no_negative_eigenvalue() -> None:
    task, batch = tiny(), private(4)
    like = task.weights()
    logits = lambda w: task.call(tree.unflatten(w, like))(batch["x"])  # noqa: E731
    jacobian = torch.func.jacrev(logits)(tree.flatten(like))  # (examples, classes, d)
    p = logits(tree.flatten(like)).softmax(1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    expected = torch.einsum("ncd,nce,nef->df", jacobian, middle, jacobian) / 4
    operator = ggn(task, like, batch)
    assert torch.allclose(dense(operator), expected, atol=1e-14)
    assert float(exact(operator).eigenvalues[0]) > -1e-14
    assert float(exact(hessian(task, like, batch)).eigenvalues[0]) < -1e-3


def test_squared_errors_have_both_matrices() -> None:
    """Torch's mse_loss has no forward mode over its gradient; the plain form has."""
    task, batch = tiny(), {**private(4), "y": normal(4, 3)}
    task = gl.Task(task.model, lambda call, held: mse_loss(call(held["x"]), held["y"]), {"x": task.fields["x"]})
    like = task.weights()
    jacobian = torch.func.jacrev(lambda w: task.call(tree.unflatten(w, like))(batch["x"]).flatten())(tree.flatten(like))
    assert torch.allclose(dense(ggn(task, like, batch)), 2 * jacobian.T @ jacobian / 12, atol=1e-14)
    assert torch.allclose(dense(hessian(task, like, batch)), double_backward(task, batch), atol=1e-13)


def test_an_objective_without_a_gauss_newton_matrix_is_refused() -> None:
    task, batch = tiny(), private(4)
    ended = gl.Task.supervised(nn.Sequential(task.model, nn.LogSoftmax(1)), nll_loss, like=LIKE)
    with pytest.raises(TaskError, match="linear in the model's outputs.*return logits"):
        ggn(ended, ended.weights(), batch)
    twice = replace(task, objective=lambda call, held: cross_entropy(call(held["x"]) + call(held["x"]), held["y"]))
    with pytest.raises(TaskError, match="calls the model 2 times.*Use hessian"):
        ggn(twice, twice.weights(), batch)


# --- log-determinants of networks -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Known:
    """A network of 1,408 weights, and its spectrum in full."""

    operator: Operator
    matrix: Operator
    eigenvalues: Tensor
    eigenvectors: Tensor

    def excess(self, probes: Tensor | None = None) -> float:
        """Exact; or what the same random vectors would give without an error of quadrature."""
        terms = 0.5 * torch.log1p(self.eigenvalues.square() / 1e-3)
        if probes is None:
            return float(terms.sum())
        return float(((probes @ self.eigenvectors).square() * terms).sum(1).mean())


def smooth_images(examples: int) -> Batch:
    source = torch.Generator().manual_seed(1)
    coarse = torch.rand(examples, 1, 4, 4, generator=source, dtype=torch.float64)
    y = torch.randint(0, 8, (examples,), generator=source)
    return {"x": interpolate(coarse, size=(8, 8), mode="bicubic").clamp(0, 1), "y": y}


@lru_cache
def network(kind: str) -> Known:
    """A sigmoid network as DLG draws it, or a ReLU network that has learnt random labels for 200 steps."""
    batch = smooth_images(60 if kind == "relu" else 30)
    settings = {"relu": {"activation": "relu", "init": "torch"}, "sigmoid": {}}[kind]
    model = gl.models.lenet_zhu(
        shape=(1, 8, 8), width=5, strides=(2, 1), classes=8, generator=torch.Generator().manual_seed(0), **settings
    ).double()
    if kind == "relu":  # of high contrast: its largest eigenvalue comes to some thirty
        batch["x"] = (batch["x"] - 0.5) / 0.1
        rule = torch.optim.SGD(model.parameters(), lr=0.03)
        for _ in range(200):
            rule.zero_grad()
            cross_entropy(model(batch["x"]), batch["y"]).backward()
            rule.step()
    task = gl.Task.supervised(model, cross_entropy, like=(batch["x"], batch["y"]))
    operator = hessian(task, task.weights(), batch)
    matrix = dense(operator)
    return Known(operator, Operator.of(matrix), *torch.linalg.eigh(matrix))


GROUPS = {kind: pytest.mark.xdist_group(f"hessian of {kind}") for kind in ("sigmoid", "relu")}  # each is made once
KINDS = [pytest.param(kind, marks=group) for kind, group in GROUPS.items()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_within_the_one_that_is_reported(kind: str) -> None:
    known, steps = network(kind), {"sigmoid": 80, "relu": 160}[kind]
    assert known.operator.size == 1408
    found = log_determinant(known.matrix, probes=20, steps=steps, most_steps=steps)
    assert found.converged
    assert abs(found.excess - known.excess()) < 2 * found.error
    assert found.error < 0.05 * found.excess
    assert abs(found.count.value - int((known.eigenvalues.abs() > math.sqrt(1e-3)).sum())) < 0.1 * found.count.value


@pytest.mark.parametrize("kind", KINDS)
def test_from_24_steps_on_the_quadrature_error_covers_the_bias_on_these_networks(kind: str) -> None:
    """Over four seeds. It is an estimate and no bound: after fewer steps it may fall short."""
    known = network(kind)
    for seed in range(4):
        alone = known.excess(signs(known.matrix, 6, seed))
        for steps in (24, 40, 80):
            found = log_determinant(known.matrix, probes=6, steps=steps, most_steps=steps, seed=seed)
            assert abs(found.excess - alone) <= found.quadrature_error, (seed, steps)


@pytest.mark.parametrize("kind", KINDS)
def test_where_the_quadrature_error_is_the_larger_one_more_steps_are_asked_for(kind: str) -> None:
    known = network(kind)
    alone = known.excess(signs(known.matrix, 20, 0))
    few, many = (log_determinant(known.matrix, probes=20, steps=steps, most_steps=steps) for steps in (16, 160))
    assert abs(few.excess - alone) > few.probe_error  # of few steps it is what misleads
    assert not few.converged
    assert many.converged


@pytest.mark.parametrize("kind", KINDS)
def test_the_count_is_within_three_of_its_stated_errors_over_several_seeds(kind: str) -> None:
    """At 80 steps the standard error alone is far too small, and gaps with their signs cancel by chance."""
    known = network(kind)
    truth, alone = int((known.eigenvalues.abs() > math.sqrt(1e-3)).sum()), []
    for seed in range(5):
        for steps in (24, 80):
            found = log_determinant(known.matrix, probes=10, steps=steps, most_steps=steps, seed=seed).count
            assert abs(found.value - truth) < 3 * found.error, (seed, steps)
            assert found.error == pytest.approx(math.hypot(found.standard_error, found.quadrature_error))
            alone.append(abs(found.value - truth) / found.standard_error)
    if kind == "relu":
        assert max(alone) > 5, "the quadrature error is what it needs"
    assert found.to_json()["error"] == found.error
    assert found.error < 0.5 * truth, "an error that says something"


def test_a_spectrum_without_its_earlier_steps_states_no_error_of_quadrature() -> None:
    spectrum = log_determinant(Operator.of(symmetric(spread(50))), probes=3, steps=10, most_steps=10).spectrum
    assert [each.steps for each in spectrum.earlier] == [5, 7]
    with pytest.raises(ValueError, match="lacks the earlier steps"):
        spectrum.earlier[0].count()


@GROUPS["sigmoid"]
def test_the_standard_error_covers() -> None:
    """Twenty estimates of ten vectors each: a normal mean is within one standard error two times of three."""
    known = network("sigmoid")
    excesses = torch.tensor(log_determinant(known.matrix, probes=200, steps=60, most_steps=60).excesses)
    groups = [SampleMean.of(own) for own in excesses.split(10)]
    off = torch.tensor([abs(own.value - known.excess()) / own.standard_error for own in groups])
    assert 9 <= int((off < 1).sum()) <= 18
    assert int((off < 2.3).sum()) >= 16
    assert float(off.max()) < 6


@GROUPS["sigmoid"]
def test_the_log_determinant_of_products_is_that_of_the_matrix() -> None:
    known = network("sigmoid")
    both = [log_determinant(each, probes=4, steps=30, most_steps=30) for each in (known.operator, known.matrix)]
    assert both[0].values == pytest.approx(both[1].values, rel=1e-10)


# --- log-determinants of matrices -------------------------------------------------------------------------------------


def spread(size: int = 400) -> Tensor:
    """Eigenvalues as a network has them: most near zero, a few large, of both signs."""
    return torch.cat([normal(size - 20) * 0.02, torch.linspace(-8, 30, 20, dtype=torch.float64)])


def test_steps_are_doubled_until_the_quadrature_error_is_below_the_other_and_continue_the_runs() -> None:
    operator, rows = counted(symmetric(spread()))
    found = log_determinant(operator, probes=5, steps=10)
    assert found.steps in (20, 40, 80)
    assert found.converged
    assert sum(rows) == 5 * found.steps
    direct = log_determinant(operator, probes=5, steps=found.steps)
    assert direct.values == pytest.approx(found.values, rel=1e-10)
    # The half of the steps had not been enough.
    assert not log_determinant(operator, probes=5, steps=found.steps // 2, most_steps=found.steps // 2).converged


def test_too_few_steps_are_told() -> None:
    found = log_determinant(Operator.of(symmetric(spread())), probes=5, steps=5, most_steps=12)
    assert found.steps == 12
    assert not found.converged
    assert "NOT converged" in str(found)
    assert found.error >= found.quadrature_error > found.probe_error


def test_of_a_diagonal_matrix_every_random_vector_gives_the_exact_value() -> None:
    """(+-1)^T f(D) (+-1) = tr f(D): no error of the vectors, so that of the quadrature must vanish as well."""
    eigenvalues = torch.linspace(-3, 5, 60, dtype=torch.float64)
    found = log_determinant(Operator.of(torch.diag(eigenvalues)), damping=0.1, probes=3, steps=10)
    expected = 0.5 * (eigenvalues.square() + 0.1).log().sum()
    assert found.value == pytest.approx(float(expected), rel=1e-8)
    assert found.probe_error < 1e-6
    assert found.converged


def test_a_run_ends_in_an_invariant_subspace_and_is_exact() -> None:
    eigenvalues = torch.tensor([-2.0, 0.0, 5.0], dtype=torch.float64).repeat_interleave(20)
    matrix = symmetric(eigenvalues)
    operator, rows = counted(matrix)
    found = log_determinant(operator, probes=6, steps=50)
    vectors = signs(operator, 6, 0)
    values, basis = torch.linalg.eigh(matrix)
    alone = ((vectors @ basis).square() * 0.5 * torch.log1p(values.square() / 1e-3)).sum(1)
    assert found.steps == 3
    assert rows == [6, 6, 6]
    assert found.quadrature_error == 0
    assert found.excesses == pytest.approx(alone.tolist(), rel=1e-9)
    assert (found.spectrum.extremes().lowest, found.spectrum.extremes().highest) == pytest.approx((-2, 5))


def test_runs_that_end_wait_for_those_that_do_not() -> None:
    """One start is an eigenvector, the other is not: the first has ended at once, and both are right."""
    eigenvalues = torch.linspace(1, 4, 12, dtype=torch.float64)
    run = LanczosRun(
        Operator.of(torch.diag(eigenvalues)), torch.stack([torch.eye(12)[4].double(), torch.ones(12).double()])
    )
    run.advance(6)
    run.advance(12)
    spectrum = run.tridiagonal.spectrum()
    assert run.ended.tolist() == [True, True]
    assert float((spectrum.weights * spectrum.nodes.log()).sum(1)[0]) == pytest.approx(math.log(eigenvalues[4]))
    assert float((spectrum.weights * spectrum.nodes.log()).sum(1)[1]) == pytest.approx(float(eigenvalues.log().mean()))
    assert float(spectrum.nodes[0].min()) == pytest.approx(float(eigenvalues[4]))  # nothing from after its end


def test_vectors_stay_orthogonal_long_after_the_first_eigenvalues_have_converged() -> None:
    run = LanczosRun(Operator.of(symmetric(spread())), signs(Operator.of(torch.eye(400)), 2, 0))
    run.advance(60)
    run.advance(150)
    basis = torch.cat(run._blocks, 1)
    assert torch.allclose(basis @ basis.mT, torch.eye(150, dtype=torch.float64).expand(2, -1, -1), atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e-2, 1e3])
def test_the_floor_is_never_crossed(scale: float, steps: int) -> None:
    found = log_determinant(Operator.of(scale * symmetric(normal(40))), probes=2, steps=steps, most_steps=steps)
    assert min(found.values) >= found.floor
    assert found.excess >= 0
    assert (found.excess > 0) == (scale > 0)


def test_the_floor_of_lenet() -> None:
    nothing = Operator(15_826, torch.device("cpu"), torch.zeros_like)
    found = log_determinant(nothing)
    assert found.floor == pytest.approx(-54_661.07, abs=0.01)
    assert found.value == found.floor
    assert (found.steps, found.error, found.count.value) == (1, 0, 0)


def test_where_memory_is_short_runs_go_in_groups_to_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = symmetric(spread(200))
    operator, rows = counted(matrix)
    whole = log_determinant(operator, probes=5, steps=20)
    monkeypatch.setattr(lanczos, "memory_of", lambda engine: 2 * 2.5 * 8 * 200 * 208)
    assert len(Runs(operator, 5, 400, 0).groups) == 3
    rows.clear()
    assert log_determinant(operator, probes=5, steps=20).values == pytest.approx(whole.values, rel=1e-10)
    assert max(rows) == 2
    monkeypatch.setattr(lanczos, "memory_of", lambda engine: 1000.0)
    with pytest.raises(EngineError, match="Allow fewer steps"):
        log_determinant(operator)
    with pytest.raises(EngineError, match="which need products only"):
        dense(operator)


def test_random_vectors_depend_on_the_seed_and_their_number_alone() -> None:
    operator = Operator.of(torch.eye(1000))
    few, many, others = signs(operator, 2, 0), signs(operator, 5, 0), signs(operator, 2, 1)
    assert torch.equal(few, many[:2])
    assert bool((many.abs() == 1).all())
    assert float((many @ many.T / 1000 - torch.eye(5)).abs().max()) < 0.2
    assert float((few @ others.T / 1000).abs().max()) < 0.2


# --- extremes, traces, density ----------------------------------------------------------------------------------------


def test_extremes_are_algebraic_also_where_the_largest_in_magnitude_is_negative() -> None:
    eigenvalues = torch.cat([normal(200) * 0.1, torch.tensor([-9.0, 4.0], dtype=torch.float64)])
    matrix = symmetric(eigenvalues)
    found = extremes(Operator.of(matrix))
    assert found.accepted
    assert (found.lowest, found.highest) == pytest.approx((-9, 4), abs=1e-9)
    assert found.largest == found.lowest
    assert found.vectors is not None
    assert torch.allclose(matrix @ found.top, 4 * found.top, atol=1e-8)
    assert torch.allclose(matrix @ found.vectors[0], -9 * found.vectors[0], atol=1e-8)
    assert float(found.top.norm()) == pytest.approx(1)
    assert float(found.top[found.top.abs().argmax()]) > 0


def test_residuals_are_true_and_steps_are_doubled_until_they_are_small() -> None:
    operator = Operator.of(symmetric(torch.linspace(-1, 1, 500, dtype=torch.float64)))
    short, long = extremes(operator, steps=10, most_steps=10), extremes(operator, steps=10)
    assert not short.accepted
    assert long.accepted
    assert long.steps > 10
    for found in (short, long):
        assert found.vectors is not None
        for value, vector, told in zip((found.lowest, found.highest), found.vectors, found.residuals):
            assert float((operator(vector) - value * vector).norm()) == pytest.approx(told, abs=1e-12)
    assert max(long.residuals) < 1e-3 < min(short.residuals)


def test_an_end_at_zero_is_accepted() -> None:
    eigenvalues = torch.cat([torch.zeros(90, dtype=torch.float64), torch.linspace(1, 9, 10, dtype=torch.float64)])
    found = extremes(Operator.of(symmetric(eigenvalues)))
    assert found.accepted
    assert (found.lowest, found.highest) == pytest.approx((0, 9), abs=1e-9)


def test_traces_are_covered_by_their_standard_errors() -> None:
    matrix = symmetric(spread(100))
    operator = Operator.of(matrix)
    truth = float(matrix.trace()), float(matrix.square().sum())
    found = [traces(operator, 30, seed) for seed in range(20)]
    for which in (0, 1):
        off = [abs(each[which].value - truth[which]) / each[which].standard_error for each in found]
        assert 9 <= sum(gap < 1 for gap in off) <= 18
        assert max(off) < 4.5
    # Hutchinson's variance is known: twice the squares off the diagonal.
    deviation = math.sqrt(2 * (truth[1] - float(matrix.diagonal().square().sum())) / 2000)
    many = trace(operator, 2000)
    assert many.standard_error == pytest.approx(deviation, rel=0.1)
    assert abs(many.value - truth[0]) < 3 * deviation


def test_the_density_integrates_to_one_and_lies_where_the_eigenvalues_are() -> None:
    eigenvalues = torch.cat([torch.full((150,), -1.0), torch.full((50,), 2.0)]).double()
    found = density(Operator.of(symmetric(eigenvalues)), points=2001, width=0.05, probes=40)
    step = float(found.grid[1] - found.grid[0])
    assert float(found.values.sum()) * step == pytest.approx(1, abs=1e-6)
    assert float(found.values[found.grid < 0.5].sum()) * step == pytest.approx(0.75, abs=0.05)
    assert float(found.grid[found.values.argmax()]) == pytest.approx(-1, abs=0.01)


# --- one checkpoint ---------------------------------------------------------------------------------------------------


def test_the_record_of_a_checkpoint_holds_what_the_spectrum_says() -> None:
    task, batch = tiny(), private(6)
    weights = task.weights()
    found = curvature(task, weights, batch, steps=20)
    whole = exact(hessian(task, weights, batch))
    assert (found.size, found.examples) == (91, 6)
    assert found.loss == pytest.approx(float(task.loss(weights, batch)[0]))
    assert found.gradient_norm == pytest.approx(float(tree.norm(task.gradient(weights, batch))))
    assert abs(found.log_determinant.value - whole.log_determinant()) < 3 * found.log_determinant.error
    assert found.log_determinant.error < 0.5 * whole.excess()
    assert found.excess == pytest.approx(found.log_determinant.value - 91 / 2 * math.log(1e-3))
    assert abs(found.count.value - whole.count()) < 3 * found.count.error + 1
    assert (found.extremes.lowest, found.extremes.highest) == pytest.approx(
        (float(whole.eigenvalues[0]), float(whole.eigenvalues[-1])), rel=1e-3
    )
    assert found.extremes.accepted
    assert abs(found.trace.value - float(whole.eigenvalues.sum())) < 4 * found.trace.standard_error
    assert found.frobenius == pytest.approx(float(whole.eigenvalues.norm()), rel=0.3)
    assert found.products == 10 * found.log_determinant.steps + 30
    told = json.loads(json.dumps(found.to_json(points=16), allow_nan=False))
    assert told["log_determinant"]["value"] == found.log_determinant.value
    assert told["log_determinant"]["floor"] == pytest.approx(91 / 2 * math.log(1e-3))
    assert len(told["density"]["grid"]) == 16
    assert "density" not in found.to_json(points=0)


def test_of_a_quadratic_everything_is_known() -> None:
    """Loss 1/2 w^T A w, whatever the example: the record must say A."""

    class Quadratic(nn.Module):
        def __init__(self, matrix: Tensor) -> None:
            super().__init__()
            self.register_buffer("matrix", matrix)
            self.weight = nn.Parameter(torch.ones(len(matrix), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * self.weight @ self.matrix @ self.weight + 0 * x.sum((1, 2, 3))

    matrix = torch.diag(torch.tensor([-4.0, -1.0, 0.0, 0.0, 0.5, 2.0], dtype=torch.float64))
    task = gl.Task(Quadratic(matrix), lambda call, batch: call(batch["x"]).mean(), {"x": Field(SHAPE)})
    found = curvature(task, task.weights(), {"x": torch.zeros(3, *SHAPE, dtype=torch.float64)})
    expected = float(0.5 * (matrix.diagonal().square() + 1e-3).log().sum())
    assert found.log_determinant.value == pytest.approx(expected, rel=1e-9)
    assert found.log_determinant.quadrature_error == 0
    assert (found.extremes.lowest, found.extremes.highest) == pytest.approx((-4, 2))
    assert found.trace.value == pytest.approx(-2.5)
    assert found.square.value == pytest.approx(21.25)
    assert found.count.value == pytest.approx(4)
    assert found.loss == pytest.approx(-1.25)
    assert found.gradient_norm == pytest.approx(math.sqrt(21.25))


# --- errors -----------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_told_with_what_to_do() -> None:
    task, batch = tiny(), private(4)
    weights = task.weights()
    fewer = dict(list(weights.items())[1:])
    with pytest.raises(TaskError, match=r"not of this model: they differ at 0.weight.*task.weights\(\)"):
        hessian(task, fewer, batch)
    with pytest.raises(TaskError, match="The batch lacks y; it has x"):
        hessian(task, weights, {"x": batch["x"]})
    with pytest.raises(TaskError, match="same number of examples.*'y': 2"):
        hessian(task, weights, {"x": batch["x"], "y": batch["y"][:2]})
    with pytest.raises(TaskError, match="loss at these weights is nan"):
        hessian(task, tree.scale(weights, math.nan), batch)
    with pytest.raises(ValueError, match="chunk must be at least 1; given 0"):
        hessian(task, weights, batch, chunk=0)


def test_an_objective_that_is_no_mean_is_taken_whole_or_not_at_all() -> None:
    task, batch = tiny(), private(4)
    summed = replace(task, objective=lambda call, b: cross_entropy(call(b["x"]), b["y"], reduction="sum"))
    with pytest.raises(TaskError, match="no mean over examples.*pass chunk=4"):
        hessian(summed, task.weights(), batch)
    v = normal(tree.size(task.weights()))
    whole = hessian(summed, task.weights(), batch, chunk=4)(v)
    assert torch.allclose(whole, 4 * hessian(task, task.weights(), batch)(v))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda a: log_determinant(a, damping=0.0), "damping must be above 0.*given 0.0"),
        (lambda a: log_determinant(a, probes=1), "at least 2 random vectors; given probes=1"),
        (lambda a: log_determinant(a, steps=500), r"from 1 to most_steps \(400\); given 500"),
        (lambda a: extremes(a, steps=0), "given 0"),
        (lambda a: trace(a, probes=1), "at least 2 random vectors"),
        (lambda a: density(a, width=-1.0), "positive width; given 256 and -1.0"),
        (lambda a: a(torch.zeros(2, 9)), r"Vectors must be \(k, 8\) or \(8,\); given \(2, 9\)"),
        (lambda a: a(torch.zeros(2, 8)), "must be float64.*given torch.float32"),
        (lambda a: dense(a, block=0), "at least 1 column; given 0"),
        (lambda a: Operator.of(torch.zeros(2, 3)), r"square; given shape \(2, 3\)"),
        (lambda a: log_determinant(a).spectrum.extremes().top, "have no vectors: call extremes"),
    ],
)
def test_settings_that_mean_nothing_are_refused(call: Callable[[Operator], Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call(Operator.of(symmetric(normal(8))))


def test_operators_that_are_no_symmetric_matrices_are_found_out() -> None:
    with pytest.raises(EngineError, match="not symmetric.*deterministic"):
        dense(Operator.of(normal(8, 8)))
    with pytest.raises(EngineError, match="not finite: the weights have diverged"):
        log_determinant(Operator.of(torch.full((8, 8), math.inf)))
    with pytest.raises(EngineError, match="not finite"):
        dense(Operator.of(torch.full((8, 8), math.nan)))


class Square(torch.autograd.Function):
    """x^2, with a rule for forward mode and none for vmap."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Any:
        return 2 * tangent * ctx.saved_tensors[0]


class Old(torch.autograd.Function):
    """x^2 in the form that torch.func refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 2 * grad * ctx.saved_tensors[0]


class Squared(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(16, 3, dtype=torch.float64), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(self.layer(x.flatten(1)))


def test_a_model_that_vmap_rejects_takes_one_vector_after_the_other() -> None:
    task, batch, v = gl.Task.supervised(Squared(Square), cross_entropy, like=LIKE, classes=3), private(3), normal(2, 51)
    with pytest.raises(EngineError, match=r"cannot run under vmap.*Engine\(batched=False\)"):
        hessian(task, task.weights(), batch)(v)
    alone = hessian(task, task.weights(), batch, engine=gl.Engine(device="cpu", batched=False))(v)
    assert torch.allclose(alone, v @ double_backward(task, batch), atol=1e-13)


def test_a_model_that_cannot_be_differentiated_twice_is_told_so_at_once() -> None:
    task = gl.Task.supervised(Squared(Old), cross_entropy, like=LIKE, classes=3)
    with pytest.raises(EngineError, match="cannot differentiate this model twice.*setup_context.*task.check"):
        hessian(task, task.weights(), private(3))


# --- LeNet ------------------------------------------------------------------------------------------------------------


def lenet(init: str) -> tuple[gl.Task, Batch]:
    model = gl.models.lenet_zhu(init=init, generator=torch.Generator().manual_seed(0))
    source = torch.Generator().manual_seed(1)
    coarse = torch.rand(100, 3, 8, 8, generator=source)
    x = interpolate(coarse, size=(32, 32), mode="bicubic").clamp(0, 1)
    batch = {"x": x, "y": torch.randint(0, 10, (100,), generator=source)}
    return gl.Task.supervised(model, cross_entropy, like=(x, batch["y"])), batch


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("init", "range_of_excess"), [("torch", (200, 1500)), ("uniform05", (1000, 5000))])
def test_lenet_converges_to_the_expected_order(init: str, range_of_excess: tuple[float, float]) -> None:
    task, batch = lenet(init)
    found = curvature(task, task.weights(), batch)
    assert found.size == 15_826
    assert found.log_determinant.converged
    assert found.log_determinant.value > -54_661
    assert range_of_excess[0] < found.excess < range_of_excess[1]


@pytest.mark.gpu
def test_a_gpu_gives_the_same_numbers_and_takes_less_than_a_minute() -> None:
    task, batch = lenet("uniform05")
    weights = task.weights()
    v = normal(3, 15_826)
    on_cpu = hessian(task, weights, batch)(v)
    on_gpu = hessian(task, weights, batch, engine=gl.Engine(device="cuda"))(v)
    assert torch.allclose(on_gpu.cpu(), on_cpu, rtol=1e-9, atol=1e-10)
    found = curvature(task, weights, batch, engine=gl.Engine(device="cuda"), probes=10, steps=200)
    assert found.seconds < 60 * found.log_determinant.steps / 200
    assert found.log_determinant.converged
