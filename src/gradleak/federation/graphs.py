"""CUDA graphs of a group's local training: captured when a form comes up a second time, then replayed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable

import torch

from gradleak.core import tree
from gradleak.core.tree import Tree

GRAPHS = 16  # held at most
STALE = 20  # rounds without use after which a graph may be replaced


class Graph:
    """A captured function of tensors. Inputs are copied into its own tensors; results are copied out."""

    def __init__(self, run: Callable[[Tree], Tree], inputs: Tree) -> None:
        self.inputs = tree.detach(inputs)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(self.inputs)  # as torch asks: libraries allocate what they need before the capture
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = run(self.inputs)

    def __call__(self, inputs: Tree) -> Tree:
        tree.map(lambda place, value: place.copy_(value), self.inputs, inputs)
        self.graph.replay()
        return tree.detach(self.results)


class Graphs:
    """The graphs of a training. `room`: bytes for all of them, by the caller's estimate of each.

    Forms come and go: clients without a memory yet, rounds with fewer clients. So a form is captured when it comes up
    the second time, and a stale graph is replaced. If no graph is stale, new forms run step by step.
    """

    def __init__(self, room: float) -> None:
        self.room, self.round, self.possible = room, 0, True
        self._met: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[Graph, float]] = {}
        self._used: dict[Hashable, int] = {}

    def results(self, form: Hashable, run: Callable[[Tree], Tree], inputs: Tree, size: float) -> Tree | None:
        """The result of `run(inputs)` from a graph; None: there is no graph, and the caller runs it step by step."""
        if form not in self._graphs and not self._capture(form, run, inputs, size):
            return None
        self._used[form] = self.round
        return self._graphs[form][0](inputs)

    def _capture(self, form: Hashable, run: Callable[[Tree], Tree], inputs: Tree, size: float) -> bool:
        if form not in self._met:
            self._met.add(form)
            return False
        stale = [other for other in self._graphs if self.round - self._used[other] > STALE]
        while not self._fits(size) and stale:
            del self._graphs[stale.pop(0)]
        if not self.possible or not self._fits(size):
            return False
        try:
            self._graphs[form] = Graph(run, inputs), size
        except RuntimeError as problem:
            self.possible = False
            cause = str(problem).splitlines()[0]
            warnings.warn(f"No CUDA graph of the clients' training ({cause}): step by step instead.", stacklevel=2)
            return False
        return True

    def _fits(self, size: float) -> bool:
        return len(self._graphs) < GRAPHS and size + sum(taken for _, taken in self._graphs.values()) <= self.room
