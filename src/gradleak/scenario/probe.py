"""A hash of what a task computes: its gradient at fixed inputs that have nothing to do with the data.

Two networks with the same layers and weights may use them differently, and their text and code show that only in part.
So model and loss are run, in float64 on the CPU, whatever the device of the run.

For every parameter the hash uses the norm of its gradient and one projection, to six significant digits: rounding each
entry of a large network would sooner or later differ on another machine. Gradients a million times smaller than the
whole count as zero, since they may be rounding only. A model that does not run in float64 is probed in its own type, to
two digits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradleak.core import random as randomness
from gradleak.core.configuration import digest
from gradleak.core.tree import Params
from gradleak.scenario.derivatives import PlainForms
from gradleak.scenario.task import Batch, Field, Task, float32_products

EXAMPLES = 2  # BatchNorm cannot train on one
NOT_RUN = "not run"


def gradient_of(task: Task) -> str:
    """16 hexadecimal digits; or NOT_RUN and the error, if the model does not run on the CPU."""
    native = next(iter(task.weights().values()), torch.zeros(())).dtype
    problem: Exception | None = None
    for dtype, digits in ((torch.float64, 6), (native, 2)):
        try:
            return digest([str(dtype), _rounded(_gradient(task.to("cpu", dtype), dtype), digits)])
        except Exception as raised:  # any error of a user's model: the run itself will report it better
            problem = problem or raised
    return f"{NOT_RUN}: {type(problem).__name__}"


def _gradient(task: Task, dtype: torch.dtype) -> Params:
    batch: Batch = {name: _example(name, field, dtype) for name, field in task.fields.items()}
    with float32_products(), PlainForms(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # dropout
        return task.gradient(task.weights(), batch)


def _example(name: str, field: Field, dtype: torch.dtype) -> Tensor:
    shape = (EXAMPLES, *field.shape)
    if field.classes is not None and field.public:  # a mask that hides every place would hide the model
        return torch.full(shape, field.kind.blank())
    if field.classes is not None:
        return torch.arange(math.prod(shape)).reshape(shape) % field.classes
    source = randomness.Draws(randomness.key("probe", name))
    if not field.bounded:
        return source.normal(shape, dtype=torch.float64).to(dtype)
    return field.model(source.uniform(shape, dtype=torch.float64).to(dtype))


def _rounded(gradient: Params, digits: int) -> dict[str, list[str]]:
    flat = {name: value.detach().double().flatten() for name, value in gradient.items()}
    norms = {name: float(value.norm()) for name, value in flat.items()}
    whole = math.hypot(*norms.values())
    digests: dict[str, list[str]] = {}
    for name, value in flat.items():
        if norms[name] <= 1e-6 * whole:
            digests[name] = ["0"]
            continue
        uneven = torch.frac(torch.arange(1, len(value) + 1, dtype=torch.float64) * 0.6180339887498949) - 0.5
        along = float(value @ uneven) / (norms[name] * float(uneven.norm()))
        digests[name] = [f"{norms[name]:.{digits - 1}e}", repr(round(along, digits) + 0.0)]  # no negative zero
    return digests
