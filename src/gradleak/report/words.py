"""How the report speaks of private data of one kind: images, rows of a table, series, texts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gradleak.scenario.kinds import Kind, Measure


@dataclass(frozen=True)
class Words:
    """Nouns, rules and labels of a kind, as sentences of the report need them."""

    kind: Kind

    @property
    def one(self) -> str:
        return self.kind.noun[0]

    @property
    def many(self) -> str:
        return self.kind.noun[1]

    @property
    def shown(self) -> str:
        """What the gallery counts."""
        return "pictures" if self.kind.pictures else self.many

    @property
    def gallery(self) -> str:
        """The name of the gallery in the menu."""
        return "Pictures" if self.kind.pictures else f"Recovered {self.many}"

    @property
    def entries(self) -> str:
        """What an example consists of: pixels, entries."""
        name = self.kind.entries
        return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """Those with a column in tables, the headline first."""
        return tuple(measure for measure in self.kind.measures if measure.column)

    @property
    def headline(self) -> Measure:
        return self.kind.headline

    @property
    def mean(self) -> str:
        """The mean PSNR, or the mean share of columns right, without the article."""
        return f"mean {'share of ' * self.headline.percent}{self.headline.label}"

    @property
    def titled(self) -> str:
        """The headline with its unit, over a chart: PSNR, dB."""
        unit = "%" if self.headline.percent else self.headline.unit
        return f"{self.headline.label}{f', {unit}' if unit else ''}"

    @property
    def means(self) -> str:
        """The scores of which tables show the mean: PSNR and SSIM."""
        *first, last = (measure.label for measure in self.measures)
        return f"{', '.join(first)} and {last}" if first else last

    @property
    def direction(self) -> str:
        """In which direction numbers mean more leakage."""
        lower = ", ".join(measure.label for measure in self.measures if not measure.higher)
        return f"Higher numbers mean more leakage{f'; of {lower}, lower ones do' if lower else ''}."

    @property
    def rule(self) -> str:
        """When an example counts as recovered; that it is nearest in a gallery is asked besides."""
        return self.kind.rule.replace(" > ", " above ")

    @property
    def recovered(self) -> str:
        """The rule as a sentence, without its full stop."""
        rule = self.kind.rule.replace(" > ", " is above ", 1).replace(" > ", " above ")
        article = "an" if self.one[0] in "aeiou" else "a"
        return (
            f"{article} {self.one} counts as recovered when {rule}, and no other real {self.one} of a gallery is "
            "nearer to the reconstruction"
        )
