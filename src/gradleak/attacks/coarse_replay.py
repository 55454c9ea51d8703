"""Coarse replay: the client's whole training in a few large steps on all examples (gradleak's own)."""

from __future__ import annotations

from gradleak.attack import Attack, Composed
from gradleak.attacks.sme import PIXELS
from gradleak.core.registry import named
from gradleak.parts.coarse import Coarse, Onwards, Total
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Adam, StepDecay, constant
from gradleak.parts.priors import TotalVariation
from gradleak.parts.spaces import JointSpace
from gradleak.parts.stage import Stage


@named("coarse-replay", kind="attack", paper="gradleak's own")
def coarse_replay(
    *,
    steps: int = 1000,
    lr: float = 1.0,
    total_lr: float = 1e-2,
    tv: float = 0.005,
    coarse: int = 20,
    path: tuple[int, ...] = (),
    early: float = 0.2,
    extrapolate: bool = False,
    recompute: bool = False,
    decay: bool = True,
    restarts: int = 1,
    labels: str = "auto",
    keep: str = "best_match",
) -> Attack:
    """Match an update of many local steps by a replay of them in `coarse` large ones, each on all examples.

    min over x of 1 - cos(update, w0 - v_K) + tv * TV(x) with v_{k+1} = v_k - (lr T / K) grad(x) at v_k, v_0 = w0, or
    what momentum, weight decay, a schedule or Adam make of it; Adam, box and rates of `sme`, and half of its total
    variation (by trial, on a client that is in no table). With the client's recipe in Knowledge(training=...) nothing
    else is learned; without it the total way is, at the rate `total_lr` of its logarithm, as of a plain SGD. The order
    of the client's batches is not needed. A step costs K gradients. Of an Adam client they are taken in batches of its
    size, whose spread is most of Adam's denominator (`parts.coarse.SpreadRule`): as many examples, more passes over the
    weights.

    path, early     the share `early` of the steps goes to coarser replays, as many steps for each, of these K; every
                    stage starts from the last, and the rates fall over the whole run. It saves time; too coarse or
                    too long a path leads astray, since the images then explain what the replay leaves out
    extrapolate     gradients go on along a line between the coarse steps (`parts.coarse.CoarseRule`), worth about
                    twice the steps. For small `lr` only: far from the truth it is unstable, and lanes are lost
    recompute       hold K points of the path instead of K graphs, for about twice the time: for clients too large
                    for the device (K = 20 of CNNcifar on 50 images: 3.9 GiB a lane with graphs, 1.1 without)

    coarse=1 is `ig-ms`, with the same `tv`. `lr`, `decay`, labels and `keep` as in `sme`.
    """
    if list(path) != sorted(set(path)) or any(number < 1 for number in path):
        raise ValueError(f"path must be growing numbers of coarse steps, at least 1 each; given {path}.")
    if not 0 <= early < 1:
        raise ValueError(f"early must be a share of the steps in [0, 1); given {early}.")
    if coarse < 1:
        raise ValueError(f"coarse must be at least 1; given {coarse}.")
    before = [number for number in path if number < coarse]
    counts = [int(early * steps) // max(1, len(before))] * len(before)
    stages: list[Stage] = []
    done = 0
    for number, count in zip((*before, coarse), (*counts, steps - sum(counts)), strict=True):
        if count == 0:
            continue
        schedule = Onwards(StepDecay(), done, steps) if decay else constant
        stages.append(
            Stage(
                JointSpace((PIXELS, Total(min(number, 5), extrapolate=extrapolate))),
                Coarse(number, extrapolate=extrapolate, recompute=recompute),
                Cosine(),
                (TotalVariation(tv / 2),),  # half, as in `sme`
                Adam(lr=lr, steps=count, schedule=schedule, rates={"total": total_lr}),
            )
        )
        done += count
    return Composed("coarse-replay", tuple(stages), Labels(label_rule(labels)), restarts=restarts, keep=keep)
