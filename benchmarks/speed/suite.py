"""All measurements in one call, written section by section, so that a run that is cut short keeps what it has."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.speed import peer, regression, scaling, timing
from benchmarks.speed.costs import GROWTH, costs
from benchmarks.speed.memory import memory
from benchmarks.speed.networks import NETWORKS
from benchmarks.speed.quality import chunks, quality
from benchmarks.speed.roofline import roofline
from benchmarks.speed.throughput import LANES, Row, engine
from gradleak.core.environment import describe
from gradleak.core.registry import did_you_mean
from gradleak.engine import Engine


@dataclass(frozen=True)
class Plan:
    """How much is measured. `Plan.of` chooses by device."""

    networks: tuple[str, ...]
    lanes: tuple[int, ...]
    precisions: tuple[str, ...]
    seconds: float  # of one measurement
    searched: tuple[tuple[str, str], ...]  # networks and attacks that are run to an end
    steps: int  # of such an attack
    many: tuple[int, int]  # targets and restarts of one call that the engine must take apart
    peer_networks: tuple[str, ...]
    peer_lanes: tuple[int, ...]
    peer_steps: int
    growing: tuple[str, ...] = tuple(GROWTH)
    most_doubling: float | None = None  # times the time for twice the lanes; more is a failure. None: only reported
    device: str = "auto"

    @staticmethod
    def of(device: str = "auto", *, quick: bool = False) -> Plan:
        """Everything on a GPU in about eight minutes; on a CPU what one core can do in ten."""
        if Engine(device).where.type == "cuda":
            three = ("lenet", "convnet64", "resnet18")
            searched = (("lenet", "idlg"), *((network, "ig:tv=0.01") for network in three))
            plan = Plan(
                tuple(NETWORKS),
                LANES,
                ("fast", "strict"),
                1.5,
                searched,
                4800,
                (1024, 1),
                three,
                LANES[2:],
                200,
                most_doubling=scaling.MOST,
            )
        else:
            plan = Plan(
                tuple(NETWORKS),
                LANES,
                ("strict",),
                2.0,
                (("lenet", "ig:tv=0.01"),),
                1000,
                (4, 32),
                ("lenet", "convnet64"),
                (32,),
                50,
            )
        if quick:
            few = {"networks": ("lenet",), "lanes": (1, 8), "precisions": ("strict",), "seconds": 0.2}
            short = {"searched": (("lenet", "ig"),), "steps": 20, "many": (2, 2), "growing": ("batch",)}
            beside = {"peer_networks": ("lenet",), "peer_lanes": (8,), "peer_steps": 10}
            plan = replace(plan, **few, **short, **beside)  # type: ignore[arg-type]
        return replace(plan, device=device)


def _memory(plan: Plan, show: Callable[[Row], None]) -> list[Row]:
    lanes = (8, 16, 32, 64, 128) if Engine(plan.device).where.type == "cuda" else (1, 2, 4, 8, 16, 32)
    return memory(plan.networks, lanes, plan.precisions[0], show, plan.device)


def _chunks(plan: Plan, show: Callable[[Row], None]) -> list[Row]:
    targets, restarts = plan.many
    return chunks(plan.searched[-1][0], targets, restarts, 10, plan.precisions[0], show, plan.device)


SECTIONS: dict[str, Callable[[Plan, Callable[[Row], None]], list[Row]]] = {
    "engine": lambda plan, show: engine(
        plan.networks, plan.lanes, plan.precisions, None, plan.seconds, show, plan.device
    ),
    "roofline": lambda plan, show: roofline(
        plan.networks, max(plan.lanes), plan.precisions, plan.seconds, show, plan.device
    ),
    "memory": _memory,
    "quality": lambda plan, show: quality(plan.searched, 8, plan.steps, plan.precisions[-1], show, plan.device),
    "cost": lambda plan, show: costs(8, plan.precisions[-1], plan.seconds, show, plan.device, plan.growing),
    "chunks": _chunks,
    "peer": lambda plan, show: peer.peers(
        plan.peer_networks, plan.peer_lanes, peer.Effort(plan.peer_steps), plan.precisions, show, plan.device
    ),
}
STORED = {"engine": "rows"}  # sections are stored by their own names, but this one
ROW = ("what", "network", "attack", "growing", "size", "lanes", "precision", "batched")  # what tells rows apart


def measure(
    plan: Plan,
    only: Sequence[str] = (),
    out: str | Path | None = None,
    show: Callable[[str, Row], None] = lambda section, row: None,
    before: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure; `only` these sections, in this order. The peer is left out where it is not installed: `left_out`.

    A section that fails keeps its rows and does not stop the others; `failed` says why. `doubling` is computed from the
    rows of the engine: more than `plan.most_doubling` is measured again and, if it stays so, in `failed` too.
    `before`: a result of this machine that this one is added to; rows that are measured again are replaced.
    """
    for name in only:
        if name not in SECTIONS:
            raise ValueError(f"There is no section {name!r} of measurements.{did_you_mean(name, SECTIONS)}")
    result: dict[str, Any] = {**(before or {}), "environment": describe(), "load": {"before": timing.load()}}
    if before is not None:
        regression.same_machine(result["environment"], before["environment"])
    for part in ("seconds", "left_out", "failed"):
        result[part] = dict(result.get(part, {}))
    result["clock"] = timing.clock(Engine(plan.device).where.type == "cuda")
    for name in only or SECTIONS:
        section, began, rows = SECTIONS[name], time.perf_counter(), result.setdefault(STORED.get(name, name), [])
        result["failed"].pop(name, None)

        def note(row: Row, name: str = name, rows: list[Row] = rows) -> None:
            rows[:] = [other for other in rows if _identity(other) != _identity(row)] + [row]
            show(name, row)
            write(result, out)

        try:
            section(plan, note)
        except peer.NoPeer as problem:
            result["left_out"][name] = str(problem)
            if not rows:
                del result[name]
        except Exception as problem:  # the other sections are worth having; the caller is told, and fails
            result["failed"][name] = f"{type(problem).__name__}: {problem}"
        if name == "engine":
            _doubling(result, plan, show)
        result["seconds"][name] = time.perf_counter() - began
        write(result, out)
    result["load"]["after"] = timing.load()
    write(result, out)
    return result


def _identity(row: Row) -> tuple[str, ...]:
    return tuple(str(row.get(name)) for name in ROW)


def _doubling(result: dict[str, Any], plan: Plan, show: Callable[[str, Row], None]) -> None:
    """What twice the lanes cost, from all rows of the engine; on a GPU more than `plan.most_doubling` is a failure."""
    found = scaling.doubling(result["rows"])
    result["failed"].pop("doubling", None)
    if plan.most_doubling is not None:

        def again(row: Row) -> list[Row]:
            return engine(
                [row["network"]],
                [row["from"], row["to"]],
                [row["precision"]],
                None,
                plan.seconds,
                device=plan.device,
            )

        found = scaling.judged(found, again, plan.most_doubling)
        if broken := [scaling.why(row) for row in found if not row["holds"]]:
            result["failed"]["doubling"] = f"{'; '.join(broken)}; at most {plan.most_doubling} is wanted."
    result["doubling"] = found
    for row in found:
        show("doubling", row)


def write(result: dict[str, Any], out: str | Path | None) -> None:
    """What there is so far, where a file was named."""
    if out is not None:
        Path(out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def fallen(now: dict[str, Any], then: dict[str, Any], plan: Plan) -> list[regression.Fallen]:
    """Ratios that fell, and fell again when they were measured a second time."""

    def again(one: regression.Fallen) -> float | None:
        row = dict(zip(regression.RATIOS[one.section][0], one.key, strict=True))
        if one.section == "rows":
            found = engine([row["network"]], [row["lanes"]], [row["precision"]], None, plan.seconds, device=plan.device)
        else:
            effort = peer.Effort(plan.peer_steps)
            found = peer.peers([row["network"]], [row["lanes"]], effort, [row["precision"]], device=plan.device)
        return regression.ratios(found, *regression.RATIOS[one.section]).get(one.key)

    return regression.confirmed(regression.compare(now, then), again)


def format_row(section: str, row: Row) -> str:
    """A row as a line for people."""

    def text(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        if isinstance(value, dict):
            return "{" + " ".join(f"{name} {text(each)}" for name, each in value.items()) + "}"
        if isinstance(value, list):
            return "[" + " ".join(text(each) for each in value[:8]) + (" ...]" if len(value) > 8 else "]")
        return str(value)

    return f"{section}: " + "  ".join(f"{name} {text(value)}" for name, value in row.items() if value is not None)
