"""Records in run folders: read while a run is going, refused if damaged, told apart, and deleted."""

import json

import pytest

from helpers import call, said_in_one_line
from lamina import BadInput
from lamina.experiment.runs.records import (
    REPLACED,
    delete_runs,
    differences,
    find_folders,
    find_records,
    read_record,
    refuse_foreign,
)
from run_folders import write_run
from small_run import command


def test_a_record_up_to_a_round_has_not_diverged_later(tmp_path):
    record = read_record(write_run(tmp_path / "r", [0.1, 0.2, 0.3], rounds=5, diverged="in round 4"))
    assert (record.complete, record.ended, record.diverged) == (False, True, "in round 4")
    short = record.up_to(2)
    assert (len(short.history), short.complete, short.diverged) == (2, True, None)
    assert record.up_to(4).diverged == "in round 4"


def test_a_users_algorithm_keeps_the_title_that_it_ran_with(tmp_path):
    folder = write_run(tmp_path / "r", [0.1], algorithm="mine:Own")
    assert read_record(folder).title == "mine:Own"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "title": "My method"}))
    assert read_record(folder).title == "My method"


def test_a_run_is_found_once_at_any_depth(tmp_path):
    folders = [write_run(tmp_path / name, [0.1]) for name in ("a", "b/c/d")]
    assert find_folders([tmp_path, folders[0]]) == [folder.resolve() for folder in folders]


def test_only_settings_that_change_the_result_tell_runs_apart():
    stored = {"train": {"rounds": 4, "lr": 0.1}, "run": {"device": "cuda:0", "threads": 1}, "data": {"dir": "a"}}
    same = {"train": {"rounds": 9, "lr": 0.1}, "run": {"device": "cuda:1", "threads": 2}, "data": {"dir": "b"}}
    assert differences(stored, same, finished=4) == ""
    assert differences(stored, {**same, "train": {"rounds": 3, "lr": 0.1}}, finished=4) == "train.rounds = 4 (now 3)"
    assert differences(stored, {**same, "train": {"rounds": 4, "lr": 0.2}}, finished=4) == "train.lr = 0.1 (now 0.2)"


def test_nothing_is_deleted_if_one_of_the_runs_holds_a_foreign_file(tmp_path):
    runs = [write_run(tmp_path / name, [0.1]) for name in ("a", "b")]
    (runs[1] / "thesis.txt").write_text("years of work")
    with pytest.raises(BadInput, match=r"holds other files \('thesis.txt'\)"):
        refuse_foreign(runs[1])
    with pytest.raises(BadInput, match=r"thesis\.txt"):
        delete_runs(tmp_path, runs)
    assert len(find_records([tmp_path])) == 2
    (runs[1] / "thesis.txt").unlink()
    delete_runs(tmp_path, runs)
    assert [path.name for path in tmp_path.iterdir()] == [REPLACED]


def test_a_record_of_a_run_that_is_still_going(half):
    metrics = half.parent / "whole" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:5]) + '{"round": 6, "lo')
    record = read_record(metrics.parent)
    assert (len(record.history), record.complete, record.ended) == (5, False, False)
    with pytest.raises(BadInput, match="no run in"):
        find_records([metrics.parent / "checkpoints"])
    with pytest.raises(BadInput, match="no folder 'none' in '"):
        find_records(["none"])
    with pytest.raises(BadInput, match=f"no folder '.*'; did you mean '{metrics.parent.name}'"):
        find_records([metrics.parent.with_name(metrics.parent.name[:-1])])


@pytest.mark.parametrize("reader", [("report", "half"), ("export", "half"), ("watch", "half", "--once")])
def test_a_folder_of_another_format_is_not_read_as_if_it_were_ours(half, capsys, reader):
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "format": 0}))
    assert call(*reader) == 2
    message = capsys.readouterr().err
    assert "was written by another lamina (format 0, this one's is 1)" in message
    assert message.count("\n") == 1


def without(*keys):
    def change(config):
        inner = config
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        return config

    return change


DAMAGES = [
    lambda config: "{",
    lambda config: [],
    lambda config: {},
    lambda config: "[" * 100_000,
    without("train"),
    without("train", "rounds"),
    without("algorithm"),
    without("algorithm", "name"),
    lambda config: {**config, "train": 5},
    lambda config: {**config, "data": [1]},
    lambda config: {**config, "train": {**config["train"], "rounds": "many"}},
    lambda config: {**config, "train": {**config["train"], "lr": None}},
    lambda config: {**config, "train": {**config["train"], "lr": 10**400}},
    lambda config: {**config, "train": {**config["train"], "seed": [1]}},
]


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_config_is_one_line_everywhere(half, capsys, damage):
    path = half / "config.json"
    damaged = damage(json.loads(path.read_text()))
    path.write_text(damaged if isinstance(damaged, str) else json.dumps(damaged))
    for reader in (
        ("watch", "half", "--once"),
        ("export", "half"),
        ("report", "half", "--out", "page.html"),
        command("half", rounds=6),
    ):
        assert call(*reader) == 2, reader
        said_in_one_line(capsys)
