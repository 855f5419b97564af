"""Runs resume with damaged or lost files in their folders."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from helpers import Killed, assert_same, call
from lamina.experiment.records import read_record
from lamina.storage.checkpoint import Checkpoints
from small_run import command


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.long
@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("file", ["state-000004-*", "clients-000004-*", "round-000004.json"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(half, capsys, file, damage):
    (path,) = (half / "checkpoints").glob(file)
    damage(path)
    assert call(*command(half, rounds=6)) == 0
    assert_same("whole", half)
    said = capsys.readouterr().err
    if file != "round-000004.json" or damage is not Path.unlink:  # without its manifest there is no checkpoint
        assert len(said.splitlines()) == 1
        assert "the checkpoint of round 4 is damaged and not used" in said
        assert path.name in said
    log = (half / "log.txt").read_text()
    assert "resuming after round 3" in log


def test_without_a_sound_checkpoint_it_starts_again(half, capsys):
    for path in (half / "checkpoints").glob("state-*"):
        truncate(path)
    assert call(*command(half, rounds=6)) == 0
    assert capsys.readouterr().err.count("is damaged and not used") == 2
    assert_same("whole", half)


@pytest.mark.parametrize("tail", ['{"round": 5, "accuracy": 0.1}\n', '{"round": 5, "accu', "\x00\x00"])
def test_metrics_beyond_the_checkpoint_are_cut_back(half, tail):
    with (half / "metrics.jsonl").open("a") as file:
        file.write(tail)
    assert call(*command(half, rounds=6)) == 0
    assert_same("whole", half)


def test_missing_metrics_are_run_again(half):
    """A power failure may keep a checkpoint and lose the end of the metrics."""
    metrics = half / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]))
    assert call(*command(half, rounds=6)) == 0
    assert_same("whole", half)


def damage_line_2(metrics):
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0] + "garbage{\n" + "".join(lines[2:]))


def delete_line_2(metrics):
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text(lines[0] + "".join(lines[2:]))


def damage_line_1(metrics):
    metrics.write_text("garbage\n" + "".join(metrics.read_text().splitlines(keepends=True)[1:]))


DAMAGES = [damage_line_1, damage_line_2, delete_line_2, Path.unlink, lambda metrics: metrics.write_text("")]


@pytest.mark.parametrize("name", ["half", "whole"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_metrics_do_not_make_the_folder_free(half, capsys, damage, name):
    """Another configuration would have replaced checkpoints and model, without a word."""
    place = half.parent / name
    damage(place / "metrics.jsonl")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != "lock"}
    assert call(*command(place, "train.lr=0.5", rounds=6)) == 2
    assert "holds another run: train.lr = 0.02 (now 0.5)" in capsys.readouterr().err
    assert call(*command(place, rounds=3)) == 2  # fewer rounds than were trained
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file() and path.name != "lock"} == before


def test_a_model_alone_does_not_make_the_folder_free(half, capsys):
    """Not even one that cannot be read: somebody trained it."""
    whole = half.parent / "whole"
    shutil.rmtree(whole / "checkpoints")
    (whole / "metrics.jsonl").unlink()
    for damage in (lambda path: None, truncate):
        damage(whole / "model.safetensors")
        assert call(*command(whole, "train.lr=0.5", rounds=6)) == 2
        assert "holds another run" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("name", ["half", "whole"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_metrics_are_named_and_run_again(half, capsys, damage, name):
    """A complete run, too, which no command may call complete any more."""
    place = half.parent / name
    shutil.copytree(half.parent / "whole", half.parent / "undisturbed")
    damage(place / "metrics.jsonl")
    if (place / "metrics.jsonl").exists():
        assert not read_record(place).complete
    assert call(*command(place, rounds=6)) == 0
    said = capsys.readouterr().err
    line = {damage_line_1: "line 1 of", damage_line_2: "line 2 of", delete_line_2: "line 2 of"}.get(damage, "has 0 of ")
    assert len(said.splitlines()) == 1
    assert line in said
    assert "metrics.jsonl" in said
    assert "resuming after round 0; later rounds are run again" in said
    assert_same("undisturbed", place)
    assert read_record(place).complete
    assert call(*command(place, rounds=6)) == 0  # and once is enough
    assert capsys.readouterr().err == ""


def test_lost_metrics_are_named_only_once_though_the_run_is_killed_again(half, capsys, monkeypatch):
    whole = half.parent / "whole"
    damage_line_2(whole / "metrics.jsonl")
    save, left = Checkpoints.save, [3]

    def dying(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        save(*arguments)

    monkeypatch.setattr(Checkpoints, "save", dying)
    with pytest.raises(Killed):
        call(*command(whole, rounds=6))
    assert "line 2 of" in capsys.readouterr().err
    left[0] = 99
    assert call(*command(whole, rounds=6)) == 0
    assert capsys.readouterr().err == ""
    assert read_record(whole).complete


def test_a_model_cut_short_is_written_again(half, capsys):
    whole = half.parent / "whole"
    model = (whole / "model.safetensors").read_bytes()
    truncate(whole / "model.safetensors")
    assert call(*[word for word in command(whole, rounds=6) if word != "--quiet"]) == 0
    assert "is complete" not in capsys.readouterr().out
    assert (whole / "model.safetensors").read_bytes() == model


def test_what_is_lost_of_the_environment_does_not_stop_a_run(half, capsys):
    for text in (None, "{", "[]"):
        place = half.parent / f"copy{text}"
        shutil.copytree(half, place)
        (place / "environment.json").unlink()
        if text:
            (place / "environment.json").write_text(text)
        assert call(*command(place, rounds=6)) == 0
        assert "environment.json was lost or damaged" in capsys.readouterr().err
        assert read_record(place).environment["torch"] == torch.__version__
        assert_same("whole", place)


def test_damaged_descriptions_are_one_line(half, capsys):
    (half / "diverged.json").write_text("{}")
    assert call(*command(half, rounds=6)) == 3
    assert capsys.readouterr().err == "diverged: the training diverged, and diverged.json does not say how\n"
    (half / "diverged.json").unlink()
    config = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps({**config, "format": "x"}))
    assert call(*command(half, rounds=6)) == 2
    assert "was written by another lamina (format x, this one's is 1)" in capsys.readouterr().err
    (half / "config.json").write_text("{")
    assert call(*command(half, rounds=6)) == 2
    said = capsys.readouterr().err
    assert "holds a config.json that cannot be read" in said
    assert said.count("\n") == 1
