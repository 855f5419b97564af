"""Run folders with odd settings, numbers or files: readers show them, or refuse them in one line with their name."""

import json
import os
import sys
from pathlib import Path

import pytest

from helpers import call, said_in_one_line
from lamina.data.readers import sources
from run_folders import write_run

READERS = [("watch", "odd", "--once"), ("export", "odd"), ("report", "odd", "--out", "page.html")]


def change(folder, key, value):
    path = Path(folder, "config.json")
    config = json.loads(path.read_text())
    *outer, last = key.split(".")
    section = config
    for name in outer:
        section = section.setdefault(name, {})
    section[last] = value
    path.write_text(json.dumps(config))


@pytest.fixture
def odd(empty_folder):
    return write_run(Path("odd"), [0.1, 0.5, 0.4])


@pytest.mark.parametrize(
    ("key", "value"), [("train.rounds", "x"), ("train.rounds", 1e999), ("train.lr", None), ("train", 5), ("data", [])]
)
def test_a_setting_that_no_run_has_is_one_line_with_the_folder(odd, capsys, key, value):
    change(odd, key, value)
    for reader in READERS:
        assert call(*reader) == 2
        assert "odd/config.json' is not a run's configuration: " in said_in_one_line(capsys)


@pytest.mark.parametrize("name", ["", "a b", "../x", "round"])
def test_a_bad_metric_name_is_one_line_with_the_folder(odd, capsys, name):
    write_run(Path("good"), [0.5])
    change(odd, "metrics", [{"name": name, "larger_is_better": True, "percent": True}])
    for reader in (("watch", "odd", "--once"), ("report", "good", "odd", "--out", "page.html")):
        assert call(*reader) == 2
        assert "odd/config.json' describes a metric that cannot be used: " in said_in_one_line(capsys)


@pytest.mark.parametrize(
    "key", ["compare.target", "data.clients", "algorithm.decay", "data.partition.k", "compare.seeds"]
)
@pytest.mark.parametrize("value", [10**18, 10**400, 1e308, [10**400], None, "x"])
def test_huge_numbers_in_other_settings_are_shown(odd, capsys, key, value):
    change(odd, key, value)
    for reader in READERS:
        assert call(*reader) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("value", [1e308, -1e308, 10**300, 1e30, 5e-324])
@pytest.mark.parametrize("column", ["accuracy", "loss", "seconds", "bytes_up", "drift"])
def test_huge_metrics_are_shown(odd, capsys, column, value):
    write_run(odd / "second", [0.1, 0.5, 0.4], seed=1)
    for metrics in odd.rglob("metrics.jsonl"):
        rows = [{**json.loads(line), column: value} for line in metrics.read_text().splitlines()]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for reader in READERS:
        assert call(*reader) == 0
    assert capsys.readouterr().err == ""


def test_no_file_that_a_folder_names_is_opened(tmp_path, monkeypatch):
    """A folder may be from somebody else, and name any file of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    write_run(tmp_path / "a", [0.5], data={"name": "table", "path": "/etc/shadow", "label": "kind"})
    opened = []
    monkeypatch.setattr(sources, "load", lambda *names, **options: opened.append(names))
    for command in (("report", "a"), ("export", "a"), ("watch", "a", "--once")):
        assert call(*command) == 0
    assert opened == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json", "diverged.json"])
def test_a_pipe_in_a_folder_is_not_read(tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"), [0.5])
    Path("a", name).unlink(missing_ok=True)
    os.mkfifo(Path("a", name))
    for command in (("report", "a"), ("watch", "a", "--once"), *([("export", "a")] * (name != "diverged.json"))):
        assert call(*command) == 2
        assert f"{name}': it is not a file" in said_in_one_line(capsys)
