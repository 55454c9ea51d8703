"""The threshold of continuous integration: does a run recover more than is allowed?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult


def crossed(result: AuditResult, share: float) -> str:
    """Why the run must not pass: a line recovers more than `share`, or the run shows nothing. Empty: it passes."""
    if result.verdict.word in ("void", "inconclusive"):
        return f"the run is {result.verdict.word}, so it cannot show that at most {share:.0%} is recovered."
    lines = [line for line in result.summaries if math.isfinite(line.recovered.value)]
    worst = max(lines, key=lambda line: line.recovered.value, default=None)
    if worst is None:
        return f"no line of the run has a result, so it cannot show that at most {share:.0%} is recovered."
    if worst.recovered.value <= share:
        return ""
    return (
        f"{worst.attack} against {worst.defence} ({worst.form}) recovered {worst.recovered.value:.0%} of the "
        f"{worst.kind.noun[1]}, which is above the stated {share:.0%}."
    )
