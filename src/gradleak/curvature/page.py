"""`render(result)`: a study as one self-contained HTML file. It shows no image, runs no script and asks no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from gradleak.core.folder import by_name
from gradleak.report import template, text
from gradleak.report.curves import Chart, Series, chart
from gradleak.report.grid import Column, Line, Table, Value, number

if TYPE_CHECKING:
    from gradleak.curvature.association import IntervalEstimate
    from gradleak.curvature.leakage import Leakage
    from gradleak.curvature.measure import Row
    from gradleak.curvature.result import Associated, StudyResult

BANDS = "Bands: two standard errors."
FEW = 2  # with at most this many PSNR curves, bands and the level of an unrelated update are drawn


@dataclass(frozen=True)
class StudyPage:
    """What the page shows, as plain values."""

    title: str
    subtitle: str
    version: str
    charts: tuple[Chart, ...]
    figures: Table
    leakage: Table | None
    information: Table | None
    covariance: Table | None
    premises: tuple[str, ...]
    associations: tuple[tuple[str, str, Table], ...]  # of which attack, how large a sample, the table
    meaning: tuple[str, ...]
    notes: tuple[str, ...]
    defence: str
    settings: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]

    @staticmethod
    def of(result: StudyResult) -> StudyPage:
        from gradleak import __version__
        from gradleak.curvature.result import MEANING

        requested = result.settings.get("information") or {}
        informed = [row["information"] for row in result.rows if "information" in row]
        return StudyPage(
            title=f"Curvature over training: {result.folder.name if result.folder is not None else 'study'}",
            subtitle=_subtitle(result),
            version=__version__,
            charts=tuple(_charts(result)),
            figures=_figures(result),
            leakage=_leakage(result.leakages),
            information=_information(result.rows) if informed else None,
            covariance=_covariance(result.rows) if informed else None,
            premises=tuple(informed[0]["index"]["premises"]) if informed else (),
            associations=tuple(_associations(associated) for associated in result.associated),
            meaning=MEANING,
            notes=(*result.notes, *result.doubtful),
            defence=str(requested.get("defence", "none")),
            settings=tuple(_flat(result.settings)),
            environment=tuple(_flat(result.environment)),
        )

    @property
    def sections(self) -> tuple[tuple[str, str], ...]:
        """Anchor and name of each section that is there, in order."""
        every = (
            ("curves", "Curves", True),
            ("associations", "Do they move together?", self.associations),
            ("meaning", "What it means", True),
            ("figures", "Figures", True),
            ("information", "Information", self.information),
            ("repeat", "To repeat", True),
        )
        return tuple((anchor, name) for anchor, name, there in every if there)


def render(result: StudyResult) -> str:
    """The whole page."""
    css = Markup(text("report.css") + text("curves.css"))
    return template("study.html.j2").render(page=StudyPage.of(result), css=css)


def _subtitle(result: StudyResult) -> str:
    rounds = [row["round"] for row in result.rows]
    if not rounds:
        return "no round has been measured"
    first = result.rows[0]["curvature"]
    counted = f"{len(rounds)} checkpoint{'s' * (len(rounds) != 1)}, round {rounds[0]}"
    trained = result.settings.get("origin", {}).get("trained_with")
    parts = [
        counted + (f" to {rounds[-1]}" if len(rounds) > 1 else ""),
        f"{first['size']:,} weights",
        f"{first['examples']} examples",
        f"trained with {'no defence' if trained == 'none' else trained}" if trained else "",
        str(result.environment.get("time", ""))[:16].replace("T", " "),
    ]
    return " · ".join(filter(None, parts))


# --- charts -----------------------------------------------------------------------------------------------------------


def _charts(result: StudyResult) -> Iterator[Chart]:
    first = result.rows[0]["curvature"]["log_determinant"] if result.rows else None
    floor = None if first is None else (first["floor"], f"floor {first['floor']:,.1f}: no curvature at all")
    psnr, few = list(_psnr(result.leakages)), len(result.leakages) <= FEW
    targets = "Mean over targets. Hollow: the attack converged on fewer than 80 % of them. " + (
        f"{BANDS} Dotted: an unrelated update." if few else "Errors: in the table below."
    )
    bounds = {"channel_low": "noise 1e-4", "channel": "noise 1e-3", "channel_high": "noise 1e-2"}
    hessian = {"log_determinant": "Hessian", "gauss_newton.log_determinant": "Gauss-Newton"}
    ends = {"highest": "lambda_max", "lowest": "lambda_min", "gauss_newton.highest": "lambda_max, Gauss-Newton"}
    trace, norm = {"trace": "Hessian", "gauss_newton.trace": "Gauss-Newton"}, {"gradient_norm": "gradient norm"}
    damped = (
        "1/2 tr log(H² + damping), which cannot lie below the floor. Bands: two standard errors, of random vectors "
    )
    damped += "and quadrature together. Hollow: not converged."
    edges = (
        "Both ends of the spectrum. Bands: the residual, within which an eigenvalue lies. Hollow: residual too large."
    )
    counted = "About how many exceed sqrt(damping) in magnitude: what the log-determinant mostly counts. "
    counted += "Bands: two standard errors, of random vectors and quadrature together."
    noise = "Nats, for noise of that share of the release. It grows with the number of releases."
    plans: list[tuple[str, Sequence[Series], str, Any]] = [
        ("Log-determinant", _series(result, hessian), damped, floor),
        ("Largest and smallest eigenvalue", _series(result, ends), edges, None),
        ("Trace", _series(result, trace), BANDS, None),
        ("Gradient norm", _series(result, norm), "Of the mean loss of the same examples.", None),
        ("PSNR of the attacks, dB", psnr, targets, None),
        ("Loss", _series(result, {"loss": "loss"}), "Mean over the same examples, in evaluation mode.", None),
        ("Eigenvalues that count", _series(result, {"count": "count"}), counted, None),
        ("Channel bound", _series(result, bounds), noise, None),
        ("Sharpness", _series(result, {"sharpness": "F_SAM - F"}), "Worst loss found in a ball, minus the loss.", None),
    ]
    for title, series, caption, level in plans:
        if series:
            yield chart(title, series, caption=caption, floor=level)


def _series(result: StudyResult, names: Mapping[str, str]) -> list[Series]:
    curves = [(result.curves[name], title) for name, title in names.items() if name in result.curves]
    return [
        Series(title, each.rounds, each.values, each.low, each.high, [n in each.doubtful for n in each.rounds])
        for each, title in curves
    ]


def _psnr(leakages: Sequence[Leakage]) -> Iterator[Series]:
    from gradleak.curvature.leakage import distinct_names

    for one, name in zip(leakages, distinct_names(leakages), strict=True):
        margins = [2 * (error or 0.0) for error in one.error]
        low, high = ([v + sign * m for v, m in zip(one.psnr, margins, strict=True)] for sign in (-1, 1))
        few = len(leakages) <= FEW
        hollow = [n in one.doubtful for n in one.rounds]
        yield Series(name, one.rounds, one.psnr, low if few else (), high if few else (), hollow)
        blind = [(n, value) for n, value in zip(one.rounds, one.baseline, strict=True) if value is not None]
        if blind and few:
            yield Series(f"unrelated update, {name}", [n for n, _ in blind], [v for _, v in blind], faint=True)


# --- tables -----------------------------------------------------------------------------------------------------------


def _figures(result: StudyResult) -> Table:
    names = ["round", "loss", "gradient norm", "log det", "excess", "lambda_max", "lambda_min", "trace", "count"]
    names += ["steps"]

    def line(row: Row) -> Line:
        figures, log_det = row["curvature"], row["curvature"]["log_determinant"]
        ends, residuals = figures["extremes"], figures["extremes"]["residuals"]
        n, curves = row["round"], result.curves
        open_, high, low = (
            "warn" if n in curves[name].doubtful else "" for name in ("log_determinant", "highest", "lowest")
        )
        return Line(
            (
                Value(str(row["round"])),
                Value(number(figures["loss"], 4)),
                Value(_short(figures["gradient_norm"])),
                Value(number(log_det["value"]), open_, f"± {number(log_det['error'])}"),
                Value(number(log_det["excess"]), "", f"floor {number(log_det['floor'])}"),
                Value(_short(ends["highest"]), high, f"residual {residuals[1]:.1g}"),
                Value(_short(ends["lowest"]), low, f"residual {residuals[0]:.1g}"),
                Value(_short(figures["trace"]["value"]), "", f"± {_short(figures['trace']['standard_error'])}"),
                Value(number(log_det["count"]["value"], 0), "", f"± {number(log_det['count']['error'], 0)}"),
                Value(
                    str(log_det["steps"]),
                    "",
                    f"{log_det['probes']} vectors; {'converged' if log_det['converged'] else 'NOT converged'}",
                ),
            )
        )

    caption = (
        "One line per round; ± is one standard error. Count: eigenvalues beyond the square root of the damping. A tag "
        "marks what had not settled."
    )
    return Table(caption, tuple(map(Column, names)), tuple(map(line, result.rows)))


def _leakage(leakages: Sequence[Leakage]) -> Table | None:
    if not leakages:
        return None
    rounds = sorted({n for one in leakages for n in one.rounds})

    def point(one: Leakage, n: int) -> Value:
        if n not in one.rounds:
            return Value("-")
        place = one.rounds.index(n)
        error = one.error[place]
        sample = f"{one.targets[place]} target{'s' * (one.targets[place] != 1)}"
        poor = n in one.doubtful
        sample += f", converged on {one.converged[place]:.0%}" if poor else ""
        note = f"± {number(error)}, {sample}" if error is not None else sample
        return Value(number(one.psnr[place]), "warn" if poor else "", note)

    lines = (
        Line(
            (Value(one.name, note=one.audit + (", few targets" if one.small else "")), *(point(one, n) for n in rounds))
        )
        for one in leakages
    )
    columns = (Column("attack, defence, attacker", False), *(Column(f"round {n}") for n in rounds))
    caption = (
        "Mean PSNR in dB over targets, ± its standard error. A tag marks where the attack converged on fewer than 80 % "
    )
    return Table(f"{caption}of them.", columns, tuple(lines))


def _information(rows: Sequence[Row]) -> Table:
    shares = ("1e-4", "1e-3", "1e-2")
    names = ["round", *(f"channel bound, noise {share}" for share in shares), "releases", "F_SAM - F", "lambda_max ≤"]
    names += ["curvature index (not a bound on information), log det", "the same, ball"]

    def line(row: Row) -> Line:
        channel, worst, index = (row["information"][name] for name in ("channel", "sharpness", "index"))
        growth = channel["growth"] or [None] * len(shares)
        return Line(
            (
                Value(str(row["round"])),
                *(
                    Value(number(value, 0), "", "" if share is None else f"{share:.0%} since half as many")
                    for value, share in zip(channel["nats"][-1], growth)
                ),
                Value(str(channel["counts"][-1])),
                Value(_short(worst["sharpness"]), "", f"one step {_short(worst['one_step'] - worst['loss'])}"),
                Value(
                    _short(worst["curvature_bound"]),
                    "" if worst["top"]["accepted"] else "warn",
                    "" if worst["top"]["accepted"] else f"eigenvector not settled: {worst['top']['residual']:.1g}",
                ),
                Value(number(index["determinant"], 0)),
                Value(number(index["ball"], 0), "", f"sharper {number(index['sharper'], 0)}"),
            )
        )

    measured = [row for row in rows if "information" in row]
    return Table("Nats, but for sharpness and eigenvalues.", tuple(map(Column, names)), tuple(map(line, measured)))


def _covariance(rows: Sequence[Row]) -> Table:
    matrices = {"hessian": "Hessian", "gauss_newton": "Gauss-Newton"}
    names = ("round", "matrix", "tr Σ", "tr H / B", "ratio", "largest of Σ", "largest of H / B", "mean's share")

    def line(row: Row, matrix: str) -> Line:
        test = row["information"]["covariance"][matrix]
        (covariance, curvature), (tops, others) = test["traces"], test["tops"]
        texts = (covariance, curvature, test["trace_ratio"], tops[0], others[0])
        cells = (Value(str(row["round"])), Value(matrices[matrix]), *(Value(_short(each)) for each in texts))
        return Line((*cells, Value(f"{test['mean_share']:.0%}")))

    lines = [
        line(row, matrix)
        for row in rows
        if "information" in row
        for matrix in matrices
        if matrix in row["information"]["covariance"]
    ]
    columns = tuple(Column(name, name != "matrix") for name in names)
    return Table("Covariance of single gradients beside the curvature of the same examples.", columns, tuple(lines))


def _associations(associated: Associated) -> tuple[str, str, Table]:
    from gradleak.curvature.result import sample, titled

    def cell(each: IntervalEstimate | None) -> Value:
        if each is None:
            return Value("-")
        return Value(f"{each.value:+.2f}", "", f"[{each.low:+.2f}, {each.high:+.2f}]")

    lines = tuple(
        Line(
            (
                Value(titled(name)),
                cell(each.plain),
                cell(each.partial),
                Value(str(0 if each.plain is None else each.plain.count)),
                _remark(each.plain, each.partial, each.reason),
            )
        )
        for name, each in associated.found.items()
    )
    names = (("curve", False), ("Spearman", True), ("partial", True), ("n", True), ("", False))
    rounds = f"{len(associated.rounds)} round{'s' * (len(associated.rounds) != 1)} that were both attacked and analysed"
    size = f"{sample(associated)}, of {rounds}." if sample(associated) else f"{rounds}: too few to correlate."
    caption = (
        "In brackets 95 % intervals. Partial: given the ranks of gradient norm and round; of these two, each given "
    )
    caption += "the other one only."
    return associated.leakage, size, Table(caption, tuple(Column(*each) for each in names), lines)


def _remark(plain: IntervalEstimate | None, partial: IntervalEstimate | None, reason: str) -> Value:
    known = [each for each in (plain, partial) if each is not None]
    remarks = []
    if any(each.degenerate for each in known):
        remarks.append("all resamples agree, which is no certainty")
    if lost := max((each.undefined for each in known), default=0.0):
        remarks.append(f"{lost:.0%} of resamples had no value")
    note = " ".join([*([", ".join(remarks) + "."] if remarks else []), reason]).strip()
    return Value("small sample", "warn", note) if known and known[0].small else Value("", "", note)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _flat(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in by_name(settings):
        listed = isinstance(value, (list, tuple))
        yield name, ", ".join(map(str, value)) or "none" if listed else "none" if value is None else str(value)
