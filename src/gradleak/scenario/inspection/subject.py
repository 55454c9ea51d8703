"""What the checks look at: a private copy of the task, one recorded pass, and one real second derivative."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode

from gradleak.core import tree
from gradleak.scenario.dropout import drops
from gradleak.scenario.task import Batch, Field, Problem, Task

BRIEF = 0.5  # seconds
NEAR, TRIES = 1e-7, 3
BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Failed:
    """An attempt that raised."""

    why: str


class _Calls(TorchFunctionMode):
    """Notes every torch function by name, and every write into a floating-point tensor that is not a buffer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.in_place: set[str] = set()
        self.dropout: set[str] = set()
        self.buffers = {id(buffer) for buffer in model.buffers()}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        self.names.add(name)
        first = next((value for value in args if isinstance(value, Tensor)), None)
        writes = (kwargs or {}).get("inplace") is True or name == "__setitem__" or _is_in_place(name)
        if writes and first is not None and first.is_floating_point() and id(first) not in self.buffers:
            self.in_place.add(name)
        if (
            name.endswith("dropout")
            and _given(function, args, kwargs, "training")
            and _given(function, args, kwargs, "p")
        ):
            self.dropout.add(f"F.{name}")
        return function(*args, **(kwargs or {}))


def _given(function: Any, args: Any, kwargs: Any, name: str) -> Any:
    """The value of a named argument, as passed or by default."""
    try:
        bound = signature(function).bind(*args, **(kwargs or {}))
    except (TypeError, ValueError):  # a built-in without a signature: inside the function of the same name
        return None
    bound.apply_defaults()
    return bound.arguments.get(name)


def _is_in_place(name: str) -> bool:
    dunder = name.startswith("__")
    setter = name in ("requires_grad_", "retain_grad_", "share_memory_")
    return (dunder and name.startswith("__i") and name not in ("__invert__", "__init__", "__index__", "__int__")) or (
        not dunder and name.endswith("_") and not setter
    )


@dataclass(frozen=True, eq=False)
class Pass:
    """One run of the objective: what it gave, what the model gave on the way, which functions were called."""

    value: Any
    outputs: list[Any]
    calls: _Calls


@dataclass(frozen=True, eq=False)
class Subject:
    """What the checks look at; everything expensive is computed once. `fewest`: examples of the smallest batch."""

    task: Task
    data: Batch | None = None
    fewest: int | None = None

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        return dict(self.task.model.named_modules())

    @cached_property
    def blank(self) -> Batch:
        """Two blank examples: one alone would hide what couples them, and BatchNorm refuses it."""
        return self.task.blank(2)

    def named(self, kinds: tuple[type, ...], which: Callable[[Any], bool] = lambda _: True) -> list[str]:
        """The layers of these kinds, as "name (kind)"."""
        chosen = {name: module for name, module in self.modules.items() if isinstance(module, kinds) and which(module)}
        return [f"{name} ({type(module).__name__})".strip() for name, module in chosen.items()]

    def run(self, batch: Batch, model: nn.Module | None = None) -> Pass | Failed:
        """The objective on a batch, with the model in the mode it is in, or with another model."""
        outputs: list[Any] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            outputs.append((model or self.task.model)(*args, **kwargs))
            return outputs[-1]

        calls = _Calls(self.task.model)
        try:
            with calls:
                return Pass(self.task.objective(call, batch), outputs, calls)
        except Exception as problem:  # a user's model and loss can raise anything; here that is the finding
            return Failed(first_line(problem))

    @cached_property
    def forward(self) -> Pass | Failed:
        return self.run(self.blank)

    @cached_property
    def scalar(self) -> bool:
        """Does the objective give what can be differentiated twice?"""
        passed = self.forward
        return (
            isinstance(passed, Pass)
            and isinstance(passed.value, Tensor)
            and passed.value.dim() == 0
            and passed.value.is_floating_point()
            and passed.value.requires_grad
        )

    @cached_property
    def lanes(self) -> Tensor | Failed:
        """Two lanes of the second derivative under vmap, as the engine takes it."""
        return self._timed[0]

    @cached_property
    def own_functions(self) -> list[str]:
        """Names of the autograd.Functions of Python in the graph of the loss: what their backward does is unknown."""
        value = self.forward.value if isinstance(self.forward, Pass) else None
        waiting, nodes = [getattr(value, "grad_fn", None)], set[Any]()
        while waiting:
            node = waiting.pop()
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting += [following for following, _ in node.next_functions]
        own = (type(node).__name__ for node in nodes if isinstance(node, BackwardCFunction))
        return sorted({name.removesuffix("Backward") for name in own})

    def true_slope(self) -> bool:
        """Is the second derivative the slope of the first? Two nearby points in double precision tell.

        torch.func takes a backward that is declared once differentiable for a constant, and gives a wrong number.
        """
        try:
            task = self._without_dropout().to(device_of(self.task), torch.float64)
            # A kink between the points can part the two as well, but not every time.
            return any(_slopes_agree(task, torch.Generator().manual_seed(attempt)) for attempt in range(TRIES))
        except Exception:  # it runs in another precision only, and another check says so
            return True

    @property
    def batched(self) -> bool:
        """Can lanes be solved together? True where there is nothing to differentiate."""
        if not self.scalar:
            return True
        return isinstance(self.lanes if continuous(self.task) else self._gradients_of_ids, Tensor)

    @cached_property
    def _gradients_of_ids(self) -> Tensor | Failed:
        """The gradient of two lanes of ids at once, through which texts are searched for. Some models look at ids."""
        task, blank = self._without_dropout(), self.task.blank(1)
        weights = task.weights()
        try:
            twice = tree.map(lambda value: torch.stack([value, value]), blank)
            return vmap(lambda batch: tree.squared_norm(task.gradient(weights, batch)))(twice)
        except Exception as problem:  # as below: what is raised here is the finding
            return Failed(first_line(problem))

    @property
    def seconds(self) -> float | None:
        """Of one second derivative of one lane, if it was taken."""
        return self._timed[1] if self.scalar and continuous(self.task) else None

    @cached_property
    def _timed(self) -> tuple[Tensor | Failed, float]:
        """The attempt, and its time for one lane. A fast one is repeated: the first is mostly preparation."""
        _warm_up()
        began = time.perf_counter()
        attempt, ended = self._attempt(batched=True), time.perf_counter()
        if ended - began < BRIEF and isinstance(attempt, Tensor):
            began, _, ended = ended, self._attempt(batched=True), time.perf_counter()
        return attempt, (ended - began) / 2

    @cached_property
    def one_by_one(self) -> Tensor | Failed:
        return self._attempt(batched=False)

    def _attempt(self, batched: bool) -> Tensor | Failed:
        """The gradient, by the unknowns, of the gradient's squared norm. Dropout has a check of its own: off here."""
        task = self._without_dropout()
        weights, buffers = task.weights(), task.buffers()
        # One example is enough, and half the work, unless BatchNorm in training mode needs two.
        blank = self.blank if any(norm.training for norm in batch_norms(task.model)) else task.blank(1)
        unknown = {name: blank[name] for name in continuous(task)}
        others = {name: value for name, value in blank.items() if name not in unknown}  # each lane has its own

        def match(guess: Batch, others: Batch, buffers: tree.Params) -> Tensor:
            return tree.squared_norm(task.gradient(weights, {**others, **guess}, buffers))

        try:
            if not batched:
                return tree.flatten(grad(match)(unknown, others, buffers))
            twice = lambda value: torch.stack([value, value])  # noqa: E731
            apart = {name: torch.stack([value, value * 0.9]) for name, value in unknown.items()}
            return tree.flatten(vmap(grad(match))(apart, tree.map(twice, others), tree.map(twice, buffers)))
        except Exception as problem:  # as above: what is raised here is the finding
            return Failed(first_line(problem))

    def _without_dropout(self) -> Task:
        model = copy.deepcopy(self.task.model)
        for module in model.modules():
            if drops(module):
                module.eval()
        return replace(self.task, model=model)


def _slopes_agree(task: Task, source: torch.Generator) -> bool:
    """Along a random line: how the gradient's squared norm rises, and what its derivative says."""
    weights, buffers, blank = task.weights(), task.buffers(), task.blank(2)
    middle = {name: blank[name] for name in continuous(task)}
    noise, ahead = (tree.map(lambda v: torch.randn(v.shape, generator=source).to(v), middle) for _ in range(2))
    start = tree.add(middle, noise, 0.1)

    def match(guess: Batch) -> Tensor:
        return tree.squared_norm(task.gradient(weights, {**blank, **guess}, buffers))

    rise = (match(tree.add(start, ahead, NEAR)) - match(start)) / NEAR
    slope = tree.dot(grad(match)(start), ahead)
    return bool((rise - slope).abs() <= 0.01 * torch.maximum(rise.abs(), slope.abs()) + 1e-6)


@cache
def _warm_up() -> None:
    """Let torch load what it needs for second derivatives: seconds, once in a process, that are no cost of a model."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Flatten(), nn.Linear(1, 2))
    fields = {"x": Field((1, 1, 1)), "y": Field((), classes=2)}
    Subject(Task(model, lambda call, batch: cross_entropy(call(batch["x"]), batch["y"]), fields))._attempt(batched=True)


Check: TypeAlias = Callable[[Subject], Iterable[Problem]]


def continuous(task: Task) -> list[str]:
    """The names of the fields whose values a gradient moves."""
    return [name for name, f in task.fields.items() if f.continuous]


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Its BatchNorm layers."""
    return [module for module in model.modules() if isinstance(module, BATCH_NORM)]


def fewest_examples(task: Task) -> int:
    """How many examples the model takes at least: 1, or 2 where BatchNorm in training mode refuses a single one."""
    if not any(norm.training for norm in batch_norms(task.model)):
        return 1
    subject = Subject(replace(task, model=copy.deepcopy(task.model)))
    return 2 if isinstance(subject.run(task.blank(1)), Failed) else 1


def hard_targets(task: Task) -> str:
    """Why the loss takes no class probabilities in place of a class, so that no search can move them; empty: it does.

    Two passes in evaluation mode: with class indices, and with the same classes as probabilities.
    """
    names = [name for name, f in task.fields.items() if f.classes is not None and f.kind.soft and not f.public]
    if not names:
        return ""
    subject = Subject(replace(task, model=copy.deepcopy(task.model).eval()))
    soft = {name: one_hot(subject.blank[name], task.fields[name], subject.blank) for name in names}
    hard, passed = subject.forward, subject.run({**subject.blank, **soft})
    if isinstance(passed, Failed):
        return f"the loss refuses soft labels ({passed.why})"
    if isinstance(hard, Pass) and not torch.allclose(torch.as_tensor(passed.value), hard.value, rtol=1e-3):
        return "the loss gives another value for a one-hot label than for its index"
    return ""


def declared(subject: Subject) -> Iterator[tuple[str, Tensor, Field]]:
    """The batch's tensors that the task declares, each with its field."""
    for name, value in (subject.data or {}).items():
        if name in subject.task.fields:
            yield name, value, subject.task.fields[name]


def examples_in(batch: Batch) -> int | None:
    """How many examples a batch holds; None where no tensor has an axis."""
    return next((value.shape[0] for value in batch.values() if value.dim()), None)


def device_of(task: Task) -> torch.device:
    """Where the model's parameters are."""
    return next((p.device for p in task.model.parameters()), torch.device("cpu"))


def one_hot(index: Tensor, kind: Field, blank: Batch) -> Tensor:
    """A class index as probabilities, in the floating-point type of the blank batch."""
    assert kind.classes is not None
    dtype = next((value.dtype for value in blank.values() if value.is_floating_point()), torch.float32)
    return (index[..., None] == torch.arange(kind.classes, device=index.device)).to(dtype)


def is_simplex(value: Tensor) -> bool:
    """Are these probabilities over the last axis?"""
    return bool((value >= 0).all()) and bool((value.sum(-1) - 1).abs().max() < 1e-3)


def some(names: Iterable[str]) -> str:
    """The first four names, and how many more there are."""
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def first_line(problem: Exception) -> str:
    """An exception in one line of at most 300 characters."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:300]
