"""A small run that several test files start."""

from helpers import words

TOML = """
[data]
clients = 8
partition = { name = "classes", k = 2 }

[model]
name = "mlp"
hidden = 6

[train]
rounds = 40
participation = 0.4
batch_size = 64
lr = 0.02
"""


def command(out, *more, rounds=40, algorithm="scaffold", engine="stacked"):
    settings = (f"train.rounds={rounds}", f"algorithm.name={algorithm}", f"run.engine={engine}", *more)
    return words("run", out, *settings)
