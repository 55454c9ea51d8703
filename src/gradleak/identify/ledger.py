"""Which layers tell their inputs, and for how many examples? Counted from shapes, before any attack, in seconds.

A linear map with input rows a_p (patches of a convolution, tokens of a linear layer) has dL/dW = sum_p delta_p a_p^T.
The row space of dL/dW lies in the span of the a_p. It is that span while there are no more rows than outputs, and it
says something while there are fewer rows than inputs (`parts.row_space`). For B examples of p places each:

    rank       = p B                           rows that the gradient spans, at most `outputs`
    equations  = rank (inputs - rank) / B      per example: each row has no part outside the span

A layer's equations are at most the numbers in its input. A batch is told by spans where the equations of all layers
that tell add up to the numbers of an example. The count is necessary, not sufficient: rows may be nearly dependent,
and small losses sink below the rounding (`identify.told`). It is about spans alone: other attacks need no span.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradleak.core import random as randomness
from gradleak.core.random import Draws
from gradleak.parts.row_space import Call, module_calls, own_weight
from gradleak.scenario.derivatives import double_backward_safe
from gradleak.scenario.fields import Field
from gradleak.scenario.kinds import Codes, Tokens
from gradleak.scenario.task import Task

EXAMPLES = 2  # of the pass that counts: BatchNorm in training mode refuses a single one
NAMED = 4  # layers that the headline names
FROZEN, SHARED, COMPUTED = "frozen", "shared with another layer", "its weight is computed from others"
PUBLIC, UNEVEN = "its input does not depend on the data", "its rows are not those of single examples"
WAITING = "B of its LoRA is zero, and so is its gradient in the first step"
A, B = "lora_A", "lora_B"  # the maps of a LoRA, as peft names them: W' = W + (alpha / r) B A


@dataclass(frozen=True)
class Entry:
    """A linear map, or several with the same rows: their outputs add up.

    layers    names of the modules
    weights   names of their trained parameters, outputs first (inputs first in Hugging Face's Conv1D)
    places    rows of one example
    outputs   of all maps together, per group
    inputs    width of a row
    entries   numbers in the input, for one example
    bias      is there a trained bias? Its gradient gives one point of the rows' flat
    groups    of a convolution: each tells by itself
    centred   "batch" or "example": a norm over these follows, and the gradient spans only differences of rows
    reason    why it does not tell; empty: it does, up to `most` examples
    adapter   the rank of its LoRA; 0: it is none
    turned    its weight has the inputs first, as in Hugging Face's Conv1D
    """

    layers: tuple[str, ...]
    weights: tuple[str, ...]
    kind: str
    places: int
    outputs: int
    inputs: int
    entries: int
    bias: bool = False
    groups: int = 1
    centred: str = ""
    reason: str = ""
    adapter: int = 0
    turned: bool = False

    @property
    def name(self) -> str:
        return " + ".join(self.layers)

    @property
    def point(self) -> bool:
        """Does the gradient of the bias give a point? Where rows are centred it is zero."""
        return self.bias and not self.centred

    @property
    def limit(self) -> int:
        """The largest rank that tells: no more than the outputs, and less than fills the inputs."""
        return 0 if self.reason else self.capacity

    @property
    def capacity(self) -> int:
        """The same from its shape alone, whatever the reason why it does not tell now."""
        return max(0, min(self.outputs, self.inputs - 1 + self.point))

    @property
    def most(self) -> int:
        """The most examples that it tells."""
        if self.kind == "embedding":
            return 0
        if self.centred == "example":
            return self.limit // (self.places - 1) if self.places > 1 else 0
        return (self.limit + (self.limit > 0 and self.centred == "batch")) // self.places

    def rank(self, examples: int) -> int:
        """Of its gradient for so many examples, if outputs suffice."""
        missing = {"": 0, "batch": 1, "example": examples}[self.centred]
        return self.places * examples - missing

    def equations(self, examples: int) -> int:
        """What it says about each of so many examples."""
        if not 0 < examples <= self.most:
            return 0
        rank = self.rank(examples)
        return min(self.entries, self.groups * rank * (self.inputs - rank + self.point) // examples)

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "name": self.name, "most": self.most}


@dataclass(frozen=True)
class Ledger:
    """Every trained linear map of a model, in the order of the forward pass.

    unknowns   numbers of one example
    noun       one example, several examples
    tokens     tokens of one example, where the data are texts; else None
    problem    why nothing could be counted; empty if it could
    """

    entries: tuple[Entry, ...]
    unknowns: int
    noun: tuple[str, str] = ("example", "examples")
    tokens: int | None = None
    problem: str = ""

    def telling(self, examples: int = 1) -> tuple[Entry, ...]:
        """The maps that say something about each of so many examples; of texts, those that see every token."""
        return tuple(each for each in self.entries if each.equations(examples) and self._counts(each))

    def equations(self, examples: int) -> int:
        """Of all maps together, for each of so many examples."""
        return sum(each.equations(examples) for each in self.telling(examples))

    def alone(self, entry: Entry, examples: int = 1) -> bool:
        """Does this map determine as many numbers as an example has?"""
        return entry.equations(examples) >= self.unknowns

    @property
    def told_up_to(self) -> int:
        """The most examples in an update whose equations suffice; 0: not even one."""
        most = max((each.most for each in self.entries if self._counts(each)), default=0)
        return next((count for count in range(most, 0, -1) if self.tells(count)), 0)

    @property
    def tokens_up_to(self) -> int:
        """The most tokens in an update, in texts of any length, whose rows are told; 0 where the data are no texts."""
        return max((each.limit for each in self.entries if self.tokens and self._counts(each)), default=0)

    @property
    def tokens_later(self) -> int:
        """`tokens_up_to` of adapters that wait for the second step (`WAITING`); 0: none does."""
        waiting = (each for each in self.entries if each.reason == WAITING and self.tokens)
        return max((each.capacity for each in waiting), default=0)

    @property
    def adapters(self) -> str:
        """What LoRA means for texts, in words; empty: no layer that tells is an adapter."""
        able = [each for each in self.entries if each.limit or each.reason == WAITING]
        ranks = sorted({each.adapter for each in able if each.adapter})
        if not ranks or not self.tokens:
            return ""
        lora, most = f" LoRA of rank {' and '.join(map(str, ranks))}:", self.tokens_up_to
        told = f"everything up to {most} distinct tokens is told" if most else "no token is told"
        if self.tokens_later:
            return f"{lora} {told} in the first step, while B is zero, and up to {self.tokens_later} in later ones."
        return f"{lora} {told}; adapters of one input add up."

    def tells(self, examples: int) -> bool:
        """Are so many examples told? A token is one of a vocabulary, so that any equation decides."""
        return self.equations(examples) >= (1 if self.tokens else self.unknowns)

    def _counts(self, entry: Entry) -> bool:
        return entry.kind != "embedding" and (self.tokens is None or entry.places >= self.tokens)

    @property
    def levels(self) -> tuple[int, ...]:
        """`told_up_to`, then the most examples for which at least twice as many maps tell, if any."""
        first = self.told_up_to
        most = {each.most for each in self.entries if 0 < each.most < first}
        twice = 2 * len(self.telling(first))
        return (first, *sorted((count for count in most if len(self.telling(count)) >= twice), reverse=True)[:1])

    @property
    def bag(self) -> tuple[Entry, ...]:
        """Embeddings: the rows of their gradient that change name the tokens."""
        return tuple(each for each in self.entries if each.kind == "embedding" and not each.reason)

    @property
    def headline(self) -> str:
        """One sentence."""
        if self.problem:
            return f"Spans: not counted, {self.problem}"
        bag = f" The rows of {_some(self.bag)} name the values that occur." if self.bag else ""
        if self.tokens_up_to:
            known = [each for each in self.entries if each.limit == self.tokens_up_to and self._counts(each)]
            texts = f" ({self._count(self.told_up_to)} of {self.tokens})" if self.told_up_to else ""
            told = f"Spans: up to {self.tokens_up_to} tokens in an update{texts} are told by {_named(known)}."
            return f"{told}{self.adapters}{bag}"
        if not self.told_up_to:
            none = f"Spans: too few equations to tell even one {self.noun[0]}; other attacks need no span."
            return f"{none}{self.adapters}{bag}"
        first, *more = self.levels
        verb = "is" if first == 1 else "are"
        text = f"Spans: {self._up_to(first)} in an update {verb} told by {_named(self.telling(first))}"
        text += "".join(f"; {self._up_to(count, brief=True)} by {_layers(self.telling(count))}" for count in more)
        joint = any(each.centred == "batch" for each in self.telling(first))
        return f"{text}.{' BatchNorm in training mode: only the batch as a whole.' if joint else ''}{bag}"

    def _count(self, number: int) -> str:
        return f"{number} {self.noun[number != 1]}"

    def _up_to(self, number: int, brief: bool = False) -> str:
        return ("" if number == 1 else "up to ") + (str(number) if brief else self._count(number))

    def record(self) -> dict[str, Any]:
        """For JSON."""
        names = ("unknowns", "tokens", "told_up_to", "tokens_up_to", "tokens_later", "headline")
        return {name: getattr(self, name) for name in names} | {"layers": [each.record() for each in self.entries]}


def _layers(entries: Iterable[Entry]) -> str:
    count = sum(len(each.layers) for each in entries)
    return f"{count} layer{'s' if count != 1 else ''}"


def _some(entries: Iterable[Entry]) -> str:
    names = [name or "the model" for each in entries for name in each.layers]
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def _named(entries: Iterable[Entry]) -> str:
    entries = tuple(entries)
    return f"{_layers(entries)} ({_some(entries)})"


# --- counting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Map:
    """A linear map in one pass. Maps with an equal `rows` see the same rows."""

    entry: Entry
    module: nn.Module
    rows: tuple[Any, ...]
    data: Tensor  # the input
    output: tuple[int, int] = (0, 0)  # identity and version
    parameters: tuple[Tensor, ...] = field(default=())


def ledger(task: Task) -> Ledger:
    """Count rows, outputs and inputs of every linear map, with two passes over examples of noise; no attack, no data.

    print(ledger(task).headline)
    """
    private = {name: f for name, f in task.fields.items() if not f.public and name not in {task.target, *task.drawn}}
    kinds = [f.kind for f in private.values()]
    texts = [f for f in private.values() if isinstance(f.kind, Tokens)]
    counted = Ledger(
        entries=(),
        unknowns=sum(math.prod(f.shape) for f in private.values()),
        noun=kinds[0].noun if kinds else Ledger.noun,
        tokens=math.prod(texts[0].shape) if texts and not any(f.continuous for f in private.values()) else None,
    )
    try:
        first, second = (_pass(task, private, number) for number in (0, 1))
        return replace(counted, entries=tuple(_entries(task, first, second)))
    except Exception as problem:  # a user's model and loss can raise anything; here that is the finding
        return replace(counted, problem=f"the model failed on noise ({type(problem).__name__}: {problem!s:.200}).")


def _pass(task: Task, private: dict[str, Field], number: int) -> tuple[Call, ...]:
    """The calls of all modules over examples of noise; dropout draws the same in every pass."""
    batch = task.blank(EXAMPLES)
    for stream, (name, each) in enumerate(private.items()):
        batch[name] = _noise(each, batch[name], Draws(randomness.key("ledger", number)).child(stream), number)
    devices = {value.device for value in batch.values() if value.is_cuda}
    with torch.random.fork_rng(devices=list(devices)), double_backward_safe():
        torch.manual_seed(0)
        return module_calls(task, batch)


def _noise(kind: Field, blank: Tensor, draws: Draws, number: int) -> Tensor:
    """Numbers at random; ids too, the same in every example: some models count special tokens."""
    if kind.continuous:
        return blank + 0.25 * draws.normal(tuple(blank.shape)).to(blank)
    if isinstance(kind.kind, Codes) and kind.kind.columns:
        return torch.tensor([min(number, c.width - 1) for c in kind.kind.columns]).to(blank).expand_as(blank)
    assert kind.classes is not None
    return (draws.uniform(kind.shape) * kind.classes).long().to(blank).expand_as(blank)


def _entries(task: Task, first: tuple[Call, ...], second: tuple[Call, ...]) -> Iterator[Entry]:
    runs = Counter(call.name for call in first)
    uses = Counter(id(value) for _, value in task.model.named_parameters(remove_duplicate=False))
    other = {each.entry.layers: each.data for each in _maps(task, second)}
    norms = {
        (id(call.inputs[0]), call.inputs[0]._version): centred
        for call in first
        if isinstance(call.inputs[0], Tensor) and (centred := _centres(task.model.get_submodule(call.name)))
    }
    stacks: dict[tuple[Any, ...], list[_Map]] = {}
    for each in _maps(task, first):
        entry = each.entry
        reason = _reason(each, runs, uses, other) or _waits(task.model, entry.layers[0])
        entry = replace(entry, reason=reason, centred=norms.get(each.output, ""))
        key = (*each.rows, entry.centred, reason) if reason in ("", WAITING) else (id(each),)
        stacks.setdefault(key, []).append(replace(each, entry=entry))
    for maps in stacks.values():
        yield _stacked([each.entry for each in maps])


def _stacked(entries: list[Entry]) -> Entry:
    """One entry of maps that see the same rows."""
    return replace(
        entries[0],
        layers=tuple(dict.fromkeys(name for each in entries for name in each.layers)),
        weights=tuple(name for each in entries for name in each.weights),
        outputs=sum(each.outputs for each in entries),
        bias=any(each.bias for each in entries),
    )


def _reason(each: _Map, runs: Counter[str], uses: Counter[int], other: dict[tuple[str, ...], Tensor]) -> str:
    """Why a map does not tell; empty if it does."""
    if each.entry.reason:
        return each.entry.reason
    if not all(value.requires_grad for value in each.parameters):
        return FROZEN
    if any(uses[id(value)] > 1 for value in each.parameters):
        return SHARED
    if (count := runs[each.entry.layers[0]]) > 1:
        return f"runs {count} times"
    if each.entry.layers not in other or torch.equal(each.data, other[each.entry.layers]):
        return PUBLIC
    return "" if each.data.shape and each.data.numel() % EXAMPLES == 0 and each.entry.places else UNEVEN


def _waits(model: nn.Module, name: str) -> str:
    """Why A of a LoRA does not tell yet: dL/dA = (alpha / r) B^T dL/dW' is zero while B is."""
    if f".{A}." not in name:
        return ""
    partner = f".{B}.".join(name.rsplit(f".{A}.", 1))
    weight = dict(model.named_parameters()).get(f"{partner}.weight")
    return WAITING if weight is not None and not bool(weight.any()) else ""


def _rank(name: str, outputs: int, inputs: int) -> int:
    """The rank of the LoRA whose A or B this is; 0: it is neither."""
    return {A: outputs, B: inputs}.get(next((part for part in name.split(".") if part in (A, B)), ""), 0)


def _centres(module: nn.Module) -> str:
    """Does it subtract the mean of each channel, over the batch or within each example?"""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "batch" if module.training or module.running_mean is None else ""
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return "example" if module.training or not module.track_running_stats else ""
    return "example" if isinstance(module, nn.GroupNorm) and module.num_groups == module.num_channels else ""


def _maps(task: Task, calls: tuple[Call, ...]) -> Iterator[_Map]:
    """The linear maps among the calls, each once."""
    before = set()
    for call in calls:
        module = task.model.get_submodule(call.name)
        make = _maker(module)
        if make is None or call.name in before or not isinstance(call.inputs[0], Tensor):
            continue
        before.add(call.name)
        yield from make(call, module)


def _maker(module: nn.Module) -> Callable[[Call, Any], Iterator[_Map]] | None:
    kinds: tuple[tuple[Any, Callable[[Call, Any], Iterator[_Map]]], ...] = (
        (nn.Linear, _layer),
        (nn.Conv1d | nn.Conv2d | nn.Conv3d, _layer),
        (nn.Embedding, _embedding),
        (nn.MultiheadAttention, _attention),
        (nn.RNNBase, _recurrent),
    )
    known = next((make for kind, make in kinds if isinstance(module, kind)), None)
    return _layer if type(module).__name__ == "Conv1D" and hasattr(module, "nf") else known  # of Hugging Face


def _layer(call: Call, module: Any) -> Iterator[_Map]:
    """A linear layer or a convolution."""
    data, weight = call.inputs[0], module.weight
    turned = type(module).__name__ == "Conv1D"
    outputs, inputs = (weight.shape[1], weight.shape[0]) if turned else (weight.shape[0], weight[0].numel())
    convolution = not turned and not isinstance(module, nn.Linear)
    groups = module.groups if convolution else 1
    geometry = (module.kernel_size, module.stride, module.padding, module.dilation) if convolution else ()
    entry = Entry(
        layers=(call.name,),
        weights=(_parameter(call.name, "weight"),),
        kind="convolution" if convolution else "linear",
        places=call.output.numel() // (EXAMPLES * outputs),
        outputs=outputs // groups,
        inputs=inputs,
        entries=data.numel() // EXAMPLES,
        bias=module.bias is not None and module.bias.requires_grad,
        groups=groups,
        reason="" if turned or own_weight(module) else COMPUTED,
        adapter=_rank(call.name, outputs, inputs),
        turned=turned,
    )
    output = (id(call.output), call.version)
    yield _Map(entry, module, (id(data), data._version, *geometry, groups), data, output, (weight,))


def _embedding(call: Call, module: nn.Embedding) -> Iterator[_Map]:
    data, (rows, width) = call.inputs[0], module.weight.shape
    weights = (_parameter(call.name, "weight"),)
    places = data.numel() // EXAMPLES
    entry = Entry((call.name,), weights, "embedding", places, outputs=rows, inputs=width, entries=places)
    yield _Map(entry, module, (call.name,), data, parameters=(module.weight,))


def _attention(call: Call, module: nn.MultiheadAttention) -> Iterator[_Map]:
    """The projections of queries, keys and values, where they see the same rows."""
    data = call.inputs[0]
    if module.in_proj_weight is None or any(each is not data for each in call.inputs[1:3]):
        return
    width = data.shape[-1]
    entry = Entry(
        layers=(call.name,),
        weights=(_parameter(call.name, "in_proj_weight"),),
        kind="attention",
        places=data.numel() // (EXAMPLES * width),
        outputs=3 * width,
        inputs=width,
        entries=data.numel() // EXAMPLES,
        bias=module.in_proj_bias is not None and module.in_proj_bias.requires_grad,
    )
    yield _Map(entry, module, (id(data), data._version), data, parameters=(module.in_proj_weight,))


def _recurrent(call: Call, module: nn.RNNBase) -> Iterator[_Map]:
    """What the first layer of a recurrent network makes of its input: a row for each time step."""
    data = call.inputs[0]
    names = ["weight_ih_l0", *(["weight_ih_l0_reverse"] if module.bidirectional else [])]
    parameters = tuple(getattr(module, name) for name in names)
    entry = Entry(
        layers=(call.name,),
        weights=tuple(_parameter(call.name, name) for name in names),
        kind="recurrent",
        places=data.numel() // (EXAMPLES * module.input_size),
        outputs=sum(len(value) for value in parameters),
        inputs=module.input_size,
        entries=data.numel() // EXAMPLES,
        bias=module.bias,
    )
    yield _Map(entry, module, (id(data), data._version, "recurrent"), data, parameters=parameters)


def _parameter(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
