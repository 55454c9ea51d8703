"""What is each capability of the attacker worth? The same audit, with one of them taken away at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gradleak.observation import MissingKnowledge
from gradleak.results import AuditResult
from gradleak.results.verdict import strongest_of

if TYPE_CHECKING:
    from gradleak.audit import Audit, Progress


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
    """The whole audit, and one for each capability that it granted; a text where no attack can do without it."""

    whole: AuditResult
    without: dict[str, AuditResult | str]

    def table(self) -> str:
        """One line per defence and capability: recovered share, mean PSNR, and the change of it."""
        lines = [("defence", "without", "recovered", "PSNR", "change", "word")]
        for defence in dict.fromkeys(line.defence for line in self.whole.summaries):
            base = strongest_of(line for line in self.whole.summaries if line.defence == defence)
            reference = base.means.get("psnr", float("nan"))
            lines.append((defence, "-", str(base.recovered), f"{reference:.1f} dB", "", base.word))
            for name, found in self.without.items():
                if isinstance(found, str):
                    lines.append(("", name, "-", "-", "", found))
                    continue
                own = [line for line in found.summaries if line.defence == defence]
                if own:
                    best = strongest_of(own)
                    psnr = best.means.get("psnr", float("nan"))
                    change = f"{psnr - reference:+.1f} dB"
                    lines.append(("", name, str(best.recovered), f"{psnr:.1f} dB", change, best.word))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines)


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
    for name, capability in CAPABILITIES.items():
        if not capability.granted(audit):
            continue
        place = None if folder is None else folder.with_name(f"{folder.name}-without-{name}")
        try:
            without[name] = capability.taken(audit).run(place, progress=progress)
        except MissingKnowledge as problem:
            without[name] = f"cannot run: {problem}"
    return Ablation(whole, without)
