"""Absurd sizes are refused in one line, before anything is allocated, in the file and in Python."""

import math
import re
import time

import pytest
import torch
from torch import nn

import lamina
from helpers import call
from lamina import BadInput, Population, Simulation, models
from lamina.base import limits
from lamina.experiment.trials.settings import points

X, Y = torch.randn(40, 8), torch.arange(40) % 4
ABSURD = ("1000000000", "2147483648", "9223372036854775808", "1" + "0" * 30, "-1", "0", "nan", "inf", "-inf")
SMALL = '[data]\nclients = 5\n[model]\nname = "mlp"\nhidden = 4\n[train]\nrounds = 1\n'


def simulate(**settings):
    return Simulation(nn.Linear(8, 4), (X, Y), "fedavg", **{"clients": 4, **settings})


@pytest.fixture
def refused(empty_folder, capsys):
    """Run a command and return the one line it refuses its input with."""
    (empty_folder / "small.toml").write_text(SMALL)

    def run(*arguments):
        started = time.perf_counter()
        assert call(*arguments) == 2
        assert time.perf_counter() - started < 20
        printed = capsys.readouterr()
        lines = printed.err.splitlines()
        assert (printed.out, len(lines)) == ("", 1), printed
        assert lines[0].startswith("error: ")
        return lines[0]

    return run


@pytest.mark.parametrize(
    "key",
    ["train.local_steps", "train.epochs", "train.rounds", "run.threads", "data.clients", "run.evaluate_every",
     "run.checkpoint_every", "compare.seeds", "tune.seeds", "tune.trials"],
)  # fmt: skip
def test_an_absurd_size_is_one_line(refused, key):
    for value in ABSURD:
        assert key.rpartition(".")[2] in refused("run", "small.toml", "--set", f"{key}={value}")


def test_numbers_beyond_every_type_are_one_line(refused):
    many_bits = "0x" + "f" * 6000
    for setting in (
        f"train.batch_size={2**63}", f"train.batch_size={many_bits}", f"train.seed={many_bits}",
        f"train.seed={10**40}", f"train.lr={many_bits}", f"algorithm.decay={many_bits}", f"algorithm.decay={10**30}",
        f"model.dropout={many_bits}", "train.rounds=" + "9" * 5000, "train.lr=" + "[" * 3000,
        f"train.schedule={{ name = 'cosine', rounds = {many_bits} }}",
    ):  # fmt: skip
        assert len(refused("run", "small.toml", "--set", setting)) < 400


def test_seeds_on_the_command_line_are_bounded(refused):
    for command in ("compare", "tune"):
        assert "less than or equal to 10000" in refused(command, "small.toml", "--seeds", "1000000000")


def test_whatever_a_factory_raises_is_one_line(monkeypatch):
    monkeypatch.setattr(models, "find", lambda name: lambda width: nn.Linear(width, width))
    with pytest.raises(BadInput, match="cannot make the model 'mine:make'"):
        models.create("mine:make", (8,), 4, width=2**62)


def test_training_a_model_that_does_not_fit_is_refused_before_it_is_copied(monkeypatch):
    model = nn.Linear(8, 4)
    monkeypatch.setattr(limits, "available_bytes", lambda device=None: 100)
    monkeypatch.setattr(limits, "SURELY_FITS", 0)
    with pytest.raises(BadInput, match=r"training a model of 36 parameters needs at least 1.01 kB, .* 100 B free"):
        Simulation(model, (X, Y), "fedavg", clients=4)


@pytest.mark.parametrize("name", ["batch_size", "epochs", "local_steps", "clients", "evaluate_every"])
def test_python_arguments_have_the_same_bounds(name):
    for value in (2**63, 10**30, 16**5000, -1, 0, math.nan, math.inf):
        with pytest.raises(BadInput, match=name):
            simulate(**{name: value})


def test_rounds_are_bounded_in_python():
    for value in (10**9, 2**63, -1, 1.5, math.inf):
        with pytest.raises(BadInput, match="rounds"):
            simulate().run(value)
        with pytest.raises(BadInput, match="rounds"):
            Population([simulate()]).run(value)
    assert len(simulate().run(0)) == 0


def test_a_seed_has_at_most_39_digits():
    for seed in (2**64, -(2**63)):
        simulate(seed=seed)
    for seed in (10**40, -(10**40), 16**5000, 0.5):
        with pytest.raises(BadInput, match="seed"):
            simulate(seed=seed)


def test_a_schedule_that_ends_before_the_rounds_is_refused_before_the_first(refused):
    ends = r"round 6: the schedule Cosine(rounds=3, floor=0.0) gives the learning rate 0"
    simulation = simulate(schedule=lamina.schedules.Cosine(3))
    with pytest.raises(BadInput, match=re.escape(ends)):
        simulation.run(6)
    assert simulation.run(3)[-1]["round"] == 3
    sets = ("schedule.name=cosine", "schedule.rounds=3", "rounds=6")
    line = refused("run", "small.toml", *(word for one in sets for word in ("--set", f"train.{one}")))
    assert ends in line


def test_a_grid_of_too_many_combinations_is_refused():
    started = time.perf_counter()
    with pytest.raises(BadInput, match="the grid has 1000000000000 combinations"):
        points({f"key{i}": list(range(10)) for i in range(12)})
    assert time.perf_counter() - started < 30


def test_memory_is_known_here():
    free = limits.available_bytes()
    assert free is not None
    assert 0 < free < 2**50


def test_out_of_memory_that_no_estimate_foresaw_is_one_line(refused, monkeypatch):
    def fail(*arguments, **settings):
        raise MemoryError("Unable to allocate 1. TiB")

    monkeypatch.setattr("lamina.experiment.build.build", fail)
    assert "out of memory (Unable to allocate 1. TiB)" in refused("run", "small.toml")
