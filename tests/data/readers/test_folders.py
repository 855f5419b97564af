"""Pictures of the user's own in one folder per class, and damaged ones, which are refused in one line."""

import sys

import pytest
import torch

from data_setup import pictures, refusal
from lamina.base.errors import BadInput, MissingExtra
from lamina.data import load


def save_pictures(folder, **modes):
    for place, mode in modes.items():
        for number, picture in enumerate(pictures(*mode)):
            (folder / place).mkdir(parents=True, exist_ok=True)
            picture.save(folder / place / f"{number}.png")


def test_a_folder_of_pictures_per_class(folder, caplog):
    save_pictures(folder / "pets" / "train", dog=["L", "L"], cat=["L"])
    save_pictures(folder / "pets" / "test", dog=["RGB"])
    (folder / "pets" / "train" / "dog" / "notes.txt").write_text("good dogs")
    train, test = load("images", path="pets")
    assert "pets/train/dog/notes.txt" in caplog.text
    assert (tuple(train.x.shape), train.x.dtype) == ((3, 3, 3, 4), torch.uint8)  # colour, because one picture has it
    assert (train.y.tolist(), test.y.tolist(), train.class_names) == ([0, 1, 1], [1], ("cat", "dog"))
    parts = load("images", path="pets/train", test=0.34, size=[6, 5])
    assert tuple(parts.train.x.shape[1:]) == (1, 6, 5)
    assert len(parts.test) == 1


def test_damaged_pictures(folder):
    save_pictures(folder / "pets", dog=["L", "L"], cat=["L", "L"])
    assert "pets/cat' is not" not in refusal("images", path="pets/cat")
    assert "holds no folders" in refusal("images", path="pets/cat")
    assert "is not a folder" in refusal("images", path="pets/cat/0.png")
    picture = folder / "pets" / "cat" / "1.png"
    whole = picture.read_bytes()
    picture.write_bytes(whole[: len(whole) // 2])
    assert "1.png is not a readable picture" in refusal("images", path="pets")
    picture.write_bytes(b"")
    assert "1.png is not a readable picture" in refusal("images", path="pets")
    pictures("L", size=(9, 9))[0].save(picture)
    assert "data.size = [height, width] resizes those of files" in refusal("images", path="pets")
    (folder / "pets" / "bird").mkdir()
    assert "bird' holds no pictures" in refusal("images", path="pets")
    assert "must be a height and a width" in refusal("images", path="pets", size=[3])
    (folder / "pets" / "bird").rmdir()
    save_pictures(folder / "more", dog=["L"], cow=["L"])
    options = {"path": "pets", "test": "more", "size": [3, 4]}
    assert "the class 'cow' appears only in the test data" in refusal("images", **options)


@pytest.mark.parametrize("size", [[-1, 5], [0, 4], [4], [4, 4, 4]])
def test_a_size_that_no_picture_has_is_refused(tmp_path, size):
    for name in "ab":
        (tmp_path / name).mkdir()
    with pytest.raises(BadInput, match=r"data\.size = .*: must be a height and a width"):
        load("images", path=str(tmp_path), size=size)


def test_pictures_without_pillow_name_the_extra(folder, monkeypatch):
    save_pictures(folder / "pets", dog=["L"], cat=["L"])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"pip install -e '\.\[images\]'"):
        load("images", path="pets", test=0.5)
