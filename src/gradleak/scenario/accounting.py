"""Privacy accounting: the epsilon of Gaussian noise of a given multiplier, over all releases.

z, the noise multiplier, is the standard deviation over the L2 sensitivity. Releases without sampling have a closed form
(Gaussian differential privacy); Poisson-sampled ones are composed numerically by dp-accounting and checked against
Opacus, both of the extra `dp` and imported on first use. What is here needs torch alone.

References: Balle and Wang, ICML 2018 (exact Gaussian); Dong, Roth, Su, JRSS-B 2022 (composition, trade-off functions);
Mironov, CSF 2017 and Mironov, Talwar, Zhang 2019 (RDP of the sampled Gaussian); Canonne, Kamath, Steinke, NeurIPS 2020
(improved conversion); Bun and Steinke, TCC 2016 (zCDP).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from functools import lru_cache
from statistics import NormalDist

import torch

WHOLE_ORDERS: tuple[float, ...] = tuple(range(2, 257))
FRACTIONAL_ORDERS: tuple[float, ...] = (1.01, 1.02, 1.05, *(1 + tenth / 10 for tenth in range(1, 100) if tenth % 10))
# The sampled integrand has poles at a distance pi z^2 from the real line: below this, quadrature takes too many points.
SMALLEST_QUADRATURE_NOISE = 0.02
TOLERANCE = 0.05
"""How far the tighter accountant may lie ABOVE the looser one; beyond that, neither is used."""


class MissingAccountant(ImportError):
    """Poisson-sampled releases need the extra `dp`."""


class AccountantsDisagree(ArithmeticError):
    """Numerical composition gave more than the Renyi bound, which is impossible: one of the two is wrong."""


# --- releases without sampling: exact ---------------------------------------------------------------------------------


def gaussian_delta(epsilon: float, noise_multiplier: float, releases: int = 1) -> float:
    """The exact delta of `releases` adaptive Gaussian releases at this epsilon.

    delta = Phi(1/(2z) - epsilon z) - e^epsilon Phi(-1/(2z) - epsilon z), with z = noise_multiplier / sqrt(releases).
    """
    _positive(noise_multiplier=noise_multiplier, releases=releases)
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be at least 0; given {epsilon}.")
    z = noise_multiplier / math.sqrt(releases)
    return _tail(1 / (2 * z) - epsilon * z, z)


def gaussian_epsilon(delta: float, noise_multiplier: float, releases: int = 1) -> float:
    """The exact epsilon of `releases` adaptive Gaussian releases at this delta: the inverse of `gaussian_delta`."""
    _positive(noise_multiplier=noise_multiplier, releases=releases)
    _probability(delta=delta)
    z = noise_multiplier / math.sqrt(releases)
    # Bisected in a = 1/(2z) - epsilon z, which stays of order one where epsilon itself is 5e7.
    low, high = NormalDist().inv_cdf(delta) - 1, 1 / (2 * z)
    if _tail(high, z) <= delta:
        return 0.0
    while _tail(low, z) > delta:
        low -= 1
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(middle, z) <= delta else (low, middle)
    return (1 / (2 * z) - low) / z


def _tail(a: float, z: float) -> float:
    """delta as a function of a = 1/(2z) - epsilon z: Phi(a) - phi(a) M(1/z - a), with Mills' ratio M.

    e^epsilon phi(1/z - a) = phi(a), so no large numbers are left to cancel.
    """
    density = math.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    return max(_normal(a) - density * _mills(1 / z - a), 0.0) if a > 0 else density * (_mills(-a) - _mills(1 / z - a))


def _mills(t: float) -> float:
    """(1 - Phi(t)) / phi(t), by the scaled complementary error function."""
    scaled = torch.special.erfcx(torch.tensor(t / math.sqrt(2), dtype=torch.float64))
    return math.sqrt(math.pi / 2) * float(scaled)


def _normal(t: float) -> float:
    return math.erfc(-t / math.sqrt(2)) / 2


# --- Renyi differential privacy ---------------------------------------------------------------------------------------


def renyi(order: float, noise_multiplier: float, sampling: float = 1.0) -> float:
    """The Renyi divergence of one release, under Poisson sampling with probability `sampling`.

    Whole orders a: log sum_k C(a,k) (1-q)^(a-k) q^k exp((k^2-k)/(2z^2)) / (a-1). Fractional ones: the same moment,
    E[(1 - q + q exp((2x-1)/(2z^2)))^a] over x ~ N(0, z^2), by the trapezoidal rule, which converges geometrically here.
    """
    _positive(noise_multiplier=noise_multiplier)
    if not order > 1:
        raise ValueError(f"A Renyi order is above 1; given {order}.")
    if not 0 < sampling <= 1:
        raise ValueError(f"sampling is a probability, above 0 and at most 1; given {sampling}.")
    if sampling == 1:
        return order / (2 * noise_multiplier**2)
    z, q = noise_multiplier, sampling
    if order == int(order):
        return _log_sum(_binomial_terms(int(order), z, q)) / (order - 1)
    if z < SMALLEST_QUADRATURE_NOISE:
        raise ValueError(f"Fractional orders need noise_multiplier >= {SMALLEST_QUADRATURE_NOISE}; given {z}.")
    step = min(z / 8, z * z / 4)
    x = torch.arange(-12 * z, order + 12 * z, step, dtype=torch.float64)
    ratio = torch.logaddexp(torch.full_like(x, math.log1p(-q)), math.log(q) + (2 * x - 1) / (2 * z * z))
    log_density = -x.square() / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi))
    return float(torch.logsumexp(log_density + order * ratio, 0) + math.log(step)) / (order - 1)


def _binomial_terms(order: int, z: float, q: float) -> Iterable[float]:
    for k in range(order + 1):
        choose = math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
        yield choose + (order - k) * math.log1p(-q) + k * math.log(q) + (k * k - k) / (2 * z * z)


def _log_sum(terms: Iterable[float]) -> float:
    logs = list(terms)
    largest = max(logs)
    return largest + math.log(math.fsum(math.exp(term - largest) for term in logs))


def renyi_curve(
    noise_multiplier: float, sampling: float = 1.0, releases: int = 1, orders: Iterable[float] | None = None
) -> dict[float, float]:
    """Order -> Renyi epsilon of all releases together. Default: whole orders to 256, fractional ones to 10.9."""
    _positive(noise_multiplier=noise_multiplier, releases=releases)
    if orders is None:
        fractions = sampling == 1 or noise_multiplier >= SMALLEST_QUADRATURE_NOISE
        orders = WHOLE_ORDERS + (FRACTIONAL_ORDERS if fractions else ())
    return {order: releases * renyi(order, noise_multiplier, sampling) for order in orders}


def renyi_epsilon(
    delta: float,
    noise_multiplier: float,
    sampling: float = 1.0,
    releases: int = 1,
    *,
    orders: Iterable[float] | None = None,
    improved: bool = True,
) -> float:
    """The epsilon that the Renyi curve proves, over the best order.

    Classic: R(a) + ln(1/delta)/(a-1). Improved: R(a) + ln((a-1)/a) - (ln delta + ln a)/(a-1).
    """
    _probability(delta=delta)

    def convert(order: float, spent: float) -> float:
        if not improved:
            return spent + math.log(1 / delta) / (order - 1)
        return spent + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)

    curve = renyi_curve(noise_multiplier, sampling, releases, orders)
    return max(min(convert(order, spent) for order, spent in curve.items()), 0.0)


# --- Poisson sampling: numerical composition --------------------------------------------------------------------------


def poisson_epsilon(delta: float, noise_multiplier: float, sampling: float, releases: int = 1) -> float:
    """The epsilon of Poisson-sampled Gaussian releases (add or remove one), by privacy loss distributions.

    Primary: dp-accounting's PLD, whose discretisation is pessimistic. Checked against Opacus' RDP: PLD is the tighter
    of the two, so a PLD more than 0.05 above it is an error and gives no label. For Poisson sampling ONLY: this formula
    does not hold for batches or cohorts of fixed size.
    """
    _positive(noise_multiplier=noise_multiplier, releases=releases)
    _probability(delta=delta)
    if sampling == 1:
        return gaussian_epsilon(delta, noise_multiplier, releases)
    if not 0 < sampling < 1:
        raise ValueError(f"sampling is a probability, above 0 and at most 1; given {sampling}.")
    return _poisson_epsilon(float(delta), float(noise_multiplier), float(sampling), int(releases))


@lru_cache(maxsize=256)
def _poisson_epsilon(delta: float, noise_multiplier: float, sampling: float, releases: int) -> float:
    bound = opacus_epsilon(delta, noise_multiplier, sampling, releases)
    # A grid as fine as the answer needs: 1e-4 where epsilon is small, and never more than a few 100,000 points.
    return agreed(pld_epsilon(delta, noise_multiplier, sampling, releases, interval=max(1e-4, bound / 2e5)), bound)


def agreed(pld: float, rdp: float) -> float:
    """The PLD epsilon, unless it lies above the RDP bound by more than the tolerance (or is no number)."""
    if not pld <= rdp + TOLERANCE:
        raise AccountantsDisagree(
            f"PLD gives epsilon = {pld:.4f}, above the RDP bound {rdp:.4f} + {TOLERANCE}: one accountant is wrong, "
            "so no epsilon is stated. Please report the settings."
        )
    return pld


def pld_epsilon(
    delta: float, noise_multiplier: float, sampling: float, releases: int, *, interval: float = 1e-4
) -> float:
    """dp-accounting's PLDAccountant alone."""
    try:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant
    except ImportError as problem:
        raise _missing("dp-accounting") from problem
    release = dp_accounting.PoissonSampledDpEvent(sampling, dp_accounting.GaussianDpEvent(noise_multiplier))
    accountant = PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=interval
    )
    accountant.compose(dp_accounting.SelfComposedDpEvent(release, releases))
    return float(accountant.get_epsilon(delta))


def opacus_epsilon(delta: float, noise_multiplier: float, sampling: float, releases: int) -> float:
    """Opacus' RDP analysis alone, at our orders."""
    try:
        from opacus.accountants.analysis import rdp
    except ImportError as problem:
        raise _missing("opacus") from problem
    orders = sorted(WHOLE_ORDERS + FRACTIONAL_ORDERS)
    spent = rdp.compute_rdp(q=sampling, noise_multiplier=noise_multiplier, steps=releases, orders=orders)
    with warnings.catch_warnings():
        # It warns if the best order is the first or the last. The bound still holds, and only serves as a check.
        warnings.filterwarnings("ignore", message="Optimal order is the")
        epsilon, _ = rdp.get_privacy_spent(orders=orders, rdp=spent, delta=delta)
    return float(epsilon)


def _missing(package: str) -> MissingAccountant:
    return MissingAccountant(
        f"Accounting for Poisson sampling needs {package}, which is not installed: pip install 'gradleak[dp]'."
    )


# --- what an epsilon means for reconstruction -------------------------------------------------------------------------


def reconstruction_bound(
    prior: float,
    *,
    gaussian: float | None = None,
    renyi: Mapping[float, float] | None = None,
    epsilon: float | None = None,
    delta: float = 0.0,
) -> float:
    """Upper bound on the probability of a reconstruction; a guess before the release succeeds with `prior` (kappa).

    Success is the event that the prior was given for: exact equality, or an error below some threshold. The adversary
    is informed: it knows everything else. Give one of
    gaussian     mu = sqrt(releases) / z: Phi(Phi^-1(kappa) + mu), the most powerful test, which is tight
    renyi        order -> epsilon: the least (kappa e^epsilon)^((order-1)/order)
    epsilon      with delta: kappa e^epsilon + delta

    Reference: Balle, Cherubin, Hayes, Reconstructing Training Data with Informed Adversaries, S&P 2022 (Renyi, pure);
    the trade-off function of the Gaussian: Kaissis et al., Bounding data reconstruction attacks with the hypothesis
    testing interpretation of differential privacy, 2023.
    """
    _probability(prior=prior)
    if [gaussian, renyi, epsilon].count(None) != 2:
        raise ValueError("Give exactly one of gaussian=, renyi= and epsilon=: each is a guarantee of its own.")
    if gaussian is not None:
        return _normal(NormalDist().inv_cdf(prior) + gaussian)
    if renyi is not None:
        exponents = ((order - 1) / order * (math.log(prior) + spent) for order, spent in renyi.items())
        return math.exp(min(0.0, *exponents))
    assert epsilon is not None
    return min(1.0, math.exp(min(math.log(prior) + epsilon, 0.0)) + delta)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite; given {value}.")


def _probability(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie between 0 and 1, both excluded; given {value}.")
