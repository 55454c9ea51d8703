"""Networks and schedulers of diffusers (the extra `diffusion`), adapted to this package."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.diffusion.schedule import Schedule
from gradleak.models.unets import Steps
from gradleak.scenario.task import TaskError


class FromDiffusers(nn.Module):
    """A copy of diffusers' UNet2DModel as a `Denoiser`: it takes embeddings, and its attention is written out.

    The fused attention of diffusers has no double backward and no forward mode.
    """

    time_layer = "unet.time_embedding.linear_1"

    def __init__(self, unet: nn.Module, steps: int = 1000) -> None:
        from diffusers.models.attention_processor import AttnProcessor

        super().__init__()
        config: Any = unet.config
        if config.time_embedding_type != "positional":
            raise TaskError(
                f"The network embeds steps as {config.time_embedding_type!r}: only 'positional', a fixed table of "
                "sines and cosines, can be averaged over steps. Build UNet2DModel(time_embedding_type='positional')."
            )
        if config.class_embed_type is not None or config.num_class_embeds is not None:
            raise TaskError("The network is conditioned on classes; only unconditional denoisers are supported.")
        network: Any = copy.deepcopy(unet)
        device = next(network.parameters()).device
        with torch.no_grad():
            self.steps = Steps(network.time_proj(torch.arange(steps, device=device)))
        network.time_proj = self.entry = _Entry()
        for module in network.modules():
            if hasattr(module, "set_processor"):
                module.set_processor(AttnProcessor())
            if isinstance(module, nn.GroupNorm):
                module.register_forward_pre_hook(_contiguous)
        self.unet = network

    @property
    def table(self) -> Tensor:
        """(T, dim): the embedding of every step, as diffusers computes it, in single precision."""
        return self.steps.table

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        with self.entry.given(self.steps(t, x)):
            return self.unet(x, 0, return_dict=False)[0]


def _contiguous(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """torch's GroupNorm has no forward mode for transposed images, which attention returns."""
    return (inputs[0].contiguous(), *inputs[1:])


class _Entry(nn.Module):
    """Replaces the network's projection of steps: returns a given embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: Tensor | None = None

    def given(self, embedding: Tensor) -> _Entry:
        self.embedding = embedding
        return self

    def __enter__(self) -> None:
        """Holds an embedding for one pass: UNet2DModel's own argument is only one number per example."""

    def __exit__(self, *_: object) -> None:
        self.embedding = None  # keep no tensor of a lane

    def forward(self, _: Tensor) -> Tensor:
        assert self.embedding is not None
        return self.embedding


def schedule_of(scheduler: Any) -> Schedule:
    """The schedule that a scheduler of diffusers (DDPM, DDIM) trains with; an error if this package has no such one."""
    config = scheduler.config
    kinds = {"linear": "linear", "squaredcos_cap_v2": "cosine"}
    known = kinds.get(config.beta_schedule)
    if known is not None:
        schedule = Schedule(config.num_train_timesteps, known, config.beta_start, config.beta_end)
        theirs = scheduler.alphas_cumprod.double().cpu()
        if torch.allclose(schedule.alpha_bar, theirs, rtol=1e-3, atol=1e-6):  # theirs is a product in single precision
            return schedule
    raise TaskError(
        f"{type(scheduler).__name__} with beta_schedule={config.beta_schedule!r}, or with betas of its own, has no "
        f"counterpart here: use {' or '.join(kinds)}, without changes to the betas."
    )


def target_of(scheduler: Any) -> str:
    """What a network trained with this scheduler predicts: "eps" or "v".

    Trainers built on diffusers often leave the errors of v unweighted: `Denoising(weighted=False)`.
    """
    kinds = {"epsilon": "eps", "v_prediction": "v"}
    target = kinds.get(scheduler.config.prediction_type)
    if target is None:
        raise TaskError(f"A prediction of {scheduler.config.prediction_type!r} is not supported: {' or '.join(kinds)}.")
    return target
