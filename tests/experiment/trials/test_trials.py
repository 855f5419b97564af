"""Trials: runs side by side or apart, and what their results count for."""

import math
import os
from pathlib import Path

import pytest

from comparisons import GRID, ROUNDS, RUNS, TOML, command
from helpers import Killed, call, populations, rows, said_in_one_line, skip_pictures, trial, words
from lamina import BadInput, History
from lamina.base.errors import Diverged
from lamina.experiment.config import load
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.runs.records import find_records, read_record
from lamina.experiment.trials import compare as comparing
from lamina.experiment.trials import trials
from lamina.experiment.trials.trial import Trial, refuse_all_diverged, refuse_nan
from lamina.storage.leases import join


@pytest.fixture
def here(empty_folder, monkeypatch):
    Path("small.toml").write_text(TOML)
    skip_pictures(monkeypatch)
    return empty_folder


def history(*accuracies):
    return History([{"round": number, "accuracy": value} for number, value in enumerate(accuracies, 1)])


def test_the_score_of_a_trial_is_the_mean_of_its_final_values():
    both = trial("a", [history(0.5, 0.9, 0.4), history(0.8, 0.6, 0.7)])
    assert (both.best, both.remark) == ([0.9, 0.8], "")
    assert both.final == pytest.approx([0.6, 0.7])
    assert both.score == pytest.approx(0.65)
    assert trial("a", [history(0.5)], diverged="in round 2").final == []


def test_a_trial_that_diverged_or_is_not_finished_has_no_score():
    wild = trial("a", [history(0.5)], diverged="in round 2")
    assert (wild.remark, wild.bad_endings) == ("diverged", ["a, lr 0.1, seed 0: in round 2"])
    one = trial("a", [history(0.5)])
    unfinished = Trial("a", one.settings, one.records, seeds=2)
    pruned = Trial("a", one.settings, one.records, pruned=True)
    assert (unfinished.remark, pruned.remark) == ("not finished", "pruned")
    assert all(math.isnan(each.score) for each in (wild, unfinished, pruned))
    assert Trial("a", one.settings, []).score_key == -math.inf


def test_only_if_every_trial_diverged_it_is_an_error():
    good, wild = trial("a", [history(0.5)]), trial("b", [history(0.5)], diverged="in round 2")
    refuse_all_diverged([good, wild])
    refuse_all_diverged([])
    with pytest.raises(Diverged, match=r"every run diverged; the first: b, lr 0\.1, seed 0: in round 2"):
        refuse_all_diverged([wild, wild])


def test_a_metric_that_is_nan_in_every_finished_trial_is_refused():
    good, nan = trial("a", [history(0.5)]), trial("b", [history(math.nan)])
    refuse_nan("", "accuracy", [good, nan])
    refuse_nan("", "accuracy", [nan, Trial("c", nan.settings, [], seeds=1)])  # one is not finished
    with pytest.raises(BadInput, match="the metric 'accuracy', by which settings are chosen, is NaN"):
        refuse_nan("", "accuracy", [nan])


@pytest.mark.long
def test_side_by_side_gives_the_results_of_separate_runs(here, monkeypatch):
    grouped = populations(monkeypatch)
    every = "run.evaluate_every=5"  # and the last round
    assert call(*command("stacked", every)) == 0
    assert [[len(group) for group in groups] for groups in grouped] == [[2], [2], [2]]
    monkeypatch.setattr(trials, "stackable", lambda runs: [[run] for run in runs])
    assert call(*command("separate", every)) == 0
    for name in RUNS:
        for a, b in zip(rows(Path("stacked", name)), rows(Path("separate", name)), strict=True):
            assert a == {key: pytest.approx(value, rel=1e-4, abs=1e-6) for key, value in b.items()}
    assert ["accuracy" in row for row in rows("stacked/fedavg/seed0")] == [
        r in (5, ROUNDS) for r in range(1, ROUNDS + 1)
    ]


def test_runs_of_the_loop_engine_are_compared_too(here):
    assert call(*command("c", "run.engine=loop", "train.rounds=2")) == 0
    assert all(record.config["run"]["engine"] == "loop" for record in find_records(["c"]))


def test_a_folder_is_shared_only_with_processes_of_the_same_settings(here, capsys):
    other = join(here / "c", {"train": {"rounds": 7}})
    assert call(*command("c")) == 2
    message = said_in_one_line(capsys)
    assert f"process {os.getpid()} on " in message
    assert "with other settings: train.rounds = 7 (now 8)" in message
    assert call(*command("c"), "--overwrite") == 2
    assert "--overwrite would delete its runs: run the command without --overwrite" in said_in_one_line(capsys)
    other.release()


@pytest.mark.long
def test_more_runs_than_may_be_open_at_once(here, monkeypatch):
    assert call(*command("a", *GRID)) == 0
    monkeypatch.setattr(trials, "MAX_POPULATION", {"cpu": 3})
    ended = []
    comparison = comparing.Comparison(load("small.toml", GRID), here / "b")
    comparison.on_end = lambda job, record: ended.append(job.folder)
    assert comparison.run()
    assert len(ended) == len(set(ended)) == 5
    assert Path("a/tuning.csv").read_text() == Path("b/tuning.csv").read_text()


def test_runs_that_cannot_resume_together_resume_apart(here, monkeypatch):
    """A value that is added to a stopped grid does not send the other runs back to round 1."""
    old, left = RunFolder.checkpoint, [4]

    def dying(folder, simulation):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        old(folder, simulation)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "checkpoint", dying)
        with pytest.raises(Killed):
            call(*words("tune", "t", "tune.grid.train.lr=[0.01, 0.1]", "train.rounds=4"))
    assert call(*words("tune", "t", "tune.grid.train.lr=[0.01, 0.1, 0.2]", "train.rounds=4")) == 0
    assert "resuming after round 2 of 4" in Path("t/lr0.01/seed-1/log.txt").read_text()
    assert len(read_record("t/lr0.2/seed-1").history) == 4
