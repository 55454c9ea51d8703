"""An attack sees what a server sees: no import of the truth, no trace of it, nothing changed behind it.

Every registered attack and every registered defence is held to it, those of other packages too: by enumeration of the
registry, each in a world that has what it needs. One that runs in no world here fails; none is skipped.
"""

from __future__ import annotations

import ast
import copy
import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib.abc import MetaPathFinder
from itertools import product
from pathlib import Path
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradleak as gl
from conftest import CLASSES, SHAPE, convolved, network, perceptron, private, short, tiny
from gradleak.attack import lowest_match
from gradleak.audit.execution import Runner
from gradleak.audit.private import PrivateSide
from gradleak.audit.recorded import Recorded, RecordedAudit
from gradleak.core import random as draws
from gradleak.core import tree
from gradleak.engine import Engine
from gradleak.generators import Card
from gradleak.generators.files import fingerprints
from gradleak.scenario.client import LocalTraining
from gradleak.scenario.observation import Knowledge, Observation
from gradleak.scenario.rules import Adam
from gradleak.scenario.task import Batch, Field, TaskError
from test_defences_table import NAMES as DEFENCES
from test_defences_table import made
from test_kinds import text_task
from test_latent import Toy
from test_spans import net
from test_steps import Small, drawn, toy
from test_tableak import rows as table_rows
from test_tableak import task as tabular
from test_vit import made as transformer
from test_vit import picture, task_of

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
    packages = ("attack", "attacks", "auto", "engine", "parts")
    return module.startswith(tuple(f"gradleak.{name}." for name in packages)) or module in {
        f"gradleak.{name}" for name in packages
    }


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


# What reaches beyond what it was given, or hides what is imported.
REACHING = {"builtins", "ctypes", "gc", "importlib", "inspect", "marshal", "pickle", "subprocess", "sys", "traceback"}
REACHING |= {"glob", "io", "os", "pathlib", "shutil", "socket", "tempfile", "threading", "weakref"}


def test_attack_code_looks_at_no_frames_objects_or_files() -> None:
    """Whoever lists all live objects, or reads a run's folder, finds the truth without any import of ours."""
    found: set[tuple[str, str]] = set()
    for module in filter(attacking, MODULES):
        for node in ast.walk(ast.parse(MODULES[module].read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {(module, name) for name in names if name.split(".")[0] in REACHING}
            if isinstance(node, ast.Name) and node.id in ("__import__", "eval", "exec", "globals", "locals", "open"):
                found.add((module, node.id))
    # How much memory the machine has; and the table of attacks, which are imported when they are asked for.
    assert found <= {("gradleak.engine.lanes", "os"), ("gradleak.attacks", "importlib")}


def test_every_registered_attack_is_held_to_the_rule() -> None:
    """One that lives elsewhere in gradleak would escape it. Of other packages only runs are looked at."""
    homes = {entry.make.__module__ for entry in gl.registry.entries("attack")}
    assert "gradleak.auto" in homes
    assert all(map(attacking, homes & MODULES.keys()))


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
    assert "gradleak.core.tree" in reached_from({"gradleak.attacks.ig"})


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
TWO_ORDERS = LocalTraining(lr=0.1, epochs=1, batch_size=1)
FEW = {"steps": 4, "weight_steps": 2, "fine_steps": 2, "features": 1, "sampler_steps": 2, "population": 4}
FEW |= {"candidates": 2, "starts": 2}
DENOISING = ("dlg-dm", "invg-dm", "gidm", "span-dm", "spectral-dm")
OTHER_DATA = ("lamp", "span-text", "tableak", "tag", "token-rows", "vit")  # attacks on tables, on texts and on patches


@dataclass(frozen=True, eq=False)
class World:
    """A client, what it trains, and the threat model under which an attack applies. Nothing here is the client's."""

    task: gl.Task
    batch: Batch
    other: Batch  # what the private tensors are overwritten with
    knows: Knowledge
    defence: gl.Defence | None = None

    def seen(self) -> Observation:
        assert self.knows.training is not None
        return gl.observe(self.task, self.batch, self.knows.training, self.defence)

    def swap(self) -> None:
        """Overwrite the private tensors, in the memory they live in."""
        for name, value in self.batch.items():
            value.copy_(self.other[name])

    @staticmethod
    def classifying(training: LocalTraining = TRAINING, task: gl.Task | None = None, examples: int = 2) -> World:
        task = task or perceptron()
        dtype = next(tree.leaves(task.weights())).dtype
        batch = private(examples, dtype=dtype)
        other = {"x": private(examples, seed=99, dtype=dtype)["x"].flip(0), "y": (batch["y"] + 1) % CLASSES}
        return World(task, batch, other, Knowledge(training=training))

    @staticmethod
    def denoising(name: str = "") -> World:
        task = net() if name == "span-dm" else toy()  # which needs a lower level
        return World(task, drawn(30), drawn(60, seed=9), Knowledge(training=TRAINING, generator=Small(seed=1)))

    @staticmethod
    def tabular(training: LocalTraining = TRAINING, dtype: torch.dtype = torch.float64, examples: int = 2) -> World:
        batch, other = table_rows(examples), table_rows(examples, seed=99)
        batch["x"], other["x"], other["y"] = batch["x"].to(dtype), other["x"].to(dtype), batch["y"] + 1
        return World(tabular(24, CLASSES, dtype), batch, other, Knowledge(training=training))

    @staticmethod
    def textual(training: LocalTraining = TRAINING, dtype: torch.dtype = torch.float64, examples: int = 2) -> World:
        ids = torch.randint(1, 50, (2, examples, 9), generator=torch.Generator().manual_seed(0))
        batch, other = ({"x": part, "y": torch.arange(examples) % CLASSES} for part in ids)
        task = text_task()
        task.model.to(dtype)
        return World(task, batch, {**other, "y": (other["y"] + 1) % CLASSES}, Knowledge(training=training))

    @staticmethod
    def patched(training: LocalTraining = TRAINING, dtype: torch.dtype = torch.float64, examples: int = 1) -> World:
        batch, other = ({"x": picture(seed).to(dtype), "y": torch.tensor([2 - seed])} for seed in (0, 1))
        return World(task_of(transformer(dtype=dtype), batch["x"]), batch, other, Knowledge(training=training))

    @staticmethod
    def of_kind(name: str, *how: Any, **settings: Any) -> World:
        """The world of an attack on other data than images, or on one kind of model."""
        worlds = {"tableak": World.tabular, "vit": World.patched}
        worlds |= dict.fromkeys(("lamp", "span-text", "tag", "token-rows"), World.textual)
        return worlds[name](*how, **settings)

    def granting(self, attack: gl.Attack) -> World:
        """With what the attack needs, copied: known steps and noise are not swapped with the client's."""
        given = {name: self.batch[name].clone() for name in attack.needs & self.batch.keys()}
        generator = Toy(CLASSES) if self.knows.generator is None and "generator" in attack.needs else None
        return replace(self, knows=replace(self.knows, given=given, generator=generator or self.knows.generator))


def classifier_for(name: str, dtype: torch.dtype = torch.float64) -> gl.Task:
    """The perceptron that this attack applies to; for `span` convolutions."""
    if name == "span":
        return convolved(dtype=dtype)
    return perceptron(dtype=dtype, activation=nn.ReLU if name == "sparse-span" else nn.Sigmoid)


def world_of(name: str, training: LocalTraining = TRAINING) -> World:
    """Where this attack applies. One that needs more than there is here is no reason to skip: give it a world."""
    if name in DENOISING:
        made = World.denoising(name)
    else:
        other = name in OTHER_DATA
        made = World.of_kind(name, training) if other else World.classifying(training, classifier_for(name))
    return made.granting(short(name))


class Refusing(MetaPathFinder):
    """Finds nothing that holds or scores the truth."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        assert not forbidden(name), f"an attack imports {name} while it runs"


@contextmanager
def watched() -> Iterator[None]:
    """While it lasts nobody can import what holds the truth, nor make the key of a client's random numbers."""
    names: list[str] = []

    def noted(content: bytes, **settings: Any) -> Any:
        names.append(content.decode().split("\x1f")[0])
        return hashlib.blake2b(content, **settings)

    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if forbidden(name)]:
            package, _, last = name.rpartition(".")
            patch.delitem(sys.modules, name)
            if package == "gradleak":
                patch.delattr(gl, last, raising=False)
        patch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
        patch.setattr(draws, "hashlib", SimpleNamespace(blake2b=noted))
        yield
    used = {"client", "federation", "audit", "flower"} & set(names)
    assert not used, f"an attack draws the private numbers of {used}"


def differ(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return any(not torch.equal(a[name], b[name]) for name in a)


def demand_honest(attack: gl.Attack, world: World, *, looks: bool = True) -> None:
    """The same observation gives the same answer, to the last bit, whatever the truth is by then.

    Between the two runs the private tensors are overwritten, and a client trains on them with the same task: what is
    shared, cached, or left in the model would be other data now. `looks`: the attack itself meets that other client
    too, from the same start, and must answer otherwise: what returns its start, or its last answer, is no attack.
    """
    seen = world.seen()

    def run(seen: Observation, seed: int) -> gl.Reconstruction:
        torch.manual_seed(seed)
        with watched():
            return attack.run(world.task, seen, world.knows, engine=Engine(device="cpu"))

    before = run(seen, 1)
    world.swap()
    other = world.seen()
    assert differ(seen.update, other.update)
    assert seen.key == other.key
    elsewhere = run(other, 1) if looks else None
    after = run(seen, 2)
    assert not differ(before.candidates, after.candidates)
    assert not differ(before.batch, after.batch)
    for name in ("match", "objective", "chosen"):
        assert torch.equal(getattr(before, name), getattr(after, name))
    assert torch.equal(before.chosen, lowest_match(before.match))
    assert bool(before.match.isfinite().all())
    assert not bool(before.diverged.any())
    if elsewhere is not None:
        assert differ(before.candidates, elsewhere.candidates), "the answer does not depend on the observation"


def steps_of(name: str, recipe: str) -> dict[str, Any]:
    """Replays of several orders are long: few steps of them, and one certificate is enough."""
    return FEW if recipe == "one step" else {**FEW, "steps": 2, "certify": False}


def recipe_of(name: str, recipe: str) -> LocalTraining:
    """Attacks that follow the client in every order of its minibatches have two to follow, and not four."""
    return TWO_ORDERS if recipe == "epochs" and name in ("auto", "second-order") else RECIPES[recipe]


REFUSING_ADAM = ("span", "span-text", "sparse-span", "vit")
GRADIENTS = dict.fromkeys(REFUSING_ADAM, ("one step", "epochs"))
CASES = [
    (name, recipe)
    for name in NAMES
    for recipe in (("one step",) if name in DENOISING else GRADIENTS.get(name, tuple(RECIPES)))
]


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_the_reconstruction_does_not_change_when_the_truth_does(name: str, recipe: str) -> None:
    attack = short(name, **steps_of(name, recipe))
    demand_honest(attack, world_of(name, recipe_of(name, recipe)), looks=recipe == "one step")


@pytest.mark.parametrize("name", ["dlg-dm", "invg-dm", "gidm"])
def test_nor_where_step_and_noise_are_the_clients_secret(name: str) -> None:
    attack = short(name, **FEW, noise="unknown", t="analytic")
    world = World.denoising()
    demand_honest(attack, replace(world, knows=replace(world.knows, given={})))


@pytest.mark.parametrize("name", DEFENCES)
def test_nor_through_a_known_defence(name: str) -> None:
    """A2: masks, norms and noise levels are read off the observation."""
    world = World.classifying(task=tiny())
    knows = replace(world.knows, given={"y": world.batch["y"].clone()}, defence=made(name))
    attack = short("idlg", steps=2, restarts=1)
    demand_honest(attack, replace(world, knows=knows, defence=made(name)), looks=False)


# --- would a cheat be caught? -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Cheat:
    """An attack that changes how an honest one is run, or what it returns."""

    way: Callable[[Callable[..., gl.Reconstruction], gl.Task, Observation], gl.Reconstruction]
    name: str = "cheat"
    needs: frozenset[str] = frozenset()

    def run(self, task: gl.Task, seen: Observation, knows: Knowledge, **how: Any) -> gl.Reconstruction:
        honest = functools.partial(short("ig", steps=1).run, knows=knows, **how)
        return self.way(honest, task, seen)


def showing(found: gl.Reconstruction, x: Tensor) -> gl.Reconstruction:
    return replace(found, candidates={**found.candidates, "x": x.clone().expand_as(found.candidates["x"])})


def cheats(world: World) -> dict[str, Cheat]:
    kept: dict[str, gl.Reconstruction] = {}

    def scores(honest: Any, task: gl.Task, seen: Observation) -> gl.Reconstruction:
        from gradleak import metrics

        assert metrics is not None
        return honest(task, seen)

    def subtracts(honest: Any, task: gl.Task, seen: Observation) -> gl.Reconstruction:
        noise = draws.Draws(draws.key("client", seen.key, 0)).normal((1,), dtype=torch.float64)
        assert noise.isfinite()
        return honest(task, seen)

    def by_truth(honest: Any, task: gl.Task, seen: Observation) -> gl.Reconstruction:
        found = honest(task, seen)
        return replace(found, chosen=1 - lowest_match(found.match))

    return {
        "peeks": Cheat(lambda honest, task, seen: showing(honest(task, seen), world.batch["x"])),
        "remembers": Cheat(lambda honest, task, seen: kept.setdefault(seen.key, honest(task, seen))),
        "guesses": Cheat(lambda honest, task, seen: showing(honest(task, seen), torch.full(SHAPE, 0.5))),
        "global numbers": Cheat(lambda honest, task, seen: showing(honest(task, seen), torch.rand(SHAPE))),
        "scores": Cheat(scores),
        "subtracts": Cheat(subtracts),
        "chooses by something else": Cheat(by_truth),
    }


@pytest.mark.parametrize("way", ["peeks", "remembers", "guesses", "global numbers", "scores", "subtracts"])
def test_a_cheat_is_caught(way: str) -> None:
    world = World.classifying()
    world = replace(world, knows=replace(world.knows, given={"y": world.batch["y"].clone()}))
    with pytest.raises(AssertionError):
        demand_honest(cheats(world)[way], world)


def test_so_is_one_that_chooses_among_restarts_by_something_else() -> None:
    world = World.classifying()
    demand_honest(short("ig", steps=1), world)
    with pytest.raises(AssertionError):
        demand_honest(cheats(world)["chooses by something else"], World.classifying())


# --- random numbers ---------------------------------------------------------------------------------------------------


def test_no_lane_has_the_key_of_a_client() -> None:
    """Noise, order, masks and augmentation come from ("client", its key, its seed). Files name observations freely."""
    called = ["client", "0", "1", "", "lane", "target", "client\x1f0", "0\x1f0", "client\x1e1", "x\x1fclient"]
    seeds = [0, 1]
    clients = {tuple(draws.key("client", name, seed).tolist()) for name, seed in product(called, seeds)}
    assert len(clients) == len(called) * len(seeds)
    lanes = {tuple(draws.lane_key(*names).tolist()) for names in product(called, seeds, seeds)}
    assert len(lanes) == len(called) * len(seeds) ** 2
    assert not clients & lanes


def test_what_a_client_is_called_does_not_join_two_names() -> None:
    assert not torch.equal(draws.key("a\x1fb", "c"), draws.key("a", "b\x1fc"))
    assert not torch.equal(draws.key("a\x1e1b"), draws.key("a\x1fb"))


# --- what a client leaves behind --------------------------------------------------------------------------------------


def tensors(value: Any, met: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that can be reached from here: attributes, closures, defaults, bound objects."""
    met = set() if met is None else met
    if id(value) in met or isinstance(value, (type, str, bytes, int, float)):
        return
    met.add(id(value))
    inside: list[Any] = []
    if isinstance(value, Tensor):
        yield value
        inside = [value.grad] if value.is_leaf and value.grad is not None else []
    elif isinstance(value, Mapping):
        inside = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    elif isinstance(value, functools.partial):
        inside = [value.func, value.args, value.keywords]
    elif isinstance(value, MethodType):
        inside = [value.__self__, value.__func__]
    elif isinstance(value, FunctionType):
        inside = [value.__defaults__, value.__kwdefaults__, *(c.cell_contents for c in value.__closure__ or ())]
    else:
        inside = [getattr(value, "__dict__", None)]
    for held in inside:
        yield from tensors(held, met)


def shows(value: Any, images: Tensor) -> bool:
    """Does any tensor that can be reached from here hold one of these images, pixel by pixel?"""
    size, wanted = images[0].numel(), images.flatten(1).float()
    for held in tensors(value):
        if held.is_floating_point() and held.numel() and held.numel() % size == 0:
            rows = held.detach().reshape(-1, size).float()
            if bool((rows[:, None] == wanted).all(-1).any()):
                return True
    return False


class Keeping(nn.Module):
    """Keeps its last input, as models do that show attention or features; and counts on it in its next pass."""

    def __init__(self, norm: str | None = None) -> None:
        super().__init__()
        self.inner = network(norm=norm)
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return self.inner(x)


def keeping(norm: str | None = None) -> gl.Task:
    like = (torch.zeros(1, *SHAPE), torch.zeros(1, dtype=torch.long))
    return gl.Task.supervised(Keeping(norm), nn.functional.cross_entropy, like=like)


class Careless(gl.Defence):
    """Hooks that keep and change in place what they are shown."""

    def broadcast(self, weights: Any, server: Any) -> Any:
        return {"sent": tree.zeros_like(weights)}

    def gradient(self, compute: Any, weights: Any, batch: Any, client: Any) -> Any:
        gradient = compute(weights, batch)
        client.extras["kept"] = {"x": batch["x"]}
        for held in (weights, client.extras["sent"]):
            first = held["inner.3.weight"]  # 3 x 16: three images
            first[0] = batch["x"][0].flatten()
        batch["x"].mul_(0.5)
        return gradient


def test_a_client_leaves_nothing_in_the_task_the_broadcast_or_the_truth() -> None:
    task, batch = keeping(), private(2)
    weights, truth = task.weights(), copy.deepcopy(batch)
    sent = copy.deepcopy(weights)
    seen = gl.observe(task, batch, TRAINING, Careless(), weights=weights)
    assert not differ(batch, truth)
    assert not differ(weights, sent)
    assert not shows((task, seen), truth["x"])
    assert not seen.extras.keys() - {"sent"}
    assert tree.squared_norm(seen.extras["sent"]) == 0
    short("ig", steps=1).run(task, seen, engine=Engine(device="cpu"))  # a kept tensor of a pass could not be copied
    assert shows((task, seen, lambda: batch), truth["x"])  # and would be found


def test_a_model_that_cannot_be_copied_is_told_so() -> None:
    task = keeping()
    task.model(private(1)["x"].requires_grad_() * 1.0)
    with pytest.raises(TaskError, match="keeps a tensor of an earlier pass"):
        gl.observe(task, private(2), TRAINING)


@pytest.mark.parametrize("name", DEFENCES)
def test_no_defence_changes_what_it_is_given(name: str) -> None:
    """Neither batch nor weights nor broadcast, nor the model's state, nor the global random state."""
    task, batch, defence = tiny(), private(2), made(name)
    weights = task.weights()
    held, model = copy.deepcopy((batch, weights)), state_of(task)
    seen = gl.observe(task, batch, RECIPES["epochs"], defence, weights=weights)
    assert not storages(seen) & storages(batch)
    assert same(state_of(task), model)
    assert same({**batch, **weights}, {**held[0], **held[1]})
    # The same of the client itself, which `observe` gives copies: in a training there are none.
    state = gl.scenario.client.ClientState(extras=seen.extras, key=draws.key("client", name))
    extras = copy.deepcopy(seen.extras)
    RECIPES["epochs"].run(task, weights, batch, defence, state)
    assert same({**batch, **weights}, {**held[0], **held[1]})
    assert same(seen.extras, extras)
    assert same(state_of(task), model)


@pytest.mark.parametrize("wire", ["update", "weights"])
@pytest.mark.parametrize("norm", [None, "train"])
def test_an_observation_shares_no_memory_with_the_private_batch(norm: str | None, wire: str) -> None:
    task, batch = tiny(norm=norm), private(2)
    seen = gl.observe(task, batch, TRAINING, wire=wire)
    assert not storages(seen) & storages(batch)
    assert not storages(seen) & storages(dict(task.model.state_dict()))
    held = copy.deepcopy(seen)
    batch["x"].zero_()
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
    assert not any(isinstance(value, Tensor) for value in vars(task.objective).values())
    assert task.objective.loss is nn.functional.cross_entropy
    assert {f.name for f in fields(task.objective)} == {"loss", "inputs", "label", "target", "meet"}


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


# A linear layer must see the input; and a population in a vmap of its own is refused by BatchNorm in training mode.
WITHOUT_NORM = (*DENOISING, *OTHER_DATA, "analytic", "span", "sparse-span", "ggl")
CHANGED = [(name, norm) for name in NAMES for norm in ([None] if name in WITHOUT_NORM else [None, "train"])]


@pytest.mark.parametrize(("name", "norm"), CHANGED)
def test_no_attack_changes_what_it_is_given(name: str, norm: str | None) -> None:
    """Neither the observation nor the model nor the knowledge, nor the global random state; in the model's own type."""
    attack = short(name, **{**FEW, "steps": 3, "certify": False})
    if name in DENOISING:
        world = World.denoising(name).granting(attack)
    else:
        task = tiny(norm=norm, dtype=torch.float32) if norm else classifier_for(name, torch.float32)
        other = name in OTHER_DATA
        world = World.of_kind(name, dtype=torch.float32) if other else World.classifying(task=task)
        world = world.granting(attack)
        world.knows.given["y"] = torch.tensor([1, 2])[: len(world.batch["y"])]
    task, seen, knows = world.task, world.seen(), world.knows
    held = [{f.name: copy.deepcopy(getattr(seen, f.name)) for f in fields(seen)}, copy.deepcopy(knows.given)]
    prior = None if knows.generator is None else tree.detach(dict(knows.generator.state_dict()))
    model = state_of(task)
    attack.run(task, seen, knows, engine=Engine(device="cpu"))
    assert same({f.name: getattr(seen, f.name) for f in fields(seen)}, held[0])
    assert same(knows.given, held[1])
    assert same(state_of(task), model)
    assert prior is None or same(dict(knows.generator.state_dict()), prior)


@pytest.mark.parametrize("name", NAMES)
def test_a_result_shares_no_memory_with_the_observation(name: str) -> None:
    attack = short(name, **{**FEW, "steps": 2, "certify": False})
    if name in DENOISING:
        world = World.denoising(name).granting(attack)
    else:
        task, one = classifier_for(name, torch.float32), {"examples": 1}
        other = name in OTHER_DATA
        world = World.of_kind(name, dtype=torch.float32, **one) if other else World.classifying(task=task, **one)
        world = world.granting(attack)
        world.knows.given["y"] = torch.tensor([1])
    seen, knows = world.seen(), world.knows
    found = attack.run(world.task, seen, knows, engine=Engine(device="cpu"))
    assert not storages(found.candidates) & (storages(seen) | storages(knows.given))
    assert not storages(found.batch) & (storages(seen) | storages(knows.given))


# --- audits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Spy:
    """An honest attack that looks at everything it can reach."""

    images: Tensor
    found: list[bool]
    name: str = "spy"
    needs: frozenset[str] = frozenset()

    def run(self, *given: Any, **named: Any) -> gl.Reconstruction:
        self.found.append(shows((given, named), self.images))
        return short("ig", steps=1).run(*given, **named)


def running_on_the_truth(task: gl.Task, seen: Observation, truth: Batch) -> dict[str, float]:
    """An analysis that is careless with what it is shown."""
    loss = task.objective(task.model, truth)
    loss.backward()
    truth["x"].zero_()
    return {"loss": loss.item()}


AUDITED = gl.federation.Federation(clients=2, training=TRAINING, examples=2)
CPU = Engine(device="cpu", precision="double")


def audited(data: Batch, attack: Any, **settings: Any) -> gl.Audit:
    task = settings.pop("task", None) or keeping("train")
    return gl.Audit(
        task, data, (attack,), **{"federation": AUDITED, "targets": 2, "unrelated": 1, "engine": CPU, **settings}
    )


def test_nothing_that_an_attack_can_reach_in_an_audit_holds_a_private_image() -> None:
    """Not after clients have trained, uploaded and were analysed with the same model, in cell after cell."""
    data, found = private(20), list[bool]()
    truth = copy.deepcopy(data)
    audit = audited(data, Spy(truth["x"], found), rounds=(0, 1), seeds=(0, 1), analyses=(running_on_the_truth,))
    before = tree.detach(dict(audit.task.model.state_dict()))
    result = audit.run()
    assert found == [False] * 5  # the positive control, and two rounds with two seeds
    assert not differ(before, audit.task.model.state_dict())
    assert all(parameter.grad is None for parameter in audit.task.model.parameters())
    assert not differ(data, truth)
    assert bool(result.store.arrays(result.rows[0]["cell"])["truth/x"].any())
    assert shows((audit,), truth["x"])  # it is there to be found


def test_nor_in_an_audit_of_recorded_observations() -> None:
    task, found = keeping(), list[bool]()
    recorded = recordings(task)
    images = torch.cat([one.truth["x"] for one in recorded if one.truth is not None])
    spy = Spy(images, found)
    RecordedAudit.of(task, recorded, (spy,), TRAINING, private(8, seed=7), engine=CPU).run()
    assert found == [False] * 3


def recordings(task: gl.Task) -> list[Recorded]:
    """One client of one example in each of two rounds."""
    made = []
    for number in (1, 2):
        batch = private(1, seed=number)
        seen = gl.observe(task, batch, TRAINING, key=f"node{number}")
        made.append(Recorded(f"node{number}", replace(seen, round=number), batch))
    return made


@pytest.mark.parametrize("number", [0, 1])
def test_a_generator_that_knows_the_targets_of_any_round_is_refused(number: int) -> None:
    task = perceptron()
    recorded = recordings(task)
    truth, generator = recorded[number].truth, Toy(CLASSES)
    assert truth is not None
    generator.card = Card(images=fingerprints(truth["x"]))  # type: ignore[assignment]
    audit = RecordedAudit.of(task, recorded, ("ig:steps=1",), TRAINING, private(8, seed=7), engine=CPU)
    with pytest.raises(ValueError, match="trained on 1 of the 1 images"):
        replace(audit, generator=generator).run()


SEARCHED = ("match", "match_start", "objective", "restart", "converged", "checks", "observation")


def test_the_truth_changes_scores_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other images are put beside the same uploads: an audit finds the same, restart by restart, and scores it anew."""
    data = private(20)
    attacks, defences = ("ig:steps=3,restarts=2", "gi:steps=2"), (None, "local-gaussian:sigma=0.01")
    audit = gl.Audit(
        perceptron(), data, attacks, defences, federation=AUDITED, targets=2, unrelated=1, engine=CPU, repeats=2
    )
    first, honest = audit.run(), PrivateSide.victims

    def lying(side: PrivateSide, *given: Any, **named: Any) -> Any:
        victims = honest(side, *given, **named)
        other = private(victims.truth["y"].numel(), seed=50)
        return replace(victims, truth={name: value.reshape(victims.truth[name].shape) for name, value in other.items()})

    monkeypatch.setattr(PrivateSide, "victims", lying)
    second = replace(audit).run()
    assert len(first.rows) == len(second.rows) > 8
    for one, other in zip(first.rows, second.rows, strict=True):
        assert {name: one[name] for name in SEARCHED} == {name: other[name] for name in SEARCHED}
        assert one["scores"]["psnr"] != other["scores"]["psnr"]
        held, anew = (run.store.arrays(one["cell"]) for run in (first, second))
        assert not any(differ({n: held[n]}, {n: anew[n]}) for n in held if not n.startswith("truth/"))
        assert differ({"x": held["truth/x"]}, {"x": anew["truth/x"]})


def test_a_resumed_run_reads_no_images_back(tmp_path: Path) -> None:
    data = private(20)
    audit = audited(data, "ig:steps=2", task=perceptron(), seeds=(0, 1))
    rows = audit.run(tmp_path).rows
    lines = (tmp_path / "rows.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_bytes(b"".join(lines[:-2]))  # the last cell is missing
    for path in (tmp_path / "arrays").iterdir():
        path.write_bytes(b"not what it was")
    again = replace(audit).run(tmp_path).rows
    timeless = [[{k: v for k, v in row.items() if k != "seconds"} for row in run] for run in (rows, again)]
    assert timeless[0] == timeless[1]


def test_what_a_cell_finds_does_not_depend_on_those_before_it() -> None:
    """They run in any order, on any worker."""
    data = private(20)
    audit = audited(data, "ig:steps=2", task=perceptron(), seeds=(0, 1))
    gallery, rounds = audit.side.gallery([cell.federation for cell in audit.cells()]), (0,)
    runs = []
    for order in (1, -1):
        runner = Runner(audit.side, gallery, CPU)
        cells = audit.cells()[::order]
        runs.append({cell.key: runner.attempt(cell, rounds, lambda share: None)[1] for cell in cells})
    for key, arrays in runs[0].items():
        assert arrays is not None
        assert not differ(arrays, runs[1][key])


# --- Flower -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 0])
def test_no_loss_travels_beside_an_upload_that_an_epsilon_was_proved_of(seed: int | None) -> None:
    """Nobody adds noise to it. A simulation, whose numbers are no secret, keeps it."""
    pytest.importorskip("flwr")
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

    from gradleak import flower
    from gradleak.defences import LocalGaussian
    from gradleak.flower.records import identify

    identify(1)
    task, batch = tiny(), private(2)
    content = RecordDict(
        {"arrays": ArrayRecord(dict(task.model.state_dict())), "config": ConfigRecord({"server-round": 1})}
    )
    told = {}
    for name, defence in {"none": None, "proved": LocalGaussian(clip=1.0, noise_multiplier=1.0)}.items():
        context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
        reply = flower.train(Message(content, 1, "train"), context, task, batch, TRAINING, defence, seed=seed)
        told[name] = set(reply.content.metric_records["metrics"])
    assert told["none"] == {"num-examples", "train_loss"}
    assert told["proved"] == ({"num-examples"} if seed is None else {"num-examples", "train_loss"})
