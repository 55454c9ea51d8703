"""How long does a federated training take? LeNet on 10,000 CIFAR-10 images: 10 clients, 5 a round, 5 epochs, B = 64.

The whole training is timed, with tests every 50 rounds and checkpoints; the other ways of training the same clients
(one client per captured graph, all without a graph, one after the other without vmap) are timed for a few rounds.
Goal: 1,000 rounds, 80 vmapped steps each, in at most 10 minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import gradleak as gl
from gradleak.audit.private import Stored, examples_of
from gradleak.core.environment import describe
from gradleak.federation import Fixed

TESTED = 2_000  # images


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--others", type=int, default=4, help="rounds of each other way; 0 leaves them out")
    parser.add_argument("--data", default="cifar10", help="a name of gradleak data list; random: noise of that shape")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--model", default="lenet-zhu")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--precision", default="strict")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args()


def images(given: argparse.Namespace, split: str, count: int) -> gl.data.Images:
    if given.data != "random":
        return gl.data.load_images(given.data, split=split, limit=count)
    source = torch.Generator().manual_seed(len(split))
    x, y = torch.rand(count, 3, 32, 32, generator=source), torch.randint(10, (count,), generator=source)
    return gl.data.Images(x, y, 10, tuple("0123456789"), "random noise")


def timed(
    how: str, federation: gl.Federation, task: gl.Task, data: Stored, test: Stored, rounds: int, engine: gl.Engine
) -> dict[str, Any]:
    """One way of training: wall time of all of it, and the median round."""
    cuda = engine.where.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    steps = len(federation.training.order(len(data) // federation.clients))
    began, ends = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        done = federation.train(
            task,
            data,
            rounds,
            test=test,
            every=50,
            checkpoints=[0, rounds],
            out=Path(folder) / "run",
            engine=engine,
            progress=lambda row: ends.append(time.perf_counter()),
        )
    seconds = time.perf_counter() - began
    each = [after - before for before, after in zip([began, *ends], ends, strict=False)]
    usual = median(each[len(each) // 2 :])  # the first rounds prepare and capture
    row = {
        "how": how,
        "rounds": rounds,
        "steps_per_round": steps,
        "seconds": seconds,
        "seconds_per_round": usual,
        "first_rounds": each[:4],
        "milliseconds_per_step": 1000 * usual / steps,
        "minutes_of_1000_rounds": 1000 * usual / 60,
        "loss": done.metrics[-1]["loss"],
        "test_accuracy": done.metrics[-1].get("test_accuracy"),
        "gigabytes": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }
    print(
        f"{how:<12} {rounds:>5} rounds in {seconds:7.1f} s, {usual * 1000:8.1f} ms a round, "
        f"{row['milliseconds_per_step']:6.3f} ms a step, loss {row['loss']:.4f}, accuracy {row['test_accuracy']:.1%}"
    )
    return row


def main() -> None:
    given = options()
    held, tested = images(given, "train", given.images), images(given, "test", TESTED)
    network = gl.registry.get("model", given.model, generator=torch.Generator().manual_seed(0))
    task = gl.Task.supervised(network, torch.nn.functional.cross_entropy, like=(held.x[:1], held.y[:1]))
    data, test = examples_of(held, task), examples_of(tested, task)
    assert isinstance(data, Stored)
    assert isinstance(test, Stored)
    recipe = gl.LocalTraining(given.lr, epochs=5, batch_size=64)
    federation = gl.Federation(10, recipe, examples=None, participation=Fixed(5))
    plain = gl.Engine(given.device, given.precision)
    ways = {
        "together": (plain, given.rounds),
        "one lane": (gl.Engine(given.device, given.precision, chunk=1), given.others),
        "no graph": (gl.Engine(given.device, given.precision, graph=False), given.others),
        "one by one": (gl.Engine(given.device, given.precision, batched=False), given.others),
    }
    rows = [
        timed(how, federation, task, data, test, rounds, engine) for how, (engine, rounds) in ways.items() if rounds
    ]
    if given.out is not None:
        environment = describe()
        environment["git"] = environment["git"] or {"commit": os.environ.get("GRADLEAK_COMMIT"), "dirty": None}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: value for name, value in vars(given).items() if name != "out"}
        given.out.write_text(
            json.dumps({"environment": environment, "settings": settings, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
