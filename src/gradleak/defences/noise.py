"""What defences share that add noise to entries, or do not send them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.parts.view import TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.defence import Client, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee, accounted
from gradleak.scenario.rules import SGD


def noised(params: Params, std: float, draws: Draws) -> Params:
    """Every entry plus independent N(0, std^2)."""
    return {
        name: value + std * draws.normal(tuple(value.shape), stream=stream, dtype=value.dtype)
        for stream, (name, value) in enumerate(params.items())
    }


def own_draws(client: Client, name: str) -> Draws:
    """The client's random numbers; an error where there are none, as in an attacker's replay."""
    if client.draws is None:
        raise ValueError(
            f"{name} draws random numbers: pass ClientState(key=...), which names the client's stream. An attacker "
            "cannot know them and replays through what `assumed` returns."
        )
    return client.draws


def server_draws(server: Tree, name: str) -> Draws:
    """The server's random numbers of this round."""
    if "key" not in server:
        raise ValueError(
            f"{name} adds the server's noise: aggregate(..., server) needs server['key'] (two words) and "
            f"server['round']; given {', '.join(sorted(server)) or 'nothing'}."
        )
    return Draws(server["key"]).child(int(server.get("round", 0)))


def only_update(upload: Upload, name: str) -> Upload:
    """The upload without buffers, which would leave the client without noise.

    Running statistics are withheld. Further trees are an error: the server needs them, so they cannot be withheld.
    """
    if others := sorted(upload.payload.keys() - {"update"}):
        raise ValueError(
            f"{name} clips and noises one update; the upload also holds {', '.join(others)}, which would leave "
            "the client as they are. Use it without the defence that sends those."
        )
    return replace(upload, buffers=None)


def full_variance(scene: TargetView, variance: float) -> Params:
    """The same variance in every coordinate."""
    return {name: torch.full_like(value, variance) for name, value in scene.update.items()}


def variance_of_steps(scene: TargetView, deviations: Sequence[float]) -> Params:
    """The variance in the update from noise on the gradients of the local steps: sum_k (c_k s_k)^2 everywhere.

    `deviations`: s_k, of the gradient of step k. c_k is the change of the update per unit of gradient at step k. Exact
    for one step of SGD; for more it ignores that later gradients are taken at noised weights. A rule that is not linear
    in the gradient (Adam, Lion) has no c_k: all of the observed update may be noise, and the variance is its mean
    square. Without a known recipe the update is taken for a gradient, as `Replay` does.
    """
    training = scene.knows.training or LocalTraining(lr=1.0)
    if isinstance(training.optimiser, SGD):
        gains = training.optimiser.gains([training.lr * factor for factor in training.factors(scene.num_examples)])
        variance = sum((gain * deviation) ** 2 for gain, deviation in zip(gains, deviations, strict=True))
    else:
        variance = tree.squared_norm(scene.update) / tree.size(scene.update) * any(deviations)
    return tree.map(lambda u: torch.zeros_like(u) + variance, scene.update)


def unsent_variance(update: Params) -> Params:
    """Infinite where an update is zero: these entries were not sent. Zero elsewhere."""
    return tree.map(lambda u: torch.where(u != 0, 0.0, torch.inf).to(u), update)


def local_guarantee(exposure: Exposure, noise_multiplier: float) -> Guarantee:
    """Local differential privacy of an update clipped to C with noise z C: any two updates lie up to 2 C apart."""
    return accounted(
        exposure,
        noise_multiplier=noise_multiplier / 2,
        releases=exposure.rounds,
        unit="client",
        model="local",
        covers="the server and everybody else",
        neighbours="any two data sets of the client (sensitivity 2 x clip)",
        sampling="the server knows who takes part: not amplified, counted as if in every round",
    )
