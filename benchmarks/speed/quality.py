"""Time to a quality: when does a target's image reach 20 and 30 dB? And many lanes, in chunks, to the end."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.speed.throughput import Row, Show, forget, gigabytes, quiet
from benchmarks.speed.timing import now, synchronise
from benchmarks.speed.workloads import Workload, workload
from gradleak.engine import Engine, moments_of
from gradleak.metrics import psnr
from gradleak.scenario.observation import Knowledge, Observation

LEVELS = (20.0, 30.0)
MOMENTS = 60
DIFFERENT = 8  # pictures behind the targets of `chunks`


@dataclass(frozen=True, eq=False)
class Course:
    """One search from its start to its end, all lanes: what it returned and its images on the way, in [0, 1]."""

    setup: float  # seconds before the first step: unknowns, and on CUDA the capture of a step
    seconds: float  # of all steps
    steps: int
    found: Tensor  # (lanes, examples, C, H, W)
    start: Tensor  # as `found`, in model-input space: where lanes began
    moments: list[int]
    images: list[Tensor]

    @property
    def rate(self) -> float:
        """Lane steps per second."""
        return self.found.shape[0] * self.steps / self.seconds

    @property
    def whole_rate(self) -> float:
        """The same, what came before the first step counted in."""
        return self.found.shape[0] * self.steps / (self.setup + self.seconds)


def course(work: Workload, lanes: int, engine: Engine, moments: int = 0, first: int = 0) -> Course:
    """Run the attack's stage as the engine would. Images on the way are kept, not scored: nothing here has a truth."""
    cuda = engine.where.type == "cuda"
    field, steps = work.task.fields["x"], work.attack.stages[0].optimiser.steps
    when = moments_of(steps, moments)
    with engine.settings():
        began = now(cuda)
        search = work.search(lanes, engine, first)
        start = search.decode(search.v)["x"].detach().cpu()
        graph = cuda and engine.batched and engine.graph and search.stage.optimiser.graphable
        advance = search.captured() if graph else search.tick
        synchronise(cuda)
        ready = now(cuda)
        images: list[Tensor] = []
        kept = 0.0
        for step in range(steps):
            if step in when:
                synchronise(cuda)
                paused = now(cuda)
                images += [search.images().float()] * when.count(step)
                kept += now(cuda) - paused
            advance()
        synchronise(cuda)
        done = now(cuda)
        found = search.decode(search.kept(work.attack.keep).at)["x"].detach().cpu()
    unit = lambda x: field.unit(x).clamp(0, 1)  # noqa: E731
    return Course(ready - began, done - ready - kept, steps, unit(found), start, when, [unit(x) for x in images])


def scores(found: Tensor, work: Workload, first: int = 0) -> Tensor:
    """PSNR of lanes `first` onwards, (lanes,): means over the images of a target."""
    field = work.task.fields["x"]
    lanes = range(first, first + found.shape[0])
    truth = [field.unit(work.truth[lane % len(work.truth)]["x"]) for lane in lanes]
    each = psnr(found.flatten(0, 1).double(), torch.cat(truth).double())
    return each.reshape(found.shape[0], -1).mean(1)


def quality(
    searched: Sequence[tuple[str, str]],
    lanes: int = 8,
    steps: int = 1000,
    precision: str = "strict",
    show: Show = quiet,
    device: str = "auto",
) -> list[Row]:
    """Seconds until a lane's image reaches 20 and 30 dB, of networks and attacks; all lanes are solved together.

    A lane that never does has none; `reached` counts. Between two kept images the later one counts.
    """
    rows: list[Row] = []
    for network, attack in searched:
        work = workload(network, steps=steps, targets=lanes, attack=attack)
        engine = Engine(device, precision)
        count = min(lanes, work.chunk(engine))
        forget()
        ran = course(work, count, engine, MOMENTS)
        curve = torch.stack([scores(images, work) for images in ran.images])  # (moments, lanes)
        final = scores(ran.found, work)
        row: Row = {"network": network, "attack": attack, "lanes": count, "precision": precision, "steps": steps}
        row |= {"setup_seconds": ran.setup, "seconds": ran.seconds, "psnr": final.tolist()}
        for level in LEVELS:
            row |= _reached(ran, curve, final, level)
        rows.append(row)
        show(row)
    return rows


def _reached(ran: Course, curve: Tensor, final: Tensor, level: float) -> Row:
    steps: list[int] = []
    for lane in range(curve.shape[1]):
        above = (curve[:, lane] >= level).nonzero()[:, 0]
        if len(above):
            steps.append(ran.moments[int(above[0])])
        elif final[lane] >= level:
            steps.append(ran.steps)
    middle = statistics.median(steps) if steps else None
    name = f"{level:.0f}_db"
    return {
        f"reached_{name}": len(steps),
        f"steps_to_{name}": middle,
        f"seconds_to_{name}": None if middle is None else ran.setup + ran.seconds * middle / ran.steps,
    }


def chunks(
    network: str = "resnet18",
    targets: int = 1024,
    restarts: int = 1,
    steps: int = 10,
    precision: str = "fast",
    show: Show = quiet,
    device: str = "auto",
) -> list[Row]:
    """Many lanes by the public call, so that the engine takes them apart by itself: do they all come back?

    Every target is an observation with a name of its own; the pictures behind them repeat after DIFFERENT of them.
    """
    from gradleak import attacks

    work = workload(network, steps=steps, targets=min(targets, DIFFERENT))
    engine = Engine(device, precision)
    rows = [target % len(work.seen) for target in range(targets)]
    given = {"y": torch.stack([work.truth[row]["y"] for row in rows])}
    seen: list[Observation] = [_renamed(work.seen[row], f"target {target}") for target, row in enumerate(rows)]
    forget()
    found = attacks.get("ig", steps=steps, restarts=restarts).run(
        work.task, seen, Knowledge(given=given), engine=engine
    )
    row: Row = {
        "network": network,
        "lanes": targets * restarts,
        "targets": targets,
        "chunks": found.settings["chunks"],
        "precision": precision,
        "steps": steps,
        "seconds": found.seconds,
        "finite": int((~found.diverged).sum()),
        "gigabytes": gigabytes(),
    }
    show(row)
    return [row]


def _renamed(seen: Observation, key: str) -> Observation:
    """The same observation of another client. It was checked when it was made, so not a thousand times more."""
    other = copy.copy(seen)
    object.__setattr__(other, "key", key)
    return other
