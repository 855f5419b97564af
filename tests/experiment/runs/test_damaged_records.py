"""Runs resume with damaged or lost files in their folders."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import lamina
from helpers import Killed, assert_same, call, said_in_one_line, skip_pictures, truncate, words
from lamina import BadInput
from lamina.experiment.runs.records import read_record
from lamina.storage.checkpoint import Checkpoints
from small_run import command


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def contents(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


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


def test_without_a_sound_checkpoint_nothing_is_replaced(half, capsys):
    for path in (half / "checkpoints").glob("state-*"):
        truncate(path)
    before = contents(half)
    assert call(*command(half, rounds=6)) == 2
    said = capsys.readouterr().err
    assert said.count("is damaged and not used") == 2
    assert "has 4 finished rounds but no sound checkpoint to resume from" in said.splitlines()[-1]
    assert contents(half) == before
    assert call(*command(half, rounds=6), "--overwrite") == 0
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


@pytest.mark.long
@pytest.mark.parametrize("name", ["half", "whole"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_metrics_do_not_make_the_folder_free(half, capsys, damage, name):
    """Another configuration would have replaced checkpoints and model, without a word."""
    place = half.parent / name
    damage(place / "metrics.jsonl")
    before = contents(place)
    assert call(*command(place, "train.lr=0.5", rounds=6)) == 2
    assert "holds another run: train.lr = 0.02 (now 0.5)" in capsys.readouterr().err
    assert call(*command(place, rounds=3)) == 2  # fewer rounds than were trained
    assert contents(place) == before


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
def test_damaged_metrics_do_not_discard_checkpoints(half, capsys, damage, name):
    """The run resumes when they are restored."""
    place = half.parent / name
    metrics = place / "metrics.jsonl"
    sound = metrics.read_bytes()
    damage(metrics)
    before = contents(place)
    assert call(*command(place, rounds=6)) == 2
    said = said_in_one_line(capsys)
    assert "metrics.jsonl" in said
    assert "all checkpoints are of later rounds: restore it from a copy, or start again with --overwrite" in said
    assert contents(place) == before
    metrics.write_bytes(sound)
    assert call(*command(place, rounds=6)) == 0
    assert capsys.readouterr().err == ""
    assert_same("whole", place)


def test_a_damaged_line_after_a_checkpoint_costs_only_the_rounds_after_it(half, capsys, monkeypatch):
    """It is named once, though the run is killed again."""
    metrics = half / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:3]) + "garbage\n")
    save, left = Checkpoints.save, [1]

    def dying(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        save(*arguments)

    monkeypatch.setattr(Checkpoints, "save", dying)
    with pytest.raises(Killed):
        call(*command(half, rounds=6))
    assert "metrics.jsonl is missing or damaged after round 3: resuming" in said_in_one_line(capsys)
    left[0] = 99
    assert call(*command(half, rounds=6)) == 0
    assert capsys.readouterr().err == ""
    assert_same("whole", half)


def small_simulation(**more):
    x = torch.linspace(-1, 1, 200).reshape(40, 5)
    y = (x[:, 0] > 0).long()
    weights = torch.nn.Linear(5, 2)
    with torch.no_grad():
        for value in weights.parameters():
            value.fill_(0.1)
    return lamina.Simulation(weights, (x, y), "scaffold", test=(x, y), clients=4, lr=0.1, device="cpu", **more)


@pytest.mark.parametrize("damage", [damage_line_1, Path.unlink])
def test_a_simulation_with_damaged_metrics_is_refused(tmp_path, damage):
    small_simulation(out=tmp_path / "r").run(4)
    damage(tmp_path / "r" / "metrics.jsonl")
    before = contents(tmp_path)
    with pytest.raises(BadInput, match="all checkpoints are of later rounds"):
        small_simulation(out=tmp_path / "r").run(6)
    assert contents(tmp_path) == before


@pytest.mark.long
@pytest.mark.parametrize("kind", ["compare", "tune"])
def test_one_damaged_run_of_several_is_refused_and_the_others_are_kept(here, capsys, monkeypatch, kind):
    skip_pictures(monkeypatch)
    grid = {"compare": "compare.grid.fedavg.lr=[0.01, 0.1]", "tune": "tune.grid.train.lr=[0.01, 0.1]"}[kind]
    arguments = words(kind, "c", grid, "train.rounds=3", "compare.algorithms=['fedavg']", "compare.seeds=1")
    assert call(*arguments) == 0
    run = next(path.parent for path in sorted(Path("c").rglob("metrics.jsonl")) if "lr0.01" in str(path))
    damage_line_1(run / "metrics.jsonl")
    (run / "model.safetensors").unlink()
    before = contents("c")
    capsys.readouterr()
    assert call(*arguments) == 2
    assert f"{run.absolute()}/metrics.jsonl is missing or damaged after round 0" in said_in_one_line(capsys)
    assert contents("c") == before
    shutil.rmtree(run)
    assert call(*arguments) == 0
    assert read_record(run).complete


def test_what_is_lost_of_the_environment_does_not_stop_a_run(half, capsys):
    for text in (None, "{", "[]"):
        place = half.parent / f"copy{text}"
        shutil.copytree(half, place)
        (place / "environment.json").unlink()
        if text:
            (place / "environment.json").write_text(text)
        assert call(*command(place, rounds=6)) == 0
        assert "environment.json was missing or damaged; rewritten" in capsys.readouterr().err
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
    assert "holds no config.json of lamina that can be read" in said
    assert said.count("\n") == 1
