"""What the server sends and what clients hold: denoisers, each trained once and kept, and targets of few images.

Five clients, all in every round, ten local steps of Adam 2e-4 in batches of 64 from the server's weights; an
exponential average of the global models, which is the prior theta*. Attacked is one gradient of one image (or a few) at
a stated step, at the weights that were sent at a round (`r0`: before training; `trained`: the last).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradleak as gl
from gradleak.audit.private import Stored, examples_of
from gradleak.core import random as draws
from gradleak.core.configuration import digest
from gradleak.data import DataError, Images
from gradleak.diffusion import Denoising, Schedule, ddim, denoising
from gradleak.federation import EMA, Federation, Snapshot, network_of
from gradleak.federation.checkpoints import Checkpoints
from gradleak.federation.samples import Samples
from gradleak.federation.training import Trained
from gradleak.scenario.task import Batch, Task

CLIENTS, LOCAL_STEPS, BATCH_SIZE, RATE, DECAY = 5, 10, 64, 2e-4, 0.99
STEPS = (1, 10, 50, 200, 500, 900)  # of 1,000, counted from 0
VICTIMS = ("r0", "trained")
GRADIENT = gl.LocalTraining(lr=1.0)
THOUSAND = 1000
SMALL_SET = 400  # images of a small run


@dataclass(frozen=True)
class Effort:
    """How much of it is computed, and where. The defaults are for a GPU; `small` is for seconds on a CPU.

    `small`: images of 8 x 8, a U-Net of 8 channels, 100 diffusion steps, whatever the data.
    """

    images: int = 32  # targets
    rounds: int = 400  # of training: 20,000 local steps in all
    generative: int = 500  # iterations of GIDM's first phase
    fine: int = 1500  # and of its second
    sampler: int = 16  # DDIM steps
    steps: int = 0  # iterations of the baselines; 0: as many forward-equivalents as GIDM takes
    restarts: int = 4  # where the noise is unknown
    starts: int = 1  # of attacks on pixels where it is known; `forward_equivalents` are of one
    waves: int = 1  # of `spectral-dm` and `span-dm`: again on what is not solved, from twice as many starts each time
    last: int = 200  # evaluations of the search for the noise, of `span-dm`
    rate: float = 0.1  # of all attacks' Adam; the paper's is 0.01
    decay: int = 1  # it falls to zero by half a cosine; 0, as in the paper: it stays
    methods: str = ""  # only these, separated by semicolons, since names have commas; all if empty
    seed: int = 0
    small: int = 0
    channels: int = 64  # of the U-Net's first level; fewer for a CPU
    lpips: int = 1
    data: str = ""  # an .npz or a name, instead of each row's own
    work: str = "runs/gidm"  # trainings are kept here and used again
    pictures: str = ""  # a folder for sheets of images; none if empty
    precision: str = "strict"
    training_precision: str = ""  # of the trainings; that of everything else if empty
    device: str = "auto"

    @property
    def engine(self) -> gl.Engine:
        return gl.Engine(device=self.device, precision=self.precision)

    @property
    def schedule(self) -> Schedule:
        return Schedule(100, first=1e-3, last=0.2) if self.small else Schedule()

    @property
    def training(self) -> Effort:
        """What a training depends on, and nothing else."""
        names = ("rounds", "seed", "small", "channels", "data", "work", "device")
        precision = self.training_precision or self.precision
        return Effort(precision=precision, **{name: getattr(self, name) for name in names})

    def at(self, t: int) -> int:
        """The step that stands for step t of 1,000."""
        return round(t * self.schedule.steps / THOUSAND)

    # --- what an iteration costs, in forward passes of the victim's network (F) ---------------------------------------

    @property
    def per_pixel_step(self) -> int:
        """Forward, backward with its graph, and through both: 7 F."""
        return 7

    @property
    def per_sampled_step(self) -> int:
        """The same behind a sampler whose steps are run again on the way back: 4 F each."""
        return 4 * self.sampler + 7

    @property
    def budget(self) -> int:
        """F of both phases of GIDM."""
        return self.generative * self.per_sampled_step + self.fine * self.per_pixel_step

    @property
    def baseline(self) -> int:
        """Iterations of an attack on pixels: for the same F, unless given."""
        return self.steps or -(-self.budget // self.per_pixel_step)


@cache
def _images(name: str, split: str, size: int, limit: int | None) -> Images:
    return gl.data.load(name, split=split, size=size, limit=limit)


@dataclass(frozen=True)
class Setting:
    """A data set at a size, what its denoiser predicts, and how many levels that has."""

    data: str = "cifar10"
    size: int = 32
    target: str = "eps"
    levels: int = 3  # so that 32 x 32 is looked at as 8 x 8 on the lowest

    def __str__(self) -> str:
        more = [
            *([] if self.target == "eps" else [self.target]),
            *([] if self.levels == 3 else [f"{self.levels} levels"]),
        ]
        return ", ".join([f"{self.data} {self.size}", *more])

    def images(self, effort: Effort, split: str = "train") -> Images:
        """Bedrooms alone, of the houses: the stand-in for LSUN's."""
        how = (split, 8, SMALL_SET) if effort.small else (split, self.size, None)
        name = effort.data or ("cifar10-mini" if effort.small and self.data == "cifar10" else self.data)
        try:
            held = _images(name, *how)
        except DataError:
            if name != "cifar10":
                raise
            held = _images("cifar10-mini", *how)
        if "bedroom" in held.names:
            rows = (held.y == held.names.index("bedroom")).nonzero().flatten()
            return replace(held[rows], source=f"{held.source}, bedrooms only")
        return held

    def network(self, effort: Effort) -> nn.Module:
        colours, height, width = self.images(effort).x.shape[1:]
        seed = torch.Generator().manual_seed(effort.seed)
        shape, steps = (colours, height, width), effort.schedule.steps
        if effort.small:
            return gl.models.unet(
                shape=shape, base=8, multipliers=(1, 2), blocks=1, groups=4, steps=steps, generator=seed
            )
        widths = (1, 2, 4, 4 if self.size < 128 else 8)[: self.levels if self.size < 128 else 4]
        return gl.models.unet(shape=shape, base=effort.channels, multipliers=widths, steps=steps, generator=seed)

    def task(self, effort: Effort) -> Task:
        return _task(self, replace(effort.training, work=""))

    def examples(self, effort: Effort, split: str = "train") -> Stored:
        held = examples_of(self.images(effort, split), self.task(effort))
        assert isinstance(held, Stored)
        return held

    # --- training ---------------------------------------------------------------------------------------------------

    def federation(self, effort: Effort) -> Federation:
        recipe = gl.LocalTraining(RATE, steps=LOCAL_STEPS, batch_size=BATCH_SIZE, optimiser=gl.rules.Adam())
        recipe = replace(recipe, lr=5e-3, batch_size=16) if effort.small else recipe
        return Federation(CLIENTS, recipe, examples=None, seed=effort.seed, averaging=EMA(DECAY))

    def trained(self, effort: Effort) -> Trained:
        """Trained to the end, or found in the folder of such a training; once in a process."""
        return _trained(self, effort.training)

    def _trained(self, effort: Effort) -> Trained:
        task, data = self.task(effort), self.examples(effort)
        mark = digest([task, data.fingerprint, self.federation(effort)])[:8]
        folder = Path(effort.work) / f"{self.data}-{self.size}-{self.target}-{effort.rounds}rounds-{mark}"
        return self.federation(effort).train(
            task,
            data,
            effort.rounds,
            test=self.examples(effort, "test"),
            every=max(1, effort.rounds // 20),
            checkpoints=sorted({round(share * effort.rounds) for share in (0, 0.05, 0.25, 1)}),
            out=folder,
            engine=effort.engine,
            samples=Samples(steps=8) if effort.small else Samples(),
        )

    def sent(self, effort: Effort, victim: str) -> Snapshot:
        """What the attacked client was sent: raw weights, not the average."""
        if victim == "r0":
            task = self.task(effort)
            return Snapshot(task.weights(), task.buffers())
        return self.trained(effort).at(effort.rounds)

    def prior(self, effort: Effort) -> nn.Module:
        """theta*: the average of the models of the whole training."""
        return _prior(self, effort.training)

    # --- targets ----------------------------------------------------------------------------------------------------

    def truth(self, effort: Effort, steps: Sequence[int], examples: int = 1) -> Batch:
        """Training images of client 0, their noise, and the steps in turn: (targets, examples, ...).

        Drawn here, and kept for the scorer; the client uses them, and the attacker is handed what the row says.
        """
        task, data = self.task(effort), self.examples(effort)
        rows = self.federation(effort).partition(data)[0][: effort.images * examples]
        count = len(rows) // examples
        x = data.batch(rows[: count * examples])["x"]
        t = torch.tensor([steps[row % len(steps)] for row in range(len(x))])
        whole = task.completed({"x": x, "t": t}, draws.Draws(draws.key("gidm", effort.seed, "noise")))
        return {name: value.unflatten(0, (count, examples)) for name, value in whole.items()}

    def observed(
        self, effort: Effort, victim: str, truth: Batch, defence: gl.Defence | None = None
    ) -> list[gl.Observation]:
        """One gradient of each target."""
        task, sent = self.task(effort), self.sent(effort, victim)
        return [
            gl.observe(
                task,
                {name: value[row] for name, value in truth.items()},
                GRADIENT,
                defence,
                weights=dict(sent.weights),
                key=f"target {row}",
                seed=effort.seed,
            )
            for row in range(len(truth["x"]))
        ]

    def described(self, effort: Effort, victim: str = "") -> dict[str, Any]:
        images = self.images(effort)
        told: dict[str, Any] = {
            "data": images.source,
            "training_images": len(images),
            "size": images.x.shape[-1],
            "target": self.target,
            "schedule": repr(effort.schedule),
            "weights": sum(value.numel() for value in self.task(effort).weights().values()),
            "seed": effort.seed,
        }
        if victim:
            rows = [] if victim == "r0" else self.trained(effort).metrics[-1:]
            told |= {"victim": victim, "test_loss": rows[0].get("test_loss") if rows else None}
        return told

    # --- what is known without a gradient ---------------------------------------------------------------------------

    def sampled(self, effort: Effort, count: int) -> Tensor:
        """Images of the prior that have seen nothing of the target: the control of every claim, (count, C, H, W)."""
        task, model = self.task(effort), self.prior(effort).to(effort.engine.where)
        objective = task.objective
        assert isinstance(objective, Denoising)
        shape = (count, *task.fields["x"].shape)
        z = draws.Draws(draws.key("gidm", effort.seed, "control")).normal(shape).to(effort.engine.where)
        with torch.no_grad():
            found = ddim(model, z, objective.schedule, effort.sampler, objective.target)
        return found.clamp(-1, 1).cpu()

    def noised(self, effort: Effort, truth: Batch) -> Tensor:
        """x_t, in the place of an image: (targets, examples, C, H, W)."""
        objective = self.task(effort).objective
        assert isinstance(objective, Denoising)
        flat = {name: value.flatten(0, 1) for name, value in truth.items()}
        return objective.noised(flat).clamp(-1, 1).reshape(truth["x"].shape)


@cache
def _task(setting: Setting, effort: Effort) -> Task:
    images = setting.images(effort)
    return denoising(setting.network(effort).eval(), like=images.x[:1], schedule=effort.schedule, target=setting.target)


@cache
def _trained(setting: Setting, effort: Effort) -> Trained:
    return setting._trained(effort)


@cache
def _prior(setting: Setting, effort: Effort) -> nn.Module:
    folder = setting.trained(effort).folder
    assert folder is not None
    found = Checkpoints(folder).averaged
    assert found is not None
    return network_of(setting.task(effort), found)
