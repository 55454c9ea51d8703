"""What is each capability of the attacker worth? The same audit, with one of them taken away at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradleak.attack import require
from gradleak.audit.cells import named_attacks
from gradleak.audit.result import AuditResult
from gradleak.audit.summary import VOID, Summary
from gradleak.audit.verdict import strongest_of
from gradleak.scenario.observation import MissingKnowledge

if TYPE_CHECKING:
    from gradleak.audit import Audit
    from gradleak.core.listeners import Progress


@dataclass(frozen=True)
class Capability:
    """Something an attacker may be granted: does this audit grant it, and what is the audit without it?"""

    granted: Callable[[Audit], bool]
    taken: Callable[[Audit], Audit]


def _without_generator(audit: Audit) -> Audit:
    origin = {name: where for name, where in audit.origin.items() if name != "generator"}
    return replace(audit, generator=None, origin=origin)


CAPABILITIES: dict[str, Capability] = {
    "labels": Capability(
        lambda audit: "y" in audit.given,
        lambda audit: replace(audit, given=tuple(name for name in audit.given if name != "y")),
    ),
    "statistics": Capability(
        lambda audit: "statistics" not in audit.withheld and bool(dict(audit.task.model.named_buffers())),
        lambda audit: replace(audit, withheld=(*audit.withheld, "statistics")),
    ),
    "recipe": Capability(
        lambda audit: "recipe" not in audit.withheld,
        lambda audit: replace(audit, withheld=(*audit.withheld, "recipe")),
    ),
    "generator": Capability(
        lambda audit: audit.generator is not None,
        _without_generator,
    ),
    "defence": Capability(
        lambda audit: any(each not in (None, "none") for each in audit.defences) and set(audit.knowledge) != {"naive"},
        lambda audit: replace(audit, knowledge=("naive",)),
    ),
}


@dataclass(frozen=True, eq=False)
class Ablation:
    """The whole audit, and one for each capability that it granted; a text where no attack can do without it.

    `idle`: by capability, the attacks that cannot do without it and were left out of that audit.
    """

    whole: AuditResult
    without: dict[str, AuditResult | str]
    idle: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def table(self) -> str:
        """One line per defence and capability: recovered share, mean PSNR, and the change of it.

        The word is that of the strongest line, or void where the positive control of that audit failed.
        """
        lines = [("defence", "without", "recovered", "PSNR", "change", "word")]
        for defence in dict.fromkeys(line.defence for line in self.whole.summaries):
            base = strongest_of(line for line in self.whole.summaries if line.defence == defence)
            reference = base.means.get("psnr", float("nan"))
            lines.append((defence, "-", str(base.recovered), f"{reference:.1f} dB", "", _word(self.whole, base)))
            for name, found in self.without.items():
                if isinstance(found, str):
                    lines.append(("", name, "-", "-", "", found))
                    continue
                own = [line for line in found.summaries if line.defence == defence]
                if own:
                    best = strongest_of(own)
                    psnr = best.means.get("psnr", float("nan"))
                    change, word = f"{psnr - reference:+.1f} dB", _word(found, best)
                    if left := self.idle.get(name):
                        word += f" (left out, since they need it: {', '.join(left)})"
                    lines.append(("", name, str(best.recovered), f"{psnr:.1f} dB", change, word))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines)


def _word(found: AuditResult, line: Summary) -> str:
    return line.word if found.positive_control.passed else VOID


def _able(audit: Audit) -> tuple[Audit | None, dict[str, str]]:
    """The audit with the attacks that its knowledge is enough for (None: nobody is left), and why others are idle."""
    idle: dict[str, str] = {}
    for cell in audit.cells():
        try:
            require(cell.attack, cell.knows)
        except MissingKnowledge as problem:
            idle.setdefault(cell.attack_name, str(problem))
    names = [name for name, _ in named_attacks(audit.attacks)]
    kept = [attack for attack, name in zip(audit.attacks, names, strict=True) if name not in idle]
    return (replace(audit, attacks=kept) if kept else None), idle


def ablation(
    audit: Audit,
    out: str | Path | None = None,
    *,
    whole: AuditResult | None = None,
    progress: Progress | None = None,
) -> Ablation:
    """Run the audit, and again without each capability that it grants; into folders of their own beside `out`.

    `whole`: the audit itself, where it has been run already.
    """
    folder = None if out is None else Path(out)
    whole = audit.run(folder, progress=progress) if whole is None else whole
    without: dict[str, AuditResult | str] = {}
    idle: dict[str, tuple[str, ...]] = {}
    for name, capability in CAPABILITIES.items():
        if not capability.granted(audit):
            continue
        place = None if folder is None else folder.with_name(f"{folder.name}-without-{name}")
        less, unable = _able(capability.taken(audit))
        if less is None:
            without[name] = f"cannot run: {next(iter(unable.values()))}"
            continue
        idle |= {name: tuple(unable)} if unable else {}
        without[name] = less.run(place, progress=progress)
    return Ablation(whole, without, idle)
