"""Compare and tune from Python: the machinery of `lamina compare` and `lamina tune`, with objects in place of files."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lamina import algorithms
from lamina.algorithms import Algorithm
from lamina.algorithms.declaration import option_places
from lamina.api.describe import (
    algorithm_section,
    compared_algorithms,
    describe,
    kept_threads,
    refuse_unknown_settings,
)
from lamina.base.errors import BadInput, nearest, short_repr, unknown
from lamina.data.drawing import save_picture
from lamina.experiment.config import Experiment, Train
from lamina.experiment.runs.records import Record, find_records
from lamina.experiment.trials.compare import Comparison, label_folder
from lamina.experiment.trials.trial import refuse_all_diverged
from lamina.experiment.trials.trials import Job
from lamina.experiment.trials.tune import Tuning
from lamina.report import tables
from lamina.report.build import build, describe_data
from lamina.report.curves import group
from lamina.report.figures import comparison_figure, curve_figure, metrics_of, rates_figure
from lamina.report.rates import tuning_responses
from lamina.report.save import save_page
from lamina.training.history import History, Row, data_frame
from lamina.training.progress import Bars, python_bars

Rates = float | Sequence[float] | Mapping[str, float | Sequence[float]]


class Result:
    """What a comparison and a tuning have in common: their runs, as tables, figures and pages."""

    folder: Path
    """The folder of all runs."""

    def __init__(self, trials: Comparison | Tuning, temporary: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.folder = trials.folder
        self._trials: Comparison | Tuning = trials
        self._temporary = temporary  # deleted with this object

    def table(self) -> tables.Table:
        """Return the results as a table; it prints as text, and as HTML in a notebook."""
        raise NotImplementedError

    @property
    def notes(self) -> list[str]:
        """Return remarks: how settings were chosen, what diverged, best values on the edge of those tried."""
        return self._trials.notes()

    def report(self, path: str | Path = "report.html", *, title: str | None = None) -> Path:
        """Write an interactive page with curves, tables and configurations of all runs; return its path."""
        return self._save_page(Path(path), title)

    def _save_page(self, page: Path, title: str | None, baseline: Path | None = None) -> Path:
        target = self._trials.target
        targets = [] if target is None else [target]
        save_page(build(self._trials.runs, targets=targets, title=title, baseline=baseline), page)
        return page

    def __repr__(self) -> str:
        return "\n".join([str(self.table()), *(f"note: {line}" for line in self.notes)])

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escape(line)}</li>" for line in self.notes)
        return self.table()._repr_html_() + (f"<ul>{notes}</ul>" if notes else "")


class ComparisonResult(Result):
    """The result of `lamina.compare`. In a notebook it shows its table."""

    _trials: Comparison

    @property
    def histories(self) -> dict[str, list[History]]:
        """Return the histories of every algorithm, one per seed."""
        return {entry.name: entry.histories for entry in self._trials.entries}

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the learning rate of every algorithm, and its other settings if a grid was tried."""
        return {entry.name: dict(entry.settings) for entry in self._trials.entries}

    def table(self, baseline: str | None = None) -> tables.Table:
        """Return cost to target, final and best score of every algorithm: text in a terminal, HTML in a notebook.

        With a `baseline`, the name of an algorithm, the table has a column with the difference of the final scores to
        its scores: the mean over the seeds that both have, with its 95 % interval.
        """
        self._refuse_unknown(baseline)
        return tables.algorithms_table(self._trials.entries, self._trials.target, baseline)

    def report(
        self, path: str | Path = "report.html", *, title: str | None = None, baseline: str | None = None
    ) -> Path:
        """Write an interactive page with curves, tables and configurations of all runs; return its path.

        Costs and final scores are compared with those of the `baseline`, FedAvg unless given.
        """
        self._refuse_unknown(baseline)
        return self._save_page(Path(path), title, None if baseline is None else self.folder / label_folder(baseline))

    def _refuse_unknown(self, baseline: str | None) -> None:
        if baseline is not None and baseline not in self.histories:
            raise unknown("algorithm in this comparison", baseline, self.histories)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the score against rounds and megabytes sent, with the spread over seeds; with a path, save it there."""
        entries = self._trials.entries
        return _saved(comparison_figure(entries, describe_data(entries[0].records[0])), path)

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row for every round of every run."""
        return data_frame(self._trials.rounds(), "comparison.to_pandas()")


class TuningResult(Result):
    """The result of `lamina.tune`. In a notebook it shows its table."""

    _trials: Tuning

    @property
    def best(self) -> dict[str, Any]:
        """Return the values that scored best, by their keys (``train.lr``); empty if no trial ran to its end."""
        return {} if self._trials.best is None else dict(self._trials.best.settings)

    @property
    def score(self) -> float:
        """Return the score of the best values, the mean over seeds; NaN if no trial ran to its end."""
        return float("nan") if self._trials.best is None else self._trials.best.score

    def table(self) -> tables.Table:
        """Return values and scores of every trial: text in a terminal, HTML in a notebook."""
        return tables.trials_table(self._trials)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the score against the learning rate, or the curves of all trials; with a path, save it there."""
        responses = tuning_responses(self._trials)
        if responses:
            return _saved(rates_figure(responses), path)
        curves = group(find_records(self._trials.runs))
        return _saved(curve_figure(curves, metrics_of(curves)[0], "round"), path)

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row for every trial."""
        return data_frame(self._trials.rows(), "tuning.to_pandas()")


def _saved(figure: Figure, path: str | Path | None) -> Figure:
    """Write a figure to a file, if a path is given; its ending says the format."""
    if path is not None:
        save_picture(figure, path)
    return figure


def compare(
    model: Any,
    data: Any,
    algorithms: Sequence[str | Algorithm] | Mapping[str, str | Algorithm] = ("fedavg", "fedlamb", "fedlada"),
    *,
    test: Any = None,
    clients: Any = None,
    partition: Any = None,
    rounds: int = 50,
    lr: Rates | None = None,
    grid: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    seeds: int = 3,
    target: float | None = None,
    select: str = "validation",
    validation: float = 0.2,
    tuning_rounds: int | Sequence[int] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> ComparisonResult:
    """Compare algorithms on the same clients, batches and initial weights, each with its best settings.

    If several rates or other values are given for an algorithm, each is tried once on part of the training data, with a
    seed of its own. The one with the best final score on the held-out rest, the mean of the last ten rounds, is then
    trained with every seed and evaluated on the test data.

    >>> import torch, lamina
    >>> x = torch.randn(200, 5)
    >>> y = (x[:, 0] > 0).long()
    >>> result = lamina.compare(lambda: torch.nn.Linear(5, 2), (x, y), ["fedavg", "fedlamb"], test=(x, y),
    ...                         rounds=2, seeds=1, lr={"fedavg": 0.5, "fedlamb": 0.05}, device="cpu")
    >>> result.table().head[0], [row[0] for row in result.table().rows]
    ('algorithm', ['fedavg', 'fedlamb'])

    Args:
        model: a module, whose weights every run starts from; or a function that returns a new module, or a model's
            name or table ({"name": "mlp", "hidden": 64}), for weights that depend on the run's seed.
        data: the training data as for `Simulation`, training and test data as `lamina.data.load` returns them, or the
            name of a data set.
        algorithms: algorithms or their names. A dict from names of your own to algorithms compares several of one
            class: {"small": FedLada(alpha=0.05), "large": FedLada(alpha=0.5)}. A table may have `private`, for models
            whose parts stay with the client: {"fedper": {"name": "fedavg", "private": ["head.*"]}}.
        test: the test data, unless `data` includes them, or `local_test` gives every client its own.
        clients: as for `Simulation`.
        partition: as for `Simulation`.
        rounds: of every final run.
        lr: one rate for all algorithms, a list to choose from, or one of them for each algorithm by name. An algorithm
            without one has its default.
        grid: further values to try: {"fedlamb": {"decay": [0, 0.01]}}.
        seeds: final runs per algorithm; their seeds count up from `seed`, and that of tuning runs is one below it.
        target: value of the first metric on the test data to stay at; 0.9 by default if that is the accuracy.
        select: choose on held-out "validation" data, or on the "test" data as the papers do.
        validation: the fraction of the training data that is held out to choose on.
        tuning_rounds: rounds of the runs that only help to choose; of several numbers, the best third continues after
            each, and in the end all neighbours of the best combination.
        out: the folder of all runs. Called again with the same arguments, `compare` resumes there. Without it, the runs
            are in a temporary folder, which is deleted with the result.
        overwrite: whether earlier runs in the folder may be deleted.
        progress: show progress bars; by default only in a terminal or a notebook.
        settings: further settings of `Simulation`, with its defaults, such as metrics, batch_size,
            participation (1; in an experiment file, 0.5), seed and device.
    """
    refuse_unknown_settings(compare, settings)
    chosen = compared_algorithms(algorithms)
    section = {
        "algorithms": list(chosen),
        "options": {name: options for name, options in chosen.items() if options},
        "seeds": seeds,
        "select": select,
        "validation": validation,
        "grid": _grids(list(chosen), lr, grid or {}),
        **({} if target is None else {"target": target}),
        **({} if tuning_rounds is None else {"tuning_rounds": _plain(tuning_rounds)}),
    }
    settings |= {"rounds": rounds, "lr": None}
    experiment = describe(
        model, data, test=test, clients=clients, partition=partition, settings=settings, compare=section
    )
    _refuse_without_test(experiment)
    folder, temporary = _folder(out)
    with kept_threads():
        comparison = Comparison(experiment, folder, overwrite=overwrite)
        with python_bars(chosen, progress) as bars:
            follow(comparison, bars)
            comparison.run()
    refuse_all_diverged(comparison.entries)
    return ComparisonResult(comparison, temporary)


def follow(comparison: Comparison, bars: Bars) -> None:
    """Show the progress of a comparison: a bar for each algorithm, which the runs that train side by side share."""

    def show(job: Job, row: Row) -> None:
        state = "tuning" if job.tuning else "running"
        bars.update(job.algorithm, row, state=state, completed=row["round"], total=job.rounds)

    def show_end(job: Job, record: Record) -> None:
        if not job.tuning:
            bars.update(job.algorithm, state="done", completed=len(record.history), total=job.rounds)

    comparison.on_round, comparison.on_end = show, show_end


def tune(
    model: Any,
    data: Any,
    algorithm: str | Algorithm = "fedlamb",
    *,
    test: Any = None,
    clients: Any = None,
    partition: Any = None,
    rounds: int = 50,
    grid: Mapping[str, Sequence[Any]] | str | None = None,
    space: Mapping[str, Mapping[str, Any] | Sequence[Any]] | None = None,
    trials: int = 50,
    pruner: str = "none",
    seeds: int = 1,
    select: str = "validation",
    validation: float = 0.2,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    **settings: Any,
) -> TuningResult:
    """Try values of an algorithm's and the training's settings, and return them with their scores.

    >>> import torch, lamina
    >>> x = torch.randn(200, 5)
    >>> y = (x[:, 0] > 0).long()
    >>> result = lamina.tune(lambda: torch.nn.Linear(5, 2), (x, y), "fedavg", rounds=2, device="cpu",
    ...                      grid={"lr": [1e-6, 0.5]})
    >>> result.best
    {'train.lr': 0.5}

    Args:
        model: as for `compare`.
        data: as for `compare`.
        algorithm: an algorithm or its name.
        test: the test data; needed only with select="test".
        clients: as for `Simulation`.
        partition: as for `Simulation`.
        rounds: of every run.
        grid: values to try, all combinations: {"lr": [0.01, 0.1], "decay": [0, 0.01]}; or a paper's grid by name. Keys
            are settings of the algorithm and of `Simulation`, or keys of an experiment file ("model.hidden").
        space: in place of a grid, ranges or lists for Optuna to propose values from: {"lr": {"low": 0.001, "high": 1.0,
            "log": True}, "epochs": [1, 2, 5]}.
        trials: how many Optuna proposes.
        pruner: "none", "median" or "hyperband": whether Optuna stops trials early.
        seeds: runs per trial, whose seeds count down from the one below `seed`; their mean decides.
        select: choose on held-out "validation" data, or on the "test" data.
        validation: the fraction of the training data that is held out.
        out: the folder of all runs, resumed if it holds earlier ones; a temporary one by default.
        overwrite: whether earlier runs in the folder may be deleted.
        progress: show a progress bar; by default only in a terminal or a notebook.
        settings: further settings of `Simulation`.
    """
    refuse_unknown_settings(tune, settings)
    if (grid is None) == (space is None):
        raise BadInput("tune needs values to try: give grid= or space=, one of them")
    name, _ = algorithm_section(algorithm)
    if not isinstance(grid, str):
        _refuse_no_table("grid", grid, {"lr": [0.01, 0.1]})
    _refuse_no_table("space", space, {"lr": {"low": 0.01, "high": 1.0}})
    section: dict[str, Any] = {"seeds": seeds, "select": select, "validation": validation}
    if grid is not None:
        section["grid"] = grid if isinstance(grid, str) else {_key(k, name): _plain(v) for k, v in grid.items()}
    if space is not None:
        values = {_key(k, name): dict(v) if isinstance(v, Mapping) else _plain(v) for k, v in space.items()}
        section |= {"sampler": "tpe", "space": values, "trials": trials, "pruner": pruner}
    experiment = describe(
        model,
        data,
        algorithm,
        test=test,
        clients=clients,
        partition=partition,
        settings={**settings, "rounds": rounds},
        tune=section,
    )
    if select == "test":
        _refuse_without_test(experiment)
    folder, temporary = _folder(out)
    with kept_threads():
        tuning = Tuning(experiment, folder, overwrite=overwrite)
        with python_bars(["tuning"], progress, total=tuning.count * seeds * rounds) as bars:
            tuning.on_round = lambda job, row: bars.update("tuning", row, advance=1, state=job.label)
            tuning.run()
    refuse_all_diverged(tuning.trials, any)
    return TuningResult(tuning, temporary)


def _grids(names: Sequence[str], lr: Rates | None, grid: Mapping[str, Mapping[str, Sequence[Any]]]) -> dict[str, Any]:
    """Return the values to try for each algorithm, as `[compare.grid]` has them."""
    _refuse_no_table("grid", grid, {names[0]: {"lr": [0.01, 0.1]}})
    for name, values in grid.items():
        _refuse_no_table(f"the grid of '{name}'", values, {"lr": [0.01, 0.1]})
    rates = {} if lr is None else lr if isinstance(lr, Mapping) else dict.fromkeys(names, lr)
    for name in {**rates, **grid}:
        if name not in names:
            raise BadInput(f"there is no algorithm '{name}' in this comparison{nearest(name, names)}")
    tried: dict[str, dict[str, Any]] = {name: {"lr": _plain(values)} for name, values in rates.items()}
    for name, options in grid.items():
        tried[name] = {**tried.get(name, {}), **{key: _plain(values) for key, values in options.items()}}
    return tried


def _refuse_no_table(what: str, given: Any, example: Mapping[str, Any]) -> None:
    if not (given is None or isinstance(given, Mapping)):
        raise BadInput(f"{what} is {short_repr(given)}: give the values to try by their names, such as {example}")


def _plain(values: Any) -> list[Any]:
    """Return a number, a list, a tuple or an array as a list of Python's own values."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str) or not isinstance(values, Sequence):
        return [values]
    return [value.item() if hasattr(value, "item") else value for value in values]


def _key(key: str, algorithm: str) -> str:
    """Return the key of an experiment file for a setting: lr is train.lr, decay is algorithm.decay."""
    if "." in key:
        return key
    options = list(algorithms.options(algorithms.find(algorithm)))
    if key in options:
        return f"algorithm.{key}"
    if key in Train.model_fields:
        return f"train.{key}"
    hint = nearest(key, [*options, *Train.model_fields], option_places())
    raise BadInput(f"there is no setting '{key}' to tune{hint}")


def _refuse_without_test(experiment: Experiment) -> None:
    splits, data = experiment.objects.data, experiment.data
    if splits is not None and splits.test is None and data.local_test is None and data.heldout_clients is None:
        raise BadInput("the final runs are evaluated on test data: give test=(x, y), or local_test=0.2")


def _folder(out: str | Path | None) -> tuple[Path, tempfile.TemporaryDirectory[str] | None]:
    if out is not None:
        return Path(out), None
    temporary = tempfile.TemporaryDirectory(prefix="lamina-", ignore_cleanup_errors=True)
    return Path(temporary.name) / "runs", temporary
