"""Checks of parameters and layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from gradleak.core import tree
from gradleak.scenario.derivatives import WITHOUT
from gradleak.scenario.dropout import drops
from gradleak.scenario.inspection.subject import BATCH_NORM, Failed, Pass, Subject, continuous, some
from gradleak.scenario.recurrence import RECURRENT_FORMS
from gradleak.scenario.task import Problem

_PIECEWISE_LINEAR = ("relu", "relu_", "relu6", "leaky_relu", "prelu", "rrelu", "hardtanh", "threshold")
_ATTENTION = ("scaled_dot_product_attention", "multi_head_attention_forward", "_transformer_encoder_layer_fwd")


# --- the parameters -------------------------------------------------------------------------------------------------


def parameters_exist(subject: Subject) -> Iterator[Problem]:
    """Something must be trained; frozen parameters are not uploaded and leak nothing."""
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
            f"{len(frozen)} of {len(parameters)} parameters are frozen ({some(frozen)}) and are no part of the update",
            "nothing to do if clients train the rest only; otherwise call requires_grad_(True) on them",
        )


def parameters_are_finite(subject: Subject) -> Iterator[Problem]:
    """NaN in the weights makes every match NaN."""
    state = {**dict(subject.task.model.named_parameters()), **dict(subject.task.model.named_buffers())}
    broken = [name for name, value in state.items() if not tree.finite({name: value.detach()})]
    if broken:
        yield Problem(
            "error",
            f"weights hold NaN or infinity in {some(broken)}",
            "load a checkpoint from before the training diverged",
        )


def parameters_are_floats(subject: Subject) -> Iterator[Problem]:
    """Attacks differentiate real numbers, and half precision leaves them too few digits."""
    kinds = {name: p.dtype for name, p in subject.task.model.named_parameters() if p.requires_grad}
    odd = [name for name, kind in kinds.items() if not kind.is_floating_point]
    half = [name for name, kind in kinds.items() if kind in (torch.float16, torch.bfloat16)]
    if odd:
        yield Problem(
            "error",
            f"parameters that are not real floating-point numbers: {some(odd)} ({kinds[odd[0]]})",
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
    """BatchNorm in training mode couples the examples of a batch: results of the two modes do not compare."""
    live = subject.named(BATCH_NORM, lambda module: module.training or module.running_mean is None)
    if not live:
        return
    yield Problem(
        "warning",
        f"BatchNorm is in training mode ({some(live)}): the client normalises by the statistics of its own batch and "
        "returns changed running averages, and attacks replay exactly that. The examples of a batch are then coupled, "
        "and a single example is normalised by itself",
        "audit the mode that clients train in: leave it if they train so, at their real batch size; call model.eval() "
        "if their statistics are frozen. Results of the two modes do not compare",
    )
    alone = subject.run(subject.task.blank(1))
    if isinstance(alone, Failed) and isinstance(subject.forward, Pass):
        yield Problem(
            "error" if subject.fewest == 1 else "warning",
            f"a batch of one example fails in this mode: {alone.why}",
            "audit clients with at least two examples (--examples 2), larger inputs, or model.eval()",
        )


def dropout_is_off(subject: Subject) -> Iterator[Problem]:
    """Masks are the client's own draws: with active dropout no replay matches."""
    active = subject.named((nn.Module,), drops)
    if not active and isinstance(subject.forward, Pass):
        active = sorted(subject.forward.calls.dropout)  # called as a function
    if active:
        yield Problem(
            "error",
            f"dropout is active ({some(active)}): its masks are random, so no replay can match the client's gradient, "
            "and vmap refuses random layers",
            "call model.eval(), or set p=0 in these layers, and say in the report that dropout was off",
        )


def exact_formulas(subject: Subject) -> Iterator[Problem]:
    """Functions that torch cannot differentiate as attacks need it."""
    for missing, forms in WITHOUT.items():
        used = {function.__name__ for function in forms} & _called(subject)
        if not used:
            continue
        kinds = {name.replace("_", "") for name in used}  # nn.Hardsigmoid calls hardsigmoid, and so on
        calling = tuple(kind for kind in map(type, subject.modules.values()) if kind.__name__.lower() in kinds)
        layers = subject.named(calling)
        yield Problem(
            "note",
            f"{some(used)}{f' in {some(layers)}' if layers else ''}: torch has no {missing} of it, so attacks use an "
            "exact formula with the same values",
            "nothing to do",
        )


def recurrent_layers(subject: Subject) -> Iterator[Problem]:
    """The fused kernels fail under vmap, and those of cuDNN have no double backward."""
    called = {function.__name__ for function in RECURRENT_FORMS} & _called(subject)
    if called:
        layers = subject.named((nn.RNNBase, nn.RNNCellBase))
        yield Problem(
            "note",
            f"recurrent layers ({some(layers or called)}): the fused kernels fail under vmap or have no second "
            "derivative, so clients and attacks run them by their plain form, step by step: slower on CUDA",
            "nothing to do; the time grows with the length of the sequence",
        )


def _called(subject: Subject) -> set[str]:
    return subject.forward.calls.names if isinstance(subject.forward, Pass) else set()


def fused_attention(subject: Subject) -> Iterator[Problem]:
    """Fused kernels have no double backward."""
    layers = subject.named((nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer))
    called = not _called(subject).isdisjoint(_ATTENTION)
    if layers or called:
        yield Problem(
            "note",
            f"attention ({some(layers) if layers else 'scaled_dot_product_attention'}): the fused kernels have no "
            "double backward, so attacks force the math kernel, which is slower and takes more memory",
            "nothing to do; pass a smaller Engine(chunk=...) if memory runs out",
        )


def in_place_operations(subject: Subject) -> Iterator[Problem]:
    """They fail under vmap where lanes share the tensor that is written."""
    if isinstance(subject.forward, Pass) and subject.forward.calls.in_place:
        yield Problem(
            "note",
            f"in-place operations in the forward pass: {some(subject.forward.calls.in_place)}. Under vmap they fail "
            "where they write a lane's values into a tensor that all lanes share, such as torch.zeros(...)",
            "nothing to do while no vmap error is listed here; otherwise inplace=False, or x = x + y for x += y",
        )


def kinks(subject: Subject) -> Iterator[Problem]:
    """Piecewise linear layers stop second-order searches; that looks like safety, but is not."""
    flat = sorted(name for name in _called(subject) if "max_pool" in name or name in _PIECEWISE_LINEAR)
    if flat and continuous(subject.task):
        yield Problem(
            "note",
            f"piecewise linear layers ({some(flat)}): their second derivative is zero almost everywhere. Signed and "
            "cosine attacks (ig) cope; L-BFGS on the squared error (dlg, idlg, cpl) does not, and that is no safety",
            "read the strongest attack's numbers, not those of dlg, idlg or cpl",
        )
