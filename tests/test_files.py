"""A reader must find the old thing or the new one, never half of either."""

from pathlib import Path

import pytest

from manners.files import folder_at_once, write_json, write_text


def test_a_file_is_replaced_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / ".a.txt.part").write_text("of a killed run")
    write_text(tmp_path / "a.txt", "old")
    write_text(tmp_path / "a.txt", "grüße")
    assert (tmp_path / "a.txt").read_bytes() == "grüße".encode()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_json_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"a": object()})
    assert (tmp_path / "a.json").read_text() == '{\n  "a": 1\n}\n'


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "folder"
    with folder_at_once(target) as part:
        (part / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [path.name for path in target.parent.iterdir()] == ["folder"]


def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with folder_at_once(target) as part:
        (part / "a").write_text("old")

    def interrupted() -> None:
        with folder_at_once(target) as part:
            (part / "a").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (target / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / ".folder.old").mkdir()
    (tmp_path / ".folder.old" / "a").write_text("old")

    def interrupted() -> None:
        with folder_at_once(tmp_path / "folder"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "folder" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_what_a_killed_run_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / ".folder.part").mkdir()
    (tmp_path / ".folder.part" / "stale").write_text("x")
    with folder_at_once(tmp_path / "folder") as part:
        assert list(part.iterdir()) == []
