"""The result of a study: curves over rounds, the leakage at the same rounds, and whether the two move together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gradleak.audit.formats import text_of
from gradleak.audit.result import AuditResult
from gradleak.audit.ruling import CONVERGED
from gradleak.core.files import finite
from gradleak.core.folder import environment_in
from gradleak.curvature.association import Association, IntervalEstimate, associations
from gradleak.curvature.folder import rows_in, settings_in
from gradleak.curvature.leakage import Leakage, caveats, distinct_names, once, read, unsettled
from gradleak.curvature.measure import Row, settled

CONTROLS = ("gradient_norm", "round")
MEANING = (
    "While a network trains, curvature, gradient norm, loss and PSNR mostly fall together, whatever the reason. That "
    "two of them move together is no evidence that one causes the other: read the partial correlation, which asks "
    "what is left once gradient norm and round are known, and compare trainings that differ in one thing.",
    "Rounds of one training are not independent, and few. The intervals (95 %, from resampling blocks of rounds) say "
    "how far a figure hangs on the recorded rounds, not how another training would turn out. Of twenty intervals about "
    "one misses the truth by chance, and this page may show many.",
    "The log-determinant depends on the number of weights and on how layers are scaled, though the function stays the "
    "same. Do not compare it between architectures; compare its excess over the floor, of one architecture. It mostly "
    "counts eigenvalues beyond the square root of the damping.",
    "Curvature in the weights does not say what can be inverted. What an update determines shows in the mixed "
    "derivative by weights and data (gradleak.identify: certify, noise_floor; gradleak.curvature: input_information).",
)


# --- curves -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A quantity over rounds, with a band; without one, `low` and `high` equal the value."""

    name: str
    title: str
    rounds: tuple[int, ...]
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    doubtful: tuple[int, ...] = ()  # rounds at which the estimate had not settled

    def at(self, number: int) -> float | None:
        return self.values[self.rounds.index(number)] if number in self.rounds else None


@dataclass(frozen=True)
class Quantity:
    """How a curve is read off the rows. `margin`: half the width of its band, two standard errors or a residual."""

    name: str
    title: str
    value: Callable[[Row], Any]
    margin: Callable[[Row], Any] = lambda row: 0.0
    least: Callable[[Row], float] = lambda row: float("-inf")  # what the band cannot lie below
    doubtful: Callable[[Row], bool] = lambda row: False

    def curve(self, rows: Sequence[Row]) -> Curve | None:
        """None where no row has it."""
        points = [(row, value) for row in rows if (value := _read(self.value, row)) is not None]
        if not points:
            return None
        margins = [abs(_read(self.margin, row) or 0.0) for row, _ in points]
        return Curve(
            self.name,
            self.title,
            tuple(row["round"] for row, _ in points),
            tuple(value for _, value in points),
            tuple(max(value - margin, self.least(row)) for (row, value), margin in zip(points, margins, strict=True)),
            tuple(value + margin for (_, value), margin in zip(points, margins, strict=True)),
            tuple(row["round"] for row, _ in points if self.doubtful(row)),
        )


def _read(value: Callable[[Row], Any], row: Row) -> float | None:
    try:
        number = value(row)
    except (KeyError, IndexError, TypeError):  # not part of this study, or null
        return None
    return None if number is None else float(number)


def _of(matrix: str, title: str) -> tuple[Quantity, ...]:
    """Log det, both ends and trace of the Hessian or of the Gauss-Newton matrix."""
    start = "" if matrix == "curvature" else f"{matrix}."
    of = lambda quantity: f"{quantity}{title}"  # noqa: E731

    def far(row: Row, which: str, position: int) -> bool:
        ends = row[matrix]["extremes"]
        return not settled(ends[which], ends["residuals"][position], (ends["lowest"], ends["highest"]))

    def ends(which: str, position: int, name: str) -> Quantity:
        return Quantity(
            f"{start}{which}",
            of(name),
            lambda row: row[matrix]["extremes"][which],
            lambda row: row[matrix]["extremes"]["residuals"][position],
            doubtful=lambda row: far(row, which, position),
        )

    def error(entry: str, inner: str) -> Callable[[Row], Any]:
        return lambda row: 2 * row[matrix][entry][inner]

    return (
        Quantity(
            f"{start}log_determinant",
            of("log det"),
            lambda row: row[matrix]["log_determinant"]["value"],
            error("log_determinant", "error"),
            lambda row: row[matrix]["log_determinant"]["floor"],
            lambda row: not row[matrix]["log_determinant"]["converged"],
        ),
        Quantity(
            f"{start}excess",
            of("log det above its floor"),
            lambda row: row[matrix]["log_determinant"]["excess"],
            error("log_determinant", "error"),
            lambda row: 0.0,
            lambda row: not row[matrix]["log_determinant"]["converged"],
        ),
        ends("highest", 1, "lambda_max"),
        ends("lowest", 0, "lambda_min"),
        Quantity(
            f"{start}trace", of("trace"), lambda row: row[matrix]["trace"]["value"], error("trace", "standard_error")
        ),
        Quantity(
            f"{start}count",
            of("eigenvalues beyond sqrt(damping)"),
            lambda row: row[matrix]["log_determinant"]["count"]["value"],
            lambda row: 2 * row[matrix]["log_determinant"]["count"]["error"],
            lambda row: 0.0,
        ),
    )


def _channel(position: int) -> Callable[[Row], Any]:
    return lambda row: row["information"]["channel"]["nats"][-1][position]


QUANTITIES: tuple[Quantity, ...] = (
    *_of("curvature", ""),
    Quantity("gradient_norm", "gradient norm", lambda row: row["curvature"]["gradient_norm"]),
    Quantity("loss", "loss", lambda row: row["curvature"]["loss"]),
    # The lowest eigenvalue of the Gauss-Newton matrix is zero.
    *(each for each in _of("gauss_newton", " of the Gauss-Newton matrix") if not each.name.endswith("lowest")),
    Quantity("channel_low", "channel bound, noise 1e-4 of the release", _channel(0)),
    Quantity("channel", "channel bound, noise 1e-3 of the release", _channel(1)),
    Quantity("channel_high", "channel bound, noise 1e-2 of the release", _channel(2)),
    Quantity("sharpness", "worst loss in a ball, minus loss", lambda row: row["information"]["sharpness"]["sharpness"]),
)
# Against PSNR; the excess has the ranks of the log det, and the three channel bounds nearly those of one another.
COMPARED: tuple[str, ...] = ("log_determinant", "highest", "lowest", "trace", "count", "gradient_norm", "loss")
COMPARED += ("gauss_newton.log_determinant", "gauss_newton.highest", "gauss_newton.trace", "channel", "sharpness")

IN_TERMINAL = ("log_determinant", "highest", "trace", "gradient_norm")  # those that a terminal shows


# --- associations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Associated:
    """Every curve against the PSNR of one attack, over the rounds that have both.

    `leakage` is its name, with the audit's name if the first result has several audits. Gradient norm and round are
    the controls: the partial correlation of either controls for the other one only.
    """

    leakage: str
    runs: int
    rounds: tuple[int, ...]
    found: Mapping[str, Association]

    def record(self) -> dict[str, Any]:
        curves = {name: each.record() for name, each in self.found.items()}
        return {"leakage": self.leakage, "runs": self.runs, "rounds": list(self.rounds), "curves": curves}


def associated(results: Sequence[StudyResult]) -> list[Associated]:
    """Rank correlations of every curve with every PSNR, plain and given gradient norm and round.

    Several results are runs of the same kind (other seeds): then whole runs, which are independent, are resampled, and
    the interval is about trainings. Of one result blocks of its rounds are resampled. In a later result an attack,
    defence, attacker and batch size must appear once: which of two audits of one kind is meant cannot be known.
    """
    if not results:
        raise ValueError("There is nothing to associate: pass at least one result.")
    first = results[0].leakages
    shared = [
        (one, name)
        for one, name in zip(first, distinct_names(first), strict=True)
        if all(one.key in other.keys for other in results[1:])
    ]
    return [_associated(results, *each) for each in shared]


def _associated(results: Sequence[StudyResult], leakage: Leakage, title: str) -> Associated:
    runs = [leakage, *(_only(result, leakage) for result in results[1:])]
    names = [name for name in COMPARED if all(name in result.curves for result in results)]
    common = set.intersection(
        *(set(one.rounds) for one in runs),
        *(set(result.curves[name].rounds) for result in results for name in names),
    )
    rounds = tuple(sorted(common))

    def series(read: Callable[[int, int], Any]) -> Any:
        """(rounds,) of one run, (runs, rounds) of several."""
        rows = [[float(read(run, number)) for number in rounds] for run in range(len(results))]
        return rows[0] if len(rows) == 1 else rows

    if not rounds:
        return Associated(title, len(results), (), {})
    curves = {name: series(lambda run, n, name=name: results[run].curves[name].at(n)) for name in names}  # type: ignore[misc]
    curves["round"] = series(lambda run, n: n)
    curves["psnr"] = series(lambda run, n: runs[run].at(n))
    return Associated(title, len(results), rounds, associations(curves, "psnr", CONTROLS))


def _only(result: StudyResult, like: Leakage) -> Leakage:
    same = [one for one in result.leakages if one.key == like.key]
    if len(same) > 1:
        raise ValueError(
            f"{result.folder or 'A result'} has {like.name} from {len(same)} audits "
            f"({', '.join(one.audit for one in same)}), and which of them belongs to this is not known. Load it with "
            "one audit of the kind: StudyResult.load(folder, [audit])."
        )
    return same[0]


# --- the result -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class StudyResult:
    """Rows in the order of their rounds, and the PSNR curves of the audits that were given.

    `settings` is analysis.toml, `environment` environment.json; `notes` are reasons not to rely on figures.
    """

    rows: list[Row]
    settings: dict[str, Any]
    environment: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    leakages: tuple[Leakage, ...] = ()
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(
        rows: Sequence[Row],
        settings: dict[str, Any],
        environment: dict[str, Any],
        folder: Path | None,
        audits: Sequence[AuditResult],
    ) -> StudyResult:
        """From measured rows, and the audits of the same weights."""
        planned = settings["plan"]["rounds"]
        ordered = sorted((row for row in rows if row["round"] in planned), key=lambda row: int(row["round"]))
        leaks = tuple(read(audits))
        notes = [*(note for audit in audits for note in caveats(audit)), *unsettled(leaks)]
        return StudyResult(ordered, settings, environment, folder, leaks, tuple(notes))

    @staticmethod
    def load(folder: str | Path, audits: Sequence[str | Path] = ()) -> StudyResult:
        """Read a folder that `Study.run` wrote. Nothing is measured again, or checked against the audits."""
        folder = Path(folder)
        opened = [AuditResult.load(each) for each in once(audits)]
        return StudyResult.of(rows_in(folder), settings_in(folder), environment_in(folder), folder, opened)

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """By name, those that were measured."""
        made = (quantity.curve(self.rows) for quantity in QUANTITIES)
        return {curve.name: curve for curve in made if curve is not None}

    @property
    def keys(self) -> set[tuple[str, str, str, int]]:
        """Attack, defence, form and examples of every PSNR curve."""
        return {leakage.key for leakage in self.leakages}

    @cached_property
    def associated(self) -> list[Associated]:
        """Every curve against every PSNR, of this run alone; `associated([...])` takes several runs."""
        return associated([self])

    @property
    def doubtful(self) -> list[str]:
        """Estimates that had not converged, in words."""
        judged = (curve for name, curve in self.curves.items() if name.rpartition(".")[2] != "excess")
        return [
            f"{curve.title}: not converged at round {', '.join(map(str, curve.doubtful))}"
            for curve in judged
            if curve.doubtful
        ]

    # --- for people ----------------------------------------------------------------------------------------------

    def table(self) -> str:
        """One line per round; below it the associations and the caveats."""
        parts = [text_of([list(COLUMNS), *([show(row) for show in COLUMNS.values()] for row in self.rows)])]
        first = self.rows[0]["curvature"]["log_determinant"] if self.rows else {"floor": 0.0, "damping": 0.0}
        parts[0] += (
            f"\nFloor of the log det: {first['floor']:.1f} (damping {first['damping']:g}). +- is one standard error; "
            "~: not converged, take more --steps."
        )
        if any("information" in row for row in self.rows):
            parts.append(text_of([list(INFORMATION), *([show(r) for show in INFORMATION.values()] for r in self.rows)]))
            parts[-1] += "\nThe curvature index is not a bound on information. The channel bound grows with releases."
        if self.leakages:
            parts.append(text_of(self._leakage_grid()))
            if any(one.doubtful for one in self.leakages):
                parts[-1] += f"\n~: the attack converged on fewer than {CONVERGED:.0%} of its targets."
        if self.associated:
            parts.append(text_of(association_grid(self.associated)))
            parts[-1] += (
                "\nRank correlations with the PSNR; partial: given gradient norm and round (either of these: given the "
                "other one only). More of them: on the page."
            )
            parts[-1] += "\nThat curves move together while a network trains is no evidence."
        return "\n\n".join([*parts, *self.notes])

    def _leakage_grid(self) -> list[list[str]]:
        rounds = sorted({number for one in self.leakages for number in one.rounds})
        head = ["mean PSNR, dB", *(f"round {number}" for number in rounds), "targets"]

        def point(one: Leakage, n: int) -> str:
            return ("~" if n in one.doubtful else "") + _number(one.at(n), 1)

        named = zip(self.leakages, distinct_names(self.leakages), strict=True)
        return [head, *([name, *(point(one, n) for n in rounds), _range(one)] for one, name in named)]

    def to_json(self) -> dict[str, Any]:
        """Everything measured, as JSON can hold it."""
        content: dict[str, Any] = finite(
            {
                "version": 1,
                "settings": self.settings,
                "environment": self.environment,
                "rounds": self.rows,
                "curves": {name: asdict(curve) for name, curve in self.curves.items()},
                "leakage": [leakage.record() for leakage in self.leakages],
                "associations": [each.record() for each in self.associated],
                "notes": [*self.notes, *self.doubtful],
                "meaning": list(MEANING),
            }
        )
        return content

    def json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML file. It shows no image."""
        from gradleak.curvature.page import render

        path = Path(path)
        path.write_text(render(self), encoding="utf-8")
        return path


# --- tables -----------------------------------------------------------------------------------------------------------


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _range(leakage: Leakage) -> str:
    least, most = min(leakage.targets), max(leakage.targets)
    return (f"{least}" if least == most else f"{least}-{most}") + (" (small)" if leakage.small else "")


def _plain(form: str, *path: str) -> Callable[[Row], str]:
    """One number of a row; - where it is null."""

    def show(row: Row) -> str:
        value: Any = row
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return "-" if value is None else format(value, form)

    return show


def _log_det(row: Row) -> str:
    log_det = row["curvature"]["log_determinant"]
    return f"{'' if log_det['converged'] else '~'}{log_det['value']:.1f}"


def _end(which: str) -> Callable[[Row], str]:
    quantity = next(each for each in QUANTITIES if each.name == which)

    def show(row: Row) -> str:
        return f"{'~' if quantity.doubtful(row) else ''}{quantity.value(row):.4g}"

    return show


COLUMNS: dict[str, Callable[[Row], str]] = {
    "round": lambda row: str(row["round"]),
    "loss": _plain(".4f", "curvature", "loss"),
    "gradient": _plain(".4g", "curvature", "gradient_norm"),
    "log det": _log_det,
    "+-": _plain(".1f", "curvature", "log_determinant", "error"),
    "excess": _plain(".1f", "curvature", "log_determinant", "excess"),
    "lambda_max": _end("highest"),
    "lambda_min": _end("lowest"),
    "trace": _plain(".4g", "curvature", "trace", "value"),
    "+- ": _plain(".2g", "curvature", "trace", "standard_error"),
    "beyond sqrt(damping)": _plain(".0f", "curvature", "log_determinant", "count", "value"),
    "+-  ": _plain(".0f", "curvature", "log_determinant", "count", "error"),
}
INFORMATION: dict[str, Callable[[Row], str]] = {
    "round": lambda row: str(row["round"]),
    "channel bound at noise 1e-4 / 1e-3 / 1e-2, nats": lambda row: " / ".join(
        f"{value:.0f}" for value in row["information"]["channel"]["nats"][-1]
    ),
    "releases": lambda row: str(row["information"]["channel"]["counts"][-1]),
    "F_SAM - F": _plain(".4g", "information", "sharpness", "sharpness"),
    "curvature index (not a bound)": _plain(".0f", "information", "index", "determinant"),
    "tr Sigma_G / (tr H / B)": _plain(".3g", "information", "covariance", "hessian", "trace_ratio"),
}


def interval(found: IntervalEstimate | None) -> str:
    """A correlation with its bounds, or a dash."""
    return "-" if found is None else f"{found.value:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"


def titled(name: str) -> str:
    """A curve's name for people."""
    return next((quantity.title for quantity in QUANTITIES if quantity.name == name), name)


def sample(found: Associated) -> str:
    """How large the sample is, in words."""
    return " ".join(dict.fromkeys(_counted(found)))


def _counted(associated: Associated) -> Iterator[str]:
    for each in associated.found.values():
        if each.plain is not None:
            yield f"{each.plain.count} {each.plain.unit}{' (small)' if each.plain.small else ''}"


def association_grid(every: Sequence[Associated]) -> list[list[str]]:
    """Some of the associations, a line each."""
    head = ["PSNR of", "with", "Spearman [95 %]", "partial [95 %]", "n"]
    lines = []
    for associated in every:
        size = sample(associated) or f"{len(associated.rounds)} rounds: too few"
        known = [(name, associated.found[name]) for name in IN_TERMINAL if name in associated.found]
        entries = [[titled(name), interval(each.plain), interval(each.partial), size] for name, each in known]
        lines += [[associated.leakage, *line] for line in entries or [["-", "-", "-", size]]]
    return [head, *lines]
