"""Does the update determine the data? A certificate from the singular values of one Jacobian.

    r(p) = W (f(p) - u),   f = what the client would upload for the images p in [0, 1] (its rule, defence included),
                           u = the update seen,   W = 1 / ||u_l|| per tensor,   J = dr/dp

Where r is zero up to rounding and J has full column rank, no other images nearby give this update: the leak is proved.
Where k singular values are zero the images lie on a k-dimensional set, and everything orthogonal to it is known.
`certify` asks at a reconstruction, which needs no truth, or, for an auditor, at the truth: could any attack succeed?

What counts as zero depends on the digits that the observation holds (`rounding_of`). Two limits of the statement: it is
local (an isolated second solution elsewhere is not excluded), and it is about the fields that are continuous and not
given (labels are taken as known).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradleak import tree
from gradleak.attack import fits
from gradleak.defence import overrides
from gradleak.engine import Engine, EngineError
from gradleak.jacobian import jacobian
from gradleak.observation import Knowledge, Observation
from gradleak.parts.predictions import Replay
from gradleak.scene import Now, Scene
from gradleak.task import Batch, Field, Task, TaskError, double_backward_safe, float32_products
from gradleak.tree import Params

PIXEL_STD = 0.25  # of a pixel in [0, 1] under the prior of the noise floor, where no precision is given
HALF = 0.5  # of the directions: below, "determined up to k dimensions" would sound like more than it is


# --- digits ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rounding:
    """The digits of an observation, relative to each tensor's norm.

    wire       one rounding on the way to the server
    residual   up to here a residual is rounding: wire + 50 roundings of the client's arithmetic, at least 1e-9
    rank       singular values below this share of the largest are zero: wire + 10 roundings, at least 1e-10

    A float32 client of one step differs from the same step in float64 by 3 to 10 roundings (LeNet, ConvNet, ResNet-20);
    one that rounds its weights between several steps may differ by more, and then nothing is certified.
    """

    wire: float
    residual: float
    rank: float


def rounding_of(seen: Observation) -> Rounding:
    """Read off the update itself: the coarsest type that holds it, and whether it is a difference of rounded weights.

    w - (w - u) = u in every entry is what weights on the wire leave behind: then the error is a rounding of the
    weights, not of the update. An update that travelled as such passes this test in few entries only.
    """
    update, weights = seen.update, {name: seen.weights[name] for name in seen.update}
    eps = _coarsest(update)
    wire = eps
    returned = tree.map(lambda w, u: w - u.to(w.dtype), weights, update)
    if all(torch.equal(w - r, u.to(w.dtype)) for w, r, u in zip(*map(tree.leaves, (weights, returned, update)))):
        lengths = [(float(r.double().norm()), float(u.double().norm())) for r, u in _pairs(returned, update)]
        ratios = [(r / u) ** 2 for r, u in lengths if u > 0]
        wire = max(eps, _coarsest(returned) * math.sqrt(sum(ratios) / len(ratios))) if ratios else eps
    # A client that sends half precision has computed in float32 at best, not in half.
    computed = min(eps, torch.finfo(torch.float32).eps)
    return Rounding(wire, max(1e-9, wire + 50 * computed), max(1e-10, wire + 10 * computed))


def _pairs(a: Params, b: Params) -> zip[tuple[Tensor, Tensor]]:
    return zip(tree.leaves(a), tree.leaves(b))


def _coarsest(values: Params) -> float:
    """The rounding of the coarsest type that holds every entry exactly: what a cast has widened is no wiser for it."""
    own = max((torch.finfo(value.dtype).eps for value in tree.leaves(values)), default=1.0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        if all(torch.equal(value.to(dtype).to(value.dtype), value) for value in tree.leaves(values)):
            return max(own, torch.finfo(dtype).eps) if any(bool(v.any()) for v in tree.leaves(values)) else own
    return own


# --- what is found out -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Floor:
    """What no attacker can do better than, to first order, under noise on the update and a Gaussian prior of pixels.

    mse              tr((J_f^T S^-1 J_f + P)^-1) / n, of pixels in [0, 1]; the Bayesian Cramer-Rao bound
    information      1/2 log det(I + P^-1 J_f^T S^-1 J_f) in nats; infinite under a prior that is not proper
    effective_rank   tr(I_F (I_F + P)^-1): directions in which the update says more than the prior
    noise            standard deviation as a share of each tensor's root mean square, beside the defence's own
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
class Certificate:
    """What the update determines near one point.

    unknowns, equations   n values of the batch in [0, 1] against d entries of the update
    rank                  singular values above `tolerance` times the largest
    singular_values       (n,) float64, descending; relative change of the update per unit of pixels
    residual              sqrt(mean over tensors of ||f_l - u_l||^2 / ||u_l||^2); `rounding` is what it may be
    share                 of the images' variance about each image's own mean, in determined directions
    shift                 root mean square of the Gauss-Newton step from here, in pixels: how far off the solution is
    """

    unknowns: int
    equations: int
    rank: int
    tolerance: float
    singular_values: Tensor
    residual: float
    rounding: float
    share: float
    shift: float
    floor: Floor | None = None

    @property
    def null(self) -> int:
        """Dimensions along which the update does not change."""
        return self.unknowns - self.rank

    @property
    def solved(self) -> bool:
        """Does the point reproduce the update, up to rounding?"""
        return self.residual <= self.rounding

    @property
    def largest(self) -> float:
        return float(self.singular_values[0])

    @property
    def smallest(self) -> float:
        return float(self.singular_values[-1])

    @property
    def verdict(self) -> str:
        if not self.solved or self.rank < HALF * self.unknowns:
            return "not determined"
        return f"determined up to {self.null} dimensions" if self.null else "determined"

    @property
    def reason(self) -> str:
        if not math.isfinite(self.residual):
            return "The point, or what the client would upload for it, is not finite, so nothing is certified."
        if not self.solved:
            return (
                f"The point is no solution: the update is reproduced to {self.residual:.1e} only, where rounding "
                f"explains {self.rounding:.0e}, so nothing is certified. The search has not arrived, the update is "
                "noisy, or Knowledge is not the client's recipe."
            )
        if not self.null:
            return (
                f"The update fixes all {self.unknowns:,} values: it is reproduced to {self.residual:.1e}, and no other "
                f"images nearby give it (smallest singular value {self.smallest:.1e}, largest {self.largest:.1e})."
            )
        fixed = (
            f"{self.rank:,} of {self.unknowns:,} directions are fixed; along the other {self.null:,} the images can "
            f"change and the update stays the same. {self.share:.0%} of the images' variance is fixed."
        )
        return fixed if self.rank >= HALF * self.unknowns else f"Fewer than half are fixed: {fixed}"

    def __str__(self) -> str:
        told = (
            f"{self.verdict}. {self.reason} Rank {self.rank:,} of {self.unknowns:,} unknowns in {self.equations:,} "
            f"equations, at a tolerance of {self.tolerance:.0e} of the largest singular value."
        )
        if self.floor is None:
            return told
        return (
            f"{told} Under noise of {self.floor.noise:.0e} of each tensor's root mean square no attacker gets below a "
            f"mean squared error of {self.floor.mse:.1e}, to first order."
        )

    def record(self) -> dict[str, int | float | str | None]:
        """As a row of a run holds it."""
        names = ("unknowns", "equations", "rank", "null", "tolerance", "residual", "rounding", "share", "shift")
        held = {name: getattr(self, name) for name in (*names, "largest", "smallest", "verdict", "reason")}
        return {**held, "floor": None if self.floor is None else self.floor.mse}


def certify(
    task: Task,
    seen: Observation,
    batch: Batch,
    knows: Knowledge = Knowledge(),
    *,
    tolerance: float | None = None,
    noise: float | None = None,
    precision: Tensor | None = None,
    prior: float = PIXEL_STD,
    block: int = 64,
    engine: Engine | None = None,
) -> Certificate:
    """What `seen` determines at `batch`: a reconstruction of that target, or the truth.

    `tolerance`: relative rank tolerance; None takes what the digits of the observation allow. `noise`: also compute the
    floor of `noise_floor`. `block`: forward-mode products at a time.
    """
    if tolerance is not None and not 0 <= tolerance < 1:
        raise ValueError(f"tolerance is a share of the largest singular value, from 0 to below 1; given {tolerance}.")
    rounding = rounding_of(seen)
    tolerance = rounding.rank if tolerance is None else tolerance
    local = _Local.at(task, seen, batch, knows, block, engine)
    unknowns, equations = local.rows.shape
    if not local.finite:
        nothing = torch.zeros(unknowns, dtype=torch.float64)
        return Certificate(
            unknowns, equations, 0, tolerance, nothing, math.inf, rounding.residual, share=0.0, shift=math.inf
        )
    # Singular values of J from those of its triangular factor: J^T J would square the condition number.
    _, values, directions = torch.linalg.svd(_triangle(local.rows), full_matrices=False)
    values = torch.cat([values, values.new_zeros(unknowns - len(values))])
    rank = int((values > tolerance * values[0]).sum())
    fixed = directions[:rank]  # (rank, n)
    step = (fixed @ (local.rows @ local.residual)) / values[:rank].square()
    return Certificate(
        unknowns,
        equations,
        rank,
        tolerance,
        singular_values=values.cpu(),
        residual=float(local.residual.norm()) / math.sqrt(len(local.scene.update)),
        rounding=rounding.residual,
        share=_share(local.pixels, fixed),
        shift=float(step.norm()) / math.sqrt(unknowns),
        floor=None if noise is None else local.floor(noise, precision, prior, rounding),
    )


def noise_floor(
    task: Task,
    seen: Observation,
    batch: Batch,
    knows: Knowledge = Knowledge(),
    *,
    noise: float = 0.0,
    precision: Tensor | None = None,
    prior: float = PIXEL_STD,
    block: int = 64,
    engine: Engine | None = None,
) -> Floor:
    """The least mean squared error under noise of std `noise` x RMS of each tensor, and what the defence itself adds.

    `precision`: the prior's inverse covariance over the (n,) flattened images in [0, 1]; None: I / prior^2. Entries
    without any noise are known up to `Rounding.rank`. A tensor of zeros takes the RMS of the whole update.
    """
    if not noise >= 0:
        raise ValueError(f"noise is a share of each tensor's root mean square, at least 0; given {noise}.")
    local = _Local.at(task, seen, batch, knows, block, engine)
    if not local.finite:
        raise ValueError("The batch, or the update the client would send for it, is not finite: there is no floor.")
    return local.floor(noise, precision, prior, rounding_of(seen))


@dataclass(frozen=True, eq=False)
class Identifiability:
    """For `Audit(analyses=[...])`: the certificate at the TRUTH. Could any attack that knows `knows` succeed?

    `knows` holds the client's recipe and, where there is one, its defence. With `noise` also the floor of the error.
    """

    knows: Knowledge = Knowledge()
    tolerance: float | None = None
    noise: float | None = None
    block: int = 64
    engine: Engine = Engine()

    def __call__(self, task: Task, seen: Observation, batch: Batch) -> Mapping[str, float]:
        found = certify(
            task,
            seen,
            batch,
            self.knows,
            tolerance=self.tolerance,
            noise=self.noise,
            block=self.block,
            engine=self.engine,
        )
        names = ("unknowns", "rank", "null", "share", "residual", "tolerance", "largest", "smallest")
        told = {name: float(getattr(found, name)) for name in names}
        return told if found.floor is None else {**told, "floor": found.floor.mse}

    def __repr__(self) -> str:
        # A run file names it: the same text in every process, so without the addresses of functions.
        known = re.sub(r" at 0x[0-9a-f]+", "", repr(self.knows))
        return f"Identifiability({known}, tolerance={self.tolerance}, noise={self.noise})"


# --- one point -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Local:
    """The client rule at one point: unknown fields in [0, 1], r (d,), and J as (n, d), row i along the i-th unknown."""

    scene: Scene
    pixels: Params
    residual: Tensor
    rows: Tensor
    lengths: Tensor  # (d,): 1 / W

    @staticmethod
    def at(task: Task, seen: Observation, batch: Batch, knows: Knowledge, block: int, engine: Engine | None) -> _Local:
        engine = engine or Engine()
        fits(task, [seen])
        unknown = _unknown(task, seen, batch, knows)
        work = task.to(engine.where, torch.float64)
        scene = Scene.of(work, seen, knows)
        like = next(tree.leaves(scene.weights))
        given = tree.to({name: batch[name] for name in task.fields}, like.device, like.dtype)
        scene = replace(scene, fields={name: value for name, value in given.items() if name not in unknown})
        pixels = {name: field.unit(given[name]) for name, field in unknown.items()}
        _demand_memory(tree.size(pixels), tree.size(scene.update), like.device)
        predict, now = Replay(), Now(torch.zeros((), device=like.device), 1)
        observed = predict.target(scene)
        lengths = tree.flatten(_spread(_norms(observed), observed))

        def residual(p: Tensor) -> Tensor:
            held = tree.unflatten(p, pixels)
            guess = {**given, **{name: field.model(held[name]) for name, field in unknown.items()}}
            predicted = predict(guess, {}, scene, now)
            return tree.flatten({name: predicted[name] - observed[name] for name in observed}) / lengths

        p = tree.flatten(pixels)
        try:
            with float32_products(), double_backward_safe(), torch.no_grad():
                return _Local(scene, pixels, residual(p), jacobian(residual, p, block), lengths)
        except RuntimeError as problem:
            raise _explained(problem, block) from problem

    @property
    def finite(self) -> bool:
        return bool(self.residual.isfinite().all()) and bool(self.rows.isfinite().all())

    def floor(self, noise: float, precision: Tensor | None, prior: float, rounding: Rounding) -> Floor:
        n = self.rows.shape[0]
        root, log_det = _root(n, precision, prior, self.rows)
        triangle = _triangle(self.rows, self._whitening(noise, rounding))
        joint = torch.linalg.qr(torch.cat([triangle, root]), mode="r").R  # joint^T joint = I_F + P
        diagonal = joint.diagonal().abs()
        if float(diagonal.min()) <= 10 * torch.finfo(joint.dtype).eps * float(diagonal.max()):
            return Floor(math.inf, math.inf, float(torch.linalg.matrix_rank(triangle)), noise)
        inverse = torch.linalg.solve_triangular(joint, torch.eye(n, dtype=joint.dtype, device=joint.device), upper=True)
        return Floor(
            mse=float(inverse.square().sum()) / n,
            information=float(diagonal.log().sum()) - log_det,
            effective_rank=n - float((root @ inverse).square().sum()),
            noise=noise,
        )

    def _whitening(self, noise: float, rounding: Rounding) -> Tensor:
        """(d,): what the columns of J are multiplied by so that the noise on the update has variance one."""
        scene = self.scene
        spread = _spread(_levels(scene.update), scene.update)
        variance = tree.map(lambda level: (max(noise, rounding.rank) * level).square(), spread)
        weight = tree.map(torch.ones_like, spread)
        known = scene.knows.defence
        if known is not None and overrides(known, "noise_variance"):
            # Replay has weighed the coordinates by s / sqrt(s^2 + variance): that is taken off again.
            added, signal = known.noise_variance(scene), tree.squared_norm(scene.update) / tree.size(scene.update)
            variance = tree.add(variance, added)
            weight = tree.map(lambda v: torch.where(v > 0, (signal / (signal + v)).sqrt(), 1.0), added)
        seen, deviation = tree.flatten(weight), tree.flatten(variance).sqrt()
        return torch.where(seen > 0, self.lengths / (seen * deviation), 0.0)


def _unknown(task: Task, seen: Observation, batch: Batch, knows: Knowledge) -> dict[str, Field]:
    """The continuous fields that nobody has given away, once the batch is known to fit the task and the target."""
    for name, field in task.fields.items():
        held = batch.get(name)
        shape = None if held is None else tuple(held.shape[: 1 + len(field.shape)])
        if shape != (seen.num_examples, *field.shape):
            raise TaskError(
                f"Field {name!r} of the batch has shape {shape}; observation {seen.key!r} has {seen.num_examples} "
                f"examples of {field.shape}. Pass one target, such as Reconstruction.target(index)."
            )
    found = {name: f for name, f in task.fields.items() if f.classes is None and name not in knows.given}
    if not found:
        raise TaskError("Every continuous field is given in Knowledge: there is nothing left to determine.")
    return found


def _norms(values: Params) -> Params:
    """Of every tensor; one of zeros takes the norm of all, and where all are zero it is one."""
    whole = tree.norm(values)
    whole = torch.where(whole > 0, whole, 1.0)
    return tree.map(lambda value: torch.where(value.any(), torch.linalg.vector_norm(value), whole), values)


def _levels(values: Params) -> Params:
    """Root mean squares, likewise."""
    whole = tree.norm(values) / math.sqrt(tree.size(values))
    whole = torch.where(whole > 0, whole, 1.0)
    return tree.map(lambda value: torch.where(value.any(), value.square().mean().sqrt(), whole), values)


def _spread(numbers: Params, like: Params) -> Params:
    """One number per tensor as one per entry."""
    return tree.map(lambda number, value: number.expand(value.shape), numbers, like)


def _triangle(rows: Tensor, scale: Tensor | None = None) -> Tensor:
    """R of J = Q R from the (n, d) transpose of J, its columns scaled; piece by piece, so that J is never copied."""
    n = rows.shape[0]
    factor = rows.new_zeros(0, n)
    for start in range(0, rows.shape[1], 4 * n):
        piece = rows[:, start : start + 4 * n]
        piece = (piece if scale is None else piece * scale[start : start + 4 * n]).T
        factor = torch.linalg.qr(torch.cat([factor, piece]), mode="r").R
    return factor


def _root(n: int, precision: Tensor | None, prior: float, like: Tensor) -> tuple[Tensor, float]:
    """A root of the prior's precision, and half the logarithm of its determinant."""
    if precision is None:
        if not prior > 0:
            raise ValueError(f"prior is the standard deviation of a pixel in [0, 1], above 0; given {prior}.")
        return torch.eye(n, dtype=like.dtype, device=like.device) / prior, -n * math.log(prior)
    if tuple(precision.shape) != (n, n):
        raise ValueError(f"precision must be ({n}, {n}), for {n} unknowns; given {tuple(precision.shape)}.")
    weights, vectors = torch.linalg.eigh(precision.to(like))
    least = n * torch.finfo(like.dtype).eps * float(weights.abs().max())
    if float(weights.min()) < -least:
        raise ValueError(f"precision must have no negative eigenvalue; the least is {float(weights.min()):.1e}.")
    weights = torch.where(weights > least, weights, 0.0)  # a prior of differences says nothing about the mean
    return weights.sqrt()[:, None] * vectors.T, 0.5 * float(weights.log().sum())


def _share(pixels: Params, fixed: Tensor) -> float:
    """Of the variance about each image's own mean, that in the span of `fixed` (rank, n)."""
    about = tree.flatten(tree.map(lambda p: p.flatten(1) - p.flatten(1).mean(1, keepdim=True), pixels))
    total = float(about.square().sum())
    if total == 0:  # plain images have no variance to speak of: the share of directions
        return fixed.shape[0] / fixed.shape[1]
    return min(1.0, float((fixed @ about).square().sum()) / total)


def _demand_memory(unknowns: int, equations: int, device: torch.device) -> None:
    needed, limit = 8.0 * unknowns * equations, _limit(device)
    if needed > limit:
        raise EngineError(
            f"The Jacobian of {unknowns:,} unknowns and {equations:,} equations needs {needed / 2**30:.1f} GB; "
            f"{limit / 2**30:.1f} GB may be used on {device}. Certify fewer examples or smaller images, or a smaller "
            "model; Engine(device='cpu') where the system has more memory than the GPU."
        )


def _limit(device: torch.device) -> float:
    """Half of the GPU's memory, or 60 % of the system's."""
    if device.type == "cuda":
        return 0.5 * torch.cuda.get_device_properties(device).total_memory
    try:
        return 0.6 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return math.inf


def _explained(problem: RuntimeError, block: int) -> RuntimeError:
    told = str(problem).partition("\n")[0]
    if isinstance(problem, torch.OutOfMemoryError):
        return EngineError(f"Out of memory with blocks of {block}: pass a smaller block. ({told})")
    if any(word in told for word in ("forward AD", "forward-mode", "vmap", "Batching rule", "functorch", "dual")):
        return EngineError(
            f"This model, or the client's rule, cannot be differentiated forward: {told} Run task.check() for the "
            "cause; without forward mode there is no certificate."
        )
    return problem
