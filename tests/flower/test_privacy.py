"""Differential privacy in a federation that is killed or run again: every release has its own noise and counts."""

import pytest
import torch

from flower_setup import Setup, change, small_model, spoiled
from helpers import Killed
from lamina.base.errors import BadInput
from lamina.channel.privacy import Privacy
from lamina.experiment.runs.folder import RunFolder
from lamina.flower import wire
from lamina.privacy.accounting import Accountant

ROUNDS = 3


@pytest.fixture
def federation(tmp_path):
    """Makes a federation of four clients; all share one secret."""

    def make(folder="a", privacy=None, **changed):
        given = {"bound": 0.05, "noise_multiplier": 2.0, "delta": 1e-3, "secret": str(tmp_path / "secret")}
        more = {"rounds": ROUNDS, "local_steps": 2, "participation": 1.0, "privacy": {**given, **(privacy or {})}}
        return Setup(tmp_path / folder, "fedavg", model=lambda: small_model().double(), **{**more, **changed})

    return make


@pytest.fixture
def released(monkeypatch):
    """The mean and the noise of every release, as (round, mean, noise)."""
    seen, original = [], Privacy.private_mean

    def private_mean(self, algorithm, up, number, share):
        noised = original(self, algorithm, up, number, share)
        seen.append((number, up.delta.clone(), noised.delta - up.delta))
        return noised

    monkeypatch.setattr(Privacy, "private_mean", private_mean)
    return seen


def kill_after_release(setup, number, monkeypatch, grid=None):
    """Run a federation, and kill its server after the mean of a round, before its checkpoint."""
    record = RunFolder.record

    def dies(self, row, trainer):
        if row["round"] == number:
            raise Killed
        record(self, row, trainer)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "record", dies)
        with pytest.raises(Killed):
            setup.run(grid)


def others(setup):
    """A grid on which client 1 sends another update than it would."""

    def opposite(content):
        delta = torch.frombuffer(bytearray(content["up"]["delta"].data), dtype=torch.float64)
        return change(content, "up", delta=wire.encode(-delta))

    return setup.grid(on_reply=spoiled(opposite))


def epsilon(rounds, repeats=()):
    return pytest.approx(Accountant(2.0, 1e-3, 4).epsilon(rounds, repeats))


@pytest.mark.parametrize("bands", [1, 2])
def test_other_updates_after_a_kill_have_other_noise_and_count(federation, released, monkeypatch, bands):
    setup = federation(privacy={"bands": bands})
    kill_after_release(setup, 2, monkeypatch)
    setup.run(others(setup))
    assert [number for number, *_ in released] == [1, 2, 2, 3]
    (_, lost, old), (_, again, new) = released[1:3]
    assert not torch.equal(lost, again)
    assert abs(float(torch.corrcoef(torch.stack([old, new]))[0, 1])) < 0.5
    assert float(new.std()) == pytest.approx(0.05 * 2.0 / 4, rel=0.3)
    accountant = Accountant(2.0, 1e-3, 4, bands=bands)
    expected = [accountant.epsilon(1), accountant.epsilon(2, [1]), accountant.epsilon(3, [1])]
    assert [row["epsilon"] for row in setup.rows] == pytest.approx(expected)
    assert expected[2] > accountant.epsilon(3)


def test_the_same_updates_after_a_kill_are_the_same_release(federation, released, monkeypatch):
    setup = federation()
    kill_after_release(setup, 2, monkeypatch)
    setup.run()
    assert torch.equal(released[1][2], released[2][2])
    assert setup.rows[-1]["epsilon"] == epsilon(ROUNDS)


def test_the_federation_in_another_folder_counts_on(federation, released):
    federation("a").run()
    setup = federation("b")
    setup.run(others(setup))
    noises = [noise for _, _, noise in released]
    assert len(noises) == 2 * ROUNDS
    assert all(not torch.equal(noises[i], noises[j]) for i in range(6) for j in range(i))
    assert [row["epsilon"] for row in setup.rows] == [epsilon(3, [1] * n) for n in (1, 2, 3)]


def test_a_spent_budget_ends_the_run_earlier_or_is_refused(federation, monkeypatch):
    budget = {"epsilon": Accountant(2.0, 1e-3, 4).epsilon(3) + 1e-6}
    setup = federation("a", privacy=budget)
    kill_after_release(setup, 2, monkeypatch)
    setup.run(others(setup))
    assert len(setup.rows) == 2
    again = federation("b", privacy=budget)
    with pytest.raises(BadInput, match="has released 3 rounds into another folder") as error:
        again.run()
    assert "\n" not in str(error.value)
    assert again.grid().seen == []


def test_correlated_noise_goes_on_after_a_restart(federation, released, monkeypatch):
    """The noise of later rounds cancels part of that of the earlier ones, whose salts are in the ledger."""
    setup = federation(privacy={"bands": 3})
    setup.rounds = 2
    setup.run()
    setup.rounds = ROUNDS
    setup.run()
    noises = [noise / (0.05 * 2.0 / 4) for _, _, noise in released]
    undone = [noises[0], noises[1] + noises[0] / 2, noises[2] + noises[1] / 2 + 0.375 * noises[0]]
    for i in range(3):
        assert float(undone[i].std()) == pytest.approx(1.0, rel=0.25)
        for j in range(i):
            assert abs(float(torch.corrcoef(torch.stack([undone[i], undone[j]]))[0, 1])) < 0.4
