"""What mkdocs builds besides the files of this folder, always from the code and the stored results themselves.

Attacks and defences (a page for every registered name, from its docstring), the papers' figures beside ours, the
tables of performance.md, the API of the public names, changelog, security and contributing, and llms.txt. Nothing of it
is committed. mkdocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # also without an installed gradleak; papers/ is no part of it

LATER = ("deviations.md", "rows.md")  # in the navigation as soon as they are written
KINDS = {"attack": "attacks", "defence": "defences"}
FROM_THE_ROOT = {"changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md", "contributing.md": "CONTRIBUTING.md"}
# What is linked to in the repository, and the page that is made of it.
MADE_OF = {
    **{source: page for page, source in FROM_THE_ROOT.items()},
    "README.md": "index.md",
    "papers/README.md": "figures.md",
    "src/gradleak/attacks": "attacks/index.md",
    "src/gradleak/defences": "defences/index.md",
}
WRITTEN: dict[str, tuple[str, str]] = {}  # page -> its title and its Markdown, for llms.txt


# --- hooks ------------------------------------------------------------------------------------------------------------


def on_config(config: Any) -> None:
    from gradleak.core import registry

    WRITTEN.clear()
    for _, held in sections(config):
        held[:] = [page for page in held if page not in LATER or (ROOT / "docs" / page).is_file()]
        for kind, folder in KINDS.items():
            if f"{folder}/index.md" in held:
                held += [{entry.name: f"{folder}/{entry.name}.md"} for entry in registry.entries(kind)]
    placed = {page for _, held in sections(config) for page in held if isinstance(page, str)}
    rest = sorted({path.name for path in (ROOT / "docs").glob("*.md")} - placed)
    if rest:  # a new page is found before anybody gave it its place
        config["nav"].append({"More": rest})


def sections(config: Any) -> Iterator[tuple[str, list[Any]]]:
    """The navigation: each section's name and its pages."""
    for section in config["nav"]:
        for name, held in section.items():
            yield (name, held) if isinstance(held, list) else ("", [held])


def on_files(files: Any, config: Any) -> Any:
    for path, content in pages():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    filled = re.sub(r"<!-- table: (\S+) -->", lambda found: TABLES[found[1]](), markdown)
    text = outside_named(filled, "../" * (page.file.src_uri.count("/") + 1))
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    WRITTEN[page.file.src_uri] = (title[1] if title else page.file.name, text)
    return text


def on_post_build(config: Any) -> None:
    """llms.txt, and beside it every page as Markdown, for readers that are programs."""
    site = Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", ""]
    for name, held in sections(config):
        lines += [f"## {name}", ""] if name else []
        for entry in held:
            path = next(iter(entry.values())) if isinstance(entry, dict) else entry
            if path not in WRITTEN:  # mkdocs itself says that there is no such page
                continue
            title, text = WRITTEN[path]
            (site / path).write_text(text, encoding="utf-8")
            lines.append(f"- [{title}]({path}): {first_sentence(text)}")
        lines.append("")
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


# --- pages ------------------------------------------------------------------------------------------------------------


def pages() -> Iterator[tuple[str, str]]:
    """Every page that is no file, with its Markdown."""
    from gradleak.core import registry
    from papers.figures import all_claims, markdown
    from papers.runs import PAPERS

    for kind, folder in KINDS.items():
        entries = registry.entries(kind)
        yield f"{folder}/index.md", overview(kind, entries)
        for entry in entries:
            yield f"{folder}/{entry.name}.md", method(entry)
    titles = {name: paper.title for name, paper in PAPERS.items()}
    yield "figures.md", FIGURES + markdown(all_claims(ROOT / "papers"), titles)
    yield "reference.md", reference()
    for path, source in FROM_THE_ROOT.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        yield path, re.sub(r"\]\((?!https?://|#)", "](../", text).replace("](../docs/", "](")


FIGURES = """# The papers' figures beside ours

Made from `papers/*/expected.json` and `papers/*/results.csv` when this site was built; `gradleak reproduce --list`
prints the same. [How to run them](reproduce.md).

- *What the paper prints* is for comparison. *What was to hold* are bounds of ours, set before the measurement.
- Fewer than 20 targets are called small. *Cut short* means thin networks and few steps: such a run shows that a row
  runs; it reproduces nothing, and it decides no bound.
- Where several runs have a figure, one is shown, and never by its outcome: full size first, then more
  targets, then the later one.
- One seed is one seed: where a paper gives means over several, ours is not that.

"""


def overview(kind: str, entries: list[Any]) -> str:
    lines = [
        f"# {KINDS[kind].capitalize()}",
        "",
        INTRODUCTIONS[kind],
        "",
        "| name | idea | paper | status |",
        "|---|---|---|---|",
    ]
    for entry in entries:
        cells = (
            f"[`{entry.name}`]({entry.name}.md)",
            escaped(entry.summary),
            escaped(entry.paper),
            entry.status or "-",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


STATUS = "*Verified*: figures of its paper were checked with this code. *Unverified*: written from it, not checked yet."
INTRODUCTIONS = {
    "attack": f"`gradleak list attacks` prints the same. {STATUS} [The papers' figures beside ours](../figures.md).",
    "defence": f"`gradleak list defences` prints the same. {STATUS} Each is attacked by somebody who ignores it (A0), "
    "who weighs out what it hides (A1) and who predicts through it (A2): [threat model](../threat-model.md).",
}


def method(entry: Any) -> str:
    """One attack or defence: what it does, its settings, how it is called, what its docstring says."""
    import inspect

    text = inspect.getdoc(entry.make) or ""
    summary, _, body = text.partition("\n")
    lines = [f"# {entry.name}", "", escaped(summary), ""]
    lines += [f"- Paper: {escaped(entry.paper)}"] if entry.paper else []
    lines += [f"- Status: {entry.status or 'there are no figures to check'}"]
    lines += facts(entry)
    lines += ["", *(prose(body) if body.strip() else ()), "", "## How to call it", ""]
    example = ",".join(f"{name}=..." for name in entry.required)
    spelled = f"{entry.name}:{example}" if example else entry.name
    option = "--attack" if entry.kind == "attack" else "--attack cpl --defence"
    lines += ["```text", f"gradleak audit {option} {spelled}", "```", "", "```python", "import gradleak as gl", ""]
    settings = "".join(f", {name}=..." for name in entry.required)
    call = f'gl.registry.get("{entry.kind}", "{entry.name}"{settings})'
    lines += [f"{entry.kind} = {call}", "```", ""]
    if entry.settings:
        lines += ["## Settings", "", "| name | default | type |", "|---|---|---|"]
        for name, default in entry.settings.items():
            shown = "required" if name in entry.required else f"`{default!r}`".replace("|", "\\|")
            lines.append(f"| `{name}` | {shown} | {typed(entry, name)} |")
    lines += ["", f"Source: `{entry.make.__module__}`."]
    return "\n".join(lines) + "\n"


def facts(entry: Any) -> list[str]:
    """What can be asked of the object itself, where it can be made without settings."""
    from gradleak.cli.listing import describe_defence

    if entry.required:
        return []
    made = entry.make()
    if entry.kind == "defence":
        place, proved = describe_defence(made)
        return [f"- Where it sits: {place}", f"- What it proves, for one round of one plain step: {escaped(proved)}"]
    needs = sorted(map(str, getattr(made, "needs", ())))
    return [f"- Needs, beside the update: {', '.join(f'`{need}`' for need in needs)}"] if needs else []


def typed(entry: Any, name: str) -> str:
    import inspect

    annotation = inspect.signature(entry.make).parameters[name].annotation
    return "" if annotation is inspect.Parameter.empty else f"`{str(annotation)}`".replace("|", "\\|")


def reference() -> str:
    """The public names, in the groups of `gradleak.__all__`; modules are named by their first line."""
    import inspect

    import gradleak

    lines = [
        "# Reference",
        "",
        "Every name below is `gl.NAME` after `import gradleak as gl`; [examples](api.md). Modules load on first use.",
        "",
    ]
    objects = [name for name in gradleak.__all__ if not inspect.ismodule(getattr(gradleak, name))]
    modules = [name for name in gradleak.__all__ if inspect.ismodule(getattr(gradleak, name))]
    lines += ["| module | what |", "|---|---|"]
    for name in modules:
        told = (inspect.getdoc(getattr(gradleak, name)) or "").split("\n", 1)[0]
        lines.append(f"| `gl.{name}` | {escaped(told)} |".replace("\\|", "|"))
    for name in objects:
        held = getattr(gradleak, name)
        place = f"{held.__module__}.{name}" if hasattr(held, "__module__") and inspect.getmodule(held) else ""
        known = place and (inspect.isclass(held) or inspect.isfunction(held))
        lines += ["", f"::: {place}"] if known else ["", f"## {name}", "", f"`{held}`"]
    return "\n".join(lines) + "\n"


# --- tables of stored measurements ------------------------------------------------------------------------------------


def stored(name: str) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))
    return held


def machine(held: dict[str, Any]) -> str:
    environment = held["environment"]
    where = (environment.get("gpus") or [f"{environment['processor']}, threads: {environment['threads']}"])[0]
    torch = environment["packages"]["torch"]
    commit = ((environment.get("git") or {}).get("commit") or "not recorded")[:7]
    return f"*{where}, torch {torch}, commit {commit}, {str(environment['time'])[:10]}.*"


def engine(name: str) -> str:
    held = stored(name)
    lines = [
        "| network | lanes | precision | as lanes | images x iterations a second | times one at a time |",
        "|---|---|---|---|---|---|",
    ]
    for row in held["rows"]:
        times = row.get("times_one_at_a_time")
        how = "yes" if row["batched"] else "no: one at a time"
        told = "-" if times is None else f"{times:,.1f}"
        rate = "out of memory" if row["rate"] is None else f"{row['rate']:,.0f}"
        lines.append(f"| {row['network']} | {row['lanes']} | {row['precision']} | {how} | {rate} | {told} |")
    return "\n".join([*lines, "", machine(held)])


def rows_of(name: str, columns: tuple[str, ...]) -> str:
    held = stored(name)
    lines = ["| " + " | ".join(column.replace("_", " ") for column in columns) + " |", "|" + "---|" * len(columns)]
    for row in held["rows"]:
        cells = [row.get(column) for column in columns]
        lines.append(
            "| " + " | ".join(f"{cell:,.4g}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"
        )
    return "\n".join([*lines, "", machine(held)])


sys.path.insert(0, str(ROOT))
from benchmarks import tables  # noqa: E402  the other tables of speed, and their pictures

TABLES = {
    **tables.TABLES,
    "engine-h200": lambda: engine("h200.json"),
    "engine-cpu": lambda: engine("cpu-2-cores.json"),
    "federation": lambda: rows_of(
        "federation-h200.json", ("how", "seconds_per_round", "milliseconds_per_step", "gigabytes")
    ),
    "secure": lambda: rows_of(
        "secure-aggregation-cpu-2-cores.json",
        ("neighbours", "dropouts", "ring_bits", "seconds_per_client", "seconds_of_server", "bytes_sent_per_client"),
    ),
}


# --- text -------------------------------------------------------------------------------------------------------------


def escaped(text: str) -> str:
    """Prose of a docstring as Markdown: what is in backticks stays, everything else means itself."""
    parts = re.split(r"(`[^`]*`)", text)
    plain = lambda part: re.sub(r"([\\*_>\[\]|#])", r"\\\1", part.replace("<", "&lt;"))  # noqa: E731
    return "".join(part if part.startswith("`") else plain(part) for part in parts)


def prose(text: str) -> Iterator[str]:
    """Paragraphs; where lines are indented, or are columns, they stay as they were typed."""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        lines = paragraph.splitlines()
        typed_out = any(line.startswith(" ") or re.match(r"\S+( \S+)? {2,}\S", line) for line in lines)
        yield from ("```text", paragraph, "```", "") if typed_out else (escaped(paragraph), "")


def first_sentence(markdown: str) -> str:
    """Of the first paragraph that is prose."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"^```.*?^```", "", markdown, flags=re.DOTALL | re.MULTILINE)):
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
        if plain and not plain.startswith(("#", "|", "!", "-", "<", ":::")):
            return re.split(r"(?<=[.?!])\s", plain.replace("*", "").replace("\\", ""))[0]
    return ""


def outside_named(markdown: str, up: str) -> str:
    """A link out of this folder leads to the page that is made of the file, or becomes the file's name."""

    def there(found: re.Match[str]) -> str:
        text, path = found[1], found[2]
        if path in MADE_OF:
            return f"[{text}]({up[3:]}{MADE_OF[path]})"
        named = text.strip("`") in (path, Path(path).name)
        return f"`{path}`" if named else f"{text} (`{path}` in the repository)"

    return re.sub(rf"\[([^\]]+)\]\({re.escape(up)}([^)#\s]+)(?:#[^)]*)?\)", there, markdown)
