"""Measure the linear speed-up that both papers claim: rounds to a target against active clients x local steps.

    python reproduction/speedup.py fashion-mnist cifar10    # train; writes reproduction/speedup/NAME.csv
    python reproduction/speedup.py                          # write docs/reproduction/speed-up.md and its figures

An experiment file in reproduction/speedup gives data, model, methods, rates and target. For each point (active clients,
local steps) every rate is run with every seed until the target is reached, and the fastest rate counts: by FedLADA's
theory the server's rate grows with the number of clients, and here the clients' rate must make up for it. A rate is
stopped when it can no longer be the fastest. All runs of a method with the same local steps train as one population. A
file that exists is continued: methods and local steps that it holds are not run again.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

import lamina
from lamina.api.simulation import Simulation
from lamina.base.errors import BadInput
from lamina.data.dataset import Splits
from lamina.engines.devices import choose_device
from lamina.experiment.build import build, load_data
from lamina.experiment.config import Experiment, load
from lamina.experiment.runs.environment import environment
from lamina.experiment.trials.compare import points_of, with_algorithm
from lamina.training.history import History

HERE = Path(__file__).parent
STUDIES = HERE / "speedup"
CLIENTS, STEPS = (2, 4, 8, 16, 32), (5, 10, 20)
MAX_FINISHED_FRACTION = 0.2  # of a population's clients; then it is rebuilt without the finished runs
REACHED, SLOWER, DIVERGED, TOO_LONG = "reached", "slower", "diverged", "too long"


class Run(NamedTuple):
    """One run: its settings, and the round in which it reached the target or was stopped."""

    algorithm: str
    clients: int  # active in a round
    steps: int  # of every active client
    lr: float
    seed: int
    rounds: int
    outcome: str
    seconds: float  # of training and evaluation; runs of a population share them
    device: str


@dataclass
class Training:
    """A run that is being trained."""

    simulation: Simulation
    clients: int
    lr: float
    seed: int
    rounds: int = 0  # so far; until the target is reached, or it was stopped
    outcome: str = ""  # empty: it is still running


def main() -> None:
    """Train the named studies, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("studies", nargs="*", help="experiment files in reproduction/speedup, without .toml")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="active clients (%(default)s)")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help="local steps (%(default)s)")
    parser.add_argument("--set", action="append", default=[], help="another setting, section.key=value")
    parser.add_argument("--folder", type=Path, default=STUDIES, help="of the measurements (%(default)s)")
    arguments = parser.parse_args()
    for name in arguments.studies:
        experiment = load(STUDIES / f"{name}.toml", arguments.set)
        measure(experiment, arguments.folder / f"{name}.csv", arguments.clients, arguments.steps)
    if not arguments.studies:
        import speedup_page  # here: training needs no matplotlib

        speedup_page.write(arguments.folder)


# --- training ----------------------------------------------------------------------------------------------------


def measure(experiment: Experiment, path: Path, clients: Sequence[int], steps: Sequence[int]) -> None:
    """Train all methods and points that the file does not hold yet, and add them to it."""
    device = choose_device(experiment.run.device)
    splits = Splits(*(part.to(device) for part in load_data(experiment)))  # once, not for every run
    finished = {(run.algorithm, run.steps) for run in read(path)} if path.exists() else set()
    for name in experiment.compare.algorithms:
        for number in steps:
            if (name, number) in finished:
                continue
            started = time.perf_counter()
            runs = train(experiment, splits, name, clients, number)
            write(path, runs)
            for (algorithm, count, _), point in by_point(runs).items():
                fastest = best(point)
                shown = f"{fastest.rounds:.1f} rounds at lr {fastest.lr:g}" if fastest else "target not reached"
                print(f"{algorithm}, {count} clients x {number} steps: {shown}", file=sys.stderr)
            print(f"{name}, {number} steps: {time.perf_counter() - started:.1f} s", file=sys.stderr)


def train(experiment: Experiment, splits: Splits, name: str, clients: Sequence[int], steps: int) -> list[Run]:
    """Train a method with some local steps for all numbers of clients, rates and seeds, each until it is decided."""
    runs: list[Training] = []
    for count, settings, seed in itertools.product(
        clients, points_of(experiment, name), range(experiment.compare.seeds)
    ):
        variant = with_algorithm(experiment, name, settings)
        point = {"participation": count / experiment.data.clients, "local_steps": steps, "seed": seed}
        variant = variant.model_copy(update={"train": variant.train.model_copy(update=point)})
        simulation = build(variant, splits)
        runs.append(Training(simulation, count, settings["lr"], seed))
    running = runs
    while running:
        population, members = lamina.Population([run.simulation for run in running]), running
        most = sum(run.clients for run in members)
        while running and sum(run.clients for run in running) > (1 - MAX_FINISHED_FRACTION) * most:
            rows = population.run_round()
            for i, run in enumerate(members):
                if run.outcome:
                    continue
                run.rounds += 1
                if i in population.diverged:
                    run.outcome = DIVERGED
                elif rows[i].get("accuracy", 0.0) >= experiment.compare.target:
                    run.outcome = REACHED
                elif run.rounds >= experiment.train.rounds:
                    run.outcome = TOO_LONG
            stop_slower(runs)
            running = [run for run in members if not run.outcome]
    device = str(environment(str(runs[0].simulation.device))["device_name"])
    return [
        Run(name, run.clients, steps, run.lr, run.seed, run.rounds, run.outcome, spent(run.simulation.history), device)
        for run in runs
    ]


def spent(history: History) -> float:
    """Return the seconds of a run."""
    return round(history.total("seconds") + history.total("evaluation_seconds", optional=True), 3)


def stop_slower(runs: Sequence[Training]) -> None:
    """Stop the runs whose rate can no longer be the fastest of its point."""
    for count in {run.clients for run in runs}:
        rates: dict[float, list[Training]] = {}
        for run in runs:
            if run.clients == count:
                rates.setdefault(run.lr, []).append(run)
        complete = [seeds for seeds in rates.values() if all(run.outcome == REACHED for run in seeds)]
        fastest = min((log_mean(run.rounds for run in seeds) for seeds in complete), default=math.inf)
        for seeds in rates.values():
            # at best, the unfinished runs reach the target in the next round
            at_best = log_mean(run.rounds + (run.outcome != REACHED) for run in seeds)
            if at_best >= fastest or any(run.outcome not in ("", REACHED) for run in seeds):
                for run in seeds:
                    run.outcome = run.outcome or SLOWER


def log_mean(rounds: Iterable[int]) -> float:
    """Return the mean of the logarithms."""
    return statistics.fmean(map(math.log, rounds))


# --- the measurements --------------------------------------------------------------------------------------------

Point = tuple[str, int, int]  # method, active clients, local steps


class Best(NamedTuple):
    """The fastest rate of a point, and its rounds to the target: the geometric mean over seeds."""

    lr: float
    rounds: float
    is_edge: bool  # whether no smaller, or no larger, rate was tried


def by_point(runs: Iterable[Run]) -> dict[Point, list[Run]]:
    """Return the runs of every point."""
    points: dict[Point, list[Run]] = {}
    for run in runs:
        points.setdefault((run.algorithm, run.clients, run.steps), []).append(run)
    return points


def best(runs: Sequence[Run]) -> Best | None:
    """Return the fastest rate of a point; None if no rate reached the target with all seeds.

    >>> best([Run("fedavg", 2, 5, 0.1, seed, rounds, REACHED, 0.0, "") for seed, rounds in enumerate((8, 2))])
    Best(lr=0.1, rounds=4.0, is_edge=False)
    """
    rates: dict[float, list[Run]] = {}
    for run in runs:
        rates.setdefault(run.lr, []).append(run)
    found = [
        Best(lr, math.exp(log_mean(run.rounds for run in seeds)), len(rates) > 1 and lr in (min(rates), max(rates)))
        for lr, seeds in rates.items()
        if all(run.outcome == REACHED for run in seeds)
    ]
    return min(found, key=lambda one: one.rounds, default=None)


def read(path: Path) -> list[Run]:
    """Read measurements."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            Run(row["algorithm"], int(row["clients"]), int(row["steps"]), float(row["lr"]), int(row["seed"]),
                int(row["rounds"]), row["outcome"], float(row["seconds"]), row["device"])
            for row in csv.DictReader(file)
        ]  # fmt: skip


def write(path: Path, runs: Sequence[Run]) -> None:
    """Add measurements to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(Run._fields)
        writer.writerows(runs)


# --- the slope ---------------------------------------------------------------------------------------------------


class Slope(NamedTuple):
    """An exponent with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def slopes(rounds: Sequence[float], *factors: Sequence[float]) -> list[Slope]:
    """Fit log(rounds) = a + b_1 log(factor_1) + ... by least squares and return the b.

    The intervals are Student's, from the scatter of the points about the fit: give one number per point, not one per
    seed. They are infinite if there are no more points than coefficients.

    >>> [f"{slope.value:.3f}" for slope in slopes([80, 40, 20, 10.5], [10, 20, 40, 80])]
    ['-0.979']
    """
    columns = np.log(np.array([np.full(len(rounds), math.e), *factors], dtype=float)).T
    logs = np.log(np.asarray(rounds, dtype=float))
    values, _, rank, _ = np.linalg.lstsq(columns, logs, rcond=None)
    freedom = len(logs) - columns.shape[1]
    if rank < columns.shape[1]:
        raise BadInput("the points do not tell the factors apart: measure more of them")
    if freedom < 1:
        return [Slope(float(value), -math.inf, math.inf) for value in values[1:]]
    variance = np.sum((logs - columns @ values) ** 2) / freedom * np.diag(np.linalg.inv(columns.T @ columns))
    widths = stats.t.ppf(0.975, freedom) * np.sqrt(variance)
    return [Slope(float(v), float(v - w), float(v + w)) for v, w in list(zip(values, widths, strict=True))[1:]]


if __name__ == "__main__":
    main()
