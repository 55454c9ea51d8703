"""The tables of the READMEs, from `results.csv` and what the papers print: `python papers/readme.py` writes them.

A README marks its tables: `<!-- table: NAME -->` ... `<!-- end -->`; `papers/PAPER/tables.py` says what each holds, as
lines of cells. A cell is a template over the metrics of one place in the table:

    at("{psnr:.1f} / {ssim:s3}", "h200-rho", "rho 0.1", a="ig", f="b", s="round 100")

.1f, ,.0f   as Python formats numbers         s3     three digits, no zero in front: .578
%1          in per cent, one digit            to.1   with its interval: 1.2 (0.9 to 1.5)
in.2        with its interval: 1.21 [0.91, 1.48]    n      how many targets
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from papers.results import Figure, read

PAPERS = Path(__file__).resolve().parent
Lines = Iterable[Sequence[str]]  # the head, then the body
Tables = Mapping[str, Callable[[], Lines]]  # by the names that READMEs have for them
MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


class Shown:
    """A figure in a template."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure

    def __format__(self, spec: str) -> str:
        figure = self.figure
        if spec == "n":
            return str(figure.n)
        if not spec.startswith(("to", "in")):
            return number(figure.value, spec)
        if figure.low is None or figure.high is None:
            raise ValueError(f"A template asks for an interval ({spec}), and {figure.metric} of {figure.row} has none.")
        before, between, after = ("(", " to ", ")") if spec.startswith("to") else ("[", ", ", "]")
        value, low, high = (number(each, f"{spec[2:]}f") for each in (figure.value, figure.low, figure.high))
        return f"{value} {before}{low}{between}{high}{after}"


def number(value: float, spec: str) -> str:
    """A number in a cell: `s3`, `%1`, or as Python formats it."""
    short, share = spec.startswith("s"), spec.startswith("%")
    form = f".{spec[1:] or 0}f" if short or share else spec
    text = format(100 * value if share else value, form)
    text = text if re.search("[1-9]", text) else text.lstrip("-")  # -0.0 is 0.0
    return text.replace("0.", ".", 1) if short and text.lstrip("-").startswith("0.") else text


class Results:
    """The table of one paper, by place; and what its expected.json holds of the paper."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def places(self) -> Mapping[tuple[str, ...], Mapping[str, Shown]]:
        places: dict[tuple[str, ...], dict[str, Shown]] = {}
        for figure in read(self.folder / "results.csv"):
            place = (figure.run, *figure.key[:-1])
            places.setdefault(place, {})[figure.metric] = Shown(figure)
        return places

    @cached_property
    def reference(self) -> Any:
        return json.loads((self.folder / "expected.json").read_text(encoding="utf-8")).get("reference", {})

    def __call__(self, template: str, run: str, row: str, a: str = "", d: str = "", f: str = "", s: str = "") -> str:
        """The cell; empty where nothing was measured there."""
        metrics = self.places.get((run, row, s, a, d, f))
        return "" if metrics is None else template.format_map(metrics)


def markdown(lines: Lines) -> str:
    head, *body = map(list, lines)
    if wrong := next((line for line in body if len(line) != len(head)), None):
        raise ValueError(f"A line of a table has {len(wrong)} cells, its head {len(head)}: {wrong}.")
    if bare := next((line for line in body if len(line) > 1 and not any(line[1:])), None):
        raise ValueError(
            f"Nothing of the line {bare[0]!r} is in results.csv: does tables.py name its run and row rightly?"
        )
    rows = ["".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in (head, *body)]
    return "\n".join([rows[0], "|" + "---|" * len(head), *rows[1:]])


def filled(text: str, tables: Tables) -> str:
    """A README with its tables as they are to be."""
    return MARKED.sub(lambda mark: f"{mark[1]}{markdown(tables[mark[2]]())}\n{mark[3]}", text)


def readmes() -> Iterable[tuple[Path, str]]:
    """Every README that has tables, and its text with the tables of now."""
    for file in sorted(PAPERS.glob("*/tables.py")):
        tables = importlib.import_module(f"papers.{file.parent.name}.tables").tables(Results(file.parent))
        readme = file.with_name("README.md")
        yield readme, filled(readme.read_text(encoding="utf-8"), tables)


def main() -> None:
    for readme, text in readmes():
        readme.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
