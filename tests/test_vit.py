"""One image off a vision transformer: exactness, what is settled by whole grey levels, and what is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradleak as gl
from conftest import largest_difference, seeded, tiny
from gradleak.attacks.spans import pairs
from gradleak.attacks.spans.completion import Open, _adjoint, _differences, provable, smoothest, whole
from gradleak.attacks.spans.patches import PatchEmbedding, patch_embedding
from gradleak.attacks.spans.transformers import open_of_batch
from gradleak.audit.preflight import CLOSED, NEEDS, RUNS, UNKNOWN, Line, preflight
from gradleak.auto.traits import Case
from gradleak.identify.span_certificate import SpanCertificate
from gradleak.scenario.fields import UnsupportedTask
from gradleak.scenario.observation import MissingKnowledge, Track
from gradleak.scenario.rules import SGD, Adam
from gradleak.scenario.task import TaskError

ONE_STEP = gl.LocalTraining(lr=0.1)
SIDE, PATCH, CLASSES = 16, 4, 5
PATCHES = (SIDE // PATCH) ** 2


class Block(nn.Module):
    """A block before whose attention and MLP a LayerNorm stands: timm's qkv in one layer, or three as in BERT."""

    def __init__(self, width: int, *, split: bool = False, bias: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        sizes = [width] * 3 if split else [3 * width]
        self.qkv = nn.ModuleList(nn.Linear(width, size, bias=bias) for size in sizes)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = torch.cat([layer(normed) for layer in self.qkv], dim=-1).chunk(3, dim=-1)
        x = x + self.out((q @ k.mT / math.sqrt(x.shape[-1])).softmax(-1) @ v)
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A small ViT: `extra` tokens before the patches; positions learned ("all", "patches" only), or a fixed buffer."""

    def __init__(
        self,
        width: int,
        *,
        side: int = SIDE,
        extra: int = 1,
        positions: str | Tensor = "all",
        cut: str = "conv",
        **how: Any,
    ) -> None:
        super().__init__()
        self.cut, patches = cut, (side // PATCH) ** 2
        self.embed: nn.Module = nn.Linear(3 * PATCH**2, width)
        if cut == "conv":
            self.embed = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.extra = nn.Parameter(torch.randn(1, extra, width))
        self.where = positions if isinstance(positions, str) else "fixed"
        if self.where == "fixed":
            self.register_buffer("pos", positions)
        elif self.where == "table":
            self.pos = nn.Embedding(extra + patches, width)
        else:
            self.pos = nn.Parameter(torch.randn(1, patches + (extra if self.where == "all" else 0), width) * 0.02)
        self.drop = nn.Dropout(0.0)
        self.blocks = nn.Sequential(*(Block(width, **how) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def tokens(self, x: Tensor) -> Tensor:
        if self.cut == "conv":
            return self.embed(x).flatten(2).mT
        n = x.shape[-1] // PATCH
        tiles = x.reshape(len(x), 3, n, PATCH, n, PATCH).permute(0, 2, 4, 3, 5, 1)
        return self.embed(tiles.reshape(len(x), n * n, -1))

    def forward(self, x: Tensor) -> Tensor:
        tokens, extra = self.tokens(x), self.extra.expand(len(x), -1, -1)
        if self.where == "patches":  # timm's no_embed_class
            tokens = torch.cat([extra, tokens + self.pos], dim=1)
        else:
            pos = self.pos(torch.arange(self.pos.num_embeddings))[None] if self.where == "table" else self.pos
            tokens = torch.cat([extra, tokens], dim=1) + pos
        return self.head(self.norm(self.blocks(self.drop(tokens)))[:, 0])


def made(width: int = 32, *, dtype: torch.dtype = torch.float64, **how: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Transformer(width, **how).to(dtype)


def picture(seed: int = 0, side: int = SIDE, channels: int = 3) -> Tensor:
    """A smooth image of whole grey levels."""
    coarse = torch.rand(1, channels, 4, 4, generator=seeded(seed), dtype=torch.float64)
    smooth = F.interpolate(coarse, (side, side), mode="bicubic", align_corners=False)
    return (smooth.clamp(0, 1) * 255).round() / 255


def task_of(model: nn.Module, x: Tensor, **how: Any) -> gl.Task:
    return gl.Task.supervised(model, F.cross_entropy, like=(x, torch.tensor([2])), **{"mean": 0.5, "std": 0.25, **how})


def attacked(
    model: nn.Module, x: Tensor, training: gl.LocalTraining = ONE_STEP, precision: str = "double", **settings: Any
) -> tuple[gl.Reconstruction, float]:
    """The result, and the largest error of its pixels."""
    task = task_of(model, x)
    batch = {"x": task.fields["x"].model(x), "y": torch.tensor([2])}
    seen = gl.observe(task, batch, training)
    engine = gl.Engine(device="cpu", precision=precision)
    found = gl.attacks.get("vit", **settings).run(task, seen, gl.Knowledge(training=training), engine=engine)
    return found, largest_difference(task.fields["x"].unit(found.batch["x"][0]), x)


# --- learned positions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"extra": 2},  # DeiT: class and distillation token
        {"extra": 0},
        {"positions": "patches"},
        {"positions": "table"},  # positions as an nn.Embedding
        {"cut": "linear"},
        {"split": True, "bias": False},
    ],
    ids=str,
)
def test_learned_positions_give_the_image_exactly(how: dict[str, Any]) -> None:
    x = torch.rand(1, 3, SIDE, SIDE, generator=seeded(1), dtype=torch.float64)
    found, error = attacked(made(**how), x, whole=False)
    assert error < 1e-9
    assert found.batch["y"].tolist() == [[2]]
    assert float(found.match.max()) < 1e-12
    settings = found.settings
    assert settings["rank"] == settings["patches"] == [PATCHES]
    assert settings["open"] == [0]
    told = SpanCertificate.of(settings["spans"][0])
    assert (told.layer, told.proved, told.reason) == ("embed", 1, "")
    assert told.outside == (told.layers[0].unexplained,) == (settings["residual"][0],)
    assert settings["smallest"][0] > settings["rounding"][0]
    assert settings["positions"] == ["pos.weight" if how.get("positions") == "table" else "pos"]


def test_transformers_own_vit_and_its_names() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=SIDE,
        patch_size=PATCH, num_labels=CLASSES, attn_implementation="eager", initializer_range=0.2,
    )  # fmt: skip

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = transformers.ViTForImageClassification(config)

        def forward(self, x: Tensor) -> Tensor:
            return self.vit(x).logits

    found, error = attacked(Logits().double(), picture())
    assert error < 1e-9
    assert found.settings["positions"][0].endswith("position_embeddings")


@pytest.mark.parametrize(
    "training",
    [
        gl.LocalTraining(lr=0.1, steps=5),
        gl.LocalTraining(lr=0.1, steps=3, optimiser=SGD(momentum=0.9)),
        gl.LocalTraining(lr=0.1, optimiser=SGD(weight_decay=0.1)),
    ],
    ids=["steps", "momentum", "decay"],
)
def test_sums_of_gradients_tell_the_same(training: gl.LocalTraining) -> None:
    """The equations are linear in the derivatives: many steps of any size are as good as one."""
    assert attacked(made(), picture(), training)[1] < 1e-9


def test_dropout_does_not_hide_the_image() -> None:
    """A dropped token has no derivative, neither by its position nor by its patch."""
    model = made()
    model.drop.p = 0.1
    assert patch_embedding(task_of(model.train(), picture())).positions is not None
    assert model.training


def test_what_was_not_sent_is_not_used() -> None:
    task, x = task_of(made(), picture()), picture()
    seen = gl.observe(task, {"x": task.fields["x"].model(x), "y": torch.tensor([2])}, ONE_STEP)
    hidden = {**seen.update, "pos": torch.zeros_like(seen.update["pos"])}
    with pytest.raises(TaskError, match="all rows of pos"):
        gl.attacks.get("vit").run(task, replace(seen, update=hidden), gl.Knowledge(training=ONE_STEP))


def test_a_clipped_update_tells_the_same() -> None:
    task, x = task_of(made(), picture()), picture()
    defence = gl.defences.get("clipping", norm=1e-3)
    seen = gl.observe(task, {"x": task.fields["x"].model(x), "y": torch.tensor([2])}, ONE_STEP, defence)
    knows = gl.Knowledge(training=ONE_STEP, defence=defence)
    found = gl.attacks.get("vit").run(task, seen, knows, engine=gl.Engine(device="cpu", precision="double"))
    assert largest_difference(task.fields["x"].unit(found.batch["x"][0]), x) < 1e-6


def test_noise_in_the_gradient_is_not_taken_for_the_image() -> None:
    """It shows as a distance from the equations: what it hides is said to be open."""
    task, x = task_of(made(), picture()), picture()
    seen = gl.observe(task, {"x": task.fields["x"].model(x), "y": torch.tensor([2])}, ONE_STEP)
    weight = seen.update["embed.weight"]
    noise = torch.randn(weight.shape, generator=seeded(4), dtype=weight.dtype) * weight.std()
    noisy = replace(seen, update={**seen.update, "embed.weight": weight + noise})
    found = gl.attacks.get("vit").run(task, noisy, gl.Knowledge(training=ONE_STEP))
    assert found.settings["rank"][0] < PATCHES
    assert found.settings["open"][0] >= 3 * PATCH**2
    told = SpanCertificate.of(found.settings["spans"][0])
    assert told.proved == 0
    assert "values of the image are open" in str(told)


# --- more patches than the width --------------------------------------------------------------------------------------


def test_whole_levels_settle_what_the_equations_leave_open() -> None:
    """64 patches, derivatives of width 62 and mean zero: three mixtures of patches are open, and 8 bits settle them."""
    x, model = picture(3, 32), made(62, side=32)
    found, error = attacked(model, x)
    assert found.settings["rank"] == [61]
    assert found.settings["open"] == [0]
    assert error < 1e-9
    assert found.settings["spans"][0]["proved"] == 1
    smooth, worse = attacked(model, x, whole=False)
    assert smooth.settings["spans"][0]["proved"] == 0
    assert smooth.settings["open"] == [3 * 3 * PATCH**2]
    assert 1e-4 < worse < 0.5


def test_an_image_that_is_not_of_whole_levels_is_said_to_be_open() -> None:
    x = picture(3, 32) * 0.9 + 0.05 * torch.rand(1, 3, 32, 32, generator=seeded(2), dtype=torch.float64)
    found, error = attacked(made(62, side=32), x)
    assert found.settings["open"] == [3 * 3 * PATCH**2]
    assert error < 0.5


def test_the_network_does_not_see_what_is_open() -> None:
    """A move of the open mixtures that W does not pass changes nothing that the client sends."""
    x, model = picture(), made(14)
    task = task_of(model, x)
    batch = {"x": task.fields["x"].model(x), "y": torch.tensor([2])}
    sent = task.gradient(task.weights(), batch)
    mixture = torch.linalg.svd(sent["pos"][0, 1:].T)[2][-1]  # (patches,)
    unseen = torch.linalg.svd(model.embed.weight.flatten(1))[2][-1]  # (inputs,)
    moved = batch["x"].clone()
    moved.view(-1)[patch_embedding(task).places] += torch.outer(mixture, unseen)
    assert largest_difference(batch["x"], moved) > 0.01
    assert largest_difference(sent, task.gradient(task.weights(), {**batch, "x": moved})) < 1e-12


def open_case(free: int, side: int = 32, channels: int = 3) -> tuple[Open, Tensor]:
    image = 255 * picture(5, side, channels)[0]
    places = F.unfold(torch.arange(float(image.numel())).view(1, *image.shape), 4, stride=4)[0].T.long()
    basis = torch.linalg.qr(torch.randn(len(places), free, generator=seeded(1), dtype=torch.float64))[0]
    lost = image.clone().flatten()
    lost[places] -= basis @ (basis.T @ lost[places])
    return Open(lost.view_as(image), places, basis, torch.full((free,), math.inf, dtype=torch.float64)), image


@pytest.mark.parametrize("channels", [1, 3])
def test_differences_and_their_transpose(channels: int) -> None:
    image = torch.randn(channels, 5, 6, generator=seeded(0), dtype=torch.float64)
    forward = _differences(image)
    other = torch.randn(forward.shape, generator=seeded(1), dtype=torch.float64)
    assert torch.isclose((forward * other).sum(), (image * _adjoint(other, image)).sum())


def test_the_smoothest_image_is_near_and_whole_levels_are_exact() -> None:
    case, image = open_case(4)
    before = largest_difference(case.image, image)
    assert largest_difference(case.moved(smoothest(case)), image) < before / 3
    step, settled = whole(case)
    assert settled.all()
    assert largest_difference(case.moved(step), image) < 1e-6


def test_whole_levels_are_not_tried_where_chance_could_meet_them() -> None:
    case, _ = open_case(4)
    assert provable(case)
    few = replace(case, places=case.places[:6], basis=case.basis[:6])
    assert not provable(few)


def test_a_patch_without_a_derivative_stays_open() -> None:
    """Any whole number would do there."""
    case, _ = open_case(1)
    alone = torch.zeros_like(case.basis)
    alone[5] = 1
    _, settled = whole(replace(case, basis=alone))
    assert not settled.any()


# --- fixed positions --------------------------------------------------------------------------------------------------


def fixed(width: int, rank: int | None = None) -> Tensor:
    rows = torch.randn(1, 1 + PATCHES, width, generator=seeded(7), dtype=torch.float64)
    if rank is None:
        return rows
    return (torch.randn(1 + PATCHES, rank, generator=seeded(8), dtype=torch.float64) @ rows[0, :rank])[None]


@pytest.mark.parametrize("how", [{}, {"split": True}, {"bias": False}], ids=str)
def test_fixed_positions_give_the_image_from_spans(how: dict[str, Any]) -> None:
    model = made(48, positions=fixed(48), **how)
    for block in model.blocks:  # a norm that scales and shifts
        nn.init.uniform_(block.norm1.weight, 0.5, 1.5)
        nn.init.uniform_(block.norm1.bias, -0.5, 0.5)
    found, error = attacked(model, picture())
    assert found.settings["positions"] == ["fixed"]
    assert found.settings["rank"] == [PATCHES]
    assert found.settings["residual"][0] < 1e-9
    assert found.settings["spans"][0]["proved"] == 1
    assert error < 1e-6


def test_learned_positions_that_are_frozen_are_fixed_ones() -> None:
    model = made(48)
    nn.init.normal_(model.pos)
    model.pos.requires_grad_(False)
    found, error = attacked(model, picture())
    assert found.settings["positions"] == ["fixed"]
    assert error < 1e-6


# --- what is refused --------------------------------------------------------------------------------------------------


def refusal(model: nn.Module) -> str:
    return gl.attacks.get("vit").refuses(task_of(model, picture()))


def test_fixed_positions_need_fewer_tokens_than_the_width() -> None:
    assert "leave 0 equations for 16 unknowns" in refusal(made(16, positions=fixed(16)))
    assert "rank 8, and telling patches apart takes 16" in refusal(made(48, positions=fixed(48, 7)))  # and a bias


class Swin(nn.Module):
    """A norm behind the patch embedding, and no absolute positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(3, 32, PATCH, stride=PATCH), nn.LayerNorm(32)
        self.block, self.head = Block(32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.norm(self.embed(x).flatten(2).mT)).mean(1))


def test_models_without_positions_or_patches_are_refused() -> None:
    assert "no linear layer reads the tokens behind a LayerNorm" in refusal(Swin().double())
    overlapping = made()
    overlapping.embed = nn.Conv2d(3, 32, 7, stride=4, padding=3).double()
    assert "sees each pixel of the image in one patch" in refusal(overlapping)
    assert "sees each pixel of the image in one patch" in gl.attacks.get("vit").refuses(tiny())


def test_adam_clients_are_refused() -> None:
    with pytest.raises(UnsupportedTask, match="send what Adam makes of them"):
        attacked(made(), picture(), gl.LocalTraining(lr=0.1, optimiser=Adam()))


# --- several images in an update --------------------------------------------------------------------------------------


def batch_of(examples: int, width: int) -> tuple[gl.Task, dict[str, Tensor]]:
    x = torch.rand(examples, 3, SIDE, SIDE, generator=seeded(9), dtype=torch.float64)
    y = torch.arange(examples) % CLASSES
    model = made(width)
    nn.init.normal_(model.pos)
    return gl.Task.supervised(model, F.cross_entropy, like=(x, y)), {"x": x, "y": y}


def rank_of(rows: Tensor) -> int:
    values = torch.linalg.svdvals(rows)
    return int((values > 1e-9 * values[0]).sum())


@pytest.mark.parametrize(
    ("examples", "width", "count"), [(1, 80, 0), (2, 80, 16), (2, 48, 18), (3, 96, 32), (4, 96, 48)]
)
def test_patches_of_a_batch_move_by_the_differences_of_its_images(examples: int, width: int, count: int) -> None:
    """The directions in which W times a patch stays in the span of the tokens: they keep it in that of the patches."""
    task, batch = batch_of(examples, width)
    embedding = patch_embedding(task)
    tokens = task.inputs_of([embedding.first], task.weights(), batch, whole=False)[embedding.first].flatten(0, 1)
    tokens = tokens - tokens.mean(1, keepdim=True)
    patches = batch["x"].flatten(1)[:, embedding.places].flatten(0, 1)
    moved = patches @ task.model.embed.weight.flatten(1).T
    moved = moved - moved.mean(1, keepdim=True)
    assert rank_of(tokens) + rank_of(moved) - rank_of(torch.cat([tokens, moved])) == count
    assert open_of_batch(embedding, examples) == count


def test_open_numbers_of_known_networks() -> None:
    def count(patches: int, inputs: int, width: int, examples: int) -> int:
        places = torch.zeros(patches, inputs, dtype=torch.long)
        how = {"layer": "", "first": "", "rows": torch.arange(patches), "positions": None, "norm": "", "readers": ()}
        return open_of_batch(PatchEmbedding(places=places, tokens=1 + patches, width=width, **how), examples)

    assert [count(64, 48, 192, examples) for examples in (1, 2, 3)] == [0, 48, 48]
    assert [count(64, 48, 384, examples) for examples in (2, 3)] == [48, 48]
    assert [count(196, 768, 192, examples) for examples in (2, 3)] == [392, 588]
    assert [count(196, 768, 768, examples) for examples in (1, 2, 3, 4)] == [0, 196, 410, 768]


def test_the_gradient_of_a_batch_holds_no_more_than_its_tokens() -> None:
    """What the first block sends of two images: the span that leaves these directions open, complete."""
    task, batch = batch_of(2, 80)
    sent = task.gradient(task.weights(), batch)["blocks.0.qkv.0.weight"]
    assert rank_of(sent - sent.mean(1, keepdim=True)) == 1 + 2 * PATCHES


def refused(width: int, examples: int, training: gl.LocalTraining = ONE_STEP, **how: Any) -> str:
    """Why an update of so many images is refused; `gradleak check` refuses it too."""
    x = torch.rand(examples, 3, SIDE, SIDE, generator=seeded(9), dtype=torch.float64)
    batch = {"x": x, "y": torch.arange(examples) % CLASSES}
    task = gl.Task.supervised(made(width, **how), F.cross_entropy, like=(x, batch["y"]))
    assert line_of(task, examples, training).status != RUNS
    with pytest.raises(UnsupportedTask) as refusal:
        gl.attacks.get("vit").run(task, gl.observe(task, batch, training), gl.Knowledge(training=training))
    return str(refusal.value)


def line_of(task: gl.Task, examples: int, training: gl.LocalTraining = ONE_STEP) -> Line:
    """What `gradleak check` says of the attack."""
    attacks = [("vit", gl.attacks.get("vit"))]
    return preflight(task, attacks, examples=examples, training=training).lines[0]


def test_batches_are_refused_with_what_is_open() -> None:
    assert re.search("at most 2 example.s., and these hold 3.*leave 34 of 48 numbers", refused(64, 3))
    few = refused(32, 2)
    assert re.search("at most 1 example.s., and these hold 2.*leave .. of 48 numbers", few)
    assert "spans of their 34 tokens: more than so many numbers in a token (here 32)" in few
    assert "positions that are trained" in refused(64, 2, positions=fixed(64))
    assert "a single local step" in refused(64, 2, gl.LocalTraining(lr=0.1, steps=2))


# --- two images -------------------------------------------------------------------------------------------------------

LABELS = torch.tensor([3, 1])


def two_images() -> tuple[gl.Task, dict[str, Tensor]]:
    """Two images of 8 x 8, and a model with 5 tokens of width 64."""
    model = gl.models.vit(
        shape=(3, 8, 8), classes=CLASSES, width=64, heads=4, depth=2, patch=PATCH, generator=seeded(0)
    )
    x = torch.cat([picture(seed, 8) for seed in (0, 1)])
    task = gl.Task.supervised(model.double(), F.cross_entropy, like=(x, LABELS), mean=0.5, std=0.5)
    return task, {"x": task.fields["x"].model(x), "y": LABELS}


def read_both(order: list[int], **given: Tensor) -> gl.Reconstruction:
    task, batch = two_images()
    seen = gl.observe(task, {name: value[order] for name, value in batch.items()}, ONE_STEP)
    knows = gl.Knowledge(training=ONE_STEP, given=given)
    engine = gl.Engine(device="cpu", precision="double")
    return gl.attacks.get("vit", restarts=1).run(task, seen, knows, engine=engine)


def test_two_images_come_out_whatever_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their labels: ascending as read off, or as given."""
    for name, evaluations in (("FIRST", 60), ("SHORT", 30), ("LONG", 60)):  # enough for so few numbers
        monkeypatch.setattr(pairs, name, evaluations)
    batch = two_images()[1]
    read, given = read_both([0, 1]), read_both([1, 0], y=LABELS)
    assert read.batch["y"].tolist() == [[1, 3]]
    assert largest_difference(read.batch["x"][0], batch["x"][[1, 0]]) < 1e-6
    assert largest_difference(given.batch["x"][0], batch["x"]) < 1e-6
    assert float(read.match.max()) < 1e-12
    assert read.settings["residual"][0] < 1e-8
    assert read.settings["starts"] == [1]
    told = SpanCertificate.of(read.settings["spans"][0])
    assert (told.examples, told.apart, told.proved, told.reason) == (2, 2, 2, "")


def test_a_search_that_stops_short_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST", "SHORT", "LONG", "CYCLES"):
        monkeypatch.setattr(pairs, name, 2)
    task, batch = two_images()
    alone = gl.observe(task, {name: value[:1] for name, value in batch.items()}, ONE_STEP, key="alone")
    seen, shares = gl.observe(task, batch, ONE_STEP, key="both"), list[float]()
    attack = gl.attacks.get("vit", restarts=2)
    found = attack.run(task, [alone, seen], gl.Knowledge(training=ONE_STEP), progress=shares.append)
    assert found.settings["starts"] == [None, 2]
    assert found.settings["open"] == [0, None]
    assert found.settings["residual"][1] > 1e-2
    single, both = (SpanCertificate.of(record) for record in found.settings["spans"])
    assert (single.proved, both.proved) == (1, 0)
    assert "The search stopped short" in both.reason
    assert shares == sorted(shares)
    again = attack.run(task, [alone, seen], gl.Knowledge(training=ONE_STEP))
    assert torch.equal(again.batch["x"].nan_to_num(), found.batch["x"].nan_to_num())


def test_half_precision_on_the_wire_does_not_make_a_wrong_patch_rounding() -> None:
    task, batch = two_images()
    seen = gl.observe(task, batch, ONE_STEP)
    rounded = replace(seen, update={name: value.half().double() for name, value in seen.update.items()})
    assert pairs.rounding(seen) == pairs.PRECISE
    assert pairs.rounding(rounded) == 0.0


def test_check_and_auto_know_what_two_images_need() -> None:
    task, batch = two_images()
    assert [line_of(task, examples).text for examples in (1, 2)] == [CLOSED, UNKNOWN]
    attacks = [("vit", gl.attacks.get("vit"))]
    statuses = [preflight(task, attacks, granted=(), examples=examples).lines[0].status for examples in (1, 2)]
    assert statuses == [RUNS, NEEDS]
    seen, engine = gl.observe(task, batch, ONE_STEP), gl.Engine(device="cpu")
    assert Case(task, (Track((seen,)),), gl.Knowledge(training=ONE_STEP), engine).patched
    assert not Case(task, (Track((seen,)),), gl.Knowledge(), engine).patched
    with pytest.raises(MissingKnowledge, match="vit needs training for two images"):
        gl.attacks.get("vit").run(task, seen, gl.Knowledge())
