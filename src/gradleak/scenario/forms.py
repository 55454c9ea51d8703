"""What an attacker knows of a defence: the five forms that every audit row names."""

from __future__ import annotations

from enum import Enum

from gradleak.scenario.defence import Defence, OnlyVisible, overrides


class AttackerForm(str, Enum):
    """What the attacker knows of the defence, from the least to the most informed; spelled as in the rows."""

    UNDEFENDED = "undefended"  # there is no defence
    NAIVE = "naive"  # A0: ignores the defence, as most papers report
    MASKED = "masked"  # A1: predicts plainly, weighs out what was noised or dropped
    ADAPTIVE = "adaptive"  # A2: predicts through the defence
    AVERAGED = "averaged"  # A2 that saw the same client in several rounds: fresh noise averages out

    def __str__(self) -> str:
        return self.value

    @property
    def label(self) -> str:
        """The form with its rank in the literature, as tables show it: "A0 naive"."""
        return _LABELS.get(self, self.value)

    def known(self, defence: Defence | None) -> Defence | None:
        """The part of the defence that this attacker knows, as `Knowledge.defence` takes it."""
        if self in (AttackerForm.UNDEFENDED, AttackerForm.NAIVE) or defence is None:
            return None
        return OnlyVisible(defence) if self is AttackerForm.MASKED else defence


_LABELS = {
    AttackerForm.NAIVE: "A0 naive",
    AttackerForm.MASKED: "A1 masked",
    AttackerForm.ADAPTIVE: "A2 adaptive",
    AttackerForm.AVERAGED: "A2, rounds averaged",
}
DEFENDED = tuple(AttackerForm)[1:]  # the forms against a defence


def hides_entries(defence: Defence) -> bool:
    """Does it noise or drop entries in a way that a masked attacker can weigh out?"""
    return overrides(defence, "noise_variance") or overrides(defence, "visible")
