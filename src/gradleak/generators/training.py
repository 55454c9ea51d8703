"""Training a generator on public images: logistic loss, lazy R1, an average of weights, differentiable augmentation.

    discriminator   softplus(D(T(G(z)))) + softplus(-D(T(x))) + every so often (gamma / 2) |grad_x D(T(x))|^2
    generator       softplus(-D(T(G(z))))

T augments (`augmentation`). References: Goodfellow et al., NeurIPS 2014 (the non-saturating loss); Mescheder, Geiger,
Nowozin, ICML 2018 (R1); Karras et al., CVPR 2020 (lazy regularisation, the average of weights). R1 is taken at the
augmented images, which saves a second derivative through T.

Every step draws from a generator seeded by (seed, step): a resumed training needs no random state, and on a CPU with as
many threads it has the very weights of one that was not interrupted. Nothing in a step waits for the device.

The folder: prior.toml, metrics.jsonl, state.safetensors, samples/step-1000.png, samples.png, generator.safetensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradleak import __version__
from gradleak.generators.augmentation import AUGMENTATIONS, augmented, demand
from gradleak.generators.files import Card, fingerprints, parameters, save
from gradleak.generators.recipes import Recipe
from gradleak.generators.score import Cloud, Features, found_features, frechet
from gradleak.generators.stages import Staged
from gradleak.generators.stylegan2 import StyleGAN2
from gradleak.registry import spelled
from gradleak.results.configuration import from_toml, to_toml
from gradleak.results.store import Folder, FolderInUse, by_name, replace_whole, short
from gradleak.task import float32_products
from gradleak.tree import Params

VERSION = 1
KEEP_EVERY = 60.0  # seconds between two states on disk: what a killed process loses at most. Ctrl-C loses nothing.
PRECISIONS = ("strict", "fast", "half")
SUMS = ("generator_loss", "discriminator_loss", "real_logit", "made_logit")
SHOWN = 12  # images in a row of a sheet
RAMP = 0.05  # the average looks back over at most this share of what has been seen
FREE = ("gradleak", "origin.")  # may differ between a training and the one that resumes it


class PriorError(ValueError):
    """A training that cannot be, or that went astray."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C. The message says what is kept and how to go on."""


@dataclass(frozen=True)
class PriorTraining:
    """How a generator is trained.

    recipe       the networks, see `recipes`
    conditional  on the classes of the images
    batch        images in a step, of each sort
    lr           of Adam, of both networks; None: the recipe's
    r1           gamma, at every `r1_every`-th step, where it counts as often
    augment      names of augmentations
    mirror       flip half of the images left to right
    average      images after which a weight counts half in the average that is kept
    seed         of the weights and of every draw
    precision    "strict" float32; "fast" TF32 allowed; "half" bfloat16 products, on CUDA only
    """

    recipe: Recipe
    conditional: bool = False
    batch: int = 64
    lr: float | None = None
    r1: float = 0.1
    r1_every: int = 16
    augment: Sequence[str] = tuple(AUGMENTATIONS)
    mirror: bool = False
    average: int = 50_000
    seed: int = 0
    precision: str = "strict"

    def __post_init__(self) -> None:
        demand(self.augment)
        if self.batch < 2 or self.r1_every < 1 or self.average < 1:
            raise PriorError("batch must be at least 2, r1_every and average at least 1.")
        if not (math.isfinite(self.r1) and self.r1 >= 0) or (self.lr is not None and not 0 < self.lr < math.inf):
            raise PriorError(f"r1 must be at least 0 and lr above 0; given {self.r1} and {self.lr}.")
        if self.precision not in PRECISIONS:
            raise PriorError(f"precision must be {', '.join(PRECISIONS)}; given {self.precision!r}.")

    @property
    def settings(self) -> dict[str, Any]:
        names = ("conditional", "batch", "r1", "r1_every", "mirror", "average", "seed", "precision")
        held = {name: getattr(self, name) for name in names}
        rate = self.recipe.lr if self.lr is None else self.lr
        return {"generator": spelled(self.recipe), "lr": rate, "augment": list(self.augment), **held}


@dataclass(frozen=True, eq=False)
class TrainedPrior:
    """What came of it. `metrics`: one dict per line of metrics.jsonl."""

    generator: Staged
    card: Card
    metrics: list[dict[str, Any]]
    folder: Path
    path: Path

    def table(self) -> str:
        """The lines with a score."""
        name = str(self.card.score.get("name", ""))
        rows = [row for row in self.metrics if row.get("score") is not None]
        lines = [f"{'step':>9}{'images':>12}   {name or 'no score was asked for'}"]
        return "\n".join([*lines, *(f"{row['step']:>9,}{row['images']:>12,}   {row['score']:.2f}" for row in rows)])


def train(
    training: PriorTraining,
    x: Tensor,
    y: Tensor | None = None,
    *,
    classes: int | None = None,
    steps: int,
    most_seconds: float | None = None,
    out: str | Path,
    every: int = 1000,
    report: int = 100,
    score_images: int = 2048,
    features: Features | None = None,
    device: torch.device | str = "cpu",
    half: bool = True,
    card: Card | None = None,
    origin: Mapping[str, Any] | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> TrainedPrior:
    """Train until `steps` steps are done in all. The same call with the same folder goes on where that one stopped.

    x, y          public images, (N, C, H, W) in [0, 1], and their classes where `training.conditional`
    most_seconds  of this call: then it ends before `steps`, with all that a last step has; None: no limit
    every         steps between two sample sheets and scores; the last step has both anyway
    report        steps between two lines of metrics.jsonl
    score_images  made for a score; 0: none
    features      of the score; None: those that are found (`score.found_features`)
    half          keep the generator in half precision
    card          what the file says of the data; its fingerprints, training and score are filled in here
    origin        how the command line found the data
    """
    if steps < 1 or every < 1 or report < 1 or score_images < 0 or score_images == 1:
        raise PriorError("steps, every and report must be at least 1; score_images 0, or at least 2.")
    work = _Work(training, x, y, classes, torch.device(device))
    features = None if not score_images else features or found_features(work.device)
    score = {} if features is None else {"name": features.score, "made": score_images}
    folder, path = _PriorFolder(Path(out)), Path(out) / "generator.safetensors"
    settings = _settings(training, work, score, origin or {})
    card = replace(card or Card(), images=fingerprints(x))
    rows: list[dict[str, Any]] = []
    try:
        held = folder.open(settings)
        if held is not None:
            work.restore(*held)
        if work.step > steps:
            raise PriorError(f"{out} is at step {work.step} already, beyond {steps}. Ask for more steps.")
        rows = folder.metrics(work.step)
        scored = None if features is None else _Scored.of(features, work.x, score_images)
        began, kept_at = time.perf_counter(), time.monotonic()
        spent = rows[-1]["seconds"] if rows else 0.0

        def line(due: bool) -> None:
            row = {"step": work.step, "images": work.step * training.batch, **work.means()}
            if broken := [name for name, value in row.items() if value is None]:
                raise PriorError(
                    f"The training diverged before step {work.step}: {broken[0]} is not finite. Begin again in another "
                    "folder with a lower --lr or a larger --r1."
                )
            if due:
                row["score"] = scored.of_generator(work) if scored else None
                work.show()
                folder.draw(f"samples/step-{work.step}.png", work.sheet())
                folder.draw("samples.png", work.history())
            row["seconds"] = round(spent + time.perf_counter() - began, 3)
            folder.add(row)
            rows.append(row)
            if progress is not None:
                progress(row)

        with _deferred() as stop, work.settled():
            try:
                ended = work.step == steps
                while not ended:
                    work.advance()
                    late = most_seconds is not None and time.perf_counter() - began >= most_seconds
                    ended = work.step == steps or late
                    due = work.step % every == 0 or ended
                    if due or work.step % report == 0:
                        line(due)
                    if time.monotonic() - kept_at >= KEEP_EVERY:
                        folder.keep(*work.state())
                        kept_at = time.monotonic()
                    if stop():
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                if work.whole:  # else weights are between two steps, and the last state on disk is what there is
                    folder.keep(*work.state())
                where = f"{folder.step()} of {steps:,} steps are kept in {out}; the same call goes on"
                raise Interrupted(f"Interrupted: {where}.") from None
            folder.keep(*work.state())
        if isinstance(work.average, StyleGAN2):
            work.average.centre()
        last = [row["score"] for row in rows if row.get("score") is not None]
        told = {} if scored is None or not last else {"value": round(last[-1], 4), **scored.told}
        about = {**training.settings, "steps": work.step, "images": work.step * training.batch}
        about |= {"seconds": rows[-1]["seconds"] if rows else 0.0, "weights": parameters(work.average)}
        card = replace(card, training={**about, "gradleak": __version__, "device": work.where}, score=told)
        save(work.average, path, card, half=half)
    finally:
        folder.close()
    return TrainedPrior(work.average, card, rows, Path(out), path)


def _settings(
    training: PriorTraining, work: _Work, score: Mapping[str, Any], origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that determines the weights."""
    pixels = hashlib.sha256(fingerprints(work.x).numpy().tobytes()).hexdigest()[:16]
    labels = hashlib.sha256(work.y.cpu().numpy().tobytes()).hexdigest()[:16] if work.y is not None else None
    shape = list(work.x.shape[1:])
    data = {"count": len(work.x), "shape": shape, "classes": work.classes, "pixels": pixels, "labels": labels}
    told = {
        "version": VERSION,
        "gradleak": __version__,
        "origin": dict(origin),
        "training": training.settings,
        "data": data,
        "score": dict(score),
    }
    return from_toml(to_toml(told))  # so that it compares equal to what is read back


# --- the steps -------------------------------------------------------------------------------------------------------


class _Work:
    """Networks, optimisers and data on a device, and how far they are."""

    def __init__(
        self, training: PriorTraining, x: Tensor, y: Tensor | None, classes: int | None, device: torch.device
    ) -> None:
        if x.dim() != 4 or x.shape[1] not in (1, 3) or len(x) < 2:
            raise PriorError(f"Images must be (at least 2, 1 or 3, height, width); given {tuple(x.shape)}.")
        if training.conditional and (y is None or classes is None or len(y) != len(x)):
            raise PriorError("A class-conditional generator needs the class of every image and how many there are.")
        if training.precision == "half" and device.type != "cuda":
            raise PriorError(f"precision half is for CUDA; the device is {device}. Use strict.")
        self.training, self.device, self.step, self.whole = training, device, 0, True
        self.classes = classes if training.conditional else None
        shape = (int(x.shape[1]), int(x.shape[2]), int(x.shape[3]))
        seed = torch.Generator().manual_seed(training.seed)
        layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        made = training.recipe.generator(shape, self.classes, seed)
        judge = training.recipe.discriminator(shape, self.classes, seed)
        copy = training.recipe.generator(shape, self.classes, torch.Generator().manual_seed(0))
        copy.load_state_dict(made.state_dict())
        self.layout = layout
        self.generator: Staged = made.to(device, memory_format=layout).train()  # type: ignore[call-overload]
        self.discriminator: nn.Module = judge.to(device, memory_format=layout).train()  # type: ignore[call-overload]
        self.average: Staged = copy.to(device, memory_format=layout).eval().requires_grad_(False)  # type: ignore[call-overload]
        rate = training.recipe.lr if training.lr is None else training.lr
        adam = {"lr": rate, "betas": training.recipe.betas, "eps": 1e-8, "fused": device.type == "cuda"}
        self.of_generator = torch.optim.Adam(self.generator.parameters(), **adam)  # type: ignore[arg-type]
        self.of_discriminator = torch.optim.Adam(self.discriminator.parameters(), **adam)  # type: ignore[arg-type]
        self.x = x.to(device, torch.float32)
        self.y = None if self.classes is None or y is None else y.to(device)
        now = self.generator.state_dict()
        floats = [(mean, now[name]) for name, mean in self.average.state_dict().items() if mean.is_floating_point()]
        self.pairs = [mean for mean, _ in floats], [value for _, value in floats]
        self.sums = torch.zeros(len(SUMS) + 1, dtype=torch.float64, device=device)
        self.shown: list[int] = []
        self.rows: list[Tensor] = []  # of what was shown, 8 bits

    @property
    def where(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Precision and the choice of kernels; the user's settings come back afterwards."""
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = self.device.type == "cuda"
        try:
            with float32_products(fast=self.training.precision != "strict"):
                yield
        finally:
            torch.backends.cudnn.benchmark = before

    def advance(self) -> None:
        """One step of the discriminator, one of the generator, one of the average."""
        self.whole = False
        training, draw = self.training, self._draws("step", self.step)
        half = torch.autocast("cuda", torch.bfloat16) if training.precision == "half" else nullcontext()
        real, real_shares = self._real(draw)
        with half:
            with torch.no_grad():
                made, made_shares = self._made(draw)
            both = self._augmented(torch.cat([made, real]), draw)
            shares = None if made_shares is None or real_shares is None else torch.cat([made_shares, real_shares])
            judged = self.discriminator(both, shares)
        on_made, on_real = judged.chunk(2)
        loss = functional.softplus(on_made).mean() + functional.softplus(-on_real).mean()
        whole_loss = loss
        if training.r1 and self.step % training.r1_every == 0:
            whole_loss = loss + self._penalty(both[len(made) :].detach().float(), real_shares) * training.r1_every
        self.of_discriminator.zero_grad(set_to_none=True)
        whole_loss.backward()
        self.of_discriminator.step()

        self.discriminator.requires_grad_(False)
        with half:
            made, made_shares = self._made(draw)
            fooled = self.discriminator(self._augmented(made, draw), made_shares)
        own = functional.softplus(-fooled).mean()
        self.of_generator.zero_grad(set_to_none=True)
        own.backward()
        self.of_generator.step()
        self.discriminator.requires_grad_(True)

        self._follow()
        one = loss.new_ones(())
        self.sums += torch.stack([own, loss, on_real.mean(), on_made.mean(), one]).detach().double()
        self.step += 1
        self.whole = True

    def _draws(self, *names: object) -> torch.Generator:
        digest = hashlib.blake2b("/".join(map(str, (self.training.seed, *names))).encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little") >> 1)

    def _real(self, draw: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Images in [-1, 1], with shares of classes."""
        rows = torch.randint(len(self.x), (self.training.batch,), generator=draw, device=self.device)
        x = 2 * self.x[rows] - 1
        if self.training.mirror:
            flip = torch.rand(len(x), 1, 1, 1, generator=draw, device=self.device) < 0.5
            x = torch.where(flip, x.flip(3), x)
        x = x.contiguous(memory_format=self.layout)
        return x, None if self.y is None else self.generator.shares(self.y[rows], x)

    def _made(self, draw: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Images in [-1, 1] of latents, classes and noise of its own."""
        z = torch.randn(self.training.batch, self.generator.latent, generator=draw, device=self.device)
        shares = None
        if self.y is not None:
            rows = torch.randint(len(self.x), (len(z),), generator=draw, device=self.device)
            shares = self.generator.shares(self.y[rows], z)
        with torch.autocast("cuda", enabled=False) if self.device.type == "cuda" else nullcontext():
            begun = self.generator.begin(z, shares)
        x = 2 * self.generator.finished(self.generator.noised(begun, draw)).float() - 1
        return x.contiguous(memory_format=self.layout), shares

    def _augmented(self, x: Tensor, draw: torch.Generator) -> Tensor:
        return augmented(x, self.training.augment, draw)

    def _penalty(self, x: Tensor, shares: Tensor | None) -> Tensor:
        """R1, always without half precision: second derivatives need their digits."""
        x.requires_grad_(True)
        (slope,) = torch.autograd.grad(self.discriminator(x, shares).sum(), x, create_graph=True)
        return self.training.r1 / 2 * slope.square().sum((1, 2, 3)).mean()

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the average: half of it is of the last `average` images, or of the last twentieth of fewer."""
        seen = (self.step + 1) * self.training.batch
        keep = 0.5 ** (self.training.batch / min(self.training.average, RAMP * seen))
        means, nows = self.pairs
        torch._foreach_lerp_(means, nows, 1 - keep)

    def means(self) -> dict[str, float | None]:
        """The losses and logits since the last time; None where not finite. Waits for the device."""
        *sums, count = self.sums.tolist()
        self.sums.zero_()
        values = {name: total / count for name, total in zip(SUMS, sums)}
        return {name: round(value, 6) if math.isfinite(value) else None for name, value in values.items()}

    # --- pictures ---

    def samples(self, count: int, name: str) -> Tensor:
        """So many images of the average, in [0, 1], of latents that are the same whenever they are asked for."""
        draw = torch.Generator().manual_seed(int.from_bytes(name.encode()[:4], "little") + self.training.seed)
        z = torch.randn(count, self.average.latent, generator=draw)
        rows = torch.arange(count) % (self.classes or 1)
        if name == "score" and self.y is not None:
            rows = self.y.cpu()[torch.randint(len(self.x), (count,), generator=draw)]
        with torch.no_grad():
            made = [
                self.average(part.to(self.device), None if self.classes is None else which.to(self.device))
                for part, which in zip(z.split(256), rows.split(256))
            ]
        return torch.cat(made).clamp(0, 1)

    def show(self) -> None:
        """Take note of what the average makes of the first latents now."""
        row = self.samples(SHOWN, "sheet").mul(255).round().byte().cpu()
        if self.shown and self.shown[-1] == self.step:
            return
        self.shown.append(self.step)
        self.rows.append(row)

    def sheet(self) -> bytes:
        from gradleak.report.pictures import png, sheet  # reports are no part of a training

        images = self.samples(8 * SHOWN, "sheet").cpu()
        rows = [("", list(row)) for row in images.split(SHOWN)]
        return png(sheet(rows, scale=max(1, 64 // max(images.shape[2:]))))

    def history(self) -> bytes:
        """A row for every time that samples were taken; of many, some."""
        from gradleak.report.pictures import png, sheet

        stride = -(-len(self.shown) // 16)
        chosen = [*range(0, len(self.shown) - 1, stride), len(self.shown) - 1]
        rows = [(f"step {self.shown[place]}", list(self.rows[place].float() / 255)) for place in chosen]
        return png(sheet(rows, scale=max(1, 64 // max(self.rows[0].shape[2:]))))

    # --- state ---

    def state(self) -> tuple[dict[str, Any], Params]:
        """All that a later run needs to go on."""
        held: Params = {"sums": self.sums}
        for name, network in self._networks().items():
            held |= {f"{name}/{key}": value for key, value in network.state_dict().items()}
        for name, optimiser in self._optimisers().items():
            for place, state in optimiser.state_dict()["state"].items():
                held |= {f"{name}/{place}/{key}": torch.as_tensor(value) for key, value in state.items()}
        if self.rows:
            held["shown"] = torch.stack(self.rows)
        return {"step": self.step, "shown": self.shown}, held

    def restore(self, header: Mapping[str, Any], held: Params) -> None:
        self.step, self.shown = int(header["step"]), [int(step) for step in header["shown"]]
        self.rows = list(held["shown"]) if self.shown else []
        self.sums.copy_(held["sums"])
        for name, network in self._networks().items():
            start = f"{name}/"
            network.load_state_dict({key[len(start) :]: v for key, v in held.items() if key.startswith(start)})
        for name, optimiser in self._optimisers().items():
            places: dict[int, dict[str, Tensor]] = {}
            for key, value in held.items():
                if key.startswith(f"{name}/"):
                    _, place, what = key.split("/")
                    places.setdefault(int(place), {})[what] = value
            optimiser.load_state_dict({"state": places, "param_groups": optimiser.state_dict()["param_groups"]})
            for parameter, state in optimiser.state.items():
                for what in ("exp_avg", "exp_avg_sq"):  # fused kernels want them laid out as the weights are
                    state[what] = torch.empty_like(parameter, requires_grad=False).copy_(state[what])

    def _networks(self) -> dict[str, nn.Module]:
        return {"generator": self.generator, "discriminator": self.discriminator, "average": self.average}

    def _optimisers(self) -> dict[str, torch.optim.Adam]:
        return {"of_generator": self.of_generator, "of_discriminator": self.of_discriminator}


@dataclass(frozen=True, eq=False)
class _Scored:
    """Scores against the training images, whose features are computed once."""

    features: Features
    real: Cloud
    count: int
    floor: float

    @staticmethod
    def of(features: Features, x: Tensor, count: int) -> _Scored:
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:10_000]
        with float32_products():
            found = features(x[rows.to(x.device)])
        halves = found.chunk(2)
        floor = frechet(Cloud.of(halves[0]), Cloud.of(halves[1])) if len(found) >= 4 else math.nan
        return _Scored(features, Cloud.of(found), count, floor)

    @property
    def told(self) -> dict[str, Any]:
        """What the value is: of which features, over how many images, and what two halves of real images have."""
        told = {"name": self.features.score, "made": self.count, "real": self.real.count}
        return told | ({"between_halves_of_real": round(self.floor, 4)} if math.isfinite(self.floor) else {})

    def of_generator(self, work: _Work) -> float:
        with float32_products():
            return round(frechet(self.real, Cloud.of(self.features(work.samples(self.count, "score")))), 6)


# --- the folder ------------------------------------------------------------------------------------------------------


class _PriorFolder:
    """It survives being killed at any moment, and nothing that is read from it is executed."""

    def __init__(self, path: Path) -> None:
        self.path, self._folder = path, Folder(path)

    def open(self, settings: dict[str, Any]) -> tuple[dict[str, Any], Params] | None:
        """Make the folder ready: new, or holding the same training. Returns the state to go on from, if any."""
        self._folder.lock()
        toml = self.path / "prior.toml"
        if toml.exists():
            try:
                there = from_toml(toml.read_text(encoding="utf-8"))
            except ValueError as problem:
                raise FolderInUse(f"{toml} cannot be read ({problem}). Choose another folder.") from None
            _demand_same(self.path, there, settings)
        elif others := [entry.name for entry in self.path.iterdir() if entry.name != ".lock"]:
            raise FolderInUse(f"{self.path} holds {others[0]} and no training of a generator. Choose another folder.")
        self._folder.write("prior.toml", to_toml(settings, f"A generator trained by gradleak {__version__}."))
        return self._read() if (self.path / "state.safetensors").exists() else None

    def close(self) -> None:
        self._folder.unlock()

    def _read(self) -> tuple[dict[str, Any], Params]:
        from safetensors import SafetensorError, safe_open

        path = self.path / "state.safetensors"
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {})["gradleak"])
                return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as problem:
            raise PriorError(f"{path} cannot be read ({type(problem).__name__}: {problem}); copy it again.") from None

    def step(self) -> int:
        """How many steps the state on disk has behind it."""
        return int(self._read()[0]["step"]) if (self.path / "state.safetensors").exists() else 0

    def keep(self, header: Mapping[str, Any], held: Params) -> None:
        from safetensors.torch import save

        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in held.items()}
        metadata = {"gradleak": json.dumps({"version": VERSION, **header})}
        replace_whole(self.path / "state.safetensors", save(tensors, metadata=metadata))

    def metrics(self, until: int) -> list[dict[str, Any]]:
        """The lines so far; what comes after the state that was kept is dropped, since it comes again."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        whole = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        rows = [row for row in whole if row["step"] <= until]
        replace_whole(path, b"".join(map(_line, rows)))
        return rows

    def add(self, row: Mapping[str, Any]) -> None:
        with open(self.path / "metrics.jsonl", "ab") as file:
            file.write(_line(row))

    def draw(self, name: str, png: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        replace_whole(path, png)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _demand_same(path: Path, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    old, new = dict(by_name(there)), dict(by_name(here))
    odd = [name for name in {**old, **new} if old.get(name) != new.get(name) and not name.startswith(FREE)]
    if odd:
        told = "; ".join(f"{name} ({short(old.get(name))} there, {short(new.get(name))} now)" for name in odd[:4])
        raise FolderInUse(
            f"{path} holds a training with other settings. They differ in {told}. Choose another folder, or repeat the "
            "settings of its prior.toml to go on with that one."
        )


@contextmanager
def _deferred() -> Iterator[Callable[[], bool]]:
    """Ctrl-C waits for the end of a step, whose halves belong together. Returns whether it was pressed.

    Pressed twice it is raised at once. Outside the main thread signals cannot be caught, and nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
