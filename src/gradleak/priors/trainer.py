"""The two networks of a training, their optimisers and one step: logistic loss, lazy R1, an average of weights.

    discriminator   softplus(D(T(G(z)))) + softplus(-D(T(x))) + at some steps (gamma / 2) |grad_x D(T(x))|^2
    generator       softplus(-D(T(G(z))))

T augments (`augmentation`). References: Goodfellow et al., NeurIPS 2014 (the non-saturating loss); Mescheder, Geiger,
Nowozin, ICML 2018 (R1); Karras et al., CVPR 2020 (lazy regularisation, the average of weights). R1 is taken at the
augmented images, which saves a second derivative through T.

Every step draws from a generator seeded by (seed, step). So a resumed training needs no random state, and on a CPU with
the same number of threads it has exactly the weights of an uninterrupted one. Nothing in a step waits for the device.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradleak.core.pictures import png, sheet
from gradleak.core.tree import Params
from gradleak.generators.stages import Staged
from gradleak.generators.stylegan2 import exact
from gradleak.priors.augmentation import augmented
from gradleak.priors.recipes import PriorError, PriorTraining
from gradleak.scenario.task import float32_products

SUMS = ("generator_loss", "discriminator_loss", "real_logit", "made_logit")
SHOWN = 12  # images in a row of a sheet
RAMP = 0.05  # the half-life of the average is at most this share of all images so far


@dataclass(frozen=True, eq=False)
class Best:
    """The average of weights with the lowest score so far."""

    step: int
    score: float
    weights: Params


class GANTrainer:
    """Networks, optimisers and data on a device, and the number of steps done."""

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
        generator = training.recipe.generator(shape, self.classes, seed)
        discriminator = training.recipe.discriminator(shape, self.classes, seed)
        average = training.recipe.generator(shape, self.classes, torch.Generator().manual_seed(0))
        average.load_state_dict(generator.state_dict())
        self.layout = layout
        self.generator: Staged = generator.to(device, memory_format=layout).train()  # type: ignore[call-overload]
        self.discriminator: nn.Module = discriminator.to(device, memory_format=layout).train()  # type: ignore[call-overload]
        self.average: Staged = average.to(device, memory_format=layout).eval().requires_grad_(False)  # type: ignore[call-overload]
        rate = training.recipe.lr if training.lr is None else training.lr
        adam = {"lr": rate, "betas": training.recipe.betas, "eps": 1e-8, "fused": device.type == "cuda"}
        self.of_generator = torch.optim.Adam(self.generator.parameters(), **adam)  # type: ignore[arg-type]
        self.of_discriminator = torch.optim.Adam(self.discriminator.parameters(), **adam)  # type: ignore[arg-type]
        self.x = x.to(device, torch.float32)
        self.y = None if self.classes is None or y is None else y.to(device)
        current = self.generator.state_dict()
        floats = [(mean, current[name]) for name, mean in self.average.state_dict().items() if mean.is_floating_point()]
        self.pairs = [mean for mean, _ in floats], [value for _, value in floats]
        self.sums = torch.zeros(len(SUMS) + 1, dtype=torch.float64, device=device)
        self.shown: list[int] = []
        self.rows: list[Tensor] = []  # of samples at the steps `shown`, 8 bits
        self.best: Best | None = None

    @property
    def where(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Set precision and the choice of kernels; the user's settings come back afterwards."""
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
        real, real_shares = self._real(draw)
        with self._half():
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
        with self._half():
            made, made_shares = self._made(draw)
            fooled = self.discriminator(self._augmented(made, draw), made_shares)
        generator_loss = functional.softplus(-fooled).mean()
        self.of_generator.zero_grad(set_to_none=True)
        generator_loss.backward()
        self.of_generator.step()
        self.discriminator.requires_grad_(True)

        self._follow()
        one = loss.new_ones(())
        self.sums += torch.stack([generator_loss, loss, on_real.mean(), on_made.mean(), one]).detach().double()
        self.step += 1
        self.whole = True

    def _half(self) -> AbstractContextManager[Any]:
        """bfloat16 products, if the precision is "half".

        Casts of weights are not cached: PyTorch drops them when the outermost autocast ends, which is that of
        `settled`, around all steps. Every step would use the weights of the first one.
        """
        if self.training.precision != "half":
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False)

    def _draws(self, *names: object) -> torch.Generator:
        digest = hashlib.blake2b("/".join(map(str, (self.training.seed, *names))).encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(digest, "little") >> 1)

    def _real(self, draw: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Real images in [-1, 1], with shares of classes."""
        rows = torch.randint(len(self.x), (self.training.batch,), generator=draw, device=self.device)
        x = 2 * self.x[rows] - 1
        if self.training.mirror:
            flip = torch.rand(len(x), 1, 1, 1, generator=draw, device=self.device) < 0.5
            x = torch.where(flip, x.flip(3), x)
        x = x.contiguous(memory_format=self.layout)
        return x, None if self.y is None else self.generator.shares(self.y[rows], x)

    def _made(self, draw: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Generated images in [-1, 1] from drawn latents, classes and noise, with shares of classes."""
        z = torch.randn(self.training.batch, self.generator.latent, generator=draw, device=self.device)
        shares = None
        if self.y is not None:
            rows = torch.randint(len(self.x), (len(z),), generator=draw, device=self.device)
            shares = self.generator.shares(self.y[rows], z)
        with exact(z):
            begun = self.generator.begin(z, shares)
        x = 2 * self.generator.finished(self.generator.noised(begun, draw)).float() - 1
        return x.contiguous(memory_format=self.layout), shares

    def _augmented(self, x: Tensor, draw: torch.Generator) -> Tensor:
        return augmented(x, self.training.augment, draw)

    def _penalty(self, x: Tensor, shares: Tensor | None) -> Tensor:
        """R1, never in half precision: second derivatives need the digits."""
        x.requires_grad_(True)
        (slope,) = torch.autograd.grad(self.discriminator(x, shares).sum(), x, create_graph=True)
        return self.training.r1 / 2 * slope.square().sum((1, 2, 3)).mean()

    @torch.no_grad()
    def _follow(self) -> None:
        """Update the average: its half-life is `average` images, at most a twentieth of all images so far."""
        images = (self.step + 1) * self.training.batch
        keep = 0.5 ** (self.training.batch / min(self.training.average, RAMP * images))
        means, weights = self.pairs
        torch._foreach_lerp_(means, weights, 1 - keep)

    def means(self) -> dict[str, float | None]:
        """Mean losses and logits since the last call; None if not finite. Waits for the device."""
        *sums, count = self.sums.tolist()
        self.sums.zero_()
        values = {name: total / count for name, total in zip(SUMS, sums)}
        return {name: round(value, 6) if math.isfinite(value) else None for name, value in values.items()}

    def remember(self, score: float) -> None:
        """Store the current average if none scored lower."""
        if self.best is None or score <= self.best.score:
            weights = {name: value.clone() for name, value in self.average.state_dict().items()}
            self.best = Best(self.step, score, weights)

    # --- pictures ---

    def samples(self, count: int, name: str) -> Tensor:
        """This many images of the average, in [0, 1], from latents that are the same at every call."""
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
        """Store a row of samples of the current average."""
        row = self.samples(SHOWN, "sheet").mul(255).round().byte().cpu()
        if self.shown and self.shown[-1] == self.step:
            return
        self.shown.append(self.step)
        self.rows.append(row)

    def sheet(self) -> bytes:
        """A PNG of samples of the current average."""
        images = self.samples(8 * SHOWN, "sheet").cpu()
        rows = [("", list(row)) for row in images.split(SHOWN)]
        return png(sheet(rows, scale=max(1, 64 // max(images.shape[2:]))))

    def history(self) -> bytes:
        """A PNG with a row of samples for every step at which they were stored; about 16 of them if they are many."""
        stride = -(-len(self.shown) // 16)
        chosen = [*range(0, len(self.shown) - 1, stride), len(self.shown) - 1]
        rows = [(f"step {self.shown[place]}", list(self.rows[place].float() / 255)) for place in chosen]
        return png(sheet(rows, scale=max(1, 64 // max(self.rows[0].shape[2:]))))

    # --- state ---

    def state(self) -> tuple[dict[str, Any], Params]:
        """All that a later run needs to continue: a header and tensors."""
        tensors: Params = {"sums": self.sums}
        for name, network in self._networks().items():
            tensors |= {f"{name}/{key}": value for key, value in network.state_dict().items()}
        for name, optimiser in self._optimisers().items():
            for place, state in optimiser.state_dict()["state"].items():
                tensors |= {f"{name}/{place}/{key}": torch.as_tensor(value) for key, value in state.items()}
        if self.rows:
            tensors["shown"] = torch.stack(self.rows)
        header: dict[str, Any] = {"step": self.step, "shown": self.shown}
        if self.best is not None:
            header["best"] = {"step": self.best.step, "score": self.best.score}
            tensors |= {f"best/{key}": value for key, value in self.best.weights.items()}
        return header, tensors

    def restore(self, header: Mapping[str, Any], tensors: Params) -> None:
        self.step, self.shown = int(header["step"]), [int(step) for step in header["shown"]]
        self.rows = list(tensors["shown"]) if self.shown else []
        self.sums.copy_(tensors["sums"])
        for name, network in self._networks().items():
            network.load_state_dict(_under(name, tensors))
        if (best := header.get("best")) is not None:
            weights = {key: value.to(self.device) for key, value in _under("best", tensors).items()}
            self.best = Best(int(best["step"]), float(best["score"]), weights)
        for name, optimiser in self._optimisers().items():
            places: dict[int, dict[str, Tensor]] = {}
            for key, value in tensors.items():
                if key.startswith(f"{name}/"):
                    _, place, what = key.split("/")
                    places.setdefault(int(place), {})[what] = value
            optimiser.load_state_dict({"state": places, "param_groups": optimiser.state_dict()["param_groups"]})
            for parameter, state in optimiser.state.items():
                for what in ("exp_avg", "exp_avg_sq"):  # fused kernels need the memory layout of the weights
                    state[what] = torch.empty_like(parameter, requires_grad=False).copy_(state[what])

    def _networks(self) -> dict[str, nn.Module]:
        return {"generator": self.generator, "discriminator": self.discriminator, "average": self.average}

    def _optimisers(self) -> dict[str, torch.optim.Adam]:
        return {"of_generator": self.of_generator, "of_discriminator": self.of_discriminator}


def _under(name: str, tensors: Params) -> Params:
    """The tensors of one network, by the network's own names."""
    return {key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")}
