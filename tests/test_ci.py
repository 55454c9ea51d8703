"""In CI nothing that issues promise may be skipped for want of a package."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(not os.environ.get("CI"), reason="elsewhere extras are optional"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="constraints.txt has Flower from Python 3.11 on"),
]


@pytest.mark.parametrize(
    "package", ["flwr", "ray", "cryptography", "sklearn", "diffusers", "mkdocs", "transformers", "peft"]
)
def test_packages_that_tests_would_be_skipped_without_are_here(package: str) -> None:
    assert find_spec(package) is not None


@pytest.mark.skipif(sys.platform != "linux", reason="those tests need /proc")
def test_the_superlink_is_beside_this_python() -> None:
    assert (Path(sys.executable).parent / "flower-superlink").exists()
