"""Stored measurements of speed as Markdown tables and small pictures, for docs/performance.md; `TABLES` by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.speed import scaling
from gradleak.report.curves import Chart, Series, Tick, chart

RESULTS = Path(__file__).resolve().parent / "results"
MISSING = "*Not measured yet.*"
COLOURS = ("#3f7fd3", "#d0583c", "#3a9a63", "#9a62c8", "#b07a1c", "#2a9498")  # on light and on dark


def stored(name: str, section: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The rows of a section, and the file they are in; no rows where there is none."""
    file = RESULTS / name
    held: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return held.get(section) or [], held


def machine(held: dict[str, Any]) -> str:
    """Where and when, and how busy the machine was."""
    where = held["environment"]
    on = (where.get("gpus") or [f"{where['processor']}, threads: {where['threads']}"])[0]
    commit = ((where.get("git") or {}).get("commit") or "not recorded")[:7]
    told = f"*{on}, torch {where['packages']['torch']}, commit {commit}, {str(where['time'])[:10]}"
    busy = (held.get("load") or {}).get("before")
    if busy and not where.get("gpus"):
        told += f"; {busy[0]:g} programs wanted the machine, seconds are of the {held.get('clock', 'wall')} clock"
    return told + ".*"


def table(name: str, section: str, columns: dict[str, Callable[[dict[str, Any]], str]], *, kind: str = "") -> str:
    """One line a row; `kind`: rows of this `what` only."""
    rows, held = stored(name, section)
    rows = [row for row in rows if not kind or row.get("what") == kind]
    if not rows:
        return MISSING
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row) for cell in columns.values()) + " |" for row in rows]
    return "\n".join([*lines, "", machine(held)])


def number(name: str, digits: int = 3, scale: float = 1.0, unit: str = "") -> Callable[[dict[str, Any]], str]:
    """A column of numbers; a dash where there is none."""

    def cell(row: dict[str, Any]) -> str:
        value = row.get(name)
        if value is None:
            return "-"
        value = float(value) * scale
        return (f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}") + unit

    return cell


def text(name: str) -> Callable[[dict[str, Any]], str]:
    """A column of words."""
    return lambda row: str(row.get(name, "-"))


def mean(name: str) -> Callable[[dict[str, Any]], str]:
    """Of a list of numbers."""
    return lambda row: f"{sum(row[name]) / len(row[name]):.2f}" if row.get(name) else "-"


def peers(name: str) -> str:
    """Throughput and quality beside the peer."""
    columns = {
        "network": text("network"),
        "lanes": text("lanes"),
        "ours": text("precision"),
        "steps": text("steps"),
        "ours, images x iterations a second": number("rate"),
        "breaching": number("peer_rate"),
        "its cudnn.benchmark": text("peer_cudnn_benchmark"),
        "times breaching": number("times_peer"),
        "whole call": number("times_peer_whole"),
        "our loop, times breaching": number("eager_times_peer"),
        "PSNR ours": mean("psnr"),
        "PSNR breaching": mean("peer_psnr"),
        "images": lambda row: str(len(row["peer_psnr"])),
        "images an hour, 4,800 steps": number("images_per_hour"),
    }
    return table(name, "peer", columns)


def roofline(name: str) -> str:
    """Peaks first, then what networks achieve of them."""
    peaks, _ = stored(name, "roofline")
    told = [
        f"- Peak, {row['precision']}: matrix product {row['matrix'] / 1e12:.3g}, convolution "
        f"{row['convolution'] / 1e12:.3g} Tflop/s{_layouts(row)}."
        for row in peaks
        if row["what"] == "peak"
    ]
    columns = {
        "network": text("network"),
        "precision": text("precision"),
        "lanes": text("lanes"),
        "Mflop of a forward pass": number("forward_flops", scale=1e-6),
        "of a step": number("step_flops", scale=1e-6),
        "forward, share of the peak": number("forward_share", scale=100, unit=" %"),
        "step, share of the peak": number("step_share", scale=100, unit=" %"),
    }
    return "\n".join([*told, "", table(name, "roofline", columns, kind="network")]).lstrip()


def _layouts(row: dict[str, Any]) -> str:
    """In which memory layout the convolution was fastest, and what the others reached."""
    if "layout" not in row:
        return ""
    others = [f"{each}: {rate / 1e12:.3g}" for each, rate in row["convolutions"].items() if each != row["layout"]]
    return f" ({row['layout']}; {', '.join(others)})"


def doubling(name: str) -> str:
    """Of each network and precision the dearest doubling of lanes, from the rows of the engine."""
    rows, held = stored(name, "rows")
    found: list[dict[str, Any]] = held.get("doubling") or scaling.doubling(rows)
    if not found:
        return MISSING
    lines = ["| network | precision | lanes | time of twice the lanes, at most | between |", "|---|---|---|---|---|"]
    for network, precision in dict.fromkeys((row["network"], row["precision"]) for row in found):
        own = [row for row in found if (row["network"], row["precision"]) == (network, precision)]
        worst = max(own, key=lambda row: float(row["times"]))
        over = "" if worst["times"] <= scaling.MOST else f": more than {scaling.MOST}"
        span = f"{own[0]['from']} to {own[-1]['to']}"
        between = f"{worst['from']} and {worst['to']}"
        lines.append(f"| {network} | {precision} | {span} | {worst['times']:.2f}{over} | {between} |")
    return "\n".join([*lines, "", machine(held)])


def memory(name: str) -> str:
    """Megabytes of a lane."""
    columns = {
        "network": text("network"),
        "precision": text("precision"),
        "most lanes measured": lambda row: str(max(row["lanes"], default="-")),
        "MB of a lane": number("per_lane"),
        "MB without any": number("constant"),
        "worst point off the line": lambda row: f"{100 * row['worst_off']:.2f} %" if "worst_off" in row else "-",
        "lanes in a chunk": text("chunk"),
    }
    return table(name, "memory", columns)


def quality(name: str) -> str:
    """Seconds to 20 and 30 dB."""
    reached = lambda level: lambda row: f"{row[f'reached_{level}_db']} of {row['lanes']}"  # noqa: E731
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "network": text("network"),
        "attack": text("attack"),
        "targets": text("lanes"),
        "precision": text("precision"),
        "steps": text("steps"),
    }
    for level in (20, 30):
        columns[f"{level} dB reached"] = reached(level)
        columns[f"seconds to {level} dB"] = number(f"seconds_to_{level}_db")
    columns["seconds in all"] = number("seconds")
    return table(name, "quality", columns)


def cost(name: str) -> str:
    """How a step grows."""
    columns = {
        "what grows": lambda row: str(row["growing"]).replace("_", " "),
        "size": text("size"),
        "network": text("network"),
        "parameters": lambda row: f"{row['parameters']:,}",
        "ms of a step": number("seconds_per_step", scale=1e3),
        "times the smallest": number("times"),
    }
    return table(name, "cost", columns)


def chunks(name: str) -> str:
    """Many lanes in chunks."""
    columns = {
        "network": text("network"),
        "lanes": text("lanes"),
        "chunks": lambda row: f"{len(row['chunks'])}, of at most {max(row['chunks'])}",
        "steps": text("steps"),
        "seconds": number("seconds"),
        "finite lanes": text("finite"),
        "GB": number("gigabytes"),
    }
    return table(name, "chunks", columns)


# --- pictures ---------------------------------------------------------------------------------------------------------


def lanes_picture(name: str) -> str:
    """How many times one at a time, over lanes; both axes logarithmic."""
    rows, _ = stored(name, "rows")
    rows = [row for row in rows if row["batched"] and row.get("times_one_at_a_time")]
    rows.sort(key=lambda row: int(row["lanes"]))  # a line goes from left to right, in whatever order it was measured
    series = []
    for network, precision in dict.fromkeys((row["network"], row["precision"]) for row in rows):
        own = [row for row in rows if (row["network"], row["precision"]) == (network, precision)]
        xs, ys = [row["lanes"] for row in own], [row["times_one_at_a_time"] for row in own]
        series.append(Series(f"{network}, {precision}", list(map(math.log2, xs)), list(map(math.log10, ys))))
    if not series:
        return MISSING
    made = chart("Lanes together, times one at a time", series, across="lanes")
    places = sorted({x for one in series for x in one.x})
    return svg(_logarithmic(made, places, series))


def _logarithmic(made: Chart, places: Sequence[float], series: Sequence[Series]) -> Chart:
    """Ticks that say the numbers themselves: lanes that were measured, and powers of ten."""
    marks = [(x, mark.x) for one, drawn in zip(series, made.lines, strict=True) for x, mark in zip(one.x, drawn.marks)]
    along = dict(marks)
    x = tuple(Tick(along[place], f"{2**place:g}") for place in places)
    y = tuple(replace(tick, text=f"{10 ** float(tick.text):.3g}") for tick in made.y)
    said = "; ".join(
        f"{one.name}: " + ", ".join(f"{10**b:.3g} at {2**a:g} lanes" for a, b in zip(one.x, one.y)) for one in series
    )
    return replace(made, x=x, y=y, text=f"{made.title}. {said}.")


def svg(made: Chart) -> str:
    """A picture in one line of HTML, with the colour of the page's own text; lines differ by dashes too."""
    legend = 16 * len(made.lines)
    parts = [
        f'<svg role="img" viewBox="0 0 {made.width} {made.height + legend}" style="max-width:40rem;font-size:11.5px">',
        f"<title>{escape(made.title)}</title><desc>{escape(made.text)}</desc>",
    ]
    axis = 'stroke="currentColor" stroke-opacity=".25" fill="none"'
    word = lambda x, y, end, said: (  # noqa: E731
        f'<text x="{x:g}" y="{y:g}" text-anchor="{end}" fill="currentColor">{escape(said)}</text>'
    )
    for tick in made.y:
        parts += [f'<path {axis} d="M{made.left} {tick.place}H{made.right}"/>']
        parts += [word(made.left - 6, tick.place + 4, "end", tick.text)]
    for tick in made.x:
        parts += [f'<path {axis} d="M{tick.place} {made.bottom}v5"/>']
        parts += [word(tick.place, made.bottom + 17, "middle", tick.text)]
    parts.append(word(made.right, made.height - 3, "end", made.across))
    for number_, line in enumerate(made.lines):
        colour, dash = COLOURS[line.colour], f' stroke-dasharray="{line.dash}"' if line.dash else ""
        stroke = f'fill="none" stroke="{colour}" stroke-width="2"{dash}'
        below = made.height + 12 + 16 * number_
        parts += [f'<path {stroke} d="{line.line}"/>'] if line.line else []
        parts += [f'<circle cx="{mark.x}" cy="{mark.y}" r="3" fill="{colour}"/>' for mark in line.marks]
        parts += [f'<path {stroke} d="M{made.left} {below - 4}h30"/>', word(made.left + 38, below, "start", line.name)]
    return "".join([*parts, "</svg>"])


GPU, CPU = "h200.json", "cpu-one-thread.json"
TABLES: dict[str, Callable[[], str]] = {
    "peers-h200": lambda: peers("peers-h200.json"),
    "peers-cpu": lambda: peers("peers-cpu-one-thread.json"),
    "roofline-h200": lambda: roofline(GPU),
    "roofline-cpu": lambda: roofline(CPU),
    "memory-h200": lambda: memory(GPU),
    "memory-cpu": lambda: memory(CPU),
    "quality-h200": lambda: quality(GPU),
    "quality-cpu": lambda: quality(CPU),
    "cost-h200": lambda: cost(GPU),
    "cost-cpu": lambda: cost(CPU),
    "chunks-h200": lambda: chunks(GPU),
    "doubling-h200": lambda: doubling(GPU),
    "doubling-cpu": lambda: doubling(CPU),
    "lanes-h200": lambda: lanes_picture(GPU),
    "lanes-cpu": lambda: lanes_picture(CPU),
}
