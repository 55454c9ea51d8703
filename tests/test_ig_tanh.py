"""Squashed pixels: the box without a projection."""

from __future__ import annotations

import torch

import gradleak as gl
from conftest import moment, private, scene_of, tiny
from gradleak.attacks.ig_tanh import Squashed

TRAINING = gl.LocalTraining(lr=1.0)


def test_the_image_is_the_middle_of_the_box_at_zero_and_its_ends_far_out() -> None:
    task = tiny(bounds=(-1.0, 3.0))
    scene = scene_of(task, gl.observe(task, private(1), TRAINING))
    for w, value in ((0.0, 1.0), (40.0, 3.0), (-40.0, -1.0), (0.5, 1.0 + 2.0 * torch.tensor(0.5).tanh().item())):
        shown = Squashed().decode({"w": torch.full((1, 1, 4, 4), w, dtype=torch.float64)}, scene, moment())["x"]
        torch.testing.assert_close(shown, torch.full_like(shown, value))


def test_it_comes_close_and_stays_inside() -> None:
    task, batch = tiny(), private(1)
    seen = gl.observe(task, batch, TRAINING)
    found = gl.attacks.get("ig-tanh", steps=400, tv=0.0).run(
        task, seen, gl.Knowledge(given={"y": batch["y"]}), engine=gl.Engine(device="cpu", precision="double")
    )
    image = found.batch["x"]
    assert ((image >= 0) & (image <= 1)).all()
    assert found.match[0, 0] < 1e-4 * found.trace["match"][0, 0, 0]
