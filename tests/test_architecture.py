"""The layers of docs/design.md: a unit imports only earlier ones, function-level imports counted."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradleak
from conftest import script

house = script("tools/house.py")
PACKAGE = Path(gradleak.__file__).parent
# Each unit imports only units of earlier layers, or of its own layer where that makes no circle.
LAYERS = (
    ("core",),
    ("scenario",),
    ("models", "metrics", "data", "generators", "diffusion"),
    ("parts",),
    ("engine", "defences"),
    ("attack", "identify"),
    ("attacks", "federation", "adapters"),
    ("auto",),
    ("audit",),
    ("report",),
    ("curvature", "secure", "priors"),  # the wings
    ("cli", "flower", "ray"),
    ("compat",),
)
WINGS = {"curvature", "secure", "priors"}
DOORS = {"cli", "flower", "ray"}  # what users call; they may open the wings


@pytest.fixture(scope="module")
def edges() -> dict[str, set[str]]:
    return house.edges_of(house.modules_of(PACKAGE))


def test_every_unit_has_a_layer(edges: dict[str, set[str]]) -> None:
    assert sorted(edges) == sorted(unit for layer in LAYERS for unit in layer)


def test_imports_go_one_way(edges: dict[str, set[str]]) -> None:
    depth = {unit: number for number, layer in enumerate(LAYERS) for unit in layer}
    wrong = [f"{unit} -> {other}" for unit in edges for other in edges[unit] if depth[other] > depth[unit]]
    assert not wrong, (
        f"These imports go to a later layer: {', '.join(sorted(wrong))}. Move what is shared to the earlier one."
    )


def test_no_circle(edges: dict[str, set[str]]) -> None:
    for knot in house.knots_of(edges):
        inside = [f"{unit} -> {other}" for unit in knot for other in sorted(edges[unit] & set(knot))]
        pytest.fail(f"{', '.join(knot)} import each other: {', '.join(inside)}.")


def test_the_core_opens_no_wing(edges: dict[str, set[str]]) -> None:
    wrong = [f"{unit} -> {wing}" for unit in edges.keys() - WINGS - DOORS for wing in edges[unit] & WINGS]
    assert not wrong, f"Only {', '.join(sorted(DOORS))} may import a wing: {', '.join(wrong)}."


def test_the_house_stays_small(edges: dict[str, set[str]]) -> None:
    assert len(edges) <= 30
    every = sorted(f"{unit} -> {other}" for unit in edges for other in edges[unit])
    assert len(every) < 110, "\n".join(every)


def test_no_function_takes_more_than_eight_parameters() -> None:
    wide = [
        f"{module.unit}: {node.name} ({house.parameters(node)})"
        for module in house.modules_of(PACKAGE)
        for node in house.ast.walk(module.tree)
        if isinstance(node, house.FUNCTIONS) and house.parameters(node) > 8
    ]
    assert not wide, f"Group the settings of these in an object (core/settings.py): {', '.join(wide)}."


PARTS = {"stage", "space", "predict", "prediction", "match", "prior", "optimiser", "part", "rule", "inner", "start"}


def test_parts_are_not_probed() -> None:
    """By no spelling: getattr and hasattr, whatever the part is reached through."""
    ast = house.ast
    probes = [
        f"{module.unit}: {ast.unparse(node)}"
        for module in house.modules_of(PACKAGE)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr")
        and ast.unparse(node.args[0]).rpartition(".")[2] in PARTS
    ]
    assert not probes, f"Give the base class a default instead (parts/protocols.py): {probes}"
