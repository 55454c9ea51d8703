"""The U-Net: its size, its two ways to be told a step, and the derivatives that attacks take of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

from gradleak import models
from gradleak.core import registry, tree
from gradleak.models.transformers import Attention
from gradleak.models.unets import LinearAttention, PixelAttention, UNet, sinusoids

SHAPE, STEPS = (1, 8, 8), 20


def small(seed: int = 0, **settings: Any) -> UNet:
    """8x8 images, two levels, in double precision."""
    made = {"shape": SHAPE, "base": 4, "multipliers": (1, 2), "blocks": 1, "groups": 2, "heads": 2, "steps": STEPS}
    return models.unet(**{**made, **settings}, generator=torch.Generator().manual_seed(seed)).double()


def images(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- the network ------------------------------------------------------------------------------------------------------


def residual(inputs: int, outputs: int, time: int) -> int:
    """Two norms, two 3x3 convolutions, the step's scale and shift, and a 1x1 skip where the width changes."""
    body = 2 * inputs + 9 * inputs * outputs + outputs + 2 * outputs + 9 * outputs**2 + outputs
    return body + (time + 1) * 2 * outputs + (0 if inputs == outputs else (inputs + 1) * outputs)


def test_the_reference_network_has_the_size_that_its_parts_add_up_to() -> None:
    a, b, c, time = 64, 128, 256, 256
    attention = 2 * c + (c + 1) * 3 * c + (c + 1) * c
    stem, clock, out = 27 * a + a, 65 * time + (time + 1) * time, 2 * a + 3 * a + 3
    down = [residual(i, o, time) for i, o in ((a, a), (a, a), (a, b), (b, b), (b, c), (c, c))]
    up = [residual(2 * width, width, time) for width in (c, c, b, b, a, a)]
    sizes = 9 * a * a + a + 9 * b * b + b + 9 * c * b + b + 9 * b * a + a
    total = stem + clock + sum(down) + sum(up) + 2 * residual(c, c, time) + 3 * attention + sizes + out
    assert parameters(models.unet()) == total == 12_746_819


def test_small_ones_have_a_few_thousand_weights() -> None:
    """What tests on 8x8 images can afford: two levels, or one."""
    assert 9_000 < parameters(small()) < 10_000
    assert 2_000 < parameters(small(multipliers=(1,))) < 4_000


def test_attention_between_all_pixels_is_at_the_lowest_level_alone() -> None:
    model = models.unet(base=8, multipliers=(1, 2, 4))
    places = [name for name, module in model.named_modules() if isinstance(module, PixelAttention)]
    assert places == ["down.2.attention", "up.0.attention", "attention"]


def test_linear_attention_is_on_the_upper_levels_where_asked() -> None:
    model = small(linear_attention=True, stem=7)
    places = [name for name, module in model.named_modules() if isinstance(module, LinearAttention)]
    assert places == ["down.0.attention", "up.1.attention"]
    assert model.stem.weight.shape == (4, 1, 7, 7)
    assert model(images(3), torch.arange(3)).shape == (3, *SHAPE)


def test_linear_attention_weighs_values_by_keys_and_these_by_queries() -> None:
    layer = LinearAttention(4, 2, 2)
    for part in (layer.project, layer.out):
        part.to_empty(device="cpu")
        part.reset_parameters()
    layer = layer.double()
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    q, k, v = layer.project(layer.norm(x)).flatten(2).chunk(3, dim=1)
    expected = torch.zeros(2, 4, 9, dtype=torch.float64)
    for image in range(2):
        for head in (slice(0, 2), slice(2, 4)):
            weights = q[image, head].softmax(0).T @ k[image, head].softmax(1)  # (pixels, pixels), one row a query
            expected[image, head] = (weights @ v[image, head].T).T * 2**-0.5
    torch.testing.assert_close(layer(x), x + layer.out(expected.reshape(x.shape)))


def test_nothing_depends_on_the_global_generator() -> None:
    before = torch.get_rng_state()
    one, other = small(), small()
    assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert not all(map(torch.equal, one.parameters(), small(seed=1).parameters()))


def test_no_layer_begins_at_zero() -> None:
    """A last convolution of zeros, as some trainers have it, would hide all the layers before it in round 0."""
    model = small()
    loss = model(images(1), torch.tensor([3])).square().mean()
    assert all(bool(gradient.any()) for gradient in torch.autograd.grad(loss, list(model.parameters())))


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_step_and_its_embedding_are_the_same() -> None:
    model, t = small(), torch.tensor([0, 7, STEPS - 1])
    assert torch.equal(model(images(3), t), model(images(3), model.table[t]))
    assert not torch.allclose(model(images(3), t), model(images(3), t.flip(0)))


def test_embeddings_are_sines_then_cosines_of_falling_frequency() -> None:
    table = sinusoids(1000, 64)
    assert table.shape == (1000, 64)
    assert torch.equal(table[0], torch.tensor([0.0] * 32 + [1.0] * 32, dtype=torch.float64))
    torch.testing.assert_close(table[5, 0], torch.tensor(5.0, dtype=torch.float64).sin())
    torch.testing.assert_close(table[5, 63], torch.tensor(5e-4, dtype=torch.float64).cos())
    apart = torch.cdist(table, table) + torch.eye(1000)
    assert apart.min() > 1e-2  # so a step can be told from its embedding


def test_the_table_is_no_weight_and_no_buffer_and_is_not_rounded_with_the_model() -> None:
    model = small()
    table = model.table.clone()
    assert not list(model.buffers())
    assert not any("table" in name for name in model.state_dict())
    rounded = copy.deepcopy(model).float()
    assert rounded.table.dtype == torch.float64
    assert torch.equal(rounded.table, table)
    assert rounded(images(2).float(), torch.arange(2)).dtype == torch.float32


def test_the_time_layer_is_the_first_linear_layer_behind_the_embedding() -> None:
    model = small()
    layer = model.get_submodule(model.time_layer)
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (4, 16)
    assert layer.bias is not None
    caught: list[Tensor] = []
    layer.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    model(images(2), torch.tensor([3, 9]))
    assert torch.equal(caught[0], model.table[[3, 9]])


def test_floats_that_are_no_embedding_are_refused() -> None:
    with pytest.raises(ValueError, match=r"embeddings \(B, 4\).*simplex of steps is averaged by the objective"):
        small()(images(2), torch.full((2, STEPS), 1 / STEPS))


# --- derivatives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"linear_attention": True}])
def test_a_gradient_can_be_differentiated_in_lanes_forwards_and_backwards(settings: dict[str, Any]) -> None:
    model = small(**settings)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    t, along = torch.tensor([4]), images(3, seed=1)

    def match(x: Tensor) -> Tensor:
        loss = lambda own: functional_call(model, own, (x[None], t)).square().mean()  # noqa: E731
        return tree.squared_norm(grad(loss)(weights))

    def directional(x: Tensor, v: Tensor) -> Tensor:
        return jvp(match, (x,), (v,))[1]

    backwards = vmap(grad(match))(images(3))
    one_by_one = torch.stack([grad(match)(x) for x in images(3)])
    torch.testing.assert_close(backwards, one_by_one, rtol=1e-9, atol=1e-12)
    forwards = vmap(directional)(images(3), along)
    torch.testing.assert_close(forwards, (backwards * along).flatten(1).sum(1), rtol=1e-9, atol=1e-12)
    nearby = [(match(x + 1e-6 * v) - match(x - 1e-6 * v)) / 2e-6 for x, v in zip(images(3), along, strict=True)]
    torch.testing.assert_close(torch.stack(nearby), forwards, rtol=1e-5, atol=1e-8)


def through_attention(device: str) -> Tensor:
    """The second derivative by the image, of the gradient of the attention's own weights."""
    model = small().to(device)
    named = {name: value for name, value in model.named_parameters() if ".attention.project" in f".{name}"}
    x = images(1).to(device).requires_grad_()
    loss = model(x, torch.tensor([4], device=device)).square().mean()
    gradients = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    return torch.autograd.grad(sum(value.square().sum() for value in gradients), x)[0]


def test_the_second_derivative_passes_attention() -> None:
    assert any(isinstance(module, Attention) for module in small().modules())
    found = through_attention("cpu")
    assert found.isfinite().all()
    assert found.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_second_derivative_passes_attention_on_a_gpu() -> None:
    torch.testing.assert_close(through_attention("cuda").cpu(), through_attention("cpu"), rtol=1e-6, atol=1e-12)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"multipliers": ()}, "levels and blocks"),
        ({"blocks": 0}, "levels and blocks"),
        ({"base": 5}, "base must be even"),
        ({"shape": (1, 9, 8)}, "to no whole number"),
        ({"stem": 4}, "stem must be odd"),
        ({"heads": 3}, "3 heads do not divide 8 channels"),
        ({"heads": 8, "linear_attention": True}, "8 heads do not divide 4 channels"),
    ],
)
def test_impossible_networks_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        small(**settings)


def test_it_is_registered_and_is_no_classifier() -> None:
    made = registry.get("model", "unet", base=4, multipliers=[1, 2], groups=2, heads=2)
    assert isinstance(made, UNet)
    with pytest.raises(registry.BadSetting, match="no setting 'classes'"):
        registry.get("model", "unet", classes=10)
