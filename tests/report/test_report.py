"""report.html and report.md of a whole run: verdict first, everything there, nothing breaks out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from manners.errors import RunError
from manners.report import Summary, load_summary, render_terminal, save_summary, write_report
from manners.report.text import visible

from .example_run import HOSTILE

SENTENCE = (
    "Comparable, and mse ships: all 7 gates pass on 412 paired probes, "
    "none more than 1 point under the parent."
)


class Page(HTMLParser):
    """Tags with their attributes, and text by the tag that holds it."""

    VOID = frozenset({"meta", "link", "br", "wbr", "img", "input", "hr"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.said: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.said.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.said))


@pytest.fixture
def html(example: Path) -> str:
    return (example / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def markdown(example: Path) -> str:
    return (example / "report.md").read_text(encoding="utf-8")


def test_the_decision_comes_first(html: str, markdown: str) -> None:
    assert markdown.splitlines()[0] == f"**{SENTENCE}**"
    body = Page(html).text
    assert body.index(SENTENCE) < body.index("Spec annie") < body.index("Gates by candidate")


def test_html_is_well_formed_and_needs_nothing(html: str) -> None:
    page = Page(html)
    assert page.open == []
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "iframe", "object", "a", "base", "form"}
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        for name in ("src", "href", "data", "style"):
            assert attributes.get(name, "data:,") == "data:,", (tag, attributes)
    assert "url(" not in html
    assert "@import" not in html


def test_tables_have_headers_and_pictures_have_words(html: str) -> None:
    page = Page(html)
    headers = [attributes.get("scope") for tag, attributes in page.tags if tag == "th"]
    assert headers.count("rowgroup") == 2
    assert headers.count("row") == 7 + 4
    assert headers.count("col") == 5 + 7
    pictures = [
        attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("role") == "img"
    ]
    assert len(pictures) == 7
    assert all("parent" in (picture["aria-label"] or "") for picture in pictures)


def test_everything_is_there(html: str, markdown: str) -> None:
    for said in (re.sub(r"[\u202f\s]+", " ", Page(html).text), re.sub(r"[\u202f\s]+", " ", markdown)):
        for expected in (
            "300/412",
            "68.2–77.1",
            "−27.0",
            "no_thinking_leak",
            "significantly worse",
            "W4A4, block scales by search, no data",
            "6.81",
            "20 s",
            "1.2e−9 nats",
            "133 more in its transcripts",
            "expected one call of search_memory, got none",
            'search_memory({"query": "robot project 0"})',
            "at least 5 probes lost",
            "2.13.0",
            "Xeon",
            "manners demo --out runs/demo",
        ):
            assert expected in said, expected
    manners, knowledge = markdown.index("### Manners"), markdown.index("### Knowledge")
    assert manners < markdown.index("| right_tool |") < knowledge < markdown.index("| factual |")


def test_hostile_reply_is_text_in_html(html: str) -> None:
    assert visible(HOSTILE) in "".join(Page(html).said)
    assert "\x1b" not in html
    assert "\u202e" not in html


def blocks(markdown: str) -> tuple[list[str], list[str]]:
    """Lines outside and inside of code blocks, by CommonMark's rule for fences."""
    outside, inside = [], []
    fence = ""
    for line in markdown.split("\n"):
        run = re.match(r" {0,3}(`{3,})([^`]*)$", line)
        if fence and run and len(run[1]) >= len(fence) and not run[2].strip():
            fence = ""
        elif fence:
            inside.append(line)
        elif run:
            fence = run[1]
        else:
            outside.append(line)
    assert not fence, "the last code block is never closed"
    return outside, inside


def test_hostile_reply_is_text_in_markdown(markdown: str) -> None:
    outside, inside = blocks(markdown)
    assert visible(HOSTILE) in "\n".join(inside)
    assert "# not a heading" in inside
    ours = r"## [A-Z]|### (Manners|Knowledge|Gates not passed|max|mse|w4a16)|#### [a-z]+-\d+: (lost|other) "
    assert [line for line in outside if line.startswith("#") and not re.match(ours, line)] == []
    rest = "\n".join(outside)
    assert not re.search(r"(?<!\\)<", rest)
    assert "javascript:" not in rest


def test_the_same_folder_gives_the_same_bytes(example: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(example, copy)
    before = [(copy / name).read_bytes() for name in ("report.html", "report.md")]
    paths = write_report(copy)
    assert [path.read_bytes() for path in paths] == before
    assert sorted(path.name for path in copy.iterdir()) == [
        "candidates",
        "report.html",
        "report.md",
        "summary.json",
    ]


def test_names_cannot_become_markup(example: Path, tmp_path: Path) -> None:
    """Names come from folders and files that anybody may have written."""
    evil = '"><script>x</script>'
    data = json.loads((example / "summary.json").read_text("utf-8"))
    data.update(
        spec=evil, parent=evil, engine=evil, hardware={evil: evil}, differences=[evil], commands=[evil]
    )
    data["shipped"] = None
    for candidate in data["candidates"][1:]:
        candidate.update(name=evil + candidate["name"], strategy=evil, note=evil)
        for gate in candidate["gates"]:
            gate.update(name=evil + gate["name"], why=evil, needs=evil, verdict="inconclusive")
    (tmp_path / "summary.json").write_text(json.dumps(data), encoding="utf-8")
    html_path, markdown_path = write_report(tmp_path)
    page = Page(html_path.read_text(encoding="utf-8"))
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.tags}
    outside, _ = blocks(markdown_path.read_text(encoding="utf-8"))
    assert not re.search(r"(?<!\\)<", "\n".join(outside))


def test_missing_transcripts_are_said(example: Path, tmp_path: Path) -> None:
    save_summary(load_summary(example), tmp_path)
    shutil.copytree(example / "candidates", tmp_path / "candidates")
    (tmp_path / "candidates/max/transcripts.jsonl").unlink()
    (tmp_path / "candidates/mse/verdicts.json").write_text("{}", encoding="utf-8")
    said = Page(write_report(tmp_path)[0].read_text(encoding="utf-8")).text
    assert "max: its transcripts cannot be read (transcripts-missing)" in said
    assert "mse: which probes lost a gate is not known (verdicts-syntax)" in said
    assert "w4a16 answers differently on 1 of 412 probes" in said


def test_only_what_the_parent_did_right_is_told(example: Path, tmp_path: Path) -> None:
    """Where the parent fails too, the candidate lost nothing, and the reason would mislead."""
    save_summary(load_summary(example), tmp_path)
    shutil.copytree(example / "candidates", tmp_path / "candidates")
    path = tmp_path / "candidates/max/verdicts.json"
    verdicts = json.loads(path.read_text("utf-8"))
    concise = next(gate for gate in verdicts["gates"] if gate["name"] == "concise")
    concise["failures"].append({"probe": "memory-0", "turn": 0, "why": "both were too long"})
    path.write_text(json.dumps(verdicts), encoding="utf-8")
    said = Page(write_report(tmp_path)[0].read_text(encoding="utf-8")).text
    assert "right_tool, exact_arguments, turn 1: expected one call of search_memory" in said
    assert "both were too long" not in said


def test_run_json_fills_the_gaps(example: Path, tmp_path: Path) -> None:
    bare = load_summary(example).model_copy(update={"engine": None, "seeds": None, "commands": ()})
    save_summary(bare, tmp_path)
    run = {"engine": "from run.json", "seeds": {"probes": 99}, "command": ["manners", "run", "a b"]}
    (tmp_path / "run.json").write_text(json.dumps(run), encoding="utf-8")
    said = write_report(tmp_path)[1].read_text(encoding="utf-8")
    assert "- Engine: from run.json" in said
    assert "- Seeds, probes: 99" in said
    assert "manners run 'a b'" in said
    assert "parent: its transcripts cannot be read (transcripts-missing)" in said


def test_an_almost_empty_run_still_reports(tmp_path: Path) -> None:
    candidates = [
        {"name": "parent", "strategy": "BF16"},
        {"name": "max", "strategy": "W4A4", "note": "refused: width"},
    ]
    base = {"schema": 1, "spec": "annie", "parent": "p", "comparability": "comparable", "shipped": None}
    save_summary(Summary.model_validate({**base, "candidates": candidates}), tmp_path)
    html_path, markdown_path = write_report(tmp_path)
    assert "max was not measured" in markdown_path.read_text(encoding="utf-8")
    said = Page(html_path.read_text(encoding="utf-8")).text
    assert "No gate was measured" in said
    assert "refused: width" in said


def test_a_refused_summary_leaves_the_old_report(example: Path, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"schema": 1}', encoding="utf-8")
    (tmp_path / "report.html").write_text("old", encoding="utf-8")
    with pytest.raises(RunError, match="summary-field"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == "old"


def test_reporting_needs_no_torch_and_no_http() -> None:
    """`manners report` must open anywhere, quickly."""
    heavy = "('torch', 'transformers', 'aiohttp')"
    check = f"import sys, manners.report; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def luminance(colour: str) -> float:
    """WCAG 2: relative luminance of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_contrast(html: str, scheme: int) -> None:
    """WCAG AA: text needs 4.5 to 1 against what it stands on."""
    block = re.findall(r":root \{([^}]*)\}", html)[scheme]
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block))
    for ink, grounds in {
        "ink": ("paper", "panel", "pass-tint", "fail-tint", "open-tint"),
        "soft": ("paper", "panel", "pass-tint", "fail-tint", "open-tint"),
        "pass": ("paper", "pass-tint"),
        "fail": ("paper", "panel", "fail-tint"),
        "open": ("paper", "open-tint"),
        "mark-ink": ("mark",),
    }.items():
        for ground in grounds:
            bright, dim = sorted((luminance(colours[ink]), luminance(colours[ground])), reverse=True)
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (ink, ground)


def test_terminal(example: Path) -> None:
    console = Console(width=80, color_system=None)
    with console.capture() as captured:
        console.print(render_terminal(load_summary(example)))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join(lines[:2]).split() == SENTENCE.split()
    right_tool = next(line for line in lines if line.startswith("right_tool"))
    assert re.sub(" +", " ", right_tool) == "right_tool 100 72.8 −27.0 FAIL 99.5 −0.5 pass 100 ±0 pass"
    order = [line.split()[0] for line in lines if line and line[0] != " "]
    assert order.index("MANNERS") < order.index("concise") < order.index("KNOWLEDGE") < order.index("factual")


def test_terminal_wraps_and_takes_names_as_they_are() -> None:
    gate = {"name": "[bold]x[/bold]", "n": 26, "passed": 26, "parent_passed": 26, "interval": [0.86, 1]}
    rows = [
        {"name": f"[red]{i}\x1b[31m", "strategy": "s", "gates": [{**gate, "verdict": "inconclusive"}]}
        for i in range(6)
    ]
    base = {"schema": 1, "spec": "annie", "parent": "p", "comparability": "comparable", "shipped": None}
    console = Console(width=60, color_system=None)
    with console.capture() as captured:
        console.print(render_terminal(Summary.model_validate({**base, "candidates": rows})))
    said = captured.get()
    assert "\x1b" not in said
    assert "[bold]x[/bold]" in said
    assert "…" not in said
