"""An attack sees what a server sees: no import of the truth, no trace of it, nothing changed behind it."""

from __future__ import annotations

import ast
import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradleak as gl
from conftest import CLASSES, SHAPE, perceptron, private, short, skip_unless_granted, tiny
from gradleak import tree
from gradleak.engine import Engine
from gradleak.local import LocalTraining
from gradleak.observation import Knowledge, Observation
from gradleak.rules import Adam
from gradleak.task import Batch, Field

SOURCE = Path(gl.__file__).parent
FORBIDDEN = {f"gradleak.{name}" for name in ("metrics", "federation", "data", "audit", "results")}
NAMES = gl.attacks.names()
TRAINING = LocalTraining(lr=0.5)


# --- imports ----------------------------------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    parts = ["gradleak", *path.relative_to(SOURCE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in SOURCE.rglob("*.py")}


def attacking(module: str) -> bool:
    """Is this a module that attack code may live in?"""
    alone = ("gradleak.engine", "gradleak.search", "gradleak.attack", "gradleak.scene")
    return module in alone or module.startswith(("gradleak.attacks", "gradleak.parts"))


def forbidden(module: str) -> bool:
    """Does this module, or the package it is in, hold or score the truth?"""
    return ".".join(module.split(".")[:2]) in FORBIDDEN


def imports(source: str, module: str, package: bool = False) -> Iterator[str]:
    """Every gradleak module that the source names in an import, at the top or inside a function, or as text."""
    home = module.split(".") if package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "gradleak")
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*home[: len(home) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            if base and base.split(".")[0] == "gradleak":
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("gradleak."):
            yield node.value


def known(names: Iterator[str]) -> set[str]:
    return {name for name in names if name in MODULES or forbidden(name)}


def reached_from(roots: set[str]) -> dict[str, str]:
    """Every module that the roots can import, directly or through others, and who imports it."""
    via, waiting = dict.fromkeys(roots, "itself"), sorted(roots)
    while waiting:
        module = waiting.pop()
        if module not in MODULES:
            continue
        path = MODULES[module]
        for name in known(imports(path.read_text(), module, path.name == "__init__.py")) - via.keys():
            via[name] = module
            waiting.append(name)
    return via


def test_attack_code_cannot_import_the_truth_not_even_through_others() -> None:
    roots = {module for module in MODULES if attacking(module)}
    assert len(roots) > 12
    via = reached_from(roots)
    # The package itself names everything, as text, for use on demand; no attack code imports it (below).
    found = {name: by for name, by in via.items() if forbidden(name)}
    assert not found, f"attack code reaches the truth: {found}"


def test_attack_code_imports_modules_by_name_and_never_the_whole_package() -> None:
    """`import gradleak as gl` would give it gl.metrics on demand."""
    for module in filter(attacking, MODULES):
        for node in ast.walk(ast.parse(MODULES[module].read_text())):
            if isinstance(node, ast.Import):
                assert "gradleak" not in [alias.name for alias in node.names], module


@pytest.mark.parametrize(
    "line",
    [
        "import gradleak.metrics",
        "import gradleak.metrics as m",
        "from gradleak import metrics",
        "from gradleak.metrics import psnr",
        "from ..metrics import psnr",
        "from .. import metrics",
        "def late():\n    from gradleak import tree, metrics",
        "import_module('gradleak.metrics')",
    ],
)
def test_the_rule_sees_every_way_to_import(line: str) -> None:
    assert "gradleak.metrics" in set(imports(line, "gradleak.attacks.toy"))


def test_the_rule_follows_imports_through_other_modules() -> None:
    assert "gradleak.metrics" in reached_from({"gradleak.audit"})
    assert "gradleak.tree" in reached_from({"gradleak.attacks.ig"})


def test_importing_every_attack_loads_none_of_the_truth() -> None:
    code = "import sys, gradleak.attacks, gradleak.engine; print([m for m in sys.modules if m.startswith('gradleak.')])"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "OMP_NUM_THREADS": "1"}
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    loaded = set(ast.literal_eval(told.stdout))
    assert "gradleak.attacks.ig" in loaded
    assert not any(map(forbidden, loaded))


# --- the truth, swapped -----------------------------------------------------------------------------------------------


def storages(value: Any) -> set[int]:
    """The memory of every tensor in a nest of dicts, tuples and dataclasses."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    if isinstance(value, dict):
        return set().union(*map(storages, value.values()))
    if isinstance(value, Observation):
        return set().union(*(storages(getattr(value, f.name)) for f in fields(value)))
    return set()


RECIPES = {
    "one step": TRAINING,
    "epochs": LocalTraining(lr=0.1, epochs=2, batch_size=1),
    "adam": LocalTraining(lr=0.1, steps=2, optimiser=Adam()),
}


def swapped(batch: Batch) -> None:
    """Overwrite the private tensors, in the memory they live in, with other data in another order."""
    other = private(batch["y"].shape[0], seed=99, dtype=batch["x"].dtype)
    batch["x"].copy_(other["x"].flip(0))
    batch["y"].copy_((batch["y"] + 1) % CLASSES)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_the_reconstruction_does_not_change_when_the_truth_does(name: str, recipe: str) -> None:
    attack, training, batch = short(name, steps=4), RECIPES[recipe], private(2)
    skip_unless_granted(attack)
    task = replace(perceptron(), fields=perceptron().fields)
    seen = gl.observe(task, batch, training)
    knows = Knowledge(training=training)
    torch.manual_seed(1)
    before = attack.run(task, seen, knows, engine=Engine(device="cpu"))
    swapped(batch)
    torch.manual_seed(2)
    after = attack.run(task, seen, knows, engine=Engine(device="cpu"))
    for field in before.candidates:
        assert torch.equal(before.candidates[field], after.candidates[field])
    assert torch.equal(before.match, after.match)
    assert torch.equal(before.objective, after.objective)


def test_a_cheat_would_be_caught() -> None:
    """A part that peeks at the private tensors: the swap changes its answer."""
    batch = private(1)
    from gradleak.parts.spaces import Pixels

    cheat = gl.attacks.get("ig", steps=1)
    stage = replace(cheat.stages[0], space=Pixels(lambda scene, draws, name: batch["x"].to(scene.limits["x"][0].dtype)))
    task = perceptron()
    seen = gl.observe(task, batch, TRAINING)
    runs = []
    for _ in range(2):
        runs.append(replace(cheat, stages=(stage,)).run(task, seen, engine=Engine(device="cpu")).batch["x"])
        swapped(batch)
    assert not torch.equal(*runs)


@pytest.mark.parametrize("wire", ["update", "weights"])
@pytest.mark.parametrize("norm", [None, "train"])
def test_an_observation_shares_no_memory_with_the_private_batch(norm: str | None, wire: str) -> None:
    task, batch = tiny(norm=norm), private(2)
    seen = gl.observe(task, batch, TRAINING, wire=wire)
    assert not storages(seen) & storages(batch)
    assert not storages(seen) & storages(dict(task.model.state_dict()))
    held = copy.deepcopy(seen)
    swapped(batch)
    for name in ("weights", "update"):
        assert all(torch.equal(getattr(seen, name)[key], getattr(held, name)[key]) for key in seen.weights)


def test_not_even_where_the_gradient_is_the_image() -> None:
    """d/dw of w . x is x itself: without a copy the update would be the private tensor."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(SHAPE, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.w

    task = gl.Task(Scale(), lambda call, batch: (call(batch["x"]) * batch["x"][0]).sum(), {"x": Field(SHAPE)})
    batch = {"x": private(1)["x"]}

    class Echo(gl.Defence):
        """Uploads the private tensor itself, and the server takes it as it comes."""

        def upload(self, upload: gl.Upload, client: Any) -> gl.Upload:
            return replace(upload, payload={"update": {"w": client.batch["x"][0]}})

        def reveal(self, uploads: Any, sizes: Any) -> Any:
            return uploads[0].payload["update"]

    for defence in (None, gl.Chain(), Echo()):
        seen = gl.observe(task, batch, LocalTraining(lr=1.0), defence)
        assert torch.equal(seen.update["w"], batch["x"][0])
        assert not storages(seen) & storages(batch)


def test_nothing_in_an_observation_or_a_task_can_hold_private_data() -> None:
    assert {f.name for f in fields(Observation)} == {
        "weights", "update", "num_examples", "round", "clients", "key", "buffers", "returned_buffers", "extras",
    }  # fmt: skip
    batch = private(2)
    task = gl.Task.supervised(perceptron().model, nn.functional.cross_entropy, like=(batch["x"], batch["y"]))
    assert not any(isinstance(value, Tensor) for f in task.fields.values() for value in vars(f).values())
    assert vars(task.objective) == {"loss": nn.functional.cross_entropy}


# --- nothing changed behind it ----------------------------------------------------------------------------------------


def state_of(task: gl.Task) -> dict[str, Any]:
    model = task.model
    return {
        "state": tree.detach(dict(model.state_dict())),
        "modes": [module.training for module in model.modules()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks), len(m._backward_pre_hooks))
            for m in model.modules()
        ],
        "gradients": [p.grad is None for p in model.parameters()],
        "trained": [p.requires_grad for p in model.parameters()],
        "places": [p.data_ptr() for p in model.parameters()],
        "random": torch.get_rng_state(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@pytest.mark.parametrize("norm", [None, "train"])
@pytest.mark.parametrize("name", NAMES)
def test_no_attack_changes_what_it_is_given(name: str, norm: str | None) -> None:
    """Neither the observation nor the model nor the knowledge, nor the global random state; in the model's own type."""
    attack = short(name, steps=3)
    skip_unless_granted(attack)
    if name == "analytic" and norm:
        pytest.skip("needs a linear layer before any other")
    task = tiny(norm=norm, dtype=torch.float32) if norm else perceptron(dtype=torch.float32)
    seen = gl.observe(task, private(2, dtype=torch.float32), TRAINING)
    knows = Knowledge(given={"y": torch.tensor([1, 2])}, training=TRAINING)
    held = [{f.name: copy.deepcopy(getattr(seen, f.name)) for f in fields(seen)}, {"y": knows.given["y"].clone()}]
    model = state_of(task)
    attack.run(task, seen, knows, engine=Engine(device="cpu"))
    assert same({f.name: getattr(seen, f.name) for f in fields(seen)}, held[0])
    assert same(knows.given, held[1])
    assert same(state_of(task), model)


@pytest.mark.parametrize("name", NAMES)
def test_a_result_shares_no_memory_with_the_observation(name: str) -> None:
    attack = short(name, steps=2)
    skip_unless_granted(attack)
    task = perceptron(dtype=torch.float32)
    seen = gl.observe(task, private(1, dtype=torch.float32), TRAINING)
    y = torch.tensor([1])
    found = attack.run(task, seen, Knowledge(given={"y": y}, training=TRAINING), engine=Engine(device="cpu"))
    assert not storages(found.candidates) & (storages(seen) | storages(y))
    assert not storages(found.batch) & (storages(seen) | storages(y))
