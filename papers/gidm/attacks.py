"""What the server does with a gradient: DLG-dm, InvG-dm, GIDM's phases, second order; scores, controls, sheets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gidm.clients import GRADIENT, Effort, Setting
from record import lpips_of, summary
from torch import Tensor

import gradleak as gl
from gradleak.core import registry
from gradleak.core.pictures import png, sheet
from gradleak.core.registry import UnknownName
from gradleak.curvature.association import paired_difference
from gradleak.parts.fields import RuleDoesNotApply
from gradleak.scenario.observation import MissingKnowledge
from gradleak.scenario.task import Batch, TaskError

SHOWN = 8  # images in a row of a sheet
CLEAR, RESAMPLED = 40.0, 2000  # dB that count as recovered; draws of the bootstrap


@dataclass(frozen=True)
class Method:
    """An attack by name, with settings for an effort, and what it is granted.

    passes   forward-equivalents of a lane, where they can be told before
    """

    name: str
    settings: Callable[[Effort], Mapping[str, Any]]
    given: tuple[str, ...] = ()
    prior: bool = False
    passes: Callable[[Effort], int | None] = lambda effort: None

    def attack(self, effort: Effort) -> Any:
        return gl.attacks.get(self.name, **self.settings(effort))

    def absent(self) -> str:
        """Why it cannot be run here; nothing: it can."""
        try:
            registry.entry("attack", self.name)
        except UnknownName:
            return f"no attack is registered as {self.name}"
        return ""


def _pixels(effort: Effort) -> int:
    return effort.baseline * effort.per_pixel_step


def _first(effort: Effort) -> int:
    return effort.generative * effort.per_sampled_step


def _on_pixels(**more: Any) -> Callable[[Effort], Mapping[str, Any]]:
    return lambda effort: {"steps": effort.baseline, "lr": effort.rate, "decay": bool(effort.decay), **more}


def _gidm(fine: bool = True, **more: Any) -> Callable[[Effort], Mapping[str, Any]]:
    def settings(effort: Effort) -> Mapping[str, Any]:
        return {
            "steps": effort.generative,
            "fine_steps": effort.fine if fine else 0,
            "sampler_steps": effort.sampler,
            "lr": effort.rate,
            "decay": bool(effort.decay),
            "restarts": effort.restarts if more.get("noise") == "unknown" else 1,
            **more,
        }

    return settings


def _second_order(effort: Effort) -> Mapping[str, Any]:
    """Polishes what a tenth of the baseline's steps found."""
    first = f"dlg-dm:steps={max(20, effort.baseline // 10)},lr={effort.rate},decay={bool(effort.decay)}"
    return {"certify": False, "after": first, **({"steps": 10} if effort.small else {})}


BOTH = ("t", "noise")
KNOWN: dict[str, Method] = {
    "dlg-dm": Method("dlg-dm", lambda e: {**_on_pixels()(e), "restarts": e.starts}, BOTH, passes=_pixels),
    "invg-dm": Method("invg-dm", lambda e: {**_on_pixels()(e), "restarts": e.starts}, BOTH, passes=_pixels),
    "spectral-dm": Method(
        "spectral-dm",
        lambda e: {"steps": e.baseline, "restarts": e.starts, "waves": e.waves},
        BOTH,
        passes=lambda e: _pixels(e) if e.waves == 1 else None,  # by image: "starts"
    ),
    "gidm, phase 1": Method("gidm", _gidm(False, noise="given", t="given"), BOTH, True, _first),
    "gidm": Method("gidm", _gidm(noise="given", t="given"), BOTH, True, lambda effort: effort.budget),
    "second-order": Method("second-order", _second_order, BOTH),
}
UNKNOWN: dict[str, Method] = {
    "dlg-dm": Method("dlg-dm", lambda e: {**_on_pixels(noise="unknown", t="analytic")(e), "restarts": e.restarts}),
    "dlg-dm, x_t and residual": Method(
        "dlg-dm",
        lambda e: {**_on_pixels(noise="unknown", t="analytic", param="xt_q")(e), "restarts": e.restarts},
    ),
    "spectral-dm": Method(
        "spectral-dm",
        lambda e: {"noise": "unknown", "t": "analytic", "steps": e.baseline, "restarts": e.restarts, "waves": e.waves},
    ),
    "span-dm": Method(
        "span-dm",
        lambda e: {"steps": e.baseline, "fine_steps": e.last, "restarts": e.restarts, "waves": e.waves},
    ),
    "dlg-dm, blind": Method("dlg-dm", _on_pixels(noise="random", t="random")),
    "gidm": Method("gidm", _gidm(noise="unknown", t="analytic"), prior=True),
    "gidm, x_t and residual": Method("gidm", _gidm(noise="unknown", t="analytic", param="xt_q"), prior=True),
}
MODES: dict[str, Method] = {
    "known-both": KNOWN["gidm"],
    "unknown-t": Method("gidm", _gidm(noise="given", t="soft"), ("noise",), True),
    "unknown-t, read": Method("gidm", _gidm(noise="given", t="analytic"), ("noise",), True),
    "unknown-eps": Method("gidm", _gidm(noise="unknown", t="given"), ("t",), True),
    "unknown-both": Method("gidm", _gidm(noise="unknown", t="soft"), prior=True),
    "unknown-both, read": UNKNOWN["gidm"],
    "no-t-opt": Method("gidm", _gidm(noise="unknown", t="random"), prior=True),
    "no-eps-opt": Method("gidm", _gidm(noise="random", t="soft"), prior=True),
}


@dataclass(frozen=True, eq=False)
class Shown:
    """Images in the place of a reconstruction, for controls."""

    batch: Batch
    fields: Mapping[str, Any]


@dataclass(eq=False)
class Bench:
    """Attacks on one set of targets at one victim."""

    setting: Setting
    victim: str
    effort: Effort
    truth: Batch
    untrained: bool = False  # the prior too: where only time and memory count
    defence: gl.Defence | None = None  # of the client; the attacker knows it
    cells: dict[str, dict[str, Any]] = field(default_factory=dict)
    pictures: dict[str, Tensor] = field(default_factory=dict)

    def run(self, methods: Mapping[str, Method]) -> None:
        """Every method that is asked for; what cannot be run says why."""
        wanted = [name.strip() for name in self.effort.methods.split(";") if name.strip()]
        known = {**KNOWN, **UNKNOWN, **MODES}
        if unknown := [name for name in wanted if name not in known]:
            raise ValueError(f"--methods has {'; '.join(unknown)}; there are {'; '.join(known)}.")
        chosen = {label: each for label, each in methods.items() if not wanted or label in wanted}
        seen = self.setting.observed(self.effort, self.victim, self.truth, self.defence) if chosen else []
        for label, method in chosen.items():
            self.cells[label] = self._cell(label, method, seen)

    def _cell(self, label: str, method: Method, seen: Sequence[gl.Observation]) -> dict[str, Any]:
        if reason := method.absent():
            return {"skipped": reason}
        effort, task = self.effort, self.setting.task(self.effort)
        prior = task.model if self.untrained else self.setting.prior(effort) if method.prior else None
        knows = gl.Knowledge(
            given={name: self.truth[name] for name in method.given},
            training=GRADIENT,
            defence=self.defence,
            generator=prior if method.prior else None,
        )
        where = effort.engine.where
        if where.type == "cuda":
            torch.cuda.reset_peak_memory_stats(where)
        try:
            attack = method.attack(effort)
            found = attack.run(task, list(seen), knows, seed=effort.seed, engine=effort.engine)
        except (MissingKnowledge, RuleDoesNotApply, TaskError, torch.OutOfMemoryError) as problem:
            return {"skipped": f"{type(problem).__name__}: {str(problem).splitlines()[0]}"}
        held = torch.cuda.max_memory_allocated(where) / 2**30 if where.type == "cuda" else None
        scores = gl.metrics.compare(found, self.truth, lpips=lpips_of(effort))
        self.pictures[label] = task.fields["x"].unit(found.batch["x"][:SHOWN, 0]).clamp(0, 1).cpu()
        match = found.match.gather(1, found.chosen[:, None])[:, 0]
        return {
            **scored(scores),
            **drawn(found.batch, self.truth, scores.assignment),
            "match": summary(match.nan_to_num(torch.inf).clamp_max(1e30)),
            "match_of_each": match.nan_to_num(torch.inf).clamp_max(1e30).tolist(),
            "granted": list(method.given),
            "attack": re.sub(r" at 0x[0-9a-f]+", "", repr(attack))[:400],
            "restarts": found.match.shape[1],
            **{name: found.settings[name] for name in ("starts", "layers", "outside") if name in found.settings},
            "evaluations": found.evaluations,
            "forward_equivalents": method.passes(effort),
            "seconds": found.seconds,
            "memory_gib": held,
        }

    # --- without a gradient -----------------------------------------------------------------------------------------

    def control(self, label: str, images: Tensor) -> None:
        """Scores of images that owe nothing to an attack; (targets, examples, C, H, W) in model-input space."""
        task = self.setting.task(self.effort)
        scores = gl.metrics.compare(Shown({"x": images}, task.fields), self.truth, lpips=lpips_of(self.effort))
        self.cells[label] = scored(scores)
        self.pictures[label] = task.fields["x"].unit(images[:SHOWN, 0]).clamp(0, 1)

    def controls(self) -> None:
        """A random sample of the prior; plain grey, often nearer than that; x_t, which no server sees either."""
        count, examples = self.truth["x"].shape[:2]
        sampled = self.setting.sampled(self.effort, count * examples)
        self.control("prior only", sampled.reshape(self.truth["x"].shape))
        self.control("mid-grey", torch.zeros_like(self.truth["x"]))
        self.control("x_t itself", self.setting.noised(self.effort, self.truth))

    # --- what the cells say -----------------------------------------------------------------------------------------

    @property
    def best(self) -> dict[str, Any]:
        """The attack with most images above 40 dB; of several the one with the highest mean PSNR."""
        done = {label: cell for label, cell in self.cells.items() if "match" in cell}
        if not done:
            return {}
        label = max(done, key=lambda name: (done[name]["above_40"], done[name]["psnr"]["mean"]))
        return {"method": label, **{name: done[label][name] for name in ("psnr", "above_40", "forward_equivalents")}}

    def above(self, control: str) -> dict[str, Any]:
        """By how many dB each attack is above a control, image by image, with a 95 % interval."""
        if control not in self.cells or len(self.truth["x"]) < 2:
            return {}
        blind = self.cells[control]["psnr_of_each"]
        told = {
            label: paired_difference(cell["psnr_of_each"], blind).record()
            for label, cell in self.cells.items()
            if "match" in cell
        }
        best = self.best.get("method")
        return {**told, **({"best": told[best]} if best else {})}

    def phases(self) -> dict[str, float]:
        """dB in the mean: what the second phase adds, and GIDM beside each baseline at equal forward-equivalents."""
        psnr = {label: cell["psnr"]["mean"] for label, cell in self.cells.items() if "match" in cell}
        pairs = {"fine over generative": "gidm, phase 1"}
        pairs |= {f"gidm over {name}": name for name in ("dlg-dm", "invg-dm")}
        return {text: psnr["gidm"] - psnr[other] for text, other in pairs.items() if {"gidm", other} <= psnr.keys()}

    def draw(self, title: str) -> str:
        """The private images, then one row for each method. Returns the file's name; nothing: none is wanted."""
        if not self.effort.pictures or not self.pictures:
            return ""
        real = self.setting.task(self.effort).fields["x"].unit(self.truth["x"][:SHOWN, 0]).cpu()
        return written(self.effort, title, {"private": real, **self.pictures})


def written(effort: Effort, title: str, rows: Mapping[str, Tensor]) -> str:
    home = Path(effort.pictures)
    home.mkdir(parents=True, exist_ok=True)
    path = home / f"{re.sub(r'[^a-z0-9.]+', '-', title.lower()).strip('-')}.png"
    path.write_bytes(png(sheet([(label, list(row)) for label, row in rows.items()])))
    return path.name


def scored(scores: Any) -> dict[str, Any]:
    each = {"psnr": scores.psnr, "ssim": scores.ssim, "mse": scores.mse}
    each |= {} if scores.lpips is None else {"lpips": scores.lpips}
    return {
        **{name: summary(values) for name, values in each.items()},
        "psnr_interval": interval(scores.psnr.mean(1)),
        "psnr_of_each": scores.psnr.mean(1).tolist(),
        **({"psnr_of_examples": scores.psnr.tolist()} if scores.psnr.shape[1] > 1 else {}),
        "above_40": (scores.psnr >= CLEAR).double().mean().item(),
        "diverged": scores.diverged.double().mean().item(),
    }


def interval(values: Tensor) -> list[float] | None:
    """95 % of the mean over targets, by bootstrap; none of one target."""
    values = values.double().flatten().cpu()
    if len(values) < 2:
        return None
    rows = torch.randint(len(values), (RESAMPLED, len(values)), generator=torch.Generator().manual_seed(0))
    means = values[rows].mean(1)
    return [float(means.quantile(share)) for share in (0.025, 0.975)]


def drawn(found: Batch, truth: Batch, assignment: Tensor) -> dict[str, Any]:
    """How often the step was right, by how much it was off, and the cosine of the noise, examples as images matched."""
    told: dict[str, Any] = {}
    rows = torch.arange(len(assignment))[:, None]
    if "t" in found:
        guess = found["t"].argmax(-1) if found["t"].is_floating_point() else found["t"]
        off = (guess.cpu()[rows, assignment.cpu()] - truth["t"]).abs().double()
        told["t"] = {"right": (off == 0).double().mean().item(), "off_by": off.mean().item()}
    if "noise" in found:
        guess = found["noise"].cpu()[rows, assignment.cpu()].flatten(2).double()
        told["noise_cosine"] = torch.cosine_similarity(guess, truth["noise"].flatten(2).double(), dim=2).mean().item()
    return told
