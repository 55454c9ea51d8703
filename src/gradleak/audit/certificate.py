"""The certificates of one line of the table, taken together: for how many targets does the update fix the images?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from gradleak.core.files import Row

DETERMINED, OPEN = "determined", "not determined"


@dataclass(frozen=True)
class Certified:
    """Counts are of certificates, one per target and seed; None where no certificate has such a number."""

    count: int
    determined: int
    partly: int  # up to some dimensions
    dimensions: int  # of the freest of those
    share: float | None  # of the images' variance that is fixed in those, on average
    residual: float | None  # the largest of all that certify something
    smallest: float | None  # singular value, of the determined
    relative: float | None  # the same, by the largest singular value of its target

    @staticmethod
    def of(rows: Iterable[Row]) -> Certified | None:
        """None where no row has a certificate."""
        held = [row["certificate"] for row in rows if row.get("certificate")]
        if not held:
            return None
        whole = [entry for entry in held if entry["verdict"] == DETERMINED]
        partly = [entry for entry in held if entry["verdict"] not in (DETERMINED, OPEN)]
        shares = [entry["share"] for entry in partly if entry["share"] is not None]
        residuals = [entry["residual"] for entry in (*whole, *partly) if entry["residual"] is not None]
        values = [(entry["smallest"], entry["largest"]) for entry in whole if entry["smallest"] and entry["largest"]]
        return Certified(
            count=len(held),
            determined=len(whole),
            partly=len(partly),
            dimensions=max((entry["null"] for entry in partly), default=0),
            share=fmean(shares) if shares else None,
            residual=max(residuals, default=None),
            smallest=min((small for small, _ in values), default=None),
            relative=min((small / large for small, large in values), default=None),
        )

    def __str__(self) -> str:
        parts = []
        if self.determined:
            parts.append(f"{self.determined} of {self.count} determined: the update fixes every pixel")
        if self.partly:
            fixed = "" if self.share is None else f", {self.share:.0%} of the images' variance fixed"
            parts.append(f"{self.partly} of {self.count} determined up to {self.dimensions:,} dimensions{fixed}")
        if rest := self.count - self.determined - self.partly:
            parts.append(f"{rest} of {self.count} not determined: no exact solution was found, or most is left open")
        if self.residual is not None:
            parts.append(f"residual {self.residual:.0e}")
        if self.smallest is not None:
            parts.append(f"smallest singular value {self.smallest:.0e} ({self.relative:.0e} of the largest)")
        return "; ".join(parts)
