"""`span-text` on real and on random language models: one line of `recovery.jsonl` for every attacked update.

    GRADLEAK_TEXT=DIR python papers/text/recovery.py --only 'smollm2 B=8$' --count 4 [--first 0] [--threads 2]

DIR holds the unpacked packages of `victims.py`. Texts are sentences of Moby-Dick of 5 to 32 tokens. The attack was made
with sentences 0 to 15 in view; figures are of sentences from `FIRST` on, in order. `--table` prints the tables of
README.md from the stored lines.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
import victims
from torch import Tensor, nn

import gradleak as gl
from gradleak.core import assignment
from gradleak.core.environment import describe, git
from gradleak.models.language import Positions, decoder
from gradleak.scenario.rules import SGD

HERE = Path(__file__).parent
STORE = HERE / "recovery.jsonl"
FIRST = 1000  # sentences before it were seen while the attack was made
RATE = 1e-3


@dataclass(frozen=True)
class Row:
    """A victim, its clients, and what the attacker runs.

    examples  texts in an update; most  tokens of them together; lengths  of a text
    rank      of LoRA adapters on q and v; started  B is not zero, as after a first round
    wire      "update", "weights", or a type that gradients (or "weights bfloat16") are rounded to
    clients   whose updates are summed, each of so many examples
    """

    victim: str
    examples: int = 1
    most: int | None = None
    lengths: tuple[int, int] = (5, 32)
    training: gl.LocalTraining = gl.LocalTraining(lr=RATE)
    rank: int | None = None
    started: bool = False
    defence: str | None = None
    wire: str = "update"
    clients: int = 1
    attack: str = "span-text"


def rows() -> dict[str, Row]:
    smollm, found = Row("smollm2"), dict[str, Row]()
    found |= {f"smollm2 B={n}": replace(smollm, examples=n, most=500) for n in (1, 8, 16, 32)}
    for kind in ("masked", "classifier"):
        found |= {f"minilm {kind} B={n}": Row(f"minilm-{kind}", n, lengths=(14, 14)) for n in (1, 4, 8)}
        found |= {f"random bert {kind} B={n}": Row(f"bert-{kind}", n, lengths=(14, 14)) for n in (1, 4)}
    for rank in (8, 16, 64):
        found[f"smollm2 LoRA r={rank}, first step, within the rank"] = replace(smollm, rank=rank, most=rank)
        found |= {
            f"smollm2 LoRA r={rank}, started, B={n}": replace(smollm, rank=rank, started=True, examples=n)
            for n in (1, 4, 8)
        }
    for kind in ("float16", "bfloat16"):
        found |= {f"smollm2 B={n}, gradients in {kind}": replace(smollm, examples=n, wire=kind) for n in (1, 8)}
    for lr in (1e-4, 1e-3, 1e-2):
        recipe = gl.LocalTraining(lr=lr)
        for kind in ("weights", "weights bfloat16"):
            found[f"smollm2 B=1, {kind} on the wire, lr {lr}"] = replace(smollm, training=recipe, wire=kind)
    for lr, steps in ((1e-4, 5), (1e-3, 5), (1e-3, 20), (1e-2, 5)):
        found[f"smollm2 B=1, {steps} steps, lr {lr}"] = replace(smollm, training=gl.LocalTraining(lr=lr, steps=steps))
    epochs = gl.LocalTraining(lr=1e-3, epochs=1, batch_size=2, optimiser=SGD(momentum=0.9))
    found["smollm2 B=8, an epoch of batches of 2, momentum"] = replace(smollm, examples=8, training=epochs)
    found |= {
        f"smollm2 {n} clients of 4": replace(smollm, examples=4, clients=n, lengths=(5, 20)) for n in (2, 4, 8, 16)
    }
    for name in ("clipping:norm=0.1", "dp-sgd:clip=1.0,noise_multiplier=1.0", "pruning:keep=0.5", "pruning:keep=0.1"):
        found[f"smollm2 B=1, {name}"] = replace(smollm, defence=name)
    for share in (1e-4, 1e-3, 1e-2, 1e-1):
        found[f"smollm2 B=1, noise of {share:g} of the rms"] = replace(smollm, wire=f"noise {share:g}")
    for width in (256, 512, 1024, 2048, 4096):
        for shape in ("gpt2", "llama"):
            found |= {
                f"random {shape} of width {width}, {tokens} tokens": Row(
                    f"random-{shape}-{width}", examples=max(1, tokens // 32), lengths=(32, 32)
                )
                for tokens in (32, width // 2, width - 64, width)
                if tokens <= 1024
            }
    return found


# --- clients ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Client:
    """A task, a batch by its fields, and its texts."""

    task: gl.Task
    batch: dict[str, Tensor]
    texts: list[list[int]]


def client(row: Row, victim: victims.Victim, texts: list[list[int]], seed: int) -> Client:
    if victim.name.startswith(("minilm", "bert")):
        return _encoded(victim, texts, seed)
    pad, length = 2 if victim.tokenizer is not None else 0, max(map(len, texts))
    ids = torch.full((len(texts), length), pad)
    for number, text in enumerate(texts):
        ids[number, : len(text)] = torch.tensor(text)
    mask = torch.zeros_like(ids)
    for number, text in enumerate(texts):
        mask[number, : len(text)] = 1
    kind = gl.kinds.Tokens(padding=pad)
    if victim.tokenizer is None:  # the decoder of our own takes ids alone
        return Client(gl.Task.supervised(victim.model, F.cross_entropy, like=(ids,), kind=kind), {"x": ids}, texts)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    task = gl.Task.supervised(victim.model, F.cross_entropy, like=batch, kind=kind)
    return Client(task, task.as_batch(batch), texts)


def _encoded(victim: victims.Victim, texts: list[list[int]], seed: int) -> Client:
    """[CLS] text [SEP]; of a masked model 15 % of the tokens are hidden, at least one."""
    texts = [[101, *text, 102] for text in texts]
    ids = torch.tensor(texts)
    if victim.name.endswith("classifier"):
        labels = torch.arange(len(ids)) % 2
    else:
        draws = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed))
        draws[:, [0, -1]] = 1.0
        hidden = (draws < 0.15) | (draws == draws.amin(1, keepdim=True))
        labels, ids = ids.masked_fill(~hidden, -100), ids.masked_fill(hidden, 103)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    task = gl.Task.supervised(victim.model, F.cross_entropy, like=batch)
    return Client(task, task.as_batch(batch), ids.tolist())


def make(name: str) -> victims.Victim:
    kind, _, rest = name.partition("-")
    if kind == "random":
        shape, width = rest.split("-")
        positions: Positions = "learned" if shape == "gpt2" else "rotary"
        model = decoder(
            vocabulary=8192, width=int(width), heads=4, depth=2, length=32, positions=positions, tied=True,
            generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        return victims.Victim(name, model, None)
    return victims.minilm(rest, trained=kind == "minilm") if kind in ("minilm", "bert") else victims.smollm2()


def adapted(victim: victims.Victim, rank: int, started: bool) -> victims.Victim:
    import peft

    torch.manual_seed(0)
    model = peft.get_peft_model(victim.model, peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"])).eval()
    for name, value in model.named_parameters():
        if started and "lora_B" in name:
            nn.init.normal_(value, std=0.01)
    return replace(victim, model=model)


def batches(row: Row, victim: victims.Victim, first: int) -> Iterator[list[list[int]]]:
    """Texts of one update after the other, none twice.

    Where an update holds a number of tokens at most, sentences that do not fit any more are passed over.
    """
    if victim.tokenizer is None:
        generator = torch.Generator().manual_seed(1 + first)
        while True:
            yield torch.randint(1, 8192, (row.examples, row.lengths[1]), generator=generator).tolist()
    low, high = row.lengths
    pool = victims.sentences(victim, low, max(high, 40))[FIRST:]
    pool = [text[:high] for text in pool]
    place = 0
    number = 0
    while place + row.examples * row.clients <= len(pool):
        taken: list[list[int]] = []
        while len(taken) < row.examples * row.clients and place < len(pool):
            if row.most is None or sum(map(len, [*taken, pool[place]])) <= row.most:
                taken.append(pool[place])
            place += 1
        if number >= first and taken:
            yield taken
        number += 1


def observed(row: Row, one: Client, key: str) -> gl.Observation:
    size = len(one.texts) // row.clients
    defence = None if row.defence is None else gl.registry.parse("defence", row.defence)
    seen = []
    for number in range(row.clients):
        part = {name: value[number * size : (number + 1) * size] for name, value in one.batch.items()}
        wire = "weights" if row.wire == "weights" else "update"
        seen.append(gl.observe(one.task, part, row.training, defence, key=f"{key}, client {number}", wire=wire))
    update = {
        name: sum((each.update[name] for each in seen[1:]), seen[0].update[name]) / len(seen) for name in seen[0].update
    }
    update = {
        name: on_the_wire(row.wire, value, seen[0].weights[name], n) for n, (name, value) in enumerate(update.items())
    }
    return replace(seen[0], update=update, num_examples=len(one.texts), clients=row.clients, key=key)


def on_the_wire(wire: str, update: Tensor, weights: Tensor, number: int) -> Tensor:
    kind, _, rest = wire.partition(" ")
    if kind == "noise":
        noise = torch.randn(update.shape, generator=torch.Generator().manual_seed(number))
        return update + float(rest) * update.square().mean().sqrt() * noise
    if kind == "weights" and rest:
        dtype = getattr(torch, rest)
        return (weights.to(dtype) - (weights.to(dtype).float() - update).to(dtype)).float()
    if kind in ("float16", "bfloat16"):
        largest = update.abs().max().clamp_min(1e-30)  # scaled, as gradients in half precision are
        return (update / largest).to(getattr(torch, kind)).float() * largest
    return update


# --- scores -----------------------------------------------------------------------------------------------------------


def scores(found: Tensor, texts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Of one update, after a one-to-one matching by tokens in place."""
    right = torch.tensor(
        [[sum(int(a == b) for a, b in zip(row, text)) for row in found.tolist()] for text in texts], dtype=torch.float64
    )  # (texts, found)
    pairs = assignment.match(-right).tolist()
    matched = [(list(text), found[place].tolist()[: len(text)]) for text, place in zip(texts, pairs, strict=True)]
    bag = {int(token) for token in found.unique() if token >= 0}
    tokens = [token for text in texts for token in text[:-1]]
    return {
        "texts": len(texts),
        "tokens": sum(map(len, texts)),
        "distinct": len(set(tokens)),
        "exact": sum(true == guess for true, guess in matched),
        "exact_but_last": sum(true[:-1] == guess[:-1] for true, guess in matched),
        "in_place": sum(int(a == b) for true, guess in matched for a, b in zip(true, guess, strict=True)),
        "bag": sum(token in bag for token in set(tokens)),
        "bag_wrong": len(bag - {token for text in texts for token in text}),
    }


def attacked(name: str, row: Row, first: int, count: int) -> Iterator[dict[str, Any]]:
    victim = make(row.victim)
    if row.rank is not None:
        victim = adapted(victim, row.rank, row.started)
    for number, texts in zip(range(first, first + count), batches(row, victim, first)):
        one = client(row, victim, texts, number)
        began = time.perf_counter()
        seen = observed(row, one, f"{name}, {number}")
        gradient = time.perf_counter() - began
        given = {n: one.batch[n] for n, field in one.task.fields.items() if field.public}
        defence = None if row.defence is None else gl.registry.parse("defence", row.defence)
        knows = gl.Knowledge(training=row.training, defence=defence, given=given, inputs=frozenset(given))
        attack = gl.registry.parse("attack", row.attack)
        # Models of transformers look at values of ids, so that searches take one lane after the other.
        result = attack.run(one.task, seen, knows, engine=gl.Engine(batched=False))
        settings = {key: value[0] for key, value in result.settings.items() if isinstance(value, list) and value}
        kept = {key: settings.get(key) for key in ("gap", "rank", "limit", "ordered")}
        kept |= {"bag_size": settings.get("tokens")}
        proved = (settings.get("spans") or {}).get("proved")
        yield {
            "row": name, "update": number, **scores(result.batch["x"][0], one.texts), **kept, "proved": proved,
            "match": float(result.match), "seconds": round(result.seconds, 2), "gradient_seconds": round(gradient, 2),
        }  # fmt: skip
        del seen


def provenance(options: argparse.Namespace) -> dict[str, Any]:
    machine = describe()
    words = f"--only {options.only!r} --count {options.count} --first {options.first} --threads {options.threads}"
    return {
        "commit": git(Path(__file__)),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": machine["gpus"] or machine["processor"],
        "command": f"python papers/text/recovery.py {words}",
    }


def table() -> str:
    """The stored lines, a row of them in a line: of several runs of the same update the last one."""
    lines = [json.loads(line) for line in STORE.read_text(encoding="utf-8").splitlines()]
    stored: dict[str, dict[int, dict[str, Any]]] = {}
    for line in lines:
        name = line["row"] if line["attack"] == "span-text" else f"{line['row']}, {line['attack']}"
        stored.setdefault(name, {})[line["update"]] = line
    head = "| row | updates | texts | tokens | exact | exact but for the last | in place | bag | proved | seconds |"
    text = [head, "|" + "---|" * 10]
    for name, each in stored.items():
        found = list(each.values())
        total = {key: sum(line[key] or 0 for line in found) for key in ("texts", "tokens", "exact", "exact_but_last")}
        total |= {key: sum(line[key] or 0 for line in found) for key in ("in_place", "bag", "distinct", "proved")}
        seconds = median(line["seconds"] for line in found)
        text.append(
            f"| {name} | {len(found)} | {total['texts']} | {total['tokens']} | {total['exact']} | "
            f"{total['exact_but_last']} | {total['in_place'] / total['tokens']:.0%} | "
            f"{total['bag'] / total['distinct']:.0%} | {total['proved']} | {seconds:.0f} |"
        )
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name this pattern finds")
    parser.add_argument("--count", type=int, default=1, help="updates of a row")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--attack", default="", help="another attack than that of the row")
    parser.add_argument("--list", action="store_true", help="print the names of the rows")
    parser.add_argument("--table", action="store_true", help="print the table of README.md from the stored lines")
    options = parser.parse_args()
    if options.table:
        sys.exit(table())
    torch.set_num_threads(options.threads)
    chosen = {name: row for name, row in rows().items() if re.search(options.only, name)}
    if options.list:
        sys.exit("\n".join(chosen))
    source = provenance(options)
    for name, row in chosen.items():
        row = replace(row, attack=options.attack) if options.attack else row
        for line in attacked(name, row, options.first, options.count):
            with STORE.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**line, "attack": row.attack, **source}) + "\n")
            print(
                {key: line[key] for key in ("row", "exact", "exact_but_last", "texts", "tokens", "seconds")}, flush=True
            )


if __name__ == "__main__":
    main()
