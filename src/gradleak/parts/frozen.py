"""Trained networks of the attacker's own, as a search needs them: frozen, in place, and counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

Answer = TypeVar("Answer")
State: TypeAlias = tuple[tuple[int, int], ...]


def state_of(network: nn.Module) -> State:
    """Where the weights lie and how often they were written: equal for the same weights, so that copies are reused."""
    return tuple((value.data_ptr(), value._version) for value in (*network.parameters(), *network.buffers()))


def aside(work: Callable[[], Answer]) -> Answer:
    """The answer, from a thread of its own: transforms and modes are each thread's own, and answers outlive them."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def frozen(network: nn.Module, like: Tensor) -> nn.Module:
    """A copy in evaluation mode without gradients, on the device and in the type of `like`."""
    return _placed(network, state_of(network), like.device, like.dtype)


@lru_cache(maxsize=4)
def _placed(network: nn.Module, state: State, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Made once for each state of the weights: a captured step must find it in place."""

    def made() -> nn.Module:
        return copy.deepcopy(network).eval().requires_grad_(False).to(device=device, dtype=dtype)

    placed = aside(made)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return placed


def graph_entries(run: Callable[[], Any], network: nn.Module) -> int:
    """How many numbers autograd keeps of `run` for its derivative, each tensor counted once, without the weights."""
    sizes: dict[int, int] = {}
    weights = {value.untyped_storage().data_ptr() for value in (*network.parameters(), *network.buffers())}

    def note(value: Tensor) -> Tensor:
        held = value.untyped_storage()
        if held.data_ptr() not in weights:
            sizes[held.data_ptr()] = held.nbytes() // value.element_size()
        return value

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        kept = run()  # alive until counted: freed memory would be counted under one address
    del kept
    return sum(sizes.values())
