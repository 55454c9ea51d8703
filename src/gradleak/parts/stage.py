"""A stage: the parts of one search, put together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradleak.parts.protocols import NOTHING, Match, Needs, Optimiser, Part, Prediction, Prior, Space
from gradleak.parts.view import TargetView


@dataclass(frozen=True)
class Stage:
    """One search: a space, a prediction, a match, priors and an optimiser.

    `carry`: the next stage starts each lane from its own solution ("each"), or from that of the best lane of its target
    ("best_of_target"). `view`: turns the scene into the one that the stage sees, such as a smoothed network.
    """

    space: Space
    predict: Prediction
    match: Match
    priors: tuple[Prior, ...]
    optimiser: Optimiser
    carry: str = "each"
    view: Callable[[TargetView], TargetView] | None = None

    def __post_init__(self) -> None:
        if self.carry not in ("each", "best_of_target"):
            raise ValueError(f"carry must be 'each' or 'best_of_target'; given {self.carry!r}.")
        demand_part("space", self.space, Space)
        demand_part("predict", self.predict, Prediction)
        demand_part("match", self.match, Match)
        demand_part("optimiser", self.optimiser, Optimiser)
        for prior in self.priors:
            demand_part("priors", prior, Prior)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts of the search."""
        return (self.space, self.predict, self.match, self.optimiser, *self.priors)

    @property
    def needs(self) -> Needs:
        """The knowledge that this search needs (`Knowledge.grants`)."""
        needs = NOTHING.union(*(part.needs for part in self.parts))
        # An update is lr times a gradient: a match that sees the scale fails silently with the wrong one.
        return needs if self.match.scale_free else needs | self.predict.needs_for_scale


def demand_part(place: str, part: object, base: type) -> None:
    """Refuse what does not inherit the base class of its kind, which has a default for every member."""
    if not isinstance(part, base):
        kind = type(part).__name__
        raise TypeError(
            f"{place} takes a {base.__name__}; given a {kind}, which is not one. Let it inherit "
            f"gradleak.parts.protocols.{base.__name__}: class {kind}({base.__name__})."
        )
