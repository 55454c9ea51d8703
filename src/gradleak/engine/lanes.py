"""Lanes: targets and restarts as chunks of one tensor program, stage after stage.

A lane is one (target, restart). Lanes of equal shape are stacked and solved together (`search.py`), as many at a time
as the device has memory for. `Engine` says where and in which precision.
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
from torch.nn.modules.module import register_module_forward_hook

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
from gradleak.scenario.derivatives import double_backward_safe
from gradleak.scenario.observation import stack
from gradleak.scenario.task import Batch, Task, float32_products

__all__ = ["Engine", "EngineError", "Search", "Solved", "chunk_size", "lanes_of", "solve"]

# Lanes of models with at most so many parameters may differ in their weights, so they share a chunk. A GPU has room for
# many lanes of a small model (the LeNet's rate grows up to 1,024 lanes). On a CPU shared weights are cheaper. The limit
# has not been measured.
OWN_WEIGHTS = {"cuda": 100_000}


@dataclass(frozen=True)
class Engine:
    """How to compute. The result does not depend on it, apart from rounding.

    device      "auto": CUDA if there is a device
    precision   "strict" float32; "fast" lets matrix products and convolutions use TF32; "double" float64
    chunk       lanes solved together; None: as many as the memory of the device holds
    batched     False: lane after lane, for models that vmap rejects
    graph       capture the step as a CUDA graph
    snapshots   images of every lane kept during the search, for the report
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
        """The device that "auto" or a name stands for."""
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise EngineError(f"There is no CUDA device for Engine(device={self.device!r}); use 'cpu' or 'auto'.")
        return torch.device(self.device)

    @property
    def dtype(self) -> torch.dtype:
        """The type that everything is computed in."""
        return torch.float64 if self.precision == "double" else torch.float32

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Sets the precision and what computes each function; restores the user's settings afterwards."""
        # On a GPU convolutions as matrix products are several times faster; a CPU runs grouped ones well enough.
        layers = LaneLayers() if self.batched and self.where.type == "cuda" else nullcontext()
        with float32_products(fast=self.precision == "fast"), double_backward_safe(), layers:
            yield


@dataclass(frozen=True, eq=False)
class Solved:
    """The result of one chunk; all restarts of a target are neighbours."""

    targets: tuple[int, ...]
    lanes: int
    batch: Batch
    unknowns: dict[str, Tensor]  # (lanes, ...): unknowns that are no field of the batch
    objective: Tensor
    match: Tensor
    each: Tensor | None  # (lanes, examples): the match of every example, if it is a mean over examples
    diverged: Tensor
    noise: Tensor  # (lanes,): the match that the noise of the known defence causes
    trace: dict[str, Tensor]
    snapshots: Tensor  # (lanes, moments, ...): images during the search, if the engine keeps some
    moments: list[int]  # the steps before which they were taken


@dataclass(frozen=True, eq=False)
class Chunk:
    """Lanes that are solved together: some targets, each with all of its restarts."""

    targets: tuple[int, ...]  # their numbers
    scenes: Sequence[TargetView]
    keys: Sequence[Sequence[Tensor]]  # the random key of every restart of every target
    before: Tree | None = None  # what the first stage starts from, as if a stage before had left it

    @property
    def groups(self) -> tuple[int, int]:
        """(targets, restarts)"""
        return len(self.scenes), len(self.keys[0])

    @property
    def lanes(self) -> int:
        return math.prod(self.groups)


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

    Scenes may stay where they were recorded (`TargetView.waiting`): they move to the device with their chunk.
    `begin`: a batch for each target, from which the first stage starts.
    """
    restarts = len(keys[0])
    largest = max(scenes, key=lambda scene: scene.num_examples)
    lanes = engine.chunk or chunk_size(stages, largest.here(), engine)
    per_chunk = max(1, lanes // restarts)
    buckets = _buckets(scenes, OWN_WEIGHTS.get(engine.where.type, 0))
    chunks = [bucket[start : start + per_chunk] for bucket in buckets for start in range(0, len(bucket), per_chunk)]
    for done, rows in enumerate(chunks):
        report = None if progress is None else lambda share, done=done: progress((done + share) / len(chunks))
        before = None if begin is None else _lane_batches(begin, rows, scenes[rows[0]], restarts)
        chunk = Chunk(tuple(rows), [scenes[row] for row in rows], [keys[row] for row in rows], before)
        yield _solve_chunk(chunk, stages, keep, output, engine, report)


def _lane_batches(begin: Batch, rows: Sequence[int], scene: TargetView, restarts: int) -> Tree:
    """The batches of these targets, each repeated for all restarts: (lanes, examples, ...)."""
    like = next(scene.task.model.parameters())

    def repeated(value: Tensor) -> Tensor:
        lanes = value[list(rows), : scene.num_examples].repeat_interleave(restarts, dim=0)
        return lanes.to(like.device, like.dtype if value.is_floating_point() else None)

    return {name: repeated(value) for name, value in begin.items()}


def _buckets(scenes: Sequence[TargetView], own_weights: int = 0) -> list[list[int]]:
    """Targets whose lanes can be stacked: same number of examples, same weights and broadcasts (stored once).

    Models of at most `own_weights` parameters may differ in their weights: then many rounds of one share a chunk.
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
    """Do two single rounds differ in values only, not in names or shapes?"""
    return (
        not first.earlier
        and (first.returned_buffers is None) == (scene.returned_buffers is None)
        and tree.shapes(first.weights) == tree.shapes(scene.weights)
        and tree.shapes(first.extras) == tree.shapes(scene.extras)
        and _equal(_buffers(first, running=False), _buffers(scene, running=False))
    )


def _same_sent(first: TargetView, scene: TargetView) -> bool:
    """Did the server send the same values in both rounds, and did both return buffers or neither?"""
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
    """Are two tensors, or trees of them, equal? They may be on different devices."""
    if x is y:
        return True
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.equal(x, y.to(x.device, x.dtype))
    return isinstance(x, dict) and isinstance(y, dict) and _equal(x, y)


def chunk_size(stages: Sequence[Stage], scene: TargetView, engine: Engine) -> int:
    """Lanes per chunk, from the sizes of the model and of the machine alone, so that a run can be repeated.

    For every gradient that the prediction takes, a lane holds a few copies of it and of all activations (forward,
    backward, and backward of both). It also holds the optimiser's memory of every unknown, those of the prediction
    included. Weights of its own are not counted: only small models have them.
    """
    equations = len(scene.rounds) * tree.size(scene.update)
    size = torch.finfo(engine.dtype).bits // 8
    always = 2 * equations + 2 * tree.size(_buffers(scene, running=True))
    entries = [always + _search_entries(stage, scene, equations) for stage in stages]
    if max(entries) * size > memory_of(engine):
        raise EngineError(
            f"One lane of this attack needs more than {max(entries) * size / 2**30:.0f} GB: {scene.num_examples} "
            f"examples, {equations:,} parameters. Is the number of examples right? Attack fewer, or lower what the "
            "optimiser remembers (history of L-BFGS; method=krylov of second-order)."
        )
    evaluations = _evaluation_bytes(stages, scene, engine)
    per_lane = max(count * size + evaluation for count, evaluation in zip(entries, evaluations, strict=True))
    if engine.where.type == "cuda":
        budget, most = 0.6 * memory_of(engine), 1024
    else:
        budget, most = 2.0e9, 64  # more lanes gain nothing on a CPU: its caches are full
    return int(max(1, min(most, budget // per_lane)))


def sized(stages: Sequence[Stage], scene: TargetView, engine: Engine, lanes: int) -> list[Stage]:
    """The stages, with optimisers that know how many evaluations of a lane the device can hold at once."""
    cuda = engine.where.type == "cuda"
    room, most = (0.25 * memory_of(engine), 8192) if cuda else (1.0e9, 128)

    def of_stage(stage: Stage, each: int) -> Stage:
        return replace(stage, optimiser=stage.optimiser.sized(int(max(1, min(most, room // each) // lanes))))

    each = _evaluation_bytes(stages, scene, engine)
    return [of_stage(stage, bytes_) for stage, bytes_ in zip(stages, each, strict=True)]


def _evaluation_bytes(stages: Sequence[Stage], scene: TargetView, engine: Engine) -> list[int]:
    """Bytes of one evaluation in each stage: activations, forward, backward, and backward of both; and gradients."""
    task, blank = scene.task, scene.task.blank(scene.num_examples)
    pass_, gradient = activations(task, scene.weights, blank, scene.buffers), tree.size(scene.update)

    def of_stage(stage: Stage) -> int:
        footprint = stage.predict.footprint(scene)
        # The pass in work holds patches and cotangents; the others hold their graphs only (measured: 4.4 a pass).
        passes = 24 + 8 * (footprint.passes - 1)
        each = len(scene.rounds) * (passes * pass_ + 6 * footprint.gradients * gradient)
        each += 4 * stage.space.decoding(scene)  # once for all rounds, with its derivatives and what they need
        return int(each * torch.finfo(engine.dtype).bits // 8)

    return [of_stage(stage) for stage in stages]


def _search_entries(stage: Stage, scene: TargetView, equations: int) -> int:
    """Numbers that a lane holds for its unknowns: copies, and the peak of a step or of the start."""
    unknowns = _unknowns(stage, scene)
    step = stage.optimiser.entries(unknowns, stage.match.equations(equations))
    return 8 * unknowns + max(step, stage.space.entries(scene.task))


def _unknowns(stage: Stage, scene: TargetView) -> int:
    """How many unknowns a lane has. Those of the prediction are cheap: they are made once to be counted."""
    of_space = stage.space.unknowns(scene)
    if of_space is None:
        of_space = unknowns_of(scene.task, scene.num_examples)
    source = Draws(randomness.key("count").to(scene.like.device))
    scene = replace(scene, draws=source)
    of_prediction = stage.predict.variables(scene if stage.view is None else stage.view(scene), source, None)
    return of_space + tree.size(of_prediction)


def memory_of(engine: Engine) -> float:
    """Bytes of the device that this process may use; infinite if the system does not say.

    `torch.cuda.set_per_process_memory_fraction` divides a device between processes. The memory that is free now does
    not count: a run would depend on its neighbours.
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

    handle = register_module_forward_hook(note)
    try:
        with torch.no_grad():
            task.loss(weights, batch, buffers)
    finally:
        handle.remove()
    return count


def _solve_chunk(
    chunk: Chunk, stages: Sequence[Stage], keep: str, output: str, engine: Engine, progress: Share | None
) -> Solved:
    groups, before = chunk.groups, chunk.before
    template, lane = lanes_of(chunk.scenes, chunk.keys)
    total = sum(stage.optimiser.steps for stage in stages)
    stages = sized(stages, template, engine, chunk.lanes)
    diverged = torch.zeros(chunk.lanes, dtype=torch.bool, device=template.like.device)
    trace: list[dict[str, Tensor]] = []
    moments, snapshots = moments_of(total, engine.snapshots), []
    done = 0
    result: Tree = {}
    for number, stage in enumerate(stages):
        share = None if progress is None else lambda step, done=done: progress((done + step) / total)
        search = Search(stage, template, lane, groups, engine, before)
        of_stage = [moment - done for moment in moments if done <= moment < done + stage.optimiser.steps]
        snapshots += search.run(share, of_stage)
        trace.append({**search.trace(), "step": search.trace()["step"] + done})
        best = search.kept(keep)
        diverged |= ~search.alive
        if number + 1 < len(stages):
            before = {**best.at, **search.left(best.at)}
            if stage.carry == "best_of_target":
                before = _best_of_target(before, best.match, groups)
        if output == "best_stage":
            result = _better(result, _output(search, best), number)
        done += stage.optimiser.steps
    unknowns = {"stage": result.pop("stage")} if result else search.unknowns(best.at)
    result = result or _output(search, best)
    return Solved(
        targets=chunk.targets,
        lanes=chunk.lanes,
        batch=result["batch"],
        unknowns=unknowns,
        objective=result["objective"],
        match=result["match"],
        each=result.get("each"),
        diverged=diverged.cpu(),
        noise=search.noise(),
        trace={name: torch.cat([part[name].detach().cpu() for part in trace]) for name in trace[0]},
        snapshots=torch.stack(snapshots, dim=1) if snapshots else torch.empty(chunk.lanes, 0),
        moments=moments,
    )


def moments_of(steps: int, count: int) -> list[int]:
    """The steps before which images are kept: dense at first, since most happens early."""
    return [min(steps - 1, round((steps + 1) ** (place / count)) - 1) for place in range(count if steps else 0)]


def _output(search: Search, best: Scored) -> Tree:
    """What a lane would return after this stage, all at the same iterate."""
    each = search.each_example(best.at)
    return {
        "batch": {name: value.detach().cpu() for name, value in search.decode(best.at).items()},
        "objective": best.objective.detach().cpu(),
        "match": best.match.detach().cpu(),
        **({} if each is None else {"each": each}),
    }


def _better(best: Tree, result: Tree, number: int) -> Tree:
    """Lane by lane, the result of this stage if it matches better than all before it. NaN never wins."""
    result = {**result, "stage": torch.full(result["match"].shape, number)}
    if not best:
        return result
    match = torch.where(best["match"].isnan(), torch.inf, best["match"])
    return tree.where(result["match"] < match, result, best)


def _best_of_target(before: Tree, match: Tensor, groups: tuple[int, int]) -> Tree:
    """Every restart of a target starts the next stage from the target's best lane."""
    match = torch.where(match.isnan(), torch.inf, match).reshape(groups)
    winner = match.argmin(dim=1) + torch.arange(groups[0], device=match.device) * groups[1]
    return tree.map(lambda value: value[winner].repeat_interleave(groups[1], dim=0), before)


def _buffers(scene: TargetView, *, running: bool) -> Params:
    """`running`: the buffers that a forward pass may change (one copy per lane); else the frozen parameters."""
    names = {name for name, _ in scene.task.model.named_buffers()}
    return {name: value for name, value in (scene.buffers or {}).items() if (name in names) == running}


def lanes_of(scenes: Sequence[TargetView], keys: Sequence[Sequence[Tensor]]) -> tuple[TargetView, Tree]:
    """What all lanes share (the template scene), and what differs between lanes, stacked target by target.

    All tensors of the first target move to the device; of the others only those that differ, name by name.
    """
    first, restarts = scenes[0].here(), len(keys[0])
    like = first.like

    def spread(values: Sequence[Params], dtype: torch.dtype | None = like.dtype) -> Params:
        moved = lambda name: stack([tree.to({name: value[name]}, like.device, dtype) for value in values])[name]  # noqa: E731
        return {name: moved(name).repeat_interleave(restarts, dim=0) for name in values[0]}

    def observed(scenes: Sequence[TargetView]) -> Tree:
        return {
            "update": spread([scene.update for scene in scenes]),
            "buffers": spread([_buffers(scene, running=True) for scene in scenes]),
            "returned_buffers": spread([scene.returned_buffers or {} for scene in scenes]),
        }

    def differing(values: Sequence[Params]) -> Params:
        """One copy per lane; nothing if all lanes have the same values, which the template holds."""
        return {} if all(_equal(values[0], value) for value in values[1:]) else spread(values)

    earlier = zip(*(scene.earlier for scene in scenes), strict=True)  # round by round
    lane: Tree = {
        **observed(scenes),
        "weights": differing([scene.weights for scene in scenes]),
        "extras": {
            name: value for name in first.extras if (value := differing([scene.extras[name] for scene in scenes]))
        },
        "earlier": {str(number): observed(rounds) for number, rounds in enumerate(earlier)},
        "fields": spread([scene.fields for scene in scenes], None),
        "key": torch.stack([key for target in keys for key in target]).to(like.device),
    }
    return first, lane
