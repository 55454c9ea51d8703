"""What is measured: networks, an attack on each, and made-up pictures as its targets.

The pictures are the benchmark's own. The attack gets what a server would see of them; only afterwards, outside of it,
are its images compared with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from benchmarks.speed.networks import CLASSES, NETWORKS, Build, pictures
from gradleak.attack import Composed
from gradleak.core import random as draws
from gradleak.core import registry
from gradleak.core.registry import did_you_mean
from gradleak.diffusion import denoising
from gradleak.engine import Engine, Search, chunk_size, lanes_of
from gradleak.parts.view import TargetView
from gradleak.scenario.client import LocalTraining, observe
from gradleak.scenario.observation import Knowledge, Observation
from gradleak.scenario.task import Batch, Task


@dataclass(frozen=True, eq=False)
class Workload:
    """Targets of one network and the attack on them, one restart each. `truth`: the targets' batches, for scores."""

    network: str
    task: Task
    truth: tuple[Batch, ...]
    seen: tuple[Observation, ...]
    knows: tuple[Knowledge, ...]
    attack: Composed

    @property
    def parameters(self) -> int:
        return sum(value.numel() for value in self.task.weights().values())

    @property
    def examples(self) -> int:
        """Images of one target."""
        return self.seen[0].num_examples

    def scenes(self, lanes: int, engine: Engine, first: int = 0) -> list[TargetView]:
        """Lane i attacks target i, from the first again where there are more lanes than targets."""
        work = self.task.to(engine.where, engine.dtype)
        made = []
        for seen, knows in zip(self.seen, self.knows, strict=True):
            given = {name: value.to(engine.where) for name, value in knows.given.items()}
            made.append(replace(TargetView.of(work, seen, knows), fields=given))
        return [made[lane % len(made)] for lane in range(first, first + lanes)]

    def search(self, lanes: int, engine: Engine, first: int = 0) -> Search:
        """The attack's first stage in lanes `first` onwards, ready to tick. A lane starts alike under every engine."""
        scenes = self.scenes(lanes, engine, first)
        template, lane = lanes_of(scenes, [[draws.key("bench", first + number)] for number in range(lanes)])
        return Search(self.attack.stages[0], template, lane, (lanes, 1), engine, None)

    def chunk(self, engine: Engine) -> int:
        """Lanes that the engine would solve together."""
        with engine.settings():
            return engine.chunk or chunk_size(self.attack.stages, self.scenes(1, engine)[0], engine)


def workload(
    network: str,
    *,
    steps: int = 10_000,
    targets: int = 1,
    examples: int = 1,
    side: int = 32,
    local_steps: int = 1,
    build: Build | None = None,
    attack: str | None = None,
) -> Workload:
    """IG on a classifier, InvG-dm with the client's noise and step on a denoiser. Labels are given.

    `build`: another network than the one of that name. `attack`: another one of a single stage, as on the command line.
    """
    if network not in NETWORKS and build is None:
        raise ValueError(f"There is no network {network!r} to measure.{did_you_mean(network, NETWORKS)}")
    make = NETWORKS[network] if build is None else build
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make((3, side, side))
        y = torch.randint(CLASSES, (targets, examples))
        noise, t = torch.randn(targets, examples, 3, side, side), torch.randint(100, 900, (targets, examples))
    x = pictures(targets * examples, side).reshape(targets, examples, 3, side, side)
    training = LocalTraining(lr=1.0 if local_steps == 1 else 0.01, steps=local_steps)
    denoiser = hasattr(model, "time_layer")
    if denoiser:
        task = denoising(model, like=x[0])
        truth = tuple({"x": 2 * x[i] - 1, "t": t[i], "noise": noise[i]} for i in range(targets))
    else:
        task = Task.supervised(model, nn.functional.cross_entropy, like=(x[0], y[0]))
        truth = tuple({"x": x[i], "y": y[i]} for i in range(targets))
    sent = task.weights()  # one snapshot, which all targets hold
    seen = tuple(observe(task, batch, training, weights=sent, key=f"target {i}") for i, batch in enumerate(truth))
    knows = tuple(
        Knowledge(training=training, given={name: value for name, value in batch.items() if name != "x"})
        for batch in truth
    )
    named = attack or ("invg-dm" if denoiser else "ig")
    chosen = registry.parse("attack", f"{named}{',' if ':' in named else ':'}steps={steps}")
    if not isinstance(chosen, Composed) or len(chosen.stages) != 1 or chosen.stages[0].optimiser.finished is not None:
        raise ValueError(f"{attack} is not one search of a fixed number of steps: steps per second say nothing of it.")
    return Workload(network, task, truth, seen, knows, chosen)
