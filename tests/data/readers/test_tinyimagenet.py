"""The TinyImageNet folder."""

import sys

import pytest
import torch

from data_setup import one_line
from lamina.base.errors import BadInput, MissingExtra
from lamina.data.readers import tinyimagenet


def set_size(monkeypatch, classes, train, test):
    """Let a complete copy be of this size."""
    for name, count in (("CLASSES", classes), ("TRAIN_IMAGES", train), ("TEST_IMAGES", test)):
        monkeypatch.setattr(tinyimagenet, name, count)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    set_size(monkeypatch, 2, 4, 3)
    Image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "tiny-imagenet-200"
    for label, wnid in enumerate(["n01", "n02"]):
        images = folder / "train" / wnid / "images"
        images.mkdir(parents=True)
        for i in range(2):
            # One grey picture among the colours, as in the real set.
            mode, colour = ("L", 40) if (label, i) == (0, 0) else ("RGB", (200 * label, 10, 10 + 100 * i))
            Image.new(mode, (64, 64), colour).save(images / f"{wnid}_{i}.JPEG", quality=95)
    (folder / "val" / "images").mkdir(parents=True)
    lines = []
    for i, wnid in enumerate(["n02", "n01", "n02"]):
        Image.new("RGB", (64, 64), (0, 100 * i, 0)).save(folder / "val" / "images" / f"val_{i}.JPEG", quality=95)
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t62\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return folder


def test_tinyimagenet_folder(tiny):
    train, test = tinyimagenet.read_set(tiny.parent)
    assert train.labels.tolist() == [0, 0, 1, 1]
    assert test.labels.tolist() == [1, 0, 1]
    assert train.x.shape == (4, 3, 64, 64)
    # JPEG is lossy, flat colours nearly are not.
    expected = torch.tensor([[40, 40, 40], [0, 10, 110], [200, 10, 10], [200, 10, 110]])
    assert (train.x[:, :, 32, 32].int() - expected).abs().max() <= 4
    assert (test.x[:, 1, 5, 5].int() - torch.tensor([0, 100, 200])).abs().max() <= 4


def test_tinyimagenet_without_pillow_names_the_extra(tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"pip install -e '\.\[images\]'"):
        tinyimagenet.read_set(tiny.parent)


def test_incomplete_tinyimagenet_folders_are_refused(tiny, monkeypatch):
    def refused_with(message):
        with pytest.raises(BadInput, match=message) as refused:
            tinyimagenet.read_set(tiny.parent)
        one_line(refused)

    for message, *size in (
        ("2 class folders, not 200", 200, 4, 3), ("4 images, not 5", 2, 5, 3), ("3 images, not 4", 2, 4, 4)
    ):  # fmt: skip
        set_size(monkeypatch, *size)
        refused_with(message)
    set_size(monkeypatch, 2, 4, 3)
    annotations = tiny / "val" / "val_annotations.txt"
    good = annotations.read_text()
    for line in ("val_0.JPEG n02\n", "val_0.JPEG\tn99\t0\n", "../../secret.JPEG\tn01\t0\n", "\tn01\n"):
        annotations.write_text(line)
        refused_with("line 1 is not")
    annotations.write_text(good)
    picture = tiny / "train" / "n02" / "images" / "n02_1.JPEG"
    content = picture.read_bytes()
    picture.write_bytes(content[: len(content) // 2])
    refused_with("n02_1.JPEG is not a readable picture")
    picture.write_bytes(b"GIF?")
    refused_with("n02_1.JPEG is not a readable picture")
    annotations.unlink()
    refused_with("val_annotations.txt is missing")
