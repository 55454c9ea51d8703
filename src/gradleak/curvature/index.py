"""The curvature index that the flat-minima paper prints as a bound on information, and a test of its main step."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from gradleak.curvature.ball import Sharpness
from gradleak.curvature.channel import Releases
from gradleak.curvature.spectrum import DAMPING

PREMISES = (
    "The release is taken as a function of the data without noise. Its information about continuous data is then "
    "infinite; a differential entropy, which changes with the unit of the weights, does not stand in for it.",
    "The entropy of a Gaussian needs a covariance of full rank. That of n gradients has rank n - 1, far below d.",
    "Sigma_G = H / B needs gradients of mean zero and labels drawn from the model itself. With true labels and before "
    "convergence neither holds.",
    "log det H and the step to d log lambda_max need positive eigenvalues. H has negative ones; the damped surrogate "
    "drops their signs, and bounds nothing in the argument.",
    "Putting lambda_max in the place of every eigenvalue adds d / 2 times the logarithm of lambda_max over their "
    "geometric mean.",
    "The covariance is defined for single examples and used for their mean: a factor B apart.",
    "Curvature in the weights does not say what can be inverted. The mixed derivative by weights and data does.",
)


@dataclass(frozen=True)
class CurvatureIndex:
    """Two quantities that the flat-minima paper prints as upper bounds on I(X; G). They are NOT bounds on information.

    For an untrained LeNet (d = 15,826, B = 1) the first is about -4,600 nats, which information cannot be, the second
    about +56,000. They order models by curvature, and no more; `PREMISES` says why. Not comparable between
    architectures.

    determinant   Theorem 3.1: d/2 log(2 pi e / B) + 1/2 log det H, with the damped surrogate for log det H
    ball          Theorem 3.2: d/2 log(2 pi e / B) + d/2 log(2 / rho^2 (F_SAM - F + rho ||G||))
    sharper       the same without the term rho ||G||, which the argument does not need
    """

    parameters: int
    examples: int
    determinant: float | None = None
    ball: float | None = None
    sharper: float | None = None

    def record(self) -> dict[str, Any]:
        return {"label": "curvature index (not a bound on information)", **asdict(self), "premises": list(PREMISES)}


def curvature_index(
    parameters: int, examples: int = 1, *, log_det: float | None = None, sharpness: Sharpness | None = None
) -> CurvatureIndex:
    """The printed quantities, from sum_i 1/2 log(h_i^2 + damping) (`log_det`), from a `Sharpness`, or from both."""
    if parameters < 1 or examples < 1:
        raise ValueError(f"parameters and examples must be at least 1; given {parameters} and {examples}.")
    if log_det is None and sharpness is None:
        raise ValueError("Pass log_det, sharpness or both: the index is made of one of them.")
    if sharpness is not None and sharpness.parameters != parameters:
        raise ValueError(f"The sharpness is that of {sharpness.parameters:,} weights; given {parameters:,}.")
    shared = parameters / 2 * math.log(2 * math.pi * math.e / examples)

    def at(curvature: float) -> float:
        return shared + parameters / 2 * math.log(curvature) if curvature > 0 else -math.inf

    return CurvatureIndex(
        parameters,
        examples,
        determinant=None if log_det is None else shared + log_det / 2,
        ball=None if sharpness is None else at(sharpness.printed_bound),
        sharper=None if sharpness is None else at(sharpness.curvature_bound),
    )


@dataclass(frozen=True)
class CovarianceTest:
    """The step Sigma_G = H / B, measured: the covariance of the releases beside the curvature over B.

    traces       tr Sigma_G and tr H / B
    tops         the largest eigenvalues of both, descending, equally many
    excesses     1/2 sum log(1 + t_i^2 / damping) of B Sigma_G and of H; the second is None where no log_det was given
    entropy      d/2 log(2 pi e) + 1/2 log det(Sigma_G + damping I): bounds the entropy of a release with noise of that
                 variance; d - n + 1 of the terms are the damping alone
    index        what stands in its place in Theorem 3.1, from H; None where no log_det was given
    mean_share   ||E G||^2 / E ||G||^2, which the step takes to be zero
    """

    samples: int
    examples: int
    parameters: int
    damping: float
    traces: tuple[float, float]
    tops: tuple[tuple[float, ...], tuple[float, ...]]
    excesses: tuple[float, float | None]
    entropy: float
    index: float | None
    mean_share: float

    @property
    def trace_ratio(self) -> float:
        """tr Sigma_G / (tr H / B): one where the step holds. Negative or infinite where H has no positive trace."""
        return self.traces[0] / self.traces[1] if self.traces[1] else math.inf

    @property
    def top_ratios(self) -> tuple[float, ...]:
        return tuple(k / h if h else math.inf for k, h in zip(*self.tops))

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "trace_ratio": self.trace_ratio, "top_ratios": list(self.top_ratios)}


def against_curvature(
    sample: Releases, trace: float, top: Tensor, *, log_det: float | None = None, damping: float = DAMPING
) -> CovarianceTest:
    """Compare releases with a curvature matrix: its trace, its largest eigenvalues (descending), its damped log det.

    `log_det` is sum_i 1/2 log(h_i^2 + damping), with the same damping. Pass those of the Hessian at the same weights
    and examples, or of the Gauss-Newton matrix, for which the step is nearer to the truth.
    """
    if not damping > 0:
        raise ValueError(f"damping must be above 0; given {damping}.")
    if top.dim() != 1 or not 1 <= len(top) < sample.samples or bool((top.diff() > 0).any()):
        raise ValueError(
            f"top holds between 1 and {sample.samples - 1} eigenvalues, the largest first: {sample.samples} releases "
            f"have no more to compare. Given {tuple(top.shape)}."
        )
    spectrum, floor = sample.spectrum, sample.size / 2 * math.log(damping)
    rest = (sample.size - sample.samples) / 2 * math.log(damping)  # negative where there are more releases than weights
    return CovarianceTest(
        samples=sample.samples,
        examples=sample.examples,
        parameters=sample.size,
        damping=damping,
        traces=(float(spectrum.sum()), trace / sample.examples),
        tops=(tuple(spectrum[: len(top)].tolist()), tuple((top / sample.examples).tolist())),
        excesses=(
            0.5 * float(((sample.examples * spectrum).square() / damping).log1p().sum()),
            None if log_det is None else log_det - floor,
        ),
        entropy=sample.size / 2 * math.log(2 * math.pi * math.e) + rest + 0.5 * float((spectrum + damping).log().sum()),
        index=None if log_det is None else curvature_index(sample.size, sample.examples, log_det=log_det).determinant,
        mean_share=sample.mean_share,
    )
