"""``report.html`` and ``report.md`` from a finished run folder.

Both are a pure function of the folder: no clock, no network, no model. Rendering happens before
anything is written, and each file is written beside and renamed, so a failing report leaves the
old one whole.

Escaping has one place each: every value in the HTML template is made visible and then escaped
(attributes and SVG included), every value in the Markdown template passes through
:func:`markdown_inline`, whole texts through :func:`fenced`. No template uses ``safe``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from ..files import write_text
from . import text
from .decision import facts, largest_loss
from .page import Page, candidate_heading, gather
from .summary import PARENT, CandidateSummary, Summary, load_summary

REPORT_HTML = "report.html"
REPORT_MD = "report.md"
_TEMPLATES = Path(__file__).parent


def write_report(run_dir: str | Path) -> tuple[Path, Path]:
    """Write ``report.html`` and ``report.md`` into a run folder, and return their paths.

    Reads ``summary.json`` and, where they are there, ``run.json`` and each candidate's transcripts
    and verdicts. What is missing of the latter is said in the report.

    Raises:
        RunError: ``summary-missing``, ``summary-syntax`` or ``summary-field``.
    """
    folder = Path(run_dir)
    page = gather(folder, load_summary(folder))
    rendered = {REPORT_HTML: render_html(page), REPORT_MD: render_markdown(page)}
    for name, content in rendered.items():
        write_text(folder / name, content)
    return folder / REPORT_HTML, folder / REPORT_MD


def render_html(page: Page) -> str:
    """One self-contained page without scripts: it opens offline, in any browser, on any screen."""
    environment = _environment(autoescape=True, finalize=_html_value)
    environment.filters["breakable"] = _breakable
    return environment.get_template("report.html.j2").render(_names(page))


def render_markdown(page: Page) -> str:
    """GitHub-flavoured Markdown; replies stand in code blocks that they cannot close."""
    environment = _environment(autoescape=False, finalize=text.markdown_inline)
    environment.filters["fenced"] = text.fenced
    rendered = environment.get_template("report.md.j2").render(_names(page))
    return re.sub(r"\n{3,}", "\n\n", rendered)


def _environment(*, autoescape: bool, finalize: Callable[[Any], Any]) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=autoescape,
        finalize=finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        percent=text.percent,
        interval=text.interval,
        points=text.points,
        margin=text.margin,
        rule=text.rule,
        size=text.size,
        minutes=text.minutes,
        small=text.small,
        facts=facts,
        largest_loss=largest_loss,
    )
    return environment


def _names(page: Page) -> dict[str, Any]:
    """What the templates know: the page's fields and two questions about a candidate."""
    names = {field: getattr(page, field) for field in page.__dataclass_fields__}
    return {
        **names,
        "heading": partial(candidate_heading, page.summary),
        "of_parent": partial(_size_of_parent, page.summary),
    }


def _size_of_parent(summary: Summary, candidate: CandidateSummary) -> float | None:
    """Bytes as a share of the parent's; None for the parent itself or where either is unknown."""
    parent = summary.parent_row
    if candidate.name == PARENT or parent is None or not parent.bytes or candidate.bytes is None:
        return None
    return candidate.bytes / parent.bytes


def _html_value(value: Any) -> Any:
    """What the template is about to escape, with every invisible character made visible."""
    return text.visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _breakable(name: str) -> Markup:
    """A name in which a line may break after an underscore. Escapes before it adds markup."""
    return Markup(str(escape(text.visible(name))).replace("_", "_<wbr>"))
