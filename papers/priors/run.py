"""Generative priors: what GIAS, GIFD and GGL find with a trained generator, beside IG and the generator alone.

Rows by the first word of their names: `prior` (in distribution, out of distribution, wrong class; an untrained LeNet,
single held-out images, equal gradient evaluations), `defended` (noise, pruning, Soteria, clipping at the published
strengths, known to the attacker), `cost` (64 targets x 4 restarts of GIFD) and `tune` (settings, on images that are in
no table). Rows are written one by one; README.md says more.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import lpips_note, lpips_of, reproduce, summary

import gradleak as gl
from gradleak.core.pictures import png, sheet
from gradleak.curvature.association import paired_difference
from gradleak.data import DataError, Images
from gradleak.generators import DCGAN, read
from gradleak.generators.files import fingerprints
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.task import Batch, Task

EXPECTED = Path(__file__).with_name("expected.json")
CIFAR10 = {"mean": (0.4914672, 0.4822617, 0.4467701), "std": (0.2470322, 0.2434851, 0.2615879)}
GRADIENT = gl.LocalTraining(lr=1.0)
SHOWN = 10  # images in a row of a sheet
TUNED = 8  # images that settings are tried on
PUBLISHED = 1000  # steps of a stage of GIFD
LATENT = 1 / 9  # of GIAS's evaluations go to the latent, as in its 1,000 + 8,000 steps
SMALL = {"images": 3, "evaluations": 24, "restarts": 2, "population": 8, "published": 16, "lanes": 2, "lpips": 0}


@dataclass(frozen=True)
class Effort:
    """How much of it is computed, and where. The defaults are for a GPU; `small` is for seconds on a CPU.

    `small`: images of 8 x 8 and, where no file is given, a small generator with random weights, which shows nothing but
    that the rows run.
    """

    images: int = 50  # targets, from the test split
    evaluations: int = 4800  # gradients of the client's network that each method takes, in a lane
    restarts: int = 4  # of every method; the one that matches best is returned
    population: int = 50  # of CMA-ES and random search
    published: int = 25_000  # evaluations of GGL's own setting, told beside the equal ones
    lanes: int = 64  # targets of the cost row
    stage: int = PUBLISHED  # steps of each of its stages
    generator: str = ""  # file of the generator that knows the client's kind of images
    other: str = ""  # file of one that knows another kind
    init: str = "uniform05"  # of the LeNet: uniform05 (DLG's) or torch
    methods: str = ""  # only these, separated by semicolons; all if empty
    data: str = "cifar10"
    seed: int = 0
    small: int = 0
    lpips: int = 1
    pictures: str = ""  # a folder for sheets of images; none if empty
    precision: str = "strict"
    device: str = "auto"

    @property
    def engine(self) -> gl.Engine:
        return gl.Engine(device=self.device, precision=self.precision)


# --- targets and priors -----------------------------------------------------------------------------------------------


@cache
def images_of(name: str, size: int | None, limit: int | None) -> Images:
    try:
        return gl.data.load(name, split="test", size=size, limit=limit)
    except DataError:
        if name != "cifar10":
            raise
        return gl.data.load("cifar10-mini", split="test", size=size, limit=limit)


def held_out(effort: Effort) -> Images:
    return images_of(effort.data, 8 if effort.small else None, effort.images)


def apart(effort: Effort) -> Images:
    """As many images that are in no table, for whoever chooses settings: from the end of the test split."""
    every, used = images_of(effort.data, 8 if effort.small else None, None), fingerprints(held_out(effort).x)
    free = (~torch.isin(fingerprints(every.x), used)).nonzero().flatten()
    return every[free[-min(TUNED, effort.images) :]]


def task_of(effort: Effort) -> Task:
    """An untrained LeNet; classes as the data has them."""
    images = held_out(effort)
    shape = tuple(images.x.shape[1:])
    seed = torch.Generator().manual_seed(effort.seed)
    model = gl.models.lenet_zhu(shape=shape, classes=len(images.names), init=effort.init, generator=seed)  # type: ignore[arg-type]
    scale = CIFAR10 if shape[0] == 3 else {}
    return gl.Task.supervised(model, nn.functional.cross_entropy, like=(images.x[:1], images.y[:1]), **scale)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Prior:
    """A generator, and what is known of it."""

    network: Any
    told: Mapping[str, Any]


def prior_of(effort: Effort, which: str) -> Prior | str:
    """The generator of a file, or why there is none. `which`: "generator" or "other"."""
    path, images = getattr(effort, which), held_out(effort)
    if path:
        network, card = read(path)
        known = None if card.images is None else torch.isin(fingerprints(images.x), card.images).sum().item()
        told = {"file": Path(path).name, "data": card.data, "split": dict(card.split), "score": dict(card.score)}
        return Prior(network, {**told, "attacked_images_it_was_trained_on": known})
    if not effort.small:
        return f"no file was given: --{which} FILE"
    seed = torch.Generator().manual_seed(effort.seed + (which == "other"))
    network = DCGAN(tuple(images.x.shape[1:]), classes=len(images.names), width=4, generator=seed)  # type: ignore[arg-type]
    return Prior(network, {"data": "none: random weights, for a small run"})


# --- methods ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passes:
    """What one evaluation takes, in forward passes: of the client's network (F) and of the generator (G).

    A step on pixels is forward, backward with its graph, and back through both: 7 F. A latent or a feature in front of
    it: 2 G more (there and back); weights: 3 G, since both inputs and weights are differentiated. A candidate of a
    population is one gradient, 3 F, and 1 G.
    """

    client: int
    generator: int


PIXELS, LATENTS, WEIGHTS, CANDIDATE = Passes(7, 0), Passes(7, 2), Passes(7, 3), Passes(3, 1)


@dataclass(frozen=True)
class Method:
    """An attack by name; its settings for an effort and a generator; and the evaluations of each kind that it takes."""

    name: str
    settings: Callable[[Effort, Any], Mapping[str, Any]]
    spent: Callable[[Effort, Any], Sequence[tuple[int, Passes]]]

    def counted(self, effort: Effort, generator: Any) -> dict[str, Any]:
        """Of one lane."""
        spent = self.spent(effort, generator)
        return {
            "gradient_evaluations": sum(count for count, _ in spent),
            "client_passes": sum(count * passes.client for count, passes in spent),
            "generator_passes": sum(count * passes.generator for count, passes in spent),
            "second_order": any(passes.client == PIXELS.client for _, passes in spent),
        }


def _split(effort: Effort) -> tuple[int, int]:
    first = max(1, round(LATENT * effort.evaluations))
    return first, effort.evaluations - first


def _stages(effort: Effort, generator: Any) -> int:
    return max(1, effort.evaluations // (generator.blocks + 1))


def _populations(effort: Effort, total: int) -> int:
    return max(1, total // effort.population)


def _gias(effort: Effort, generator: Any) -> Mapping[str, Any]:
    first, second = _split(effort)
    return {"steps": first, "weight_steps": second, "restarts": effort.restarts}


def _ggl(search: str, published: bool = False) -> Method:
    def total(effort: Effort) -> int:
        return effort.published if published else effort.evaluations

    def settings(effort: Effort, generator: Any) -> Mapping[str, Any]:
        if search == "adam":
            return {"search": search, "steps": effort.evaluations, "restarts": effort.restarts}
        steps = _populations(effort, total(effort))
        restarts = 1 if published else effort.restarts
        return {"search": search, "steps": steps, "population": effort.population, "restarts": restarts}

    def spent(effort: Effort, generator: Any) -> Sequence[tuple[int, Passes]]:
        if search == "adam":
            return [(effort.evaluations, LATENTS)]
        return [(_populations(effort, total(effort)) * effort.population, CANDIDATE)]

    return Method("ggl", settings, spent)


METHODS: dict[str, Method] = {
    "ig": Method(
        "ig",
        lambda e, g: {"steps": e.evaluations, "restarts": e.restarts},
        lambda e, g: [(e.evaluations, PIXELS)],
    ),
    "gias, latent only": Method(
        "gias",
        lambda e, g: {"steps": e.evaluations, "weight_steps": 0, "restarts": e.restarts},
        lambda e, g: [(e.evaluations, LATENTS)],
    ),
    "gias": Method("gias", _gias, lambda e, g: list(zip(_split(e), (LATENTS, WEIGHTS)))),
    "gifd": Method(
        "gifd",
        lambda e, g: {"steps": _stages(e, g), "features": g.blocks, "restarts": e.restarts},
        lambda e, g: [(_stages(e, g) * (g.blocks + 1), LATENTS)],
    ),
    "ggl": _ggl("cma"),
    "ggl, random": _ggl("random"),
    "ggl, adam": _ggl("adam"),
    "ggl, published": _ggl("cma", published=True),
    "prior-only": Method("prior-only", lambda e, g: {}, lambda e, g: [(0, CANDIDATE)]),
}
COMPARED = (
    "ig",
    "gias, latent only",
    "gias",
    "gifd",
    "ggl",
    "ggl, random",
    "ggl, adam",
    "ggl, published",
    "prior-only",
)
DEFENDED = ("ig", "ggl", "ggl, published", "gifd", "prior-only")
DEFENCES: dict[str, gl.Defence] = {
    "noise 0.01": gl.defences.LocalGaussian(sigma=0.01),
    "noise 0.1": gl.defences.LocalGaussian(sigma=0.1),
    "pruning 20 %": gl.defences.Pruning(keep=0.8),
    "pruning 90 %": gl.defences.Pruning(keep=0.1),
    "soteria 10 %": gl.defences.Soteria(rate=10.0),
    "soteria 80 %": gl.defences.Soteria(rate=80.0),
    "clipping 4": gl.defences.Clipping(norm=4.0),
}


# --- one set of targets -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Bench:
    """Methods on the same targets, defended or not, with one generator."""

    effort: Effort
    prior: Prior
    defence: gl.Defence | None = None
    shift: int = 0
    images: Images | None = None  # others than those of the tables
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    pictures: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        images = self.images or held_out(self.effort)
        self.task = task_of(self.effort)
        x = self.task.fields["x"].model(images.x)
        self.truth: Batch = {"x": x[:, None], "y": images.y[:, None]}
        weights = self.task.weights()
        self.seen = [
            gl.observe(
                self.task,
                {name: value[row] for name, value in self.truth.items()},
                GRADIENT,
                self.defence,
                weights=weights,
                key=f"image {row}",
                seed=self.effort.seed,
            )
            for row in range(len(x))
        ]
        self.pictures["private"] = images.x[:SHOWN]

    def run(self, labels: Sequence[str], methods: Mapping[str, Method] | None = None) -> None:
        wanted = [name.strip() for name in self.effort.methods.split(";") if name.strip()]
        for label in labels:
            if not wanted or label in wanted:
                self.cells[label] = self._cell(label, (methods or METHODS)[label])

    def _cell(self, label: str, method: Method) -> dict[str, Any]:
        """Labels are read off the update, as each attack does; a known defence is used by all of them."""
        effort, generator = self.effort, self.prior.network
        knows = gl.Knowledge(training=GRADIENT, defence=self.defence, generator=generator)
        settings = dict(method.settings(effort, generator))
        if self.shift and method.name != "ig":
            settings["shift"] = self.shift
        where = effort.engine.where
        if where.type == "cuda":
            torch.cuda.reset_peak_memory_stats(where)
        attack = gl.attacks.get(method.name, **settings)
        try:
            found = attack.run(self.task, self.seen, knows, seed=effort.seed, engine=effort.engine)
        except MissingKnowledge as problem:
            return {"skipped": str(problem)}
        scores = gl.metrics.compare(found, self.truth, lpips=lpips_of(effort))
        self.pictures[label] = self.task.fields["x"].unit(found.batch["x"][:SHOWN, 0].cpu()).clamp(0, 1)
        each = {"psnr": scores.psnr, "ssim": scores.ssim, "mse": scores.mse}
        each |= {} if scores.lpips is None else {"lpips": scores.lpips}
        stages = found.unknowns.get("stage")
        return {
            **{name: summary(values) for name, values in each.items()},
            **{f"{name}_of_each": values.mean(1).tolist() for name, values in each.items()},
            **method.counted(effort, generator),
            **({} if stages is None else {"stages": torch.bincount(chosen_of(stages, found)).tolist()}),
            "label_accuracy": (found.batch["y"].cpu() == self.truth["y"]).double().mean().item(),
            "match": summary(found.match.gather(1, found.chosen[:, None])[:, 0].nan_to_num(torch.inf).clamp_max(1e30)),
            "restarts": found.match.shape[1],
            "diverged": found.diverged.double().mean().item(),
            "seconds": found.seconds,
            "memory_gib": torch.cuda.max_memory_allocated(where) / 2**30 if where.type == "cuda" else None,
            "attack": method.name,
            "settings": settings,
        }

    def over(self, first: str, second: str, score: str) -> dict[str, Any]:
        """By how much the first is above the second, image by image, with a 95 % interval."""
        pair = [self.cells.get(label, {}).get(f"{score}_of_each") for label in (first, second)]
        if None in pair or len(self.seen) < 2:
            return {}
        return paired_difference(*pair).record()

    def above_prior(self) -> dict[str, Any]:
        return {label: self.over(label, "prior-only", "psnr") for label in self.cells if label != "prior-only"}

    def described(self) -> dict[str, Any]:
        return {
            "data": held_out(self.effort).source,
            "targets": len(self.seen),
            "network": f"lenet_zhu, init {self.effort.init}, untrained",
            "weights": sum(value.numel() for value in self.task.weights().values()),
            "update_rms": self._rms(),
            "generator": dict(self.prior.told),
            "generator_shape": list(self.prior.network.shape),
            "generator_classes": self.prior.network.classes,
            "defence": None if self.defence is None else repr(self.defence),
            "lpips": lpips_note(self.effort, *self.truth["x"].shape[-2:]),
            "seed": self.effort.seed,
        }

    def _rms(self) -> float:
        """Of the updates as they were sent: what noise of a stated size is to be compared with."""
        return torch.stack([gl.tree.flatten(seen.update).square().mean().sqrt() for seen in self.seen]).mean().item()

    def draw(self, title: str) -> str:
        """The private images, then one row for each method. Returns the file's name; nothing: none is wanted."""
        if not self.effort.pictures:
            return ""
        home = Path(self.effort.pictures)
        home.mkdir(parents=True, exist_ok=True)
        path = home / f"{re.sub(r'[^a-z0-9.]+', '-', title.lower()).strip('-')}.png"
        path.write_bytes(png(sheet([(label, list(row)) for label, row in self.pictures.items()])))
        return path.name


def chosen_of(stages: Tensor, found: Any) -> Tensor:
    """The stage that each target's image comes from."""
    return stages.gather(1, found.chosen[:, None])[:, 0].long()


# --- rows -------------------------------------------------------------------------------------------------------------


class Row(Protocol):
    """One thing that is measured."""

    def measure(self, effort: Effort) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Compared:
    """All methods, with the generator that is meant, undefended."""

    which: str = "generator"
    shift: int = 0

    def measure(self, effort: Effort) -> dict[str, Any]:
        prior = prior_of(effort, self.which)
        if isinstance(prior, str):
            return {"skipped": prior}
        if self.shift and prior.network.classes is None:
            return {"skipped": "the generator has no classes, so none of them is wrong"}
        bench = Bench(effort, prior, shift=self.shift)
        bench.run(COMPARED)
        pairs = {"gifd over gias": ("gifd", "gias"), "gias over ig": ("gias", "ig"), "gifd over ig": ("gifd", "ig")}
        return {
            **bench.described(),
            "cells": bench.cells,
            "paired": {name: bench.over(*pair, "psnr") for name, pair in pairs.items()},
            "above_prior": bench.above_prior(),
            "picture": bench.draw(f"prior {self.which} shift {self.shift} seed {effort.seed}"),
        }


@dataclass(frozen=True)
class Defended:
    """IG, GGL and GIFD, all of which know the defence (A2)."""

    defence: str

    def measure(self, effort: Effort) -> dict[str, Any]:
        prior = prior_of(effort, "generator")
        if isinstance(prior, str):
            return {"skipped": prior}
        bench = Bench(effort, prior, DEFENCES[self.defence])
        bench.run(DEFENDED)
        lower = {f"ig over {name}": bench.over("ig", name, "lpips") for name in ("ggl", "ggl, published", "gifd")}
        return {
            **bench.described(),
            "cells": bench.cells,
            "lpips_paired": lower,
            "above_prior": bench.above_prior(),
            "picture": bench.draw(f"defended {self.defence} seed {effort.seed}"),
        }


@dataclass(frozen=True)
class Tuned:
    """One method with several settings, on images that are in no table."""

    method: str
    settings: Sequence[Mapping[str, Any]]

    def measure(self, effort: Effort) -> dict[str, Any]:
        prior = prior_of(effort, "generator")
        if isinstance(prior, str):
            return {"skipped": prior}
        usual = METHODS[self.method]

        def variant(more: Mapping[str, Any]) -> Method:
            return replace(usual, settings=lambda e, g: {**usual.settings(e, g), **more})

        variants = {" ".join(f"{n} {v}" for n, v in more.items()): variant(more) for more in self.settings}
        bench = Bench(replace(effort, methods=""), prior, images=apart(effort))
        bench.run(tuple(variants), variants)
        return {**bench.described(), "cells": bench.cells, "picture": bench.draw(f"tune {self.method}")}


@dataclass(frozen=True)
class Cost:
    """GIFD with its published steps, on many targets in one run."""

    def measure(self, effort: Effort) -> dict[str, Any]:
        prior = prior_of(effort, "generator")
        if isinstance(prior, str):
            return {"skipped": prior}
        steps = 4 if effort.small else effort.stage
        stages = prior.network.blocks + 1
        own = replace(effort, images=effort.lanes, methods="", pictures="", lpips=0, evaluations=steps * stages)
        bench = Bench(own, prior)
        bench.run(("gifd",))
        cell = bench.cells["gifd"]
        kept = {name: cell[name] for name in ("seconds", "memory_gib", "restarts", "psnr", "skipped") if name in cell}
        whole = {"seconds_as_published": cell["seconds"]} if steps == PUBLISHED and "seconds" in cell else {}
        return {**bench.described(), "steps": steps, "stages": stages, **kept, **whole}


def rows() -> dict[str, Row]:
    """Everything by name, in the order in which it is worth having."""
    found: dict[str, Row] = {
        "prior in distribution": Compared(),
        "cost gifd": Cost(),
    }
    found |= {f"defended {name}": Defended(name) for name in DEFENCES}
    found["prior out of distribution"] = Compared("other")
    found["prior wrong class"] = Compared(shift=1)
    radii, rates = (0.1, 0.25, 0.5, 1.0, 2.0), (0.03, 0.1)
    found["tune gifd"] = Tuned("gifd", [{"radius": radius, "lr": lr} for lr in rates for radius in radii])
    found["tune gias"] = Tuned(
        "gias", [{"lr": lr, "weight_lr": own} for lr in (0.03, 0.1) for own in (3e-4, 1e-3, 3e-3)]
    )
    return found


def told_in_a_line(row: dict[str, Any]) -> str:
    """What a row found, for whoever waits."""
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    if "cells" not in row:
        return f"{row['targets']} targets x {row['restarts']} restarts in {row['seconds']:.1f} s"
    parts = []
    for label, cell in row["cells"].items():
        if "psnr" not in cell:
            parts.append(f"{label} skipped")
            continue
        parts.append(f"{label} {cell['psnr']['mean']:.2f} dB")
        parts[-1] += f" / LPIPS {cell['lpips']['mean']:.3f}" if "lpips" in cell else ""
    return ", ".join(parts)


def main() -> None:
    reproduce(__doc__ or "", Effort, rows(), told_in_a_line, EXPECTED, SMALL)


if __name__ == "__main__":
    main()
