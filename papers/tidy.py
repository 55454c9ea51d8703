"""Results of another machine into a paper's table: `python papers/tidy.py PAPER FILE.csv ...`.

FILE is a table that run.py wrote there (`--out`). A run replaces its own rows. The tables of release 0.1 were made from
raw JSON, which the history keeps with the script that converted it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from results import add, read


def main() -> None:
    paper, *files = sys.argv[1:]
    for file in files:
        add(Path(__file__).resolve().parent / paper / "results.csv", read(Path(file)))


if __name__ == "__main__":
    main()
