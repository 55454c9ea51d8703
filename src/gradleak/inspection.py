"""`Task.check`: what would make an attack fail or mislead, found in a second instead of after a night's run.

Each check is a small function that yields problems. All of them look at a `Subject`: a private copy of the model, one
recorded pass of the objective over a blank batch, and one real attempt at what every gradient-matching attack needs
(two lanes of a second derivative under vmap). The user's model, its mode and the global random state are not touched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode

from gradleak import tree
from gradleak.task import Batch, Field, Problem, Task, double_backward_safe

_ORDER = {"error": 0, "warning": 1, "note": 2}
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_PIECEWISE_LINEAR = ("relu", "relu_", "relu6", "leaky_relu", "prelu", "rrelu", "hardtanh", "threshold")
_ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward", "_transformer_encoder_layer_fwd")


def inspect(task: Task, batch: Batch | None = None) -> list[Problem]:
    """Every problem at once, errors first. `batch` (the auditor's own data) is checked against the declared fields."""
    try:
        copied = replace(task, model=copy.deepcopy(task.model))
    except Exception as problem:  # whatever a user's own __deepcopy__ raises
        return [
            Problem(
                "error",
                f"the model cannot be copied ({_first_line(problem)}), and attacks work on a copy",
                "make copy.deepcopy(model) work: no tensors with a history as attributes, no open files",
            )
        ]
    device = _device(copied)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), double_backward_safe():
        subject = Subject(copied, batch)
        found = [problem for check in CHECKS for problem in check(subject)]
    return sorted(found, key=lambda problem: _ORDER[problem.severity])


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
    """What the checks look at; everything expensive is computed once."""

    task: Task
    data: Batch | None = None

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
            return Failed(_first_line(problem))

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
        return self._attempt(batched=True)

    @cached_property
    def one_by_one(self) -> Tensor | Failed:
        return self._attempt(batched=False)

    def _attempt(self, batched: bool) -> Tensor | Failed:
        """The gradient, by the unknowns, of the gradient's squared norm. Dropout has a check of its own: off here."""
        model = copy.deepcopy(self.task.model)
        for module in model.modules():
            if isinstance(module, _DROPOUT):
                module.eval()
        task = replace(self.task, model=model)
        weights, buffers = task.weights(), task.buffers()
        unknown = {name: self.blank[name] for name in _continuous(task)}

        def match(guess: Batch, buffers: tree.Params) -> Tensor:
            return tree.squared_norm(task.gradient(weights, {**self.blank, **guess}, buffers))

        try:
            if not batched:
                return tree.flatten(grad(match)(unknown, buffers))
            twice = lambda value: torch.stack([value, value])  # noqa: E731
            apart = {name: torch.stack([value, value * 0.9]) for name, value in unknown.items()}
            return tree.flatten(vmap(grad(match))(apart, tree.map(twice, buffers)))
        except Exception as problem:  # as above: what is raised here is the finding
            return Failed(_first_line(problem))


Check: TypeAlias = Callable[[Subject], Iterable[Problem]]


# --- the parameters -------------------------------------------------------------------------------------------------


def parameters_exist(subject: Subject) -> Iterator[Problem]:
    parameters = dict(subject.task.model.named_parameters())
    frozen = [name for name, p in parameters.items() if not p.requires_grad]
    if len(frozen) == len(parameters):
        yield Problem(
            "error",
            "the model has no trainable parameters, so a client uploads nothing",
            "call requires_grad_(True) on the parameters that clients train",
        )
    elif frozen:
        yield Problem(
            "note",
            f"{len(frozen)} of {len(parameters)} parameters are frozen ({_some(frozen)}) and are no part of the update",
            "nothing to do if clients train the rest only; otherwise call requires_grad_(True) on them",
        )


def parameters_are_finite(subject: Subject) -> Iterator[Problem]:
    state = {**dict(subject.task.model.named_parameters()), **dict(subject.task.model.named_buffers())}
    broken = [name for name, value in state.items() if not tree.finite({name: value.detach()})]
    if broken:
        yield Problem(
            "error",
            f"weights hold NaN or infinity in {_some(broken)}",
            "load a checkpoint from before the training diverged",
        )


def parameters_are_floats(subject: Subject) -> Iterator[Problem]:
    kinds = {name: p.dtype for name, p in subject.task.model.named_parameters() if p.requires_grad}
    odd = [name for name, kind in kinds.items() if not kind.is_floating_point]
    half = [name for name, kind in kinds.items() if kind in (torch.float16, torch.bfloat16)]
    if odd:
        yield Problem(
            "error",
            f"parameters that are not real floating-point numbers: {_some(odd)} ({kinds[odd[0]]})",
            "attacks differentiate real numbers: store complex parameters as torch.view_as_real",
        )
    if half:
        yield Problem(
            "warning",
            f"{len(half)} parameters are {kinds[half[0]]}: an update in half precision keeps 3 digits, "
            "so exact recovery is out of reach and a failed attack does not mean safe",
            "audit model.float(), unless clients really train and upload in half precision",
        )


# --- the model's layers ---------------------------------------------------------------------------------------------


def batch_norm_mode(subject: Subject) -> Iterator[Problem]:
    live = subject.named(_BATCH_NORM, lambda module: module.training or module.running_mean is None)
    if not live:
        return
    yield Problem(
        "warning",
        f"BatchNorm is in training mode ({_some(live)}): the client normalises by the statistics of its own batch and "
        "returns changed running averages, and attacks replay exactly that. The examples of a batch are then coupled, "
        "and a single example is normalised by itself",
        "audit the mode that clients train in: leave it if they train so, at their real batch size; call model.eval() "
        "if their statistics are frozen. Results of the two modes do not compare",
    )
    alone = subject.run(subject.task.blank(1))
    if isinstance(alone, Failed) and isinstance(subject.forward, Pass):
        one = subject.data is not None and _examples(subject.data) == 1
        yield Problem(
            "error" if one else "warning",
            f"a batch of one example fails in this mode: {alone.why}",
            "use at least two examples per step, or model.eval()",
        )


def dropout_is_off(subject: Subject) -> Iterator[Problem]:
    active = subject.named(_DROPOUT, lambda module: module.training and module.p > 0)
    if not active and isinstance(subject.forward, Pass):
        active = sorted(subject.forward.calls.dropout)  # called as a function
    if active:
        yield Problem(
            "error",
            f"dropout is active ({_some(active)}): its masks are random, so no replay can match the client's gradient, "
            "and vmap refuses random layers",
            "call model.eval(), or set p=0 in these layers, and say in the report that dropout was off",
        )


def recurrent_layers(subject: Subject) -> Iterator[Problem]:
    layers = subject.named(_RECURRENT)
    if layers and subject.scalar:
        rejected = isinstance(subject.lanes, Failed)
        yield Problem(
            "error" if rejected else "note",
            f"recurrent layers ({_some(layers)}): vmap {'rejects' if rejected else 'takes'} them on this machine, "
            "and on CUDA the cuDNN kernels have no double backward",
            "Engine(batched=False) attacks lane after lane; on CUDA also torch.backends.cudnn.enabled = False",
        )


def fused_attention(subject: Subject) -> Iterator[Problem]:
    layers = subject.named((nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
    called = isinstance(subject.forward, Pass) and any(name in subject.forward.calls.names for name in _ATTENTION)
    if layers or called:
        yield Problem(
            "note",
            f"attention ({_some(layers) if layers else 'scaled_dot_product_attention'}): the fused kernels have no "
            "double backward, so attacks force the math kernel, which is slower and takes more memory",
            "nothing to do; pass a smaller Engine(chunk=...) if memory runs out",
        )


def in_place_operations(subject: Subject) -> Iterator[Problem]:
    if isinstance(subject.forward, Pass) and subject.forward.calls.in_place:
        yield Problem(
            "note",
            f"in-place operations in the forward pass: {_some(subject.forward.calls.in_place)}. Under vmap they fail "
            "where they write a lane's values into a tensor that all lanes share, such as torch.zeros(...)",
            "nothing to do while no vmap error is listed here; otherwise inplace=False, or x = x + y for x += y",
        )


def kinks(subject: Subject) -> Iterator[Problem]:
    names = subject.forward.calls.names if isinstance(subject.forward, Pass) else set()
    flat = sorted(name for name in names if "max_pool" in name or name in _PIECEWISE_LINEAR)
    if flat:
        yield Problem(
            "note",
            f"piecewise linear layers ({_some(flat)}): their second derivative is zero almost everywhere. Signed and "
            "cosine attacks (ig) cope; L-BFGS on the squared error (dlg, idlg, cpl) does not, and that is no safety",
            "read the strongest attack's numbers, not those of dlg, idlg or cpl",
        )


# --- the objective --------------------------------------------------------------------------------------------------


def model_accepts_the_shapes(subject: Subject) -> Iterator[Problem]:
    if isinstance(subject.forward, Failed):
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in subject.blank.items())
        yield Problem(
            "error",
            f"the objective fails on a blank batch ({shapes}): {subject.forward.why}",
            "check the shapes of the fields (channels first, no batch axis) and the number of classes",
        )


def objective_is_scalar(subject: Subject) -> Iterator[Problem]:
    if not isinstance(subject.forward, Pass) or subject.scalar:
        return
    value = subject.forward.value
    if not isinstance(value, Tensor):
        what, fix = f"returns {type(value).__name__}", "return the loss as a tensor"
    elif value.dim() > 0:
        what, fix = f"returns shape {tuple(value.shape)}", 'return a scalar: reduction="mean", or .mean()'
    elif not value.is_floating_point():
        what, fix = f"returns {value.dtype}", "return a floating-point loss"
    elif not any(p.requires_grad for p in subject.task.model.parameters()):
        return  # said already
    else:
        what, fix = (
            "does not depend on the weights",
            "remove torch.no_grad(), .detach() and .item() from model and loss",
        )
    yield Problem("error", f"the objective {what}, so it has no gradient to upload", fix)


def other_precisions(subject: Subject) -> Iterator[Problem]:
    """Attacks run in float32 or float64, on a copy of the model; a tensor inside the loss is not part of the model."""
    for dtype in (torch.float32, torch.float64):
        attempt = Subject(subject.task.to(_device(subject.task), dtype)).forward
        if isinstance(attempt, Failed) and isinstance(subject.forward, Pass):
            yield Problem(
                "warning",
                f"the objective fails where attacks convert the model to {dtype}: {attempt.why}",
                "convert the loss's own tensors in each call, such as cross_entropy(out, y, weight=w.to(out))",
            )


def fields_are_images(subject: Subject) -> Iterator[Problem]:
    flat = {name: f.shape for name in _continuous(subject.task) if len((f := subject.task.fields[name]).shape) != 3}
    if flat:
        yield Problem(
            "warning",
            f"fields that are not images (channels, height, width): {flat}. Image priors and tiled starts (ig, gi, "
            "cpl) mean nothing there: such attacks diverge at once or refuse",
            "use dlg, idlg or representation, or a composition without them; reshape what is an image",
        )


def outputs_and_classes(subject: Subject) -> Iterator[Problem]:
    categorical = [(name, f.classes) for name, f in subject.task.fields.items() if f.classes is not None]
    outputs = subject.forward.outputs[-1] if isinstance(subject.forward, Pass) and subject.forward.outputs else None
    if len(categorical) != 1 or not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return
    name, classes = categorical[0]
    if classes in (outputs.shape[1], outputs.shape[-1]):
        return
    yield Problem(
        "error" if outputs.shape[-1] < classes else "warning",
        f"the model has {outputs.shape[-1]} outputs, but field {name!r} declares {classes} classes",
        f"pass classes={outputs.shape[-1]}, or give the model a last layer of {classes} outputs",
    )


def soft_labels(subject: Subject) -> Iterator[Problem]:
    names = [name for name, f in subject.task.fields.items() if f.classes is not None]
    if not names or not subject.scalar:
        return
    soft = {name: _one_hot(subject.blank[name], subject.task.fields[name], subject.blank) for name in names}
    quiet = copy.deepcopy(subject.task.model).eval()  # so that two passes differ by the label alone
    hard, passed = subject.run(subject.blank, quiet), subject.run({**subject.blank, **soft}, quiet)
    if isinstance(passed, Failed):
        what = f"the loss refuses soft labels ({passed.why})"
    elif isinstance(hard, Pass) and not torch.allclose(torch.as_tensor(passed.value), hard.value, rtol=1e-3):
        what = "the loss gives another value for a one-hot label than for its index"
    else:
        return
    yield Problem(
        "note",
        f"{what}, so attacks that optimise the label with the image (dlg) cannot run",
        "use attacks that read the label off the update (idlg, ig), or a loss that takes probabilities (cross_entropy)",
    )


def second_derivative(subject: Subject) -> Iterator[Problem]:
    """Really take it, two lanes at once. Recurrent layers are reported by their own check."""
    if not subject.scalar or not _continuous(subject.task):
        return
    lanes = subject.lanes
    if isinstance(lanes, Tensor):
        if not lanes.isfinite().all():
            yield Problem(
                "warning",
                "the second derivative is not finite at a blank image: lanes that start there freeze at once",
                "look for sqrt, norm, log or division at zero in model and loss; add a small constant inside them",
            )
    elif isinstance(subject.one_by_one, Failed):
        yield Problem(
            "error",
            f"the gradient cannot be differentiated again: {subject.one_by_one.why}",
            "replace the operation that has no double backward (a custom autograd.Function, a fused kernel)",
        )
    elif not subject.named(_RECURRENT):
        yield Problem(
            "error",
            f"vmap rejects the second derivative: {lanes.why}",
            "Engine(batched=False) attacks lane after lane; to keep the speed, remove .item(), branches on values, "
            "random layers and in-place writes into tensors made inside forward",
        )


# --- the auditor's batch --------------------------------------------------------------------------------------------


def batch_has_the_fields(subject: Subject) -> Iterator[Problem]:
    if subject.data is None:
        return
    given, wanted = subject.data.keys(), subject.task.fields.keys()
    if given != wanted:
        yield Problem(
            "error",
            f"the batch has fields {_some(given) or 'none'}; the task declares {_some(wanted)}",
            "name the batch's tensors as the task's fields",
        )
    sizes = {name: value.shape[0] for name, value in subject.data.items() if value.dim()}
    if len(set(sizes.values())) > 1:
        yield Problem(
            "error", f"the fields have different numbers of examples: {sizes}", "examples come first in every field"
        )


def continuous_values(subject: Subject) -> Iterator[Problem]:
    for name, value, kind in _declared(subject):
        if kind.classes is not None:
            continue
        yield from _form(name, value, kind, subject)
        if not value.is_floating_point():
            continue
        if not value.isfinite().all():
            yield Problem("error", f"batch[{name!r}] holds NaN or infinity", "remove these examples")
        elif tuple(value.shape[1:]) == kind.shape and value.numel():
            yield from _range(name, value, kind)


def labels(subject: Subject) -> Iterator[Problem]:
    for name, value, kind in _declared(subject):
        if kind.classes is None:
            continue
        shape = tuple(value.shape[1:])
        if value.is_floating_point():
            if shape != (*kind.shape, kind.classes) or not _is_simplex(value):
                yield Problem(
                    "error",
                    f"batch[{name!r}], {value.dtype} of shape {tuple(value.shape)}, is neither class indices nor "
                    "probabilities",
                    f"give indices as int64, or rows of {kind.classes} probabilities that sum to 1",
                )
            continue
        if value.dtype != torch.int64:
            yield Problem(
                "error", f"batch[{name!r}] is {value.dtype}; class indices are int64", f"batch[{name!r}].long()"
            )
        if shape != kind.shape:
            yield Problem(
                "error",
                f"batch[{name!r}] has shape {tuple(value.shape)}; the task declares (examples, *{kind.shape})",
                "squeeze an extra axis, or declare the shape in the Field",
            )
        elif value.numel() and not (int(value.min()) >= 0 and int(value.max()) < kind.classes):
            yield Problem(
                "error",
                f"labels run from {int(value.min())} to {int(value.max())}; the task declares {kind.classes} classes, "
                f"0 to {kind.classes - 1}",
                "count labels from 0, or declare more classes (and as many outputs of the model)",
            )


def _form(name: str, value: Tensor, kind: Field, subject: Subject) -> Iterator[Problem]:
    """Type, device and shape of a continuous field."""
    like = subject.blank[name]
    if not value.is_floating_point():
        bytes_ = value.dtype == torch.uint8
        yield Problem(
            "error",
            f"batch[{name!r}] is {value.dtype}, not floating point" + (" (raw image bytes)" if bytes_ else ""),
            "x.float() / 255, then the client's mean and std"
            if bytes_
            else "convert it as the client's input pipeline does",
        )
    elif value.dtype != like.dtype:
        yield Problem(
            "error", f"batch[{name!r}] is {value.dtype}, the model {like.dtype}", f"batch[{name!r}].to({like.dtype})"
        )
    if value.device != like.device:
        yield Problem(
            "error", f"batch[{name!r}] is on {value.device}, the model on {like.device}", "move one to the other"
        )
    if tuple(value.shape[1:]) != kind.shape:
        last = len(kind.shape) == 3 and tuple(value.shape[1:]) == (*kind.shape[1:], kind.shape[0])
        yield Problem(
            "error",
            f"batch[{name!r}] has shape {tuple(value.shape)}; the task declares (examples, *{kind.shape})",
            "channels come first: x.permute(0, 3, 1, 2)"
            if last
            else "resize the data, or declare its shape with like=(x, y)",
        )


def _range(name: str, value: Tensor, kind: Field) -> Iterator[Problem]:
    """Do the values lie in the declared box, and do they use it?"""
    unit = kind.unit(value.double())
    low, high = float(unit.min()), float(unit.max())
    plain = set(kind.mean) == {0.0} and set(kind.std) == {1.0}
    seen = f"batch[{name!r}] runs from {float(value.min()):.4g} to {float(value.max()):.4g}"
    if low < -0.01 or high > 1.01:
        share = float(((unit < -0.01) | (unit > 1.01)).double().mean())
        told = f"{seen}; {share:.0%} of it lies outside the declared bounds {kind.bounds}"
        told += f" (mean {kind.mean}, std {kind.std})" if not plain else ""
        if plain and kind.bounds == (0.0, 1.0) and value.min() >= 0 and value.max() > 2:
            told, fix = f"{told}: it looks like 0-255 data", "divide by 255, or pass bounds=(0, 255)"
        elif plain and value.min() < 0:
            told, fix = (
                f"{told}: it looks normalised",
                "pass the mean= and std= of the client's input pipeline to the task",
            )
        else:
            fix = "correct bounds, mean and std: boxed attacks cannot leave the bounds, and metrics scale by them"
        yield Problem("warning", told, fix)
    elif high - low < 0.02:
        yield Problem(
            "warning",
            f"{seen}, less than 2% of the declared bounds {kind.bounds}: metrics would call any grey image a success",
            "correct bounds, mean and std (0-1 data with bounds=(0, 255)?)",
        )


CHECKS: tuple[Check, ...] = (
    parameters_exist,
    parameters_are_finite,
    parameters_are_floats,
    model_accepts_the_shapes,
    objective_is_scalar,
    other_precisions,
    fields_are_images,
    outputs_and_classes,
    dropout_is_off,
    recurrent_layers,
    second_derivative,
    batch_norm_mode,
    soft_labels,
    fused_attention,
    in_place_operations,
    kinks,
    batch_has_the_fields,
    continuous_values,
    labels,
)


# --- small things ---------------------------------------------------------------------------------------------------


def _continuous(task: Task) -> list[str]:
    return [name for name, f in task.fields.items() if f.classes is None]


def _declared(subject: Subject) -> Iterator[tuple[str, Tensor, Field]]:
    for name, value in (subject.data or {}).items():
        if name in subject.task.fields:
            yield name, value, subject.task.fields[name]


def _examples(batch: Batch) -> int | None:
    return next((value.shape[0] for value in batch.values() if value.dim()), None)


def _device(task: Task) -> torch.device:
    return next((p.device for p in task.model.parameters()), torch.device("cpu"))


def _one_hot(index: Tensor, kind: Field, blank: Batch) -> Tensor:
    assert kind.classes is not None
    dtype = next((value.dtype for value in blank.values() if value.is_floating_point()), torch.float32)
    return (index[..., None] == torch.arange(kind.classes, device=index.device)).to(dtype)


def _is_simplex(value: Tensor) -> bool:
    return bool((value >= 0).all()) and bool((value.sum(-1) - 1).abs().max() < 1e-3)


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:300]
