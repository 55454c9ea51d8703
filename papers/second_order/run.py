"""Second-order inversion: exact recovery where the update determines the data, and how near elsewhere.

One row per client and network. Tuned on training images; the figures are of test images. Rows are written one by one.
Two rows (trained sigmoid, FedAvg) first failed on these test images; what mends them was built on training images.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import arguments, record, row_by_row, summary

import gradleak as gl
from gradleak.core import tree
from gradleak.core.linear import jacobian
from gradleak.defences.fedasam import FedASAM
from gradleak.defences.fedsam import FedSAM
from gradleak.parts.priors import roughness
from gradleak.scenario.defence import Defence


@dataclass(frozen=True)
class Row:
    """One client, one network, and how many batches of test images are attacked."""

    model: str = "lenet-zhu:init=uniform05"
    trained: int = 0  # steps of SGD with momentum before the round
    rate: float = 0.05  # of that training
    examples: int = 1
    count: int = 50
    training: gl.LocalTraining = gl.LocalTraining(lr=1.0)
    defence: Defence | None = None
    noise: float = 0.0  # of each tensor's RMS
    wire: str = "update"
    single: bool = False  # a float32 client
    attack: str = "second-order:certify=false"
    certified: int = 0  # targets whose truth is certified by the auditor
    beside: str = ""  # another attack on the same targets
    equal_time: bool = False  # give that one as many steps as this one's seconds allow


def lenet(activation: str, init: str = "torch") -> str:
    return f"lenet-zhu:activation={activation},init={init}"


def rows() -> dict[str, Row]:
    """Everything that is measured, by name."""
    plain = Row()
    found = {"sigmoid, U(+-0.5)": plain, "sigmoid, torch init": replace(plain, model=lenet("sigmoid"))}
    found |= {f"{name}, torch init": replace(plain, model=lenet(name)) for name in ("tanh", "gelu", "softplus", "elu")}
    found["sigmoid, trained"] = replace(plain, trained=20_000)
    found["FedSAM rho 0.2"] = replace(plain, defence=FedSAM(0.2))
    found["FedASAM rho 0.3"] = replace(plain, defence=FedASAM(0.3, eta=0.0, scaled="all"))
    found["FedAvg, 4 steps over 2 images"] = replace(
        plain, examples=2, count=2, training=gl.LocalTraining(lr=0.1, epochs=2, batch_size=1)
    )
    found["two images"] = replace(plain, examples=2, count=8, certified=1)
    # What a client of float32 weights returns: at a small learning rate few digits are left.
    found |= {f"{name}; float32 weights, lr 0.1": on_the_wire(row, 0.1) for name, row in found.items()}
    found |= {f"sigmoid, U(+-0.5); float32 weights, lr {lr:g}": on_the_wire(plain, lr) for lr in (1.0, 0.01)}
    found["four images"] = replace(plain, examples=4, count=3, certified=1, beside="ig:steps=4000")
    found |= {f"noise {c:g}": replace(plain, count=16, noise=c, certified=4) for c in (1e-3, 1e-2, 1e-1)}
    found["relu, torch init"] = replace(plain, model=lenet("relu"), beside="ig:steps=4000", certified=4)
    found |= {
        f"{name}, {activation}, {method}": replace(
            plain,
            model=f"{name}:activation={activation},norm=group",
            attack=f"second-order:certify=false,method={settings}",
            count=count,
            beside="ig",
            equal_time=True,
        )
        for name in ("convnet", "resnet18")
        for activation, method, count, settings in (
            ("gelu", "matrix-free", 2, "krylov,steps=24,vectors=60"),
            ("gelu", "after IG", 1, "krylov,steps=12,vectors=60,after=ig:steps=1000"),
            ("relu", "matrix-free", 1, "krylov,steps=12,vectors=40"),
        )
    }
    found |= {
        # At 0.05 a ReLU network may die in training: then nothing is left to attack.
        f"{name}, {steps} steps": replace(plain, model=lenet(name), trained=steps, rate=0.02, count=8)
        for name in ("relu", "gelu")
        for steps in (30, 100, 300, 1000)
    }
    return found


def on_the_wire(row: Row, lr: float) -> Row:
    """The same round of a client that computes in float32 and returns its weights."""
    count = 8 if row.trained else row.count if row.examples == 1 else 2
    training = replace(row.training, lr=lr)
    return replace(row, single=True, wire="weights", training=training, count=count, certified=0, beside="")


@cache
def network(
    spec: str, steps: int, rate: float, seed: int, device: str, data: str, size: int
) -> tuple[torch.nn.Module, float | None]:
    """A network, trained on training images for so many steps, and then its loss on them."""
    name, _, settings = spec.partition(":")
    given = dict(item.split("=") for item in settings.split(",") if item)
    init: Any = given.pop("init", None)
    model: torch.nn.Module = gl.registry.get(
        "model",
        name,
        **({"init": init} if init else {}),
        **({"shape": (3, size, size)} if size else {}),
        **given,
        generator=torch.Generator().manual_seed(seed),
    )
    if not steps:
        return model, None
    images = gl.data.load(data, split="train", size=size or None)
    x, y = images.x.to(device), images.y.to(device)
    model = model.to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(x), (64,), generator=draw).to(device)
        optimiser.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimiser.step()
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y).item()
    return model.cpu(), loss


def observed(row: Row, task: gl.Task, x: Tensor, y: Tensor) -> list[gl.Observation]:
    """What the server sees of each batch, with the row's noise."""
    weights, batches = task.weights(), zip(x.split(row.examples), y.split(row.examples), strict=True)
    seen = [
        gl.observe(task, {"x": bx, "y": by}, row.training, row.defence, weights=weights, key=f"batch{i}", wire=row.wire)
        for i, (bx, by) in enumerate(batches)
    ]
    draw = torch.Generator().manual_seed(1)
    if not row.noise:
        return seen

    def noisy(u: Tensor) -> Tensor:
        return u + row.noise * u.square().mean().sqrt() * torch.randn(u.shape, generator=draw, dtype=u.dtype)

    return [replace(each, update=tree.map(noisy, each.update)) for each in seen]


def measure(
    row: Row, seed: int, device: str, images: int = 0, skip: int = 0, data: str = "cifar10-mini", size: int = 0
) -> dict[str, Any]:
    """Attack the row's targets and score them; the auditor's certificate of the first ones, at the truth."""
    count = min(row.count, images or row.count)
    dtype = torch.float32 if row.single else torch.float64
    first, last = skip * row.examples, (skip + count) * row.examples
    test = gl.data.load(data, split="test", limit=last, size=size or None)
    x, y = test.x[first:].to(dtype), test.y[first:]
    model, loss = network(row.model, row.trained, row.rate, seed, device, data, size)
    task = gl.Task.supervised(copy.deepcopy(model).to(dtype), F.cross_entropy, like=(x[:1], y[:1]))
    seen, knows = observed(row, task, x, y), gl.Knowledge(training=row.training, defence=row.defence)
    truth = {"x": x.unflatten(0, (-1, row.examples)), "y": y.unflatten(0, (-1, row.examples))}
    figures: dict[str, Any] = {
        "model": row.model,
        "skipped": skip,
        "examples": row.examples,
        "trained": row.trained,
        "training_loss": loss,
    }

    def told(attack: Any) -> dict[str, Any]:
        found = attack.run(task, seen, knows, seed=seed, engine=gl.Engine(device=device))
        psnr = gl.metrics.compare(found, truth).psnr.flatten()
        return {
            "attack": found.settings["attack"],
            "psnr": summary(psnr),
            "psnr_of_each": psnr.tolist(),
            "above_60": (psnr > 60).double().mean().item(),
            "above_100": (psnr > 100).double().mean().item(),
            "match": summary(found.match.min(1).values),
            "match_of_first": curve(found),
            "seconds": found.seconds,
            "seconds_per_image": found.seconds / (count * row.examples),
        }

    figures |= told(gl.registry.parse("attack", row.attack))
    if row.beside:
        other = gl.registry.parse("attack", row.beside)
        if row.equal_time:
            other = as_long_as(figures["seconds"], other, task, seen, knows, device)
        figures["beside"] = told(other)
        figures["gain"] = figures["psnr"]["mean"] - figures["beside"]["psnr"]["mean"]
    if row.certified:
        told_of = figures["certificate"] = certificate(row, task, seen, truth, knows, device)
        if floors := told_of.get("floor_psnr"):  # of the same targets
            gaps = [floor - found for floor, found in zip(floors, figures["psnr_of_each"], strict=False)]
            told_of["below_floor"] = sum(gaps) / len(gaps)
    return figures


def as_long_as(seconds: float, attack: Any, task: gl.Task, seen: Any, knows: gl.Knowledge, device: str) -> Any:
    """The attack with as many steps as fit these seconds on these targets: its schedule is then of that length."""
    timed = [
        with_steps(attack, steps).run(task, seen, knows, engine=gl.Engine(device=device)).seconds for steps in (50, 250)
    ]
    per_step = (timed[1] - timed[0]) / 200
    return with_steps(attack, max(1, round((seconds - timed[0]) / per_step + 50)))


def with_steps(attack: Any, steps: int) -> Any:
    stages = tuple(replace(stage, optimiser=replace(stage.optimiser, steps=steps)) for stage in attack.stages)
    return replace(attack, stages=stages)


def curve(found: gl.Reconstruction) -> dict[str, list[float]]:
    """The first target's match along the search, at no more than fifty places."""
    step, match = found.trace["step"], found.trace["match"][:, 0, 0]
    walked = match.isfinite()  # a search that ends early leaves the rest empty
    every = max(1, -(-int(walked.sum()) // 50))
    return {"step": step[walked][::every].tolist(), "match": match[walked][::every].tolist()}


def precision_of(task: gl.Task, x: Tensor) -> Tensor:
    """The precision of the attack's own prior over [0, 1] pixels, its scale that of these images."""
    terms = jacobian(lambda flat: roughness(flat.reshape(x.shape)), torch.zeros_like(x).flatten(), 512)
    return terms @ terms.T / (roughness(x).square().sum() / x.numel())


def certificate(row: Row, task: gl.Task, seen: Any, truth: Any, knows: gl.Knowledge, device: str) -> dict[str, Any]:
    """At the truth: what could any attack learn? Under noise, the floor with the attack's own prior."""
    told: dict[str, list[Any]] = {"rank": [], "null": [], "share": [], "floor_psnr": []}
    for i in range(min(row.certified, len(seen))):
        batch = {name: value[i] for name, value in truth.items()}
        engine = gl.Engine(device=device)
        if row.noise:
            precision = precision_of(task, task.fields["x"].unit(batch["x"]).double())
            floor = gl.identify.noise_floor(
                task, seen[i], batch, knows, noise=row.noise, precision=precision, engine=engine, block=512
            )
            told["floor_psnr"].append(floor.psnr)
        else:
            at = gl.identify.certify(task, seen[i], batch, knows, engine=engine, block=256)
            told["rank"].append(at.rank)
            told["null"].append(at.null)
            told["share"].append(at.share)
    return {name: values for name, values in told.items() if values}


def told_in_a_line(row: dict[str, Any]) -> str:
    """What a row found, for whoever waits."""
    psnr = row["psnr"]
    return (
        f"mean {psnr['mean']:.1f} median {psnr['median']:.1f} lowest {psnr['lowest']:.1f}, above 60 dB "
        f"{row['above_60']:.2f}, above 100 dB {row['above_100']:.2f}, {row['seconds_per_image']:.2f} s an image; "
        f"gain {row.get('gain')} {row.get('certificate', '')}"
    )


def main() -> None:
    options = arguments(
        __doc__ or "", only="", images=0, skip=0, seed=0, budget=600, device="auto", data="cifar10-mini", size=0
    )
    device = str(gl.Engine(device=options.device).where)
    figures = row_by_row(
        options,
        rows(),
        lambda row: measure(row, options.seed, device, options.images, options.skip, options.data, options.size),
        told_in_a_line,
    )
    record(options, Path(__file__).with_name("expected.json"), figures)


if __name__ == "__main__":
    main()
