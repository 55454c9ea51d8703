"""What is trained: a model, its objective, and the shapes of the private fields. No data: attackers get it too."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.modules.module import register_module_forward_hook

from gradleak.core import tree
from gradleak.core.settings import takes
from gradleak.core.tree import Params
from gradleak.scenario.fields import Field, TaskError
from gradleak.scenario.inputs import Reading
from gradleak.scenario.kinds import Category
from gradleak.scenario.objectives import ModelLoss, prediction_of
from gradleak.scenario.objectives import Supervised as Supervised
from gradleak.scenario.reading import from_batch as read_batch
from gradleak.scenario.reading import supervised as read_supervised

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
class Task:
    """A model, `objective(model call, batch) -> scalar`, and the private fields."""

    model: nn.Module
    objective: Objective
    fields: dict[str, Field]

    @staticmethod
    @takes(Reading)
    def supervised(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], *, like: Any, reading: Reading) -> Task:
        """A task loss(model(x), y), read off loss, output and target: the other keywords are the fields of `Reading`.

            Task.supervised(model, F.cross_entropy, like=(images, labels), mean=0.5, std=0.2)
            Task.supervised(model, nn.MSELoss(), like=(rows, values), kind=Table(columns))
            Task.supervised(model, F.cross_entropy, like={"input_ids": ids, "attention_mask": mask, "labels": labels})

        `like` is a batch of the client's own form, and gives SHAPES and dtypes, nothing else: (inputs, target), where
        inputs are a tensor, a tuple (fields x, x2, x3) or a dict by argument of the model; or one dict with a target.
        """
        objective, fields = read_supervised(model, loss, like, reading)
        return Task(model, objective, fields)

    @staticmethod
    def from_batch(
        model: nn.Module,
        loss: Callable[[Any, Batch], Tensor] | None,
        batch: Batch,
        *,
        fields: Mapping[str, Field] | None = None,
        public: Sequence[str] = (),
    ) -> Task:
        """A task of any other form: loss(the model's output, batch), or None for the model's own loss.

        `batch` gives SHAPES and dtypes, nothing else. The model gets the entries that it has arguments for, by name
        (x alone, by position, if it has none); with its own loss it gets all. Numbers become fields by their shape;
        ids need a number of classes, from an embedding, the output's classes, or `fields={name: Field(...)}`.
        """
        objective, read = read_batch(model, loss, batch, fields or {}, public)
        return Task(model, objective, read)

    def as_batch(self, batch: Any) -> Batch:
        """A batch of the client's own form, as in `like`, by the names of the fields: "input_ids" becomes "x"."""
        if isinstance(self.objective, ModelLoss):
            return self.objective.as_batch(batch, tuple(self.fields))
        return dict(batch)

    @property
    def own_names(self) -> dict[str, str]:
        """The client's own names for fields, where its batches are dicts: {"input_ids": "x"}. Often none."""
        return self.objective.own_names if isinstance(self.objective, ModelLoss) else {}

    @property
    def target(self) -> str | None:
        """The field that the model is trained to predict: "y", else the one class index; None if there is none."""
        if "y" in self.fields:
            return "y"
        others = (name for name, f in self.fields.items() if name != "x" and name not in self.drawn and not f.public)
        return next((name for name in others if self._is_class_index(name)), None)

    def _is_class_index(self, name: str) -> bool:
        field = self.fields[name]
        return isinstance(field.kind, Category) and not field.shape

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
        after = self._copied(buffers)
        return self.objective(self.call(weights, after), batch), after

    def output(self, weights: Params, batch: Batch, buffers: Params | None = None) -> Tensor:
        """What the model predicts for a batch, as the objective calls it; of several calls the last."""
        copies = self._copied(buffers)
        model, outputs = self.call(weights, copies), list[Any]()

        def call(*args: Any, **kwargs: Any) -> Any:
            outputs.append(model(*args, **kwargs))
            return outputs[-1]

        self.objective(call, batch)
        return prediction_of(outputs[-1])

    def _copied(self, buffers: Params | None) -> Params:
        """Copies of buffers: BatchNorm in training mode writes into those it is given. Nobody writes into weights.

        Frozen weights can be most of a model, as under adapters, and every pass would copy them.
        """
        if buffers is None:
            return self.buffers()
        frozen = {name for name, p in self.model.named_parameters() if not p.requires_grad}
        return {name: value if name in frozen else value.clone() for name, value in buffers.items()}

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
                hook = lambda _, args, named, name=name: catch(name, (*args, *named.values())[0])  # noqa: E731
                handles.append(self.model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
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
        stateful = isinstance(self.objective, nn.Module | ModelLoss)
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
        model = _with_epsilons(copy.deepcopy(self.model)).to(device=device, dtype=dtype)
        return replace(self, model=model, objective=objective)

    def blank(self, examples: int = 1) -> Batch:
        """A batch of the right shapes at the middle of the bounds, on the model's device and in its type."""
        like = next((p for p in self.model.parameters()), torch.zeros(()))
        batch: Batch = {}
        for name, field in self.fields.items():
            if field.classes is not None:
                filler = field.kind.blank()
                batch[name] = torch.full((examples, *field.shape), filler, dtype=torch.long, device=like.device)
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
        target = self.target
        if target is None:
            raise TaskError(
                f"The task has no labels, and so no classifier: its fields are {', '.join(self.fields)}. Attacks that "
                "read labels or features off a last layer do not apply; for a denoiser there are dlg-dm, invg-dm, gidm."
            )
        if not self._is_class_index(target):
            kind = self.fields[target].kind
            raise TaskError(
                f"The target {target!r} ({kind.name}: {kind.noun[1]}) is not one class index for each example, so no "
                "classifier can be read for it. Attacks that read labels off a last layer do not apply; use one that "
                "searches the target (dlg), or give it in Knowledge(given={...})."
            )
        classes = self.fields[target].classes
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

    @cached_property
    def remembered(self) -> dict[Any, Any]:
        """What others found out by running the model, by key: facts of its structure, not of its weights."""
        return {}

    @property
    def class_index(self) -> bool:
        """Is the target y one class index for each example? Rules that read labels hold for nothing else."""
        return "y" in self.fields and self._is_class_index("y")

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


def _with_epsilons(model: nn.Module) -> nn.Module:
    """RMSNorm without `eps` takes the rounding of its type, so that in another type it would compute something else.

    Behind embeddings of 0.02 that is 1e-4 of a gradient: no replay in float64 would explain a client in float32.
    """
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    for module in model.modules():
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            module.eps = torch.finfo(like.dtype).eps
    return model
