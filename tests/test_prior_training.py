"""Training of generators: scores that are right, steps that repeat, folders that go on, and a generator that learns."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from conftest import seeded
from gradleak import generators
from gradleak.core.folder import FolderInUse
from gradleak.generators import Card
from gradleak.priors.augmentation import AUGMENTATIONS, augmented
from gradleak.priors.discriminators import Residual, spread
from gradleak.priors.recipes import DCGANRecipe, Recipe, StyleGAN2Recipe, WGANRecipe
from gradleak.priors.score import Cloud, Features, Scored, frechet, random_features
from gradleak.priors.splits import ranges
from gradleak.priors.trainer import GANTrainer
from gradleak.priors.training import Interrupted, PriorError, PriorTraining, TrainedPrior, train

CPU = torch.device("cpu")
SMALL: dict[str, Recipe] = {
    "dcgan": DCGANRecipe(latent=4, width=4),
    "wgan": WGANRecipe(latent=4, width=4),
    "stylegan2": StyleGAN2Recipe(latent=4, style=8, layers=1, width=8),
}


def pictures(count: int = 40, channels: int = 1) -> tuple[Tensor, Tensor]:
    """Bright squares on the left or on the right of 8 x 8 pixels: two classes."""
    y = torch.arange(count) % 2
    x = 0.1 * torch.rand(count, channels, 8, 8, generator=seeded(5))
    for row in range(count):
        x[row, :, 2:6, 4 * int(y[row]) : 4 * int(y[row]) + 4] += 0.8
    return x, y


def training(name: str = "dcgan", **settings: Any) -> PriorTraining:
    return PriorTraining(SMALL[name], **{"batch": 8, "r1_every": 3, "average": 100, **settings})


def short(folder: Path, steps: int, how: PriorTraining | None = None, **options: Any) -> TrainedPrior:
    x, y = pictures()
    given = {"every": 4, "report": 2, "score_images": 16, "features": random_features(CPU), **options}
    return train(how or training(), x, y, classes=2, steps=steps, out=folder, **given)


def same_files(first: Path, second: Path) -> bool:
    """All but the pictures: the last step of a training that goes on later has some too."""
    one, two = (load_file(folder / "state.safetensors") for folder in (first, second))
    one.pop("shown"), two.pop("shown")
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# --- the score -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [6, 200])  # fewer images than features: covariances without full rank
def test_the_distance_is_that_of_scipy(count: int) -> None:
    scipy_linalg = pytest.importorskip("scipy.linalg")
    draw = np.random.default_rng(count)
    first = draw.normal(size=(count, 12)) @ draw.normal(size=(12, 12)) + draw.normal(size=12)
    second = draw.normal(size=(count + 3, 12)) @ draw.normal(size=(12, 12))
    means = first.mean(0) - second.mean(0)
    one, two = np.cov(first.T), np.cov(second.T)
    root = scipy_linalg.sqrtm(one @ two) if count > 12 else None
    if root is None:  # sqrtm wants a regular matrix: a little of the identity, which moves the value little
        root = scipy_linalg.sqrtm((one + 1e-9 * np.eye(12)) @ (two + 1e-9 * np.eye(12)))
    expected = means @ means + np.trace(one + two - 2 * root.real)
    found = frechet(Cloud.of(torch.from_numpy(first)), Cloud.of(torch.from_numpy(second)))
    assert found == pytest.approx(expected, rel=1e-8 if count > 12 else 1e-3)


def test_the_distance_of_one_dimension_and_of_itself() -> None:
    a, b = torch.randn(50, 1, generator=seeded()), 3 * torch.randn(60, 1, generator=seeded(1)) + 2
    expected = (a.mean() - b.mean()) ** 2 + (a.std() - b.std()) ** 2
    assert frechet(Cloud.of(a), Cloud.of(b)) == pytest.approx(float(expected), rel=1e-5)
    cloud = Cloud.of(torch.randn(30, 5, generator=seeded()))
    assert frechet(cloud, cloud) == pytest.approx(0, abs=1e-10)
    assert Cloud.of(a).mean.dtype == torch.float64
    with pytest.raises(ValueError, match="at least two"):
        Cloud.of(a[:1])


def test_random_features_are_the_same_every_time_and_say_what_they_are() -> None:
    x = torch.rand(5, 1, 8, 8, generator=seeded())
    features = random_features(CPU)
    assert torch.equal(features(x), random_features(CPU)(x))
    assert features.score == "Frechet distance, random convolutional features (seed 0)"
    clouds = [Cloud.of(features(pictures(60)[0] * light)) for light in (1.0, 0.9, 0.3)]
    near, far = (frechet(clouds[0], other) for other in clouds[1:])
    assert 0 < near < far


def test_vgg_features_where_their_weights_are() -> None:
    from gradleak.metrics.perceptual import WeightsMissing
    from gradleak.priors.score import found_features, vgg_features

    try:
        features = vgg_features(CPU)
    except WeightsMissing:
        assert "random" in found_features(CPU).name
        pytest.skip("no VGG16 weights on this machine")
    assert found_features(CPU).score == features.score == "Frechet distance, VGG16 features"
    assert features(torch.rand(3, 1, 8, 8)).shape == (3, 512)


# --- augmentation and discriminators ---------------------------------------------------------------------------------


def test_augmentations_change_each_image_in_its_own_way_and_pass_gradients() -> None:
    x = (2 * torch.rand(6, 3, 16, 16, generator=seeded()) - 1).requires_grad_()
    for name in AUGMENTATIONS:
        made = augmented(x, [name], seeded(3))
        assert made.shape == x.shape
        assert not torch.allclose(made, x)
        assert torch.equal(made, augmented(x, [name], seeded(3)))
        (slope,) = torch.autograd.grad(made.square().sum(), x)
        assert torch.isfinite(slope).all()
        assert (slope.abs().amax((1, 2, 3)) > 0).all()
    assert augmented(x, [], seeded()) is x


def test_translation_moves_by_whole_pixels_and_cutout_takes_a_quarter_at_most() -> None:
    x = 1 + torch.arange(256.0).reshape(1, 1, 16, 16).expand(300, 1, 16, 16)
    moved = augmented(x, ["translation"], seeded(1))
    differences = (moved[:, 0, 8, 8] - x[:, 0, 8, 8]).tolist()
    shifts = {(round(d / 16), round(d - 16 * round(d / 16))) for d in differences}
    assert {rows for rows, _ in shifts} == {columns for _, columns in shifts} == {-2, -1, 0, 1, 2}
    down = next(row for row, d in zip(moved, differences) if round(d / 16) == -2)
    assert (down[0, :2] == 0).all(), "what comes in from outside is grey"
    cut = (augmented(torch.ones(300, 1, 16, 16), ["cutout"], seeded(2)) == 0).float().mean((1, 2, 3))
    assert float(cut.max()) == 0.25
    assert 0 < float(cut.min()) < 0.25


def test_colour_leaves_the_mean_shift_of_brightness_alone() -> None:
    x = torch.rand(200, 3, 4, 4, generator=seeded()) - 0.5
    shift = (augmented(x, ["colour"], seeded(1)) - x).mean((1, 2, 3))
    assert float(shift.min()) < -0.4
    assert float(shift.max()) > 0.4
    assert float(shift.abs().max()) <= 0.5 + 1e-5


def test_unknown_augmentations_are_refused() -> None:
    with pytest.raises(ValueError, match="Unknown augmentation 'color'. Available: colour"):
        training(augment=("color",))


def test_the_spread_is_of_neighbours_only() -> None:
    x = torch.randn(8, 2, 3, 3, generator=seeded())
    found = spread(torch.cat([x, torch.zeros(8, 2, 3, 3)]), 4)
    assert torch.equal(found[:8], spread(x, 4))
    assert torch.allclose(found[8:], torch.full_like(found[8:], 1e-4))
    assert len(set(found[:4].flatten().tolist())) == 1


def test_a_discriminator_looks_at_the_class() -> None:
    judge = Residual((1, 8, 8), 2, (8, 8), seed=seeded())
    x, shares = torch.randn(4, 1, 8, 8, generator=seeded()), torch.eye(2)[[0, 0, 1, 1]]
    assert not torch.allclose(judge(x, shares), judge(x, shares.flip(0)))
    assert torch.equal(judge(x), judge(x, torch.zeros(4, 2)))


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_a_step_moves_everything_and_the_average_less(name: str) -> None:
    x, y = pictures(40, 3)
    work = GANTrainer(training(name, conditional=True, mirror=True, average=10_000), x, y, 2, CPU)
    before = {key: value.clone() for key, value in work.state()[1].items()}
    for _ in range(3):
        work.advance()
    after = work.state()[1]
    weights = [key for key in before if key.startswith(("generator/", "discriminator/")) and "." in key]
    still = {key for key in weights if torch.equal(before[key], after[key])}
    assert not {key for key in still if not key.endswith(("noise_const", "resample_filter", "w_avg"))}
    key = next(key for key in weights if key.startswith("generator/") and key.endswith("weight"))
    mean = key.replace("generator/", "average/")
    assert 0 < float((after[mean] - before[mean]).norm()) < float((after[key] - before[key]).norm())
    assert all(torch.isfinite(value).all() for value in after.values() if value.is_floating_point())
    assert not work.average.training
    assert work.generator.training


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_half_precision_goes_by_the_weights_of_the_moment(name: str, device: str) -> None:
    """Autocast can keep casts of weights: then steps change weights that nothing is made or judged with any more."""
    x, _ = pictures(40, 3)
    work = GANTrainer(training(name, lr=0.05), x, None, None, torch.device(device))
    work.training = replace(work.training, precision="half")  # refused on a CPU, where it is slow; the casts are alike
    with work.settled():
        for _ in range(10):
            work.advance()
        halves = _made_judged_and_slopes(work)
    work.training = replace(work.training, precision="strict")
    with work.settled():
        exact = _made_judged_and_slopes(work)
    for key, value in exact.items():
        assert float((halves[key] - value).norm()) < 0.25 * float(value.norm()), key  # kept casts: 0.57 to 1


def _made_judged_and_slopes(work: GANTrainer) -> dict[str, Tensor]:
    """Images of the generator, logits of the discriminator, and slopes by the weights of either; the same draws."""
    with work._half():
        made, _ = work._made(work._draws("test"))
        judged = work.discriminator(2 * work.x[:16] - 1)
    found = {"made": made.detach(), "judged": judged.detach()}
    for kind, network, value in (("made", work.generator, made), ("judged", work.discriminator, judged)):
        weights = {key: weight for key, weight in network.named_parameters() if weight.dim() > 1}
        direction = torch.randn(value.shape, generator=seeded(2)).to(value)
        slopes = torch.autograd.grad((value * direction).sum(), list(weights.values()))
        found |= {f"{kind} by {key}": slope for key, slope in zip(weights, slopes)}
    return found


def test_the_penalty_is_the_squared_slope() -> None:
    x, _ = pictures()
    work = GANTrainer(training(r1=0.3), x, None, None, CPU)
    weight = torch.randn(64, generator=seeded())

    class Slope(nn.Module):
        def forward(self, images: Tensor, shares: Tensor | None = None) -> Tensor:
            return images.flatten(1) @ weight

    work.discriminator = Slope()
    assert float(work._penalty(x[:5].clone(), None)) == pytest.approx(0.15 * float(weight.square().sum()), rel=1e-5)


def test_the_average_forgets_by_half() -> None:
    """After so many images as `average` says, an old weight counts half."""
    x, _ = pictures()
    work = GANTrainer(training(average=80), x, None, None, CPU)
    work.step = 10_000  # past the ramp
    with torch.no_grad():
        for value in work.average.parameters():
            value.zero_()
        for value in work.generator.parameters():
            value.fill_(1.0)
    for _ in range(10):  # of 8 images
        work._follow()
    assert all(torch.allclose(value, torch.tensor(0.5)) for value in work.average.parameters())


def test_training_learns_where_the_light_is(tmp_path: Path) -> None:
    """Bright squares left or right: a trained generator's images lie nearer to them than an untrained one's, by far."""
    x, y = pictures(200)
    how = PriorTraining(
        DCGANRecipe(latent=8, width=8), conditional=True, batch=32, lr=1e-3, average=2000, augment=("translation",)
    )
    done = train(
        how, x, y, classes=2, steps=250, out=tmp_path, every=250, report=50, score_images=128,
        features=random_features(CPU),
    )  # fmt: skip
    fresh = how.recipe.generator((1, 8, 8), 2, seeded())
    features = random_features(CPU)
    z = torch.randn(128, 8, generator=seeded(1))
    which = torch.arange(128) % 2
    with torch.no_grad():
        scores = [
            frechet(Cloud.of(features(x)), Cloud.of(features(network(z, which).clamp(0, 1))))
            for network in (fresh, done.generator)
        ]
        made = done.generator(z, which)
    assert scores[1] < 0.25 * scores[0], scores
    side = made[..., 4:].mean((1, 2, 3)) - made[..., :4].mean((1, 2, 3))
    assert float(side[which == 1].mean()) > 0.2, "squares on the right for class 1"
    assert float(side[which == 0].mean()) < -0.2, "and on the left for class 0"


# --- the folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dcgan", "stylegan2"])
def test_a_resumed_training_is_an_uninterrupted_one(name: str, tmp_path: Path) -> None:
    how = training(name)
    short(tmp_path / "a", 5, how)  # not at a line of metrics: sums go on too
    parts = short(tmp_path / "a", 9, how)
    whole = short(tmp_path / "b", 9, how)
    assert same_files(tmp_path / "a", tmp_path / "b")
    one, two = (load_file(tmp_path / each / "generator.safetensors") for each in "ab")
    assert all(torch.equal(one[key], two[key]) for key in two)
    # The last line of the first part is one that the whole training does not have.
    lines = [{key: v for key, v in row.items() if key != "seconds"} for row in parts.metrics if row["step"] != 5]
    expected = [{key: v for key, v in row.items() if key != "seconds"} for row in whole.metrics]
    assert [row["step"] for row in lines] == [row["step"] for row in expected] == [2, 4, 6, 8, 9]
    assert lines[0] == expected[0]
    assert lines[-1] == expected[-1]


def test_what_is_in_the_folder(tmp_path: Path) -> None:
    x, _ = pictures()
    card = Card("bright squares", {"part": "train", "of": 40})
    done = short(tmp_path / "run", 6, card=card)
    names = {path.relative_to(done.folder).as_posix() for path in done.folder.rglob("*") if path.is_file()}
    assert names == {
        ".lock", "prior.toml", "metrics.jsonl", "state.safetensors", "generator.safetensors", "samples.png",
        "samples/step-4.png", "samples/step-6.png",
    }  # fmt: skip
    assert (done.folder / "samples.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in (done.folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == done.metrics
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert [row["images"] for row in rows] == [16, 32, 48]
    assert ["score" in row for row in rows] == [False, True, True]
    network, told = generators.read(done.path)
    z = torch.randn(3, network.latent, generator=seeded())
    assert torch.allclose(network(z), done.generator(z), atol=5e-3)  # kept in half precision
    assert told.data == "bright squares"
    assert told.split["of"] == 40
    assert told.training["steps"] == 6
    assert told.training["generator"] == "dcgan:latent=4,width=4"
    assert told.score["name"] == "Frechet distance, random convolutional features (seed 0)"
    assert told.score["value"] == pytest.approx(min(row["score"] for row in rows[1:]), abs=1e-3)
    assert told.score["made"] == 16
    assert told.score["between_halves_of_real"] > 0
    assert told.seen(x).tolist() == list(range(40))
    assert told.seen(1 - x).tolist() == []
    assert "Frechet distance" in done.table()


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ((3.0, 1.0, 2.0, 4.0), 6),  # in the middle, and the folder goes on after it
        ((4.0, 3.0, 2.0, 1.0), 10),  # the last step, which is no multiple
        ((1.0, 2.0, 3.0, 4.0), 3),
    ],
)
def test_the_average_with_the_lowest_score_is_kept(
    scores: Sequence[float], kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_step = dict(zip((3, 6, 9, 10), scores))
    seen: dict[int, dict[str, Tensor]] = {}

    def scored(self: Scored, made: Tensor) -> float:
        return by_step.get(games[-1].step, 0.5)  # 0.5, the lowest: at the end of a part, which a whole does not have

    def remembered(self: GANTrainer, *given: Any) -> None:
        games.append(self)
        begin(self, *given)

    def shown(self: GANTrainer) -> None:
        seen[self.step] = {key: value.clone() for key, value in self.average.state_dict().items()}
        show(self)

    games: list[GANTrainer] = []
    begin, show = GANTrainer.__init__, GANTrainer.show
    monkeypatch.setattr(GANTrainer, "__init__", remembered)
    monkeypatch.setattr(GANTrainer, "show", shown)
    monkeypatch.setattr(Scored, "__call__", scored)
    assert short(tmp_path / "a", 7, every=3).step == 7
    for done in (short(tmp_path / "a", 10, every=3), short(tmp_path / "b", 10, every=3)):
        assert done.step == done.card.score["step"] == kept
        assert done.card.score["value"] == by_step[kept]
        assert done.card.training["steps"] == 10
        assert [line for line in done.table().splitlines() if "kept" in line] == [done.table().splitlines()[_row(done)]]
        made = done.generator.state_dict()
        assert all(torch.equal(made[key], seen[kept][key]) for key in made)
    again = short(tmp_path / "b", 10, every=3)  # nothing is left to do, and the same is kept
    assert (again.step, again.card.score) == (done.step, done.card.score)
    assert same_files(tmp_path / "a", tmp_path / "b")


def _row(done: TrainedPrior) -> int:
    return 1 + [row["step"] for row in done.metrics if "score" in row].index(done.step)


def test_without_scores_the_last_average_is_kept(tmp_path: Path) -> None:
    done = short(tmp_path, 6, score_images=0)
    assert done.step == 6
    assert done.card.score == {}
    assert "kept" not in done.table()


def test_other_settings_or_images_do_not_mix(tmp_path: Path) -> None:
    short(tmp_path, 2)
    with pytest.raises(FolderInUse, match=r"training.batch \(8 there, 4 now\)"):
        short(tmp_path, 4, training(batch=4))
    x, y = pictures(38)
    with pytest.raises(FolderInUse, match="data.count"):
        train(training(), x, y, classes=2, steps=4, out=tmp_path, score_images=16, features=random_features(CPU))
    with pytest.raises(PriorError, match="at step 2 already, beyond 1"):
        short(tmp_path, 1)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(FolderInUse, match="holds file and no training"):
        short(tmp_path / "other", 1)


@pytest.mark.parametrize("when", ["between", "within"])
def test_ctrl_c_keeps_whole_steps(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advance, follow = GANTrainer.advance, GANTrainer._follow

    def pressed(self: GANTrainer) -> None:
        advance(self)
        if self.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    def torn(self: GANTrainer) -> None:
        if self.step == 3:
            raise KeyboardInterrupt  # as it would be raised in a thread, or by a second Ctrl-C
        follow(self)

    monkeypatch.setattr(GANTrainer, *(("advance", pressed) if when == "between" else ("_follow", torn)))
    kept = 3 if when == "between" else 0
    with pytest.raises(Interrupted, match=f"{kept} of 6 steps are kept in .*; the same call goes on"):
        short(tmp_path / "a", 6)
    monkeypatch.undo()
    short(tmp_path / "a", 6)
    short(tmp_path / "b", 6)
    assert same_files(tmp_path / "a", tmp_path / "b")


def test_a_limit_of_time_ends_as_a_last_step_does(tmp_path: Path) -> None:
    done = short(tmp_path / "a", 6, most_seconds=0.0)
    assert [row["step"] for row in done.metrics] == [1]
    assert done.metrics[0]["score"] is not None
    assert generators.read(done.path)[1].training["steps"] == 1
    short(tmp_path / "a", 6)
    short(tmp_path / "b", 6)
    assert same_files(tmp_path / "a", tmp_path / "b")


def test_lines_after_the_state_come_again_once(tmp_path: Path) -> None:
    """A killed process has written lines beyond the state that it kept."""
    short(tmp_path, 4)
    line = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({**json.loads(line), "step": 6}) + '\n{"step": 7, "im')
    done = short(tmp_path, 6)
    assert [row["step"] for row in done.metrics] == [2, 4, 6]
    assert done.metrics[-1]["generator_loss"] != json.loads(line)["generator_loss"]


def test_a_state_that_cannot_be_read(tmp_path: Path) -> None:
    short(tmp_path, 2)
    (tmp_path / "state.safetensors").write_bytes(b"no")
    with pytest.raises(PriorError, match="cannot be read"):
        short(tmp_path, 4)


def test_a_diverged_training_says_so(tmp_path: Path) -> None:
    with pytest.raises(PriorError, match="diverged before step .* is not finite"):
        short(tmp_path, 40, training("dcgan", lr=1e30))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"batch": 1}, "batch must be at least 2"),
        ({"r1": -1.0}, "r1 must be at least 0"),
        ({"lr": math.inf}, "lr above 0"),
        ({"precision": "bf16"}, "precision must be strict, fast, half"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(PriorError, match=told):
        training(**settings)


def test_trainings_that_cannot_be(tmp_path: Path) -> None:
    x, y = pictures()
    with pytest.raises(PriorError, match="half is for CUDA"):
        GANTrainer(training(precision="half"), x, y, 2, CPU)
    with pytest.raises(PriorError, match="needs the class of every image"):
        GANTrainer(training(conditional=True), x, None, None, CPU)
    with pytest.raises(PriorError, match="Images must be"):
        GANTrainer(training(), x[0], None, None, CPU)
    with pytest.raises(PriorError, match="steps, every and report"):
        short(tmp_path, 0)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a few images in two parts, whose rows 3 and 4 of the test part are also in the training part."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gradleak.priors.score.vgg_features", _missing)
    x, y = pictures(30)
    stored = (x.permute(0, 2, 3, 1) * 255).round().byte().numpy()
    test = np.concatenate([255 - stored[:3], stored[:2]])
    np.savez("few.npz", train_x=stored, train_y=y.numpy(), test_x=test, test_y=y.numpy()[:5])
    return tmp_path


def _missing(device: torch.device) -> Features:
    from gradleak.metrics.perceptual import WeightsMissing

    raise WeightsMissing("vgg", "nowhere")


def gradleak(*words: object) -> Any:
    testing = pytest.importorskip("typer.testing")
    from gradleak.cli import app

    return testing.CliRunner().invoke(app, ["prior", *map(str, words)])


TRAIN: Sequence[object] = (
    "train", "--data", "few.npz", "-g", "dcgan:latent=4,width=4", "--steps", 4, "--batch-size", 4, "--every", 2,
    "--score-images", 8, "--device", "cpu",
)  # fmt: skip


def test_the_command_trains_shows_and_checks(place: Path) -> None:
    done = gradleak(*TRAIN, "--hold-out", 0.2, "--exclude", "few.npz", "-o", "all")
    assert done.exit_code == 2, done.output
    assert "Nothing is left of" in done.stderr
    assert ": exclude or hold out less" in done.stderr
    done = gradleak(*TRAIN, "--rows", "2-29", "--hold-out", 0.25, "-o", "run")
    assert done.exit_code == 0, done.output
    assert "21 images of 1x8x8 from few.npz (train part)" in done.stderr
    assert "Frechet distance, random convolutional features (seed 0)" in done.stdout
    file = place / "run" / "generator.safetensors"
    _, card = generators.read(file)
    assert card.split["asked_for"] == "2-29"
    assert card.split["used"] == 21
    kept, back = (set(_numbers(text)) for text in (card.split["used_rows"], card.split["held_out"]["rows"]))
    assert kept | back == set(range(2, 30))
    assert not kept & back
    shown = gradleak("show", file, "--samples", "s.png")
    assert shown.exit_code == 0, shown.output
    assert "dcgan, 1,053 weights, images of 1x8x8, 2 blocks, latent of 4" in shown.stdout
    assert (place / "s.png").read_bytes().startswith(b"\x89PNG")
    assert gradleak("check", file).stdout.endswith("fits.\n")
    seen = gradleak("check", file, "--data", "few.npz")
    assert seen.exit_code == 1
    assert "Of 30 images of few.npz (train part) it was trained on 21." in seen.stdout
    unseen = gradleak("check", file, "--data", "few.npz", "--rows", card.split["held_out"]["rows"])
    assert unseen.exit_code == 0
    assert "trained on 0." in unseen.stdout
    again = gradleak(*TRAIN, "--rows", "2-29", "--hold-out", 0.25, "-o", "run", "--steps", 6)
    assert again.exit_code == 0, again.output
    assert generators.read(file)[1].training["steps"] == 6


def _numbers(text: str) -> list[int]:
    found = []
    for piece in text.split(","):
        low, _, high = piece.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def test_images_of_other_data_stay_unseen(place: Path) -> None:
    x = np.load("few.npz")
    np.savez(
        "attacked.npz", train_x=x["train_x"][5:9], train_y=x["train_y"][5:9], test_x=x["test_x"], test_y=x["test_y"]
    )
    done = gradleak(*TRAIN, "--exclude", "attacked.npz", "-o", "run")
    assert done.exit_code == 0, done.output
    file = place / "run" / "generator.safetensors"
    _, card = generators.read(file)
    assert card.split["excluded"] == {"attacked.npz": 6}  # four rows, and the two that the test part shares
    assert card.split["used_rows"] == "2-4,9-29"
    for part in ("train", "test"):
        assert gradleak("check", file, "--data", "attacked.npz", "--part", part).exit_code == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--rows", "0-99"), "Rows 0-99 are not among the 30 images"),
        (("--part", "both"), "part must be train or test"),
        (("-g", "biggan"), "Unknown generator 'biggan'"),
        (("-g", "dcgan:depth=3"), "has no setting 'depth'"),
        (("--augment", "flip"), "Unknown augmentation 'flip'"),
        (("--precision", "half"), "half is for CUDA"),
        (("--size", 25), "Resize them"),
        (("--data", "nowhere.npz"), "There is no file"),
    ],
)
def test_commands_that_cannot_be(words: Sequence[object], told: str, place: Path) -> None:
    answer = gradleak(*TRAIN, "-o", "run", *words)
    assert answer.exit_code == 2, answer.output
    assert told in answer.stderr
    assert "Traceback" not in answer.stderr


def test_files_that_are_no_generator(place: Path) -> None:
    for command in ("show", "check"):
        answer = gradleak(command, "few.npz")
        assert answer.exit_code == 2
        assert "cannot be read as safetensors" in answer.stderr


def test_rows_as_ranges() -> None:
    assert ranges([7, 0, 1, 2, 9, 10]) == "0-2,7,9-10"
    assert ranges(range(0, 100, 2), most=20).startswith("50 rows, sha256 ")


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("precision", ["strict", "half"])
def test_a_step_on_cuda_waits_for_nothing(name: str, precision: str) -> None:
    x, y = pictures(40, 3)
    work = GANTrainer(training(name, precision=precision, conditional=True, mirror=True), x, y, 2, torch.device("cuda"))
    with work.settled():
        work.advance()
        try:
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(4):
                work.advance()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(value is not None for value in work.means().values())
    with work.settled():
        made = work.samples(16, "sheet").cpu()
    work.average.cpu()
    work.device = CPU
    assert torch.allclose(made, work.samples(16, "sheet"), atol=5e-2 if precision == "half" else 1e-3)


@pytest.mark.gpu
def test_a_training_on_cuda_goes_on(tmp_path: Path) -> None:
    how, cuda = training("stylegan2", precision="half"), torch.device("cuda")
    given = {"device": cuda, "features": random_features(cuda)}
    short(tmp_path / "a", 3, how, **given)
    parts = short(tmp_path / "a", 8, how, **given)
    whole = short(tmp_path / "b", 8, how, **given)
    one, two = (load_file(tmp_path / each / "generator.safetensors") for each in "ab")
    assert parts.metrics[-1]["step"] == whole.metrics[-1]["step"] == 8
    assert all(torch.allclose(one[key].double(), two[key].double(), rtol=0.05, atol=0.05) for key in two)
