"""From noise to images: DDIM without added noise, a differentiable function of the noise it starts from.

Reference: Song, Meng, Ermon, "Denoising diffusion implicit models", ICLR 2021.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradleak.core.recompute import recomputed
from gradleak.diffusion.objective import TARGETS
from gradleak.diffusion.schedule import Schedule


def ddim(
    call: Callable[..., Any],
    z: Tensor,
    schedule: Schedule,
    steps: int | Sequence[int] = 16,
    target: str = "eps",
    recompute: bool = False,
    start: float = 1.0,
    last: int | None = None,
) -> Tensor:
    """The image made from noise `z` (B, C, H, W), in the range that the denoiser was trained on, not clamped.

    call        call(x, t): the denoiser, with weights that all lanes share
    steps       how many, evenly spaced over the schedule; or the steps themselves, falling
    recompute   store each step's input instead of its graph: the memory of one step, for one more evaluation each
    start       where the chain begins, as a share of the schedule. Below 1, z is an image noised to that step
    last        differentiate the network in this many last steps only. In earlier steps its output is a constant: the
                derivative passes scaled but not rotated. None: differentiate it in all steps
    """
    chain = schedule.spaced(steps, start) if isinstance(steps, int) else tuple(map(int, steps))
    if any(above <= below for above, below in zip(chain, chain[1:], strict=False)):
        raise ValueError(f"The steps of a chain must decrease; given {chain}.")
    if not chain or chain[0] >= schedule.steps or chain[-1] < 0:
        raise ValueError(f"The steps of a chain must lie between 0 and {schedule.steps - 1}; given {chain}.")
    if last is not None and last < 1:
        raise ValueError(f"last must be at least one step, or None for all; given {last}.")
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}; given {target!r}.")
    scales = schedule.mixing

    def step_from(t: int, below: int | None, constant: bool) -> Callable[[Tensor], Tensor]:
        (a, b), (next_a, next_b) = scales[t], (1.0, 0.0) if below is None else scales[below]

        def step(x: Tensor) -> Tensor:
            when = torch.full((x.shape[0],), t, device=x.device)
            out = call(x.detach(), when).detach() if constant else call(x, when)
            image, noise = ((x - b * out) / a, out) if target == "eps" else (a * x - b * out, b * x + a * out)
            return next_a * image + next_b * noise

        return recomputed(step) if recompute and not constant else step

    for place, (t, below) in enumerate(zip(chain, (*chain[1:], None), strict=True)):
        z = step_from(t, below, constant=last is not None and place < len(chain) - last)(z)
    return z
