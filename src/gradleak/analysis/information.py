"""How much does what a client releases say about its data? Bounds in nats, and a printed index that is none.

    channel      I(X; G + Z) <= 1/2 log det(I + Sigma_G / sigma^2), Z ~ N(0, sigma^2 I) independent of everything
    input        1/2 log det(I + s_x^2 J^T J / sigma^2), J = derivative of the release by the pixels, at one point
    index        what the flat-minima paper prints as a bound on I(X; G) (its Theorems 3.1 and 3.2)

The first holds for every distribution of releases G with covariance Sigma_G: of all with that covariance the Gaussian
has the largest entropy (Cover and Thomas, Elements of Information Theory, 2006, theorem 8.6.5 and chapter 9). The
second is the same statement for a Gaussian prior of pixels and a release that is linear near the point. Both need
noise: without any, what a deterministic client releases has infinite information about continuous data. sigma is real
noise (differential privacy, rounding) or what an attacker tolerates, in units of the release.

"Released" means what leaves the client, its defence included: for SAM the gradient at the disturbed weights. All
logarithms are natural, all of it is computed in float64. A model with BatchNorm is taken in the mode it is in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from gradleak import draws as randomness
from gradleak import tree
from gradleak.analysis.hessian import demand_fitting
from gradleak.analysis.identifiability import PIXEL_STD
from gradleak.analysis.local import SHARE, Floor, Local
from gradleak.analysis.rounding import rounding_of
from gradleak.analysis.spectrum import DAMPING
from gradleak.defence import Chain, Defence
from gradleak.draws import Draws
from gradleak.engine import Engine, EngineError, memory_of
from gradleak.linear import gram
from gradleak.local import ClientState, LocalTraining
from gradleak.observation import Knowledge, Observation
from gradleak.scene import Scene
from gradleak.task import Batch, Task, TaskError
from gradleak.tree import Params, Tree

SHARES = (1e-4, 1e-3, 1e-2)  # noise levels, as shares of the root mean square of a release
SMALLEST = 64  # releases at which a curve begins

# --- what is released, and its covariance -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Releases:
    """n releases of d entries each, as far as their covariance needs them: inner products.

    gram           (n, n) float64, of the releases minus a common point near their mean
    size           d
    examples       B, in each release
    squares        (n,) ||G_i||^2
    mean_square    ||mean of G||^2
    """

    gram: Tensor
    size: int
    examples: int
    squares: Tensor
    mean_square: float

    @property
    def samples(self) -> int:
        return len(self.squares)

    @property
    def level(self) -> float:
        """Root mean square of an entry of a release, ||G|| / sqrt(d): the unit of the noise."""
        return math.sqrt(float(self.squares.mean()) / self.size)

    @property
    def mean_share(self) -> float:
        """||E G||^2 / E ||G||^2: 0 where gradients have mean zero, 1 where all are equal."""
        return self.mean_square / float(self.squares.mean())

    @property
    def spectrum(self) -> Tensor:
        """Eigenvalues of the sample covariance, (n,) descending; at least one is zero. The other d - n are zero too."""
        return _spectra(self.gram[None])[0]

    def curve(
        self,
        *,
        sigmas: Sequence[float] | None = None,
        shares: Sequence[float] = SHARES,
        counts: Sequence[int] | None = None,
        subsets: int = 4,
        seed: int = 0,
    ) -> ChannelCurve:
        """The channel bound against the number of releases that the covariance is estimated from.

        `sigmas`: of the noise, in units of a release; None: `shares` of `level`. `counts`: None doubles from 64 up to
        all. Of every count `subsets` random choices are averaged; of all releases there is only one.
        """
        counts = self._counts() if counts is None else tuple(counts)
        if not counts or min(counts) < 2 or max(counts) > self.samples:
            raise ValueError(f"counts go from 2 to the {self.samples} releases there are; given {counts}.")
        if subsets < 1:
            raise ValueError(f"subsets must be at least 1; given {subsets}.")
        noise = tuple(share * self.level for share in shares) if sigmas is None else tuple(sigmas)
        source = torch.Generator().manual_seed(seed)
        orders = torch.stack([torch.randperm(self.samples, generator=source) for _ in range(subsets)])
        points = []
        for count in counts:
            rows = orders[: 1 if count == self.samples else subsets, :count].to(self.gram.device)
            spectra = _spectra(self.gram[rows[:, :, None], rows[:, None, :]])  # (subsets, count)
            points.append(channel_bound(spectra[:, None, :], _positive(noise, spectra)))  # (subsets, sigmas)
        return ChannelCurve(
            counts=counts,
            sigmas=noise,
            nats=torch.stack([found.mean(0) for found in points]).cpu(),
            spread=torch.stack([found.std(0, correction=0) for found in points]).cpu(),
            level=self.level,
            size=self.size,
            examples=self.examples,
        )

    def _counts(self) -> tuple[int, ...]:
        doubled = [SMALLEST << step for step in range(32) if SMALLEST << step < self.samples]
        return (*doubled, self.samples)


def releases(
    task: Task,
    weights: Params,
    batch: Batch,
    defence: Defence | None = None,
    *,
    training: LocalTraining | None = None,
    examples: int = 1,
    buffers: Params | None = None,
    server: Tree | None = None,
    seed: int = 0,
    block: int = 64,
    hold: int | None = None,
    engine: Engine | None = None,
) -> Releases:
    """Let clients with `examples` examples each release what `LocalTraining.run` makes of them, defence included.

    The examples of `batch` are dealt out as they stand. `training`: None is one step of SGD at rate 1, so that a
    release is a gradient. `server`: what a defence's `broadcast` looks at. `block`: clients at a time under vmap.

    Memory: `hold` releases are kept at once (None: what half the device holds, twice over). Where that is not all of
    them, the others are computed again for every block held: p blocks cost (p + 1) / 2 times the gradients.

    A defence that adds noise is run with its noise, which then counts as signal. The bound stays one, and is loose:
    pass the defence without its noise, and the noise as sigma.
    """
    engine, defence = engine or Engine(), defence or Defence()
    if block < 1 or (hold is not None and hold < 1):
        raise ValueError(f"block and hold must be at least 1; given {block} and {hold}.")
    demand_fitting(task, weights, batch)
    sent_out = defence.broadcast(weights, server or {})
    extras = {name: tree.to(params, engine.where, torch.float64) for name, params in sent_out.items()}
    work, weights, batch, buffers = _double(task, weights, batch, buffers, engine)
    total = next(iter(batch.values())).shape[0]
    if examples < 1 or total % examples or total < 2 * examples:
        raise TaskError(
            f"{total} examples cannot be dealt out to two or more clients with {examples} each: pass a multiple."
        )
    count, size = total // examples, tree.size(weights)
    training = training or LocalTraining(lr=1.0)
    shared, statistics = _split(work, buffers)
    dealt = tree.map(lambda value: value.reshape(count, examples, *value.shape[1:]), batch)
    keys = torch.stack([randomness.key("releases", seed, number) for number in range(count)]).to(engine.where)

    def release(batch: Batch, key: Tensor, statistics: Params) -> Tensor:
        state = ClientState(buffers={**shared, **statistics}, extras=extras, key=key)
        sent, _ = training.run(work, weights, batch, defence, state)
        seen = defence.reveal([sent], [sent.num_examples])
        return tree.flatten({name: seen[name] for name in weights})

    def rows(begin: int, end: int) -> Tensor:
        """(end - begin, d)"""
        pieces = [slice(start, min(start + block, end)) for start in range(begin, end, block)]
        return torch.cat(
            [
                vmap(release)(
                    tree.map(lambda v, p=piece: v[p], dealt), keys[piece], _lanes(statistics, len(keys[piece]))
                )
                for piece in pieces
            ]
        )

    hold = hold or max(1, int(min(count, SHARE * memory_of(engine) / (16.0 * size))))
    edges = [(begin, min(begin + hold, count)) for begin in range(0, count, hold)]
    found = torch.zeros(count, count, dtype=torch.float64, device=engine.where)
    squares = torch.zeros(count, dtype=torch.float64, device=engine.where)
    sums = torch.zeros(size, dtype=torch.float64, device=engine.where)
    centre = sums
    with torch.no_grad(), engine.settings(), _explained():
        for i, (begin, end) in enumerate(edges):
            own = rows(begin, end)
            if i == 0:
                centre = own.mean(0)  # so that centring the products loses no digits
                squares[begin:end], sums = own.square().sum(1), own.sum(0)
            own -= centre
            found[begin:end, begin:end] = gram(own)
            for start, stop in edges[i + 1 :]:
                other = rows(start, stop)
                if i == 0:
                    squares[start:stop], sums = other.square().sum(1), sums + other.sum(0)
                found[begin:end, start:stop] = own @ (other - centre).T
                found[start:stop, begin:end] = found[begin:end, start:stop].T
    if not bool(found.isfinite().all()):
        raise ValueError("A release is not finite: the weights, the batch or the client's rule overflow.")
    if not float(squares.max()) > 0:
        raise ValueError("Every release is zero: the loss does not depend on the weights here, or all was pruned.")
    return Releases(found, size, examples, squares, float((sums / count).square().sum()))


def channel_bound(eigenvalues: Tensor, sigma: Tensor) -> Tensor:
    """1/2 sum_i log(1 + k_i / sigma^2) over the last axis of the covariance's eigenvalues; a tensor of sigma's shape.

    Exact, the mutual information itself, where releases are Gaussian and a deterministic function of the data.
    """
    return 0.5 * (eigenvalues / sigma.unsqueeze(-1).square()).log1p().sum(-1)


@dataclass(frozen=True, eq=False)
class ChannelCurve:
    """The channel bound for the covariance of `counts` releases under noise of `sigmas`, in nats.

    nats     (counts, sigmas), mean over random choices of the releases; `spread` their standard deviation
    level    root mean square of an entry of a release

    It GROWS with the count: n releases span n - 1 directions. The covariance of n is the mean of those that leave one
    out and log det is concave, so the expectation never falls and stays below the value of the true covariance. Only
    where the curve is level is it a bound for the data's distribution: read `growth` first.
    """

    counts: tuple[int, ...]
    sigmas: tuple[float, ...]
    nats: Tensor
    spread: Tensor
    level: float
    size: int
    examples: int

    @property
    def growth(self) -> Tensor | None:
        """(sigmas,): share of the last value that came since half as many releases; None where there is no half."""
        half = [row for row, count in enumerate(self.counts) if 2 * count <= self.counts[-1]]
        return 1 - self.nats[half[-1]] / self.nats[-1] if half else None

    def record(self) -> dict[str, Any]:
        """As a row of a run holds it."""
        growth = self.growth
        return {
            "label": "Gaussian channel bound for the covariance of this many releases; it grows with their number",
            "counts": list(self.counts),
            "sigmas": list(self.sigmas),
            "shares": [sigma / self.level for sigma in self.sigmas],
            "nats": self.nats.tolist(),
            "spread": self.spread.tolist(),
            "growth": None if growth is None else growth.tolist(),
            "parameters": self.size,
            "examples": self.examples,
        }


# --- the input, at one point ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InputInformation:
    """What one release says about its own input, to first order, under isotropic noise and a Gaussian prior of pixels.

    share, sigma   of the noise: in root mean squares of the update, and in its units
    floor          information in nats, effective rank, and the Bayesian Cramer-Rao bound of the mean squared error
    """

    share: float
    sigma: float
    floor: Floor

    def record(self) -> dict[str, float]:
        names = ("information", "effective_rank", "mse", "psnr")
        return {"share": self.share, "sigma": self.sigma, **{name: getattr(self.floor, name) for name in names}}


def input_information(
    task: Task,
    seen: Observation,
    batch: Batch,
    knows: Knowledge = Knowledge(),
    *,
    shares: Sequence[float] = SHARES,
    prior: float = PIXEL_STD,
    block: int = 64,
    engine: Engine | None = None,
) -> tuple[InputInformation, ...]:
    """Fisher information of the pixels in the release at `batch`, one Jacobian for all noise levels.

    As `noise_floor`, but with noise of one sigma in every entry, as in the channel bound, so that the two compare.
    `knows` holds the client's recipe and defence; what noise the defence adds is added. Noise below the digits of the
    observation is not assumed (`Rounding.rank`).
    """
    local = Local.at(task, seen, batch, knows, block, engine)
    if not local.finite:
        raise ValueError("The batch, or the update the client would send for it, is not finite: there is no bound.")
    level = float(tree.norm(local.scene.update)) / math.sqrt(tree.size(local.scene.update))
    if not level > 0:
        raise ValueError("The update is zero everywhere, so shares of it are no noise levels.")
    sigmas = (level * _positive(shares, local.residual)).tolist()
    rounding, found = rounding_of(seen), []
    for share, sigma in zip(shares, sigmas, strict=True):
        noisy = Chain(*filter(None, [knows.defence]), _Tolerance(sigma))
        at = replace(local, scene=replace(local.scene, knows=replace(knows, defence=noisy)))
        found.append(InputInformation(share, sigma, replace(at.floor(0.0, None, prior, rounding), noise=share)))
    return tuple(found)


@dataclass(frozen=True)
class _Tolerance(Defence):
    """Noise that nobody weighs by: it only says how far the release is known."""

    sigma: float = 0.0

    def noise_variance(self, scene: Scene) -> Params:
        return tree.map(lambda value: torch.full_like(value, self.sigma**2), scene.update)

    def visible(self, update: Params, scene: Scene) -> Params:
        return update


# --- the worst loss in a ball -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sharpness:
    """F and F_SAM = max over ||delta|| <= rho of F(theta + delta), as far as a search finds it.

    loss            F
    worst           the largest value met; F_SAM is at least this
    one_step        F(theta + rho G / ||G||), what SAM itself uses: at most `worst`
    gradient_norm   ||G||
    found           the best of each start: those given first, random ones last
    """

    rho: float
    loss: float
    worst: float
    one_step: float
    gradient_norm: float
    found: tuple[float, ...]
    parameters: int

    @property
    def sharpness(self) -> float:
        return self.worst - self.loss

    @property
    def curvature_bound(self) -> float:
        """lambda_max <= 2 / rho^2 (F_SAM - F), up to terms of order rho^2.

        The larger of F(theta +- rho v) is at least their mean, F + rho^2 lambda_max / 2 + O(rho^4): odd orders cancel.
        Where v_max was among the starts it holds for the value found, however well the search did.
        """
        return 2 / self.rho**2 * self.sharpness

    @property
    def printed_bound(self) -> float:
        """As printed: 2 / rho^2 (F_SAM - F + rho ||G||). The last term is not needed."""
        return 2 / self.rho**2 * (self.sharpness + self.rho * self.gradient_norm)

    def record(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in ("sharpness", "curvature_bound", "printed_bound")}
        return {**asdict(self), "found": list(self.found), **told}


def sharpness(
    task: Task,
    weights: Params,
    batch: Batch,
    rho: float = 0.2,
    *,
    top: Tensor | None = None,
    steps: int = 20,
    starts: int = 5,
    buffers: Params | None = None,
    seed: int = 0,
    engine: Engine | None = None,
) -> Sharpness:
    """Projected gradient ascent in the ball of radius rho, all starts together: `steps` steps of length rho / 5.

    Starts: rho G / ||G||; +- rho v where `top` is the eigenvector v of the largest eigenvalue of the Hessian, (d,) in
    the order of `weights`; random points of the sphere for the rest of `starts`.
    """
    if not rho > 0 or steps < 1:
        raise ValueError(f"rho must be above 0 and steps at least 1; given {rho} and {steps}.")
    demand_fitting(task, weights, batch)
    engine = engine or Engine()
    work, weights, batch, buffers = _double(task, weights, batch, buffers, engine)
    size = tree.size(weights)
    if top is not None and (tuple(top.shape) != (size,) or not float(top.norm()) > 0):
        raise ValueError(f"top is a vector of the {size:,} weights, not zero; given shape {tuple(top.shape)}.")
    shared, statistics = _split(work, buffers)

    def value(delta: Tensor, statistics: Params) -> Tensor:
        moved = tree.add(weights, tree.unflatten(delta, weights))
        return work.loss(moved, batch, {**shared, **statistics})[0]

    with torch.no_grad(), engine.settings(), _explained():
        slope, loss = grad_and_value(value)(torch.zeros(size, dtype=torch.float64, device=engine.where), statistics)
        if not bool(loss.isfinite()) or not bool(slope.isfinite().all()):
            raise ValueError("The loss or its gradient is not finite here, so there is no sharpness.")
        given = [slope] if top is None else [slope, top.to(slope), -top.to(slope)]
        if starts < len(given):
            raise ValueError(f"starts must be at least the {len(given)} that are given; given {starts}.")
        source = Draws(randomness.key("sharpness", seed))
        drawn = source.normal((starts - len(given), size), dtype=torch.float64).to(slope)
        deltas = rho * _unit(torch.cat([torch.stack(given), drawn]))
        own = _lanes(statistics, starts)
        climb: Callable[[Tensor, Params], tuple[Tensor, Tensor]] = vmap(grad_and_value(value))
        best = one_step = loss.expand(starts)
        for step in range(steps + 1):
            slopes, values = climb(deltas, own)
            one_step = values if step == 0 else one_step
            best = torch.maximum(best, values)
            deltas = deltas + rho / 5 * _unit(slopes)
            deltas = deltas / (deltas.norm(dim=1, keepdim=True) / rho).clamp_min(1.0)
    if not bool(best.isfinite().all()):
        raise ValueError(f"The loss is not finite within {rho} of the weights: take a smaller rho.")
    return Sharpness(
        rho=rho,
        loss=float(loss),
        worst=float(best.max()),
        one_step=float(one_step[0]),
        gradient_norm=float(slope.norm()),
        found=tuple(best.tolist()),
        parameters=size,
    )


# --- the printed index, and the step that it rests on -----------------------------------------------------------------

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
    seen: Releases, trace: float, top: Tensor, *, log_det: float | None = None, damping: float = DAMPING
) -> CovarianceTest:
    """Hold `seen` against a curvature matrix: its trace, its largest eigenvalues (descending), its damped log det.

    `log_det` is sum_i 1/2 log(h_i^2 + damping), with the same damping. Pass those of the Hessian at the same weights
    and examples, or of the Gauss-Newton matrix, for which the step is nearer to the truth.
    """
    if not damping > 0:
        raise ValueError(f"damping must be above 0; given {damping}.")
    if top.dim() != 1 or not 1 <= len(top) < seen.samples or bool((top.diff() > 0).any()):
        raise ValueError(
            f"top holds between 1 and {seen.samples - 1} eigenvalues, the largest first: {seen.samples} releases have "
            f"no more to compare. Given {tuple(top.shape)}."
        )
    spectrum, floor = seen.spectrum, seen.size / 2 * math.log(damping)
    rest = (seen.size - seen.samples) / 2 * math.log(damping)  # negative where there are more releases than weights
    return CovarianceTest(
        samples=seen.samples,
        examples=seen.examples,
        parameters=seen.size,
        damping=damping,
        traces=(float(spectrum.sum()), trace / seen.examples),
        tops=(tuple(spectrum[: len(top)].tolist()), tuple((top / seen.examples).tolist())),
        excesses=(
            0.5 * float(((seen.examples * spectrum).square() / damping).log1p().sum()),
            None if log_det is None else log_det - floor,
        ),
        entropy=seen.size / 2 * math.log(2 * math.pi * math.e) + rest + 0.5 * float((spectrum + damping).log().sum()),
        index=None if log_det is None else curvature_index(seen.size, seen.examples, log_det=log_det).determinant,
        mean_share=seen.mean_share,
    )


# --- helpers ----------------------------------------------------------------------------------------------------------


@contextmanager
def _explained() -> Iterator[None]:
    """What torch cannot do under vmap, in words that say what to change."""
    try:
        yield
    except torch.OutOfMemoryError as problem:
        told = str(problem).partition("\n")[0]
        raise EngineError(
            f"Out of memory: pass a smaller block, of clients at a time, or fewer starts. ({told})"
        ) from problem
    except RuntimeError as problem:
        told = str(problem).partition("\n")[0]
        if "random" in told:
            raise EngineError(
                "The model draws random numbers in its forward pass (dropout?), which vmap rejects, and no two passes "
                f"would agree. Put those layers into evaluation mode: model.eval() before the task is made. ({told})"
            ) from problem
        if any(word in told for word in ("vmap", "atching rule", "functorch", "data-dependent")):
            raise EngineError(
                f"This model or defence cannot run under vmap, under which all clients and starts go at once: {told}"
            ) from problem
        raise


def _spectra(products: Tensor) -> Tensor:
    """Eigenvalues of sample covariances, (k, n) descending, from inner products (k, n, n) about any common point."""
    rows = products - products.mean(1, keepdim=True)
    centred = rows - rows.mean(2, keepdim=True)
    centred = (centred + centred.transpose(1, 2)) / 2
    return torch.linalg.eigvalsh(centred).flip(1).clamp_min(0.0) / (products.shape[1] - 1)


def _positive(values: Sequence[float], like: Tensor) -> Tensor:
    if not values or min(values) <= 0:
        raise ValueError(f"Noise needs levels above 0: without noise the information is infinite. Given {values}.")
    return torch.tensor(tuple(values), dtype=like.dtype, device=like.device)


def _unit(rows: Tensor) -> Tensor:
    """Each row at length one; a row of zeros stays."""
    lengths = rows.norm(dim=-1, keepdim=True)
    return rows / torch.where(lengths > 0, lengths, 1.0)


def _double(
    task: Task, weights: Params, batch: Batch, buffers: Params | None, engine: Engine
) -> tuple[Task, Params, Batch, Params]:
    """All of it on the engine's device in float64, the weights in their own order of names."""
    work = task.to(engine.where, torch.float64)
    held = {**task.buffers(), **(buffers or {})}
    given = {name: batch[name] for name in task.fields}
    moved = (tree.to(value, engine.where, torch.float64) for value in (weights, given, held))
    return (work, *moved)  # type: ignore[return-value]


def _split(task: Task, buffers: Params) -> tuple[Params, Params]:
    """What all lanes share, and what a forward pass may change in each of them."""
    running = {name for name, _ in task.model.named_buffers()}
    return (
        {name: value for name, value in buffers.items() if name not in running},
        {name: value for name, value in buffers.items() if name in running},
    )


def _lanes(statistics: Params, count: int) -> Params:
    return {name: value.expand(count, *value.shape) for name, value in statistics.items()}
