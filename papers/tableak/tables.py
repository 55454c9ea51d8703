"""The tables of the README: `papers/readme.py` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from papers.readme import Results, Tables

COLUMNS = "{right:in.2} / {exact_rows:in.2}"
SHORT = "{right:s2} / {exact_rows:s2}"
APART = "{categorical:s2} / {numeric:s2}"
NUMBERS = "{numeric:s2}"  # breast cancer has no categories


def tables(at: Results) -> Tables:
    def settings(data: str, width: int = 100) -> Iterator[tuple[str, str]]:
        kinds = product(("one step", "FedAvg"), ("untrained", "trained"), (1, 8, 32), ("known", "read off"))
        for steps, trained, rows, labels in kinds:
            row = f"{data} {width}, {rows} rows, {trained}, {steps}, labels {labels}"
            if at(SHORT, "cpu", row, "tableak"):
                yield f"{rows} rows, {trained}, {steps}, labels {labels}", row

    def lines(data: str, apart: str, width: int = 100) -> Iterator[Sequence[str]]:
        sorts = "categories / numbers" if apart == APART else "numbers"
        yield [
            "client",
            "n",
            "TabLeak",
            sorts,
            "`spear` (n)",
            "spear, then TabLeak (n)",
            "marginal modes",
            "other rows",
        ]
        for name, row in settings(data, width):
            exact = [at(SHORT + " ({right:n})", "cpu-exact", row, "spear")]
            exact += [at(COLUMNS + " ({right:n})", "cpu-exact", row, "spear, then tableak")]
            ours = [at("{right:n}", "cpu", row, "tableak"), at(COLUMNS, "cpu", row, "tableak")]
            guesses = [at(SHORT, "cpu", row, name) for name in ("marginal modes", "other rows")]
            yield [name, *ours, at(apart, "cpu", row, "tableak"), *exact, *guesses]

    def paper() -> Iterator[Sequence[str]]:
        printed = at.reference["adult, 8 rows, labels known"]
        yield ["Adult, 8 rows, labels known, untrained", "columns right", "exact rows", "categories / numbers"]
        yield ["TabLeak, as printed", f"{printed['right']:.3f} (SD {printed['std']:.3f})", "", ""]
        for name, attack in (("ours, pooled", "tableak, pooled"), ("ours, chosen by match", "tableak")):
            cells = [at(one, "cpu", "paper's settings", attack) for one in ("{right:in.3}", "{exact_rows:in.3}", APART)]
            yield [name, *cells]

    def one_row() -> Iterator[Sequence[str]]:
        yield ["one row, labels known", "TabLeak", "`analytic`", "`spear`", "`idlg`"]
        for data, trained in product(("adult", "breast-cancer"), ("untrained", "trained")):
            row = f"{data} 100, 1 rows, {trained}, one step, labels known"
            cells = [at("{exact_rows:s2}", "cpu", row, name) for name in ("tableak", "analytic")]
            cells += [at("{exact_rows:s2}", "cpu-exact", row, "spear"), at("{exact_rows:s2}", "cpu", row, "idlg")]
            yield [f"{data}, {trained}", *cells]

    return {
        "paper": paper,
        "one row": one_row,
        "adult": lambda: lines("adult", APART),
        "breast cancer": lambda: lines("breast-cancer", NUMBERS),
        "wide": lambda: lines("adult", APART, 512),
    }
