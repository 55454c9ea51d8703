"""What the defences that add Gaussian noise share."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from gradleak.defence import Client, Upload
from gradleak.draws import Draws
from gradleak.scene import Scene
from gradleak.tree import Params, Tree

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


def full_variance(scene: Scene, variance: float) -> Params:
    """The same variance in every coordinate."""
    return {name: torch.full_like(value, variance) for name, value in scene.update.items()}


def at_least(name: str, value: Number, least: Number, *, excluded: bool = False, whole: bool = False) -> None:
    if whole and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{name} must be a whole number; given {value}.")
    if not (value > least if excluded else value >= least):
        raise ValueError(f"{name} must be {'above' if excluded else 'at least'} {least}; given {value}.")
