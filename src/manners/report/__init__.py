"""What people look at: ``write_report`` for a folder, ``render_terminal`` for the end of a run.

``summary`` holds the types of ``summary.json``; ``page`` gathers, ``render`` writes.
"""

from .render import write_report
from .summary import CandidateSummary, GateRow, RoundTrip, Summary, load_summary, save_summary
from .terminal import render_terminal

__all__ = [
    "CandidateSummary",
    "GateRow",
    "RoundTrip",
    "Summary",
    "load_summary",
    "render_terminal",
    "save_summary",
    "write_report",
]
