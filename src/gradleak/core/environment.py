"""Where a run took place: commit, versions, hardware, threads, time. Goes into environment.json, for people to read."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

VERSION = 1
PACKAGES = ("torch", "numpy", "scipy", "safetensors")


def describe() -> dict[str, Any]:
    """Everything that can change the digits of a result besides its settings. Asks git, reads /proc; never fails."""
    from gradleak import __version__

    return {
        "version": VERSION,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "gradleak": __version__,
        "git": git(Path(__file__)),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": _memory(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
    }


def git(file: Path) -> dict[str, Any] | None:
    """The commit of the repository that tracks `file`, and whether files differ from it; None where there is none."""

    def ask(*words: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", "-C", str(file.parent), *words], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    # An installed package inside somebody else's repository (a .venv) is not ours: that commit would mislead.
    if commit is None or ask("ls-files", "--error-unmatch", str(file)) is None:
        return None
    changed = ask("status", "--porcelain")
    return {"commit": commit, "dirty": None if changed is None else bool(changed)}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
