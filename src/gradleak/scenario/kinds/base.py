"""What every kind of data says about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gradleak.core.assignment import pairwise_mse
from gradleak.core.similarity import EXACT, precise

if TYPE_CHECKING:
    from gradleak.scenario.fields import Field

TOLERANCE = 0.319
"""A number is right within this many standard deviations of its column (TabLeak: Vero et al., ICML 2023)."""


def flat(values: Tensor) -> Tensor:
    """One row for each example, (N, entries)."""
    return values.reshape(len(values), -1)


@dataclass(frozen=True)
class Measure:
    """A score of one example: its name in rows, its label in tables, and how it is printed.

    higher     a larger value is nearer to the private example
    percent    a share, printed in per cent
    column     tables have a column for it
    """

    name: str
    label: str
    unit: str = ""
    digits: int = 2
    higher: bool = True
    percent: bool = False
    column: bool = True

    @property
    def sign(self) -> int:
        """A value times its sign is larger when it is nearer to the private example."""
        return 1 if self.higher else -1

    def plain(self, value: float | None) -> str:
        """A value without its unit: 31.4, or 96%."""
        if value is None or value != value:
            return "-"
        return f"{value:.0%}" if self.percent else f"{value:.{self.digits}f}"

    def format(self, value: float | None) -> str:
        """A value with its unit: 31.4 dB, or 96%."""
        text = self.plain(value)
        return f"{text} {self.unit}" if self.unit and text != "-" else text

    def stated(self, value: float | None) -> str:
        """A value with its label: PSNR 31.4 dB, or 96% columns right."""
        return f"{self.format(value)} {self.label}" if self.percent else f"{self.label} {self.format(value)}"


@dataclass(frozen=True)
class Threshold:
    """A named test of one score: at least this much, or more than it (`strict`)."""

    name: str
    measure: str
    least: float
    strict: bool = True

    def passed(self, scores: Mapping[str, Tensor]) -> Tensor:
        value = scores[self.measure]
        return value > self.least if self.strict else value >= self.least


@dataclass(frozen=True)
class Cell:
    """One entry of an example in words: a column of a table, or a token.

    right       was it recovered, in its place?
    elsewhere   was it found, but not in its place?
    """

    name: str
    true: str
    found: str
    right: bool
    elsewhere: bool = False


@dataclass(frozen=True, eq=False)
class Exhibit:
    """What a report shows of one private example and of its reconstruction. A kind fills what it has.

    pictures   (true, found), each (C, H, W) in [0, 1]
    cells      entries side by side
    curves     (true, found), each (channels, time)
    running    cells are the words of a text rather than the columns of a row
    joined     what stands between those words; nothing, where they bring their own spaces
    left_out   cells that a kind leaves out, since an example has too many
    unit       of the numbers, where the kind compares them in another unit than the data have
    """

    pictures: tuple[Tensor, Tensor] | None = None
    cells: tuple[Cell, ...] = ()
    curves: tuple[Tensor, Tensor] | None = None
    running: bool = False
    joined: str = " "
    left_out: int = 0
    unit: str = ""


@dataclass(frozen=True)
class Kind:
    """One kind of data. Its fields are what an example of the kind needs besides its shape, such as column names.

    Searching, for one field of a batch:

    continuous   its values are numbers that a search moves directly
    soft         the loss also takes values between the discrete ones (class probabilities, shares)
    axes         axes of an example along which neighbours resemble each other
    relaxed      shape of an example's unknowns
    decode       unknowns to what the loss takes

    Comparing. `comparable` turns values (..., *shape) into a form that the other methods take, with examples first;
    `reference`: real examples that are not the client's, in model-input space, or None. Scores are per example.
    """

    name: ClassVar[str] = ""
    noun: ClassVar[tuple[str, str]] = ("example", "examples")
    entries: ClassVar[str] = "entry"  # what a certificate counts
    pictures: ClassVar[bool] = False  # an example is a picture (channels, height, width)
    continuous: ClassVar[bool] = True
    soft: ClassVar[bool] = True
    embedded: ClassVar[bool] = False  # ids that the model looks up in an embedding
    measures: ClassVar[tuple[Measure, ...]] = ()
    thresholds: ClassVar[tuple[Threshold, ...]] = ()
    needed: ClassVar[tuple[str, ...]] = ()  # thresholds that make an example recovered, together with rank 1
    controlled: ClassVar[str] = ""  # the measure that the positive control looks at; empty: the first
    control: ClassVar[float] = 0.0  # its median that the positive control needs
    rule: ClassVar[str] = ""  # ends "An example is recovered when ..."; rank 1 is asked besides

    # --- as text ---------------------------------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        """Its own fields as plain values, for run.toml."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Kind:
        """The kind that `settings` describes."""
        return cls(**settings)

    @property
    def headline(self) -> Measure:
        """The measure that tables are sorted by."""
        return self.measures[0]

    @property
    def control_measure(self) -> Measure:
        """The measure that shows whether an attack works at all on this model."""
        return next((each for each in self.measures if each.name == self.controlled), self.headline)

    # --- searching -------------------------------------------------------------------------------------------------

    def misfit(self, shape: tuple[int, ...]) -> str:
        """Why an example of this shape cannot be of the kind; empty if it can."""
        return ""

    def axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return ()

    def relaxed(self, field: Field) -> tuple[int, ...]:
        return field.shape

    def decode(self, v: Tensor, field: Field) -> Tensor:
        return v

    def blank(self) -> int:
        """The class or id that fills a blank example of a categorical field."""
        return 0

    def allowed(self, value: Tensor, field: Field) -> str:
        """What is wrong with values (N, *shape) of a client; empty if nothing is."""
        return ""

    # --- comparing -------------------------------------------------------------------------------------------------

    def comparable(self, value: Tensor, field: Field, reference: Tensor | None = None) -> Tensor:
        return precise(value).nan_to_num(nan=0.0, posinf=1e6, neginf=-1e6)

    def distance(self, first: Tensor, second: Tensor) -> Tensor:
        """Of every pair, (n, m): by it reconstructions are matched to private examples."""
        return pairwise_mse(flat(first), flat(second))

    def look_up(self, first: Tensor, second: Tensor) -> Tensor:
        """Of every pair, (n, m): by it a reconstruction is looked up among real examples."""
        return self.distance(first, second)

    def same(self, first: Tensor, second: Tensor) -> Tensor:
        """Which pairs are copies of each other, (n, m)."""
        return pairwise_mse(flat(precise(first)), flat(precise(second))) < EXACT

    def scores(self, found: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Every measure of matched pairs (N, ...), each (N,)."""
        raise NotImplementedError

    def hits(self, scores: Mapping[str, Tensor], first: Tensor | None) -> dict[str, Tensor]:
        """Which examples pass each threshold. `first`: the private example is at rank 1, where there is a gallery."""
        passed = {each.name: each.passed(scores) for each in self.thresholds}
        if first is None:
            return passed
        together = torch.stack([first, *(passed[name] for name in self.needed)]).all(0)
        return {**passed, "rank1": first, "recovered": together}

    def guesses(self, truth: Tensor, others: Tensor | None) -> dict[str, Tensor]:
        """What can be said without the update, by name: comparable values that broadcast to the truth (N, ...)."""
        return {}

    # --- showing ---------------------------------------------------------------------------------------------------

    def text(self, value: Tensor) -> str:
        """One example as a line of running text; empty if it is none."""
        return ""

    def exhibit(self, true: Tensor, found: Tensor, field: Field) -> Exhibit:
        """One example and its reconstruction, both comparable, for a report."""
        raise NotImplementedError
