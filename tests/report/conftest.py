from __future__ import annotations

from pathlib import Path

import pytest

from manners.report import write_report

from .example_run import write_example


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its report. Read only: copy it before changing it."""
    run_dir = tmp_path_factory.mktemp("example") / "run"
    write_example(run_dir)
    write_report(run_dir)
    return run_dir
