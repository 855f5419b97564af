"""Tune an experiment: try values of its keys, each as an ordinary run, and keep what scores best.

The values are a grid (the file's own or a paper's, by name), whose runs train side by side as populations, or
Optuna proposes them (`study.py`). The score is the best accuracy of a run, on held-out *training* data unless
``tune.select = "test"``, and the mean over seeds decides; where nothing is classified it is the lowest loss.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lamina
from lamina.data.dataset import Splits
from lamina.errors import BadInput, Diverged, unknown
from lamina.experiment.config import Experiment, parse, set_key
from lamina.experiment.folder import CHOOSE_ANOTHER, Lock, delete_runs, differences, is_ours, lost, turn
from lamina.experiment.records import FORMAT, Record, read_json, read_record
from lamina.experiment.run import (
    build,
    build_aggregation,
    build_algorithm,
    build_model,
    build_partition,
    build_schedule,
    load_data,
    resolved,
)
from lamina.experiment.settings import Grid, Settings, at_ends, bounds_of, folder_name, points, way_beyond, written
from lamina.experiment.side_by_side import Planned, check_folder, run_side_by_side
from lamina.experiment.study import Claimed, Range, Study, find_space
from lamina.experiment.toml import as_toml, replace_length
from lamina.history import History, Row
from lamina.storage.files import as_json, cannot_write, write_csv, write_file, write_json
from lamina.text import plural

MOST_NAMED = 5  # keys that differ, in one line
NO_MORE_ROUNDS = 1 << 62  # a study compares scores after the same number of rounds: it cannot be trained further
# what tuning sets itself, or what would make scores incomparable
NOT_TUNED = ("train.seed", "train.rounds", "data.validation", "data.name", "data.dir", "run", "compare", "tune")


# --- what is tried -----------------------------------------------------------------------------------------------


def _one_three_five(first: int, last: int) -> list[float]:
    """1, 3 and 5 times the powers of ten between two exponents.

    >>> _one_three_five(-2, -1)
    [0.01, 0.03, 0.05, 0.1, 0.3, 0.5]
    """
    return [float(f"{digit}e{power}") for power in range(first, last + 1) for digit in (1, 3, 5)]


_SGD_AND_LAMB = _one_three_five(-3, -1)
_AMS_AND_MIME = [*_one_three_five(-4, -2), 0.1]
_LAMBDA = [0.0, 0.01, 0.1]  # only the LAMB methods have a lambda in the paper

# the papers' grids by name, then by algorithm
GRIDS: dict[str, dict[str, Grid]] = {
    "lamb-paper": {
        "fedavg": {"train.lr": _SGD_AND_LAMB},
        "fedadam": {"train.lr": _one_three_five(-4, -1), "algorithm.server_lr": _AMS_AND_MIME},
        "fedams": {"train.lr": _AMS_AND_MIME},
        "mime": {"train.lr": _AMS_AND_MIME},
        "fedlamb": {"train.lr": _SGD_AND_LAMB, "algorithm.decay": _LAMBDA},
        "mimelamb": {"train.lr": _SGD_AND_LAMB, "algorithm.decay": _LAMBDA},
    },
    "lada-alpha": {"fedlada": {"algorithm.alpha": [0.01, 0.05, 0.1, 0.2, 0.5, 1.0]}},  # its Table 5
}


def find_grid(experiment: Experiment) -> Grid:
    """The experiment's grid: a paper's for its algorithm, or the file's own."""
    given, name = experiment.tune.grid, experiment.algorithm.name
    if isinstance(given, str):
        if given not in GRIDS:
            raise unknown("grid", given, GRIDS)
        if name not in GRIDS[given]:
            raise BadInput(f"the grid '{given}' has no values for {name} (it has them for {', '.join(GRIDS[given])})")
        return GRIDS[given][name]
    grid: Grid = {}
    for key, values in _dotted(given).items():
        if not isinstance(values, list) or not values:
            raise BadInput(f"tune.grid: '{key}' must be a list of values to try, for example [0.01, 0.1]")
        grid[key] = values
    if not grid:
        raise BadInput(
            f"nothing to try: give --grid NAME ({', '.join(GRIDS)}), a table [tune.grid], or tune.sampler = 'tpe'"
        )
    return grid


def _dotted(tree: Mapping[str, Any], leaves: Sequence[str] = (), prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys, so that ``train.lr`` may stand in quotes or not; a table of `leaves` is a value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        inner = isinstance(value, Mapping) and not set(value) & set(leaves)
        flat |= _dotted(value, leaves, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def with_settings(experiment: Experiment, settings: Settings) -> Experiment:
    """The experiment with some keys set; checked as a file would be."""
    tree = experiment.model_dump(exclude_unset=True)
    replace_length(tree, list(settings))
    for key in sorted(settings, key=lambda key: not key.endswith(".name")):  # a name drops the old one's options
        for refused in NOT_TUNED:
            if key == refused or key.startswith(f"{refused}."):
                raise BadInput(f"'{key}' cannot be tuned")
        if "." not in key:
            raise BadInput(f"'{key}' is no key of an experiment: write section.key, for example \"train.lr\"")
        set_key(tree, key.split("."), settings[key])
    made = parse(tree, source="tune")
    # a wrong option costs no time
    build_algorithm(made), build_partition(made), build_schedule(made), build_aggregation(made)
    return made


# --- results -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One choice of values and the runs made with it so far, a seed each."""

    name: str  # of its folder
    settings: Settings
    metric: str  # "accuracy" or "loss"
    records: list[Record]
    seeds: int  # how many runs it should have
    pruned: bool = False

    @property
    def remark(self) -> str:
        """Why it does not count; empty if it does."""
        if any(record.diverged for record in self.records):
            return "diverged"
        if self.pruned:
            return "pruned"
        done = len(self.records) == self.seeds and all(record.complete for record in self.records)
        return "" if done else "not finished"

    @property
    def best(self) -> list[float]:
        """The best value of every run that has any."""
        return self._values(lambda history: history.best(self.metric, optional=True))

    @property
    def last(self) -> list[float]:
        """The last value of every run that has any."""
        return self._values(lambda history: history.last(self.metric, optional=True))

    @property
    def score(self) -> float:
        """What decides: the mean of the best values; NaN if it does not count."""
        return statistics.fmean(self.best) if self.best and not self.remark else math.nan

    def _values(self, of: Callable[[History], float]) -> list[float]:
        values = [of(record.history) for record in self.records]
        return [value for value in values if not math.isnan(value)]


class Tuning:
    """The tuning of an experiment file in a folder: checked when made, then `run`; `trials` tells what came out.

    Every run has a folder of its own, ``<trial>/seed<n>``, so that a tuning started again skips what is complete and
    goes on with what is not. With Optuna several processes may share a folder.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        overwrite: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        check_folder(folder, "tuning", "a tuning's", overwrite=overwrite)  # before the data are read
        self.experiment, self.folder, self.spec = experiment, folder, experiment.tune
        self._overwrite, self._stop = overwrite, stop
        self.watch(lambda run, row: None, lambda run, record: None)
        self.trials: list[Trial] = []
        if experiment.data.validation is not None:
            raise BadInput("data.validation is for single runs: tuning holds out tune.validation by itself")
        self.grid: Grid = {}
        self.space: dict[str, Range] = {}
        if self.spec.sampler == "grid":
            self.grid = find_grid(experiment)
            self._points = points(self.grid)
            for settings in self._points:
                with_settings(experiment, settings)
        else:
            self.space = find_space(_dotted(self.spec.space, leaves=("low", "high", "log", "choices")))
            self._study = Study(
                folder,
                self.space,
                pruner=self.spec.pruner,
                rounds=experiment.train.rounds,
                seed=experiment.train.seed,
            )
            for key, own in self.space.items():
                for value in own.samples:
                    with_settings(experiment, {key: value})
        self._loaded = load_data(experiment)
        self._splits: dict[int, Splits] = {}  # by seed
        for key in self.keys:
            if key.startswith("model."):  # what a model takes shows when it is made
                for value in self.grid.get(key) or self.space[key].samples:
                    build_model(with_settings(experiment, {key: value}), self._loaded.train)
        simulation = build(experiment, self._loaded)
        if simulation.test_data is not None:  # where they are needed: every run would copy them
            self._loaded = Splits(simulation.train_data, simulation.test_data)
        self.metric = simulation.metric
        self.title = simulation.algorithm.card.title
        self._config = self._describe(resolved(experiment, simulation))

    def watch(self, on_round: Callable[[str, Row], None], on_end: Callable[[str, Record], None]) -> None:
        """Have a run's name and row told as rounds finish, and its name and record when it has ended."""
        self._on_round, self._on_end = on_round, on_end

    @property
    def keys(self) -> list[str]:
        """The keys that are tuned."""
        return list(self.grid or self.space)

    @property
    def count(self) -> int:
        """How many trials it has in the end."""
        return len(self._points) if self.grid else self.spec.trials

    @property
    def best(self) -> Trial | None:
        """The trial that counts and scores best; None if there is none yet."""
        counting = [trial for trial in self.trials if not math.isnan(trial.score)]
        sign = 1 if self.metric == "accuracy" else -1
        return max(counting, key=lambda trial: trial.score * sign) if counting else None

    def refuse_all_diverged(self) -> None:
        """Raise the error for a tuning without a single trial that did not diverge."""
        diverged = [record for trial in self.trials for record in trial.records if record.diverged]
        if diverged and all(trial.remark == "diverged" for trial in self.trials):
            first = diverged[0]
            raise Diverged(
                f"every run diverged; the first: {first.diverged}", round=len(first.history) + 1, client=None, layer=""
            )

    def run(self) -> bool:
        """Run what is left of it; whether it was finished, not stopped."""
        try:
            return self._run_grid() if self.grid else self._run_study()
        except OSError as error:
            raise cannot_write(self.folder, error) from error

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Wait until no other worker writes the tables."""
        return turn(self.folder)

    def _describe(self, config: dict[str, Any]) -> dict[str, Any]:
        """The configuration common to all trials, and what is tried."""
        for key in self.keys:
            *outer, last = key.split(".")
            section: Any = config
            for name in outer:
                section = section.get(name, {})
            section.pop(last, None)
        tuning: dict[str, Any] = {"sampler": self.spec.sampler, "select": self.spec.select, "seeds": self.spec.seeds}
        tuning["validation"] = self.spec.validation if self.spec.select == "validation" else None
        if self.grid:
            tuning["grid"] = self.grid
        else:
            tuning["space"] = {key: own.described for key, own in self.space.items()}
        described: dict[str, Any] = as_json(
            {"lamina": lamina.__version__, "format": FORMAT, "tuning": tuning, **config}
        )
        return described

    # --- runs

    def _planned(self, name: str, settings: Settings, seed: int) -> Planned:
        experiment = with_settings(self.experiment, settings)
        held_out = self.spec.validation if self.spec.select == "validation" else None
        experiment = experiment.model_copy(
            update={
                "train": experiment.train.model_copy(update={"seed": seed}),
                "data": experiment.data.model_copy(update={"validation": held_out}),
            }
        )
        if seed not in self._splits:  # as a run of its own would hold them out: every seed its own samples
            train = self._loaded.train
            self._splits[seed] = self._loaded if held_out is None else Splits(*train.holdout(held_out, seed))
        return Planned(experiment, self._splits[seed], self.folder / name / f"seed{seed}")

    @property
    def _seeds(self) -> range:
        return range(self.experiment.train.seed, self.experiment.train.seed + self.spec.seeds)

    def _read(self, name: str, settings: Settings, pruned: bool = False) -> Trial:
        places = [self.folder / name / f"seed{seed}" for seed in self._seeds]
        records = [read_record(place) for place in places if (place / "metrics.jsonl").exists()]
        return Trial(name, settings, self.metric, records, self.spec.seeds, pruned)

    def _run_grid(self) -> bool:
        lock = Lock(self.folder)
        try:
            if self._overwrite:
                delete_runs(self.folder.glob("*/seed*"))
            if not is_ours(self.folder):  # an earlier tuning's stays until its runs are known to be the same
                write_json(self.folder / "config.json", self._config)
            names = [folder_name(settings) for settings in self._points]
            # seeds outside: those that hold out different samples cannot be stacked, neighbours can
            runs = [(i, seed) for seed in self._seeds for i in range(len(names))]
            said = [f"{written(self._points[i])}, seed {seed}" for i, seed in runs]
            finished = run_side_by_side(
                [self._planned(names[i], self._points[i], seed) for i, seed in runs],
                stop=self._stop,
                on_round=lambda i, row: self._on_round(said[i], row),
                on_end=lambda i, record: self._on_end(said[i], record),
            )
            lock.refuse_lost()
            write_json(self.folder / "config.json", self._config)
            self.trials = [self._read(name, settings) for name, settings in zip(names, self._points, strict=True)]
            self._save()
            missing = [trial.name for trial in self.trials if finished and trial.remark == "not finished"]
            if missing:
                raise lost(self.folder / missing[0])
            return finished
        finally:
            lock.release()

    def _run_study(self) -> bool:
        with self.turn():
            self._recognise()
            self._study.open(maximise=self.metric == "accuracy")
        finished = True
        while finished:
            with self.turn():
                trial = self._study.claim(self.spec.trials)
            if trial is None:
                break
            try:
                finished = self._run_trial(trial)
            finally:
                trial.release()
        with self.turn():
            self.trials = [self._read(*proposed) for proposed in self._study.proposed()]
            self._save()
        return finished

    def _recognise(self) -> None:
        """Refuse a folder whose trials would not be comparable with ours; begin a new one."""
        if self._overwrite:
            self._study.remove()
        if not self._overwrite and is_ours(self.folder):
            stored = read_json(self.folder / "config.json")
            differing = differences(stored, self._config, NO_MORE_ROUNDS)
            if differing:
                raise BadInput(
                    f"the folder '{self.folder}' holds another tuning: {', '.join(differing[:MOST_NAMED])}; "
                    f"{CHOOSE_ANOTHER}"
                )
        else:
            write_json(self.folder / "config.json", self._config)

    def _run_trial(self, trial: Claimed) -> bool:
        """Run a trial's seeds and tell the study how it ended; whether it did, and was not stopped."""
        said = [f"{trial.name}, {written(trial.settings)}, seed {seed}" for seed in self._seeds]
        try:
            planned = [self._planned(trial.name, trial.settings, seed) for seed in self._seeds]
        except BadInput as error:  # each value alone was allowed; started again, the study goes on without this trial
            trial.end("failed")
            raise BadInput(f"{trial.name}, {written(trial.settings)}: {error}") from error
        pruned = False

        def look(i: int, row: Row) -> None:
            """Ask the pruner after every evaluated round of the first seed."""
            nonlocal pruned
            self._on_round(said[i], row)
            if i == 0 and self.metric in row and math.isfinite(row[self.metric]):
                pruned = trial.report(int(row["round"]), float(row[self.metric])) or pruned

        finished = run_side_by_side(
            planned,
            stop=lambda: pruned or self._stop(),
            on_round=look,
            on_end=lambda i, record: self._on_end(said[i], record),
        )
        outcome = self._read(trial.name, trial.settings)
        if finished and outcome.remark == "":
            trial.end(outcome.score)
        elif outcome.remark == "diverged":
            trial.end("pruned")  # not "failed", which the sampler would pass over: it should learn to keep away
        elif pruned:
            trial.end("pruned")
            self._on_end(said[0], outcome.records[0])
        else:
            return False  # it stays as running: the next worker without one goes on with it
        return True

    # --- what is said and written

    @property
    def score_name(self) -> str:
        """What decides, in words."""
        return f"best {self.spec.select} {self.metric}"

    def edges(self) -> list[str]:
        """A warning for every key whose best value has nothing beyond it."""
        if self.best is None:
            return []
        tried, lines = "the grid" if self.grid else "the range", []
        for key in self.keys:
            value = self.best.settings[key]
            section, _, option = key.partition(".")
            bounds = bounds_of(self.experiment.algorithm.name, option) if section == "algorithm" else (None, None)
            ends = at_ends(value, self.grid[key]) if self.grid else self.space[key].ends(value)
            way = way_beyond(value, ends, bounds)
            if way:
                lines.append(f"the best {key} = {value:g} lies on the edge of {tried}: try {way} values")
        return lines

    def chosen_on(self) -> str:
        """What data the choice was made on."""
        if self.spec.select == "test":
            return "the test data, as the papers do: what the best reaches there is too good"
        return f"{self.spec.validation:.0%} of the training data, held out"

    def _save(self) -> None:
        """Write every trial, and the best configuration as an experiment file."""
        best = self.best
        score, last = self.score_name.replace(" ", "_"), f"last_{self.spec.select}_{self.metric}"
        rows = [
            {
                "trial": trial.name,
                **{key: trial.settings.get(key, "") for key in self.keys},
                "seeds": len(trial.records),
                score: statistics.fmean(trial.best) if trial.best else "",
                last: statistics.fmean(trial.last) if trial.last else "",
                "remark": "chosen" if trial is best else trial.remark,
            }
            for trial in self.trials
        ]
        write_csv(self.folder / "trials.csv", ["trial", *self.keys, "seeds", score, last, "remark"], rows)
        if best is None:
            (self.folder / "best.toml").unlink(missing_ok=True)
            return
        ended = sum(trial.remark != "not finished" for trial in self.trials)
        head = [
            f"the best of {plural(ended, 'trial')} by {self.score_name}: {best.score:.4f}, mean over "
            f"{plural(best.seeds, 'seed')}",
            f"chosen on {self.chosen_on()}",
        ]
        tree = with_settings(self.experiment, best.settings).model_dump(exclude_unset=True)
        tree.get("run", {}).pop("out", None)  # that is where the tuned experiment's own runs go
        write_file(self.folder / "best.toml", ("".join(f"# {line}\n" for line in head) + as_toml(tree)).encode())
