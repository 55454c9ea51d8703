"""How much of an image remains at each step: alpha-bar of T steps, by three laws.

Step t, counted from 0, turns an image x into sqrt(ab_t) x + sqrt(1 - ab_t) noise, where ab_t is the product of
1 - beta_i over i <= t. References: Ho, Jain, Abbeel, NeurIPS 2020 (linear); Nichol and Dhariwal, ICML 2021 (cosine);
Jabri, Fleet, Chen, ICML 2023 (sigmoid).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradleak.core.registry import did_you_mean


@dataclass(frozen=True)
class Schedule:
    """T steps of noise.

    steps         T
    kind          "linear": beta from `first` to `last`. "cosine" and "sigmoid" have no free numbers: they state
                  alpha-bar itself, with no beta above 0.999. (diffusers calls another law "sigmoid".)
    first, last   for T = 1000; with fewer steps scale both by 1000 / T, or the last step is not noise
    """

    steps: int = 1000
    kind: str = "linear"
    first: float = 1e-4
    last: float = 0.02

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"A schedule needs at least one step; given {self.steps}.")
        if self.kind not in _LAWS:
            raise ValueError(f"Unknown schedule {self.kind!r}.{did_you_mean(self.kind, _LAWS)}")
        if not 0 < self.first <= self.last < 1:
            raise ValueError(f"Betas must satisfy 0 < first <= last < 1; given {self.first}, {self.last}.")

    @property
    def betas(self) -> Tensor:
        """(T,) in double precision, on the CPU."""
        return _LAWS[self.kind](self)

    @property
    def alpha_bar(self) -> Tensor:
        """(T,), decreasing, in double precision, on the CPU."""
        return _alpha_bar(self, torch.device("cpu"))

    @property
    def mixing(self) -> tuple[tuple[float, float], ...]:
        """sqrt(ab_t) and sqrt(1 - ab_t) of every step, as numbers: a captured step must not read them from a tensor."""
        return _mixing(self)

    def at(self, t: Tensor, like: Tensor | None = None) -> Tensor:
        """Alpha-bar of each example, (B,): of a step, (B,) whole numbers, or averaged over a simplex, (B, T).

        In double precision unless `like` gives another: near t = 0, 1 - ab has few digits in float32.
        """
        table = _alpha_bar(self, t.device)
        if t.is_floating_point():
            if t.shape[-1] != self.steps:
                raise ValueError(f"A simplex of steps needs {self.steps} probabilities; given shape {tuple(t.shape)}.")
            value = t.double() @ table
        else:
            value = table[t]
        return value if like is None else value.to(like)

    def scales(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """sqrt(ab), sqrt(1 - ab), which multiply the image and the noise: (B, 1, 1, 1), in the type of `like`.

        For a simplex both are roots of ONE average, so that their squares still add up to 1.
        """
        share = self.at(t).reshape(-1, *[1] * (like.dim() - 1))
        return share.sqrt().to(like.dtype), (1 - share).sqrt().to(like.dtype)

    def spaced(self, count: int, start: float = 1.0) -> tuple[int, ...]:
        """`count` steps, evenly spaced and falling, from `start` times the last step down to step 0."""
        if not 0 < start <= 1:
            raise ValueError(f"start must be a share of the schedule, above 0 and up to 1; given {start}.")
        first = round(start * (self.steps - 1))
        if not 1 <= count <= first + 1:
            raise ValueError(f"count must be from 1 to {first + 1}, the steps up to start={start:g}; given {count}.")
        if count == 1:
            return (first,)
        return tuple(round(first * place / (count - 1)) for place in reversed(range(count)))


def _linear(of: Schedule) -> Tensor:
    return torch.linspace(of.first, of.last, of.steps, dtype=torch.float64)


def _betas_of(alpha_bar: Tensor) -> Tensor:
    """Betas that give this alpha-bar, (T + 1,) from the clean image on; none above 0.999."""
    return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(0, 0.999)


def _cosine(of: Schedule) -> Tensor:
    place, offset = torch.linspace(0, 1, of.steps + 1, dtype=torch.float64), 0.008
    return _betas_of(((place + offset) / (1 + offset) * math.pi / 2).cos() ** 2)


def _sigmoid(of: Schedule) -> Tensor:
    ends = torch.tensor([-3.0, 3.0], dtype=torch.float64)
    first, last = ends.sigmoid()
    place = torch.linspace(0, 1, of.steps + 1, dtype=torch.float64)
    return _betas_of((last - (ends[0] + place * (ends[1] - ends[0])).sigmoid()) / (last - first))


_LAWS: Mapping[str, Callable[[Schedule], Tensor]] = {"linear": _linear, "cosine": _cosine, "sigmoid": _sigmoid}


@lru_cache(maxsize=64)
def _alpha_bar(schedule: Schedule, device: torch.device) -> Tensor:
    """Cached for each device: a step that is captured in a CUDA graph must not copy from the host."""
    # In a thread of its own: transforms and modes belong to a thread, and the cached tensor outlives them.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: (1 - schedule.betas).cumprod(0).to(device)).result()


@lru_cache(maxsize=64)
def _mixing(schedule: Schedule) -> tuple[tuple[float, float], ...]:
    with ThreadPoolExecutor(1) as thread:
        shares: list[float] = thread.submit(lambda: (1 - schedule.betas).cumprod(0).tolist()).result()
    return tuple((math.sqrt(each), math.sqrt(1 - each)) for each in shares)
