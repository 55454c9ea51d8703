"""Generators: stages that make one forward, unknowns of every kind, files that are believed only where they fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional

from conftest import seeded
from gradleak import generators
from gradleak.core import registry
from gradleak.generators import DCGAN, WGAN, BadGenerator, Card, Generator, StyleGAN2, images_of, with_weights
from gradleak.generators.files import fingerprints, parameters
from gradleak.generators.stages import Staged
from gradleak.generators.stylegan2 import boxes, doubled, kernel
from gradleak.priors import recipes as _recipes  # noqa: F401 (registers them)


def lively(network: Staged) -> Staged:
    """Nothing is at its first value: noise counts, biases are not zero, BatchNorm has statistics."""
    draw = seeded(1)
    with torch.no_grad():
        for value in network.parameters():
            value += 0.2 * torch.randn(value.shape, generator=draw)
        for name, value in network.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                value += 0.3 * torch.rand(value.shape, generator=draw)
    return network


TINY: dict[str, Callable[[int | None], Staged]] = {
    "dcgan": lambda classes: DCGAN((1, 8, 8), classes, latent=4, width=3, embedded=2, generator=seeded()),
    "wgan": lambda classes: WGAN((3, 8, 12), classes, latent=4, width=3, embedded=2, generator=seeded()),
    "stylegan2": lambda classes: StyleGAN2(
        (3, 16, 16), classes, latent=5, style=6, layers=2, widths=(4, 5, 3), clamp=256.0, generator=seeded()
    ),
}
EVERY = [(name, classes) for name in TINY for classes in (None, 3)]
every = pytest.mark.parametrize(("name", "classes"), EVERY)


def tiny(name: str, classes: int | None, dtype: torch.dtype = torch.float64) -> tuple[Staged, Tensor, Tensor | None]:
    """A generator, two latents and their classes."""
    network = lively(TINY[name](classes)).to(dtype)
    z = torch.randn(2, network.latent, generator=seeded(2), dtype=torch.float64).to(dtype)
    return network, z, None if classes is None else torch.tensor([2, 0])


# --- the protocol ----------------------------------------------------------------------------------------------------


@every
def test_stages_one_after_the_other_are_forward(name: str, classes: int | None) -> None:
    network, z, y = tiny(name, classes)
    assert isinstance(network, Generator)
    assert not network.training
    carried = network.begin(z, y)
    names = carried.keys()
    for index in range(network.blocks):
        assert torch.equal(network.finished(carried, index), network(z, y))
        carried = network.block(index, carried)
        assert carried.keys() == names
    assert carried["h"].shape[2:] == (network.shape[1:] if name != "wgan" else (4, 6))
    made = network.picture(carried)
    assert made.shape == (2, *network.shape)
    assert torch.equal(made, images_of(network, z, y))
    assert not torch.allclose(made[0], made[1])


@every
def test_no_image_depends_on_its_neighbours_or_on_chance(name: str, classes: int | None) -> None:
    network, z, y = tiny(name, classes)
    alone = torch.cat([network(z[row : row + 1], None if y is None else y[row : row + 1]) for row in range(2)])
    assert torch.allclose(network(z, y), alone, atol=1e-12)


def test_classes_are_indices_or_shares_and_must_be_given() -> None:
    for name in TINY:
        network, z, y = tiny(name, 3)
        assert y is not None
        shares = functional.one_hot(y, 3).double()
        assert torch.equal(network(z, y), network(z, shares))
        assert not torch.allclose(network(z, y), network(z, (y + 1) % 3))
        with pytest.raises(ValueError, match="3 classes and no class was given: pass y"):
            network(z)
        with pytest.raises(ValueError, match=r"shares y must have shape \(B, 3\)"):
            network(z, shares[:, :2])
        plain, z, _ = tiny(name, None)
        assert torch.equal(plain(z, torch.tensor([1, 1])), plain(z))


@every
def test_lanes_together_are_lanes_alone(name: str, classes: int | None) -> None:
    """vmap over latents and over a copy of the weights in every lane, as GIAS needs it."""
    network, z, y = tiny(name, classes)
    lanes = torch.stack([z, z.flip(0), -z])
    together = vmap(lambda lane: network(lane, y))(lanes)
    assert torch.allclose(together, torch.stack([network(lane, y) for lane in lanes]), atol=1e-10)
    weights = {key: torch.stack([value, value + 0.1, -value]).detach() for key, value in network.named_parameters()}

    def one(own: dict[str, Tensor], lane: Tensor) -> Tensor:
        return functional_call(network, own, (lane, y))

    found = vmap(one)(weights, lanes)
    for row in range(3):
        assert torch.allclose(
            found[row], one({key: value[row] for key, value in weights.items()}, lanes[row]), atol=1e-10
        )


@every
def test_gradients_of_latent_feature_and_weights(name: str, classes: int | None) -> None:
    network, z, y = tiny(name, classes)
    weigh = torch.randn(2, *network.shape, generator=seeded(3), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: (network(v, y) * weigh).sum(), z.clone().requires_grad_())
    last = network.begin(z, y)
    for index in range(network.blocks):
        last = network.block(index, last)
    for carried in (network.block(0, network.begin(z, y)), last):
        first = 1 if carried is not last else network.blocks

        def of_feature(h: Tensor, carried: Any = carried, first: int = first) -> Tensor:
            return (network.finished({**carried, "h": h}, first) * weigh).sum()

        feature = carried["h"].detach().requires_grad_()
        assert torch.autograd.gradcheck(of_feature, feature)
        assert float(torch.autograd.grad(of_feature(feature), feature)[0].abs().max()) > 0
    weights = {key: value.detach() for key, value in network.named_parameters()}
    slope = grad(lambda own: (functional_call(network, own, (z, y)) * weigh).sum())(weights)
    towards = {key: torch.randn(value.shape, generator=seeded(4)).double() for key, value in weights.items()}
    _, expected = jvp(lambda own: (functional_call(network, own, (z, y)) * weigh).sum(), (weights,), (towards,))
    assert torch.allclose(sum((slope[key] * towards[key]).sum() for key in slope), expected)
    unused = [key for key, value in slope.items() if not value.abs().max() > 0]
    assert not unused, "weights that no picture depends on"


def test_second_derivatives() -> None:
    network, z, _ = tiny("stylegan2", None)
    assert torch.autograd.gradgradcheck(lambda v: network(v).square().mean(), z[:1].clone().requires_grad_())


def test_any_method_with_other_weights() -> None:
    network, z, _ = tiny("stylegan2", None)
    changed = {"synthesis.b4.const": torch.zeros_like(network.state_dict()["synthesis.b4.const"])}
    found = with_weights(network, changed, lambda g: g.block(0, g.begin(z))["h"])
    assert not torch.allclose(found, network.block(0, network.begin(z))["h"])
    with pytest.raises(TypeError, match="not an nn.Module"):
        with_weights(object(), {}, lambda g: g)  # type: ignore[arg-type]


# --- the networks ----------------------------------------------------------------------------------------------------


def test_dcgan_of_the_specification() -> None:
    network = DCGAN()
    features, carried = [], network.begin(torch.randn(2, 100))
    for index in range(network.blocks):
        carried = network.block(index, carried)
        features.append(tuple(carried["h"].shape[1:]))
    assert features == [(512, 4, 4), (256, 8, 8), (128, 16, 16), (64, 32, 32)]
    assert parameters(network) == 100 * 512 * 16 + (512 * 256 + 256 * 128 + 128 * 64) * 16 + 2 * 960 + 64 * 3 + 3
    made = network.picture(carried).detach()
    assert made.shape == (2, 3, 32, 32)
    assert 0 <= float(made.min()) <= float(made.max()) <= 1


def test_wgan_of_the_specification() -> None:
    network = WGAN()
    carried = network.block(0, network.begin(torch.randn(2, 128)))
    assert carried["h"].shape == (2, 512, 4, 4)
    assert network.blocks == 3
    linear = 128 * 8192 + 8192 + 2 * 8192
    assert parameters(network) == linear + (512 * 256 + 256 * 128 + 128 * 3) * 4 + 256 + 128 + 3 + 2 * (256 + 128)


@pytest.mark.parametrize("name", ["dcgan:width=4", "wgan:width=4", "stylegan2:width=8,style=8,latent=4"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 64), (3, 64, 64)])
def test_other_sizes(name: str, shape: tuple[int, int, int]) -> None:
    recipe = registry.parse("generator", name)
    network = recipe.generator(shape, 4, seeded())
    made = network(torch.randn(2, network.latent), torch.tensor([0, 3]))
    assert made.shape == (2, *shape)
    judge = recipe.discriminator(shape, 4, seeded())
    assert judge(made, network.shares(torch.tensor([0, 3]), made)).shape == (2,)


def test_sizes_that_cannot_be() -> None:
    for side in (4, 25, 34):
        with pytest.raises(ValueError, match="Resize them"):
            DCGAN((3, side, side))
    with pytest.raises(ValueError, match="4 sizes of features; given 2 widths"):
        StyleGAN2((3, 32, 32), widths=(8, 8))


def test_the_compact_stylegan2_is_small_enough_to_travel() -> None:
    network = registry.parse("generator", "stylegan2").generator((3, 32, 32), 10, seeded())
    assert parameters(network) <= 6_000_000
    assert network.widths == (256, 256, 256, 128)


def filtered(x: Tensor, pad: tuple[int, int], zeros: bool) -> Tensor:
    """[1, 3, 3, 1] / 8 along both axes, by its definition, with gain 4 where zeros were put between pixels."""
    if zeros:
        wide = x.new_zeros(*x.shape[:2], 2 * x.shape[2], 2 * x.shape[3])
        wide[:, :, ::2, ::2] = x
        x = 4 * wide
    x = functional.pad(x, (*pad, *pad))
    return functional.conv2d(x, kernel().to(x).expand(x.shape[1], 1, 4, 4), groups=x.shape[1])


def test_the_filter_as_boxes() -> None:
    x = torch.randn(2, 3, 6, 5, generator=seeded(), dtype=torch.float64)
    assert torch.allclose(boxes(functional.pad(x, (1, 1, 1, 1)), 3), filtered(x, (1, 1), False), atol=1e-14)
    assert torch.allclose(doubled(x), filtered(x, (2, 1), True), atol=1e-14)
    pooled = x  # how it is done on a GPU
    for _ in range(3):
        pooled = functional.avg_pool2d(pooled, 2, stride=1)
    assert torch.allclose(boxes(x, 3), pooled, atol=1e-14)


def test_a_modulated_convolution_by_its_definition() -> None:
    """Karras et al. 2020, eqs. 1 and 3: one kernel per image, scaled by its styles and brought back to unit norm."""
    network, _, _ = tiny("stylegan2", None)
    assert isinstance(network, StyleGAN2)
    draw = seeded(5)
    for layer, inputs, side in (("b8.conv1", 5, 8), ("b8.conv0", 4, 4)):
        made = network.synthesis.get_submodule(layer)
        x = torch.randn(2, inputs, side, side, generator=draw, dtype=torch.float64)
        w = torch.randn(2, 6, generator=draw, dtype=torch.float64)
        noise = torch.randn(2, 1, 8, 8, generator=draw, dtype=torch.float64)
        styles = w @ made.affine.weight.T / math.sqrt(6) + made.affine.bias
        for row in range(2):
            own = made.weight * styles[row][None, :, None, None]
            own = own / (own.square().sum((1, 2, 3), keepdim=True) + 1e-8).sqrt()
            if layer.endswith("0"):
                wide = functional.conv_transpose2d(x[row : row + 1], own.transpose(0, 1), stride=2)
                out = 4 * filtered(wide, (1, 1), False)
            else:
                out = functional.conv2d(x[row : row + 1], own, padding=1)
            out = out + noise[row] * made.noise_strength + made.bias[:, None, None]
            expected = functional.leaky_relu(out, 0.2) * math.sqrt(2)
            assert torch.allclose(made(x, w, noise)[row], expected[0], atol=1e-10)


def test_the_mapping_network_ignores_the_length_of_z_and_has_slow_weights() -> None:
    network = StyleGAN2((3, 8, 8), latent=16, style=16, layers=3, widths=(4, 4), generator=seeded()).double()
    z = torch.randn(500, 16, generator=seeded(1), dtype=torch.float64)
    w = network.begin(z)["w"]
    assert w.shape == (500, 4, 16)
    assert torch.allclose(w, network.begin(3 * z)["w"], atol=1e-6)
    assert 0.3 < float(w[:, 0].detach().square().mean().sqrt()) < 3  # gains keep the scale, though weights are ~ 100
    assert float(network.state_dict()["mapping.fc0.weight"].std()) > 50
    network.centre(4096)
    assert torch.allclose(network.mapping.w_avg, w[:, 0].mean(0), atol=0.25)


# --- files -----------------------------------------------------------------------------------------------------------


@every
def test_a_file_gives_the_same_generator(name: str, classes: int | None, tmp_path: Path) -> None:
    network, z, y = tiny(name, classes, torch.float32)
    seen = torch.rand(5, *network.shape, generator=seeded())
    card = Card("somewhere", {"part": "train"}, fingerprints(seen), {"steps": 7}, {"name": "Frechet", "value": 1.5})
    path = generators.save(network, tmp_path / "g.safetensors", card)
    again, told = generators.read(path)
    assert type(again) is type(network)
    assert again.settings == network.settings
    assert torch.equal(again(z, y), network(z, y))
    assert not any(value.requires_grad for value in again.parameters())
    assert (told.data, told.split, told.training, told.score) == (card.data, card.split, card.training, card.score)
    others = torch.cat([torch.rand(2, *network.shape, generator=seeded(9)), seen[3:4]])
    assert told.seen(others).tolist() == [2]
    half = generators.save(network, tmp_path / "h.safetensors", half=True)
    assert half.stat().st_size < path.stat().st_size
    small = generators.load(half)
    assert next(small.parameters()).dtype == torch.float32
    assert torch.allclose(small(z, y), network(z, y), atol=2e-2)


def test_what_half_precision_cannot_hold_is_not_written(tmp_path: Path) -> None:
    network = TINY["dcgan"](None)
    with torch.no_grad():
        next(network.parameters()).fill_(1e6)
    with pytest.raises(BadGenerator, match="too large for half precision: nothing was written"):
        generators.save(network, tmp_path / "g.safetensors", half=True)
    assert not list(tmp_path.iterdir())
    with pytest.raises(BadGenerator, match="Files hold dcgan, wgan, stylegan2; given Linear"):
        generators.save(torch.nn.Linear(1, 1), tmp_path / "g.safetensors")  # type: ignore[arg-type]


def card_text(architecture: str = "dcgan", **settings: Any) -> str:
    known = {"shape": [1, 8, 8], "classes": None, "latent": 4, "width": 3, "embedded": 2}
    return json.dumps({"architecture": architecture, "settings": known | settings})


def drop(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name != "stages.0.0.weight"}


def change(**values: Any) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name.replace("_0_0_", ".0.0."): value for name, value in values.items()}


HEAD = {"format": "gradleak.generator", "version": "1"}


@pytest.mark.parametrize(
    ("edit", "metadata", "told"),
    [
        (drop, {}, r"tensor stages.0.0.weight is missing; wanted \(4, 6, 4, 4\)"),
        (
            change(stages_0_0_weight=torch.zeros(4, 6, 3, 3)),
            {},
            r"stages.0.0.weight has shape \(4, 6, 3, 3\); wanted \(4, 6, 4, 4\) for this dcgan of 1x8x8",
        ),
        (change(stages_0_0_weight=torch.full((4, 6, 4, 4), math.nan)), {}, "stages.0.0.weight holds NaN"),
        (change(stages_0_0_weight=torch.zeros(4, 6, 4, 4, dtype=torch.int32)), {}, "is torch.int32; wanted"),
        (change(more=torch.zeros(2)), {}, r"tensor 'more' of shape \(2,\) has no place"),
        (dict, {"card": card_text(width=4)}, r"stages.0.0.weight has shape \(4, 6, 4, 4\); wanted \(4, 8, 4, 4\)"),
        (dict, {"card": card_text("biggan")}, "unknown architecture 'biggan'; known: dcgan, wgan, stylegan2"),
        (dict, {"card": card_text(depth=3)}, "no dcgan has these settings"),
        (dict, {"card": card_text(width=10**9)}, "the setting 'width' cannot be 1000000000"),
        (dict, {"card": card_text(width=-1)}, "the setting 'width' cannot be -1"),
        (dict, {"card": card_text(width="3")}, "the setting 'width' cannot be '3'"),
        (dict, {"card": card_text(shape=[1, None, 8])}, "settings are not those of a dcgan"),
        (dict, {"card": card_text(shape=[1, 8])}, "settings are not those of a dcgan"),
        (dict, {"card": card_text(shape=[1, 10000, 10000])}, "settings are not those of a dcgan"),
        (dict, {"card": card_text(shape=[1, 25, 25])}, "no dcgan has these settings: Generators make images"),
        (dict, {"card": "["}, "its card is not a JSON object"),
        (dict, {"card": "[" * 100_000}, "its card is not a JSON object"),
        (dict, {"card": " " * 2**21}, "its card has 2,097,152 characters"),
        (dict, {"version": "9"}, "is of version '9'"),
        (dict, {"format": "other"}, "holds no generator: it has neither a card"),
        (change(**{"card/images": torch.zeros(3)}), {}, "card/images must be int64"),
    ],
)
def test_files_that_do_not_fit(
    edit: Callable[[dict[str, Tensor]], dict[str, Tensor]], metadata: dict[str, str], told: str, tmp_path: Path
) -> None:
    path = generators.save(TINY["dcgan"](None), tmp_path / "g.safetensors")
    save_file(edit(load_file(path)), path, metadata={**HEAD, "card": card_text(), **metadata})
    with pytest.raises(BadGenerator, match=told):
        generators.load(path)


def test_files_that_are_no_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "g.safetensors"
    with pytest.raises(BadGenerator, match="There is no file"):
        generators.load(path)
    torch.save({"weight": torch.zeros(3)}, path)
    with pytest.raises(BadGenerator, match="Pickles .* are never opened here"):
        generators.load(path)
    whole = generators.save(TINY["dcgan"](None), path).read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(BadGenerator, match="cut off"):
        generators.load(path)


def test_a_file_too_large_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = generators.save(TINY["dcgan"](None), tmp_path / "g.safetensors")
    monkeypatch.setattr("gradleak.generators.files.MOST_BYTES", 100)
    with pytest.raises(BadGenerator, match="at most 100"):
        generators.load(path)
    monkeypatch.setattr("gradleak.generators.files.MOST_BYTES", 10**9)
    monkeypatch.setattr("gradleak.generators.files.MOST_TENSORS", 2)
    with pytest.raises(BadGenerator, match="tensors; a generator has at most 2"):
        generators.load(path)


def test_fingerprints_tell_pixels_and_sizes_apart() -> None:
    x = torch.rand(4, 1, 4, 4, generator=seeded())
    same = fingerprints(x)
    assert torch.equal(fingerprints((x * 255).round() / 255), same)
    assert len(set(same.tolist())) == 4
    changed = x.clone()
    changed[0, 0, 0, 0] = 1 - changed[0, 0, 0, 0]
    assert (fingerprints(changed) != same).tolist() == [True, False, False, False]
    assert not set(fingerprints(x.reshape(4, 1, 2, 8)).tolist()) & set(same.tolist())
    with pytest.raises(BadGenerator, match="does not say which images"):
        Card().seen(x)


# --- StyleGAN2-ADA ---------------------------------------------------------------------------------------------------


def public_names(sizes: tuple[int, ...], conditional: bool) -> set[str]:
    """The names of a public StyleGAN2-ADA generator with two mapping layers."""
    names = {f"mapping.fc{number}.{what}" for number in range(2) for what in ("weight", "bias")} | {"mapping.w_avg"}
    names |= {"mapping.embed.weight", "mapping.embed.bias"} if conditional else set()
    for size in sizes:
        block = f"synthesis.b{size}"
        names |= {f"{block}.resample_filter", *([f"{block}.const"] if size == 4 else [])}
        for layer in ("conv1", "torgb") if size == 4 else ("conv0", "conv1", "torgb"):
            names |= {f"{block}.{layer}.{what}" for what in ("weight", "bias", "affine.weight", "affine.bias")}
            if layer != "torgb":
                own = ("noise_const", "noise_strength", "resample_filter")
                names |= {f"{block}.{layer}.{what}" for what in own}
    return names


@pytest.mark.parametrize("classes", [None, 3])
def test_a_converted_public_file_is_read_by_its_shapes(classes: int | None, tmp_path: Path) -> None:
    network, z, y = tiny("stylegan2", classes, torch.float32)
    state = {name: value.contiguous() for name, value in network.state_dict().items()}
    assert state.keys() == public_names((4, 8, 16), classes is not None)
    path = tmp_path / "public.safetensors"
    save_file(state, path)
    found, card = generators.read(path)
    assert found.settings == network.settings
    assert torch.equal(found(z, y), network(z, y))
    assert "converted" in card.data
    save_file(state, path, metadata={"conv_clamp": "0.05"})
    assert not torch.allclose(generators.load(path)(z, y), network(z, y))
    save_file(state, path, metadata={"conv_clamp": "much"})
    with pytest.raises(BadGenerator, match="conv_clamp is 'much', no number"):
        generators.load(path)
    # Of the other architectures of the same authors: no picture before the last block.
    save_file({name: value for name, value in state.items() if ".b8.torgb" not in name}, path)
    with pytest.raises(BadGenerator, match=r"tensor synthesis.b8.torgb.weight is missing; wanted \(3, 5, 1, 1\)"):
        generators.load(path)
    save_file({**state, "synthesis.b8.resample_filter": torch.ones(4, 4) / 16}, path)
    with pytest.raises(BadGenerator, match="synthesis.b8.resample_filter is another filter"):
        generators.load(path)
    save_file({name: value for name, value in state.items() if not name.startswith("mapping.fc0")}, path)
    with pytest.raises(BadGenerator, match="mapping.fc0.weight is missing"):
        generators.load(path)
