"""The report in a real browser: hostile replies are text, nothing is fetched, nothing is complained about."""

from __future__ import annotations

from pathlib import Path

import pytest

from manners.report.text import visible

from .browser import BROWSER, look
from .example_run import HOSTILE

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome on this machine")

LOOK = {
    "title": "document.title",
    "scripts": "document.querySelectorAll('script, img, iframe, object, [onerror], [onload]').length",
    "links": "[...document.querySelectorAll('a')].map(a => a.href)",
    "text": "document.body.textContent",
    "overflow": "document.documentElement.scrollWidth - document.documentElement.clientWidth",
    "scrolling tables": """[...document.querySelectorAll('.wide')]
        .filter(table => table.scrollWidth > table.clientWidth).length""",
    "paper": "getComputedStyle(document.body).backgroundColor",
    "headers": "[...document.querySelectorAll('table')].every(t => t.querySelector('thead th[scope=col]'))",
    "marks": "document.querySelectorAll('svg.panel .mark').length",
    "whiskers": """[...document.querySelectorAll('svg.panel .whisker')]
        .filter(whisker => whisker.getBBox().width > 1).length""",
    "outside": """[...document.querySelectorAll('svg.panel .mark')].filter(m => {
        const mark = m.getBoundingClientRect(), panel = m.closest('svg.panel').getBoundingClientRect();
        return mark.left < panel.left || mark.right > panel.right || mark.bottom > panel.bottom;
    }).length""",
}


@pytest.fixture
def report(example: Path) -> Path:
    return example / "report.html"


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["desk", "phone-dark"])
def test_report_opens_clean(report: Path, tmp_path: Path, width: int, dark: bool) -> None:
    seen = look(report, LOOK, tmp_path, width=width, dark=dark)
    assert seen.errors == []
    assert [url for url in seen.fetched if not url.startswith("data:")] == [report.as_uri()]
    assert seen.values["scripts"] == 0
    assert seen.values["links"] == []
    assert seen.values["title"].startswith("annie: ")
    assert visible(HOSTILE) in seen.values["text"]
    assert seen.values["overflow"] == 0
    assert seen.values["scrolling tables"] == 0
    assert seen.values["paper"] == ("rgb(22, 24, 27)" if dark else "rgb(253, 253, 252)")
    assert seen.values["headers"] is True
    assert seen.values["marks"] == 7 * 4
    assert seen.values["whiskers"] == 7 * 4
    assert seen.values["outside"] == 0


def test_escaping_holds_without_the_policy(report: Path, tmp_path: Path) -> None:
    """The policy in the page's head would stop a script anyway; escaping must not need it."""
    html = report.read_text(encoding="utf-8")
    bare = tmp_path / "bare.html"
    bare.write_text(html.replace("Content-Security-Policy", "x-nothing"), encoding="utf-8")
    seen = look(bare, LOOK, tmp_path / "profile")
    assert seen.errors == []
    assert seen.values["scripts"] == 0
    assert seen.values["title"] != "owned"


def test_the_counting_counts(tmp_path: Path) -> None:
    """The same reply as markup must raise every alarm that the other tests rely on."""
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><title>safe</title><body>{HOSTILE}<script>nowhere()</script>", "utf-8")
    seen = look(page, LOOK, tmp_path / "profile")
    assert seen.values["title"] == "owned"
    assert seen.values["scripts"] == 3
    assert any("owned" in error for error in seen.errors)
    assert any(error.startswith("dialog") for error in seen.errors)
    assert any(error.startswith("exception") for error in seen.errors)
    assert any(url.endswith("/x") for url in seen.fetched)
