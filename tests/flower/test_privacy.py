"""Differential privacy in a federation that is killed or run again: every release has its own noise and counts."""

import logging

import pytest
import torch
from flwr.app import Message

import helpers
import lamina
from flower_setup import Setup, altered, change, client_of, is_train, nodes, small_model, spoiled
from helpers import Killed
from lamina.base.errors import BadInput
from lamina.channel.privacy import Privacy
from lamina.experiment.runs.folder import RunFolder
from lamina.flower import Limits, Stopped, wire
from lamina.privacy.accounting import Accountant

ROUNDS = 3


@pytest.fixture
def federation(tmp_path):
    """Makes a federation of four clients; all share one secret."""

    def make(folder="a", privacy=None, **changed):
        given = {"bound": 0.05, "noise_multiplier": 2.0, "delta": 1e-3, "secret": str(tmp_path / "secret")}
        more = {"rounds": ROUNDS, "local_steps": 2, "participation": 1.0, "privacy": {**given, **(privacy or {})}}
        algorithm = changed.pop("algorithm", "fedavg")
        return Setup(tmp_path / folder, algorithm, model=lambda: small_model().double(), **{**more, **changed})

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


def shouting(setup):
    """A grid on which client 1 sends an update of a million times the length."""

    def louder(content):
        delta = torch.frombuffer(bytearray(content["up"]["delta"].data), dtype=torch.float64)
        return change(content, "up", delta=wire.encode(1e6 * delta))

    return setup.grid(on_reply=spoiled(louder))


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


def test_no_update_is_refused_for_its_size_and_each_moves_the_mean_by_its_bound(federation, released):
    """Whether an update counts must not depend on the others: the median of their norms has no noise."""
    federation("a").run()
    setup = federation("b", seed=5)
    setup.run(shouting(setup))
    assert [[len(entry[name]) for name in ("took_part", "refused")] for entry in setup.journal] == [[4, 0]] * ROUNDS
    one, other = (mean for number, mean, _ in released if number == 1)
    assert 0 < float((one - other).norm()) <= 2 * 0.05 / 4


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"limits": Limits(max_norm=1.0)}, "max_norm"), ({"evaluate_on": "nodes"}, "evaluate_on"),
        ({"evaluate_on": "both"}, "evaluate_on"),
    ],
)  # fmt: skip
def test_figures_of_single_clients_are_refused(federation, more, name):
    setup = federation(more=more)
    with pytest.raises(BadInput, match=f"^privacy: {name} publishes figures of single clients without noise") as error:
        setup.run()
    assert "\n" not in str(error.value)


PUBLIC_COLUMNS = {
    "round", "lr", "clients", "update_norm", "bytes_down", "bytes_up", "paper_bytes", "loss", "accuracy", "epsilon",
    "evaluation_seconds",
}  # fmt: skip
TELLING = {"asked", "missing", "refused", "wire_bytes_down", "wire_bytes_up", "seconds"}


def written(setup, capsys):
    """All that a run has written but its checkpoints, and what its status says."""
    capsys.readouterr()
    for options in ((), ("--metrics",)):
        helpers.call("flower", "status", setup.out, *options)
    texts = [path.read_text() for path in setup.out.iterdir() if path.suffix in (".txt", ".jsonl", ".json")]
    return "\n".join([*texts, capsys.readouterr().out])


@pytest.mark.parametrize(
    ("sampling", "algorithm"),  # with exact cohorts, clients may not keep state
    [("exact", lamina.create("fedlada")), ("bernoulli", lamina.create("fedlamb", sync_every=2))],
)
def test_nothing_written_tells_who_took_part_in_a_secret_cohort(federation, sampling, algorithm, tmp_path, capsys):
    """Client 2 sends nonsense, and fedlamb's lazy field would have other receivers in every round."""
    columns, sizes = [], []

    def asked(grid, number):
        return sum(is_train(message, number) for _, message in grid.seen)

    def on_reply(grid, node, message, reply):
        if client_of(node) == 2 and is_train(message) and asked(grid, int(message.metadata.group_id)) > 1:
            return Message(change(reply.content, "figures", loss=float("nan")), reply_to=message)
        return reply

    for name in "ab":
        secret = tmp_path / f"secret-{name}"
        secret.write_bytes(name.encode() * 32)
        settings = {"algorithm": algorithm, "participation": 0.75, "sampling": sampling, "rounds": 4}
        setup = federation(name, {"secret": str(secret)}, more={"quorum": 1}, **settings)
        grid = setup.grid(on_reply=on_reply)
        setup.run(grid)
        sizes += [asked(grid, number) for number in range(1, 5)]
        for number in range(1, 5):  # a message of another size would tell who has taken part before
            assert len({wire.payload_bytes(each.content) for _, each in grid.seen if is_train(each, number)}) == 1
        columns.append([[row[column] for column in ("clients", "bytes_down", "bytes_up")] for row in setup.rows])
    assert columns[0] == columns[1]
    assert (len(set(sizes)) > 1) == (sampling == "bernoulli")
    assert {*setup.rows[0]} == PUBLIC_COLUMNS
    assert [{*entry} for entry in setup.journal] == [{"round", "attempt", "complete", "notes"}] * 4
    text = written(setup, capsys)
    assert "client 2" not in text
    assert 'client="' not in text


def test_of_public_cohorts_all_is_written_but_why_an_update_cannot_be_used(federation, capsys, caplog):
    caplog.set_level(logging.DEBUG, logger="lamina")
    setup = federation()
    setup.run(setup.grid(on_reply=spoiled(altered(examples=10**9), rounds=[2])))
    assert {*setup.rows[0]} == PUBLIC_COLUMNS | TELLING
    assert [(row["clients"], row["asked"], row["refused"]) for row in setup.rows] == [(4, 4, 0), (3, 4, 1), (4, 4, 0)]
    text = written(setup, capsys)
    assert 'refusals_total{run="run",client="1"} 1' in text
    assert "only the node's log says why" in text
    assert str(10**9) not in text
    assert {record.levelname for record in caplog.records if str(10**9) in record.getMessage()} == {"DEBUG"}


def test_the_error_of_a_federation_that_stops_names_nobody_of_a_secret_cohort(federation):
    setup = federation(participation=0.5, more={"deadline": 0.1, "quorum": 1.0, "attempts": 1})
    grid = setup.grid()
    grid.offline |= set(nodes())
    with pytest.raises(Stopped, match="who is missing is secret") as error:
        setup.run(grid)
    assert "client" not in str(error.value)
