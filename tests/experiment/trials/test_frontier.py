"""The runs of a frontier: which combinations there are, what each is trained with, and that none is trained twice."""

from pathlib import Path

import pytest

from helpers import count
from lamina.base.errors import BadInput
from lamina.experiment.config import load
from lamina.experiment.runs.records import read_record
from lamina.experiment.trials.compare import with_algorithm
from lamina.experiment.trials.frontier import FrontierRuns, as_comparison, entries_of
from lamina.training.training import Training
from small_frontier import LABELS, ROUNDS, RUNS, TOML, make


@pytest.fixture
def here(empty_folder):
    Path("frontier.toml").write_text(TOML)
    return empty_folder


def read(*overrides):
    return load("frontier.toml", overrides)


def test_codecs_and_levels_of_privacy_are_not_combined(here):
    entries = entries_of(read())
    assert [entry.label for entry in entries] == LABELS
    assert [(entry.channel.label, entry.epsilon) for entry in entries[:4]] == [
        ("none", None), ("sign, feedback", None), ("none", 8.0), ("none", 2.0)
    ]  # fmt: skip
    only = read("frontier.channels=['qsgd']", "channel.codec=bf16", "compare.algorithms=['fedavg']")
    assert [entry.label for entry in entries_of(only)] == [
        "fedavg with qsgd 8 bits", "fedavg with bf16 and epsilon 8", "fedavg with bf16 and epsilon 2"
    ]  # fmt: skip
    own = read("frontier={clocks=['lan']}", "channel.codec=bf16", "compare.algorithms=['fedavg']")
    assert [entry.label for entry in entries_of(own)] == ["fedavg with bf16"]


def test_every_entry_is_trained_as_its_method_with_its_codec_or_noise(here):
    options = ("compare.options.mine={name='fedlada', alpha=0.3}", "compare.algorithms=['mine']",
               "compare.grid.mine.lr=[0.1, 0.2]", "compare.tuning_rounds=4")  # fmt: skip
    compared = as_comparison(read(*options))
    grid = compared.compare.grid
    assert [grid[label].lr for label in compared.compare.algorithms] == [[0.1, 0.2]] * 4
    coarse, noised = (with_algorithm(compared, f"mine with {what}") for what in ("sign and feedback", "epsilon 2"))
    assert coarse.algorithm.name == noised.algorithm.name == "fedlada"
    assert coarse.algorithm.options()["alpha"] == noised.algorithm.options()["alpha"] == 0.3
    assert (coarse.channel.codec[0]["name"], coarse.channel.feedback, coarse.privacy) == ("sign", True, None)
    assert noised.channel.codec == "none"
    # all runs have the noise of as many rounds, also the shorter ones that only help to choose
    assert (noised.privacy.epsilon, noised.privacy.rounds, noised.privacy.bound) == (2.0, ROUNDS, 1.0)


def test_the_runs_and_what_the_folder_says_of_them(here):
    study = make("f")
    assert sorted(str(run.relative_to("f")) for run in study.runs) == sorted(RUNS)
    signed, noised = (
        read_record(Path("f", name, "seed1")) for name in ("fedavg_with_sign_and_feedback", "fedlada_with_epsilon_2")
    )
    assert signed.config["channel"]["feedback"] is True
    assert "privacy" not in signed.config
    assert "epsilon" not in signed.history.columns
    assert noised.history.last("epsilon") == pytest.approx(2, rel=0.01)
    assert all("secret.key" not in path.read_text() for path in Path("f").rglob("config.json"))


@pytest.mark.long
def test_stopped_and_started_again_no_round_is_trained_twice(here, monkeypatch):
    record, trained, few = Training.record, [], ("compare.seeds=1", "train.rounds=3", "frontier.epsilons=[8]")
    monkeypatch.setattr(Training, "record", lambda *a, **o: trained.append(1) or record(*a, **o))
    study = FrontierRuns(read(*few), Path("f"), stop=lambda: len(trained) == 7)
    assert not study.run()
    assert len(trained) == 7  # two runs, and a round
    make("f", *few)
    assert count("f") == len(trained) == 6 * 3
    make("f", *few, "frontier.clocks=['lan', 'fibre', 'mixed']", "frontier.step_seconds=2")  # clocks train nothing
    assert len(trained) == 6 * 3
    make("f", *few, "frontier.channels=['none', 'bf16']")  # what is new alone
    assert len(trained) == 6 * 3 + 2 * 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["frontier.channels=[]"], "frontier.channels = []: must not be empty"),
        (["frontier.epsilons=[]"], "frontier.epsilons = []: must not be empty"),
        (["frontier.clocks=[]"], "frontier.clocks = []: must not be empty"),
        (["frontier.channels=['qsgdd']"], "frontier.channels: unknown codec 'qsgdd'; did you mean 'qsgd'?"),
        (["frontier.channels=[{codec='none', feedback=true}]"], "frontier.channels: channel: feedback adds"),
        (["frontier.channels=['qsgd', {name='qsgd', bits=8}]"], "is the same as one before it"),
        (["frontier.epsilons=[8, 8.0]"], "frontier.epsilons: 8.0 is the same as one before it"),
        (["frontier.epsilons=[0]"], "frontier.epsilons.0 = 0: input should be greater than 0"),
        (["frontier.clocks=['5g']"], "frontier.clocks: unknown clock '5g'"),
        (["frontier.codecs=['qsgd']"], "[frontier] has no key 'codecs'"),
        (["privacy.epsilon=3"], "frontier.epsilons and privacy.epsilon both say how much noise there is"),
        (["privacy.noise_multiplier=3"], "frontier.epsilons and privacy.noise_multiplier both say"),
        (["compare.options.fedavg.channel=sign"], "compare.options.fedavg.channel: a frontier sets it"),
        (["compare.algorithms=[]"], "compare.algorithms is empty"),
        (["frontier.channels=[{codec='none', fields={v='bf16'}}]"], "an upload of fedavg"),
        (["train.local_steps=1", "train.weighting=examples"], 'privacy: weighting = "examples"'),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(here, overrides, message):
    with pytest.raises(BadInput) as error:
        FrontierRuns(read(*overrides), Path("f"))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not Path("f").exists()


def test_levels_of_privacy_need_a_bound_and_a_file_needs_a_frontier(here):
    text = TOML.partition("[privacy]")[0]
    Path("frontier.toml").write_text(text)
    with pytest.raises(BadInput, match=r"frontier\.epsilons needs \[privacy\] with bound and delta"):
        as_comparison(read())
    Path("frontier.toml").write_text(text.partition("[frontier]")[0])
    with pytest.raises(BadInput, match=r"the file has no \[frontier\]"):
        as_comparison(read())
