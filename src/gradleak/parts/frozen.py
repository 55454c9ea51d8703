"""Trained networks of the attacker for use in a search: frozen, on its device, and with their memory counted."""

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
    """Address and version of every weight: equal for the same weights, so it is the key under which copies are kept."""
    return tuple((value.data_ptr(), value._version) for value in (*network.parameters(), *network.buffers()))


def aside(work: Callable[[], Answer]) -> Answer:
    """The answer, from a new thread: transforms and modes of torch belong to a thread, and the answer outlives them."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


def frozen(network: nn.Module, like: Tensor) -> nn.Module:
    """A copy in evaluation mode, without gradients, on the device and in the type of `like`."""
    return _placed(network, state_of(network), like.device, like.dtype)


@lru_cache(maxsize=4)
def _placed(network: nn.Module, state: State, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Made once for each state of the weights: a captured step needs it at a fixed address."""

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
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes() // value.element_size()
        return value

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        result = run()  # alive until all is counted: freed memory could be counted under one address
    del result
    return sum(sizes.values())
