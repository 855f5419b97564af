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


def test_no_more_cores_are_usable_than_there_are():
    devices = doctor.devices([])
    assert 1 <= devices["usable cores"] <= devices["cores"]


def test_spinning_threads_are_warned_about(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    for policy, warned in (("PASSIVE", False), ("passive", False), ("ACTIVE", True), (None, True)):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if policy:
            monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        advice = []
        doctor.threads(advice)
        assert any("OMP_WAIT_POLICY=PASSIVE" in line for line in advice) == warned


def test_more_threads_than_cores_are_warned_about(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    advice = []
    doctor.threads(advice)
    assert "only 2 cores are yours: set run.threads and OMP_NUM_THREADS to 2 at most" in advice


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
    assert any(line.startswith("cifar10 is not in") and "cifar-10-binary.tar.gz" in line for line in advice)


def test_a_data_directory_that_does_not_exist(monkeypatch):
    monkeypatch.setenv("LAMINA_DATA", "nowhere")
    advice = []
    assert doctor.data(advice) == {"directory": None}
    assert any("'nowhere' does not exist" in line for line in advice)


def test_an_incomplete_set_is_named():
    names = [file.name for file in idx.MNIST.releases[0].files]
    touch(f"data/MNIST/raw/{names[0]}", f"data/MNIST/raw/{names[1]}")
    advice = []
    assert doctor.data(advice)["mnist"] == "data/MNIST/raw (incomplete)"
    assert f"mnist: data/MNIST/raw lacks {names[2]}, {names[3]}: put all of its files there" in advice


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
