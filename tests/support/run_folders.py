"""Run folders written by hand, with numbers chosen by a test, for the tests of reports."""

import json

from lamina.experiment.runs.records import FORMAT, find_records
from lamina.report.curves import group

EVIL = '<b><img src=x onerror="window.hacked=1"></b>'  # a name that must stay text
LONG_RUN_ROUNDS = 20_000
PEAK_ROUND = 7_654  # of a long run


def write_run(
    folder, accuracies, *, algorithm="fedavg", lr=0.1, seed=0, rounds=None, diverged=None, options=(),
    clock=None, **sections
):  # fmt: skip
    """A run folder as lamina leaves it: 3 bytes down, 2 up, half a second, and `clock` seconds by a clock a round."""
    folder.mkdir(parents=True)
    config = {
        "lamina": "0.1.0",
        "format": FORMAT,
        "data": {"name": "digits", "dir": None, "clients": 8, "partition": {"name": "classes", "k": 2}},
        "model": {"name": "mlp", "hidden": 16},
        "algorithm": {"name": algorithm, "preset": None, **dict(options)},
        "train": {"rounds": len(accuracies) if rounds is None else rounds, "lr": lr, "seed": seed},
        "run": {"device": "cpu", "engine": "auto", "precision": "fp32", "out": str(folder)},
    }
    for name, values in sections.items():
        config.setdefault(name, {}).update(values)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "environment.json").write_text(json.dumps({"lamina": "0.1.0", "torch": "2.0", "python": "3.11"}))
    with (folder / "metrics.jsonl").open("w") as file:
        for number, accuracy in enumerate(accuracies, 1):
            row = {"round": number, "lr": lr, "train_loss": 1 / number, "consistency": 0.1, "update_norm": 0.2}
            row |= {"bytes_down": 3, "bytes_up": 2, "seconds": 0.5}
            row |= {} if clock is None else {"clock_seconds": clock * number}
            row |= {} if accuracy is None else {"loss": 2 / number, "accuracy": accuracy}
            file.write(json.dumps(row) + "\n")
    if diverged:
        (folder / "diverged.json").write_text(json.dumps({"message": diverged}))
    return folder


def write_long_run(folder):
    """A run with a slow rise and a peak of a single round, which no even choice of rounds hits."""
    accuracies = [0.4 + 0.2 * i / LONG_RUN_ROUNDS for i in range(1, LONG_RUN_ROUNDS + 1)]
    accuracies[PEAK_ROUND - 1] = 0.95
    return write_run(folder, accuracies)


def curves_in(folder):
    """The curves of the runs below a folder, without those of a tuning."""
    return group(run for run in find_records([folder]) if not run.tuning)
