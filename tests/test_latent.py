"""Spaces of a generator: its latent, its features in their balls, its weights; and stages that give way to the best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.func import grad, vmap

import gradleak as gl
from conftest import CLASSES, SHAPE, largest_difference, moment, perceptron, private, scene_of
from gradleak.attack import Composed
from gradleak.attacks.generative.latent import Features, Generated, Latent, Weights, moving, resized
from gradleak.attacks.generative.projections import l1_ball
from gradleak.core import tree
from gradleak.core.random import Draws, key
from gradleak.core.tree import Tree
from gradleak.engine import Engine
from gradleak.generators import DCGAN, StyleGAN2, images_of, stylegan2
from gradleak.parts.fields import Labels, label_rule
from gradleak.parts.matches import Cosine
from gradleak.parts.optimisers import Adam, RampedDecay, Still
from gradleak.parts.predictions import Replay
from gradleak.parts.priors import LatentNorm, LatentNormality
from gradleak.parts.protocols import Optimiser
from gradleak.parts.spaces import Pixels
from gradleak.parts.stage import Stage
from gradleak.parts.view import TargetView
from gradleak.scenario.observation import Knowledge, MissingKnowledge
from gradleak.scenario.task import Batch
from test_engine import gate, searches

TRAINING = gl.LocalTraining(lr=0.5)


class Toy(nn.Module):
    """z (5) -> 8 -> 10 -> 12 -> an image of 1 x 4 x 4, or another shape; with classes, their row is added first."""

    def __init__(
        self, classes: int | None = None, shape: tuple[int, int, int] = SHAPE, *, styled: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        self.latent, self.classes, self.shape, self.blocks, self.styled = 5, classes, shape, 2, styled
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.first = nn.Linear(5, 8)
            self.embed = nn.Parameter(torch.randn(classes or 1, 8))
            self.middle = nn.ModuleList([nn.Linear(8, 10), nn.Linear(10, 12)])
            self.last = nn.Linear(12, int(np.prod(shape)))
            for parameter in self.parameters():
                parameter.data.mul_(1.5)
        self.eval()

    def begin(self, z: Tensor, y: Tensor | None = None) -> Tree:
        h = self.first(z)
        if self.classes is not None:
            assert y is not None
            shares = y if y.is_floating_point() else (y[..., None] == torch.arange(self.classes)).to(h.dtype)
            h = h + shares.to(h.dtype) @ self.embed
        carried: Tree = {"h": h.tanh()}
        if self.styled:
            carried |= {
                "w": z[:, None, :2].expand(-1, 2, -1),
                "noise": {"map": z[:, None, None, :1].expand(-1, 1, 2, 2)},
            }
        return carried

    def block(self, index: int, carried: Tree) -> Tree:
        h = self.middle[index](carried["h"])
        if self.styled:
            h = h * (1 + carried["w"][:, index, :1]) + carried["noise"]["map"].mean((1, 2, 3))[:, None]
        return {**carried, "h": h.tanh()}

    def picture(self, carried: Tree) -> Tensor:
        return self.last(carried["h"]).sigmoid().reshape(-1, *self.shape)


def made(generator: nn.Module, examples: int = 1, *, seed: int = 0, y: Tensor | None = None) -> Batch:
    """A private batch that the generator can make."""
    z = Draws(key("made", seed)).normal((examples, generator.latent))
    y = (torch.arange(examples) + seed) % CLASSES if y is None else y
    with torch.no_grad():
        return {"x": images_of(generator, z, y).double(), "y": y}


def observed(generator: nn.Module, examples: int = 1, targets: int = 1) -> tuple[gl.Task, list[gl.Observation], Batch]:
    task = perceptron()
    batches = [made(generator, examples, seed=seed) for seed in range(targets)]
    seen = [gl.observe(task, batch, TRAINING, key=f"t{i}") for i, batch in enumerate(batches)]
    return task, seen, {name: torch.stack([batch[name] for batch in batches]) for name in batches[0]}


def knowing(generator: Any, **more: Any) -> Knowledge:
    return Knowledge(training=TRAINING, generator=generator, **more)


def attack_of(*stages: Stage, **settings: Any) -> Composed:
    return Composed("toy", stages, Labels(label_rule("auto")), **settings)


def stage_of(space: Generated, *, optimiser: Any = None, **settings: Any) -> Stage:
    return Stage(space, Replay(), Cosine(), (), optimiser or Adam(lr=0.1, steps=10), **settings)


def scene_with(generator: nn.Module, examples: int = 2, **settings: Any) -> TargetView:
    task = perceptron(**settings)
    batch = private(examples)
    return scene_of(task, gl.observe(task, batch, TRAINING), knowing(generator), y=batch["y"])


def begun(space: Generated, scene: TargetView, before: Tree | None = None) -> tuple[Tree, TargetView]:
    """The unknowns of a space and the scene with its constants."""
    assert scene.draws is not None
    scene = replace(scene, constants=space.constants(scene, scene.draws, before))
    return space.variables(scene, scene.draws, before), scene


# --- the l1 ball ------------------------------------------------------------------------------------------------------


def quadratic_programme(v: np.ndarray, radius: float) -> np.ndarray:
    """min 1/2 ||p - q - v||^2 over p, q >= 0 with sum p + q <= radius, by a general solver."""
    n = len(v)
    answer = minimize(
        lambda s: 0.5 * ((s[:n] - s[n:] - v) ** 2).sum(),
        np.zeros(2 * n),
        jac=lambda s: np.concatenate([s[:n] - s[n:] - v, -(s[:n] - s[n:] - v)]),
        bounds=[(0, None)] * 2 * n,
        constraints=[{"type": "ineq", "fun": lambda s: radius - s.sum(), "jac": lambda s: -np.ones(2 * n)}],
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    return answer.x[:n] - answer.x[n:]


@pytest.mark.parametrize("size", [1, 2, 7, 20])
@pytest.mark.parametrize("radius", [0.0, 0.05, 1.0, 4.0, 1e3])
def test_the_projection_solves_the_quadratic_programme(size: int, radius: float) -> None:
    points = 1.5 * Draws(key("qp", size)).normal((6, size), dtype=torch.float64)
    for point, found in zip(points, vmap(lambda v: l1_ball(v, radius))(points)):
        wanted = torch.from_numpy(quadratic_programme(point.numpy(), radius))
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
        assert float(found.abs().sum()) <= radius * (1 + 1e-12) + 1e-12 or torch.equal(found, point)


@pytest.mark.parametrize(
    ("point", "radius"),
    [
        ([1.0, 1.0, 1.0], 1.5),  # ties
        ([2.0, -2.0, 0.0], 1.0),  # ties of both signs, a zero
        ([0.0, 0.0], 1.0),  # the middle
        ([0.25, -0.75], 1.0),  # on the surface
        ([100.0, 1e-3], 1.0),  # one entry is everything
        ([1.0, 0.5, 0.25], 0.5),  # exactly where the next entry would be left over
    ],
)
def test_the_projection_at_its_edges(point: list[float], radius: float) -> None:
    found = l1_ball(torch.tensor(point, dtype=torch.float64), radius)
    wanted = torch.from_numpy(quadratic_programme(np.array(point), radius))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


# --- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("old", "new"), [((8, 8), (4, 4)), ((6, 12), (3, 4)), ((4, 4), (4, 4)), ((2, 2), (4, 6))])
def test_whole_ratios_are_plain_means(old: tuple[int, int], new: tuple[int, int]) -> None:
    images = Draws(key("area")).uniform((2, 3, *old), dtype=torch.float64)
    torch.testing.assert_close(resized(images, *new), F.interpolate(images, size=new, mode="area"))


def test_other_ratios_keep_the_mean_and_what_is_flat() -> None:
    images = Draws(key("area")).uniform((2, 3, 7, 5), dtype=torch.float64)
    small = resized(images, 4, 4)
    torch.testing.assert_close(small.mean((-2, -1)), images.mean((-2, -1)))
    torch.testing.assert_close(resized(torch.ones_like(images), 4, 3), torch.ones(2, 3, 4, 3, dtype=torch.float64))
    assert resized(images[..., :1, :1].expand(-1, -1, 3, 3), 2, 2).std((-2, -1)).max() < 1e-12


@pytest.mark.parametrize("settings", [{}, {"mean": 0.5, "std": 0.25}])
@pytest.mark.parametrize("shape", [SHAPE, (1, 8, 8), (1, 6, 10)])
def test_images_come_in_the_tasks_size_and_space(shape: tuple[int, int, int], settings: dict) -> None:
    generator = Toy(shape=shape)
    scene = scene_with(generator, **settings)
    v, scene = begun(Latent(), scene)
    found = Latent().decode(v, scene, moment())["x"]
    with torch.no_grad():
        picture = resized(images_of(generator.double(), v["z"]), *SHAPE[1:])
    torch.testing.assert_close(scene.task.fields["x"].unit(found), picture)
    assert found.shape == (2, *SHAPE)


@pytest.mark.parametrize("shift", [0, 1, -1])
@pytest.mark.parametrize("soft", [False, True])
def test_a_conditional_generator_is_told_the_label(shift: int, soft: bool) -> None:
    generator, space = Toy(CLASSES), Latent(shift=shift)
    scene = scene_with(generator)
    y = torch.tensor([2, 0])
    scene = replace(scene, fields={"y": F.one_hot(y, CLASSES).double() if soft else y})
    v, scene = begun(space, scene)
    with torch.no_grad():
        wanted = images_of(generator.double(), v["z"], (y + shift) % CLASSES)
    torch.testing.assert_close(space.decode(v, scene, moment())["x"], wanted)


def test_wrong_generators_are_refused() -> None:
    task, seen, _ = observed(Toy())
    attack = attack_of(stage_of(Latent()))
    cases: list[tuple[Any, str]] = [
        (None, r"toy needs generator.*Knowledge\(generator=...\)"),
        (nn.Linear(2, 2), "begin, block and picture.*given Linear"),
        ("a name", "given str"),
        (Toy(shape=(3, 4, 4)), r"images of shape \(3, 4, 4\).*examples are \(1, 4, 4\).*colour channels must agree"),
        (Toy(classes=7), "knows 7 classes and the task has 3"),
    ]
    for generator, told in cases:
        with pytest.raises(MissingKnowledge, match=told):
            attack.run(task, seen, knowing(generator))


def test_a_conditional_generator_without_a_label_is_refused() -> None:
    scene = replace(scene_with(Toy(CLASSES)), fields={})
    v = Latent().variables(scene, scene.draws, None)  # type: ignore[arg-type]
    with pytest.raises(MissingKnowledge, match="no label was found or given"):
        Latent().decode(v, scene, moment())


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (Features(stage=3), "has 2 blocks; the features that enter block 3 do not exist"),
        (Features(of=("style",)), "carries h; none of style"),
        (Latent(of="w"), "carries no styles 'w', only h"),
    ],
)
def test_what_a_generator_does_not_have_is_refused(space: Generated, told: str) -> None:
    scene = scene_with(Toy())
    with pytest.raises(ValueError, match=told):
        space.variables(scene, scene.draws, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"of": "styles"}, {"of": "auto", "squash": True}])
def test_impossible_latents_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="of must be|squash is for"):
        Latent(**settings)


# --- unknowns ---------------------------------------------------------------------------------------------------------


def test_styles_are_the_latent_of_a_generator_that_has_them() -> None:
    plain, styled = Toy(), Toy(styled=True)
    assert begun(Latent(), scene_with(plain))[0].keys() == {"z"}
    assert begun(Latent(of="z"), scene_with(styled))[0].keys() == {"z"}
    v, scene = begun(Latent(), scene_with(styled))
    assert v["w"].shape == (2, 2, 2)
    z, other = begun(Latent(of="z"), scene_with(styled))
    torch.testing.assert_close(Latent().decode(v, scene, moment()), Latent(of="z").decode(z, other, moment()))


def test_the_squashed_latent_starts_in_the_unit_cube() -> None:
    v, scene = begun(Latent(of="z", squash=True), scene_with(Toy()))
    assert ((v["z"] > 0) & (v["z"] < 1)).all()
    with torch.no_grad():
        wanted = images_of(Toy().double(), v["z"].tanh())
    torch.testing.assert_close(Latent(of="z", squash=True).decode(v, scene, moment())["x"], wanted)


@pytest.mark.parametrize("styled", [False, True])
def test_the_sphere_keeps_every_length(styled: bool) -> None:
    space = Latent(sphere=True)
    v, scene = begun(space, scene_with(Toy(styled=styled)))
    moved = space.project(tree.map(lambda value: 3 * value + 0.5, v), scene, moment())
    for name in v:
        torch.testing.assert_close(moved[name].norm(dim=-1), v[name].norm(dim=-1))
        assert not torch.equal(moved[name], v[name])
    assert largest_difference(space.project(v, scene, moment()), v) < 1e-12


@pytest.mark.parametrize("relative", [True, False])
def test_features_stay_in_their_ball_example_by_example(relative: bool) -> None:
    space = Features(stage=1, of=("h", "w", "noise"), radius=0.1 if relative else 0.7, relative=relative)
    v, scene = begun(space, scene_with(Toy(styled=True)))
    assert v.keys() == {"h", "w", "noise"}
    change = {"h": 0.5 * torch.ones_like(v["h"]), "w": 0 * v["w"], "noise": {"map": 9 * torch.ones(2, 1, 2, 2)}}
    change["h"][0] *= 1e-3  # the first stays inside
    moved = space.project(tree.add(v, change), scene, moment())
    torch.testing.assert_close(moved["h"][0], v["h"][0] + change["h"][0])
    torch.testing.assert_close(moved["w"], v["w"])
    for name, began, ended in (("h", v["h"], moved["h"]), ("map", v["noise"]["map"], moved["noise"]["map"])):
        radius = 0.1 * began[1].abs().sum() if relative else torch.tensor(0.7, dtype=torch.float64)
        torch.testing.assert_close((ended - began)[1].abs().sum(), radius, msg=name)
    wanted = v["h"][1] + l1_ball(change["h"][1], 0.1 * v["h"][1].abs().sum() if relative else 0.7)
    torch.testing.assert_close(moved["h"][1], wanted)


def test_a_stage_begins_at_the_image_where_the_last_one_ended(double: Engine) -> None:
    generator = Toy(CLASSES, styled=True)
    task, seen, _ = observed(generator, examples=2, targets=2)
    first = stage_of(Latent())
    alone = attack_of(first, restarts=2).run(task, seen, knowing(generator), engine=double)
    for space in (Features(stage=0), Features(stage=1, of=("h", "w"), radius=0.1), Features(stage=2), Weights()):
        both = attack_of(first, stage_of(space, optimiser=Still()), restarts=2)
        found = both.run(task, seen, knowing(generator), engine=double)
        assert largest_difference(found.candidates["x"], alone.candidates["x"]) < 1e-12
    chain = [first, *(stage_of(Features(stage=stage), optimiser=Still()) for stage in (1, 2))]
    found = attack_of(*chain, restarts=2).run(task, seen, knowing(generator), engine=double)
    assert largest_difference(found.candidates["x"], alone.candidates["x"]) < 1e-12


def test_blocks_are_not_walked_backwards(double: Engine) -> None:
    task, seen, _ = observed(Toy())
    back = attack_of(*(stage_of(Features(stage=stage), optimiser=Still()) for stage in (2, 1)))
    with pytest.raises(ValueError, match="left what enters block 2; block 1 lies before it"):
        back.run(task, seen, knowing(Toy()), engine=double)
    weights = attack_of(stage_of(Weights(), optimiser=Still()), stage_of(Features(stage=1), optimiser=Still()))
    with pytest.raises(ValueError, match="left generator and nothing that enters a block"):
        weights.run(task, seen, knowing(Toy()), engine=double)


def test_the_generator_is_left_as_it_is(double: Engine) -> None:
    generator = Toy().train()
    held = tree.detach(dict(generator.state_dict()))
    task, seen, _ = observed(generator)
    attack_of(stage_of(Latent()), stage_of(Weights())).run(task, seen, knowing(generator), engine=double)
    assert generator.training
    assert largest_difference(dict(generator.state_dict()), held) == 0
    assert all(p.requires_grad and p.dtype == torch.float32 for p in generator.parameters())


# --- weights ----------------------------------------------------------------------------------------------------------


def test_the_weights_that_move_are_those_behind_the_first_block() -> None:
    names = {"middle.0.weight", "middle.0.bias", "middle.1.weight", "middle.1.bias", "last.weight", "last.bias"}
    assert set(moving(Toy(CLASSES))) == names
    assert set(moving(Toy(), 2)) == {"last.weight", "last.bias"}


@pytest.mark.parametrize("examples", [1, 3])
def test_every_image_has_weights_of_its_own(examples: int) -> None:
    generator, space = Toy(), Weights()
    v, scene = begun(space, scene_with(generator, examples))
    count = sum(value.numel() for name, value in generator.named_parameters() if name in moving(generator))
    assert tree.size(v) == space.unknowns(scene) == examples * count
    z = scene.draws.child(len(scene.task.fields)).normal((examples, 5), dtype=torch.float64)  # type: ignore[union-attr]
    with torch.no_grad():
        torch.testing.assert_close(space.decode(v, scene, moment())["x"], images_of(generator.double(), z))
    slopes = grad(lambda v: space.decode(v, scene, moment())["x"][0].square().sum())(v)["generator"]
    for slope in slopes.values():
        assert (slope[0] != 0).any()
        assert not slope[1:].any()


def test_jitter_sets_weights_apart_by_a_share_of_their_size() -> None:
    v, _ = begun(Weights(), scene_with(Toy()))
    moved, _ = begun(Weights(jitter=0.1), scene_with(Toy()))
    for name, value in v["generator"].items():
        apart = (moved["generator"][name] - value).square().mean().sqrt() / value.square().mean().sqrt()
        assert 0.03 < apart < 0.25
        assert not torch.equal(moved["generator"][name][0], moved["generator"][name][1])


def test_what_decoding_holds_grows_with_the_generator_and_the_batch() -> None:
    small, large = scene_with(DCGAN((1, 8, 8), width=4)), scene_with(DCGAN((1, 8, 8), width=16))
    assert 0 < Latent().decoding(small) < Latent().decoding(large)
    assert Latent().decoding(scene_with(Toy(), 4)) == 2 * Latent().decoding(scene_with(Toy(), 2))
    # Features of 64 x 4 x 4 and 32 x 8 x 8, each before and after BatchNorm and ReLU; not the 135,393 weights.
    assert 2 * 3_000 < Latent().decoding(scene_with(DCGAN((1, 8, 8), width=32))) < 2 * 20_000


def boxes_on_a_gpu(x: Tensor, times: int) -> Tensor:
    for _ in range(times):
        x = F.avg_pool2d(x, 2, stride=1)
    return x


# --- lanes ------------------------------------------------------------------------------------------------------------

SPACES: dict[str, tuple[Generated, ...]] = {
    "latent": (Latent(sphere=True),),
    "features": (Latent(sphere=True), Features(stage=1, of=("h", "w", "noise"), radius=0.1, sphere=True)),
    "weights": (Latent(), Weights(jitter=1e-2)),
}


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("styled", [False, True])
def test_lanes_together_are_lanes_alone(name: str, styled: bool, double: Engine) -> None:
    generator = Toy(CLASSES, styled=styled)
    task, seen, _ = observed(generator, examples=2, targets=3)
    attack = attack_of(*map(stage_of, SPACES[name]), restarts=2, output="best_stage")
    runs = [
        attack.run(task, seen, knowing(generator), engine=engine)
        for engine in (double, replace(double, chunk=2), replace(double, batched=False))
    ]
    alone = [attack.run(task, each, knowing(generator), engine=double) for each in seen]
    for run in runs[1:]:
        assert largest_difference(run.candidates["x"], runs[0].candidates["x"]) < 1e-9
        assert torch.equal(run.unknowns["stage"], runs[0].unknowns["stage"])
    assert largest_difference(torch.cat([each.candidates["x"] for each in alone]), runs[0].candidates["x"]) < 1e-9


@pytest.mark.parametrize("name", SPACES)
@pytest.mark.parametrize("generator", ["toy", "dcgan", "stylegan2"])
def test_a_step_can_be_captured(name: str, generator: str, double: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a CPU StyleGAN2 filters by a kernel that it makes in the step; what is captured is its way on a GPU.
    monkeypatch.setattr(stylegan2, "boxes", boxes_on_a_gpu)
    kinds: dict[str, nn.Module] = {
        "toy": Toy(CLASSES, styled=True),
        "dcgan": DCGAN((1, 8, 8), classes=CLASSES, width=4),
        "stylegan2": StyleGAN2((1, 8, 8), latent=4, style=4, widths=(4, 4)),
    }
    own = kinds[generator]
    task, seen = perceptron(), [gl.observe(perceptron(), private(2), TRAINING)]
    for search in searches(attack_of(*map(stage_of, SPACES[name])), task, seen[0], knowing(own), double):
        gate(search)


# --- the best stage ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leap(Optimiser):
    """Adds what it is told to every unknown and looks: a stage that spoils, or keeps, what it was given."""

    by: float
    steps: int = 1
    graphable: bool = True

    def init(self, problem: Any, v: Tree) -> Tree:
        return {}

    def step(self, problem: Any, v: Tree, state: Tree, now: Any) -> Any:
        moved = tree.map(lambda value: value + self.by, v)
        return moved, state, problem.value(moved)


def matched(task: gl.Task, seen: gl.Observation, x: Tensor, y: Tensor) -> float:
    """The cosine distance of an image's gradient to the update, computed anew."""
    gradient = task.gradient(seen.weights, {"x": x, "y": y})
    return float(1 - F.cosine_similarity(tree.flatten(gradient), tree.flatten(seen.update), dim=0))


def test_image_and_score_come_from_the_same_restart_and_stage(double: Engine) -> None:
    """Later stages spoil what the first found, so every lane must go back to it; its score is that of its image."""
    generator = Toy(CLASSES)
    task, seen, _ = observed(generator, targets=2)
    search = stage_of(Latent(), optimiser=Adam(lr=0.1, steps=40))
    spoiled = stage_of(Features(stage=1), optimiser=Leap(2.0))
    spoiled_more = stage_of(Features(stage=2), optimiser=Leap(-2.0))
    first = attack_of(search, restarts=3).run(task, seen, knowing(generator), engine=double)
    for output in ("last_stage", "best_stage"):
        attack = attack_of(search, spoiled, spoiled_more, restarts=3, output=output)
        found = attack.run(task, seen, knowing(generator), engine=double)
        for target, own in enumerate(seen):
            for restart in range(3):
                x, y = found.candidates["x"][target, restart], found.candidates["y"][target, restart]
                assert matched(task, own, x, y) == pytest.approx(float(found.match[target, restart]), abs=1e-12)
            chosen = found.candidates["x"][target, found.chosen[target]]
            assert torch.equal(found.batch["x"][target], chosen)
            assert found.match[target, found.chosen[target]] == found.match[target].min()
        same = largest_difference(found.candidates["x"], first.candidates["x"])
        assert same < 1e-12 if output == "best_stage" else same > 0.01
    assert not found.unknowns["stage"].any()
    assert found.unknowns["stage"].shape == (2, 3)


def test_each_lane_returns_its_own_best_stage(double: Engine) -> None:
    """A second stage that helps some lanes and spoils others."""
    generator = Toy(CLASSES)
    task, seen, _ = observed(generator, targets=2)
    stages = [stage_of(Latent(), optimiser=Still()), stage_of(Features(stage=1), optimiser=Leap(0.4))]
    parts = [attack_of(*stages[:count], restarts=6) for count in (1, 2)]
    only = [part.run(task, seen, knowing(generator), engine=double) for part in parts]
    both = replace(parts[1], output="best_stage").run(task, seen, knowing(generator), engine=double)
    better = only[1].match < only[0].match
    assert better.any()
    assert not better.all()
    assert torch.equal(both.unknowns["stage"].bool(), better)
    assert torch.equal(both.match, torch.minimum(only[0].match, only[1].match))
    wanted = torch.where(better[..., None, None, None, None], only[1].candidates["x"], only[0].candidates["x"])
    assert torch.equal(both.candidates["x"], wanted)


def test_stages_that_cannot_be_compared_are_refused() -> None:
    other = replace(stage_of(Latent()), match=gl.parts.matches.SquaredError())
    with pytest.raises(ValueError, match="same prediction, match and view"):
        attack_of(stage_of(Latent()), other, output="best_stage")
    with pytest.raises(ValueError, match="output must be"):
        attack_of(stage_of(Latent()), output="best")


def test_pixels_are_not_told_what_a_generator_left(double: Engine) -> None:
    """`before` holds more than unknowns now; spaces that look for their own name see no difference."""
    task, seen, _ = observed(Toy())
    stage = stage_of(Latent())
    pixels = Stage(Pixels(), Replay(), Cosine(), (), Still())
    alone = attack_of(pixels).run(task, seen, knowing(Toy()), engine=double)
    found = attack_of(stage, pixels).run(task, seen, knowing(Toy()), engine=double)
    assert torch.equal(found.candidates["x"], alone.candidates["x"])


# --- as every registered attack --------------------------------------------------------------------------------------

ATTACKS: dict[str, dict[str, Any]] = {
    "gias": {"steps": 4, "weight_steps": 4, "restarts": 2},
    "gifd": {"steps": 4, "features": 2, "restarts": 2},
    "ggl": {"steps": 3, "population": 6},
    "prior-only": {},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_the_reconstruction_does_not_change_when_the_truth_does(name: str) -> None:
    generator, task = Toy(CLASSES), perceptron()
    batch = made(generator, 2)
    seen, attack = gl.observe(task, batch, TRAINING), gl.attacks.get(name, **ATTACKS[name])
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        runs.append(attack.run(task, seen, knowing(generator), engine=Engine(device="cpu")))
        batch["x"].copy_(private(2, seed=99)["x"])
    assert torch.equal(runs[0].candidates["x"], runs[1].candidates["x"])
    assert torch.equal(runs[0].match, runs[1].match)
    other = attack.run(task, seen, knowing(generator), seed=7, engine=Engine(device="cpu"))
    assert not torch.equal(other.candidates["x"], runs[0].candidates["x"])


@pytest.mark.parametrize("name", ATTACKS)
def test_every_one_of_them_needs_a_generator(name: str) -> None:
    task, seen, _ = observed(Toy())
    attack = gl.attacks.get(name, **ATTACKS[name])
    assert "generator" in attack.needs
    with pytest.raises(MissingKnowledge, match=rf"{name} needs generator.*Knowledge\(generator=...\): a trained"):
        attack.run(task, seen, Knowledge(training=TRAINING))
    with pytest.raises(MissingKnowledge, match="colour channels must agree"):
        attack.run(task, seen, knowing(Toy(shape=(3, 4, 4))))


# --- small parts ------------------------------------------------------------------------------------------------------


def test_the_ramp_is_the_stated_one() -> None:
    schedule = RampedDecay()
    rates = [float(schedule(moment(step, 1000))) for step in (0, 25, 50, 250, 625, 1000)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.5, 0.0], abs=1e-6)


def test_priors_of_the_latent() -> None:
    scene = scene_with(Toy())
    z = torch.tensor([[1.0, -1.0, 1.0, -1.0, 0.0], [3.0, 4.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert float(LatentNorm(2.0)({}, {"z": z}, scene, moment())) == pytest.approx(2 * (2 + 5))
    assert float(LatentNorm(2.0)({}, {"h": z}, scene, moment())) == 0.0
    normal = LatentNormality(0.1)({}, {"z": z[:1]}, scene, moment())
    assert float(normal) == pytest.approx(0.1 * -0.5 * (1 + np.log(0.8 + 1e-10) - 0.8), rel=1e-9)
