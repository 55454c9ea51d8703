"""What is trained: a model, its objective, and the shapes of the private fields. No data: attackers get it too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.modules.module import register_module_forward_hook

from gradleak.core import tree
from gradleak.core.tree import Params
from gradleak.scenario.fields import Field, TaskError
from gradleak.scenario.kinds import Category

if TYPE_CHECKING:
    from gradleak.core.random import Draws

Batch: TypeAlias = dict[str, Tensor]
"""Private tensors by field name, examples first: "x", "y". A categorical field holds an index or a simplex."""

Objective: TypeAlias = Callable[[Callable[..., Any], Batch], Tensor]


class _AllCaught(BaseException):  # noqa: N818  (not an error; a BaseException, so that no model catches it)
    """Ends a forward pass early."""


@dataclass(frozen=True)
class Problem:
    """What `Task.check` found. `severity`: "error" (attacks will fail), "warning" (they will mislead) or "note"."""

    severity: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.what} -> {self.fix}"


@dataclass(frozen=True)
class Classifier:
    """The last linear layer: logits = W h + b. Names of its module and of its parameters."""

    module: str
    weight: str
    bias: str | None


@dataclass(frozen=True, eq=False)
class Supervised:
    """The objective loss(model(x), y). A loss that is a module (weighted cross-entropy) travels with the task."""

    loss: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, call: Callable[..., Any], batch: Batch) -> Tensor:
        return self.loss(call(batch["x"]), batch["y"])

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Supervised:
        if not isinstance(self.loss, nn.Module):
            return self
        return Supervised(copy.deepcopy(self.loss).to(device=device, dtype=dtype))


@dataclass(frozen=True, eq=False)
class Task:
    """A model, `objective(model call, batch) -> scalar`, and the private fields."""

    model: nn.Module
    objective: Objective
    fields: dict[str, Field]

    @staticmethod
    def supervised(
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        *,
        like: tuple[Tensor, Tensor],
        bounds: tuple[float, float] = (0.0, 1.0),
        classes: int | None = None,
        mean: float | Sequence[float] = 0.0,
        std: float | Sequence[float] = 1.0,
    ) -> Task:
        """A classification task. `like=(x, y)` gives SHAPES, nothing else; classes come from the model's output.

        `bounds` are those of the raw pixels, `mean` and `std` what the client's pipeline subtracts and divides by.
        """
        x, y = like
        if x.dim() < 2:
            raise TaskError(f"like=(x, y) needs x with a batch axis; given shape {tuple(x.shape)}.")
        as_tuple = lambda value: tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),)  # noqa: E731
        shape = tuple(x.shape[1:])
        image = Field(shape, bounds, as_tuple(mean), as_tuple(std))
        if classes is None:
            outputs = _output(model, shape)
            if outputs.dim() != 2:
                raise TaskError(
                    f"The model maps one example of shape {shape} to {tuple(outputs.shape)}, not to (1, classes): "
                    "pass classes=, or build Task(model, objective, fields) by hand."
                )
            classes = outputs.shape[1]
        label = Field(tuple(y.shape[1:]) if not y.is_floating_point() else (), classes=classes)
        return Task(model, Supervised(loss), {"x": image, "y": label})

    @property
    def drawn(self) -> frozenset[str]:
        """The fields that a client draws itself in every step: the time step and the noise of a denoiser. Often none.

        Such an objective names them (`drawn`) and draws those that a batch lacks (`complete(batch, draws)`).
        """
        return getattr(self.objective, "drawn", frozenset())

    def completed(self, batch: Batch, draws: Draws) -> Batch:
        """The batch, with the fields that a client draws added where they are missing."""
        if self.drawn <= batch.keys():
            return batch
        complete: Callable[[Batch, Draws], Batch] = self.objective.complete  # type: ignore[attr-defined]
        return complete(batch, draws)

    # --- the model as a function -------------------------------------------------------------------------------

    def weights(self) -> Params:
        """The trainable parameters, detached copies by name."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def buffers(self) -> Params:
        """Buffers and frozen parameters: all that the model needs besides the trained weights."""
        frozen = {name: p for name, p in self.model.named_parameters() if not p.requires_grad}
        return tree.detach({**frozen, **dict(self.model.named_buffers())})

    def call(self, weights: Params, buffers: Params | None = None) -> Callable[..., Any]:
        """The model with these weights, as a function."""
        state = {**(self.buffers() if buffers is None else buffers), **weights}
        return lambda *args, **kwargs: functional_call(self.model, state, args, kwargs)

    def loss(self, weights: Params, batch: Batch, buffers: Params | None = None) -> tuple[Tensor, Params]:
        """The objective and the buffers after the forward pass (BatchNorm in training mode changes them)."""
        # Cloned inside the differentiated function, so that in-place buffer updates stay in this call and this lane.
        after = self.buffers() if buffers is None else {name: value.clone() for name, value in buffers.items()}
        return self.objective(self.call(weights, after), batch), after

    def output(self, weights: Params, batch: Batch, buffers: Params | None = None) -> Any:
        """What the model gives for a batch, as the objective calls it; of several calls the last."""
        # Copies: BatchNorm in training mode writes into the buffers it is given.
        copies = self.buffers() if buffers is None else {name: value.clone() for name, value in buffers.items()}
        model, outputs = self.call(weights, copies), list[Any]()

        def call(*args: Any, **kwargs: Any) -> Any:
            outputs.append(model(*args, **kwargs))
            return outputs[-1]

        self.objective(call, batch)
        return outputs[-1]

    def gradient(self, weights: Params, batch: Batch, buffers: Params | None = None) -> Params:
        """The gradient of the objective with respect to the weights; differentiable again."""
        return self.gradient_and_buffers(weights, batch, buffers)[0]

    def gradient_and_buffers(
        self, weights: Params, batch: Batch, buffers: Params | None = None
    ) -> tuple[Params, Params]:
        """The gradient of the loss, and the buffers after the forward pass."""
        return grad(self.loss, has_aux=True)(weights, batch, buffers)

    def inputs_of(
        self,
        modules: Sequence[str],
        weights: Params,
        batch: Batch,
        buffers: Params | None = None,
        *,
        whole: bool = True,
    ) -> Batch:
        """The input of each named submodule in one forward pass of the objective.

        whole   run the pass to its end; False: stop once all inputs are caught, if each module runs only once
        """
        caught: Batch = {}
        handles = []

        def catch(name: str, value: Any) -> None:
            caught[name] = value
            if not whole and len(caught) == len(modules):
                raise _AllCaught

        try:
            for name in modules:
                hook = lambda _, args, name=name: catch(name, args[0])  # noqa: E731
                handles.append(self.model.get_submodule(name).register_forward_pre_hook(hook))
            self.loss(weights, batch, buffers)
        except _AllCaught:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return caught

    def copied(self) -> Task:
        """The same task with its own copy of model and objective.

        Models and losses may store activations or counters as attributes: after a private batch, private ones.
        """
        stateful = isinstance(self.objective, nn.Module | Supervised)
        try:
            model, objective = copy.deepcopy((self.model, self.objective if stateful else None))
        except RuntimeError as problem:  # torch copies no tensor that belongs to a graph
            raise TaskError(
                f"The model or its loss cannot be copied: {problem} It keeps a tensor of an earlier pass as an "
                "attribute; delete it, or let forward keep it detached."
            ) from problem
        return replace(self, model=model, objective=self.objective if objective is None else objective)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Task:
        """A copy on a device and in a type; the user's model does not change."""
        objective: Any = copy.deepcopy(self.objective) if isinstance(self.objective, nn.Module) else self.objective
        objective = objective.to(device, dtype) if hasattr(objective, "to") else objective
        return replace(self, model=copy.deepcopy(self.model).to(device=device, dtype=dtype), objective=objective)

    def blank(self, examples: int = 1) -> Batch:
        """A batch of the right shapes at the middle of the bounds, on the model's device and in its type."""
        like = next((p for p in self.model.parameters()), torch.zeros(()))
        batch: Batch = {}
        for name, field in self.fields.items():
            if field.classes is not None:
                batch[name] = torch.zeros((examples, *field.shape), dtype=torch.long, device=like.device)
            elif not field.bounded:
                batch[name] = torch.zeros((examples, *field.shape), device=like.device, dtype=like.dtype)
            else:
                middle = torch.full((examples, *field.shape), 0.5, device=like.device, dtype=like.dtype)
                batch[name] = field.model(middle)
        return batch

    @cached_property
    def classifier(self) -> Classifier:
        """The linear layer that produces the logits, found by running the model once on a blank example."""
        names = {module: name for name, module in self.model.named_modules()}
        labels = (field.classes for name, field in self.fields.items() if name not in self.drawn)
        classes = next((count for count in labels if count is not None), None)
        if classes is None:
            raise TaskError(
                f"The task has no labels, and so no classifier: its fields are {', '.join(self.fields)}. Attacks that "
                "read labels or features off a last layer do not apply; for a denoiser there are dlg-dm, invg-dm, gidm."
            )
        layers: list[nn.Linear] = []

        def note(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(module, nn.Linear) and module in names and output.shape[-1] == classes:
                layers.append(module)

        handle = register_module_forward_hook(note)
        try:
            with torch.no_grad():
                self.loss(self.weights(), self.blank(2))
        finally:
            handle.remove()
        if not layers:
            raise TaskError(
                f"No nn.Linear with {classes} outputs was found in the forward pass, so nothing can be read off a last "
                "layer: give the labels in Knowledge(given={'y': ...}), or use an attack that optimises them (dlg)."
            )
        name = names[layers[-1]]
        prefix = f"{name}." if name else ""
        return Classifier(name, f"{prefix}weight", None if layers[-1].bias is None else f"{prefix}bias")

    @property
    def class_index(self) -> bool:
        """Is the target y one class index for each example? Rules that read labels hold for nothing else."""
        return "y" in self.fields and type(self.fields["y"].kind) is Category

    @cached_property
    def last_layer(self) -> Classifier | None:
        """`classifier`; None where there is none."""
        try:
            return self.classifier
        except TaskError:
            return None

    def check(self, batch: Batch | None = None) -> list[Problem]:
        """Every problem at once, each with a fix. With a batch (the auditor's own) its ranges are checked too."""
        from gradleak.scenario.inspection import inspect  # long and rarely needed

        return list(inspect(self, batch).problems)


def _output(model: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The model's output for two blank examples, on a copy in evaluation mode."""
    trial = copy.deepcopy(model).eval()
    like = next((p for p in trial.parameters()), torch.zeros(()))
    try:
        with torch.no_grad():
            output = trial(torch.zeros((2, *shape), device=like.device, dtype=like.dtype))
    except (RuntimeError, ValueError, TypeError, IndexError) as problem:
        raise TaskError(
            f"The model does not accept a batch of shape (2, {', '.join(map(str, shape))}) as read off like=(x, y): "
            f"{problem}. Check channels and size, and that `like` has a batch axis."
        ) from problem
    if not isinstance(output, Tensor):
        raise TaskError(
            f"The model returns {type(output).__name__}, not a tensor: build Task(model, objective, fields) by hand, "
            "with an objective that picks the logits."
        )
    return output


@contextmanager
def float32_products(fast: bool = False) -> Iterator[None]:
    """Matrix products and convolutions in the type of their operands: no TF32 (unless `fast`), no autocast.

    Late in a search the residual is smaller than the rounding of TF32; client and attacker must agree on the digits. An
    autocast opened inside must not cache its casts: torch drops them when the outermost autocast ends, which is this.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = fast
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
