"""`lamina doctor` says what is there and what to do about the rest."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers import call
from lamina import BadInput, __version__
from lamina.cli import doctor
from lamina.data.readers import cifar, idx, tinyimagenet
from lamina.data.readers.sources import SOURCES


@pytest.fixture(autouse=True)
def here(empty_folder, monkeypatch):
    monkeypatch.delenv("LAMINA_DATA", raising=False)
    return empty_folder


def touch(*paths):
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_it_says_what_is_there(capsys):
    assert call("doctor") == 0
    shown = capsys.readouterr().out
    for part in (f"lamina          {__version__}", f"torch           {torch.__version__}", "cores", "OMP_WAIT_POLICY",
                 "digits          comes with scikit-learn", "advice"):  # fmt: skip
        assert part in shown


def test_every_extra_is_one_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    for extra, (package, _) in doctor.EXTRAS.items():
        assert any(line.startswith(package) for line in declared.get(extra, [package])), extra


def test_a_missing_extra_is_one_line(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda package: None if package == "pandas" else "1.0")
    advice = []
    assert doctor.installed(advice)["pandas"] is None
    assert advice == ["history.to_pandas() and data in tables: pip install -e '.[table]'"]


def test_gpus(monkeypatch, capsys):
    facts = SimpleNamespace(name="H200", total_memory=139 * 2**30, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: facts)
    monkeypatch.setattr("lamina.engines.stacked.layers.convolution.kernels_for", lambda device, dtype: None)
    assert call("doctor") == 0
    shown = capsys.readouterr().out
    assert "H200, 139.0 GiB, capability 9.0, without lamina's kernels" in shown


def test_data_that_are_not_there():
    advice = []
    assert doctor.data(advice)["mnist"] is None
    assert any(line.startswith("cifar10 is missing") and "cifar-10-binary.tar.gz" in line for line in advice)


def test_an_incomplete_set_is_named():
    names = [file.name for file in idx.MNIST.releases[0].files]
    touch(f"data/MNIST/raw/{names[0]}", f"data/MNIST/raw/{names[1]}")
    advice = []
    assert doctor.data(advice)["mnist"] == "data/MNIST/raw (incomplete)"
    assert any(line.startswith("mnist is incomplete") for line in advice)


@pytest.mark.parametrize(
    ("name", "file", "place"),
    [
        ("mnist", "mnist/train-labels-idx1-ubyte.gz", "mnist"),
        ("fashion-mnist", "FashionMNIST/raw/t10k-labels-idx1-ubyte.gz", "FashionMNIST/raw"),
        *[
            (files.name, f"{release.folder}/{release.test[0].name}", release.folder)
            for files in (cifar.CIFAR10, cifar.CIFAR100)
            for release in files.releases
        ],
        ("tinyimagenet", f"tinyimagenet/{tinyimagenet.FOLDER}/wnids.txt", f"tinyimagenet/{tinyimagenet.FOLDER}"),
    ],
)
def test_what_it_finds_is_what_would_be_read(name, file, place):
    touch(Path("data") / file)
    assert SOURCES[name].locate(Path("data")).path == Path("data") / place
    with pytest.raises(BadInput, match=place.partition("/")[0]):  # found there, and refused: the file is empty
        SOURCES[name].read(Path("data"))
