"""Is `auto` with knowledge of the defence at least as strong as every single attack? Over all defences of the project.

    python benchmarks/auto_comparison.py small     # benchmarks/results/auto-comparison-small.json; some 15 minutes
    python benchmarks/auto_comparison.py cifar     # the same for LeNet on 32 x 32 pixels; hours on a CPU, so for a GPU

Two audits of the same clients: `auto` with all it may know of each defence, and each single attack in every form that
differs (A0, A1, A2). A defence is compared where the answers of `auto`, or those of the best single attack, are
certified: the update then determines the image, and whoever explains it better has the better image. There `auto` must
come within 0.3 dB of the best, or above; results above 60 dB count as exact and equal. Elsewhere the gap is told and
nothing is claimed.

It resumes where it was stopped: finished cells are kept in runs/. `--defences` adds some of them to what is stored;
what has not been run yet is told as such.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gradleak as gl
from gradleak.audit import AuditError
from gradleak.auto import VERSION
from gradleak.core.environment import describe

WITHIN = 0.3  # dB
EXACT = 60.0  # dB from which two results are the same image
KNOWN = ("naive", "masked", "adaptive")


@dataclass(frozen=True)
class Scale:
    """What is compared, and how large. `settings`: of defences whose defaults are for another network or other data."""

    text: str
    data: str
    auto: str
    single: tuple[str, ...]
    targets: int
    settings: tuple[tuple[str, str], ...]
    lr: float = 1.0


SCALES = {
    "small": Scale(
        "small: one convolution and one linear layer, untrained, handwritten digits of 8 x 8, one example, one step",
        "digits",
        "auto:preset=quick,steps=150",
        ("second-order", "cpl:steps=150", "ig:steps=150", "sign-matching:steps=150"),
        targets=2,
        settings=(("agp", "layers=0"), ("fedsai", "public=faces,images=200")),
    ),
    "cifar": Scale(
        "untrained LeNet of DLG, 32 x 32 pixels in colour, one example, one step",
        "cifar10",
        "auto:preset=standard",
        (
            "second-order",
            "cpl:steps=1000",
            "idlg:steps=1000",
            "ig:steps=2000",
            "sign-matching:steps=2000",
        ),
        targets=10,
        settings=(("agp", "layers=features.4"),),
    ),
}


def network(scale: str, shape: Sequence[int], classes: int) -> nn.Module:
    source = torch.Generator().manual_seed(0)
    channels, height, width = shape
    if scale != "small":
        return gl.models.lenet_zhu(shape=(channels, height, width), classes=classes, generator=source)
    model = nn.Sequential(
        nn.Conv2d(channels, 8, 3, 2, 1), nn.Sigmoid(), nn.Flatten(), nn.Linear(2 * height * width, classes)
    )
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=source)
    return model


def defences(scale: Scale) -> list[str]:
    """All that are registered, with their default settings wherever these can be used, and none."""
    own = dict(scale.settings)
    found = [entry.name for entry in gl.registry.entries("defence")]
    return ["none", *(f"{name}:{own[name]}" if name in own else name for name in found)]


def audits(name: str, chosen: Sequence[str]) -> tuple[gl.Audit, gl.Audit]:
    """`auto` with all it may know, and the single attacks in every form; of the same clients."""
    scale = SCALES[name]
    images = gl.data.load_images(scale.data)
    model = network(name, images.x.shape[1:], images.classes)
    task = gl.Task.supervised(model, nn.functional.cross_entropy, like=(images.x[:1], images.y[:1]))
    federation = gl.Federation(examples=1, training=gl.LocalTraining(lr=scale.lr))

    def of(attacks: Sequence[str], knowledge: Sequence[str]) -> gl.Audit:
        return gl.Audit(
            task,
            images,
            attacks,
            chosen,
            federation=federation,
            targets=scale.targets,
            knowledge=knowledge,
            unrelated=0,
            repeats=1,
        )

    return of([scale.auto], KNOWN[-1:]), of(scale.single, KNOWN)


def compared(together: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each defence, from the report cards of `auto` and of the single attacks.

    certified_by   who has a certificate for every answer: `auto`, the best single attack, both, or none
    holds          True or False where there is one, else None: nothing is claimed
    gap            mean PSNR of `auto` less the best single attack's, in dB
    """
    rows = []
    for card in together:
        own = [each for each in alone if each["defence"] == card["defence"] and each["targets"]]
        row: dict[str, Any] = {"defence": card["defence"], "form": card["form"]}
        if not card["targets"] or not own:
            errors = [
                error for each in (card, *alone) if each["defence"] == card["defence"] for error in each["errors"]
            ]
            rows.append({**row, "failed": errors[0] if errors else "not run"})
            continue
        best = max(own, key=lambda each: each["means"]["psnr"])
        mine, theirs, by = card["means"]["psnr"], best["means"]["psnr"], f"{best['attack']} ({best['form']})"
        certified = [name for name, each in (("auto", card), (by, best)) if determined(each)]
        rows.append(
            {
                **row,
                "auto": mine,
                "best": theirs,
                "by": by,
                "gap": mine - theirs,
                "certified": bool(certified),
                "certified_by": certified,
                "holds": as_strong(mine, theirs) if certified else None,
                "converged": card["converged"],
                "seconds": card["seconds"],
                "single": {f"{each['attack']} ({each['form']})": each["means"]["psnr"] for each in own},
            }
        )
    return rows


def determined(card: Mapping[str, Any]) -> bool:
    """Is every answer of this line certified to be the only one nearby that explains the update?"""
    held = card["identifiability"]
    return held is not None and held["determined"] == held["count"]


def as_strong(mine: float, theirs: float) -> bool:
    return mine >= theirs - WITHIN or min(mine, theirs) >= EXACT


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| defence | auto | best single attack | gap | certified | as strong |", "|---|---|---|---|---|---|"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| `{row['defence']}` | failed: {row['failed']} | | | | |")
            continue
        word = {True: "yes", False: "**no**", None: "-"}[row["holds"]]
        told = f"{row['auto']:.1f} dB | {row['best']:.1f} dB, {row['by']} | {row['gap']:+.1f}"
        lines.append(f"| `{row['defence']}` | {told} | {'yes' if row['certified'] else 'no'} | {word} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scale", choices=tuple(SCALES))
    parser.add_argument("--defences", nargs="*", help="some of them; all, unless said otherwise")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where finished cells are kept")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    scale = SCALES[given.scale]
    out = given.out or Path(__file__).parent / "results" / f"auto-comparison-{given.scale}.json"
    held = stored(out, scale)
    environment = describe()
    for name in given.defences or defences(scale):
        folder = given.runs / f"auto-comparison-{given.scale}" / "".join(c if c.isalnum() else "-" for c in name)
        try:
            together, alone = audits(given.scale, [name])
            [row] = compared(together.run(folder / "auto").cards, alone.run(folder / "single").cards)
        except AuditError as refusal:  # a defence that cannot be used here is a row that says so
            row = {"defence": name, "form": KNOWN[-1], "failed": str(refusal).partition("\n")[0]}
        held[name] = {**row, "git": environment["git"]}
        print(table([row]).splitlines()[-1], flush=True)
        rows = [held[each] for each in defences(scale) if each in held]
        told = {"environment": environment, "version": VERSION, "scale": given.scale, "seeds": [0]}
        told |= {
            "setting": as_json(scale),
            "least_gap": min((row["gap"] for row in rows if "gap" in row), default=None),
        }
        told |= {"not_run": [each for each in defences(scale) if each not in held], "rows": rows}
        out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    print(table(list(held.values())))


def as_json(scale: Scale) -> Any:
    return json.loads(json.dumps(asdict(scale)))


def stored(path: Path, scale: Scale) -> dict[str, dict[str, Any]]:
    """Rows of an earlier run at the same settings: a comparison can be completed defence by defence."""
    if not path.exists():
        return {}
    told = json.loads(path.read_text(encoding="utf-8"))
    same = (told["version"], told["setting"]) == (VERSION, as_json(scale))
    return {row["defence"]: row for row in told["rows"]} if same else {}


if __name__ == "__main__":
    main()
