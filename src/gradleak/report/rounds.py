"""Leakage over rounds beside curvature, and privacy against utility."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from gradleak.audit.verdict import strongest_of
from gradleak.report.curves import COLOURS, Chart, Series, chart
from gradleak.report.words import Words

if TYPE_CHECKING:
    from gradleak.audit.result import Row, Summary
    from gradleak.curvature.result import StudyResult
    from gradleak.scenario.kinds import Measure

CURVATURE = {"log_determinant": "Log-determinant of the Hessian", "highest": "Largest eigenvalue of the Hessian"}
MOST = 4  # charts of a run's own analyses
PERCENT = (0.0, 100.0)
UNMEASURED = "No curvature was measured for this run: gradleak analyse --audit measures it over the same rounds."
HOLLOW = "Hollow: the attack converged on fewer than 80 % of its targets."


@dataclass(frozen=True)
class Rounds:
    """Two panels over the same rounds: what leaked, and how curved the loss was. `hint`: why a panel is empty."""

    leakage: tuple[Chart, ...]
    curvature: tuple[Chart, ...]
    hint: str


def rounds(summaries: Sequence[Summary], grid: Sequence[Row], study: StudyResult | None) -> Rounds | None:
    """None if only one round was attacked: that is no curve."""
    lines = [line for line in summaries if line.targets and math.isfinite(line.recovered.value)]
    if len({line.round for line in lines}) < 2:
        return None
    curves, left_out = _strongest(lines)
    more = f" {left_out} weaker ones are in the table of results." if left_out else ""
    caption, words = f"The strongest attacker of each attack and defence. {HOLLOW}{more}", Words(lines[0].kind)
    leakage = (
        chart(
            _recovered(words),
            [_share(name, curve) for name, curve in curves],
            caption=f"Bands: 95 %. {caption}",
            within=PERCENT,
        ),
        chart(
            words.titled,
            [_scores(name, curve, words.headline) for name, curve in curves],
            caption=f"Mean over targets. {caption}",
            within=PERCENT if words.headline.percent else (),
        ),
    )
    curvature = tuple(_of_study(study)) if study is not None else tuple(_of_rows(grid))
    return Rounds(leakage, curvature, "" if curvature else UNMEASURED)


def _strongest(lines: Sequence[Summary]) -> tuple[list[tuple[str, list[Summary]]], int]:
    """For every attack, defence and batch size the form that recovers most in any round; as many as have a colour."""
    groups: dict[tuple[str, str, int], dict[str, list[Summary]]] = {}
    for line in lines:
        forms = groups.setdefault((line.attack, line.defence, line.examples), {})
        forms.setdefault(line.form, []).append(line)
    best = [(key, max(forms.values(), key=_reach)) for key, forms in groups.items()]
    best.sort(key=lambda entry: _reach(entry[1]), reverse=True)
    several = len({examples for (_, _, examples), _ in best}) > 1
    named = []
    for (attack, defence, examples), curve in best[:COLOURS]:
        against = "undefended" if defence == "none" else f"against {defence}, {curve[0].form}"
        named.append((f"{attack} {against}" + (f", B = {examples}" if several else ""), curve))
    return [(name, sorted(curve, key=lambda line: line.round)) for name, curve in named], max(0, len(best) - COLOURS)


def _reach(lines: Sequence[Summary]) -> tuple[int, float, float]:
    return max(line.strength for line in lines)


def _share(name: str, lines: Sequence[Summary]) -> Series:
    value, low, high = ([100 * getattr(line.recovered, each) for line in lines] for each in ("value", "low", "high"))
    return Series(name, [line.round for line in lines], value, low, high, [not line.optimised for line in lines])


def _recovered(words: Words) -> str:
    return f"{words.many.capitalize()} recovered, %"


def _scores(name: str, lines: Sequence[Summary], measure: Measure) -> Series:
    lines = [line for line in lines if math.isfinite(line.means.get(measure.name, math.nan))]
    doubtful, scale = [not line.optimised for line in lines], 100 if measure.percent else 1
    values = [scale * line.means[measure.name] for line in lines]
    return Series(name, [line.round for line in lines], values, doubtful=doubtful)


def _of_study(study: StudyResult) -> Iterator[Chart]:
    """The curves that `gradleak analyse` measured at the checkpoints of the same training."""
    name = study.folder.name if study.folder is not None else "a study"
    for key, title in CURVATURE.items():
        if (curve := study.curves.get(key)) is not None:
            hollow = [number in curve.doubtful for number in curve.rounds]
            series = Series(title, curve.rounds, curve.values, curve.low, curve.high, hollow)
            yield chart(title, [series], caption=f"From {name}. Bands: two standard errors, or a residual.")


def _of_rows(grid: Sequence[Row]) -> Iterator[Chart]:
    """What `Audit(analyses=...)` measured beside the scores, if it did so in several rounds."""
    measured: dict[str, dict[int, list[float]]] = {}
    for row in grid:
        for name, value in (row.get("analyses") or {}).items():
            if isinstance(value, (int, float)) and math.isfinite(value):
                measured.setdefault(str(name), {}).setdefault(int(row["round"]), []).append(float(value))
    several = [(name, values) for name, values in sorted(measured.items()) if len(values) > 1]
    for name, values in several[:MOST]:
        numbers = sorted(values)
        series = Series(name, numbers, [fmean(values[number]) for number in numbers])
        yield chart(name, [series], caption="Measured by this run; mean over the attacked updates.")


def scatter(summaries: Sequence[Summary]) -> Chart | None:
    """Test accuracy against recovered share, a point for each defence and round; None for fewer than two points."""
    groups: dict[tuple[str, int, int], list[Summary]] = {}
    for line in summaries:
        if line.targets and line.trained is not None and line.trained.test_accuracy is not None:
            groups.setdefault((line.defence, line.round, line.examples), []).append(line)
    several = len({examples for _, _, examples in groups}) > 1
    points = []
    for (defence, number, examples), lines in groups.items():
        best = strongest_of(lines)
        share, size = best.recovered, f", B = {examples}" if several else ""
        name = f"{'undefended' if defence == 'none' else defence}, round {number}{size}"
        place = [100 * best.trained.test_accuracy]  # type: ignore[union-attr, operator]
        low, high, hollow = [100 * share.low], [100 * share.high], [not best.optimised]
        points.append(Series(name, place, [100 * share.value], low, high, hollow))
    if len(points) < 2:
        return None
    caption = f"Whiskers: 95 % intervals. {HOLLOW} Accuracy is that of the training whose weights were attacked."
    title = _recovered(Words(summaries[0].kind))
    return chart(title, points, caption=caption, across="test accuracy, %", within=PERCENT)
