"""One checkpoint as one row: its curvature and, on request, the Gauss-Newton matrix and what clients release.

A row of analysis.jsonl; numbers are finite or null:

version       2
round         rounds done
weights       a hash of what the server sends
curvature     `hessian.Curvature.to_json`: loss, gradient norm, log det, extremes, trace, density
gauss_newton  the same of the Gauss-Newton matrix, without loss and gradient
information   channel      `ChannelCurve.record`: the bound in nats, for the releases of clients with one example each
              sharpness    `Sharpness.record`: the worst loss in a ball around the weights; top: the residual of the
                           eigenvector among its starts, and whether it counts as found (curvature_bound rests on it)
              index        `CurvatureIndex.record`: published as bounds on information, which they are not
              covariance   `CovarianceTest.record`: Sigma_G against H / B; gauss_newton: against that matrix
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from gradleak.core import tree
from gradleak.core.configuration import digest
from gradleak.core.files import finite
from gradleak.core.tree import Params
from gradleak.curvature.hessian import TRACE_PROBES, Curvature, MatrixFigures, curvature, ggn, hessian
from gradleak.curvature.information import Releases, against_curvature, curvature_index, releases, sharpness
from gradleak.curvature.lanczos import Lanczos, Operator, extremes
from gradleak.curvature.spectrum import Extremes, Spectrum
from gradleak.engine import Engine
from gradleak.federation import Federation, Snapshot
from gradleak.scenario.defence import Defence
from gradleak.scenario.task import Batch, Task

Row: TypeAlias = dict[str, Any]
VERSION = 2
POINTS = 128  # of the density
TOPS = 5  # largest eigenvalues that are compared with those of the covariance
TOLERANCE = 1e-3  # relative residual up to which an eigenvalue counts as found


@dataclass(frozen=True)
class Information:
    """What to measure at a checkpoint besides its curvature.

    defence    of the clients whose releases are bounded; None: their gradients
    rho        radius of the ball that is searched for the worst loss
    releases   number of releases, at most, for the covariance; each client has one example
    """

    defence: Defence | None = None
    rho: float = 0.2
    releases: int = 512

    def __post_init__(self) -> None:
        if not self.rho > 0 or self.releases < 2:
            raise ValueError(f"rho must be above 0 and releases at least 2; given {self.rho} and {self.releases}.")


@dataclass(frozen=True, eq=False)
class Measurement:
    """What is measured at every checkpoint: the task, the examples for curvature, and those that clients release."""

    task: Task
    batch: Batch
    lanczos: Lanczos = Lanczos()
    gauss_newton: bool = False
    information: Information | None = None
    released: Batch | None = None
    engine: Engine = Engine()

    def at(self, number: int, sent: Snapshot) -> Row:
        """The row of a round."""
        weights, buffers = self._placed(sent)
        point = (self.task, weights, self.batch, buffers)
        figures = curvature(*point, engine=self.engine, lanczos=self.lanczos)
        row: Row = {"version": VERSION, "round": number, "weights": fingerprint(sent)}
        row["curvature"] = figures.to_json(POINTS)
        psd = MatrixFigures.of(ggn(*point, engine=self.engine), self.lanczos) if self.gauss_newton else None
        if psd is not None:
            row["gauss_newton"] = psd.to_json(POINTS)
        if self.information is not None:
            row["information"] = self._information(self.information, figures, psd, number, sent)
        result: Row = finite(row)
        return result

    def products(self) -> int:
        """Matrix products per round, if no steps are doubled."""
        once = self.lanczos.probes * self.lanczos.steps + max(TRACE_PROBES, self.lanczos.probes)
        return once * (2 if self.gauss_newton else 1)

    def operator(self, sent: Snapshot) -> Operator:
        weights, buffers = self._placed(sent)
        return hessian(self.task, weights, self.batch, buffers, engine=self.engine)

    def _placed(self, sent: Snapshot) -> tuple[Params, Params]:
        """Weights and buffers. In the task's own order, so that a seed always means the same vectors."""
        return {name: sent.weights[name] for name in self.task.weights()}, {**self.task.buffers(), **sent.buffers}

    def _information(
        self, request: Information, found: Curvature, psd: MatrixFigures | None, number: int, sent: Snapshot
    ) -> dict[str, Any]:
        weights, buffers = self._placed(sent)
        seed, damping = self.lanczos.seed, self.lanczos.damping
        calm = self.task.to(self.engine.where, torch.float64)  # a copy, in evaluation mode as for the curvature
        calm.model.eval()
        ends = extremes(self.operator(sent), seed=seed, tolerance=TOLERANCE)
        worst = sharpness(
            calm, weights, self.batch, request.rho, top=ends.top, buffers=buffers, seed=seed, engine=self.engine
        )
        index = curvature_index(found.size, 1, log_det=found.log_determinant.value, sharpness=worst)
        channel = self.channel(number, sent)
        plain = self._releases(calm, weights, self.batch, buffers)  # in the mode that curvature was measured in

        def against(matrix: MatrixFigures) -> dict[str, Any]:
            log_det = matrix.log_determinant
            tops = _tops(log_det.spectrum, matrix.extremes, plain.samples - 1)
            return against_curvature(plain, matrix.trace.value, tops, log_det=log_det.value, damping=damping).record()

        return {
            "channel": channel.curve(seed=seed).record(),
            "sharpness": {
                **worst.record(),
                "top": {
                    "residual": ends.residuals[1],
                    "accepted": settled(ends.highest, ends.residuals[1], (ends.lowest, ends.highest)),
                },
            },
            "index": index.record(),
            "covariance": {"hessian": against(found), **({} if psd is None else {"gauss_newton": against(psd)})},
        }

    def channel(self, number: int, sent: Snapshot, clients: int | None = None) -> Releases:
        """What clients with one example each release at a round, in their training mode; all, or `clients` of them."""
        weights, buffers = self._placed(sent)
        batch = {name: values[:clients] for name, values in (self.released or self.batch).items()}
        defence = None if self.information is None else self.information.defence
        server = Federation().server("broadcast", number, dict(sent.server))
        return self._releases(self.task, weights, batch, buffers, defence, server)

    def _releases(
        self,
        task: Task,
        weights: Params,
        batch: Batch,
        buffers: Params,
        defence: Defence | None = None,
        server: tree.Tree | None = None,
    ) -> Releases:
        return releases(
            task,
            weights,
            batch,
            defence,
            buffers=buffers,
            server=server,
            seed=self.lanczos.seed,
            block=64 if self.engine.batched else 1,
            engine=self.engine,
        )


def fingerprint(sent: Snapshot) -> str:
    """A hash of weights and buffers that were sent."""
    return digest([dict(sent.weights), dict(sent.buffers)])


def settled(value: float, residual: float, ends: tuple[float, float]) -> bool:
    """As `Extremes.accepted`, for one end: the other may be near zero and converge late."""
    return residual <= TOLERANCE * max(abs(value), 1e-3 * max(map(abs, ends)))


def _tops(spectrum: Spectrum, ends: Extremes, most: int) -> torch.Tensor:
    """The converged largest eigenvalues of one run, descending; always at least the first."""
    run = int(spectrum.nodes[:, -1].argmax())
    nodes, residuals = spectrum.nodes[run].flip(0), spectrum.residuals[run].flip(0)
    settled = (residuals <= TOLERANCE * nodes.abs()).long().cumprod(0)
    count = min(TOPS, most, max(1, int(settled.sum())))
    return torch.cat([nodes.new_tensor([ends.highest]), nodes[1:count]]).cpu()
