"""Train the clients of a round together: each is a lane of one vmapped `LocalTraining.run`.

Clients with the same number of examples and memories of the same form are stacked; a group too large for the device is
split. On CUDA the whole local training of a group is captured once as a CUDA graph and replayed in later rounds, since
its many small steps would otherwise wait for Python.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from gradleak.core import tree
from gradleak.core.tree import Params, Tree
from gradleak.engine import Engine, EngineError, activations, memory_of
from gradleak.engine.convolution import IN_TURN
from gradleak.federation.graphs import Graphs
from gradleak.federation.uploads import DroppedOut
from gradleak.scenario.client import ClientState, LocalTraining, Order
from gradleak.scenario.defence import Defence, Upload
from gradleak.scenario.task import Batch, Task

GROUP_SHARE, GRAPH_SHARE = 0.4, 0.5  # of a GPU's memory: for one group, and for all captured ones
GRAPH_STEPS = 500  # local steps in one graph at most: some hundred kernels each
# On a CPU lanes save Python's time but slow arithmetic (grouped convolutions): worth it for small steps only. Measured
# with the LeNet of DLG (10,000 entries an example), 5 clients, one thread: lanes are 2.7 times faster with 1 example
# per step, equal with 10, 1.9 times slower with 64.
SMALL_STEP = 80_000  # entries of all activations of one client's step


@dataclass(frozen=True, eq=False)
class Work:
    """What one client does in a round. `order`: the rows of all steps, concatenated; None: all rows in each step."""

    client: int
    batch: Batch
    memory: Params
    key: Tensor
    order: Tensor | None


@dataclass(frozen=True, eq=False)
class Done:
    """A client's result. No upload: the client dropped out."""

    upload: Upload | None
    memory: Params


class Clients:
    """Trains clients from the weights they are sent. Keeps captured graphs between rounds, and nothing else."""

    def __init__(self, task: Task, training: LocalTraining, defence: Defence, engine: Engine) -> None:
        self.task, self.training, self.defence, self.engine = task, training, defence, engine
        captured = engine.graph and engine.batched and engine.where.type == "cuda"
        self._graphs = Graphs(GRAPH_SHARE * memory_of(engine)) if captured else None
        self._said: dict[Any, int] = {}  # the number of examples that uploads of a form state
        self._sizes: dict[int, tuple[int, float]] = {}

    def run(
        self,
        work: Sequence[Work],
        weights: Params,
        buffers: Params,
        extras: dict[str, Params],
        lr: float | Tensor | None = None,
    ) -> dict[int, Done]:
        """Every client's upload and memory, by client. `lr`: learning rate of this round; None: the recipe's."""
        running = {name for name, _ in self.task.model.named_buffers()}  # which a forward pass may change
        frozen = {name: value for name, value in buffers.items() if name not in running}
        shared = {"weights": weights, "frozen": frozen, "extras": extras, "lr": {}}
        if lr is not None:  # a tensor, so that one captured graph serves all rounds
            shared["lr"] = {"": tree.like(weights).new_full((), float(lr))}
        statistics = {name: value for name, value in buffers.items() if name in running}
        done: dict[int, Done] = {}
        if self._graphs is not None:
            self._graphs.round += 1
        with torch.no_grad(), self.engine.settings():
            for group in self._groups(work):
                done |= self._group(group, shared, statistics)
        return {one.client: done[one.client] for one in work}

    # --- groups ----------------------------------------------------------------------------------------------------

    def _groups(self, work: Sequence[Work]) -> list[list[Work]]:
        groups: dict[Any, list[Work]] = {}
        for one in work:
            groups.setdefault(_form(one), []).append(one)
        return [
            group[start : start + room]
            for group in groups.values()
            for room in [self.room(examples_in(group[0].batch))]
            for start in range(0, len(group), room)
        ]

    def room(self, examples: int) -> int:
        """Number of clients trained together: depends on the sizes of model, data and machine only."""
        if not self.engine.batched:
            return 1
        entries, each = self._size(examples)
        if self.engine.chunk is not None:
            return self.engine.chunk
        if self.engine.where.type != "cuda":
            return 64 if entries <= SMALL_STEP else 1
        return int(max(1, min(256, GROUP_SHARE * memory_of(self.engine) // each)))

    def _size(self, examples: int) -> tuple[int, float]:
        """Entries of the activations of a client's step, and about how many bytes its training takes."""
        if examples in self._sizes:
            return self._sizes[examples]
        weights = self.task.weights()
        # Two examples in evaluation mode: BatchNorm refuses to train on one example of one pixel.
        few = activations(evaluating(self.task), weights, self.task.blank(2), self.task.buffers())
        step = min(self.training.batch_size or examples, examples)
        entries = few * step // 2
        inputs = 2 * examples * sum(math.prod(field.shape) for field in self.task.fields.values())
        size = max(leaf.element_size() for leaf in tree.leaves(weights))
        # Copies of each entry: forward, backward and, for convolutions by patches, the patches. Then weights,
        # gradients, optimiser state, noise, memory. With the library's convolutions a U-Net in steps of 64 images used
        # 4 copies.
        copies = 6 if step >= IN_TURN and self.engine.where.type == "cuda" else 24
        self._sizes[examples] = entries, size * (copies * entries + 16 * tree.size(weights) + inputs)
        return self._sizes[examples]

    def _group(self, group: list[Work], shared: Tree, buffers: Params) -> dict[int, Done]:
        if len(group) > 1 or self._graphs is not None:
            try:
                return self._together(group, shared, buffers)
            except DroppedOut:
                pass  # which of them dropped out shows when each trains alone
            except RuntimeError as problem:
                raise _explained(problem) from problem
        return {one.client: self._alone(one, shared, buffers) for one in group}

    # --- one group -------------------------------------------------------------------------------------------------

    def _together(self, group: list[Work], shared: Tree, buffers: Params) -> dict[int, Done]:
        examples = examples_in(group[0].batch)
        per_client = {
            "batch": tree.map(lambda *values: torch.stack(values), *(one.batch for one in group)),
            "memory": tree.map(lambda *values: torch.stack(values), *(one.memory for one in group)),
            "key": torch.stack([one.key for one in group]),
            "buffers": {name: value.expand(len(group), *value.shape) for name, value in buffers.items()},
            "order": {} if group[0].order is None else {"": torch.stack([_rows(one) for one in group])},
        }
        lane, form = _Lane(self.task, self.training, self.defence, examples), (len(group), _form(group[0]))

        def run(inputs: Tree) -> Tree:
            sent: Tree = vmap(lane, in_dims=(None, 0))(inputs["shared"], inputs["per_client"])
            self._said[form] = lane.num_examples
            return sent

        inputs, sent = {"shared": shared, "per_client": per_client}, None
        if self._graphs is not None and len(self.training.order(examples)) <= GRAPH_STEPS:
            sent = self._graphs.results(form, run, inputs, len(group) * self._size(examples)[1])
        if sent is None:
            sent = run(inputs)
        num_examples = self._said[form]
        each = [tree.map(lambda value, i=i: value[i], sent) for i in range(len(group))]
        return {one.client: _done(sent, num_examples, shared["frozen"]) for one, sent in zip(group, each, strict=True)}

    def _alone(self, one: Work, shared: Tree, buffers: Params) -> Done:
        lane = _Lane(self.task, self.training, self.defence, examples_in(one.batch))
        order = {} if one.order is None else {"": one.order}
        try:
            inputs = {"batch": one.batch, "memory": one.memory, "key": one.key, "buffers": buffers, "order": order}
            sent = lane(shared, inputs)
        except DroppedOut:
            return Done(None, one.memory)
        return _done(sent, lane.num_examples, shared["frozen"])


class _Lane:
    """One client's local training as a function of tensors: `shared` by all clients, and its own, `per_client`."""

    def __init__(self, task: Task, training: LocalTraining, defence: Defence, examples: int) -> None:
        self.task, self.training, self.defence, self.examples = task, training, defence, examples
        self.num_examples = examples  # that the upload states: the same for all, since hooks cannot tell clients apart

    def __call__(self, shared: Tree, per_client: Tree) -> Tree:
        buffers = {**shared["frozen"], **per_client["buffers"]}
        state = ClientState(
            memory=unflat(per_client["memory"]), buffers=buffers, extras=shared["extras"], key=per_client["key"]
        )
        training = replace(self.training, lr=shared["lr"][""]) if shared["lr"] else self.training
        upload, after = training.run(
            self.task, shared["weights"], per_client["batch"], self.defence, state, self._order(per_client["order"])
        )
        self.num_examples = upload.num_examples
        like = per_client["key"]
        memory = {name: _tensor(value, like) for name, value in flat(after.memory).items()}
        # Without the frozen parameters: all clients share them, and every lane would copy them.
        buffers = {name: value for name, value in (upload.buffers or {}).items() if name not in shared["frozen"]}
        return {"payload": upload.payload, "buffers": buffers, "memory": memory}

    def _order(self, rows: Tree) -> Order:
        if not rows:
            return self.training.order(self.examples)
        size = self.training.batch_size or self.examples
        steps = self.training.order(self.examples)
        whole = [min(size, self.examples - start) for start in range(0, self.examples, size)]
        return list(rows[""].split([whole[step % len(whole)] for step in range(len(steps))]))


# --- trees as flat dicts ----------------------------------------------------------------------------------------------


def flat(nested: Mapping[str, Any]) -> dict[str, Any]:
    """A nested dict as one level, its paths joined by "/" (a "/" within a name becomes "%2F"); empty dicts vanish."""
    level: dict[str, Any] = {}
    for name, value in nested.items():
        key = str(name).replace("%", "%25").replace("/", "%2F")
        if isinstance(value, Mapping):
            level |= {f"{key}/{rest}": leaf for rest, leaf in flat(value).items()}
        else:
            level[key] = value
    return level


def unflat(level: Mapping[str, Any]) -> Tree:
    """The inverse of `flat`."""
    nested: Tree = {}
    for path, value in level.items():
        *folders, last = (name.replace("%2F", "/").replace("%25", "%") for name in path.split("/"))
        place = nested
        for name in folders:
            place = place.setdefault(name, {})
        place[last] = value
    return nested


def evaluating(task: Task) -> Task:
    """The task with a copy of its model in evaluation mode."""
    return replace(task, model=copy.deepcopy(task.model).eval())


def _form(work: Work) -> Any:
    """Clients with the same form can be stacked."""
    memory = tuple((name, value.shape, value.dtype) for name, value in sorted(work.memory.items()))
    return examples_in(work.batch), None if work.order is None else len(work.order), memory


def examples_in(batch: Batch) -> int:
    """Number of examples of a batch."""
    return tree.length(batch)


def _rows(work: Work) -> Tensor:
    assert work.order is not None  # all in the group have the same form
    return work.order


def _tensor(value: Any, like: Tensor) -> Tensor:
    """A hook may remember a plain number; lanes can only return tensors."""
    return value if isinstance(value, Tensor) else torch.full((), value, device=like.device)


def _done(sent: Tree, num_examples: int, frozen: Params) -> Done:
    buffers = {**frozen, **sent["buffers"]} if sent["buffers"] else None
    return Done(Upload(sent["payload"], num_examples, buffers), sent["memory"])


def _explained(problem: RuntimeError) -> RuntimeError:
    message = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
    if isinstance(problem, torch.OutOfMemoryError):
        return EngineError(f"Out of memory: pass a smaller Engine(chunk=...), of clients at a time. ({message})")
    if any(word in message for word in ("vmap", "randomness", "atching rule", "functorch", "data-dependent")):
        return EngineError(
            f"These clients cannot be trained together under vmap: {message} Engine(batched=False) trains one after "
            "the other instead; task.check() tells the cause."
        )
    return problem
