"""Two attacks of breaching 0.1.2 on the clients of `images.py`: one line of `peers.jsonl` for every attacked update.

    PYTHONPATH=src:.carry/peers python papers/spans/peers.py --only 'resnet18 B=[14]' --count 10 [--steps 1000]

Victims, images and gradients are those of `images.py`. Each attack has its own configuration, but for the number of
iterations: 1,000 here, 24,000 and 20,000 there. `invertinggradients` is Inverting Gradients. `seethroughgradients` is
GradInversion without its group consistency, which breaching lacks; its prior are the running statistics of BatchNorm,
since a client in evaluation mode sends none.

Advantages of the peer: labels are given, and products are in full float32, where its users have TF32 on a GPU.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
import sys
import time
import warnings
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
from images import Row, rows, victim  # noqa: E402

import gradleak as gl  # noqa: E402
from benchmarks.peers import without_torchvision  # noqa: E402
from benchmarks.speed import peer  # noqa: E402

ATTACKS = ("invertinggradients", "seethroughgradients")


def configuration(breaching: Any, attack: str, steps: int) -> Any:
    """Its own settings of the attack, with so many iterations."""
    with redirect_stdout(StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return breaching.get_attack_config(attack, overrides=[f"optim.max_iterations={steps}"])


def reconstructed(breaching: Any, settings: Any, task: gl.Task, seen: gl.Observation, y: Tensor, where: Any) -> Tensor:
    """The images (B, C, H, W), in the space of the model's input. The server is honest; it knows mean and deviation."""
    field, names = task.fields["x"], [name for name, _ in task.model.named_parameters()]
    payload = {
        "parameters": [seen.weights[name] for name in names],
        "buffers": list(task.model.buffers()),  # public, and so the model is in evaluation mode
        "metadata": SimpleNamespace(shape=field.shape, modality="vision", mean=field.mean, std=field.std),
    }
    shared = {
        "gradients": [seen.update[name].to(where) for name in names],
        "buffers": None,
        "metadata": {"num_data_points": seen.num_examples, "labels": y.to(where), "local_hyperparams": None},
    }
    setup = {"device": where, "dtype": torch.float32}
    attacker = breaching.attacks.prepare_attack(task.model, nn.CrossEntropyLoss(), settings, setup)
    found, _ = attacker.reconstruct([payload], [shared], server_secrets={})
    return found["data"].detach().cpu()


def measure(name: str, row: Row, breaching: Any, options: argparse.Namespace) -> None:
    if len(row.training.order(row.examples)) > 1 or row.training.lr != 1.0 or row.defence is not None:
        raise SystemExit(f"peers.py is for clients that send one gradient; {name!r} does not. Leave it out of --only.")
    model, (mean, std) = victim(options.victim or row.victim)
    images = gl.data.load("cifar10", split="test")
    middle, spread = (torch.tensor(each).view(3, 1, 1) for each in (mean, std))
    like = ((images.x[:1] - middle) / spread, images.y[:1])
    task = gl.Task.supervised(model, F.cross_entropy, like=like, mean=mean, std=std)
    engine = gl.Engine(options.device, batched=False)
    for batch in range(options.first, options.first + options.count):
        picked = [(batch * row.examples + number) * 7 % 1000 for number in range(row.examples)]  # as images.py does
        client = {"x": (images.x[picked] - middle) / spread, "y": images.y[picked]}
        with torch.no_grad():
            losses = F.cross_entropy(model(client["x"]), client["y"], reduction="none")
        seen = gl.observe(task, client, row.training, key=f"{name} {batch}")
        for attack in options.attack.split(","):
            if time.perf_counter() - options.began > options.budget:
                print(f"Out of time before {name}, batch {batch}, {attack}.")
                return
            settings = configuration(breaching, attack, options.steps)
            torch.manual_seed(options.seed)  # its start
            began = time.perf_counter()
            with engine.settings():
                x = reconstructed(breaching, settings, task, seen, client["y"], engine.where)
            seconds = time.perf_counter() - began
            truth = {key: value[None] for key, value in client.items()}
            scores = gl.metrics.compare(SimpleNamespace(batch={"x": x[None]}), truth, fields=task.fields)
            line = {
                "row": name,
                "victim": options.victim or row.victim,
                "attack": f"breaching {peer.VERSION} {attack}",
                "images": picked,
                "psnr": [round(float(value), 2) for value in scores.psnr.flatten()],
                "losses": [round(float(value), 4) for value in losses],
                "labels": "given",
                "iterations": options.steps,
                "seconds": round(seconds, 1),
                "seed": options.seed,
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name() if engine.where.type == "cuda" else "CPU",
                "command": "python papers/spans/peers.py " + shlex.join(sys.argv[1:]),
            }
            with options.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(name, attack, line["psnr"], line["losses"], f"{seconds:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="resnet18 B=[14]", help="rows of images.py, a regular expression")
    parser.add_argument("--attack", default=",".join(ATTACKS))
    parser.add_argument("--victim", default="", help="instead of the row's own, such as resnet18-4680")
    parser.add_argument("--count", type=int, default=10, help="batches of each row")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no attack is started")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without-torchvision", action="store_true", help="an empty module in its place")
    parser.add_argument("--out", type=Path, default=HERE / "peers.jsonl")
    options = parser.parse_args()
    options.began = time.perf_counter()
    torch.set_num_threads(options.threads)
    if options.without_torchvision:  # breaching imports it, for models and data sets that are not used here
        without_torchvision()
    breaching = peer.load()
    logging.getLogger("breaching").setLevel(logging.WARNING)
    for name, row in rows().items():
        if re.fullmatch(options.only, name):
            measure(name, row, breaching, options)


if __name__ == "__main__":
    main()
