"""Texts off the gradients of language models: the bag of tokens, their order, and labels."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradleak.attack import ReadOff, Reconstruction, missing_fields, require, scenes_of, supported
from gradleak.attacks.spans.text.bag import Bag, bag_of
from gradleak.attacks.spans.text.exchange import Effort, exchanged
from gradleak.attacks.spans.text.order import READ, Judge, Node, chosen, grown
from gradleak.attacks.spans.text.readers import SHEER, Passes, Reader, Readers, Span, Update, readers_of, span_of
from gradleak.attacks.spans.text.words import OutputSide, labels_of
from gradleak.core import random as randomness
from gradleak.core.listeners import Share
from gradleak.core.random import Draws
from gradleak.core.registry import named
from gradleak.engine import Engine
from gradleak.identify.span_certificate import LayerCertificate, SpanCertificate
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.optimisers import require_positive
from gradleak.parts.view import TargetView, in_turn
from gradleak.scenario.fit import fits
from gradleak.scenario.kinds import Mask, Tokens
from gradleak.scenario.objectives import IGNORED
from gradleak.scenario.observation import Knowledge, Seen, as_targets
from gradleak.scenario.task import Batch, Task

MATCHED = 0.9  # share of the places whose label is the next token: then labels are the text, moved by one


@dataclass(frozen=True, eq=False)
class Found:
    """What was found of one target: the fields, and a record of numbers by name."""

    fields: Batch
    record: dict[str, Any]
    match: float


@dataclass(frozen=True, eq=False)
class Layout:
    """Examples whose texts lie alike: the passes for them, and for each its length where that is public."""

    passes: Passes
    examples: tuple[int, ...]
    lengths: tuple[int | None, ...]


@named(
    "span-text",
    kind="attack",
    paper="gradleak's own; after Petrov, Dimitrov, Baader, Mueller, Vechev, DAGER, NeurIPS 2024",
)
@dataclass(frozen=True)
class SpanText(ReadOff):
    """Texts from spans: the bag of tokens by the first maps' gradients, their order by the maps behind an attention.

    The gradient of a linear map spans its input rows while there are fewer rows than outputs and inputs. Rows of the
    first maps depend on one token each, so the whole vocabulary is tested (`text.bag`); rows behind the first attention
    depend on the tokens before, so texts grow place by place (`text.order`); an encoder's texts are found by exchange
    (`text.exchange`). Padding by a public mask gives lengths. The last token of a causal text, hidden words and tags
    are labels: they follow from the output side (`text.words`). LoRA adapters are linear maps like any other: A sees
    the rows themselves, B sees A times the rows.

    Against DAGER: half a block is enough, since the output projection of the first attention is the first map that
    sees order; ranks and thresholds follow from gaps, never from the number of texts; all maps of the same rows are
    stacked; adapters and the last token are read too. Without a map that sees order the bag alone is returned, in the
    first places. Where rows do not depend on places, a text that begins with one token twice is lost, since its first
    rows are those of the token alone. Of two equal texts one is found.

    `settings` hold, per target: "tokens", how many were found in the bag (of a model with positions, pairs of token and
    place); "gap", how many times nearer to the span they are than all others, None where they were picked otherwise;
    "rank" of the map that tells most, and "limit", the most rows it can tell; "ordered", texts whose order was found,
    but for their last tokens; "sure", which of the examples are proved; "spans", the certificate.

    beam     texts of a length that are followed at most, the likeliest first
    starts   of a wave of exchanges, in encoders
    waves    of exchanges at most
    """

    beam: int = 256
    starts: int = 32
    waves: int = 4

    gradients_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, whole=("beam", "starts", "waves"))

    @property
    def name(self) -> str:
        return "span-text"

    def refuses(self, task: Task, given: Collection[str] = ()) -> str:
        kind = task.fields["x"].kind if "x" in task.fields else None
        if not isinstance(kind, Tokens):
            return f"it reads texts, and x holds {'nothing' if kind is None else kind.noun[1]}"
        labels = {"y"} if _labelled(task) else Labels(label_rule(self.labels)).reads(task)
        if unread := missing_fields(task, {"x", *labels, *given}):
            return f"it finds x and reads labels; this task also has {', '.join(unread)}"
        if "x" in given:
            return "x is given: there is no text to find"
        return "" if readers_of(task).own else "no trained linear layer of it sees a row for each token alone"

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
        """Read every target. `match`: the share of a row outside of its span, at worst, by mean over texts; 1: none."""
        supported(self, task, knows)
        require(self, knows)
        targets, began, engine = as_targets(seen), time.perf_counter(), engine or Engine()
        fits(task, [observation for target in targets for observation in target.observations])
        found = list[Found]()
        with engine.settings():
            work = task.to(engine.where, engine.dtype)
            readers = readers_of(work)
            scenes = scenes_of(work, targets, knows, Labels(label_rule(self.labels)))
            for number, scene in enumerate(in_turn(scenes)):

                def watch(share: float, number: int = number) -> None:
                    if progress is not None:
                        progress((number + share) / len(targets))

                draws = Draws(randomness.lane_key(targets[number].key, seed, 0))
                update = Update.of(scene, targets[number].last)
                found.append(_Reading(self, readers, update, draws).found(watch))
        if progress is not None:
            progress(1.0)
        names = dict.fromkeys(name for each in found for name in each.record)
        records = {name: [each.record.get(name) for each in found] for name in names}
        result = self.answer(task, targets, [each.fields for each in found], [each.match for each in found])
        settings = {**result.settings, "seed": seed, **records}
        return replace(result, seconds=time.perf_counter() - began, settings=settings)


def _labelled(task: Task) -> bool:
    """Is there a label for every place, of x's shape?"""
    return "y" in task.fields and not task.fields["y"].public and task.fields["y"].shape == task.fields["x"].shape


@dataclass(frozen=True, eq=False)
class _Reading:
    """One target."""

    attack: SpanText
    readers: Readers
    update: Update
    draws: Draws

    @property
    def scene(self) -> TargetView:
        return self.update.scene

    @property
    def task(self) -> Task:
        return self.scene.task

    @property
    def length(self) -> int:
        return self.task.fields["x"].shape[0]

    def found(self, watch: Share) -> Found:
        own = self._spans(self.readers.own)
        context = self._spans(self.readers.context, 2 * READ)
        nodes: list[Node | None] = [None] * self.scene.num_examples
        bags = []
        for layout in self._layouts():
            bag = bag_of(own, layout.passes, self._tokens, self.readers.placed)
            if not bag.told:
                continue
            bags.append(bag)
            whole = [span for span in context if span.whole]
            sheer = [span for span in whole if span.gap > SHEER]  # the others may be noise, or end nowhere
            ordered = self._ordered((sheer or whole)[:READ], layout, bag, watch)
            if not any(ordered):
                ordered = _in_a_bag(bag, layout, self.length)
            for example, node, length in zip(layout.examples, ordered, layout.lengths, strict=True):
                begun = node is not None and length is not None and len(node) < length - 1
                nodes[example] = replace(node, margin=0.0, outside=1.0) if begun and node is not None else node
        return self._answer(nodes, bags, context)

    def _spans(self, readers: Sequence[Reader], most: int | None = None) -> list[Span]:
        """Of the first so many readers whose gradient tells something."""
        found = list[Span]()
        for reader in readers:
            if (span := span_of(reader, self.update, self._tokens)) is not None:
                found.append(span)
            if len(found) == most:
                break
        return found

    @property
    def _tokens(self) -> int:
        """In the update, at the most."""
        return sum(self._most(layout) for layout in self._layouts())

    def _most(self, layout: Layout) -> int:
        """Tokens of these examples, at the most."""
        known = [length for length in layout.lengths if length is not None]
        return sum(known) if len(known) == len(layout.lengths) else self.length * len(layout.lengths)

    def _layouts(self) -> Iterator[Layout]:
        """Examples by their public inputs: a mask tells where a text begins, and its length."""
        public = {
            name: value
            for name, value in self.scene.fields.items()
            if name in self.task.fields and self.task.fields[name].public
        }
        groups: dict[tuple[Any, ...], list[tuple[int, int | None]]] = {}
        for example in range(self.scene.num_examples):
            start, length = 0, None
            for name in self._masks:
                there = public[name][example].nonzero()[:, 0]
                if len(there) and int(there[-1] - there[0]) + 1 == len(there):
                    start, length = int(there[0]), len(there)
            others = tuple(
                tuple(public[name][example].flatten().tolist()) for name in public if name not in self._masks
            )
            groups.setdefault((start, others), []).append((example, length))
        blank = self.task.blank(1)
        for (start, _), members in groups.items():
            example = members[0][0]
            layout = {name: blank[name] for name in blank if name != "x"}
            layout |= {name: value[example : example + 1] for name, value in public.items() if name not in self._masks}
            for name in self._masks:
                layout[name] = torch.ones_like(blank[name])
                layout[name][:, :start] = 0
            passes = Passes(self.task, self.scene.weights, self.scene.buffers, layout, start, self.readers.shortened)
            examples, lengths = zip(*members, strict=True)
            yield Layout(passes, examples, lengths)

    def _ordered(self, spans: list[Span], layout: Layout, bag: Bag, watch: Share) -> list[Node | None]:
        if not spans or not len(bag.at(0)):  # no map sees order, or no text can begin
            return []
        judge = Judge.of(spans, layout.passes, bag, self.readers.causal)
        if self.readers.causal:
            most = self.attack.beam, self.scene.num_examples
            return chosen(grown(judge, layout.passes, bag, most, watch), layout.lengths)
        effort = Effort(self.attack.starts, self.attack.waves)
        texts: list[Node | None] = [None] * len(layout.examples)
        whole = [length or self.length - layout.passes.start for length in layout.lengths]
        for length in set(whole):
            rows = [row for row, each in enumerate(whole) if each == length]
            child = self.draws.child(length)
            nodes = exchanged(judge, layout.passes, bag, (length, len(rows)), child, effort, watch)
            for row, node in zip(rows, nodes, strict=False):
                texts[row] = node
        return texts

    def _answer(self, nodes: list[Node | None], bags: list[Bag], context: list[Span]) -> Found:
        """The fields: unfound tokens are -1; padding that is public is filled in."""
        x = torch.full((self.scene.num_examples, self.length), -1, dtype=torch.long)
        starts = {example: each.passes.start for each in self._layouts() for example in each.examples}
        for example, node in enumerate(nodes):
            if node is not None:
                x[example, starts[example] : starts[example] + len(node)] = node.ids
        fields = {name: value.cpu() for name, value in self.scene.fields.items()}
        x, labels = self._with_labels(self._padded(x), nodes)
        fields |= {"x": x} | ({"y": labels} if labels is not None and "y" not in fields else {})
        certificate = _certificate(nodes, bags, context, self.readers.ledger.tokens_up_to)
        record = {
            "tokens": sum(sum(map(len, bag.tokens)) for bag in bags),
            "gap": min((bag.ratio for bag in bags if bag.ratio is not None), default=None),
            "rank": max((span.rank for bag in bags for span in bag.spans), default=None),
            "limit": self.readers.ledger.tokens_up_to,
            "ordered": sum(node is not None and node.outside < 1 for node in nodes),
            "sure": [node is not None and node.outside < 1 and node.proved for node in nodes],
            "spans": certificate.record(),
        }
        outside = [1.0 if node is None else node.outside for node in nodes]
        return Found(fields, record, sum(outside) / len(outside))

    def _padded(self, x: Tensor) -> Tensor:
        """With padding where a public mask shows it."""
        kind = self.task.fields["x"].kind
        for name in self._masks:
            if isinstance(kind, Tokens) and kind.padding is not None:
                x = torch.where(self.scene.fields[name].cpu() == 0, kind.padding, x)
        return x

    @property
    def _masks(self) -> list[str]:
        """The public mask of texts, if there is one."""
        fields = self.task.fields.items()
        masks = [name for name, f in fields if isinstance(f.kind, Mask) and f.public and name in self.scene.fields]
        return masks[:1]

    def _with_labels(self, x: Tensor, nodes: list[Node | None]) -> tuple[Tensor, Tensor | None]:
        """The texts with their last tokens, and a label for every place where the task has some."""
        labelled, target = _labelled(self.task), self.task.fields.get("y")
        empty = torch.full_like(x, IGNORED) if labelled else None
        tokens = (target.classes if labelled and target is not None else self.task.fields["x"].classes) or 0
        texts = [example for example, node in enumerate(nodes) if node is not None and node.evidence > 0]
        if not texts or not (labelled or self.readers.causal) or ("y" in self.task.fields and not labelled):
            return x, empty
        side = OutputSide.of(self.task, self.readers, self.update.gradient, self.scene.weights, tokens)
        if side is None:
            return x, empty
        layouts = {example: each.passes for each in self._layouts() for example in each.examples}
        pairs = [(layouts[example], node.ids) for example, node in enumerate(nodes) if example in texts and node]
        wanted = [torch.arange(len(ids)) if labelled else torch.tensor([len(ids) - 1]) for _, ids in pairs]
        found = labels_of(side, pairs, wanted)
        for example, (passes, text), labels in zip(texts, pairs, found, strict=True):
            start = passes.start
            moved = self.readers.causal and _moved_by_one(text, labels if labelled else None)
            if empty is not None:
                empty[example, start : start + len(text)] = torch.where(labels < 0, IGNORED, labels)
            if moved and len(text) + start < self.length and int(labels[-1]) >= 0:
                x[example, start + len(text)] = labels[-1]
            if moved and empty is not None:
                empty[example] = torch.where(x[example] < 0, IGNORED, x[example])
        return x, empty


def _moved_by_one(text: Tensor, labels: Tensor | None) -> bool:
    """Is the label of a place the token after it? Without a field of labels it is."""
    if labels is None or len(text) < 2:
        return labels is None
    return float((labels[:-1] == text[1:]).double().mean()) >= MATCHED


def _in_a_bag(bag: Bag, layout: Layout, length: int) -> list[Node | None]:
    """The tokens without their order, example after example; with positions, each at a place of its own."""
    room = length - layout.passes.start
    rows = torch.full((len(layout.examples), room), -1, dtype=torch.long)
    there = torch.stack([torch.arange(room) < (room if each is None else each) for each in layout.lengths])
    if len(bag.tokens) > 1:
        for place, (ids, evidence) in enumerate(zip(bag.tokens, bag.evidence, strict=True)):
            free = there[:, place].nonzero()[: len(ids), 0]
            rows[free, place] = ids[evidence.argsort(descending=True, stable=True)[: len(free)]]
    else:
        order = bag.evidence[0].argsort(descending=True, stable=True)[: int(there.sum())]
        free = there.nonzero()[: len(order)]
        rows[free[:, 0], free[:, 1]] = bag.tokens[0][order]
    return [Node(row, outside=1.0) for row in rows]


def _certificate(nodes: list[Node | None], bags: list[Bag], context: list[Span], limit: int) -> SpanCertificate:
    """Texts all of whose rows are inside of spans that refuse texts of noise."""
    spans = [*(span for bag in bags for span in bag.spans), *context]
    layers = {span.reader.entry.name: LayerCertificate(span.reader.entry.layers[0], rank=span.rank) for span in spans}
    ordered = [node for node in nodes if node is not None and node.outside < 1]
    outside, proved = tuple(node.outside for node in ordered), sum(node.proved for node in ordered)
    reason = ""
    if not bags:
        reason = f"No token is told: the update has more tokens than its layers tell ({limit}), or too much noise."
    elif not outside:
        reason = f"The bag of tokens is told; their order is not: it takes a row for every place, of {limit} at most."
    elif proved < len(outside):
        reason = "Rows of some texts are inside, but no further than those of other texts could be."
    layer = context[0].reader.module if outside and context else ""
    return SpanCertificate(len(nodes), layer, outside, proved, tuple(layers.values()), reason)
