"""The client rule at one point: its residual, its derivative by every pixel, and the error floor under noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.func import jvp, vmap

from gradleak.core import tree
from gradleak.core.linear import jacobian
from gradleak.core.tree import Params
from gradleak.engine import Engine, EngineError, memory_of
from gradleak.identify.rounding import Rounding
from gradleak.parts.predictions import Replay
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.client import Order
from gradleak.scenario.derivatives import double_backward_safe
from gradleak.scenario.fit import fits
from gradleak.scenario.observation import Knowledge, Observation
from gradleak.scenario.task import Batch, Field, Task, TaskError, float32_products

SHARE = 0.5  # of the memory that a Jacobian may take
PIXEL_STD = 0.25  # of a pixel in [0, 1] under the prior, where nothing else is given


@dataclass(frozen=True, eq=False, kw_only=True)
class Linearisation:
    """How the client rule is linearised, and the Gaussian prior of the pixels.

    prior    standard deviation of a pixel in [0, 1]
    block    forward-mode products at a time
    """

    prior: float = PIXEL_STD
    block: int = 64
    engine: Engine | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class CorrelatedPrior(Linearisation):
    """With `precision`, the prior's inverse covariance over the (n,) flattened images in [0, 1]; None: I / prior^2."""

    precision: Tensor | None = None


@dataclass(frozen=True)
class Floor:
    """The error that no attacker can beat, to first order, under noise on the update and a Gaussian prior of pixels.

    mse              the mean of the diagonal of (J_f^T S^-1 J_f + P)^-1, over pixels in [0, 1]; the Bayesian Cramer-Rao
                     bound. Unknowns that are no pixels, such as noise, have the prior N(0, 1)
    information      1/2 log det(I + P^-1 J_f^T S^-1 J_f) in nats; infinite under a prior that is not proper
    effective_rank   tr(I_F (I_F + P)^-1): directions in which the update says more than the prior
    noise            standard deviation as a share of each tensor's root mean square, besides the defence's noise
    """

    mse: float
    information: float
    effective_rank: float
    noise: float

    @property
    def psnr(self) -> float:
        return -10 * math.log10(self.mse) if 0 < self.mse < math.inf else math.inf if self.mse == 0 else -math.inf

    def __float__(self) -> float:
        return self.mse


@dataclass(frozen=True, eq=False)
class Local:
    """The client rule at one point: unknown fields in [0, 1], r (d,), and J as (n, d), row i along the i-th unknown.

    A field without bounds, such as a diffusion client's noise, is no picture and is not rescaled.
    """

    scene: TargetView
    pixels: Params
    residual: Tensor
    rows: Tensor
    lengths: Tensor  # (d,): 1 / W
    pictured: Tensor  # (n,): is this unknown a pixel?

    @staticmethod
    def at(
        task: Task,
        seen: Observation,
        batch: Batch,
        knows: Knowledge,
        how: Linearisation,
        order: Order | None = None,
        directions: Tensor | None = None,
    ) -> Local:
        """`directions` (k, n): rows of J along these only, where all n would be too many."""
        engine, block = how.engine or Engine(), how.block
        fits(task, [seen])
        unknown = _unknown(task, seen, batch, knows)
        work = task.to(engine.where, torch.float64)
        scene = TargetView.of(work, seen, knows)
        like = scene.like
        fields = tree.to({name: batch[name] for name in task.fields}, like.device, like.dtype)
        scene = replace(scene, fields={name: value for name, value in fields.items() if name not in unknown})
        pixels = {name: field.unit(fields[name]) if field.bounded else fields[name] for name, field in unknown.items()}
        pictured = {name: torch.full_like(pixels[name], field.bounded) for name, field in unknown.items()}
        count = tree.size(pixels) if directions is None else len(directions)
        _demand_memory(count, tree.size(scene.update), engine)
        predict, now = Replay(order=order), Step(torch.zeros((), device=like.device), 1)
        observed = predict.target(scene)
        lengths = tree.flatten(_spread(_norms(observed), observed))

        def residual(p: Tensor) -> Tensor:
            guess = tree.unflatten(p, pixels)
            guess |= {name: field.model(guess[name]) for name, field in unknown.items() if field.bounded}
            predicted = predict({**fields, **guess}, {}, scene, now)
            return tree.flatten({name: predicted[name] - observed[name] for name in observed}) / lengths

        p = tree.flatten(pixels)
        try:
            with float32_products(), double_backward_safe(), torch.no_grad():
                rows = jacobian(residual, p, block) if directions is None else along(residual, p, directions, block)
                return Local(scene, pixels, residual(p), rows, lengths, tree.flatten(pictured).bool())
        except RuntimeError as problem:
            raise _explained(problem, block) from problem

    @property
    def finite(self) -> bool:
        return bool(self.residual.isfinite().all()) and bool(self.rows.isfinite().all())

    def floor(self, noise: float, precision: Tensor | None, prior: float, rounding: Rounding) -> Floor:
        n = self.rows.shape[0]
        root, log_det = _root(precision, prior, self.pictured, self.rows)
        factor = triangle(self.rows, self.whitening(noise, rounding))
        joint = torch.linalg.qr(torch.cat([factor, root]), mode="r").R  # joint^T joint = I_F + P
        diagonal = joint.diagonal().abs()
        if float(diagonal.min()) <= 10 * torch.finfo(joint.dtype).eps * float(diagonal.max()):
            return Floor(math.inf, math.inf, float(torch.linalg.matrix_rank(factor)), noise)
        inverse = torch.linalg.solve_triangular(joint, torch.eye(n, dtype=joint.dtype, device=joint.device), upper=True)
        return Floor(
            mse=float(inverse.square().sum(1)[self.pictured].mean()),
            information=float(diagonal.log().sum()) - log_det,
            effective_rank=n - float((root @ inverse).square().sum()),
            noise=noise,
        )

    def whitening(self, noise: float, rounding: Rounding) -> Tensor:
        """(d,): factors on the columns of J that give the noise on the update variance one."""
        scene = self.scene
        spread = _spread(_levels(scene.update), scene.update)
        variance = tree.map(lambda level: (max(noise, rounding.rank) * level).square(), spread)
        weight = tree.map(torch.ones_like, spread)
        if scene.knows.defence is not None:
            # Replay has weighted the coordinates by `visible`: divide that out again.
            assumed = scene.knows.defence.assumed(scene, scene.task)
            variance = tree.add(variance, assumed.noise_variance(scene))
            weight = assumed.visible(weight, scene)
        weights, deviation = tree.flatten(weight), tree.flatten(variance).sqrt()
        return torch.where(weights > 0, self.lengths / (weights * deviation), 0.0)


def along(function: Callable[[Tensor], Tensor], p: Tensor, directions: Tensor, block: int) -> Tensor:
    """(k, outputs): the derivative along each of k directions."""
    directions = directions.to(p)
    return torch.cat([vmap(lambda v: jvp(function, (p,), (v,))[1])(some) for some in directions.split(block)])


def _unknown(task: Task, observation: Observation, batch: Batch, knows: Knowledge) -> dict[str, Field]:
    """The continuous fields that are not given. The batch must fit the task and the target."""
    for name, field in task.fields.items():
        value = batch.get(name)
        shape = None if value is None else tuple(value.shape[: 1 + len(field.shape)])
        if shape != (observation.num_examples, *field.shape):
            raise TaskError(
                f"Field {name!r} of the batch has shape {shape}; observation {observation.key!r} has "
                f"{observation.num_examples} examples of {field.shape}. Pass one target, such as "
                "Reconstruction.target(index)."
            )
    unknown = {name: f for name, f in task.fields.items() if f.classes is None and name not in knows.given}
    if not unknown:
        raise TaskError("Every continuous field is given in Knowledge: there is nothing left to determine.")
    return unknown


def _norms(values: Params) -> Params:
    """The norm of every tensor; a tensor of zeros gets the norm of all, or one if all are zero."""
    whole = tree.norm(values)
    whole = torch.where(whole > 0, whole, 1.0)
    return tree.map(lambda value: torch.where(value.any(), torch.linalg.vector_norm(value), whole), values)


def _levels(values: Params) -> Params:
    """The root mean square of every tensor, with the same rule for zeros."""
    whole = tree.norm(values) / math.sqrt(tree.size(values))
    whole = torch.where(whole > 0, whole, 1.0)
    return tree.map(lambda value: torch.where(value.any(), value.square().mean().sqrt(), whole), values)


def _spread(numbers: Params, like: Params) -> Params:
    """One number per tensor as one per entry."""
    return tree.map(lambda number, value: number.expand(value.shape), numbers, like)


def triangle(rows: Tensor, scale: Tensor | None = None) -> Tensor:
    """R of J = Q R from the (n, d) transpose of J, its columns scaled; piece by piece, so that J is never copied."""
    n = rows.shape[0]
    factor = rows.new_zeros(0, n)
    for start in range(0, rows.shape[1], 4 * n):
        piece = rows[:, start : start + 4 * n]
        piece = (piece if scale is None else piece * scale[start : start + 4 * n]).T
        factor = torch.linalg.qr(torch.cat([factor, piece]), mode="r").R
    return factor


def _root(precision: Tensor | None, prior: float, pictured: Tensor, like: Tensor) -> tuple[Tensor, float]:
    """A root of the prior's precision, and half the logarithm of its determinant."""
    n = len(pictured)
    if precision is None:
        if not prior > 0:
            raise ValueError(f"prior is the standard deviation of a pixel in [0, 1], above 0; given {prior}.")
        deviations = torch.where(pictured, prior, 1.0).to(like)
        return torch.diag(1 / deviations), -float(deviations.log().sum())
    if tuple(precision.shape) != (n, n):
        raise ValueError(f"precision must be ({n}, {n}), for {n} unknowns; given {tuple(precision.shape)}.")
    weights, vectors = torch.linalg.eigh(precision.to(like))
    least = n * torch.finfo(like.dtype).eps * float(weights.abs().max())
    if float(weights.min()) < -least:
        raise ValueError(f"precision must have no negative eigenvalue; the least is {float(weights.min()):.1e}.")
    weights = torch.where(weights > least, weights, 0.0)  # a prior of differences says nothing about the mean
    return weights.sqrt()[:, None] * vectors.T, 0.5 * float(weights.log().sum())


def _demand_memory(unknowns: int, equations: int, engine: Engine) -> None:
    needed, limit = 8.0 * unknowns * equations, SHARE * memory_of(engine)
    if needed > limit:
        raise EngineError(
            f"The Jacobian of {unknowns:,} unknowns and {equations:,} equations needs {needed / 2**30:.1f} GB; "
            f"{limit / 2**30:.1f} GB may be used on {engine.where}. Certify fewer examples or smaller images, or a "
            "smaller model; Engine(device='cpu') where the system has more memory than the GPU."
        )


def _explained(problem: RuntimeError, block: int) -> RuntimeError:
    reason = str(problem).partition("\n")[0]
    if isinstance(problem, torch.OutOfMemoryError):
        return EngineError(f"Out of memory with blocks of {block}: pass a smaller block. ({reason})")
    if any(word in reason for word in ("forward AD", "forward-mode", "vmap", "Batching rule", "functorch", "dual")):
        return EngineError(
            f"This model, or the client's rule, cannot be differentiated forward: {reason} Run task.check() for the "
            "cause; without forward mode there is no certificate."
        )
    return problem
