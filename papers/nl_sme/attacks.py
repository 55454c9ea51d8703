"""What the server does with an update: methods by name, one run of all clients as lanes, what came of it.

A search is watched while it runs: the best images by match so far, at some twenty of its steps, and at the end the
match with and without the free factors. The learning rate of that one run falls with its own number of steps: a run of
fewer steps would be further at the same step than the curve says.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from nl_sme.clients import Effort, Setting
from torch import Tensor

import gradleak as gl
from gradleak.attack import Composed
from gradleak.attacks.sme import frozen
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.core.assignment import cost_matrix, match, pairwise_mse
from gradleak.core.pictures import png, sheet
from gradleak.core.tree import Tree
from gradleak.curvature.association import paired_difference
from gradleak.engine.lanes import Engine, chunk_size, lanes_of, sized
from gradleak.engine.search import Search
from gradleak.parts.matches import Cosine
from gradleak.parts.surrogates import diagnosis, performance_gap
from gradleak.parts.view import TargetView
from gradleak.scenario.task import Batch, Field, Task

LEVELS = (18.0, 20.0, 25.0)  # dB
WATCHED = 20  # points of a curve
SHOWN = 8  # images in a row of a grid
TRANSFORMERS = dict.fromkeys(("vit-sme", "vit"), {"lr": 0.1, "decay": False})  # as SME's configuration has it


def _coarse(setting: Setting, effort: Effort) -> dict[str, Any]:
    return {"coarse": max(2, effort.coarse // 2) if effort.small else effort.coarse, "tv": effort.coarse_tv}


def _dlfa(setting: Setting, effort: Effort) -> dict[str, Any]:
    """Its paper's settings for the kind of data; for characters the prior's weight depends on the batch size."""
    if setting.data == "cifar100":
        return {"preset": "cifar100"}
    return {"preset": "femnist", **({} if setting.batch_size == 5 else {"invariance": 100.0})}


OWN: dict[str, Callable[[Setting, Effort], dict[str, Any]]] = {"coarse-replay": _coarse, "dlfa": _dlfa}


# --- methods ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A registered attack with settings.

    still    its images stay the noise they begin as: the control
    knows    the client's "recipe", a "plain" SGD of the same rate and epochs, or "nothing" of it
    share    of the effort's steps
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    still: bool = False
    knows: str = "recipe"
    share: float = 1.0

    def attack(self, setting: Setting, effort: Effort) -> Any:
        own = OWN[self.name](setting, effort) if self.name in OWN else {}
        given = {"steps": max(1, round(self.share * effort.steps)), **own, **TRANSFORMERS.get(setting.model, {})}
        attack = gl.attacks.get(self.name, **{**given, **dict(self.settings)})
        return frozen(attack) if self.still else attack

    def knowledge(self, setting: Setting, effort: Effort, labels: Tensor | None) -> gl.Knowledge:
        recipe = setting.recipe(effort)
        plain = gl.LocalTraining(recipe.lr, epochs=recipe.epochs, batch_size=recipe.batch_size)
        training = {"recipe": recipe, "plain": plain, "nothing": None}[self.knows]
        return gl.Knowledge(training=training, given={} if labels is None else {"y": labels})


def variant(name: str, **settings: Any) -> Method:
    return Method(name, tuple(settings.items()))


METHODS: dict[str, Method] = {
    **{name: Method(name) for name in ("fedleak", "ig-ms", "sme", "nl-sme", "coarse-replay", "nl-sme-a", "nl-sme-b")},
    "sme, 3 nodes": variant("sme", nodes=3),
    "nl-sme, element": variant("nl-sme", factors="element"),
    "nl-sme, no factors": variant("nl-sme", factors="off"),
    "dlfa": Method("dlfa", share=0.4),
    "coarse-replay, plain SGD assumed": Method("coarse-replay", knows="plain"),
    "coarse-replay, recipe unknown": Method("coarse-replay", knows="nothing"),
}
METHODS |= {
    f"{name}, frozen": replace(METHODS[name], still=True) for name in ("ig-ms", "sme", "nl-sme", "nl-sme, element")
}


def absent(method: Method) -> str:
    """Why it cannot be run; empty where it can."""
    return "" if method.name in gl.attacks.names() else f"no attack {method.name!r} is registered"


def told(attack: Any) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(attack))


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Found:
    """What a run left: images (clients, N, ...), what the search itself says of them, and what it was on the way."""

    batch: Batch
    fields: Mapping[str, Field]
    diverged: Tensor
    match: Tensor  # (clients,)
    seconds: float
    diagnosis: dict[str, Tensor] = field(default_factory=dict)  # each (clients,)
    steps: tuple[int, ...] = ()
    way: tuple[Tensor, ...] = ()  # images at these steps
    matches: tuple[Tensor, ...] = ()


def watched(
    attack: Composed, task: Task, seen: Sequence[gl.Observation], knows: gl.Knowledge, seed: int, engine: Engine
) -> Found:
    """The attack as `Composed.run` runs it, for given labels and one restart, looked at on the way."""
    if attack.restarts != 1 or "y" not in knows.given:
        raise ValueError("Only an attack of one restart with given labels is watched.")
    began = time.perf_counter()
    with engine.settings():
        work = task.to(engine.where, engine.dtype)
        scenes = [
            replace(TargetView.of(work, each, knows), fields={"y": y.to(engine.where)})
            for each, y in zip(seen, knows.given["y"], strict=True)
        ]
        size = engine.chunk or chunk_size(attack.stages, scenes[0], engine)
        pieces = [
            _chunk(
                attack, scenes[start : start + size], [each.key for each in seen[start : start + size]], seed, engine
            )
            for start in range(0, len(scenes), size)
        ]
    whole = pieces[0]
    for piece in pieces[1:]:
        both = lambda name, piece=piece, whole=whole: torch.cat([getattr(whole, name), getattr(piece, name)])  # noqa: E731
        whole = replace(
            whole,
            batch=tree.map(lambda a, b: torch.cat([a, b]), whole.batch, piece.batch),
            diagnosis=tree.map(lambda a, b: torch.cat([a, b]), whole.diagnosis, piece.diagnosis),
            diverged=both("diverged"),
            match=both("match"),
            way=tuple(torch.cat(pair) for pair in zip(whole.way, piece.way, strict=True)),
            matches=tuple(torch.cat(pair) for pair in zip(whole.matches, piece.matches, strict=True)),
        )
    return replace(whole, seconds=time.perf_counter() - began)


def _chunk(attack: Composed, scenes: Sequence[TargetView], keys: Sequence[str], seed: int, engine: Engine) -> Found:
    template, lane = lanes_of(scenes, [[draws.key(key, seed, 0)] for key in keys])
    total = sum(stage.optimiser.steps for stage in attack.stages)
    every, done = max(1, total // WATCHED), 0
    steps, way, matches = [], [], []
    before: Tree | None = None
    diverged = torch.zeros(len(scenes), dtype=torch.bool)
    for stage in sized(attack.stages, template, engine, len(scenes)):
        search = Search(stage, template, lane, (len(scenes), 1), engine, before)

        def look(step: int, search: Search = search, done: int = done) -> None:
            new = not steps or done + step > steps[-1]  # the last step is told twice
            if new and (done + step >= every * len(steps) + 1 or done + step == total):
                best = search.moving["best"]
                steps.append(done + step)
                way.append(search.decode(best["at"])["x"].detach().cpu())
                matches.append(best["match"].detach().cpu().double())

        search.run(look)
        best = search.kept(attack.keep)
        diverged |= ~search.alive.cpu()
        before, done = best.at, done + stage.optimiser.steps

    def judged(v: Tree, lane: Tree) -> Tree:
        problem = search.problem(lane, search.step)
        own = diagnosis(search.stage, v, problem.scene, problem.now)
        # Attacks match in ways of their own: they are compared by the cosine of everything, without factors.
        plain = diagnosis(replace(search.stage, match=Cosine()), v, problem.scene, problem.now)
        return {**own, "l_sim_raw": plain["l_sim_raw"]}

    return Found(
        batch={name: value.detach().cpu() for name, value in search.decode(best.at).items()},
        fields=template.task.fields,
        diverged=diverged,
        match=best.match.detach().cpu().double(),
        seconds=0.0,
        diagnosis=tree.map(lambda value: value.detach().cpu().double(), search.lift(judged)(best.at, search.lane)),
        steps=tuple(steps),
        way=tuple(way),
        matches=tuple(matches),
    )


def plainly(
    attack: Any, task: Task, seen: Sequence[gl.Observation], knows: gl.Knowledge, seed: int, engine: Engine
) -> Found:
    """Any attack, as anybody would run it."""
    found = attack.run(task, list(seen), knows, seed=seed, engine=engine)
    chosen = found.chosen[:, None]
    return Found(
        found.batch,
        task.fields,
        found.diverged.gather(1, chosen)[:, 0],
        found.match.gather(1, chosen)[:, 0],
        found.seconds,
    )


def attacked(method: Method, setting: Setting, effort: Effort, *, labels: bool = True) -> Found:
    seen, attack = setting.observed(effort), method.attack(setting, effort)
    knows = method.knowledge(setting, effort, setting.truth(effort)["y"] if labels else None)
    looked = labels and type(attack).run is Composed.run and attack.restarts == 1
    return (watched if looked else plainly)(attack, setting.task(effort), seen, knows, effort.seed, effort.engine)


# --- what came of it --------------------------------------------------------------------------------------------------


def spread(values: Tensor) -> dict[str, float]:
    """Of one number per client."""
    values = values.double().flatten()
    return {
        "clients": values.numel(),
        "mean": values.mean().item(),
        "std": values.std(correction=min(1, values.numel() - 1)).item(),
        "lowest": values.min().item(),
        "highest": values.max().item(),
    }


def scored(found: Found, truth: Batch) -> tuple[dict[str, Any], Tensor]:
    """Figures per client (means over its images, Hungarian matching by MSE), and the first client's images in order."""
    images = tree.to(truth, "cpu", None)
    scores = gl.metrics.compare(found, images)
    psnr, ssim = scores.psnr.mean(1), scores.ssim.mean(1)
    along = [_psnr(x, images["x"], found.fields["x"]) for x in found.way]
    figures: dict[str, Any] = {
        "psnr": spread(psnr),
        "ssim": spread(ssim),
        "psnr_of_each": psnr.tolist(),
        "ssim_of_each": ssim.tolist(),
        "share_above": {f"{level:g} dB": (scores.psnr > level).double().mean().item() for level in (18, 19, 20)},
        "psnr_of_grey": scores.baselines["mid-grey"]["psnr"].mean().item(),
        "match": spread(found.match.nan_to_num(torch.inf).clamp_max(1e30)),
        **{name: spread(values) for name, values in found.diagnosis.items()},
        "diverged": scores.diverged.double().mean().item(),
        "seconds": found.seconds,
        "seconds_per_client": found.seconds / len(psnr),
    }
    if along:
        means = [values.mean().item() for values in along]
        figures["curve"] = {
            "step": list(found.steps),
            "psnr": means,
            "match": [values.mean().item() for values in found.matches],
        }
        wanted = {f"{level:g} dB": level for level in LEVELS} | {"0.5 dB below the end": means[-1] - 0.5}
        figures["steps_to"] = {
            name: next((step for step, mean in zip(found.steps, means) if mean >= level), None)
            for name, level in wanted.items()
        }
    order = scores.assignment[0][:SHOWN]
    shown = found.fields["x"].unit(found.batch["x"][0][order]).clamp(0, 1)
    return figures, shown


def _psnr(x: Tensor, truth: Tensor, own: Field) -> Tensor:
    """Mean PSNR of each client's images after matching, (clients,): as `compare` has it, without its other scores."""
    guess, real = (gl.metrics.to_unit(own.unit(values.double())) for values in (x, truth))
    pairs = [each[match(cost_matrix(true, each, distance=pairwise_mse))] for each, true in zip(guess, real)]
    return torch.stack([gl.metrics.psnr(each, true).mean() for each, true in zip(pairs, real)])


@cache
def cell(method: Method, setting: Setting, effort: Effort) -> tuple[dict[str, Any], Tensor]:
    """One method on all clients of a setting: its figures, and some of its images."""
    cuda = effort.engine.where.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    found = attacked(method, setting, effort)
    memory = torch.cuda.max_memory_allocated() / 2**30 if cuda else None
    figures, shown = scored(found, setting.truth(effort))
    attack = method.attack(setting, effort)
    return {"attack": told(attack), "knows": method.knows, **figures, "memory_gib": memory}, shown


@dataclass(frozen=True, eq=False)
class Bench:
    """Several methods on the same clients, from the same starts."""

    setting: Setting
    effort: Effort
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    shown: dict[str, Tensor] = field(default_factory=dict)

    def run(self, methods: Mapping[str, Method]) -> None:
        wanted = self.effort.methods.split(";") if self.effort.methods else list(methods)
        for label, method in methods.items():
            if label not in wanted:
                continue
            if reason := absent(method):
                self.cells[label] = {"skipped": reason}
                continue
            figures, self.shown[label] = cell(method, self.setting, self.effort)
            self.cells[label] = dict(figures)

    @property
    def measured(self) -> dict[str, dict[str, Any]]:
        return {label: each for label, each in self.cells.items() if "skipped" not in each}

    def paired(self) -> dict[str, Any]:
        """By how much each method is ahead of those before it, client by client, with 95 % intervals."""
        labels, found = list(self.measured), dict[str, Any]()
        for place, label in enumerate(labels):
            for other in labels[:place]:
                pairs = {
                    score: [self.cells[name][f"{score}_of_each"] for name in (label, other)]
                    for score in ("psnr", "ssim")
                }
                if len(pairs["psnr"][0]) > 1:
                    found[f"{label} over {other}"] = {s: paired_difference(*pair).record() for s, pair in pairs.items()}
        return found

    def gap(self) -> dict[str, Any]:
        """The paper's performance gap of NL-SME and its variants to SME, from the match with and without factors.

        Of frozen images it is that to SME with frozen images: a gap that freedom alone makes.
        """
        found: dict[str, Any] = {}
        for label in self.measured:
            reference = "sme, frozen" if label.endswith(", frozen") else "sme"
            for name in ("l_sim_obj", "l_sim_raw"):
                pair = [self.cells.get(one, {}).get(name, {}).get("mean") for one in (reference, label)]
                if label.startswith("nl-sme") and all(pair):
                    gap, reduction = performance_gap(*pair)
                    found.setdefault(label, {})[name] = {"gap_percent": gap, "reduction": reduction}
        return found

    def draw(self, title: str) -> str | None:
        """A grid of the first client's images: private, then each method. Returns the file's name."""
        if not self.effort.pictures or not self.shown:
            return None
        home = Path(self.effort.pictures)
        home.mkdir(parents=True, exist_ok=True)
        task, batch = self.setting.task(self.effort), self.setting.batches(self.effort)[0]
        real = task.fields["x"].unit(batch["x"][:SHOWN]).cpu()
        rows = [("private", list(real)), *((label, list(row)) for label, row in self.shown.items())]
        path = home / f"{re.sub(r'[^a-z0-9.]+', '-', title.lower())}.png"
        path.write_bytes(png(sheet(rows)))
        return path.name
