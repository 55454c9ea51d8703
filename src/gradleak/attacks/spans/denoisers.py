"""The noised image from the span of a layer's inputs, then the noise: gradleak's own, for denoisers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from gradleak.attack import Attack, Composed, Reconstruction, require, scenes_of
from gradleak.attack.cascade import EscalatingRestarts, matches, part
from gradleak.attacks.gidm import Plan
from gradleak.attacks.spectral import Spectral, SpectralPair, frequencies, pixels
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.core.tree import Tree
from gradleak.engine import Engine
from gradleak.parts.lbfgs import LBFGS
from gradleak.parts.matches import Relative
from gradleak.parts.optimisers import require_positive
from gradleak.parts.predictions import Replay
from gradleak.parts.protocols import Needs, Prior, Space
from gradleak.parts.residual import NoiseShell
from gradleak.parts.row_space import Layer, Outside, Spans, as_sent, spanning_layers
from gradleak.parts.stage import Stage
from gradleak.parts.steps import denoising
from gradleak.parts.view import Step, TargetView
from gradleak.scenario.fit import fits
from gradleak.scenario.observation import Knowledge, Seen, Track, as_targets
from gradleak.scenario.rules import SGD
from gradleak.scenario.task import Batch, Task, TaskError

FIELDS = Plan("unknown", "analytic").fields()
SHELL = 1e-4  # weight of the length of the noise


@dataclass(frozen=True)
class NoiseBehind(Space):
    """The unknown is the noise, by its coefficients, at a known x_t; image and noise together make x_t.

    The noise is only the network's training target there: the gradient is linear in it.

    power   the unit of a coefficient is its frequency to this power: the gradient determines the coarse ones best
    """

    power: float = 0.4

    @property
    def decoded(self) -> frozenset[str]:
        return frozenset({"x", "noise"})

    def variables(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        assert before is not None  # there is no such search without an x_t
        return {"e": torch.zeros_like(before["x"])}

    def constants(self, scene: TargetView, draws: Draws, before: Tree | None) -> Tree:
        assert before is not None
        batch = {**scene.fields, "x": before["x"], "noise": before["noise"]}
        image, noise = denoising(scene.task).schedule.scales(batch["t"], batch["x"])
        return {"x_t": image * batch["x"] + noise * batch["noise"], "noise": batch["noise"]}

    def decode(self, v: Tree, scene: TargetView, now: Step) -> Batch:
        x_t, guess = scene.constants["x_t"], scene.constants["noise"]
        image, noise = denoising(scene.task).schedule.scales(scene.fields["t"], x_t)
        drawn = guess + pixels(frequencies(x_t).pow(self.power) * v["e"])
        return {"x": (x_t - noise * drawn) / image, "noise": drawn, "x_t": x_t}


def _one_by_one(task: Task, targets: Sequence[Track], knows: Knowledge, engine: Engine) -> tuple[list[Track], Batch]:
    """Each example of each target as a target of its own; and their fields, read off or given.

    This is possible since the rows of one example lie in the span of all.
    """
    with engine.settings():
        scenes = scenes_of(task.to(engine.where, engine.dtype), targets, knows, FIELDS)
    given = {name: torch.cat([scene.fields[name] for scene in scenes])[:, None] for name in scenes[0].fields}
    return [example for target in targets for example in target.one_by_one()], given


@named("span-dm", kind="attack", paper="gradleak's own")
@dataclass(frozen=True)
class SpanDM(Attack):
    """A denoiser's x_t from the span of a layer's inputs, which the gradient gives for any noise; then the noise.

    At the lowest resolution of a U-Net a convolution has no more places than outputs, and its gradient gives the span
    of its inputs (`parts.row_space`). The x_t of each example is searched for by itself, with passes through the first
    layers only. Once all x_t are known the gradient is linear in the noise, which is found last, and the images with
    it. Steps are read off. Steps and noise that Knowledge grants are used (noise of several examples only with steps).

    Of two examples at the same step one may be found twice. Where one x_t of a batch is not found, the noise of all is
    wrong, and so are the images: the match stays high. For early layers `outside` tells which x_t it is; for deeper
    ones it may be below `solved` all the same. In a track of several rounds (`Track`) x_t is that of the last.

    steps        evaluations of one start of the search for x_t: passes forward and back up to the last of the layers
    fine_steps   evaluations of the search for the noise
    layers       how many of the layers that give a span are used, from the first on
    start, power, chroma   of the unknowns (`Spectral`)
    restarts, waves, solved   starts of the search for x_t: again, from twice as many, where no match is below `solved`
    """

    steps: int = 300
    fine_steps: int = 200
    layers: int = 1
    start: float = 0.5
    power: float = 0.5
    chroma: float = 0.6
    history: int = 100
    restarts: int = 2
    waves: int = 4
    solved: float = 1e-4

    def __post_init__(self) -> None:
        require_positive(
            self, whole=("steps", "fine_steps", "layers", "history", "restarts", "waves"), real=("solved",)
        )

    @property
    def name(self) -> str:
        return "span-dm"

    @property
    def needs(self) -> Needs:
        return self._behind().needs

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        return self._behind().refuses(task, {*given, "t"})

    def run(
        self,
        task: Task,
        seen: Seen,
        knows: Knowledge = Knowledge(),
        seed: int = 0,
        *,
        engine: Engine | None = None,
        progress: Share | None = None,
    ) -> Reconstruction:
        """`settings` of the result hold the layers, and for each example its starts and its match (`Outside`)."""
        require(self, knows)
        targets = as_targets(seen)
        fits(task, [observation for target in targets for observation in target.observations])
        layers = self._layers(task, targets, knows)
        single, given = _one_by_one(task, targets, knows, engine or Engine())
        granted = replace(knows, given=given)
        first = self._noised(layers).run(task, single, granted, seed, engine=engine, progress=part(progress, 0, 2))
        begin = {name: first.batch[name].unflatten(0, (len(targets), -1)).squeeze(2) for name in ("x", "noise")}
        last = self._image if "noise" in knows.given else self._behind(shell=knows.defence is not None)
        result = last.run(task, targets, knows, seed, engine=engine, progress=part(progress, 1, 2), begin=begin)
        settings = {
            "attack": repr(self),
            "layers": [layer.name for layer in layers],
            "starts": first.settings["starts"],
            "outside": matches(first).tolist(),
        }
        return replace(
            result,
            batch={name: result.batch[name] for name in task.fields},
            candidates={name: result.candidates[name] for name in task.fields},
            settings={**result.settings, **settings},
            seconds=first.seconds + result.seconds,
            evaluations=first.evaluations + result.evaluations,
        )

    def _layers(self, task: Task, targets: Sequence[Track], knows: Knowledge) -> tuple[Layer, ...]:
        """The first layers that give a span, of those whose gradient was sent."""
        denoising(task)
        if knows.training is not None and not isinstance(knows.training.optimiser, SGD):
            raise TaskError(
                f"span-dm reads a gradient; these clients send what {knows.training.optimiser!r} makes of it. "
                "Use dlg-dm with noise='unknown'."
            )
        counts = {target.num_examples for target in targets}
        if len(counts) > 1:
            raise TaskError(
                f"span-dm needs the same number of examples in every target; given {sorted(counts)}. Attack targets of "
                "different sizes separately."
            )
        [examples] = counts
        view, updates = TargetView.of(task, targets[0].last, knows), [target.last.update for target in targets]
        candidates = spanning_layers(task, examples, view.weights, view.buffers)
        layers = [sent for layer in candidates if (sent := as_sent(layer, updates))]
        if not layers:
            raise TaskError(
                f"No layer of this network reveals the span of its inputs (examples in an update: {examples}): all "
                "that see the images have more places than outputs, or see fewer numbers than these have, or their "
                "gradient was not sent. Use spectral-dm with noise='unknown'."
            )
        return tuple(layers[: self.layers])

    def _noised(self, layers: tuple[Layer, ...]) -> EscalatingRestarts:
        """The search for x_t. What x_t does not determine of image and noise stays at the best guess, w = 0."""
        search = Stage(self._pair, Spans(layers), Outside(), (), self._lbfgs(self.steps))
        return EscalatingRestarts(
            Composed(self.name, (search,), FIELDS, restarts=self.restarts), self.waves, self.solved
        )

    def _behind(self, shell: bool = False) -> Composed:
        """The search for the noise behind that x_t.

        shell   prefer noise of the usual length. A defence such as clipping may hide the gradient's length, and with it
                that of the residual. Where the length is known this small weight hardly counts
        """
        priors = (NoiseShell(SHELL),) if shell else ()
        return self._whole(NoiseBehind(), *priors)

    @property
    def _image(self) -> Composed:
        """With given noise x_t is the image already: the search goes on from it, with the whole gradient."""
        return self._whole(self._pair)

    def _whole(self, space: Space, *priors: Prior) -> Composed:
        stage = Stage(space, Replay(), Relative(whole=True), priors, self._lbfgs(self.fine_steps))
        return Composed(self.name, (stage,), FIELDS)

    @property
    def _pair(self) -> SpectralPair:
        return SpectralPair(Spectral(self.start, self.power, self.chroma))

    def _lbfgs(self, steps: int) -> LBFGS:
        return LBFGS(steps=steps, history=self.history)
