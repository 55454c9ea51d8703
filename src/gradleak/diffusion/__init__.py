"""Federated diffusion models: noise schedules, the objective of a denoiser and its task, and the DDIM sampler.

A client trains a network to predict the noise in a noised image. Each local step uses the image, which is private as in
any task, and the time step t and the noise, which the client draws itself (`Task.drawn`).

schedule.py: how much noise   objective.py: the loss and the task   sampler.py: DDIM   shared.py: draws from the server
adapter.py: networks and schedulers of diffusers, which is optional
"""

from __future__ import annotations

from gradleak.diffusion.adapter import FromDiffusers, schedule_of, target_of
from gradleak.diffusion.objective import Denoiser, Denoising, denoising
from gradleak.diffusion.sampler import ddim
from gradleak.diffusion.schedule import Schedule
from gradleak.diffusion.shared import SharedDraws, handed_out

__all__ = ["Denoiser", "Denoising", "FromDiffusers", "Schedule", "SharedDraws"]
__all__ += ["ddim", "denoising", "handed_out", "schedule_of", "target_of"]
