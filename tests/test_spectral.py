"""Images by cosine coefficients: the transform, what it starts from, and that a search in it ends at the image."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradleak as gl
from conftest import moment, normal, private, scene_of, tiny
from gradleak.attacks.spectral import Spectral, SpectralPair, cosines, pixels
from gradleak.core.random import Draws, key
from gradleak.parts.steps import denoising
from gradleak.scenario.task import TaskError
from test_steps import drawn, toy

GRADIENT = gl.LocalTraining(lr=1.0)


def test_cosines_are_an_orthonormal_basis_of_which_the_first_is_flat() -> None:
    basis = cosines(torch.arange(7, dtype=torch.float64))
    torch.testing.assert_close(basis @ basis.T, torch.eye(7, dtype=torch.float64))
    torch.testing.assert_close(basis[0], torch.full((7,), 7**-0.5, dtype=torch.float64))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_without_units_it_is_a_rotation(channels: int) -> None:
    space, z = Spectral(power=0.0, chroma=1.0), normal(2, channels, 6, 9)
    torch.testing.assert_close(space.image(z).square().sum(), 0.25 * z.square().sum())


def test_all_coefficients_together_are_half_the_range_whatever_the_units() -> None:
    z = normal(400, 3, 8, 8)
    for power, chroma in ((0.0, 1.0), (0.5, 0.6), (1.0, 0.3)):
        assert float(Spectral(power=power, chroma=chroma).image(z).square().mean()) == pytest.approx(0.25, rel=0.1)


def test_the_first_coefficient_is_the_brightness_and_the_others_are_colours() -> None:
    z = torch.zeros(3, 5, 5, dtype=torch.float64)
    z[0, 0, 0] = 1.0
    grey = Spectral().image(z)
    torch.testing.assert_close(grey, grey[:1, :1, :1].expand_as(grey))
    for channel in (1, 2):
        z = torch.zeros(3, 5, 5, dtype=torch.float64)
        z[channel, 0, 0] = 1.0
        colour = Spectral().image(z)
        assert float(colour.sum(0).abs().max()) < 1e-12
        assert float(colour.abs().max()) < float(grey.abs().max())


def test_coarse_coefficients_move_an_image_more_than_fine_ones() -> None:
    z = torch.zeros(2, 1, 8, 8, dtype=torch.float64)
    z[0, 0, 0, 1] = z[1, 0, 7, 7] = 1.0
    coarse, fine = Spectral(power=0.5).image(z).flatten(1).norm(dim=1).tolist()
    assert coarse / fine == pytest.approx((98**0.5) ** 0.5)


def test_an_image_is_found_and_the_labels_with_it(double: gl.Engine) -> None:
    task, batch = tiny(), private(1, seed=2)
    seen = gl.observe(task, batch, GRADIENT)
    found = gl.attacks.get("spectral", steps=150).run(task, seen, gl.Knowledge(training=GRADIENT), engine=double)
    assert found.batch["y"][0].tolist() == batch["y"].tolist()
    assert float(found.match.min()) < 1e-8
    truth = {name: value[None] for name, value in batch.items()}
    assert float(gl.metrics.compare(found, truth).psnr) > 50


def test_of_a_denoiser_it_finds_more_than_adam_on_pixels_in_as_many_evaluations() -> None:
    task, batch = toy(), drawn(1)
    seen = gl.observe(task, batch, GRADIENT)
    truth = {name: value[None] for name, value in batch.items()}

    def psnr(attack: str, *names: str, **settings: Any) -> float:
        knows = gl.Knowledge(training=GRADIENT, given={name: truth[name] for name in names})
        return float(
            gl.metrics.compare(gl.attacks.get(attack, steps=60, **settings).run(task, seen, knows), truth).psnr
        )

    theirs = psnr("invg-dm", "t", "noise", lr=0.1, decay=True)
    assert psnr("spectral-dm", "t", "noise", noise="unknown", restarts=1) > theirs + 3  # what is given is used
    assert psnr("spectral-dm", "t", "noise", t="given", restarts=1) > theirs + 3
    assert psnr("spectral-dm", "noise", t="analytic", restarts=1) > theirs + 3


def test_what_is_no_image_has_no_cosine_coefficients() -> None:
    batch = {"x": normal(1, 4), "y": torch.tensor([1])}
    like = (batch["x"], batch["y"])
    task = gl.Task.supervised(torch.nn.Linear(4, 3).double(), torch.nn.functional.cross_entropy, like=like)
    seen = gl.observe(task, batch, GRADIENT)
    with pytest.raises(
        TaskError, match="unsupported: spectral cannot .* cosine coefficients of images, and x holds vectors"
    ):
        gl.attacks.get("spectral", steps=2).run(task, seen, gl.Knowledge(training=GRADIENT))


def test_other_ways_to_the_step_are_refused() -> None:
    with pytest.raises(ValueError, match=r"t must be 'given', or 'analytic' to read .*; given 'soft'"):
        gl.attacks.get("spectral-dm", t="soft")
    with pytest.raises(ValueError, match=r"noise must be 'given', or 'unknown' to search for it; given 'random'"):
        gl.attacks.get("spectral-dm", noise="random")


@pytest.mark.parametrize("t", [0, 30, 99])
def test_half_of_the_unknowns_of_image_and_noise_is_what_the_network_sees(t: int) -> None:
    task, space, batch = toy(), SpectralPair(Spectral(chroma=0.5)), drawn(t, t)
    knows = gl.Knowledge(training=GRADIENT)
    scene = scene_of(task, gl.observe(task, batch, GRADIENT), knows, t=batch["t"])
    objective, shape = denoising(task), (2, *task.fields["x"].shape)
    v = {"z": normal(*shape), "w": normal(*shape, seed=1)}
    batch = {"t": scene.fields["t"], **space.decode(v, scene, moment())}
    s = space.image.units(v["z"])
    a, b = objective.schedule.scales(batch["t"], v["z"])
    torch.testing.assert_close(objective.noised(batch), pixels((a.square() * s.square() + b.square()).sqrt() * v["z"]))
    other = {**batch, **space.decode({**v, "w": normal(*shape, seed=2)}, scene, moment())}
    torch.testing.assert_close(objective.noised(other), objective.noised(batch))
    assert (other["x"] - batch["x"]).abs().max() > 1e-3
    start = space.variables(scene, Draws(key("start")), None)
    assert set(start) == {"z", "w"}
    assert not start["w"].any()
    given = scene_of(task, gl.observe(task, drawn(t, t), GRADIENT), knows, t=batch["t"], noise=batch["noise"])
    assert set(space.variables(given, Draws(key("start")), None)) == {"z"}


def test_of_a_denoiser_image_and_noise_are_found_where_nothing_is_given(double: gl.Engine) -> None:
    task, batch = toy(), drawn(1)
    seen = gl.observe(task, batch, GRADIENT)
    attack = gl.attacks.get("spectral-dm", noise="unknown", t="analytic", steps=250, restarts=1, waves=3, solved=1e-6)
    found = attack.run(task, seen, gl.Knowledge(training=GRADIENT), engine=double)
    truth = {name: value[None] for name, value in batch.items()}
    assert found.batch["t"][0].tolist() == batch["t"].tolist()
    assert float(gl.metrics.compare(found, truth).psnr) > 40
    noise = (found.batch["noise"][0].flatten(), batch["noise"].flatten().double())
    assert float(torch.cosine_similarity(*noise, dim=0)) > 0.99
