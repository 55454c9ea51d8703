"""What an attack with spans says of its own result, without the truth: one form for all of these attacks.

The attack puts one `SpanCertificate.record()` for each target into `settings["spans"]` of its result. From there it
goes into the rows of an audit and its report. Nothing on this way asks which attack it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class LayerCertificate:
    """What one layer tells of all examples together.

    rank         directions of its gradient above the rounding; None: not counted
    rows         of all examples: the rank if everything is told; None: not counted
    unexplained  share of its equations that its inputs, as solved for, do not meet; None: they were not solved for
    gap          the same share of the next solution, which has to be clearly larger; None: there is no other
    """

    layer: str
    rank: int | None = None
    rows: int | None = None
    unexplained: float | None = None
    gap: float | None = None

    @staticmethod
    def of(record: Any) -> LayerCertificate:
        """Read back from a row; a ValueError says what is wrong with it."""
        if not isinstance(record, Mapping) or not isinstance(record.get("layer"), str):
            raise ValueError(f"spans.layers should be objects with a layer; one is {record!r:.60}")
        counts = {name: record.get(name) for name in ("rank", "rows")}
        shares = {name: record.get(name) for name in ("unexplained", "gap")}
        if not all(count is None or _is_count(count) for count in counts.values()):
            raise ValueError(f"spans.layers should have whole numbers or null for rank and rows; given {counts!r:.60}")
        if not all(map(_is_number, shares.values())):
            raise ValueError(f"spans.layers should have numbers or null for unexplained and gap; given {shares!r:.60}")
        return LayerCertificate(record["layer"], **counts, **shares)


@dataclass(frozen=True)
class SpanCertificate:
    """What the layers tell of the examples of one target.

    examples  in the update
    layer     whose inputs tell the examples apart; empty: none does
    outside   for each example that was told apart, how far what was found is from what the layers tell of it, as a
              share: at the truth 0, to rounding; None: not finite
    proved    how many of these examples agree with the layers as only inputs of the client do, and were returned
    layers    in the order of the forward pass
    reason    why some are not proved, in sentences; empty: all are, or there is nothing to add

        settings["spans"] = [SpanCertificate(4, "features.9", outside, proved=4, layers=layers).record(), ...]
    """

    examples: int
    layer: str
    outside: tuple[float | None, ...]
    proved: int
    layers: tuple[LayerCertificate, ...]
    reason: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.proved <= self.apart <= self.examples or not self.examples:
            raise ValueError(
                f"spans should have proved <= told apart <= examples; given {self.proved}, {self.apart} and "
                f"{self.examples}"
            )

    @property
    def apart(self) -> int:
        """Examples that were told apart."""
        return len(self.outside)

    @property
    def solved(self) -> tuple[LayerCertificate, ...]:
        """The layers whose inputs were solved for, the earliest first."""
        return tuple(layer for layer in self.layers if layer.unexplained is not None)

    def __str__(self) -> str:
        noun = "example is" if self.examples == 1 else "examples are"
        if not self.apart:
            text = "No layer tells the examples apart."
        elif not self.proved:
            text = f"{self.apart} of {self.examples} {noun} told apart by layer {self.layer}. Nothing is proved."
        else:
            text = (
                f"{self.proved} of {self.examples} {noun} told by layer {self.layer}: this is proved without the truth."
            )
        others = "The others are open." if 0 < self.proved < self.examples else ""
        return " ".join(filter(None, (text, others, self.reason)))

    def record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def of(record: Any) -> SpanCertificate:
        """Read back from a row; a ValueError says what is wrong with it."""
        if not isinstance(record, Mapping):
            raise ValueError(f"spans should be an object or null; it is {record!r:.60}")
        values: dict[str, Any] = {name: record.get(name) for name in ("examples", "layer", "proved", "reason")}
        outside, layers = record.get("outside"), record.get("layers")
        if not all(_is_count(values[name]) for name in ("examples", "proved")):
            raise ValueError("spans should have whole numbers for examples and proved")
        if not all(isinstance(values[name], str) for name in ("layer", "reason")):
            raise ValueError("spans should have texts for layer and reason")
        if not isinstance(outside, (list, tuple)) or not all(map(_is_number, outside)):
            raise ValueError(f"spans.outside should list numbers or null; it is {outside!r:.60}")
        if not isinstance(layers, (list, tuple)):
            raise ValueError(f"spans.layers should be a list; it is {layers!r:.60}")
        return SpanCertificate(**values, outside=tuple(outside), layers=tuple(map(LayerCertificate.of, layers)))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and abs(value) < 1e300)
