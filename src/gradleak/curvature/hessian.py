"""Curvature of a model at a checkpoint: products with the Hessian of its mean loss, and the spectrum they show.

    H = (1/n) sum_i d^2 loss(w; x_i, y_i) / dw^2     at given weights, in evaluation mode, without weight decay, float64

A product H v is the derivative of the gradient along v (forward over reverse; Pearlmutter, Neural Computation 1994), so
no graph is kept and all vectors go through one vmapped pass; where torch cannot do that, reverse over forward. Measured
on LeNet-Zhu with 100 examples and 10 vectors, on one core, both orders, double backward with a graph built once, and a
linearised gradient differ by less than a third (12 to 16 products a second). What matters is to take the examples in
parts whose activations stay in the cache.

The Gauss-Newton matrix G = (1/n) sum_i J_i^T (d^2 loss / dz^2) J_i, of the model's outputs z, has no negative
eigenvalue where the loss is convex in z; for cross-entropy of logits it is J^T (diag p - p p^T) J, the Fisher matrix
(Martens, JMLR 2020).

`curvature` measures one checkpoint. Work on flat minima and leakage plots its log-determinant. Read that with care: it
changes with the number of weights, and when layers are rescaled though the function stays the same, and it mostly
counts eigenvalues beyond sqrt(damping). Compare the excess, within one architecture.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap

from gradleak.core import tree
from gradleak.core.settings import takes
from gradleak.core.tree import Params
from gradleak.curvature.lanczos import (
    Exact,
    Lanczos,
    Operator,
    dense,
    density,
    exact,
    extremes,
    log_determinant,
    trace,
    traces,
)
from gradleak.curvature.spectrum import Counted, Density, Extremes, LogDeterminant, SampleMean, Spectrum
from gradleak.engine import Engine, EngineError, activations, memory_of
from gradleak.scenario.task import Batch, Task, TaskError

__all__ = ["Counted", "Curvature", "Density", "Exact", "Extremes", "Lanczos", "LogDeterminant", "MatrixFigures"]
__all__ += [
    "Operator",
    "SampleMean",
    "Spectrum",
    "curvature",
    "dense",
    "density",
    "exact",
    "extremes",
    "ggn",
    "hessian",
]
__all__ += ["log_determinant", "trace"]

TRACE_PROBES = 30  # at least, for the trace of a record: they are cheap beside the Lanczos runs
CACHED = 1_000_000  # entries of the activations of all vectors and examples that a CPU takes at a time
SHARE = 0.25  # of a GPU's memory, for the activations of one pass

Scalar = Callable[[Tensor], Tensor]
Slope = Callable[[Scalar, Tensor, Tensor], Tensor]  # (function, x, v) -> H v


def hessian(
    task: Task,
    weights: Params,
    batch: Batch,
    buffers: Params | None = None,
    *,
    engine: Engine | None = None,
    block: int | None = None,
    chunk: int | None = None,
) -> Operator:
    """The Hessian of the batch's mean loss, as products. Vectors are flat, in the order of `tree.flatten(weights)`.

    block   vectors multiplied together; None: by the size of the model and of the device
    chunk   examples differentiated together; None: likewise
    """
    return _MeanLoss.of(task, weights, batch, buffers, engine, block, chunk).hessian()


def ggn(
    task: Task,
    weights: Params,
    batch: Batch,
    buffers: Params | None = None,
    *,
    engine: Engine | None = None,
    block: int | None = None,
    chunk: int | None = None,
) -> Operator:
    """The Gauss-Newton matrix J^T (d^2 loss / dz^2) J of the model's outputs z, as products.

    For cross-entropy of logits d^2 loss / dz^2 is diag p - p p^T per example. It is taken by differentiation, so any
    objective will do that calls the model once, on a tensor of outputs, and is not linear in them.
    """
    return _MeanLoss.of(task, weights, batch, buffers, engine, block, chunk).ggn()


# --- one checkpoint ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class MatrixFigures:
    """The spectrum of a symmetric matrix, estimated.

    log_determinant    1/2 tr log(H^2 + damping) with floor, excess, errors and count; see `LogDeterminant`
    extremes           lowest and highest eigenvalue, residuals and whether to trust them
    trace, square      tr H, and tr H^2 (the squared Frobenius norm), with standard errors
    """

    log_determinant: LogDeterminant
    extremes: Extremes
    trace: SampleMean
    square: SampleMean

    @staticmethod
    def of(operator: Operator, lanczos: Lanczos) -> MatrixFigures:
        """From one set of Lanczos runs, and a few products more for the traces."""
        log_det = log_determinant(operator, lanczos=lanczos)
        first, second = traces(operator, max(TRACE_PROBES, lanczos.probes), lanczos.seed)
        return MatrixFigures(log_determinant=log_det, extremes=log_det.spectrum.extremes(), trace=first, square=second)

    @property
    def excess(self) -> float:
        return self.log_determinant.excess

    @property
    def count(self) -> Counted:
        return self.log_determinant.count

    @property
    def frobenius(self) -> float:
        return math.sqrt(self.square.value)

    def density(self, points: int = 256, width: float | None = None) -> Density:
        """The smoothed spectral density, from the same runs."""
        return self.log_determinant.spectrum.density(points, width)

    def to_json(self, points: int = 256) -> dict[str, Any]:
        """Plain numbers, strings and lists; `points` of the density, none for 0."""
        figures = {name: getattr(self, name).to_json() for name in ("log_determinant", "extremes", "trace", "square")}
        return {**figures, **({"density": self.density(points).to_json()} if points else {})}


@dataclass(frozen=True, eq=False, kw_only=True)
class Curvature(MatrixFigures):
    """A model at one checkpoint, on one batch: the figures of its Hessian, and

    size, examples     d weights, n examples
    loss               mean over the batch; `gradient_norm` is that of its gradient
    products, seconds  the cost
    """

    size: int
    examples: int
    loss: float
    gradient_norm: float
    products: int
    seconds: float

    def to_json(self, points: int = 256) -> dict[str, Any]:
        """Plain numbers, strings and lists; `points` of the density, none for 0."""
        names = ("size", "examples", "loss", "gradient_norm", "products", "seconds")
        return {**{name: getattr(self, name) for name in names}, **super().to_json(points)}


@takes(Lanczos)
def curvature(
    task: Task,
    weights: Params,
    batch: Batch,
    buffers: Params | None = None,
    *,
    engine: Engine | None = None,
    block: int | None = None,
    chunk: int | None = None,
    lanczos: Lanczos,
) -> Curvature:
    """Everything of one checkpoint from one set of Lanczos runs, and a few products more for the traces.

    The other keywords are the fields of `Lanczos`: `curvature(task, weights, batch, probes=5, steps=50)`.
    """
    began = time.perf_counter()
    at = _MeanLoss.of(task, weights, batch, buffers, engine, block, chunk)
    loss, gradient_norm = at.loss_and_gradient_norm()
    operator = at.hessian()
    figures = MatrixFigures.of(operator, lanczos)
    return Curvature(
        **vars(figures),
        size=operator.size,
        examples=at.examples,
        loss=loss,
        gradient_norm=gradient_norm,
        products=lanczos.probes * figures.log_determinant.steps + max(TRACE_PROBES, lanczos.probes),
        seconds=time.perf_counter() - began,
    )


# --- the model as a function of one vector ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _MeanLoss:
    """The mean loss of a batch as a function of flat weights, at `w`, in float64 and evaluation mode."""

    task: Task
    w: Tensor
    like: Params
    buffers: Params
    batch: Batch
    engine: Engine
    block: int | None
    chunk: int | None
    entries: int  # of all activations of one example
    slope: Slope

    @staticmethod
    def of(
        task: Task,
        weights: Params,
        batch: Batch,
        buffers: Params | None,
        engine: Engine | None,
        block: int | None,
        chunk: int | None,
    ) -> _MeanLoss:
        engine = engine or Engine()
        for name, value in (("block", block), ("chunk", chunk)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; given {value}.")
        demand_fitting(task, weights, batch)
        work = task.to(engine.where, torch.float64)
        work.model.eval()  # the copy's: the statistics of a checkpoint, not those of this batch
        like, examples, rest = (
            tree.to(tree.detach(values), engine.where, torch.float64)
            for values in (weights, batch, task.buffers() if buffers is None else buffers)
        )
        few = {name: value[:2] for name, value in examples.items()}
        entries = max(1, activations(work, like, few, rest) // tree.length(few))
        flat = tree.flatten(like)
        at = _MeanLoss(work, flat, like, rest, examples, engine, block, chunk, entries, _forward_over_reverse)
        at._demand_a_mean()
        with engine.settings(), torch.no_grad():
            return replace(at, slope=_workable(partial(at.loss, examples=few), flat))

    @property
    def examples(self) -> int:
        return tree.length(self.batch)

    def loss(self, w: Tensor, examples: Batch) -> Tensor:
        return self.task.loss(tree.unflatten(w, self.like), examples, self.buffers)[0]

    def outputs(self, w: Tensor, examples: Batch) -> Tensor:
        """The model's outputs, as the objective gets them."""
        buffers = {name: value.clone() for name, value in self.buffers.items()}
        model, caught = self.task.call(tree.unflatten(w, self.like), buffers), []

        def call(*args: Any, **kwargs: Any) -> Any:
            caught.append(model(*args, **kwargs))
            return caught[-1]

        self.task.objective(call, examples)
        if len(caught) != 1 or not isinstance(caught[0], Tensor):
            what = f"{len(caught)} times" if len(caught) != 1 else f"for a {type(caught[0]).__name__}"
            raise TaskError(
                f"The objective calls the model {what}; a Gauss-Newton matrix needs one call that returns a tensor. "
                "Use hessian instead, or an objective such as cross_entropy(model(x), y)."
            )
        return caught[0]

    def loss_of(self, outputs: Tensor, examples: Batch) -> Tensor:
        return self.task.objective(lambda *args, **kwargs: outputs, examples)

    def hessian(self) -> Operator:
        def product(v: Tensor, examples: Batch) -> Tensor:
            return self.slope(partial(self.loss, examples=examples), self.w, v)

        return self._operator(product)

    def ggn(self) -> Operator:
        self._demand_curved_outputs()

        def product(v: Tensor, examples: Batch) -> Tensor:
            model = partial(self.outputs, examples=examples)
            outputs, along = jvp(model, (self.w,), (v,))[:2]
            curved = self.slope(partial(self.loss_of, examples=examples), outputs, along)
            pulled: Tensor = vjp(model, self.w)[1](curved)[0]
            return pulled

        return self._operator(product)

    def _operator(self, product: Callable[[Tensor, Batch], Tensor]) -> Operator:
        """The mean over the batch's parts of `product(vector (d,), examples)`, for many vectors at once."""

        def together(vectors: Tensor) -> Tensor:
            total = torch.zeros_like(vectors)
            try:
                with self.engine.settings(), torch.no_grad():
                    for part, share in self._parts(len(vectors)):
                        each = lambda v, part=part: product(v, part)  # noqa: E731
                        rows = vmap(each)(vectors) if self.engine.batched else torch.stack([each(v) for v in vectors])
                        total += share * rows
            except RuntimeError as problem:
                raise _explained(problem) from problem
            return total

        return Operator(self.w.numel(), self.w.device, together, self.block or self._block())

    def loss_and_gradient_norm(self) -> tuple[float, float]:
        total, gradient = 0.0, torch.zeros_like(self.w)
        with self.engine.settings(), torch.no_grad():
            for part, share in self._parts(1):
                slope, loss = torch.func.grad_and_value(lambda p, part=part: self.loss(p, part))(self.w)
                total, gradient = total + share * float(loss), gradient + share * slope
        return total, float(torch.linalg.vector_norm(gradient))

    # --- sizes ---

    def _block(self) -> int:
        """Vectors at a time: each needs some copies of the weights, besides its activations."""
        if self.engine.where.type != "cuda":
            return int(max(16, min(256, CACHED // (8 * self.entries))))
        return int(max(1, min(256, SHARE * memory_of(self.engine) // (64 * self.w.numel()))))

    def _parts(self, vectors: int) -> list[tuple[Batch, float]]:
        """The batch cut into parts of `chunk` examples, each with its share of the mean."""
        room = CACHED // (self.entries * vectors)
        if self.engine.where.type == "cuda":
            # Forward and backward, and the tangents of both, with the patches of convolutions; 8 bytes each.
            room = int(SHARE * memory_of(self.engine) // (8 * 24 * self.entries * vectors))
        return self._cut(self.chunk or max(1, min(room, self.examples)))

    def _cut(self, size: int) -> list[tuple[Batch, float]]:
        n = self.examples
        return [
            ({name: value[start : start + size] for name, value in self.batch.items()}, min(size, n - start) / n)
            for start in range(0, n, size)
        ]

    # --- what is demanded ---

    def _demand_a_mean(self) -> None:
        """The losses of the parts must average to that of the batch, or cutting the batch would change the result."""
        with self.engine.settings(), torch.no_grad():
            whole = float(self.loss(self.w, self.batch))
            if not math.isfinite(whole):
                raise TaskError(
                    f"The loss at these weights is {whole}: there is no curvature to measure. Has training diverged?"
                )
            if (self.chunk or 1) >= self.examples:
                return
            parts = sum(share * float(self.loss(self.w, part)) for part, share in self._cut((self.examples + 1) // 2))
        if abs(whole - parts) > 1e-8 * max(1.0, abs(whole)):
            raise TaskError(
                f"The objective is no mean over examples: {whole:.6g} for the batch, {parts:.6g} for the mean of its "
                f"halves. Use a loss with reduction='mean', or pass chunk={self.examples} to differentiate it whole."
            )

    def _demand_curved_outputs(self) -> None:
        few = {name: value[:2] for name, value in self.batch.items()}
        with self.engine.settings(), torch.no_grad():
            outputs = self.outputs(self.w, few)
            ramp = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype, device=outputs.device)
            along = ramp.sin().reshape(outputs.shape)
            curved = self.slope(partial(self.loss_of, examples=few), outputs, along)
        if not bool(curved.any()):
            raise TaskError(
                "The objective is linear in the model's outputs, so its Gauss-Newton matrix is zero. Does the model "
                "end in log_softmax? Let it return logits, with cross_entropy as the loss."
            )


def _forward_over_reverse(function: Scalar, x: Tensor, v: Tensor) -> Tensor:
    """The derivative along v of the gradient at x."""
    along: Tensor = jvp(grad(function), (x,), (v,))[1]
    return along


def _reverse_over_forward(function: Scalar, x: Tensor, v: Tensor) -> Tensor:
    """The gradient at x of the derivative along v: the same numbers."""
    return grad(lambda p: jvp(function, (p,), (v,))[1])(x)


def _workable(function: Scalar, x: Tensor) -> Slope:
    """The first of the two orders that torch supports here: grid_sample, for one, has no forward mode."""
    refused: list[RuntimeError] = []
    for order in (_forward_over_reverse, _reverse_over_forward):
        try:
            order(function, x, torch.ones_like(x))
            return order
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as problem:
            refused.append(problem)
    why = str(refused[0]).partition("\n")[0]
    raise EngineError(
        f"torch cannot differentiate this model twice, which its Hessian needs: {why} Run task.check() for the cause."
    ) from refused[0]


def demand_fitting(task: Task, weights: Params, batch: Batch) -> None:
    """Weights and batch must be of this task."""
    expected = {name: tuple(p.shape) for name, p in task.model.named_parameters() if p.requires_grad}
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    if shapes != expected:
        odd = ", ".join(f"{name} {shape}" for name, shape in sorted(set(shapes.items()) ^ set(expected.items()))[:3])
        raise TaskError(
            f"The weights are not of this model: they differ at {odd}. Pass all its trained weights by name, as "
            "task.weights() has them."
        )
    if missing := [name for name in task.fields if name not in batch]:
        raise TaskError(f"The batch lacks {', '.join(missing)}; it has {', '.join(batch) or 'nothing'}.")
    counts = {name: len(value) for name, value in batch.items()}
    if len(set(counts.values())) != 1 or not min(counts.values()):
        raise TaskError(f"Every field of the batch needs the same number of examples, at least one; given {counts}.")


def _explained(problem: RuntimeError) -> RuntimeError:
    reason = str(problem).partition("\n")[0]
    if isinstance(problem, torch.OutOfMemoryError):
        return EngineError(f"Out of memory: pass a smaller block (of vectors) or chunk (of examples). ({reason})")
    if any(word in reason for word in ("vmap", "atching rule", "functorch", "data-dependent")):
        return EngineError(
            f"This model cannot run under vmap: {reason} Engine(batched=False) multiplies one vector after the other."
        )
    return problem
