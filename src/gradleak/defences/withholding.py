"""Withholding: the gradient of one layer stays with the client."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradleak.core.registry import named
from gradleak.core.tree import Params
from gradleak.parts.view import TargetView
from gradleak.scenario.defence import Client, Defence, Upload
from gradleak.scenario.guarantee import Exposure, Guarantee
from gradleak.scenario.task import Task, TaskError


@named("withholding", kind="defence", paper="gradleak's own, after Huang et al., ARES 2025")
@dataclass(frozen=True)
class Withholding(Defence):
    """Send zeros for one layer, and all else unchanged; the server does not train that layer.

    layer   its dotted name, or that of a module around several ("time", the whole time MLP of a denoiser). "": the
            layer that reveals most: the first of a denoiser's time MLP, which holds the step; else the first of all

    Weak: every other linear layer that receives the step, or the image, reveals it too.
    """

    layer: str = ""

    def upload(self, upload: Upload, client: Client) -> Upload:
        names = self.withheld(client.task)
        return upload.map(lambda update: {n: torch.zeros_like(u) if n in names else u for n, u in update.items()})

    def noise_variance(self, scene: TargetView) -> Params:
        names = self.withheld(scene.task)
        return {n: torch.full_like(u, torch.inf if n in names else 0.0) for n, u in scene.update.items()}

    def guarantee(self, exposure: Exposure) -> Guarantee:
        return Guarantee(reason="one layer is not sent, all others are released exactly")

    def withheld(self, task: Task) -> frozenset[str]:
        """The parameters that are not sent."""
        names = [name for name, p in task.model.named_parameters() if p.requires_grad]
        layer = self.layer or getattr(task.model, "time_layer", names[0].rpartition(".")[0])
        withheld = frozenset(name for name in names if name == layer or name.startswith(f"{layer}."))
        if not withheld:
            raise TaskError(f"The model trains no layer {layer!r} to withhold; its parameters are {', '.join(names)}.")
        return withheld
