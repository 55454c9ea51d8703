"""Similarity of two images: MSE, PSNR, SSIM, and the conventions of papers that score differently.

Images are float tensors (N, C, H, W), clamped to [0, 1]; every score is per image, (N,).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradleak.core.assignment import pairwise_mse

EXACT = 1e-12
"""An MSE below this counts as exact: PSNR is then reported as the cap of 120 dB, so that means stay finite."""


def precise(images: Tensor) -> Tensor:
    """Detached, in the most precise floating-point dtype of the device."""
    return images.detach().to(torch.float32 if images.device.type == "mps" else torch.float64)  # mps has no doubles


def to_unit(images: Tensor) -> Tensor:
    """[0, 1] in double precision; NaN becomes 0, infinities the bounds: a diverged attack is scored, not dropped."""
    return precise(images).nan_to_num(nan=0.0, posinf=1.0, neginf=0.0).clamp(0, 1)


def _pair(found: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    if found.shape != truth.shape or found.dim() != 4:
        shapes = f"{tuple(found.shape)} and {tuple(truth.shape)}"
        raise ValueError(f"Scores compare images of equal shape (N, C, H, W), pair by pair; given {shapes}.")
    return to_unit(found), to_unit(truth)


def mse(found: Tensor, truth: Tensor) -> Tensor:
    """Mean squared error over channels and pixels, (N,)."""
    found, truth = _pair(found, truth)
    return (found - truth).square().flatten(1).mean(1)


def psnr(found: Tensor, truth: Tensor) -> Tensor:
    """10 log10(1 / MSE) in dB, data range 1, at most 120 dB, (N,). `capped` says which images are at the cap."""
    return -10 * mse(found, truth).clamp_min(EXACT).log10()


def capped(found: Tensor, truth: Tensor) -> Tensor:
    """Which images are exact up to the cap of PSNR, (N,); sum it for the count."""
    return mse(found, truth) < EXACT


def psnr_ggl(found: Tensor, truth: Tensor) -> Tensor:
    """PSNR as in GGL's code, for parity only: on [-1, 1] with peak 1, so 4 x the MSE and 6.02 dB lower."""
    return -10 * (4 * mse(found, truth)).clamp_min(EXACT).log10()


# --- structural similarity -------------------------------------------------------------------------------------------


def _gaussian(size: int) -> Tensor:
    offset = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    weights = (-offset.square() / (2 * 1.5**2)).exp()
    return weights / weights.sum()


def _uniform(size: int) -> Tensor:
    return torch.full((size,), 1 / size, dtype=torch.float64)


def _smoothing(window: Tensor, size: int, padding: int) -> Tensor:
    """The matrix (positions, size) that slides a window along an axis with zero padding."""
    positions = size + 2 * padding - len(window) + 1
    offset = torch.arange(size) - torch.arange(positions)[:, None] + padding
    inside = (offset >= 0) & (offset < len(window))
    return torch.where(inside, window[offset.clamp(0, len(window) - 1)], 0.0)


def _similarity(
    found: Tensor, truth: Tensor, window: Callable[[int], Tensor], size: int, same: bool = False, sample: bool = False
) -> Tensor:
    """(2 mu_x mu_y + c1)(2 cov + c2) / ((mu_x^2 + mu_y^2 + c1)(var_x + var_y + c2)), averaged over an image.

    Images are (..., C, H, W) with leading axes that broadcast: for all pairs of two sets only products are per pair.
    """
    height, width = truth.shape[-2:]
    if not same:
        short = min(size, height, width)
        size = short - 1 + short % 2  # the largest odd window that fits
    rows, columns = (_smoothing(window(size), side, size // 2 * same).to(truth) for side in (height, width))

    def mean(images: Tensor) -> Tensor:  # (..., C, positions, positions), with these swapped: two plain matrix products
        return (images @ columns.T).mT @ rows.T

    mean_x, mean_y = mean(found), mean(truth)
    unbiased = size**2 / max(size**2 - 1, 1) if sample else 1.0
    variances = unbiased * ((mean(found**2) - mean_x**2) + (mean(truth**2) - mean_y**2))
    covariance = unbiased * (mean(found * truth) - mean_x * mean_y)
    c1, c2 = 0.01**2, 0.03**2
    score = (2 * mean_x * mean_y + c1) * (2 * covariance + c2) / ((mean_x**2 + mean_y**2 + c1) * (variances + c2))
    return score.mean((-3, -2, -1))


def ssim(found: Tensor, truth: Tensor) -> Tensor:
    """Structural similarity (Wang, Bovik, Sheikh, Simoncelli 2004), (N,); 1 is identical.

    Gaussian 11 x 11, sigma 1.5, K1 0.01, K2 0.03, data range 1, population covariance, windows inside the image only,
    per channel. With a side below 11 the largest odd window that fits is used; such scores are not comparable with
    those of larger images.
    """
    return _similarity(*_pair(found, truth), _gaussian, 11)


def pairwise_ssim_distance(first: Tensor, second: Tensor) -> Tensor:
    """1 - SSIM of every pair, (n, m), in blocks of about a million pixels (64 million off the CPU)."""
    first, second = to_unit(first)[:, None], to_unit(second)
    block = max(1, 2 ** (20 if first.device.type == "cpu" else 26) // first.numel())
    return 1 - torch.cat([_similarity(first, some, _gaussian, 11) for some in second.split(block)], 1)


def ssim_zero_pad_gauss(found: Tensor, truth: Tensor) -> Tensor:
    """`ssim` with zero padding, for parity with GIFD's code (which also applies it to normalised images)."""
    return _similarity(*_pair(found, truth), _gaussian, 11, same=True)


def ssim_skimage(found: Tensor, truth: Tensor) -> Tensor:
    """scikit-image's default on grey images (Lewis et al. 2024): uniform 7 x 7, sample covariance, border cropped."""
    found, truth = _pair(found, truth)
    return _similarity(grey(found), grey(truth), _uniform, 7, sample=True)


def grey(images: Tensor) -> Tensor:
    """Luma 0.2125 R + 0.7154 G + 0.0721 B, (N, 1, H, W); one channel stays as it is."""
    if images.shape[1] == 1:
        return images
    return (images * images.new_tensor([0.2125, 0.7154, 0.0721])[:, None, None]).sum(1, keepdim=True)


def s004_compat(found: Tensor, truth: Tensor) -> dict[str, float]:
    """ORACLE, for parity with Lewis et al. 2024 only: best of all pairs of a batch (B, C, H, W).

    On grey images, SSIM and PSNR separately. Both are computed again after a "brightness tuning" that uses the true
    batch, X <- X std(x) / std(X), X <- X + mean(x) + mean(X) (their code, not their text), and used if both are higher.
    """

    def best(images: Tensor) -> dict[str, float]:
        guess, real = grey(to_unit(images)), grey(truth)
        least = pairwise_mse(guess, real).min().clamp_min(EXACT)
        similar = _similarity(guess[:, None], real, _uniform, 7, sample=True)  # (B, B)
        return {"oracle_psnr": float(-10 * least.log10()), "oracle_ssim": float(similar.max())}

    found, truth = to_unit(found), to_unit(truth)
    scaled = found * (truth.std(correction=0) / found.std(correction=0))
    plain, tuned = best(found), best(scaled + truth.mean() + scaled.mean())
    return tuned if all(tuned[name] > plain[name] for name in plain) else plain
