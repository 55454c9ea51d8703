"""Speed on this machine: `python -m benchmarks [COMMAND] [OPTIONS]`, from a clone, with torch and numpy alone.

    python -m benchmarks --quick                    measure everything, briefly
    python -m benchmarks engine --networks lenet    images x iterations per second only
    python -m benchmarks peers                      beside the library breaching
    python -m benchmarks compare --before PATH/src  two source trees in one run

`PYTHONPATH=src python3 -m benchmarks` works where nothing can be installed. COMMAND --help lists the options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = ("measure", "engine", "peers", "compare")


def main(words: Sequence[str]) -> int:
    """Run one command and return its exit code; without a name it is `measure`."""
    name, rest = (words[0], words[1:]) if words and words[0] in COMMANDS else ("measure", words)
    exit_code: int = import_module(f"benchmarks.{name}").main(rest)
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
