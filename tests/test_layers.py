"""Layers of lanes are ordinary layers, to the last derivative that attacks take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap

from gradleak.engine.layers import LaneLayers
from test_convolution import Counted


def layer_norm(x: Tensor, axes: int, w: Tensor, b: Tensor) -> Tensor:
    """By its definition. Torch's own, asked for a derivative of a tangent of its gradient, answers something else."""
    over = tuple(range(-axes, 0))
    centred = x - x.mean(over, keepdim=True)
    return centred * (centred.square().mean(over, keepdim=True) + 1e-5).rsqrt() * w + b


DEFINED: dict[str, Callable[..., Tensor]] = {
    "layer norm": lambda x, w, b: layer_norm(x, 1, w, b),
    "layer norm of two axes": lambda x, w, b: layer_norm(x, 2, w.expand(2, 4), b.expand(2, 4)),
}
CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "group norm": (lambda x, w, b: F.group_norm(x, 2, w, b, 1e-3), (2, 4, 3, 3)),
    "group norm, one group": (lambda x, w, b: F.group_norm(x, 1, w, b), (1, 4, 2, 2)),
    "group norm of rows": (lambda x, w, b: F.group_norm(x, 2, w, b), (3, 4)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), (2, 3, 4)),
    "layer norm of two axes": (lambda x, w, b: F.layer_norm(x, (2, 4), w.expand(2, 4), b.expand(2, 4)), (2, 2, 4)),
    "no scale": (lambda x, w, b: F.group_norm(x, 2) * w.mean() + b.mean(), (2, 4, 3)),
    "silu": (lambda x, w, b: F.silu(x * w.mean() + b.mean()), (2, 4, 3)),
    "a block": (
        lambda x, w, b: F.silu(F.group_norm(F.silu(F.group_norm(x, 2, w, b)) * x, 4, b, w)),
        (2, 4, 3, 3),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_derivative_is_that_of_torch(case: str) -> None:
    layer, shape = CASES[case]
    generator = torch.Generator().manual_seed(0)
    draw = lambda *sizes: torch.randn(*sizes, generator=generator, dtype=torch.float64)  # noqa: E731
    x, w, b, tangent, by = draw(3, *shape), draw(4), draw(4), draw(3, *shape), draw(*shape)

    held = {"layer": DEFINED.get(case, layer)}

    def upload(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return grad(lambda w, b: (held["layer"](x, w, b).tanh() * by).sum(), argnums=(0, 1))(w, b)

    def matching(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return sum((part.square().sum() for part in upload(x, w, b)), torch.zeros(()))

    def run() -> dict[str, object]:
        fixed = lambda x: upload(x, w, b)  # noqa: E731
        return {
            "value": vmap(lambda x: held["layer"](x, w, b))(x),
            "upload": vmap(fixed)(x),
            "matching": vmap(grad(lambda x: matching(x, w, b)))(x),
            "by the weights too": vmap(grad(matching, argnums=(0, 1, 2)), in_dims=(0, None, None))(x, w, b),
            "forward": vmap(lambda x, t: jvp(fixed, (x,), (t,)))(x, tangent),
            "transpose": vmap(lambda x: vjp(fixed, x)[1](upload(x, b, w)))(x),
            "of the forward one": vmap(grad(lambda x: jvp(fixed, (x,), (tangent[0],))[1][0].square().sum()))(x),
            "curvature": jvp(grad(lambda w: held["layer"](x[0], w, b).sin().sum()), (w,), (b,)),
        }

    plain = run()
    held["layer"] = layer
    with LaneLayers():
        lanes = run()
    torch.testing.assert_close(lanes, plain, rtol=1e-9, atol=1e-11)


def test_rows_that_do_not_vary_are_not_divided_by_zero() -> None:
    x = torch.ones(1, 2, 3, dtype=torch.float64)
    run = lambda: grad(lambda x: grad(lambda x: F.group_norm(x, 2).pow(3).sum())(x).square().sum())(x)  # noqa: E731
    plain = run()
    with LaneLayers():
        torch.testing.assert_close(run(), plain)


@pytest.mark.parametrize("inside", [nn.SiLU(inplace=True), nn.SiLU()], ids=["in place", "plain"])
def test_modules_are_swapped_by_what_they_call(inside: nn.Module) -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), inside, nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 2)
    )
    x = torch.randn(3, 2, 4, 4)
    plain = model(x)
    with LaneLayers():
        torch.testing.assert_close(model(x), plain)


@pytest.mark.parametrize(("make", "most"), [(lambda: nn.GroupNorm(8, 16), 80), (nn.SiLU, 20)], ids=["norm", "silu"])
def test_a_matching_step_is_short(make: Callable[[], nn.Module], most: int) -> None:
    """What a further layer of the kind adds to one step of matching, in kernels: torch's own adds 146 and 28."""

    def kernels(*more: nn.Module) -> int:
        model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.SiLU(), *more, nn.Conv2d(16, 16, 1))
        weights = {name: value.detach() for name, value in model.named_parameters()}

        def matching(x: Tensor) -> Tensor:
            call = torch.func.functional_call
            upload = grad(lambda weights: call(model, weights, (x,)).square().mean())(weights)
            return torch.stack([torch.linalg.vector_norm(part) for part in upload.values()]).sum()

        with LaneLayers(), Counted() as counted:
            vmap(grad(matching))(torch.randn(2, 1, 16, 6, 6))
        return counted.kernels

    assert 5 < kernels(make(), make()) - kernels(make()) < most
