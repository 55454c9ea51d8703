"""`render(result)`: an audit as one self-contained HTML file: no network, images inside, one small script of our own.

`page.SECTIONS` lists the sections; a module makes what each shows, and a template in `sections` draws it. Text from a
run (names, errors, settings) is escaped. The page allows no outside address, and no script but `report.js`, by its
hash; without scripts it shows the same, unsorted and unfiltered.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from gradleak.core.registry import named
from gradleak.report.page import Page

if TYPE_CHECKING:
    from gradleak.audit.result import AuditResult
    from gradleak.curvature.result import StudyResult

__all__ = ["Page", "render"]


@cache
def template(name: str) -> Template:
    """A template of this folder; parts.html.j2 has what pages share."""
    environment = Environment(
        loader=FunctionLoader(text), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.get_template(name)


def text(name: str) -> str:
    """A file of this folder."""
    return files("gradleak.report").joinpath(name).read_text(encoding="utf-8")


def policy(script: str) -> str:
    """The content security policy of a page that runs this script only and loads nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


@named("html", kind="report", status="")
def render(result: AuditResult, study: StudyResult | None = None) -> str:
    """The whole page. It shows private examples: handle it like the data.

    `study`: curvature over the rounds of the same training (`gradleak analyse`), drawn beside the leakage.
    """
    script = text("report.js")
    # Only our own style sheets and script are not escaped.
    css = Markup(text("report.css") + text("curves.css") + text("audit.css"))
    page = Page(result, study)
    return template("report.html.j2").render(page=page, css=css, script=Markup(script), policy=policy(script))
