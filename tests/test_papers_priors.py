"""The reproduction of the generative priors, at a scale of seconds: its rows run, and count what they spend."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from conftest import blobs, reproduction
from gradleak.generators import DCGAN, Card, save
from gradleak.generators.files import fingerprints

FOLDER = Path(__file__).parents[1] / "papers" / "priors"


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    return reproduction("priors")


@pytest.fixture(scope="module")
def effort(paper: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("priors")
    path = blobs(home / "blobs.npz", 8, 12)
    return paper.Effort(small=1, device="cpu", data=str(path), **{**paper.SMALL, "evaluations": 12, "images": 2})


def test_every_bound_names_a_row_and_a_pair_of_methods(paper: ModuleType) -> None:
    rows, held = paper.rows(), json.loads((FOLDER / "expected.json").read_text())
    for name, bound in held["figures"].items():
        parts = name.split("/")
        assert parts[0] in rows, name
        assert bound.keys() in ({"at_least"}, {"at_most"})
        for pair in [part for part in parts if " over " in part]:
            assert set(pair.split(" over ")) <= paper.METHODS.keys()
    strengths = held["reference"]["ggl"]["strengths"]
    for share in strengths["pruning"]:
        assert paper.DEFENCES[f"pruning {share:.0%}".replace("%", " %")].keep == pytest.approx(1 - share)
    for share in strengths["soteria"]:
        assert paper.DEFENCES[f"soteria {share:.0%}".replace("%", " %")].rate == pytest.approx(100 * share)
    assert [paper.DEFENCES[f"noise {sigma}"].sigma for sigma in strengths["noise"]] == strengths["noise"]


def test_methods_spend_the_same_evaluations(paper: ModuleType) -> None:
    full, generator = paper.Effort(), DCGAN(width=2)
    counted = {label: method.counted(full, generator) for label, method in paper.METHODS.items()}
    equal = {label: each["gradient_evaluations"] for label, each in counted.items()}
    assert {equal.pop("prior-only"), equal.pop("ggl, published")} == {0, 25_000}
    assert set(equal.values()) == {4800}
    assert counted["ig"] == {
        "gradient_evaluations": 4800,
        "client_passes": 7 * 4800,
        "generator_passes": 0,
        "second_order": True,
    }
    assert counted["gias"]["generator_passes"] == 2 * 533 + 3 * 4267
    assert counted["ggl"]["client_passes"] == 3 * 4800
    assert not counted["ggl"]["second_order"]
    for label, method in paper.METHODS.items():
        attack = paper.gl.attacks.get(method.name, **method.settings(full, generator))
        spent = sum(getattr(s.optimiser, "evaluations", s.optimiser.steps) for s in attack.stages)
        assert spent == max(1, counted[label]["gradient_evaluations"]), label


def test_a_row_tells_what_it_compared(paper: ModuleType, effort: Any) -> None:
    found = paper.rows()["prior in distribution"].measure(effort)
    assert found["cells"].keys() == set(paper.COMPARED)
    for label, cell in found["cells"].items():
        assert len(cell["psnr_of_each"]) == 2, label
        assert cell["diverged"] == 0
    assert sum(found["cells"]["gifd"]["stages"]) == 2
    assert {"value", "low", "high"} <= found["paired"]["gias over ig"].keys()
    assert found["above_prior"].keys() == set(paper.COMPARED) - {"prior-only"}
    assert "random weights" in found["generator"]["data"]


def test_a_defended_row_is_known_to_the_attacker(paper: ModuleType, effort: Any) -> None:
    found = paper.rows()["defended pruning 90 %"].measure(effort)
    assert found["cells"].keys() == set(paper.DEFENDED)
    assert "keep=0.1" in found["defence"]
    plain = paper.Bench(effort, paper.prior_of(effort, "generator"))
    defended = paper.Bench(effort, paper.prior_of(effort, "generator"), paper.DEFENCES["pruning 90 %"])
    zeros = [float((paper.gl.tree.flatten(b.seen[0].update) == 0).double().mean()) for b in (plain, defended)]
    assert zeros[1] > 0.8 > zeros[0]


def test_generators_come_from_files_and_their_training_images_are_looked_for(
    paper: ModuleType, effort: Any, tmp_path: Path
) -> None:
    images = paper.held_out(effort)
    generator = DCGAN((3, 8, 8), width=4, generator=torch.Generator().manual_seed(0))
    card = Card("blobs", images=fingerprints(images.x[:1]))
    path = save(generator, tmp_path / "own.safetensors", card)
    own = paper.replace(effort, generator=str(path), methods="prior-only")
    found = paper.rows()["prior in distribution"].measure(own)
    assert found["generator"]["attacked_images_it_was_trained_on"] == 1
    assert found["cells"].keys() == {"prior-only"}
    wrong = paper.rows()["prior wrong class"].measure(own)
    assert "no classes" in wrong["skipped"]
    assert "--other FILE" in paper.rows()["prior out of distribution"].measure(paper.replace(own, small=0))["skipped"]


def test_settings_are_chosen_on_images_that_are_in_no_table(paper: ModuleType, effort: Any) -> None:
    used, free = (set(fingerprints(images.x).tolist()) for images in (paper.held_out(effort), paper.apart(effort)))
    assert used
    assert free
    assert not used & free
    row = paper.rows()["tune gifd"]
    found = paper.replace(row, settings=row.settings[:2]).measure(effort)
    assert found["cells"].keys() == {"radius 0.1 lr 0.03", "radius 0.25 lr 0.03"}
    assert found["cells"]["radius 0.25 lr 0.03"]["settings"]["radius"] == 0.25


def test_the_cost_row_runs_the_published_steps_on_all_lanes(paper: ModuleType, effort: Any) -> None:
    found = paper.rows()["cost gifd"].measure(effort)
    assert (found["targets"], found["steps"], found["stages"]) == (2, 4, 3)
    assert found["seconds"] > 0
