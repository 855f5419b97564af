"""Processes that share the trials of a study."""

import pytest

from lamina.experiment.trials import study
from lamina.experiment.trials.settings import Range
from lamina.experiment.trials.study import Study


@pytest.fixture
def workers(tmp_path):
    """Two processes' views of one study."""
    pytest.importorskip("optuna")
    space = {"train.lr": Range(low=0.1, high=1.0)}
    both = [Study(tmp_path, space, pruner="none", rounds=3, seed=0) for _ in range(2)]
    for worker in both:
        worker.open(maximise=True)
    yield both
    for worker in both:
        worker.release()


def test_a_trial_that_ends_while_another_process_looks_is_not_claimed(workers, monkeypatch):
    """It was running when the other process listed the trials, and its lease was free when that one tried it."""
    one, other = workers
    assert one.claim(5)[0] == "trial000"
    claim = study.claim

    def end_first(folder):
        if folder.name == "trial000":
            one.end(0.5)
            one.release()
        return claim(folder)

    monkeypatch.setattr(study, "claim", end_first)
    assert other.claim(5)[0] == "trial001"
    other.end(0.7)
    claim(other._folder / "trial000").release()  # nobody holds it


def test_a_trial_is_claimed_by_one_process_at_a_time(workers):
    one, other = workers
    assert one.claim(5)[0] == "trial000"
    assert other.claim(5)[0] == "trial001"
    one.release()  # as if it was killed
    other.end(0.7)
    other.release()
    assert other.claim(5)[0] == "trial000"
