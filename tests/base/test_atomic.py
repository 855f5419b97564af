"""Files are replaced at once: after a failure the old file is still there, and links and permissions stay."""

import pytest

from helpers import mode
from lamina.base.atomic import PARTIAL, write_file


def test_a_file_is_replaced_by_bytes_or_by_parts(tmp_path):
    path = tmp_path / "a"
    write_file(path, b"one")
    assert path.read_bytes() == b"one"
    write_file(path, (part for part in (b"tw", b"o")))
    assert path.read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failure_leaves_the_old_file_and_no_partial_one(tmp_path):
    def parts():
        yield b"half"
        raise OSError("disk full")

    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="disk full"):
        write_file(path, parts())
    assert path.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_partial_file_of_a_killed_process_is_replaced(tmp_path):
    (tmp_path / f"a{PARTIAL}").write_bytes(b"longer than the new contents")
    write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_and_the_permissions_of_its_target_stay(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_file(link, b"new")
    assert link.is_symlink()
    assert (target.read_bytes(), mode(target)) == (b"new", 0o640)


def test_a_folder_is_not_replaced(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="it is not a file"):
        write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").is_dir()
