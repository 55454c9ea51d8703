"""What noise is worth: vectors computed elsewhere, two libraries beside us, and bounds that an attack can check."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from scipy.stats import norm

from gradleak.scenario import accounting

DELTA = 1e-5

# --- without sampling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("z", "epsilon", "within"),
    [
        (4.0, 0.926, 5e-4),
        (2.0, 1.993, 5e-4),
        (1.0, 4.377, 5e-4),
        (0.5, 9.997, 5e-4),
        (0.1, 91.8, 0.05),
        (0.01, 5426, 0.5),
        (1e-3, 5.04e5, 500),
        (1e-4, 5.00e7, 5e4),
    ],
)
def test_the_exact_epsilon_of_one_release(z: float, epsilon: float, within: float) -> None:
    found = accounting.gaussian_epsilon(DELTA, z)
    assert found == pytest.approx(epsilon, abs=within)
    assert accounting.gaussian_delta(found, z) == pytest.approx(DELTA, rel=1e-9)


@pytest.mark.parametrize("z", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0])
def test_delta_is_the_formula_of_balle_and_wang(z: float, epsilon: float) -> None:
    direct = norm.cdf(1 / (2 * z) - epsilon * z) - math.exp(epsilon) * norm.cdf(-1 / (2 * z) - epsilon * z)
    assert accounting.gaussian_delta(epsilon, z) == pytest.approx(direct, rel=1e-9)


def test_releases_compose_as_one_with_less_noise() -> None:
    assert accounting.gaussian_epsilon(DELTA, 3.0, 9) == pytest.approx(accounting.gaussian_epsilon(DELTA, 1.0))


def test_the_budget_of_a_published_baseline_over_a_hundred_rounds() -> None:
    """Called 5 in its paper: that is one round."""
    z = 4.8448 / 5
    assert accounting.gaussian_epsilon(DELTA, z) == pytest.approx(4.54, abs=0.005)
    assert accounting.gaussian_epsilon(DELTA, z, 100) == pytest.approx(96.4, abs=0.05)


def test_noise_that_hides_everything_has_epsilon_zero() -> None:
    assert accounting.gaussian_epsilon(0.1, 100.0) == 0
    assert accounting.gaussian_delta(0.0, 100.0) < 0.1


# --- Renyi ------------------------------------------------------------------------------------------------------------

VECTORS = [
    (256 / 60000, 1.1, 14062, 1e-5, 3.009, 2.597, 5e-4),
    (0.01, 1.0, 1000, 1e-5, 2.538, 2.108, 5e-4),
    (0.1, 2.0, 1000, 1e-3, 7.83, 6.87, 5e-3),
    (1.0, 1.0, 1, 1e-5, 5.303, 4.753, 5e-4),
]


@pytest.mark.parametrize(("q", "z", "releases", "delta", "classic", "improved", "within"), VECTORS)
def test_whole_orders_give_the_known_epsilons(
    q: float, z: float, releases: int, delta: float, classic: float, improved: float, within: float
) -> None:
    whole = accounting.WHOLE_ORDERS
    found = accounting.renyi_epsilon(delta, z, q, releases, orders=whole, improved=False)
    assert found == pytest.approx(classic, abs=within)
    found = accounting.renyi_epsilon(delta, z, q, releases, orders=whole)
    assert found == pytest.approx(improved, abs=within)


@pytest.mark.parametrize(("q", "z"), [(0.01, 1.1), (0.1, 0.5), (0.5, 0.1), (0.9, 3.0), (1.0, 0.7)])
def test_every_order_is_that_of_opacus(q: float, z: float) -> None:
    rdp = pytest.importorskip("opacus.accountants.analysis.rdp")
    orders = [1.1, 1.5, 2, 2.5, 4.3, 5.9, 7, 32, 256]
    ours = [accounting.renyi(order, z, q) for order in orders]
    theirs = rdp.compute_rdp(q=q, noise_multiplier=z, steps=1, orders=orders)
    assert ours == pytest.approx(list(theirs), rel=1e-6)


def test_fractional_orders_matter_where_epsilon_is_large() -> None:
    whole = accounting.renyi_epsilon(DELTA, 0.5, 0.1, 1000, orders=accounting.WHOLE_ORDERS)
    both = accounting.renyi_epsilon(DELTA, 0.5, 0.1, 1000)
    assert both < 0.8 * whole


def test_the_renyi_bound_lies_above_the_exact_value() -> None:
    for z in (0.1, 1.0, 10.0):
        assert accounting.renyi_epsilon(DELTA, z) > accounting.gaussian_epsilon(DELTA, z)


# --- Poisson sampling -------------------------------------------------------------------------------------------------


def test_the_libraries_agree_to_the_digits_measured_before() -> None:
    pytest.importorskip("dp_accounting")
    assert accounting.poisson_epsilon(DELTA, 1.1, 0.01, 100) == pytest.approx(0.5498, abs=1e-4)
    assert accounting.opacus_epsilon(DELTA, 1.1, 0.01, 100) == pytest.approx(0.9561, abs=2e-4)


@pytest.mark.parametrize(("q", "z", "releases"), [(0.01, 1.0, 1000), (0.1, 0.5, 1000), (0.5, 0.1, 100)])
def test_numerical_composition_is_tighter_than_renyi(q: float, z: float, releases: int) -> None:
    pytest.importorskip("dp_accounting")
    found = accounting.poisson_epsilon(DELTA, z, q, releases)
    assert found < accounting.renyi_epsilon(DELTA, z, q, releases)
    assert found < accounting.gaussian_epsilon(DELTA, z, releases)  # sampling helps


def test_sampling_everybody_is_the_exact_gaussian() -> None:
    assert accounting.poisson_epsilon(DELTA, 1.0, 1.0, 4) == accounting.gaussian_epsilon(DELTA, 1.0, 4)


def test_numerical_composition_of_almost_everybody_is_the_exact_gaussian() -> None:
    """Ties the library to the closed form: at q close to 1 the two must meet."""
    pytest.importorskip("dp_accounting")
    found = accounting.pld_epsilon(DELTA, 2.0, 1 - 1e-9, 4)
    assert found == pytest.approx(accounting.gaussian_epsilon(DELTA, 2.0, 4), abs=2e-3)


@pytest.mark.parametrize("wrong", [1.06, math.nan])
def test_accountants_that_disagree_state_no_epsilon(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "pld_epsilon", lambda *args, **kwargs: wrong)
    monkeypatch.setattr(accounting, "opacus_epsilon", lambda *args, **kwargs: 1.0)
    with pytest.raises(accounting.AccountantsDisagree, match="above the RDP bound 1.0000"):
        accounting.poisson_epsilon(DELTA, 1.2345, 0.01, 7)
    assert accounting.agreed(1.04, 1.0) == 1.04


@pytest.mark.parametrize(("module", "package"), [("dp_accounting", "dp-accounting"), ("opacus", "opacus")])
def test_a_missing_library_is_named_with_the_remedy(module: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # an import of it now fails
    with pytest.raises(accounting.MissingAccountant, match=rf"needs {package}.*pip install 'gradleak\[dp\]'"):
        accounting.poisson_epsilon(DELTA, 1.3456, 0.01, 7)
    assert accounting.renyi_epsilon(DELTA, 1.3456, 0.01, 7) > 0  # ours need neither


# --- reconstruction ---------------------------------------------------------------------------------------------------


def test_without_a_release_a_reconstruction_is_a_guess() -> None:
    assert accounting.reconstruction_bound(0.01, gaussian=0.0) == pytest.approx(0.01)
    assert accounting.reconstruction_bound(0.01, epsilon=0.0) == pytest.approx(0.01)


def test_pure_privacy_multiplies_the_prior() -> None:
    assert accounting.reconstruction_bound(1e-6, epsilon=2.0) == pytest.approx(1e-6 * math.e**2)
    assert accounting.reconstruction_bound(1e-6, epsilon=2.0, delta=0.1) == pytest.approx(0.1 + 1e-6 * math.e**2)
    assert accounting.reconstruction_bound(1e-6, epsilon=1e5) == 1


def test_the_renyi_bound_has_its_closed_form_at_the_best_order() -> None:
    """For rho-zCDP: exp(-(sqrt(ln 1/kappa) - sqrt(rho))^2) at order sqrt(ln(1/kappa) / rho)."""
    prior, rho = 1e-9, 0.5
    order = math.sqrt(math.log(1 / prior) / rho)
    found = accounting.reconstruction_bound(prior, renyi=accounting.renyi_curve(1.0, orders=[2, order, 50]))
    assert found == pytest.approx(math.exp(-((math.sqrt(math.log(1 / prior)) - math.sqrt(rho)) ** 2)))


@pytest.mark.parametrize("prior", [1e-9, 1e-3, 0.3])
def test_the_most_powerful_test_is_the_tighter_bound(prior: float) -> None:
    for z in (0.3, 1.0, 4.0):
        exact = accounting.reconstruction_bound(prior, gaussian=1 / z)
        assert prior < exact <= accounting.reconstruction_bound(prior, renyi=accounting.renyi_curve(z))
        epsilon = accounting.gaussian_epsilon(DELTA, z)
        assert exact <= accounting.reconstruction_bound(prior, epsilon=epsilon, delta=DELTA) + 1e-15


@pytest.mark.parametrize("z", [0.3, 0.6, 1.5])
def test_the_best_attacker_stays_below_the_bound_and_comes_near_it(z: float) -> None:
    """One of 64 orthogonal secrets of norm 1 is released once; the most likely one is guessed."""
    secrets, trials = 64, 20000
    noise = z * torch.randn(trials, secrets, generator=torch.Generator().manual_seed(0))
    truth = torch.arange(trials) % secrets
    seen = noise + torch.nn.functional.one_hot(truth, secrets)
    success = float((seen.argmax(1) == truth).double().mean())
    bound = accounting.reconstruction_bound(1 / secrets, gaussian=1 / z)
    assert success < bound + 0.01  # 3 standard errors
    assert success > bound / 2


@pytest.mark.parametrize("given", [{}, {"gaussian": 1.0, "epsilon": 1.0}])
def test_a_bound_is_that_of_one_guarantee(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        accounting.reconstruction_bound(0.1, **given)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: accounting.gaussian_epsilon(0.0, 1.0), "delta must lie between 0 and 1.*given 0.0"),
        (lambda: accounting.gaussian_epsilon(1e-5, 0.0), "noise_multiplier must be positive.*given 0.0"),
        (lambda: accounting.gaussian_delta(-1.0, 1.0), "epsilon must be at least 0; given -1.0"),
        (lambda: accounting.renyi(1.0, 1.0), "above 1; given 1.0"),
        (lambda: accounting.renyi(2, 1.0, 1.5), "sampling is a probability.*given 1.5"),
        (lambda: accounting.renyi(2.5, 1e-3, 0.5), "Fractional orders need noise_multiplier >= 0.02; given 0.001"),
        (lambda: accounting.poisson_epsilon(1e-5, 1.0, 0.0), "sampling is a probability.*given 0.0"),
        (lambda: accounting.poisson_epsilon(1e-5, 1.0, 0.5, 0), "releases must be positive.*given 0"),
        (lambda: accounting.reconstruction_bound(1.0, gaussian=1.0), "prior must lie between 0 and 1"),
    ],
)
def test_impossible_numbers_are_refused(call: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()
