"""A run with differential privacy and its ledger: no noise is used on two means, and replays are free."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
import torch
from torch import nn

import lamina
from helpers import Killed
from lamina.algorithms.scaffold import Up
from lamina.base.errors import BadInput
from lamina.engines.ranks import Ranks
from lamina.experiment.runs.records import has_no_budget, read_record
from lamina.privacy.accounting import Accountant
from lamina.rounds.clients import Clients
from lamina.rounds.plan import Plan
from lamina.rounds.settings import TrainSettings
from lamina.storage.checkpoint import Checkpoints
from lamina.storage.identity import of_run
from lamina.storage.releases import Releases
from lamina.training.privacy import warn_of_inexact_replays, with_noise

X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


@pytest.fixture
def run_of(tmp_path):
    """Makes a simulation of 20 clients; the secret lies in the test's folder."""

    def make(engine="loop", privacy=None, data=(X, Y), model=None, **changed):
        with torch.random.fork_rng():
            torch.manual_seed(2)
            model = model or nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        given = {"bound": 0.5, "noise_multiplier": 2.0, "delta": 1e-3, "secret": str(tmp_path / "secret")}
        settings = {"clients": 20, "participation": 0.25, "local_steps": 2, "batch_size": 4, "lr": 0.1}
        return lamina.Simulation(
            model, data, "fedavg", engine=engine, privacy={**given, **(privacy or {})}, **{**settings, **changed}
        )

    return make


@pytest.fixture
def ledgers(tmp_path):
    """Returns the rounds and tags of every ledger beside the secret."""

    def read():
        paths = sorted((tmp_path / "secret.releases").glob("*.jsonl"))
        lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
        return [[(entry["round"], entry["mean"]) for entry in each] for each in lines]

    return read


@pytest.mark.parametrize("bands", [1, 3])
def test_a_killed_run_ends_as_if_it_had_not_been_killed(run_of, ledgers, tmp_path, monkeypatch, bands):
    more = {"privacy": {"bands": bands}, "min_separation": bands, "participation": 0.25}
    whole = run_of(out=tmp_path / "whole", **more)
    whole.run(4)
    (before,) = ledgers()
    assert [number for number, _ in before] == [1, 2, 3, 4]
    save = Checkpoints.save

    def dies(self, state, history=()):
        if state.round == 3:
            raise Killed
        save(self, state, history)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", dies)
        with pytest.raises(Killed):
            run_of(out=tmp_path / "killed", **more).run(4)
    resumed = run_of(out=tmp_path / "killed", **more)
    assert resumed.state.round == 2
    rows = resumed.run(4)
    assert torch.equal(resumed.state.server.x, whole.state.server.x)
    assert rows.column("epsilon") == whole.history.column("epsilon")
    assert ledgers() == [before]


def test_the_same_noise_on_another_mean_is_refused(run_of, ledgers):
    run_of().run(2)
    before = ledgers()
    other = run_of()
    other.run(1)
    generator = torch.Generator().manual_seed(1)
    start = other.state.server.x.clone()
    noise = 1e-3 * torch.randn(X.shape, generator=generator)
    other.train_data.x.add_(noise.to(other.train_data.x))  # other data that the identity misses
    with pytest.raises(BadInput, match="round 2 was released before with the same noise") as error:
        other.run(1)
    assert "\n" not in str(error.value)
    assert torch.equal(other.state.server.x, start)
    assert len(other.history) == 1
    assert ledgers() == before
    run_of(seed=1).run(2)  # what the message advises
    assert len(ledgers()) == 2


def test_a_link_to_the_secret_has_its_ledger(run_of, ledgers, tmp_path):
    run_of().run(1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "secret")
    run_of(privacy={"secret": str(tmp_path / "elsewhere" / "link")}).run(2)
    assert [len(each) for each in ledgers()] == [2]


def test_others_can_never_read_the_secret(run_of, tmp_path, monkeypatch):
    """Also not for the moment between its creation and a change of its mode, and whatever the umask."""
    modes, original = [], os.link

    def link(source, target):
        modes.append(source.stat().st_mode & 0o777)
        original(source, target)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(Path, "chmod", lambda *_: pytest.fail("it had another mode before"))
    before = os.umask(0)
    try:
        run_of()
    finally:
        os.umask(before)
    assert modes == [0o600]
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_nothing_is_released_that_is_not_in_the_ledger(run_of, monkeypatch):
    run = run_of()

    def full(self, number, tag):
        raise BadInput("the disk is full")

    monkeypatch.setattr(Releases, "enter", full)
    start = run.state.server.x.clone()
    with pytest.raises(BadInput, match="the disk is full"):
        run.run(1)
    assert torch.equal(run.state.server.x, start)


def test_a_resumed_run_needs_its_ledger(run_of, tmp_path):
    run_of(out=tmp_path / "run").run(2)
    shutil.rmtree(tmp_path / "secret.releases")
    with pytest.raises(BadInput, match="lacks round 2, which this run has finished"):
        run_of(out=tmp_path / "run").run(3)


@pytest.mark.parametrize(("heldout", "clients"), [(None, 20), ([1, 2, 3], 17), (0.3, 14)])
def test_a_run_that_its_budget_has_stopped_is_complete(run_of, tmp_path, heldout, clients):
    accountant = Accountant(2.0, 1e-3, clients, participation=0.25)
    budget = {"epsilon": accountant.epsilon(3) * (1 + 1e-9)}
    run_of(privacy=budget, heldout_clients=heldout, out=tmp_path / "run").run(20)
    record = read_record(tmp_path / "run")
    assert (len(record.history), record.complete) == (3, True)
    assert not has_no_budget(record.history[:2], record.config)


def test_the_tag_depends_on_every_part_of_a_release(run_of):
    privacy = run_of().protocol.privacy
    tags = []

    class Tags:
        can_repeat = False

        def enter(self, number, tag):
            tags.append(tag)
            return 0, ""

    object.__setattr__(privacy.noise, "releases", Tags())
    up = Up(torch.tensor([1.0, -0.0]), torch.tensor([2.0, 0.5]))
    for changed, share in [
        (up, 1.0),
        (up._replace(delta=torch.tensor([1.0, 0.0])), 1.0),  # the same number
        (up, 0.5),
        (up._replace(delta=torch.tensor([1.0, 1e-30])), 1.0),
        (up._replace(delta_c=torch.tensor([2.0, 0.5000001])), 1.0),
        (type(up)(up.delta_c, up.delta), 1.0),
        (up._replace(delta=up.delta.double()), 1.0),
    ]:
        privacy.enter(changed, 1, share)
    assert tags[0] == tags[1]
    assert len(set(tags)) == len(tags) - 1


def test_members_of_a_population_have_ledgers_of_their_own(run_of, ledgers):
    population = [run_of("stacked", seed=seed) for seed in range(3)]
    lamina.Population(population).run(2)
    assert [[number for number, _ in each] for each in ledgers()] == [[1, 2]] * 3
    again = [run_of("stacked", seed=seed) for seed in range(3)]
    lamina.Population(again).run(2)
    assert [len(each) for each in ledgers()] == [2, 2, 2]


def test_a_gpu_that_computes_other_last_bits_is_warned_of(caplog):
    for device, deterministic in [("cpu", False), ("cuda", True), ("cuda", False)]:
        assert not caplog.records
        warn_of_inexact_replays(torch.device(device), deterministic=deterministic)
    assert "deterministic=True" in caplog.text


def test_correlated_noise_that_loses_amplification_is_warned_of(run_of, caplog):
    for privacy, settings in (
        ({"bands": 1}, {}),
        ({"bands": 2}, {"min_separation": 2}),
        ({"bands": 2}, {"participation": 1.0}),  # nothing is lost
        ({"bands": 2, "secret_cohorts": False}, {}),
    ):
        run_of(privacy=privacy, **settings)
        assert "not amplified" not in caplog.text
    for bands, sampling in ((2, "exact"), (3, "bernoulli")):  # a repeated warning is shown once
        run_of(privacy={"bands": bands}, sampling=sampling)
        assert f"(bands = {bands}) is not amplified by sampling" in caplog.text


def test_statistics_of_a_table_are_warned_of(run_of, caplog):
    table = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "ill": Y})
    for preprocessing in (None, {"standardise": True}):
        assert "table's preprocessing" not in caplog.text
        data = lamina.data.as_dataset(table, y="ill", preprocessing=preprocessing)
        run_of(data=data, model=nn.Linear(3, 2))
    assert "the model and preprocessing.json tell their means" in caplog.text


def test_of_several_ranks_the_first_one_writes_and_has_the_secret(run_of, monkeypatch, tmp_path):
    run = run_of()
    identity = of_run(run.algorithm, run.objective, run.plan)
    broadcast, keys = [], []
    monkeypatch.setattr(Ranks, "of_first", lambda self, make: (broadcast or broadcast.append(make()) or broadcast)[0])
    for rank in (0, 1):
        monkeypatch.setattr(Ranks, "current", lambda rank=rank: Ranks(rank, 2))
        secret = str(tmp_path / f"secret-of-machine-{rank}")
        privacy = replace(run.protocol.privacy, noise=None, secret=secret)
        noise = with_noise(
            TrainSettings(lr=0.1, local_steps=2, epochs=None, privacy=privacy), 20, identity
        ).privacy.noise
        keys.append(noise.key)
        assert (noise.releases is None) == (rank == 1)
    assert keys[0] == keys[1]
    assert not (tmp_path / "secret-of-machine-1").exists()


def test_cohorts_follow_from_the_secret(run_of, tmp_path):
    """Everybody may have the seed of a run: 0, say."""

    def cohorts(secret="secret", **changed):
        plan = run_of(privacy={"secret": str(tmp_path / secret), **changed.pop("privacy", {})}, **changed).plan
        return [tuple(plan.cohort(number)) for number in range(1, 11)]

    first = cohorts()
    assert cohorts() == first
    assert cohorts(engine="stacked") == first
    assert cohorts("another") != first
    assert cohorts(lr=0.2) != first  # a run of its own: two of one cohort would reveal more than their sum
    by_seed = Plan(Clients([[i] for i in range(20)], 20), TrainSettings(lr=0.1, participation=0.25))
    seeded = [tuple(by_seed.cohort(number)) for number in range(1, 11)]
    assert len(set(first) & set(seeded)) <= 2  # two of 15,504 may be equal by chance
    assert cohorts(privacy={"secret_cohorts": False}) == seeded


@pytest.mark.parametrize(
    "settings", [{"sampling": "bernoulli"}, {"sampling": "bernoulli", "cohort_cap": 4}, {"min_separation": 2}], ids=str
)
def test_every_choice_of_clients_follows_from_the_secret(run_of, tmp_path, settings):
    first, second = (run_of(privacy={"secret": str(tmp_path / name)}, **settings).plan for name in "ab")
    chosen = [[tuple(plan.cohort(number)) for number in range(1, 11)] for plan in (first, second)]
    assert len(set(chosen[0]) & set(chosen[1])) <= 3  # small cohorts may be equal by chance
    assert not first.same_rounds(second)
    assert first.same_rounds(run_of(privacy={"secret": str(tmp_path / "a")}, **settings).plan)
