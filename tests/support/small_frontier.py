"""A small frontier that several test files run: two methods with two codecs, and two levels of privacy."""

from pathlib import Path

from lamina.experiment.config import load
from lamina.experiment.trials.frontier import FrontierRuns

TOML = """
[data]
clients = 4

[model]
name = "mlp"
hidden = 8

[train]
rounds = 11
participation = 1.0
batch_size = 64
local_steps = 5
lr = 0.5

[compare]
algorithms = ["fedavg", "fedlada"]
seeds = 2
target = 0.2

[frontier]
channels = ["none", { codec = "sign", feedback = true }]
epsilons = [8, 2]
clocks = ["4g", "home"]
step_seconds = 0.5

[privacy]
bound = 1.0
delta = 1e-2
secret = "secret.key"
"""
ROUNDS, SEEDS = 11, 2
LABELS = [f"{method}{rest}" for method in ("fedavg", "fedlada")
          for rest in ("", " with sign and feedback", " with epsilon 8", " with epsilon 2")]  # fmt: skip
RUNS = [f"{label.replace(' ', '_')}/seed{seed}" for label in LABELS for seed in range(SEEDS)]


def make(folder, *overrides):
    """Train the frontier in a folder of the current folder; return its runs."""
    Path("frontier.toml").write_text(TOML)
    study = FrontierRuns(load("frontier.toml", overrides), Path(folder))
    assert study.run()
    return study
