"""What the attacker was assumed to know: one entry for every capability, granted or not, and what it means.

Attacks of the literature often assume more than they say: private labels, batch statistics, the client's recipe (Huang
et al., NeurIPS 2021). Here every assumption of a run stands in a list that is read off its settings and rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradleak.core.files import Row


@dataclass(frozen=True)
class Assumption:
    """`granted`: True, False, or "in part" where some lines have it and others do not."""

    capability: str
    granted: bool | str
    text: str

    def __str__(self) -> str:
        word = self.granted if isinstance(self.granted, str) else "granted" if self.granted else "not granted"
        return f"{self.capability}: {word}. {self.text}"

    def record(self) -> dict[str, Any]:
        return asdict(self)


def ledger_of(settings: Mapping[str, Any], rows: Sequence[Row]) -> tuple[Assumption, ...]:
    """Every assumption of a run."""
    given, withheld = set(settings.get("given", ())), set(settings.get("withheld", ()))
    fields = settings.get("fields", {})
    recipe = dict(settings.get("federation", {}).get("training", {}))
    forms = {row["form"] for row in rows if row["defence"] != "none"}
    steps = ", ".join(f"{name} {recipe[name]}" for name in ("lr", "steps", "epochs", "batch_size") if recipe.get(name))
    found = [
        Assumption("model and loss", True, "The server sent the model itself. Without them the level would be A."),
        Assumption("number of examples", True, "As the client reports it, for weighting the average."),
        Assumption("labels", "y" in given, _labels("y" in given, "y" in fields)),
        *(
            Assumption(name, name in given, f"A field of the private batch: {_of_field(name, name in given)}")
            for name in fields
            if name not in ("x", "y")
        ),
        Assumption(
            "recipe",
            "recipe" not in withheld,
            f"The client's {steps or 'local training'}; its shuffle and random numbers are never granted."
            if "recipe" not in withheld
            else "Learning rate, steps and optimiser are unknown: attacks that need them cannot run.",
        ),
        Assumption(
            "batch statistics",
            "statistics" not in withheld,
            "Buffers that the upload carries, where the model has BatchNorm and no defence withholds them.",
        ),
        _defence(forms),
        Assumption(
            "generator",
            "generator" in settings.get("fingerprint", {}),
            "A prior of the attacker's own, trained on other data than the clients'."
            if "generator" in settings.get("fingerprint", {})
            else "No prior beyond smoothness.",
        ),
        Assumption(
            "public data", False, "None of the attacker's own: settings are fixed, and not tuned on proxy clients."
        ),
        Assumption("private data", False, "Truth enters at the score; attack code cannot import it."),
    ]
    return tuple(found)


def _labels(granted: bool, there: bool) -> str:
    if not there:
        return "The task has none."
    return "Used as they are." if granted else "Read off the update by each attack; their accuracy is scored apart."


def _of_field(name: str, granted: bool) -> str:
    return "used as it is." if granted else f"{name} is guessed, read off or searched for."


def _defence(forms: Iterable[str]) -> Assumption:
    """What attackers know of a defence: several forms run side by side, and the strongest is the headline."""
    informed = {"masked", "adaptive", "averaged"} & set(forms)
    if not set(forms):
        return Assumption("defence", False, "No defence was audited.")
    if not informed:
        return Assumption("defence", False, "Attackers ignore it: no evidence against one who knows it.")
    told = f"Attacked in the forms {', '.join(sorted(forms))}; the strongest is the headline."
    return Assumption("defence", True if "naive" not in forms else "in part", told)
