"""Token rows: the rows of an embedding that an update changes are the tokens of the client's texts."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradleak.attack import Reconstruction, require, scenes_of, supported
from gradleak.core.listeners import Share
from gradleak.core.registry import named
from gradleak.engine import Engine
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.predictions import gradient
from gradleak.parts.protocols import Needs
from gradleak.parts.view import TargetView, in_turn
from gradleak.scenario.observation import Knowledge, Seen, as_targets
from gradleak.scenario.task import Batch, Task


@named(
    "token-rows",
    kind="attack",
    paper="Melis, Song, De Cristofaro, Shmatikov, Exploiting Unintended Feature Leakage, S&P 2019, section 4.1",
)
@dataclass(frozen=True)
class TokenRows:
    """Read the bag of tokens off the embedding: dL/dE_v = sum over the places of token v of dL/d(embedded token).

    A row is zero where its token does not appear, so the rows that changed name the tokens. Rows below `least` of the
    longest count as zero; of more rows than there are places the longest are taken, which is what noise leaves. The
    order of the tokens, how often each appears and which example of a batch has which are not read: places are filled
    by length of the row, example after example, and the rest is -1. Tokens of the padding are public and left out.
    """

    labels: str = "auto"
    least: float = 1e-6

    @property
    def name(self) -> str:
        return "token-rows"

    @property
    def search_needs(self) -> Needs:
        return frozenset()

    @property
    def needs(self) -> Needs:
        return label_rule(self.labels).needs

    @property
    def work(self) -> int | None:
        return 0

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        if not _is_tokens(task):
            return f"it reads token ids, and x holds {task.fields['x'].kind.noun[1]}"
        embedding = embedding_of(task)
        if embedding is None:
            return "no nn.Embedding sees the token ids"
        weight = task.model.get_submodule(embedding).weight
        if not weight.requires_grad:
            return f"the embedding {embedding!r} is frozen, so no update holds its rows"
        uses = sum(p is weight for module in task.model.modules() for p in module.parameters(recurse=False))
        return f"the embedding {embedding!r} is also the output layer, so every row changes" if uses > 1 else ""

    def run(
        self,
        task: Task,
        seen: Seen,
        knows: Knowledge = Knowledge(),
        seed: int = 0,
        *,
        engine: Engine | None = None,
        progress: Share | None = None,
    ) -> Reconstruction:
        """Read every target. `match` is the share of the embedding's gradient in rows that were not named."""
        supported(self, task, knows)
        require(self, knows)
        targets, began = as_targets(seen), time.perf_counter()
        scenes = scenes_of(task, targets, knows, Labels(label_rule(self.labels)))
        read = [self.bag(scene) for scene in in_turn(scenes)]
        batch = _padded([{**scene.fields, "x": ids} for scene, (ids, _) in zip(scenes, read, strict=True)])
        match = torch.tensor([[rest] for _, rest in read], dtype=torch.float64)
        if progress is not None:
            progress(1.0)
        return Reconstruction(
            batch=batch,
            candidates={name: value[:, None] for name, value in batch.items()},
            objective=match.clone(),
            match=match,
            chosen=torch.zeros(len(targets), dtype=torch.long),
            diverged=torch.zeros_like(match, dtype=torch.bool),
            trace={"step": torch.zeros(1, dtype=torch.long), "objective": match[None], "match": match[None]},
            fields=task.fields,
            keys=tuple(target.key for target in targets),
            examples=tuple(target.num_examples for target in targets),
            seconds=time.perf_counter() - began,
            evaluations=0,
            settings={"attack": repr(self), "seed": seed},
        )

    def bag(self, scene: TargetView) -> tuple[Tensor, float]:
        """The ids (examples, length), and the share of the gradient's energy in rows that are not among them."""
        field, embedding = scene.task.fields["x"], embedding_of(scene.task)
        energy = gradient(scene)[f"{embedding}.weight"].detach().double().cpu().square().sum(1)
        layer = scene.task.model.get_submodule(str(embedding))
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
            energy[layer.padding_idx] = 0
        places = scene.num_examples * field.shape[0]
        order = energy.argsort(descending=True, stable=True)[:places]
        order = order[energy[order] > self.least**2 * energy.max()]
        ids = torch.full((places,), -1, dtype=torch.long)
        ids[: len(order)] = order
        rest = 1 - float(energy[order].sum() / energy.sum().clamp_min(torch.finfo(torch.float64).tiny))
        return ids.reshape(scene.num_examples, field.shape[0]), max(rest, 0.0)


def embedding_of(task: Task) -> str | None:
    """The name of the nn.Embedding whose input is x itself, found by running the model once; None if there is none."""
    names = [name for name, module in task.model.named_modules() if isinstance(module, nn.Embedding)]
    batch = task.blank(2)
    ids = torch.arange(batch["x"].numel(), device=batch["x"].device).reshape(batch["x"].shape)
    batch["x"] = ids % (task.fields["x"].classes or 1)
    caught = task.inputs_of(names, task.weights(), batch)
    return next((name for name, value in caught.items() if torch.equal(value, batch["x"])), None)


def _is_tokens(task: Task) -> bool:
    return "x" in task.fields and task.fields["x"].kind.name == "tokens"


def _padded(batches: list[Batch]) -> Batch:
    """One batch of all targets, (targets, examples, ...), padded with -1 where some have fewer examples."""
    most = max(batch["x"].shape[0] for batch in batches)
    grown = [
        {
            name: torch.cat([value.cpu(), value.cpu().new_full((most - len(value), *value.shape[1:]), -1)])
            for name, value in batch.items()
        }
        for batch in batches
    ]
    return {name: torch.stack([batch[name] for batch in grown]) for name in grown[0]}
