"""`load`: files, the hub, the data directory, and errors that name every way out."""

import sys
import types

import pytest
import torch

from data_setup import FakeHubSplit, one_line, pictures
from lamina.base.errors import BadInput
from lamina.data import load
from lamina.data.readers import cifar
from lamina.data.readers.sources import SOURCES


def test_digits_keep_their_seventeen_grey_levels():
    train, test = load("digits")
    assert (len(train), len(test), train.classes) == (1438, 359, 10)
    levels = torch.unique(torch.cat([train.x, test.x])) * 16
    assert levels.tolist() == list(range(17))
    assert test.y.bincount(minlength=10).min() > 20
    assert torch.equal(load("digits").test.x, test.x)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(BadInput, match="did you mean 'fashion-mnist'"):
        load("fashion_mnist")
    assert all(source.description for source in SOURCES.values())


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "digits"])
def test_missing_files_are_named_with_every_way_out(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if not installed
    with pytest.raises(BadInput) as refused:
        load(name, tmp_path)
    text = one_line(refused)
    for part in (str(tmp_path), "LAMINA_DATA", ".[hub]", SOURCES[name].files, "(from http"):
        assert part in text
    assert "md5" not in text  # said of a file that is wrong, not of one that is not there


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "digits"])
def test_without_the_directory_its_files_are_named_too(name, tmp_path):
    with pytest.raises(BadInput) as refused:
        load(name, tmp_path / "nowhere")
    text = one_line(refused)
    for part in ("does not exist", SOURCES[name].files, SOURCES[name].published):
        assert part in text


@pytest.fixture
def fake_hub(monkeypatch):
    """An installed `datasets` whose hub holds what the test puts there; records what it was asked for."""
    hub = types.SimpleNamespace(splits={}, asked=[])

    def load_dataset(repository):
        hub.asked.append(repository)
        return hub.splits

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return hub


def test_the_hub_is_asked_when_there_are_no_files(tmp_path, fake_hub):
    fake_hub.splits = {
        "train": FakeHubSplit({"img": pictures("RGB", "RGB"), "fine_label": [0, 99], "coarse_label": [4, 5]}),
        "test": FakeHubSplit({"img": pictures("RGB"), "fine_label": [99], "coarse_label": [5]}),
    }
    train, test = load("cifar100", tmp_path)
    assert fake_hub.asked == ["uoft-cs/cifar100"]
    assert (train.labels.tolist(), train.columns["coarse_label"].tolist()) == ([0, 99], [4, 5])
    assert (test.name, test.mean) == ("cifar100", cifar.CIFAR100.mean)


def test_the_hub_is_left_alone_when_not_needed(tmp_path, fake_hub):
    load("digits", tmp_path)
    assert fake_hub.asked == []


def test_a_hub_set_of_another_layout_is_explained(tmp_path, fake_hub):
    fake_hub.splits = {"train": FakeHubSplit({"image": pictures("RGB"), "label": [0]})}
    with pytest.raises(BadInput, match=r"zh-plus/tiny-imagenet has no split 'valid' \(splits: train\)"):
        load("tinyimagenet", tmp_path)
    fake_hub.splits["valid"] = FakeHubSplit({"image": pictures("L"), "label": [0]})
    with pytest.raises(BadInput, match="need 1 value each"):  # a colour set cannot be grey
        load("tinyimagenet", tmp_path)


def test_an_unreachable_hub_is_reported_with_its_reason(tmp_path, monkeypatch):
    def load_dataset(repository):
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(BadInput, match=r"no files of mnist .*ylecun/mnist \(no route to host\).*mnist/") as refused:
        load("mnist", tmp_path)
    one_line(refused)


def test_the_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    known = {(*image, label) for image, label in zip(images.tolist(), labels.tolist(), strict=True)}
    for data in load("digits"):  # every sample is one of scikit-learn's, with its label
        pixels = (data.x.flatten(1) * 16).tolist()
        assert {(*image, label) for image, label in zip(pixels, data.labels.tolist(), strict=True)} <= known
