"""`render(result)`: an audit as one self-contained HTML file: no network, no scripts, images inside.

What is shown is gathered by `gradleak.report.page`; `report.html.j2` and `report.css` say how it looks. Everything that
comes from a run (names, errors, settings) is escaped, and the page forbids scripts and any outside address.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from gradleak.report.page import Page

if TYPE_CHECKING:
    from gradleak.results import AuditResult

__all__ = ["Page", "render"]


@cache
def template(name: str) -> Template:
    """A template of this folder; what pages share is in parts.html.j2."""
    environment = Environment(
        loader=FunctionLoader(text), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.get_template(name)


def text(name: str) -> str:
    """A file of this folder."""
    return files("gradleak.report").joinpath(name).read_text(encoding="utf-8")


def render(result: AuditResult) -> str:
    """The whole page. It shows private images: handle it like the data."""
    # Our own style sheet is the one thing that is not escaped.
    return template("report.html.j2").render(page=Page.of(result), css=Markup(text("report.css")))
