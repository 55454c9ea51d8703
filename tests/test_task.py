"""The task as a function of its weights, and `Task.check`: every problem, each with a fix."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl
from conftest import CLASSES, SHAPE, largest_difference, network, private, tiny
from gradleak.scenario.task import Batch, Field, Problem, TaskError

LIKE = (torch.zeros(1, *SHAPE), torch.zeros(1, dtype=torch.long))
PIXELS = SHAPE[0] * SHAPE[1] * SHAPE[2]


# --- fields and shapes ------------------------------------------------------------------------------------------------


def test_model_input_space_and_pictures_are_inverse() -> None:
    field = Field((3, 2, 2), bounds=(0, 1), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))
    picture = torch.rand(5, 3, 2, 2, dtype=torch.float64)
    torch.testing.assert_close(field.unit(field.model(picture)), picture)
    torch.testing.assert_close(field.model(picture)[:, 1], (picture[:, 1] - 0.4) / 0.3)


def test_bounds_may_be_any_box() -> None:
    field = Field((1, 2, 2), bounds=(-1, 1))
    low, high = field.limits(torch.zeros(1))
    assert (low.item(), high.item()) == (-1, 1)
    assert field.unit(torch.zeros(1, 1, 2, 2)).unique().item() == 0.5


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"bounds": (1, 0)}, "low < high"),
        ({"std": (0.0,)}, "std must be positive"),
        ({"mean": (0.1, 0.2)}, "one per channel"),
    ],
)
def test_impossible_fields_are_refused(settings: dict, told: str) -> None:
    with pytest.raises(TaskError, match=told):
        Field((3, 2, 2), **settings)


def test_a_field_without_axes_takes_one_mean() -> None:
    with pytest.raises(TaskError, match="one per channel"):
        Field((), mean=(0.1, 0.2))


def test_supervised_reads_shapes_and_nothing_else() -> None:
    batch = private(2)
    task = gl.Task.supervised(network(), F.cross_entropy, like=(batch["x"], batch["y"]))
    assert task.fields["x"].shape == SHAPE
    assert task.fields["y"].classes == CLASSES
    blank = task.blank(3)
    assert blank["x"].unique().tolist() == [0.5]
    assert blank["y"].unique().tolist() == [0]


def test_supervised_refuses_a_shape_the_model_does_not_take() -> None:
    with pytest.raises(TaskError, match=r"does not accept a batch of shape \(2, 3, 4, 4\)"):
        gl.Task.supervised(network(), F.cross_entropy, like=(torch.zeros(1, 3, 4, 4), LIKE[1]))


def test_supervised_refuses_a_model_without_class_scores() -> None:
    with pytest.raises(TaskError, match="classes"):
        gl.Task.supervised(nn.Conv2d(1, 2, 3, padding=1), F.cross_entropy, like=LIKE)


# --- the model as a function ------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_autograd() -> None:
    task, batch = tiny(), private(3)
    F.cross_entropy(task.model(batch["x"]), batch["y"]).backward()
    expected = {name: p.grad for name, p in task.model.named_parameters()}
    assert largest_difference(task.gradient(task.weights(), batch), expected) < 1e-14


def test_the_bias_gradient_is_the_mean_of_probabilities_minus_labels() -> None:
    """dL/db_c = mean_i (p_ic - 1[y_i = c]): what every label rule stands on."""
    task, batch = tiny(), private(4)
    p = task.model(batch["x"]).softmax(-1) - F.one_hot(batch["y"], CLASSES)
    layer = task.classifier
    assert largest_difference(task.gradient(task.weights(), batch)[layer.bias], p.mean(0)) < 1e-14


def test_the_classifier_is_the_last_linear_layer_with_one_output_per_class() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, CLASSES), nn.Tanh(), nn.Linear(CLASSES, CLASSES, bias=False))
    layer = gl.Task.supervised(model, F.cross_entropy, like=LIKE).classifier
    assert (layer.module, layer.weight, layer.bias) == ("3", "3.weight", None)


def test_no_classifier_is_an_error_that_says_what_to_do() -> None:
    model = nn.Sequential(nn.Conv2d(1, CLASSES, 4), nn.Flatten())
    with pytest.raises(TaskError, match="given="):
        _ = gl.Task.supervised(model, F.cross_entropy, like=LIKE).classifier


def test_inputs_of_a_layer_are_caught_and_the_hooks_removed() -> None:
    task, batch = tiny(), private(2)
    caught = task.inputs_of(["3"], task.weights(), batch)["3"]
    assert largest_difference(caught, task.model[:3](batch["x"])) == 0
    assert not task.model.get_submodule("3")._forward_pre_hooks


def test_frozen_parameters_travel_with_the_buffers() -> None:
    task = tiny(norm="eval")
    task.model[0].requires_grad_(False)
    assert "0.weight" not in task.weights()
    assert "0.weight" in task.buffers()
    assert set(task.gradient(task.weights(), private(2))) == set(task.weights())


def test_weights_and_buffers_are_copies_of_what_the_model_holds_now() -> None:
    task = tiny(norm="eval")
    task.gradient(task.weights(), private(2))
    before = task.gradient(task.weights(), private(2))
    task.weights()["0.bias"].add_(1)
    task.buffers()["1.running_mean"].add_(1)
    assert largest_difference(task.gradient(task.weights(), private(2)), before) == 0
    task.model[1].running_mean.add_(1)
    assert largest_difference(task.gradient(task.weights(), private(2)), before) > 1e-3


def test_running_statistics_change_in_the_result_and_not_in_the_model() -> None:
    task, batch = tiny(norm="train"), private(4)
    before = copy.deepcopy(task.model.state_dict())
    _, after = task.gradient_and_buffers(task.weights(), batch)
    assert after["1.num_batches_tracked"] == before["1.num_batches_tracked"] + 1
    task.model(batch["x"])  # the model itself, as torch trains it
    assert largest_difference(after["1.running_mean"], task.model[1].running_mean) < 1e-14
    assert largest_difference(after["1.running_var"], task.model[1].running_var) < 1e-14


def test_a_copy_elsewhere_leaves_the_model_alone() -> None:
    task = tiny()
    moved = task.to("cpu", torch.float32)
    assert next(moved.model.parameters()).dtype == torch.float32
    assert next(task.model.parameters()).dtype == torch.float64


# --- check ------------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = kind(4, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.squeeze(1))[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0, activation="gelu")
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.squeeze(1)).mean(1))


class Forward(nn.Module):
    """A linear model with something odd in front of it."""

    def __init__(self, before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.head = before, nn.Linear(PIXELS, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.before(x.flatten(1)))


class NoDouble(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def doubled_if_bright(x: Tensor) -> Tensor:
    return 2 * x if x.sum() > 0 else x


def written_into_zeros(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape)
    y += x
    return y


def layers(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 8), *between, nn.Linear(8, CLASSES))


def task_of(model: nn.Module, loss: Callable[..., Tensor] = F.cross_entropy, classes: int = CLASSES) -> gl.Task:
    fields = {"x": Field(SHAPE), "y": Field((), classes=classes)}
    return gl.Task(model, lambda call, batch: loss(call(batch["x"]), batch["y"]), fields)


def spoilt(value: float) -> nn.Module:
    model = layers(nn.Sigmoid())
    with torch.no_grad():
        model[1].weight[0, 0] = value
    return model


def with_history() -> nn.Module:
    model = layers()
    model.doubled = 2 * model[1].weight
    return model


def one_per_example(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


def only_indices(outputs: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(outputs.log_softmax(-1), y)


def confused_by_probabilities(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs.mean() - y.float().mean() - y.dim()).square()


def without_history(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs.detach(), y)


def test_a_sound_task_has_no_problem() -> None:
    assert tiny().check(private(2)) == []


PROBLEMS: dict[str, tuple[Callable[[], gl.Task], str, str, str]] = {
    "batch norm": (lambda: tiny(norm="train"), "warning", "training mode.*replay exactly that", "model.eval()"),
    "batch norm, one example": (
        lambda: task_of(layers(nn.BatchNorm1d(8))),
        "warning",
        "one example fails",
        "two examples",
    ),
    "batch norm without statistics": (
        lambda: task_of(layers(nn.BatchNorm1d(8, track_running_stats=False)).eval()),
        "warning",
        "BatchNorm",
        "batch size",
    ),
    "dropout": (lambda: task_of(layers(nn.Dropout(0.5))), "error", r"dropout is active \(2 \(Dropout\)", "eval"),
    "functional dropout": (lambda: task_of(Forward(F.dropout)), "error", r"dropout is active \(F.dropout", "eval"),
    "attention": (lambda: task_of(Attention()), "note", "math kernel", "nothing to do"),
    "in place": (lambda: task_of(layers(nn.ReLU(inplace=True))), "note", "in-place operations.*relu", "inplace=False"),
    "gru": (lambda: task_of(Recurrent(nn.GRU)), "note", "recurrent.*plain form", "nothing to do"),
    "lstm": (lambda: task_of(Recurrent(nn.LSTM)), "note", "recurrent.*plain form", "nothing to do"),
    "no parameters": (lambda: task_of(layers().requires_grad_(False)), "error", "no trainable", "requires_grad_"),
    "nan weights": (lambda: task_of(spoilt(torch.nan)), "error", "NaN or infinity in 1.weight", "checkpoint"),
    "half": (lambda: task_of(layers(nn.Sigmoid()).bfloat16()), "warning", "half precision", "float()"),
    "complex": (lambda: task_of(layers().to(torch.complex64)), "error", "not real floating-point", "view_as_real"),
    "classes": (lambda: task_of(layers(), classes=5), "error", "3 outputs.*5 classes", "classes=3"),
    "fewer classes": (lambda: task_of(layers(), classes=2), "warning", "3 outputs.*2 classes", "classes=3"),
    "shape": (lambda: task_of(nn.Linear(7, 3)), "error", r"blank batch \(x \(2, 1, 4, 4\)", "channels first"),
    "not scalar": (lambda: task_of(layers(), one_per_example), "error", r"returns shape \(2,\)", "mean"),
    "no tensor": (lambda: task_of(layers(), lambda *_: 0.5), "error", "returns float", "tensor"),
    "detached": (lambda: task_of(layers(), without_history), "error", "does not depend on the weights", "detach"),
    "hard labels only": (lambda: task_of(layers(), only_indices), "note", "refuses soft labels.*dlg", "idlg"),
    "odd soft labels": (
        lambda: task_of(layers(), confused_by_probabilities),
        "note",
        "another value for a one-hot",
        "idlg",
    ),
    "branch": (lambda: task_of(Forward(doubled_if_bright)), "warning", "vmap rejects.*control flow", "batched=False"),
    "write": (lambda: task_of(Forward(written_into_zeros)), "warning", "vmap rejects.*lane after lane", "in-place"),
    "no double backward": (lambda: task_of(Forward(NoDouble.apply)), "error", "cannot be differentiated", "replace"),
    "sqrt at zero": (
        lambda: task_of(Forward(lambda x: (x - 0.5).square().sqrt())),
        "warning",
        "not finite at a blank example",
        "sqrt",
    ),
    "weights of the loss": (
        lambda: task_of(layers(), nn.CrossEntropyLoss(weight=torch.ones(CLASSES))),
        "warning",
        "convert the model to torch.float64: RuntimeError",
        "w.to(out)",
    ),
    "relu": (lambda: task_of(layers(nn.ReLU())), "note", "second derivative is zero.*L-BFGS", "strongest"),
    "max pool": (
        lambda: task_of(nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 3))),
        "note",
        "max_pool2d",
        "strongest",
    ),
    "not copyable": (
        lambda: task_of(with_history()),
        "error",
        "cannot be copied",
        "deepcopy",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.filterwarnings("ignore")
def test_check_finds(name: str) -> None:
    make, severity, what, fix = PROBLEMS[name]
    assert found(make().check(), severity, what, fix)


def found(problems: list[Problem], severity: str, what: str, fix: str) -> bool:
    hits = [p for p in problems if re.search(what, p.what) and fix in p.fix and p.severity in severity.split("|")]
    return len(hits) == 1


def test_check_tells_frozen_parameters_apart() -> None:
    task = task_of(layers(nn.Sigmoid()))
    task.model[1].requires_grad_(False)
    assert [str(p) for p in task.check()] == [
        "note: 2 of 4 parameters are frozen (1.bias, 1.weight) and are no part of the update -> nothing to do if "
        "clients train the rest only; otherwise call requires_grad_(True) on them"
    ]


def test_check_reports_everything_at_once_errors_first() -> None:
    task = task_of(layers(nn.Dropout(0.5), nn.BatchNorm1d(8), nn.ReLU()), only_indices)
    severities = [problem.severity for problem in task.check({"x": torch.zeros(2, *SHAPE), "y": torch.tensor([0, 9])})]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)
    assert len(severities) >= 6


def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


X, Y = private(2)["x"], private(2)["y"]
BATCHES: dict[str, tuple[Batch, str, str, str]] = {
    "bytes": ({"x": (X * 255).byte(), "y": Y}, "error", "uint8.*raw image bytes", "/ 255"),
    "0-255": ({"x": X * 255, "y": Y}, "error", "looks like 0-255", "bounds=(0, 255)"),
    "normalised": ({"x": (X - 0.5) / 0.2, "y": Y}, "error", "looks normalised", "mean= and std="),
    "single precision": ({"x": X.float(), "y": Y}, "error", "float32, the model torch.float64", ".to(torch.float64)"),
    "narrow": ({"x": X / 255, "y": Y}, "warning", "less than 2%", "bounds"),
    "nan": ({"x": X / 0, "y": Y}, "error", "NaN or infinity", "remove"),
    "wrong size": ({"x": zeros(2, 1, 8, 8), "y": Y}, "error", r"shape \(2, 1, 8, 8\)", "like="),
    "channels last": ({"x": zeros(2, 4, 4, 1) + 0.5, "y": Y}, "error", r"shape \(2, 4, 4, 1\)", "permute(0, 3, 1, 2)"),
    "label too large": ({"x": X, "y": Y + 2}, "error", "holds 2 to 3.*0 to 2", "from 0"),
    "negative label": ({"x": X, "y": Y - 1}, "error", "holds -1 to", "from 0"),
    "label type": ({"x": X, "y": Y.int()}, "error", "int32", "long()"),
    "label shape": ({"x": X, "y": Y[:, None]}, "error", r"shape \(2, 1\)", "squeeze"),
    "float label": ({"x": X, "y": Y.double()}, "error", "neither class indices nor probabilities", "int64"),
    "no simplex": ({"x": X, "y": zeros(2, CLASSES)}, "error", "neither class indices", "sum to 1"),
    "missing field": ({"x": X}, "error", "fields x; the task declares x, y", "name"),
    "ragged": ({"x": X, "y": Y[:1]}, "error", "different numbers of examples", "first"),
}


@pytest.mark.parametrize("name", BATCHES)
def test_check_finds_in_a_batch(name: str) -> None:
    batch, severity, what, fix = BATCHES[name]
    assert found(tiny().check(batch), severity, what, fix)


def test_a_simplex_is_a_sound_label() -> None:
    assert tiny().check({"x": X, "y": F.one_hot(Y, CLASSES).double()}) == []


def test_declared_statistics_make_normalised_data_sound() -> None:
    task = tiny(mean=0.5, std=0.2)
    assert task.check({"x": (X - 0.5) / 0.2, "y": Y}) == []
    assert found(task.check({"x": X * 9, "y": Y}), "error", "outside the declared bounds", "correct")


def test_one_example_is_an_error_where_the_batch_has_one() -> None:
    task = task_of(layers(nn.BatchNorm1d(8)))
    assert found(task.check({"x": torch.rand(1, *SHAPE), "y": Y[:1]}), "error", "one example fails", "two examples")


@pytest.mark.parametrize("kind", ["train", "eval"])
def test_check_touches_neither_the_model_nor_the_random_state(kind: str) -> None:
    model = layers(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU()).train(kind == "train")
    model[2].eval()  # a mixture of modes
    calls: list[int] = []
    hook = model[1].register_forward_hook(lambda *_: calls.append(1))
    state, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    hooks = dict(model[1]._forward_hooks)
    flags = [p.requires_grad for p in model.parameters()]
    generator = torch.get_rng_state()
    task_of(model).check({"x": torch.rand(3, *SHAPE, generator=torch.Generator()), "y": torch.tensor([0, 1, 2])})
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert dict(model[1]._forward_hooks) == hooks
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)
    hook.remove()


def test_check_leaves_the_attention_settings_alone() -> None:
    before = torch.backends.mha.get_fastpath_enabled()
    task_of(Attention()).check()
    assert torch.backends.mha.get_fastpath_enabled() == before
