"""Fixtures that several rooms share. Heavy imports happen inside them: torch-free tests stay quick."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# The models here are so small that threads only get in each other's way. Set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3.5 parent folder (BF16, untied head). Read only: copy it before changing it."""
    from tests.tiny import make_tiny_parent

    return make_tiny_parent(tmp_path_factory.mktemp("tiny") / "parent")


@pytest.fixture(scope="session")
def tiny_candidate(tiny_parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A W4A4 canonical checkpoint of ``tiny_parent``. Read only: copy it before changing it."""
    from manners.quantize import quantize
    from tests.tiny import sample_ids

    folder = tmp_path_factory.mktemp("tiny") / "max"
    return quantize(tiny_parent, folder, rung="max", calibration=sample_ids(seed=1, rows=4)).checkpoint


@pytest.fixture(scope="session")
def tiny_w4a16(tiny_parent: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A W4A16 canonical checkpoint of ``tiny_parent``. Read only: copy it before changing it."""
    from manners.quantize import quantize

    folder = tmp_path_factory.mktemp("tiny") / "w4a16"
    return quantize(tiny_parent, folder, rung="w4a16", calibration=[]).checkpoint
