"""A small comparison that several test files run, and how its results are compared."""

import csv
from pathlib import Path

import torch

from helpers import assert_same, words

TOML = """
[data]
clients = 8
partition = { name = "classes", k = 2 }

[model]
name = "mlp"
hidden = 6

[train]
rounds = 8
participation = 0.4
batch_size = 64

[compare]
algorithms = ["fedavg", "scaffold"]
seeds = 2
target = 0.3

[compare.grid]
fedavg.lr = [0.05, 0.2]
"""
ROUNDS = 8
RUNS = (
    "tuning/fedavg/lr0.05",
    "tuning/fedavg/lr0.2",
    "fedavg/seed0",
    "fedavg/seed1",
    "scaffold/seed0",
    "scaffold/seed1",
)
GRID = ("compare.algorithms=['fedlamb']", "compare.seeds=1", "train.rounds=4", "compare.grid.fedlamb.lr=[0.01, 0.1]",
        "compare.grid.fedlamb.decay=[0.0, 0.01, 0.0]")  # fmt: skip
X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
DATA = X, (X[:, 0] > 0).long()
OF_TWO_RATES = {"test": DATA, "rounds": 2, "seeds": 1, "lr": [0.1, 0.2], "device": "cpu"}


def command(out, *more):
    return words("compare", out, *more)


def assert_same_comparison(a, b, runs=RUNS):
    for name in runs:
        assert_same(Path(a, name), Path(b, name))
    for name in ("tuning.csv", "config.json"):
        assert Path(a, name).read_bytes() == Path(b, name).read_bytes()
    assert table(a) == table(b)


def table(path):
    """rounds.csv without the times."""
    with (Path(path) / "rounds.csv").open() as file:
        return [{k: v for k, v in row.items() if "seconds" not in k} for row in csv.DictReader(file)]
