"""Lanes: how targets and restarts become chunks of one tensor program, stage after stage.

A lane is one (target, restart). Lanes of equal shape are stacked and solved together (`search.py`), as many at a time
as the memory of the device holds. `Engine` says where and in which precision.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gradleak.core import random as randomness
from gradleak.core import tree
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.tree import Params, Tree
from gradleak.engine.layers import LaneLayers
from gradleak.engine.search import EngineError, Search
from gradleak.parts.protocols import Scored
from gradleak.parts.spaces import unknowns_of
from gradleak.parts.stage import Stage
from gradleak.parts.view import TargetView
from gradleak.scenario.observation import stack
from gradleak.scenario.task import Batch, Task, double_backward_safe, float32_products

__all__ = ["Engine", "EngineError", "Search", "Solved", "chunk_size", "lanes_of", "solve"]

# Parameters up to which lanes have weights of their own rather than wait for those with others. A GPU has room for more
# than a few lanes of a small model (the LeNet's rate grows up to 1,024 of them); a CPU has not, and shared weights are
# cheaper. Where the line should lie has not been measured.
OWN_WEIGHTS = {"cuda": 100_000}


@dataclass(frozen=True)
class Engine:
    """How to compute. None of it changes what is computed, beyond rounding.

    device      "auto" takes CUDA where there is one
    precision   "strict" float32; "fast" lets matrix products and convolutions use TF32; "double" float64
    chunk       lanes solved together; None sizes it to the memory of the device
    batched     False runs lane after lane, for models that vmap rejects
    graph       capture the step as a CUDA graph
    snapshots   images of every lane kept on the way to its result, for a report that shows the search
    """

    device: str = "auto"
    precision: str = "strict"
    chunk: int | None = None
    batched: bool = True
    graph: bool = True
    snapshots: int = 0

    def __post_init__(self) -> None:
        if self.precision not in ("strict", "fast", "double"):
            raise ValueError(f"precision must be strict, fast or double; given {self.precision!r}.")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"chunk must be at least 1 lane; given {self.chunk}.")
        if self.snapshots < 0:
            raise ValueError(f"snapshots cannot be negative; given {self.snapshots}.")

    @property
    def where(self) -> torch.device:
        """The device; "auto" is decided here."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise EngineError(f"There is no CUDA device for Engine(device={self.device!r}); use 'cpu' or 'auto'.")
        return torch.device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of everything that is computed with."""
        return torch.float64 if self.precision == "double" else torch.float32

    @contextmanager
    def settings(self) -> Iterator[None]:
        """The precision and the attention kernels this engine asks for; the user's settings come back afterwards."""
        # On a GPU lanes gain severalfold from convolutions as matrix products; a CPU runs grouped ones well enough.
        layers = LaneLayers() if self.batched and self.where.type == "cuda" else nullcontext()
        with float32_products(fast=self.precision == "fast"), double_backward_safe(), layers:
            yield


@dataclass(frozen=True, eq=False)
class Solved:
    """One chunk's result; lanes are target-major."""

    targets: tuple[int, ...]
    lanes: int
    batch: Batch
    unknowns: dict[str, Tensor]  # (lanes, ...): those that are no field of the batch
    objective: Tensor
    match: Tensor
    each: Tensor | None  # (lanes, examples): the match of every example, where it separates
    diverged: Tensor
    noise: Tensor  # (lanes,): the match at the level of the known defence's noise
    trace: dict[str, Tensor]
    snapshots: Tensor  # (lanes, moments, ...): images on the way, where the engine was asked for some
    moments: list[int]  # the steps that they were taken before


def solve(
    stages: Sequence[Stage],
    scenes: Sequence[TargetView],
    keys: Sequence[Sequence[Tensor]],
    keep: str,
    engine: Engine,
    progress: Share | None = None,
    output: str = "last_stage",
    begin: Batch | None = None,
) -> Iterator[Solved]:
    """Run every stage for every target and restart, chunk by chunk. All restarts of a target share a chunk.

    Scenes may wait where they were recorded (`TargetView.waiting`): a chunk's are on the device while it is solved.
    `begin`: a batch for each target, which the first stage finds as if a stage before had left it.
    """
    restarts = len(keys[0])
    largest = max(scenes, key=lambda scene: scene.num_examples)
    lanes = engine.chunk or chunk_size(stages, largest.here(), engine)
    per_chunk = max(1, lanes // restarts)
    buckets = _buckets(scenes, OWN_WEIGHTS.get(engine.where.type, 0))
    chunks = [bucket[start : start + per_chunk] for bucket in buckets for start in range(0, len(bucket), per_chunk)]
    for done, rows in enumerate(chunks):
        report = None if progress is None else lambda share, done=done: progress((done + share) / len(chunks))
        chosen = [scenes[row] for row in rows]
        left = None if begin is None else _left(begin, rows, chosen[0], restarts)
        yield _solve_chunk(stages, chosen, [keys[row] for row in rows], keep, engine, report, tuple(rows), output, left)


def _left(begin: Batch, rows: Sequence[int], scene: TargetView, restarts: int) -> Tree:
    """The batches of these targets, each for all of its restarts: (lanes, examples, ...)."""
    like = next(scene.task.model.parameters())

    def own(value: Tensor) -> Tensor:
        chosen = value[list(rows), : scene.num_examples].repeat_interleave(restarts, dim=0)
        return chosen.to(like.device, like.dtype if value.is_floating_point() else None)

    return {name: own(value) for name, value in begin.items()}


def _buckets(scenes: Sequence[TargetView], own_weights: int = 0) -> list[list[int]]:
    """Lanes that can be stacked: same number of examples, same weights and broadcasts (stored once).

    Models of at most `own_weights` parameters may differ: many rounds of a small one then are lanes of one run.
    """
    buckets: list[list[int]] = []
    for row, scene in enumerate(scenes):
        for bucket in buckets:
            first = scenes[bucket[0]]
            if (
                first.num_examples == scene.num_examples
                and first.fields.keys() == scene.fields.keys()
                and len(first.earlier) == len(scene.earlier)
                and (
                    all(_same_sent(one, other) for one, other in zip(first.rounds, scene.rounds, strict=True))
                    or (tree.size(scene.weights) <= own_weights and _alike(first, scene))
                )
            ):
                bucket.append(row)
                break
        else:
            buckets.append([row])
    return buckets


def _alike(first: TargetView, scene: TargetView) -> bool:
    """Is all that differs between two single rounds a matter of numbers?"""
    return (
        not first.earlier
        and (first.returned_buffers is None) == (scene.returned_buffers is None)
        and tree.shapes(first.weights) == tree.shapes(scene.weights)
        and tree.shapes(first.extras) == tree.shapes(scene.extras)
        and _equal(_buffers(first, running=False), _buffers(scene, running=False))
    )


def _same_sent(first: TargetView, scene: TargetView) -> bool:
    """Did the server send the same in these rounds, and get the same kind of thing back?"""
    return (
        (first.returned_buffers is None) == (scene.returned_buffers is None)
        and _equal(first.weights, scene.weights)
        and _equal(first.extras, scene.extras)
        and _equal(_buffers(first, running=False), _buffers(scene, running=False))
    )


def _equal(a: Tree, b: Tree) -> bool:
    if a.keys() != b.keys():
        return False
    return all(_same(a[name], b[name]) for name in a)


def _same(x: Tensor | Tree, y: Tensor | Tree) -> bool:
    """Of two targets, which may wait on different devices."""
    if x is y:
        return True
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.equal(x, y.to(x.device, x.dtype))
    return isinstance(x, dict) and isinstance(y, dict) and _equal(x, y)


def chunk_size(stages: Sequence[Stage], scene: TargetView, engine: Engine) -> int:
    """Lanes per chunk from the sizes of the model and of the machine: fixed by the configuration, so a run repeats.

    A lane holds a few copies of a gradient and of all activations (forward, backward, and backward of both), for every
    gradient that the prediction takes, and what the optimiser remembers of every unknown, the prediction's included.
    Weights of its own, which only small models have, are not counted.
    """
    equations = len(scene.rounds) * tree.size(scene.update)
    size = torch.finfo(engine.dtype).bits // 8
    always = 2 * equations + 2 * tree.size(_buffers(scene, running=True))
    least = [always + _searched(stage, scene, equations) for stage in stages]
    if max(least) * size > memory_of(engine):
        raise EngineError(
            f"One lane of this attack needs more than {max(least) * size / 2**30:.0f} GB: {scene.num_examples} "
            f"examples, {equations:,} parameters. Is the number of examples right? Attack fewer, or lower what the "
            "optimiser remembers (history of L-BFGS; method=krylov of second-order)."
        )
    per_lane = max(held * size + each for held, each in zip(least, _evaluations(stages, scene, engine), strict=True))
    if engine.where.type == "cuda":
        budget, most = 0.6 * memory_of(engine), 1024
    else:
        budget, most = 2.0e9, 64  # beyond this a CPU gains nothing: the caches are full
    return int(max(1, min(most, budget // per_lane)))


def sized(stages: Sequence[Stage], scene: TargetView, engine: Engine, lanes: int) -> list[Stage]:
    """The stages, with optimisers that evaluate a lane many times at once told how often there is room for."""
    cuda = engine.where.type == "cuda"
    room, most = (0.25 * memory_of(engine), 8192) if cuda else (1.0e9, 128)

    def told(stage: Stage, each: int) -> Stage:
        return replace(stage, optimiser=stage.optimiser.sized(int(max(1, min(most, room // each) // lanes))))

    return [told(stage, each) for stage, each in zip(stages, _evaluations(stages, scene, engine), strict=True)]


def _evaluations(stages: Sequence[Stage], scene: TargetView, engine: Engine) -> list[int]:
    """Bytes of one evaluation in each stage: activations, forward, backward, and backward of both; and gradients."""
    task, blank = scene.task, scene.task.blank(scene.num_examples)
    pass_, gradient = activations(task, scene.weights, blank, scene.buffers), tree.size(scene.update)

    def of_stage(stage: Stage) -> int:
        held = stage.predict.footprint(scene)
        # The pass in work needs its patches and cotangents too; of the others their graphs wait (measured: 4.4 a pass).
        passes = 24 + 8 * (held.passes - 1)
        each = len(scene.rounds) * (passes * pass_ + 6 * held.gradients * gradient)
        each += 4 * stage.space.decoding(scene)  # once for all rounds, with its derivatives and what they need
        return int(each * torch.finfo(engine.dtype).bits // 8)

    return [of_stage(stage) for stage in stages]


def _searched(stage: Stage, scene: TargetView, equations: int) -> int:
    """Numbers that a lane holds of its unknowns: copies, and the optimiser's, or what its start needs where more."""
    unknowns = _unknowns(stage, scene)
    step = stage.optimiser.entries(unknowns, stage.match.equations(equations))
    return 8 * unknowns + max(step, stage.space.entries(scene.task))


def _unknowns(stage: Stage, scene: TargetView) -> int:
    """How many unknowns a lane has. Those of the prediction are made once to be counted: they need no search."""
    of_space = stage.space.unknowns(scene)
    if of_space is None:
        of_space = unknowns_of(scene.task, scene.num_examples)
    source = Draws(randomness.key("count").to(scene.like.device))
    scene = replace(scene, draws=source)
    own = stage.predict.variables(scene if stage.view is None else stage.view(scene), source, None)
    return of_space + tree.size(own)


def memory_of(engine: Engine) -> float:
    """Bytes of the device that this process may have; unlimited where the system does not say.

    Several processes share a device by `torch.cuda.set_per_process_memory_fraction`. What is free at the moment is
    not asked: it would make the sizes of a run depend on its neighbours.
    """
    if engine.where.type == "cuda":
        share = torch.cuda.get_per_process_memory_fraction(engine.where.index)
        return float(share * torch.cuda.get_device_properties(engine.where).total_memory)
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def activations(task: Task, weights: Params, batch: Batch, buffers: Params | None) -> int:
    """Entries of all module outputs of one forward pass."""
    count = 0

    def note(module: Any, _: Any, output: Any) -> None:
        nonlocal count
        if isinstance(output, Tensor) and not any(True for _ in module.children()):
            count += output.numel()

    from torch.nn.modules.module import register_module_forward_hook

    handle = register_module_forward_hook(note)
    try:
        with torch.no_grad():
            task.loss(weights, batch, buffers)
    finally:
        handle.remove()
    return count


def _solve_chunk(
    stages: Sequence[Stage],
    scenes: Sequence[TargetView],
    keys: Sequence[Sequence[Tensor]],
    keep: str,
    engine: Engine,
    progress: Share | None,
    rows: tuple[int, ...],
    output: str,
    before: Tree | None,
) -> Solved:
    groups = (len(scenes), len(keys[0]))
    template, lane = lanes_of(scenes, keys)
    device = template.like.device
    total = sum(stage.optimiser.steps for stage in stages)
    stages = sized(stages, template, engine, groups[0] * groups[1])
    diverged = torch.zeros(groups[0] * groups[1], dtype=torch.bool, device=device)
    trace: list[dict[str, Tensor]] = []
    moments, snapshots = moments_of(total, engine.snapshots), []
    done = 0
    found: Tree = {}
    for number, stage in enumerate(stages):
        share = None if progress is None else lambda step, done=done: progress((done + step) / total)
        search = Search(stage, template, lane, groups, engine, before)
        own = [moment - done for moment in moments if done <= moment < done + stage.optimiser.steps]
        snapshots += search.run(share, own)
        trace.append({**search.trace(), "step": search.trace()["step"] + done})
        best = search.kept(keep)
        diverged |= ~search.alive
        if number + 1 < len(stages):
            before = {**best.at, **search.left(best.at)}
            if stage.carry == "best_of_target":
                before = _best_of_target(before, best.match, groups)
        if output == "best_stage":
            found = _better(found, _output(search, best), number)
        done += stage.optimiser.steps
    unknowns = {"stage": found.pop("stage")} if found else search.unknowns(best.at)
    found = found or _output(search, best)
    return Solved(
        targets=rows,
        lanes=groups[0] * groups[1],
        batch=found["batch"],
        unknowns=unknowns,
        objective=found["objective"],
        match=found["match"],
        each=found.get("each"),
        diverged=diverged.cpu(),
        noise=search.noise(),
        trace={name: torch.cat([part[name].detach().cpu() for part in trace]) for name in trace[0]},
        snapshots=torch.stack(snapshots, dim=1) if snapshots else torch.empty(diverged.shape[0], 0),
        moments=moments,
    )


def moments_of(steps: int, count: int) -> list[int]:
    """Before which steps images are kept: the first, and then ever later, since most happens early."""
    return [min(steps - 1, round((steps + 1) ** (place / count)) - 1) for place in range(count if steps else 0)]


def _output(search: Search, best: Scored) -> Tree:
    """What a lane would return of this stage, all of it at the same iterate."""
    each = search.each_example(best.at)
    return {
        "batch": {name: value.detach().cpu() for name, value in search.decode(best.at).items()},
        "objective": best.objective.detach().cpu(),
        "match": best.match.detach().cpu(),
        **({} if each is None else {"each": each}),
    }


def _better(found: Tree, own: Tree, number: int) -> Tree:
    """Lane by lane, what this stage returns where it matches better than all before it. NaN never wins."""
    own = {**own, "stage": torch.full(own["match"].shape, number)}
    if not found:
        return own
    match = torch.where(found["match"].isnan(), torch.inf, found["match"])
    return tree.where(own["match"] < match, own, found)


def _best_of_target(before: Tree, match: Tensor, groups: tuple[int, int]) -> Tree:
    """Every restart of a target starts the next stage from the target's best lane."""
    match = torch.where(match.isnan(), torch.inf, match).reshape(groups)
    winner = match.argmin(dim=1) + torch.arange(groups[0], device=match.device) * groups[1]
    return tree.map(lambda value: value[winner].repeat_interleave(groups[1], dim=0), before)


def _buffers(scene: TargetView, *, running: bool) -> Params:
    """The buffers proper, which a forward pass may change (one copy per lane), or the frozen parameters (held once)."""
    names = {name for name, _ in scene.task.model.named_buffers()}
    return {name: value for name, value in (scene.buffers or {}).items() if (name in names) == running}


def lanes_of(scenes: Sequence[TargetView], keys: Sequence[Sequence[Tensor]]) -> tuple[TargetView, Tree]:
    """What all lanes share (the template scene), and what each lane has of its own, stacked target-major.

    Of the first target everything moves to the device, of the others only what is their own, name by name.
    """
    first, restarts = scenes[0].here(), len(keys[0])
    like = first.like

    def spread(values: Sequence[Params], dtype: torch.dtype | None = like.dtype) -> Params:
        moved = lambda name: stack([tree.to({name: value[name]}, like.device, dtype) for value in values])[name]  # noqa: E731
        return {name: moved(name).repeat_interleave(restarts, dim=0) for name in values[0]}

    def seen(scenes: Sequence[TargetView]) -> Tree:
        return {
            "update": spread([scene.update for scene in scenes]),
            "buffers": spread([_buffers(scene, running=True) for scene in scenes]),
            "returned_buffers": spread([scene.returned_buffers or {} for scene in scenes]),
        }

    def own(values: Sequence[Params]) -> Params:
        """Nothing where all have the same, which the template holds once."""
        return {} if all(_equal(values[0], value) for value in values[1:]) else spread(values)

    earlier = zip(*(scene.earlier for scene in scenes), strict=True)  # round by round
    lane: Tree = {
        **seen(scenes),
        "weights": own([scene.weights for scene in scenes]),
        "extras": {name: held for name in first.extras if (held := own([scene.extras[name] for scene in scenes]))},
        "earlier": {str(number): seen(rounds) for number, rounds in enumerate(earlier)},
        "fields": spread([scene.fields for scene in scenes], None),
        "key": torch.stack([key for target in keys for key in target]).to(like.device),
    }
    return first, lane
