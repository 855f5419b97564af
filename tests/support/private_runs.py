"""Runs of 40 clients with differential privacy on a small table."""

import itertools

import torch
from torch import nn

import lamina

X = torch.randn(400, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.sum(1) > 0).long()


def network(hidden=7):
    """A small network; all of one size have the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, 2)).double()


def private_runs(folder, hidden=7, **more):
    """Return a function that makes a simulation. All draw the same noise, and each has a ledger of its own.

    `more` are further keys of `privacy`.
    """
    numbers = itertools.count()

    def make(algorithm="fedavg", engine="loop", model=None, privacy=None, **changed):
        secret = folder / f"secret-{next(numbers)}"
        secret.write_bytes(b"s" * 32)
        given = {"bound": 0.5, "noise_multiplier": 2.0, "delta": 1e-3, "secret": str(secret), **more}
        settings = {"clients": 40, "participation": 0.25, "local_steps": 3, "batch_size": 4, "lr": 0.1}
        return lamina.Simulation(
            model or network(hidden), (X, Y), algorithm, engine=engine, privacy={**given, **(privacy or {})},
            **{**settings, **changed},
        )  # fmt: skip

    return make
