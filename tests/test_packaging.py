"""What an install brings, what an import costs, and what it must not need."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

# Modules that exist to join gradleak to another package, and may import it at once.
JOINTS = ("gradleak.__main__", "gradleak.cli", "gradleak.flower", "gradleak.report")

IMPORT_ALL = f"""
import importlib, importlib.metadata, pkgutil, re, sys

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

allowed = {{"torch", "numpy", "gradleak", "pip", "setuptools"}}
waiting = ["torch", "numpy"]
while waiting:  # and whatever torch and numpy themselves require
    try:
        requires = importlib.metadata.requires(waiting.pop()) or []
    except importlib.metadata.PackageNotFoundError:
        continue
    new = {{plain(re.match(r"[\\w.-]+", line)[0]) for line in requires if "extra ==" not in line}} - allowed
    allowed |= new
    waiting += new
homes = importlib.metadata.packages_distributions()
blocked = {{top for top, names in homes.items() if not {{plain(name) for name in names}} & allowed}}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"{{name}} is blocked: only torch and numpy may be needed here", name=name)

sys.meta_path.insert(0, Block())
import gradleak
names = [module.name for module in pkgutil.walk_packages(gradleak.__path__, "gradleak.", onerror=lambda name: None)]
names = [name for name in names if not name.startswith({JOINTS!r})]
for name in names:
    importlib.import_module(name)
loaded = {{name.partition(".")[0] for name in sys.modules}} & blocked
print(len(names), len(blocked), sorted(loaded))
"""


def python(*arguments: str) -> str:
    answer = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=240
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_no_cuda_packages_came_along() -> None:
    """Any package that names torchvision pulls a newer CUDA torch of several GB, unless constraints.txt holds torch."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device; CUDA packages are wanted")
    if torch.version.cuda is not None and held_torch() and not os.environ.get("CI"):
        pytest.skip("the held torch is itself a CUDA build, as PyPI has it for Linux; see PIP_OPTIONS in the Makefile")
    names = sorted(found.name for found in distributions() if found.name.lower().startswith("nvidia-"))
    assert not names, f"{len(names)} CUDA packages: was something installed without -c constraints.txt? {names[:3]} ..."


def held_torch() -> bool:
    pin = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return pin is not None and torch.__version__.partition("+")[0] == pin[1]


def test_no_torchvision() -> None:
    """It is for users' machines and the GPU machine; where its build does not fit torch it breaks its dependents."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device and may have torchvision")
    assert not [found.name for found in distributions() if found.name.lower() == "torchvision"]


def test_constraints_hold_torch_and_no_cuda() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [line for line in lines if line]
    assert "torch==2.13.0" in pins
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+( ; python_version >= \"3\.\d+\")?", pin) for pin in pins)
    assert not [pin for pin in pins if pin.lower().startswith(("nvidia", "torchvision", "triton"))]


def test_the_command_answers() -> None:
    assert "audit" in python("-m", "gradleak", "--help")


def test_everything_but_the_joints_imports_with_torch_and_numpy_alone() -> None:
    count, blocked, loaded = python("-c", IMPORT_ALL).split(maxsplit=2)
    assert int(count) > 5
    assert int(blocked) > 0, "nothing was blocked: this environment cannot show anything"
    assert loaded.strip() == "[]"


def test_import_is_light() -> None:
    code = "import torch, numpy, time; start = time.perf_counter(); import gradleak; print(time.perf_counter() - start)"
    assert any(float(python("-c", code)) < 1.0 for _ in range(3)), "seconds beyond torch, the best of up to three"
