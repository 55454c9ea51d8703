"""What the defences that add Gaussian noise share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from gradleak.core import tree
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.parts.view import TargetView
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.defence import Client, Upload
from gradleak.scenario.rules import SGD

Number = TypeVar("Number", int, float)


def noised(params: Params, std: float, draws: Draws) -> Params:
    """Every entry plus N(0, std^2) of its own."""
    return {
        name: value + std * draws.normal(tuple(value.shape), stream=stream, dtype=value.dtype)
        for stream, (name, value) in enumerate(params.items())
    }


def own_draws(client: Client, name: str) -> Draws:
    """The client's own random numbers; an error where there are none, as in an attacker's replay."""
    if client.draws is None:
        raise ValueError(
            f"{name} draws random numbers: pass ClientState(key=...), which names the client's stream. An attacker "
            "cannot know them and replays through what `assumed` returns."
        )
    return client.draws


def server_draws(server: Tree, name: str) -> Draws:
    """The server's own random numbers of this round."""
    if "key" not in server:
        raise ValueError(
            f"{name} adds the server's noise: aggregate(..., server) needs server['key'] (two words) and "
            f"server['round']; given {', '.join(sorted(server)) or 'nothing'}."
        )
    return Draws(server["key"]).child(int(server.get("round", 0)))


def only_update(upload: Upload, name: str) -> Upload:
    """The upload without buffers: whatever leaves beside the update, leaves without noise.

    Running statistics are withheld. Further trees cannot be, since the server needs them: they are an error.
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
    """What noise on the gradients of the local steps leaves in the update: sum_k (c_k s_k)^2 in every coordinate.

    `deviations`: s_k, of the gradient of step k. c_k is what the client's rule makes of one unit of gradient at step k
    by the end of training. Exact for one step of SGD; for more it leaves out that later gradients are taken at noised
    weights. A rule that is not linear in the gradient (Adam, Lion) has no c_k: there all of the observed update may be
    noise, and its mean square is the variance. Without a known recipe the update is taken for a gradient, as `Replay`
    does.
    """
    training = scene.knows.training or LocalTraining(lr=1.0)
    if isinstance(training.optimiser, SGD):
        gains = training.optimiser.gains([training.lr * factor for factor in training.factors(scene.num_examples)])
        variance = sum((gain * deviation) ** 2 for gain, deviation in zip(gains, deviations, strict=True))
    else:
        variance = tree.squared_norm(scene.update) / tree.size(scene.update) * any(deviations)
    return tree.map(lambda u: torch.zeros_like(u) + variance, scene.update)


def at_least(name: str, value: Number, least: Number, *, excluded: bool = False, whole: bool = False) -> None:
    """Refuse a setting below `least`, or at it where that is `excluded`; `whole`: it must be an int."""
    if whole and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{name} must be a whole number; given {value}.")
    if not (value > least if excluded else value >= least):
        raise ValueError(f"{name} must be {'above' if excluded else 'at least'} {least}; given {value}.")
