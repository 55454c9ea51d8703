"""FedGF: FedSAM whose perturbed weights are mixed with a perturbed global model that the server broadcasts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gradleak.core import tree
from gradleak.core.registry import named
from gradleak.core.tree import Params, Tree
from gradleak.defences.fedsam import FedSAM
from gradleak.defences.settings import at_least
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Defence, Upload
from gradleak.scenario.task import Task

PAPER = "Lee and Yoon, Rethinking the Flat Minima Searching in Federated Learning, ICML 2024"
PERTURBED, MIXING = "fedgf_perturbed", "fedgf_mixing"  # what the server broadcasts beside the weights


@named("fedgf", kind="defence", paper=PAPER)
@dataclass(frozen=True)
class FedGF(FedSAM):
    """Descend by the gradient at c v + (1 - c) (w + rho g / ||g||), v the global model, perturbed by the server.

    v = u + rho_g (u' - u) / ||u' - u||, with u the weights that are sent and u' those of the round before: the server
    keeps u' (`advance`) and broadcasts v and c. In round 0 there is no v, and the step is FedSAM's; c = 0 is FedSAM.

    c           a number, or "adaptive": the share of the last `window` rounds (or of all, if fewer) in which the
                clients' models drifted further than `threshold` from the weights they were sent, in the mean: more
                drift, more of the global model
    rho_g       rho, unless given
    threshold   of "adaptive"; the paper's is tuned, and the released script sets none

    In a client's later steps c (v - w) also pulls towards the weights that were sent. The server knows v and c, which
    are `extras` of the observation: A2 replays the step as for FedSAM. A round without a change does not change u'.
    """

    c: float | Literal["adaptive"] = 0.1
    rho_g: float | None = None
    threshold: float | None = None
    window: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rho_g is not None:
            at_least("rho_g", self.rho_g, 0.0)
        at_least("window", self.window, 1, whole=True)
        if self._adaptive:
            if self.threshold is None:
                raise ValueError("c='adaptive' needs a threshold: how far clients may drift in a round.")
            at_least("threshold", self.threshold, 0.0)
        elif isinstance(self.c, (str, bool)) or not 0 <= self.c <= 1:
            raise ValueError(f"c must be from 0 to 1, or 'adaptive'; given {self.c!r}.")
        elif self.threshold is not None:
            raise ValueError(f"threshold={self.threshold} needs c='adaptive'; given c={self.c!r}.")

    @property
    def _adaptive(self) -> bool:
        return self.c == "adaptive"

    # --- the client -------------------------------------------------------------------------------------------------

    def point(self, weights: Params, perturbed: Params, client: Client) -> Params:
        if PERTURBED not in client.extras:  # nothing was broadcast, as before the first round
            return perturbed
        c = client.extras[MIXING]["c"]
        return tree.map(lambda v, w: c * v + (1 - c) * w, client.extras[PERTURBED], perturbed)

    # --- the server -------------------------------------------------------------------------------------------------

    def broadcast(self, weights: Params, server: Tree) -> dict[str, Params]:
        like = tree.like(weights)
        memory: Tree = server.get("memory", {})
        if not memory and server.get("round", 0):
            raise ValueError(
                f"FedGF broadcasts a model made of the weights of the round before, and at round {server['round']} its "
                "server remembers none: these weights come from a training without FedGF, or what its server kept "
                "(Snapshot.server) was not passed on. Train with FedGF, or attack round 0."
            )
        back = tree.subtract(memory["previous"] if memory else weights, weights)
        length = tree.norm(back)
        moved = length > 0
        # The same tensors in every round, so that one captured graph serves all: with c = 0 the step is FedSAM's.
        radius = self.rho if self.rho_g is None else self.rho_g
        perturbed = tree.add(weights, back, radius / torch.where(moved, length, 1.0))
        return {PERTURBED: perturbed, MIXING: {"c": torch.where(moved, self._mixing(memory, like), 0.0)}}

    def advance(self, before: Params, after: Params, uploads: Sequence[Upload], server: Tree) -> Tree:
        memory, like = server["memory"], tree.like(after)
        if not memory:
            start = {"far": like.new_zeros(self.window), "rounds": like.new_zeros(())}
            return {"previous": dict(after), **(start if self._adaptive else {})}
        moved = tree.squared_norm(tree.subtract(after, before)) > 0
        new = {**memory, "previous": tree.where(moved, before, memory["previous"])}
        if self._adaptive and self.threshold is not None and uploads:
            far = _drift(uploads) > self.threshold
            new |= {"far": torch.cat([memory["far"][1:], far.to(like).reshape(1)]), "rounds": memory["rounds"] + 1}
        return new

    def _mixing(self, memory: Tree, like: Tensor) -> Tensor:
        """c of this round."""
        if isinstance(self.c, str):
            if not memory:
                return like.new_zeros(())
            return memory["far"].sum() / memory["rounds"].clamp(1, self.window)
        return like.new_full((), self.c)

    # --- the attacker -----------------------------------------------------------------------------------------------

    def assumed(self, scene: TargetView, task: Task) -> Defence:
        if PERTURBED not in scene.extras:
            raise ValueError(
                "FedGF's clients were sent a perturbed model, and this observation does not hold it: record it with "
                f"Observation(extras=...), {PERTURBED!r} and {MIXING!r} as FedGF.broadcast makes them."
            )
        return self


def _drift(uploads: Sequence[Upload]) -> Tensor:
    """The mean over clients of ||their model - the weights they were sent||."""
    if any("update" not in upload.payload for upload in uploads):
        raise ValueError("FedGF with c='adaptive' measures the clients' updates, which these uploads do not show.")
    return torch.stack([tree.norm(upload.payload["update"]) for upload in uploads]).mean()
