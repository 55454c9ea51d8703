"""The members of `auto`: when each applies, and its settings for each budget. One table, no other rule.

The order is that of the run. A preset runs the members that have settings for it. An attack declares what it needs to
know (`Attack.needs`); the table says what it applies to, by traits of the case alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradleak.attack import Attack
from gradleak.attacks.second_order import MOST_DENSE
from gradleak.auto.traits import Case
from gradleak.core import registry

PRESETS = ("quick", "standard", "thorough")
STEPS = ("steps", "fine_steps", "weight_steps")  # settings that count steps, in whatever attack
POLISH = "polish"

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Member:
    """One attack of the ensemble.

    attack     its registered name; "polish": second-order steps from the best candidate so far
    applies    whether it applies to a case, for any budget
    presets    settings by preset
    limits     by preset, the most unknowns that a target may have; none: any number
    tried      settings, and the values that tuning on proxy clients may choose from
    read       settings that the case itself gives, such as the number of blocks of a generator
    forms      presets in which less informed attackers run it too (A1 and A0 beside A2)
    label      its name in the trace, where one attack is a member twice
    """

    attack: str
    applies: Callable[[Case], bool]
    presets: Mapping[str, Settings]
    limits: Mapping[str, int] = field(default_factory=dict)
    tried: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    read: Callable[[Case], Settings] = lambda case: {}
    forms: tuple[str, ...] = ("standard", "thorough")
    label: str = ""

    @property
    def name(self) -> str:
        return self.label or self.attack

    def fits(self, case: Case, preset: str) -> bool:
        return preset in self.presets and case.unknowns <= self.limits.get(preset, case.unknowns) and self.applies(case)

    def settings(self, preset: str, steps: int | None, **other: Any) -> dict[str, Any]:
        """The settings of this preset, replaced by `other`; no count of steps above `steps`."""
        chosen = {**self.presets[preset], **other}
        if steps is None:
            return chosen
        known = ("steps",) if self.attack == POLISH else registry.entry("attack", self.attack).settings
        counts = {name: chosen.get(name) for name in STEPS if name in known}
        return {**chosen, **{name: min(steps, steps if count is None else count) for name, count in counts.items()}}

    def make(self, settings: Settings) -> Attack:
        made: Attack = registry.get("attack", self.attack, **settings)
        return made


def _any(**settings: Any) -> dict[str, Settings]:
    return dict.fromkeys(PRESETS, settings)


def _of(quick: Settings | None = None, standard: Settings | None = None, thorough: Settings | None = None) -> Any:
    presets = dict(zip(PRESETS, (quick, standard, thorough), strict=True))
    return {name: settings for name, settings in presets.items() if settings is not None}


_DENSE = {"quick": 1024, "standard": MOST_DENSE}
_VARIATION = {"tv": (1e-6, 1e-4, 1e-2)}

MEMBERS: tuple[Member, ...] = (
    Member("analytic", lambda case: case.numeric and case.single and case.linear_first, _any(), forms=()),
    Member(
        "sparse-span",
        lambda case: case.relu_first and case.gradients and not case.signs and (case.steps or 1) <= 100,
        _of({"waves": 4}, {}, {"waves": 60}),
        forms=(),
    ),
    Member("vit", lambda case: case.patched and case.gradients and not case.signs, _any(), forms=()),
    Member(
        "span",
        lambda case: case.mapped and not case.signs,
        _of({"steps": 150, "repairs": 0, "fine_steps": 0}, {"repairs": 1, "fine_steps": 0}, {}),
        forms=(),
    ),
    # Rows of a table.
    Member(
        "tableak",
        lambda case: case.table and (case.steps or 1) <= 8,
        _of({"steps": 300, "restarts": 4}, {"steps": 600, "restarts": 10}, {}),
    ),
    # Texts.
    Member(
        "span-text",
        lambda case: case.text and case.gradients and not case.signs,
        _of({"waves": 2, "beam": 64}, {}, {"waves": 30}),
        forms=(),
    ),
    Member("token-rows", lambda case: case.text, _any(), forms=()),
    Member(
        "tag",
        lambda case: case.text and (case.steps or 1) <= 8,
        _of(None, {"steps": 300, "restarts": 2}, {"restarts": 4}),
    ),
    Member(
        "lamp",
        lambda case: case.text and (case.steps or 1) <= 8,
        _of(None, {"steps": 300, "candidates": 20, "starts": 50}, {}),
    ),
    # Least squares, wherever a replay can follow the client.
    Member(
        "second-order",
        lambda case: case.followed and not case.text and (case.steps or 1) <= 8,
        _of({"certify": False}, {"certify": False}, {"certify": False, "restarts": 4}),
        limits=_DENSE,
    ),
    # One gradient of a classifier.
    Member(
        "sparse-span",
        lambda case: case.relu_head and case.gradients and not case.signs and case.single,
        _of({"waves": 4, "steps": 100, "fine_steps": 100, "restarts": 2}, {}, {"waves": 60, "restarts": 8}),
        forms=(),
        label="sparse-span, features",
    ),
    Member(
        "cpl",
        lambda case: case.numeric and case.single and case.smooth,
        _of({"steps": 300}, {"steps": 1000}, {"steps": 6000, "restarts": 2}),
        tried={"alpha": (0.0, 0.5)},
    ),
    Member(
        "idlg",
        lambda case: case.numeric and case.single and case.smooth,
        _of(None, {"steps": 1000}, {"steps": 6000, "restarts": 2}),
    ),
    Member(
        "ig",
        lambda case: case.numeric and case.single,
        _of({"steps": 300, "tv": 1e-4}, {"steps": 2000, "tv": 1e-4, "restarts": 2}, {"restarts": 4}),
        tried=_VARIATION,
        forms=PRESETS,
    ),
    Member(
        "ig",
        lambda case: case.numeric and case.single and not case.smooth,
        _of(None, {"steps": 2000, "tv": 1e-2, "restarts": 2}, {"steps": 8000, "tv": 1e-2, "restarts": 4}),
        label="ig, stronger prior",
    ),
    Member(
        "gi",
        lambda case: case.numeric and case.single and case.normed,
        _of(None, {"steps": 2000}, {"steps": 10000}),
        tried={"batch_norm": (0.0, 0.1)},
    ),
    Member(
        "sign-matching",
        lambda case: case.numeric and case.signs,
        _of({"steps": 300}, {"steps": 2000}, {"restarts": 4}),
    ),
    # With a generator of images.
    Member(
        "gias",
        lambda case: case.numeric and case.generator,
        _of({"steps": 150, "weight_steps": 0}, {"steps": 1000, "weight_steps": 1000}, {}),
    ),
    Member(
        "gifd",
        lambda case: case.numeric and case.generator,
        _of(None, {"steps": 300, "restarts": 2}, {}),
        read=lambda case: {"features": case.blocks},
    ),
    Member("ggl", lambda case: case.numeric and case.generator, _of(None, {"steps": 100}, {})),
    # Several local steps.
    Member(
        "coarse-replay",
        lambda case: case.numeric and case.several,
        _of({"steps": 150, "coarse": 5}, {"steps": 600, "coarse": 10}, {"steps": 1000, "coarse": 20}),
        tried={"tv": (5e-4, 5e-3, 5e-2)},
    ),
    Member(
        "sme",
        lambda case: case.numeric and case.several,
        _of({"steps": 150}, {"steps": 600}, {}),
        forms=PRESETS,
    ),
    Member("nl-sme", lambda case: case.numeric and case.several, _of(None, {"steps": 600}, {})),
    Member("fedleak", lambda case: case.numeric and case.several, _of(None, None, {})),
    Member(
        "dlfa",
        lambda case: case.numeric and 1 < (case.steps or 0) <= 100 and not case.aggregate,
        _of(None, {"steps": 200}, {}),
    ),
    # Denoisers; what Knowledge gives is used instead of searched for.
    Member(
        "span-dm",
        lambda case: case.denoiser and case.single,
        _of({"steps": 100, "fine_steps": 100, "waves": 2}, {}, {"steps": 700, "fine_steps": 1500}),
    ),
    Member(
        "dlg-dm",
        lambda case: case.denoiser,
        _of(*({"steps": n, "noise": "unknown", "restarts": 4} for n in (300, 1000, 6500))),
        read=lambda case: {"t": case.step_rule},
    ),
    Member(
        "dlg-dm",
        lambda case: case.denoiser and "noise" not in case.knows.given,
        _of(*({"steps": n, "noise": "unknown", "param": "xt_q", "restarts": 4} for n in (300, 1000, 6500))),
        read=lambda case: {"t": case.step_rule},
        label="dlg-dm, noised image and residual",
    ),
    Member(
        "spectral-dm",
        lambda case: case.denoiser and case.single,
        _of(*({"steps": n, "noise": "unknown", "t": "analytic", "restarts": 4} for n in (300, 800, 1500))),
    ),
    Member(
        "gidm",
        lambda case: case.sampler,
        _of(None, {"steps": 500, "fine_steps": 500}, {}),
        read=lambda case: {"t": case.step_rule},
    ),
    # The best candidate, to the last digit. Of a client that no replay can follow it would only fit the errors.
    Member(
        POLISH,
        lambda case: (
            case.followed
            and not case.text
            and (case.steps or 1) <= 8
            and (not case.denoiser or "noise" in case.knows.given)
        ),
        _of({"steps": 12}, {"steps": 30}, {"steps": 60}),
        limits=_DENSE,
        forms=(),
    ),
)
