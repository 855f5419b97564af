"""The files of published data sets are found and compared with their checksums."""

from pathlib import Path

import numpy as np
import pytest

from lamina.base.errors import BadInput
from lamina.data import load
from lamina.data.readers.files import PublishedFile, PublishedSet, Release, data_directory, own_path, verify_md5


def test_md5_of_known_content(tmp_path):
    path = tmp_path / "abc"
    verify_md5(path, b"abc", "900150983cd24fb0d6963f7d28e17f72")  # RFC 1321's own example
    with pytest.raises(BadInput, match="900150983cd24fb0d6963f7d28e17f73, found 900150983cd24fb0d6963f7d28e17f72"):
        verify_md5(path, b"abc", "900150983cd24fb0d6963f7d28e17f73")


def test_data_directory_is_argument_then_environment_then_data(tmp_path, monkeypatch):
    monkeypatch.delenv("LAMINA_DATA", raising=False)
    assert data_directory() == Path("data")
    monkeypatch.setenv("LAMINA_DATA", str(tmp_path))
    assert data_directory() == tmp_path
    other = tmp_path / "other"
    other.mkdir()
    assert data_directory(other) == other
    with pytest.raises(BadInput, match="does not exist"):
        data_directory(tmp_path / "nowhere")
    monkeypatch.setenv("LAMINA_DATA", str(tmp_path / "nowhere"))
    assert len(load("digits").train) == 1438  # needs no directory


def decode(contents, classes):
    """Return one black picture for every byte of the files, and the bytes as labels."""
    labels = np.frombuffer(b"".join(content.data for content in contents), np.uint8).astype(np.int64)
    return np.zeros((len(labels), 1, 2, 2), np.uint8), labels[:, None]


def published(*folders):
    """Return a data set of two files, with one release in each folder."""
    train, test = PublishedFile("train", (3, 1, 2, 2)), PublishedFile("test", (1, 1, 2, 2))
    releases = tuple(Release(folder, (train,), (test,), decode) for folder in folders)
    return PublishedSet("pets", 3, (0.5,), (0.25,), releases)


def write(folder, train, test):
    folder.mkdir(parents=True)
    (folder / "train").write_bytes(bytes(train))
    (folder / "test").write_bytes(bytes(test))


def test_the_first_release_that_is_found_is_read(tmp_path):
    files = published("new", "old")
    assert files.read(tmp_path) is files.locate(tmp_path) is None
    write(tmp_path / "old", [0, 1, 2], [1])
    train, test = files.read(tmp_path)
    assert (train.y.tolist(), test.y.tolist(), train.classes, test.mean) == ([0, 1, 2], [1], 3, (0.5,))
    write(tmp_path / "pets" / "new", [2, 1], [0])
    assert files.read(tmp_path).train.y.tolist() == [2, 1]
    assert files.locate(tmp_path).path == tmp_path / "pets" / "new"


def test_a_missing_file_is_known_before_anything_is_read(tmp_path):
    write(tmp_path / "new", [0, 1, 2], [1])
    (tmp_path / "new" / "test").unlink()
    assert published("new").locate(tmp_path) == (tmp_path / "new", ["test"])
    with pytest.raises(BadInput, match="new lacks test; put all files of the set there"):
        published("new").read(tmp_path)


def test_a_relative_path_starts_at_the_given_folder_and_must_exist(tmp_path):
    (tmp_path / "rows.csv").touch()
    assert own_path(tmp_path, "rows.csv") == own_path(Path("elsewhere"), str(tmp_path / "rows.csv"))
    with pytest.raises(BadInput, match=r"there is no file or folder '.*row\.csv': correct data.path"):
        own_path(tmp_path, "row.csv")
