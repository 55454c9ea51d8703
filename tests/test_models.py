"""Networks: exact parameter counts, shapes, initial values, and lanes of second-order gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from conftest import seeded
from gradleak import LocalTraining, Task, attacks, models, observe
from gradleak.core import registry
from gradleak.engine import Engine
from gradleak.models import transformers

Params = dict[str, Tensor]


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- Parameter counts and shapes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "classes", "parameters", "features"),
    [((3, 32, 32), 10, 15_826, 768), ((3, 32, 32), 100, 85_036, 768), ((1, 28, 28), 10, 13_426, 588)],
)
def test_lenet_zhu_has_the_published_size(shape: models.Shape, classes: int, parameters: int, features: int) -> None:
    model = models.lenet_zhu(shape=shape, classes=classes)
    assert count(model) == parameters
    assert model.features(torch.zeros(2, *shape)).shape == (2, features)
    assert model(torch.zeros(2, *shape)).shape == (2, classes)


def test_lenet_cpl_adds_one_convolution() -> None:
    fourth = 12 * 12 * 25 + 12
    assert count(models.lenet_cpl(classes=10)) == 15_826 + fourth
    assert count(models.lenet_cpl()) == 15_826 + fourth + 96 * (768 + 1)
    wide = models.lenet_cpl(shape=(3, 128, 128), classes=2, width=256, init=0.1)
    assert wide.classifier.in_features == 262_144


@pytest.mark.parametrize(("norm", "per_channel"), [("batch", 2), ("group", 2), ("none", 0)])
@pytest.mark.parametrize("w", [8, 64])
def test_convnet_has_eight_convolutions(norm: str, per_channel: int, w: int) -> None:
    model = models.convnet(width=w, norm=norm)
    # 3 -> w -> 2w -> 2w -> 4w -> 4w -> 4w, then 4w -> 4w -> 4w: products of neighbours, in units of w and of w * w.
    weights = 9 * (3 * w + (2 + 4 + 8 + 16 + 16 + 16 + 16) * w * w)
    outputs = (1 + 2 + 2 + 4 + 4 + 4 + 4 + 4) * w
    assert count(model) == weights + (1 + per_channel) * outputs + 36 * w * 10 + 10
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 8
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def resnet_size(blocks: tuple[int, ...], w: int, channels: int, classes: int, kernel: int, per_channel: int) -> int:
    """By hand: two 3x3 convolutions to a block, a 1x1 shortcut where a stage doubles its channels."""
    total = kernel**2 * channels * w + per_channel * w
    for stage, number in enumerate(blocks):
        wide, before = w * 2**stage, w * 2 ** max(stage - 1, 0)
        total += 9 * before * wide + 9 * wide**2 + 2 * per_channel * wide
        total += (number - 1) * (18 * wide**2 + 2 * per_channel * wide)
        total += (before * wide + per_channel * wide) if stage else 0
    return total + wide * classes + classes


@pytest.mark.parametrize("norm", ["batch", "group", "layer", "none"])
def test_resnet_size_by_hand(norm: str) -> None:
    per_channel = 1 if norm == "none" else 2  # a bias, or a scale and a shift
    model = models.resnet((1, 2, 1), 8, shape=(1, 16, 16), classes=7, norm=norm)
    assert count(model) == resnet_size((1, 2, 1), 8, 1, 7, 3, per_channel)
    assert model(torch.zeros(2, 1, 16, 16)).shape == (2, 7)


def test_named_resnets() -> None:
    small, original = models.resnet18(), models.resnet18(shape=(3, 224, 224), classes=1000, stem="imagenet")
    assert count(small) == resnet_size((2, 2, 2, 2), 64, 3, 10, 3, 2) == 11_173_962
    assert count(original) == resnet_size((2, 2, 2, 2), 64, 3, 1000, 7, 2) == 11_689_512  # as torchvision's
    assert sum(isinstance(module, nn.Conv2d) for module in small.modules()) == 17 + 3  # 3 of them shortcuts
    assert count(models.resnet20_4()) == resnet_size((3, 3, 3), 64, 3, 10, 3, 2) == 4_327_754


def test_resnet_strides() -> None:
    image = torch.zeros(1, 3, 32, 32)
    for settings, side in [({}, 8), ({"stride": 1}, 32), ({"stem": "imagenet"}, 2)]:
        model = models.resnet((1, 1, 1), 4, norm="none", **settings)
        before_pool = nn.Sequential(*list(model.features)[:-2])
        assert before_pool(image).shape == (1, 16, side, side)


@pytest.mark.parametrize(("shape", "flat"), [((1, 28, 28), 256), ((3, 32, 32), 400)])
def test_lenet5_has_the_size_of_ilrg(shape: models.Shape, flat: int) -> None:
    convolutions = 6 * (25 * shape[0] + 1) + 16 * (25 * 6 + 1)
    linear = 120 * (flat + 1) + 84 * (120 + 1) + 100 * (84 + 1)
    model = models.lenet5(shape=shape, classes=100)
    assert count(model) == convolutions + linear
    assert model(torch.zeros(2, *shape)).shape == (2, 100)


def test_lenet5_in_the_form_of_lewis() -> None:
    model = models.lenet5(shape=(1, 28, 28), pool="avg", padding=(0, 2), init="lecun")
    linear = [module.in_features for module in model.modules() if isinstance(module, nn.Linear)]
    assert linear == [576, 120, 84]


@pytest.mark.parametrize("pool", ["max", "avg"])
def test_cnn_lewis_sizes(pool: str) -> None:
    image = torch.zeros(1, 3, 32, 32)
    plain = models.cnn_lewis()
    assert count(plain) == 183_674
    assert plain.features(image).shape == (1, 16_384)
    assert models.cnn_lewis(pool=pool, window=2).features(image).shape == (1, 256)
    assert models.cnn_lewis(pool=pool, window=3).features(image).shape == (1, 16)
    assert count(models.cnn_lewis(norm="layer")) == 183_674 + 2 * (48 + 32 + 16)  # one scale and shift per channel


def test_channel_layer_norm_normalises_each_pixel() -> None:
    out = models.ChannelLayerNorm(16)(torch.randn(2, 16, 5, 5, generator=seeded()) * 3 + 1)
    torch.testing.assert_close(out.mean(1), torch.zeros(2, 5, 5), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.var(1, correction=0), torch.ones(2, 5, 5), atol=1e-4, rtol=0)


def test_mlp_sizes() -> None:
    assert count(models.mlp()) == 784 * 300 + 300 + 300 * 10 + 10
    assert count(models.mlp(widths=(300, 300))) == 785 * 300 + 301 * 300 + 301 * 10
    assert count(models.mlp(widths=())) == 785 * 10
    assert models.mlp(shape=(5,), classes=3)(torch.zeros(2, 5)).shape == (2, 3)


# The networks of the multi-step attacks: published sizes, and the same by hand.


def linear_size(*widths: int) -> int:
    return sum((a + 1) * b for a, b in zip(widths, widths[1:], strict=False))


def convolution_size(*channels: int) -> int:
    return sum((9 * a + 1) * b for a, b in zip(channels, channels[1:], strict=False))


@pytest.mark.parametrize(
    ("make", "parameters", "by_hand"),
    [
        (models.cnn_mnist, 338_778, convolution_size(1, 32, 64) + linear_size(3136, 100, 62)),
        (lambda: models.cnn_mnist(classes=26), 335_142, convolution_size(1, 32, 64) + linear_size(3136, 100, 26)),
        (models.cnn_cifar, 1_734_348, convolution_size(3, 64, 128) + linear_size(8192, 200, 100)),
        (models.mlp_sme, 1_848_062, linear_size(784, 1000, 1000, 62)),
        (lambda: models.mlp_sme(paper_quirks=True), 1_848_062, linear_size(784, 1000, 1000, 62)),
        (models.resnet8, 2_417_846, resnet_size((1, 1, 1), 32, 1, 1000, 3, 2) - 129_000 + linear_size(2048, 1000, 62)),
        (lambda: models.resnet8(paper_quirks=False), 2_417_846, None),
        (models.vit_sme, 5_376_830, None),
    ],
)
def test_networks_of_the_multi_step_attacks(
    make: Callable[[], nn.Module], parameters: int, by_hand: int | None
) -> None:
    model = make()
    assert count(model) == parameters
    assert by_hand in (None, parameters)
    shape = (3, 32, 32) if make is models.cnn_cifar else (1, 28, 28)
    classes = next(reversed(list(model.parameters()))).shape[0]
    assert model.eval()(torch.zeros(2, *shape)).shape == (2, classes)
    assert model.features(torch.zeros(2, *shape)).shape == (2, model.classifier.in_features)


def transformer_size(pixels: int, patches: int, w: int, depth: int, ratio: int, bias: bool) -> int:
    """Embedding, class token and positions, blocks, last norm; without the head."""
    attention = 3 * w * w + bias * 3 * w + (w + 1) * w
    block = 2 * 2 * w + attention + linear_size(w, ratio * w, w)
    return (pixels + 1) * w + (patches + 2) * w + depth * block + 2 * w


def test_transformer_sizes_by_hand() -> None:
    head = linear_size(384, 768, 62)
    published = transformer_size(784, 1, 384, 4, 2, bias=False) + head
    assert count(models.vit_sme()) == published - 2 * 384 == 5_376_830  # the first block has one norm
    ordinary = transformer_size(49, 16, 384, 4, 2, bias=False) + head
    assert count(models.vit_sme(paper_quirks=False)) == ordinary
    assert count(models.vit()) == transformer_size(48, 64, 128, 4, 2, bias=True) + linear_size(128, 10)
    tiny = models.vit(shape=(3, 224, 224), classes=1000, patch=16, width=192, heads=3, depth=12, ratio=4)
    assert count(tiny) == 5_717_416  # as timm's vit_tiny_patch16_224


def test_quirks_of_the_published_code() -> None:
    x = torch.randn(50, 1, 28, 28, generator=seeded())
    quirky, plain = (models.mlp_sme(paper_quirks=quirk, generator=seeded(1)) for quirk in (True, False))
    assert [name for name, _ in quirky.named_children()] == ["features", "classifier", "output"]
    assert torch.equal(quirky(x), plain(x).relu())
    assert plain(x).min() < 0
    # Two linear layers with nothing between are one of rank 62 at most.
    quirky, plain = (models.resnet8(paper_quirks=quirk, generator=seeded(1)).eval() for quirk in (True, False))
    assert isinstance(quirky.features[-1], nn.Linear)
    assert torch.equal(quirky.features(x).relu(), plain.features(x))
    before_pool = nn.Sequential(*list(quirky.features)[:-3])(x)
    assert before_pool.shape == (50, 128, 7, 7)
    pooled = quirky.features[-3](before_pool)
    assert pooled.shape == (50, 128, 4, 4)
    torch.testing.assert_close(pooled[:, :, 0, 0], before_pool[:, :, 0, 0] / 4)  # a corner, averaged with zeros


def test_blocks_of_a_transformer() -> None:
    x = torch.randn(2, 5, 8, generator=seeded(), dtype=torch.float64)
    for bare in (False, True):
        block = models.TransformerBlock(8, 2, 2, activation="gelu", bias=False, bare=bare)
        block = block.to_empty(device="cpu").double()
        for parameter in block.parameters():
            nn.init.uniform_(parameter, -1, 1, generator=seeded(1))
        attention = block.attention
        q, k, v = attention.project(block.before(x)).reshape(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        seen = attention.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 5, 8))
        middle = seen if bare else x + seen
        torch.testing.assert_close(block(x), middle + block.body(middle))
        assert isinstance(block.before, nn.Identity if bare else nn.LayerNorm)


def test_patches_keep_their_pixels_together() -> None:
    x = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    found = transformers.Patches(2)(x)
    assert found.shape == (2, 6, 12)
    assert torch.equal(found[1, 4], x[1, :, 2:4, 2:4].permute(1, 2, 0).flatten())  # second row, second column


def test_transformers_refuse_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"5x5 do not tile images of shape \(3, 32, 32\)"):
        models.vit(patch=5)
    with pytest.raises(ValueError, match="5 heads do not divide a width of 128"):
        models.vit(heads=5)
    with pytest.raises(ValueError, match="28x28 do not tile"):
        models.vit_sme(shape=(1, 28, 14))


def test_positions_of_an_ordinary_transformer_tell_patches_apart() -> None:
    x = torch.rand(1, 3, 32, 32, generator=seeded())
    moved = x.roll(4, dims=2)  # whole patches
    ordinary, zero = models.vit(generator=seeded()), models.vit_sme(shape=(3, 32, 32), patch=4, generator=seeded())
    assert not torch.allclose(ordinary(x), ordinary(moved), atol=1e-5)
    torch.testing.assert_close(zero(x), zero(moved), atol=1e-5, rtol=0)
    position = ordinary.features[2].position.value
    assert position.std().item() == pytest.approx(0.02 * 0.8796, rel=0.05)
    assert position.abs().max() <= 0.04
    assert not ordinary.features[2].first.value.any()


def test_images_too_small_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 4, 4\) do not fit"):
        models.convnet(shape=(3, 4, 4))


# --- Names and options ------------------------------------------------------------------------------------------------


def test_every_network_is_registered() -> None:
    for entry in registry.entries("model"):
        if entry.make.__module__.startswith(models.__name__):
            assert entry.make.__name__ == entry.name.replace("-", "_")
            assert entry.make.__name__ in models.__all__
            assert entry.summary
    names = {entry.name for entry in registry.entries("model")}
    assert {"lenet-zhu", "convnet", "resnet18", "cnn-mnist", "cnn-cifar", "mlp-sme", "resnet8", "vit"} <= names


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.lenet_zhu(activation="sigmod"), "activation 'sigmod'.*mean 'sigmoid'.*leaky_relu"),
        (lambda: models.convnet(norm="bach"), "norm 'bach'.*mean 'batch'"),
        (lambda: models.cnn_lewis(pool="maximum"), "pool 'maximum'.*avg, max, none"),
        (lambda: models.resnet(stem="imagnet"), "stem 'imagnet'.*mean 'imagenet'"),
        (lambda: models.mlp(init="uniform5"), "init 'uniform5'.*mean 'uniform05'"),
    ],
)
def test_an_unknown_name_is_explained(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


ACTIVATIONS = ["sigmoid", "relu", "tanh", "elu", "gelu", "softplus", "leaky_relu", "silu"]


def test_own_activation_and_norm() -> None:
    model = models.convnet(width=8, activation=lambda: nn.Softplus(beta=5), norm=lambda c: nn.GroupNorm(2, c))
    assert sum(isinstance(module, nn.Softplus) and module.beta == 5 for module in model.modules()) == 8
    assert sum(isinstance(module, nn.GroupNorm) and module.num_groups == 2 for module in model.modules()) == 8
    slopes = (
        models.mlp(activation=nn.PReLU).features[2].weight
    )  # parameters of the user's own modules keep their values
    assert slopes.item() == 0.25


@pytest.mark.parametrize(("channels", "groups"), [(64, 8), (48, 8), (12, 4), (6, 2)])
def test_group_norm_groups(channels: int, groups: int) -> None:
    norm = models.resnet((1,), channels, norm="group").features[1]
    assert norm.num_groups == groups


# --- Initial values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("init", "bound"), [("uniform05", 0.5), (0.05, 0.05), (1, 1.0)])
def test_uniform_reaches_every_parameter(init: models.Init, bound: float) -> None:
    for model in (
        models.lenet_cpl(init=init, generator=seeded()),
        models.convnet(width=8, init=init, generator=seeded()),
    ):
        for name, parameter in model.named_parameters():  # normalisation layers too
            assert parameter.abs().max() <= bound, name
            assert parameter.numel() < 8 or parameter.std() > 0.3 * bound, name
        values = torch.cat([parameter.flatten() for parameter in model.parameters()])
        assert values.max() > 0.99 * bound
        assert values.min() < -0.99 * bound
        assert values.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_torch_init_is_torch_s_own() -> None:
    before = torch.get_rng_state()
    torch.manual_seed(3)
    plain = [nn.Conv2d(3, 12, 5), nn.Conv2d(12, 12, 5), nn.Conv2d(12, 12, 5), nn.Linear(768, 10)]
    expected = [parameter for layer in plain for parameter in layer.parameters()]
    torch.manual_seed(3)
    for ours, theirs in zip(models.lenet_zhu(init="torch").parameters(), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.set_rng_state(before)


def test_kaiming_and_lecun_variances() -> None:
    kaiming = models.convnet(width=32, init="kaiming", generator=seeded()).features[3]  # 32 -> 64 channels
    assert kaiming.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.03)
    lecun = models.cnn_lewis(generator=seeded())
    convolution, linear = lecun.features[4], lecun.classifier
    assert convolution.weight.std().item() == pytest.approx(math.sqrt(1 / (9 * 48)), rel=0.03)
    assert linear.weight.std().item() == pytest.approx(math.sqrt(1 / 16_384), rel=0.03)
    assert not convolution.bias.any()
    assert not linear.bias.any()


TINY: dict[str, Callable[[torch.Generator | None], nn.Module]] = {
    "lenet_zhu": lambda g: models.lenet_zhu(shape=(1, 8, 8), classes=3, generator=g),
    "lenet_cpl": lambda g: models.lenet_cpl(shape=(1, 8, 8), classes=3, activation="tanh", init=0.05, generator=g),
    "lenet5": lambda g: models.lenet5(shape=(1, 16, 16), classes=3, activation="silu", generator=g),
    "lenet5_lewis": lambda g: models.lenet5(
        shape=(1, 16, 16), classes=3, pool="avg", padding=(0, 2), init="lecun", generator=g
    ),
    "mlp": lambda g: models.mlp(shape=(1, 4, 4), classes=3, widths=(6, 5), activation="gelu", generator=g),
    "convnet": lambda g: models.convnet(shape=(1, 9, 9), classes=3, width=2, generator=g),
    "convnet_group": lambda g: models.convnet(shape=(1, 9, 9), classes=3, width=4, norm="group", generator=g),
    "convnet_none": lambda g: models.convnet(shape=(1, 9, 9), classes=3, width=2, norm="none", generator=g),
    "cnn_lewis": lambda g: models.cnn_lewis(shape=(1, 6, 6), classes=3, generator=g),
    "cnn_lewis_layer_max": lambda g: models.cnn_lewis(
        shape=(1, 8, 8), classes=3, activation="elu", norm="layer", pool="max", generator=g
    ),
    "cnn_lewis_avg": lambda g: models.cnn_lewis(
        shape=(1, 27, 27), classes=3, activation="leaky_relu", pool="avg", window=3, generator=g
    ),
    "resnet": lambda g: models.resnet((1, 1), 4, shape=(1, 8, 8), classes=3, activation="softplus", generator=g),
    "resnet_group": lambda g: models.resnet((1, 1), 16, shape=(1, 8, 8), classes=3, norm="group", generator=g),
    "resnet_none": lambda g: models.resnet((1, 1), 4, shape=(1, 8, 8), classes=3, norm="none", generator=g),
    "resnet_imagenet": lambda g: models.resnet((1, 1), 4, shape=(1, 16, 16), classes=3, stem="imagenet", generator=g),
    "cnn_mnist": lambda g: models.cnn_mnist(shape=(1, 8, 8), classes=3, generator=g),
    "mlp_sme": lambda g: models.mlp_sme(shape=(1, 8, 8), classes=3, generator=g),
    "mlp_sme_quirks": lambda g: models.mlp_sme(shape=(1, 8, 8), classes=3, paper_quirks=True, generator=g),
    "resnet8": lambda g: models.resnet8(shape=(1, 8, 8), classes=3, generator=g),
    "vit": lambda g: models.vit(shape=(1, 8, 8), classes=3, width=16, depth=2, generator=g),
    "vit_sme": lambda g: models.vit_sme(shape=(1, 8, 8), classes=3, generator=g),
}
SIDE = {"lenet5": 16, "lenet5_lewis": 16, "mlp": 4, "cnn_lewis": 6, "cnn_lewis_avg": 27, "resnet_imagenet": 16}


def images(name: str, *size: int, seed: int = 1) -> Tensor:
    side = SIDE.get(name, 9 if name.startswith("convnet") else 8)
    return torch.rand(*size, 1, side, side, generator=seeded(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", TINY)
def test_a_generator_decides_everything_and_spares_the_global_one(name: str) -> None:
    before = torch.get_rng_state()
    first, again, other = TINY[name](seeded(5)), TINY[name](seeded(5)), TINY[name](seeded(6))
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        from_global = TINY[name](None)
    for key, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
        assert torch.equal(value, from_global.state_dict()[key]), key
    assert not torch.equal(first.classifier.weight, other.classifier.weight)


# --- Gradients of gradients in lanes ----------------------------------------------------------------------------------


def check_lanes(model: nn.Module, x: Tensor, truth: Tensor) -> None:
    """DLG: the slope of |gradient(x) - gradient(truth)|^2 in three lanes under vmap equals plain autograd's."""
    assert not any(getattr(module, "inplace", False) for module in model.modules())
    y = torch.tensor([0, 2])
    weights = {key: value.detach() for key, value in model.named_parameters()}
    start = {key: value.clone() for key, value in model.named_buffers()}
    buffers = {key: value.expand(3, *value.shape).clone() for key, value in start.items()}  # one copy per lane

    def gradient(x: Tensor, buffers: Params) -> Params:
        def loss(weights: Params) -> Tensor:
            fresh = {key: value.clone() for key, value in buffers.items()}
            return cross_entropy(functional_call(model, (weights, fresh), (x,)), y)

        return grad(loss)(weights)

    def distance(x: Tensor, target: Params, buffers: Params) -> Tensor:
        found = gradient(x, buffers)
        return torch.stack([(found[key] - target[key]).square().sum() for key in found]).sum()

    target = vmap(gradient)(truth, buffers)
    together = vmap(grad(distance))(x, target, buffers)  # (lanes, batch, channels, height, width)
    assert together.isfinite().all()
    for lane in range(3):
        model.load_state_dict({**model.state_dict(), **start})
        free = x[lane].clone().requires_grad_()
        loss = cross_entropy(model(free), y)
        found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        pairs = zip(found, (target[key][lane] for key in weights), strict=True)
        (alone,) = torch.autograd.grad(torch.stack([(a - b).square().sum() for a, b in pairs]).sum(), free)
        assert alone.abs().max() > 0
        torch.testing.assert_close(together[lane], alone, rtol=1e-6, atol=1e-9 * float(alone.abs().max()))


@pytest.mark.parametrize("name", TINY)
def test_lanes_of_gradient_matching(name: str) -> None:
    model = TINY[name](seeded()).double().eval()
    check_lanes(model, images(name, 3, 2), images(name, 3, 2, seed=2))


@pytest.mark.parametrize("name", ["convnet", "resnet"])
def test_lanes_with_batch_norm_in_training_mode(name: str) -> None:
    model = TINY[name](seeded()).double().train()
    check_lanes(model, images(name, 3, 2), images(name, 3, 2, seed=2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_lanes_with_every_activation(activation: str) -> None:
    model = models.lenet_zhu(shape=(1, 8, 8), classes=3, activation=activation, generator=seeded()).double()
    check_lanes(model, images("lenet_zhu", 3, 2), images("lenet_zhu", 3, 2, seed=2))


@pytest.mark.parametrize("name", TINY)
def test_forward_mode_over_the_gradient_is_the_transpose_of_double_backward(name: str) -> None:
    """<J t, c> = <t, J' c> for J = d gradient / d x, in two lanes of tangents: what second-order attacks ask for."""
    model, x, y = TINY[name](seeded()).double().eval(), images(name, 2), torch.tensor([0, 2])
    state = {key: value.detach() for key, value in model.state_dict().items()}
    weights = {key: state[key] for key, _ in model.named_parameters()}

    def gradient(x: Tensor) -> Params:
        return grad(lambda weights: cross_entropy(functional_call(model, {**state, **weights}, (x,)), y))(weights)

    def weighted(x: Tensor) -> Tensor:  # with c = the gradient itself, held fixed
        return torch.stack([(value * value.detach()).sum() for value in gradient(x).values()]).sum()

    tangents = torch.randn(2, *x.shape, generator=seeded(3), dtype=torch.float64)
    pushed = vmap(lambda tangent: jvp(gradient, (x,), (tangent,))[1])(tangents)
    held = gradient(x)
    forward = torch.stack([(pushed[key] * held[key]).flatten(1).sum(1) for key in held]).sum(0)
    backward = (grad(weighted)(x) * tangents).flatten(1).sum(1)
    assert backward.abs().min() > 0
    torch.testing.assert_close(forward, backward, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["cnn_mnist", "resnet8", "vit"])
def test_an_attack_in_lanes_and_one_by_one(name: str) -> None:
    model, y = TINY[name](seeded()).double().eval(), torch.tensor([0, 2])
    task = Task.supervised(model, cross_entropy, like=(images(name, 1), y))
    training = LocalTraining(lr=0.1, epochs=2, batch_size=1)
    seen = [observe(task, {"x": images(name, 2, seed=seed), "y": y}, training, key=str(seed)) for seed in (1, 2)]
    attack = attacks.get("ig", steps=3, restarts=2)
    found = [
        attack.run(task, seen, engine=Engine(device="cpu", precision="double", batched=batched))
        for batched in (True, False)
    ]
    assert found[0].candidates["x"].isfinite().all()
    torch.testing.assert_close(found[0].objective, found[1].objective, rtol=1e-6, atol=1e-9)
