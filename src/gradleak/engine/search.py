"""One stage over all lanes of a chunk: the unknowns, the step that moves them, and the best so far.

Parts are written for one lane; `Search.lift` turns a function of one lane into a function of all, under vmap. A `tick`
is one step of every lane. It reads nothing on the host, so that CUDA can capture it once and replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from gradleak.core import listeners, tree
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.registry import did_you_mean
from gradleak.core.tree import Params, Tree
from gradleak.parts.protocols import LaneObjective, Scored
from gradleak.parts.stage import Stage
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.defence import overrides
from gradleak.scenario.task import Batch

if TYPE_CHECKING:
    from gradleak.engine import Engine

TRACE_POINTS = 100
GRAPH_WARMUP = 3  # eager steps before the capture, as torch requires; undone afterwards
MOST_KEPT = 4096  # entries of an unknown in one lane; of a larger one the result keeps the RMS only


class EngineError(RuntimeError):
    """The model cannot be run as lanes; the message says what to change."""


@dataclass(frozen=True, eq=False)
class StageObjective(LaneObjective):
    """The objective of a stage in one lane, at one moment."""

    stage: Stage
    scene: TargetView
    observed: Params
    now: Step

    @property
    def key(self) -> Tensor:
        return super().key if self.scene.draws is None else self.scene.draws.key

    def batch(self, v: Tree) -> Batch:
        return {**self.scene.fields, **self.stage.space.decode(v, self.scene, self.now)}

    def predicted(self, v: Tree) -> Params:
        return self.stage.predict(self.batch(v), v, self.scene, self.now)

    def residual(self, v: Tree) -> Tree:
        batch = self.batch(v)
        predicted = self.stage.predict(batch, v, self.scene, self.now)
        terms: Tree = {}
        for position, prior in enumerate(self.stage.priors):
            terms[str(position)] = prior.terms(batch, v, self.seen_by(position), self.now)
        return {"match": self.stage.match.residual(predicted, self.observed), "priors": terms}

    def seen_by(self, position: int) -> TargetView:
        """The scene, with what the prior at this position computed across restarts."""
        return replace(self.scene, shared=self.scene.shared.get(str(position), {}))

    def value(self, v: Tree) -> Scored:
        batch = self.batch(v)
        match = self.stage.match.distance(self.stage.predict(batch, v, self.scene, self.now), self.observed)
        objective = match
        for position, prior in enumerate(self.stage.priors):
            objective = objective + prior(batch, v, self.seen_by(position), self.now)
        return Scored(v, objective, match)

    def value_and_grad(self, v: Tree) -> tuple[Tree, Scored]:
        def objective(at: Tree) -> tuple[Tensor, Tensor]:
            scored = self.value(at)
            return scored.objective, scored.match

        gradient, (value, match) = grad_and_value(objective, has_aux=True)(v)
        return gradient, Scored(v, value, match)

    def project(self, v: Tree) -> Tree:
        return self.stage.space.project(v, self.scene, self.now)

    def single(self) -> StageObjective:
        """The same objective in float32, for derivatives that need few digits."""
        return replace(self, scene=self.scene.to(torch.float32), observed=tree.to(self.observed, None, torch.float32))


class Search:
    """One stage over all lanes of a chunk: their tensors, the `tick` that advances them, and the best so far."""

    def __init__(
        self,
        stage: Stage,
        template: TargetView,
        lane: Tree,
        groups: tuple[int, int],
        engine: Engine,
        before: Tree | None,
    ) -> None:
        self.stage, self.groups, self.engine = stage, groups, engine
        self.template = template
        device = template.like.device
        self.lane = {**lane, "constants": {}, "shared": {}, "observed": {}}
        self.moving: Tree = {"step": torch.zeros((), device=device)}  # all that a tick changes
        self.static = False  # True once the tick is captured: then `moving` is written in place
        try:
            self._start(before)
        except RuntimeError as problem:
            raise _explained(problem, engine) from problem
        lanes = groups[0] * groups[1]
        infinite = torch.full((lanes,), torch.inf, device=device, dtype=engine.dtype)
        self.moving |= {
            "alive": torch.ones(lanes, dtype=torch.bool, device=device),
            "best": {"at": tree.detach(self.v), "objective": infinite, "match": infinite.clone()},
            "last": {"objective": infinite.clone(), "match": infinite.clone()},
        }
        if self.finished is not None:  # a lane may be finished from the start: then this is its whole curve
            self.moving["last"] = dict(zip(("objective", "match"), self.lift(self.score)(self.v, self.lane)))
        self.every = max(1, stage.optimiser.steps // TRACE_POINTS)
        points = -(-stage.optimiser.steps // self.every)
        self.traced = torch.full((2, points, lanes), torch.nan, device=device, dtype=engine.dtype)

    def _start(self, before: Tree | None) -> None:
        stage = self.stage
        begin = {**self.lane, "before": before or {}}

        def constants(lane: Tree) -> Tree:
            scene = self.scene(lane)
            return stage.space.constants(scene, _draws(scene), lane["before"] or None)

        def variables(lane: Tree) -> Tree:
            scene, before = self.scene(lane), lane["before"] or None
            space = stage.space.variables(scene, _draws(scene), before)
            prediction = stage.predict.variables(scene, _draws(scene), before)
            if both := space.keys() & prediction.keys():
                raise ValueError(f"Space and prediction both name an unknown {', '.join(sorted(both))}; rename one.")
            return {**space, **prediction}

        def observed(lane: Tree) -> Params:
            return stage.match.prepare(stage.predict.target(self.scene(lane)))

        def state(v: Tree, lane: Tree) -> Tree:
            return stage.optimiser.init(self.problem(lane, self.step), v)

        self.lane["constants"] = self.lift(constants)(begin)
        begin["constants"] = self.lane["constants"]
        self.lane["observed"] = self.lift(observed)(self.lane)
        self.moving["v"] = _own(self.lift(variables)(begin))
        optimiser = stage.optimiser
        settings = {"rates": optimiser.rates, "every": optimiser.every, "epsilons": optimiser.epsilons}
        for setting, names in settings.items():
            for name in names:
                if name not in self.v:
                    raise ValueError(f"{setting} names {name!r}, which is not an unknown.{did_you_mean(name, self.v)}")
        if self.step.is_cuda:
            predicted = self.lift(lambda v, lane: self.problem(lane, self.step).predicted(v))(self.v, self.lane)
            self.lane["observed"] = tree.map(_laid_out_like, self.lane["observed"], predicted)
        for position, prior in enumerate(stage.priors):
            if prior.refresh is not None:
                self.lane["shared"][str(position)] = _own(prior.refresh(self.decode(self.v), self.groups))
        self.moving["state"] = _own(self.lift(state)(self.v, self.lane))

    @property
    def v(self) -> Tree:
        return self.moving["v"]

    @property
    def step(self) -> Tensor:
        return self.moving["step"]

    @property
    def finished(self) -> Callable[[Tree], Tensor] | None:
        """Per-lane stop test, if the optimiser defines one."""
        return self.stage.optimiser.finished

    @property
    def alive(self) -> Tensor:
        """(lanes,): was everything finite so far?"""
        return self.moving["alive"]

    # --- one lane ----------------------------------------------------------------------------------------------

    def scene(self, lane: Tree) -> TargetView:
        scene = replace(
            _round(self.template, lane),
            earlier=tuple(_round(each, lane["earlier"][str(i)]) for i, each in enumerate(self.template.earlier)),
            fields=lane["fields"],
            constants=lane["constants"],
            shared=lane["shared"],
            draws=Draws(lane["key"]),
        )
        return scene if self.stage.view is None else self.stage.view(scene)

    def problem(self, lane: Tree, step: Tensor) -> StageObjective:
        return StageObjective(self.stage, self.scene(lane), lane["observed"], Step(step, self.stage.optimiser.steps))

    def advance(self, v: Tree, state: Tree, lane: Tree) -> tuple[Tree, Tree, Tree, Tensor, Tensor]:
        problem = self.problem(lane, self.step)
        v, state, scored = self.stage.optimiser.step(problem, v, state, problem.now)
        return v, state, scored.at, scored.objective, scored.match

    def final(self, v: Tree, state: Tree, lane: Tree) -> Tree:
        """`lane` is for `lift` alone: a stage may have neither unknowns nor state."""
        return self.stage.optimiser.final(v, state)

    def score(self, v: Tree, lane: Tree) -> tuple[Tensor, Tensor]:
        scored = self.problem(lane, self.step).value(v)
        return scored.objective, scored.match

    # --- all lanes ---------------------------------------------------------------------------------------------

    def lift(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of one lane as a function of all lanes."""
        return vmap(function) if self.engine.batched else _one_by_one(function)

    def decode(self, v: Tree) -> Batch:
        return self.lift(lambda v, lane: self.problem(lane, self.step).batch(v))(v, self.lane)

    def tick(self) -> None:
        """One step of every lane. It is captured as it is: no host read, no new shapes."""
        moved = self.moved(self.moving, self.lane)
        if self.static:
            _assign(self.moving, moved)
        else:
            self.moving = moved

    def tick_of(self, rows: Tensor) -> None:
        """One step of these lanes only; the others stay as they are."""
        lanes = {name: value for name, value in self.moving.items() if name != "step"}
        some = {**tree.map(lambda value: value[rows], lanes), "step": self.step}
        moved = self.moved(some, tree.map(lambda value: value[rows], self.lane))
        step = moved.pop("step")
        self.moving = {**tree.map(lambda all_, new: all_.index_copy(0, rows, new), lanes, moved), "step": step}

    def moved(self, moving: Tree, lane: Tree) -> Tree:
        """Everything that a step changes, after the step."""
        best = moving["best"]
        v, state, at, objective, match = self.lift(self.advance)(moving["v"], moving["state"], lane)
        sound = objective.isfinite() & match.isfinite()
        for leaf in tree.leaves(v):
            sound = sound & leaf.reshape(leaf.shape[0], -1).isfinite().all(dim=1)
        better = moving["alive"] & match.isfinite() & (match < best["match"])
        alive = moving["alive"] & sound
        return {
            "step": moving["step"] + 1,
            "v": tree.where(alive, v, moving["v"]),  # a lane that is not finite stays where it was, for good
            "state": state,  # never read again in a frozen lane
            "alive": alive,
            "best": tree.where(better, {"at": at, "objective": objective, "match": match}, best),
            "last": {"objective": objective, "match": match},
        }

    def run(self, progress: Share | None, moments: Sequence[int] = ()) -> list[Tensor]:
        """Make all steps. Returns the images of all lanes before each of the steps in `moments`."""
        steps, advance = self.stage.optimiser.steps, self.tick
        images: list[Tensor] = []
        try:
            possible = self.step.is_cuda and self.engine.batched and self.stage.optimiser.graphable
            if self.engine.graph and possible and steps > 2 * GRAPH_WARMUP:
                advance = self.captured()
            for step in range(steps):
                images += [self.images()] * moments.count(step)
                for position, prior in enumerate(self.stage.priors):
                    if prior.refresh is not None and prior.due(step):
                        _assign(self.lane["shared"][str(position)], prior.refresh(self.decode(self.v), self.groups))
                if self.finished is not None:
                    going = (self.alive & ~self.lift(self.finished)(self.moving["state"])).nonzero()[:, 0]
                    # Such a step reports its end point, others their starting point: every curve begins at the start.
                    self._note(slice(-(-step // self.every), None))
                    if not len(going):
                        break  # all lanes are finished: the rest of the curve is flat
                    advance = self.tick if len(going) == len(self.alive) else partial(self.tick_of, going)
                advance()
                if step % self.every == 0:
                    if self.finished is None:
                        self._note(step // self.every)
                    if progress is not None:
                        listeners.tell(self.moving["last"]["objective"])
                        progress(step + 1)
            if progress is not None:
                progress(steps)
        except RuntimeError as problem:
            raise _explained(problem, self.engine) from problem
        return images + [self.images()] * (len(moments) - len(images))  # if all lanes finished early

    def images(self) -> Tensor:
        """The images of all lanes at this moment, to look at: on the CPU, in half precision."""
        return self.decode(self.v)["x"].detach().to("cpu", torch.float16)

    def _note(self, points: int | slice) -> None:
        """Write the last objective and match at these points of the curves."""
        for curve, name in zip(self.traced, ("objective", "match"), strict=True):
            curve[points] = self.moving["last"][name]

    def captured(self) -> Callable[[], None]:
        """The tick as a CUDA graph. Warm-up steps are real steps, so what they changed is restored."""
        self.static, start = True, tree.detach(self.moving)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(GRAPH_WARMUP):
                self.tick()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.tick()
        _assign(self.moving, start)
        return graph.replay

    def kept(self, keep: str) -> Scored:
        """The iterate that each lane returns: its best by match, or the final one, which is evaluated here."""
        last = self.lift(self.final)(self.v, self.moving["state"], self.lane)
        objective, match = self.lift(self.score)(last, self.lane)
        usable, best = self.alive & match.isfinite(), self.moving["best"]
        better = usable & (match < best["match"]) if keep == "best_match" else usable
        return Scored(**tree.where(better, {"at": last, "objective": objective, "match": match}, best))

    def left(self, v: Tree) -> Tree:
        """What the space leaves to the next stage besides its unknowns, each (lanes, ...)."""
        return tree.detach(self.lift(lambda v, lane: self.stage.space.left(v, self.scene(lane)))(v, self.lane))

    def each_example(self, v: Tree) -> Tensor | None:
        """(lanes, examples): the match of every example, for a match that is a mean over examples."""
        if not self.stage.match.per_example:
            return None

        def residual(v: Tree, lane: Tree) -> Params:
            problem = self.problem(lane, self.step)
            return self.stage.match.residual(problem.predicted(v), problem.observed)

        return tree.like(self.lift(residual)(v, self.lane)).cpu()

    def unknowns(self, v: Tree) -> dict[str, Tensor]:
        """The values of unknowns that are no field of the batch, such as those of the prediction, each (lanes, ...).

        Parts of a nested one are called NAME/PART. One with more than MOST_KEPT entries, such as a control point as
        large as the network, is given by its root mean square only, as NAME_rms.
        """
        values: dict[str, Tensor] = {}
        for name in sorted(v.keys() - self.template.task.fields.keys()):
            parts = _by_path(name, v[name])
            entries = sum(part[0].numel() for part in parts.values())
            if entries > MOST_KEPT:
                norms = [torch.linalg.vector_norm(part.flatten(1), dim=1).double() for part in parts.values()]
                parts = {f"{name}_rms": torch.stack(norms).square().sum(0).div(entries).sqrt()}
            values |= {path: part.detach().cpu() for path, part in parts.items()}
        return values

    def noise(self) -> Tensor:
        """(lanes,): about the match of the truth under the noise of the known defence; 0 without noise."""
        known, match = self.template.knows.defence, self.stage.match
        if known is None or not overrides(known, "noise_variance"):
            return torch.zeros(self.groups[0] * self.groups[1])

        def level(lane: Tree) -> Tensor:
            scene = self.scene(lane)
            noisy = self.stage.predict.disturbed(scene, _draws(scene).child(2))
            if noisy is None:
                return scene.like.new_zeros(())
            if not match.scale_free:
                return match.distance(noisy, lane["observed"])
            # The observation is truth plus noise: |truth|^2 = |observed|^2 - |noise|^2, and their cosine the ratio.
            target = match.compared(self.stage.predict.target(scene), lane["observed"])
            noisy = match.compared(noisy, lane["observed"])
            whole, added = tree.squared_norm(target), tree.squared_norm(tree.subtract(noisy, target))
            return 1 - ((whole - added).clamp_min(0.0) / whole).sqrt()

        return self.lift(level)(self.lane).detach().cpu()

    def trace(self) -> dict[str, Tensor]:
        steps = torch.arange(self.traced.shape[1]) * self.every
        return {"step": steps, "objective": self.traced[0], "match": self.traced[1]}


def _round(template: TargetView, lane: Tree) -> TargetView:
    """A round as one lane sees it: the template, with the tensors in which the lanes differ."""
    return replace(
        template,
        weights=lane.get("weights") or template.weights,
        extras={**template.extras, **lane.get("extras", {})},
        update=lane["update"],
        buffers={**(template.buffers or {}), **lane["buffers"]},
        returned_buffers=lane["returned_buffers"] or None,
    )


def _by_path(name: str, value: Tensor | Tree) -> dict[str, Tensor]:
    """The tensors of an unknown: {name: value}, or of a nested one {name/part: value}."""
    if isinstance(value, Tensor):
        return {name: value}
    return {path: leaf for part, inner in value.items() for path, leaf in _by_path(f"{name}/{part}", inner).items()}


def _draws(scene: TargetView) -> Draws:
    assert scene.draws is not None  # every lane has one
    return scene.draws


def _own(values: Tree) -> Tree:
    """A copy of every tensor: vmap returns expanded views, and captured steps write in place."""
    return tree.map(lambda value: value.detach().clone(memory_format=torch.contiguous_format), values)


def _laid_out_like(value: Tensor, other: Tensor) -> Tensor:
    """The same values in the memory order of `other`: a GPU compares two orders several times more slowly.

    A match that does not compare entry by entry may have another shape, which stays as it is.
    """
    if value.shape != other.shape or value.stride() == other.stride():
        return value
    return torch.empty_like(other).copy_(value)


def _assign(into: Tree, values: Tree) -> None:
    tree.map(lambda target, source: target.copy_(source), into, values)


def _one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """For models that vmap rejects (`Engine.batched`): the same function, lane after lane, results stacked."""

    def run(*arguments: Tree) -> Any:
        lanes = next(leaf for argument in arguments for leaf in tree.leaves(argument)).shape[0]
        results = [
            function(*(tree.map(lambda value, lane=lane: value[lane], argument) for argument in arguments))
            for lane in range(lanes)
        ]
        return _stacked(results)

    return run


def _stacked(results: Sequence[Any]) -> Any:
    first = results[0]
    if isinstance(first, dict):
        return {name: _stacked([result[name] for result in results]) for name in first}
    if isinstance(first, tuple):
        return tuple(_stacked(column) for column in zip(*results, strict=True))
    return torch.stack(list(results))


def _explained(problem: RuntimeError, engine: Engine) -> RuntimeError:
    """The same error with advice, if it comes from the user's model."""
    message = str(problem)
    first = message.partition("\n")[0]
    if isinstance(problem, torch.OutOfMemoryError):
        return EngineError(f"Out of memory with {engine}: pass a smaller Engine(chunk=...). ({first})")
    if not engine.batched or isinstance(problem, EngineError):
        return problem
    if any(
        word in message
        for word in ("vmap", "randomness", "Batching rule", "functorch", "data-dependent", "broadcast shape")
    ):
        return EngineError(
            f"This model cannot run as lanes under vmap: {first} Run task.check() for the cause; "
            "Engine(batched=False) attacks lane after lane instead (dropout must be off: model.eval())."
        )
    return problem
