"""Tune an experiment: try values of its keys, each as an ordinary run, and keep what scores best.

The values are a grid (the file's own or a paper's, by name), whose runs train side by side as populations, or
Optuna proposes them. The score is the best accuracy of a run, on held-out *training* data unless ``tune.select =
"test"``, and the mean over seeds decides; where nothing is classified it is the lowest loss.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import re
import shutil
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lamina
from lamina import algorithms, rng
from lamina.data.dataset import Splits
from lamina.errors import BadInput, is_number, is_whole, missing_extra, unknown
from lamina.experiment.compare import Planned, check_folder, run_side_by_side, write_csv
from lamina.experiment.config import Experiment, parse, set_key
from lamina.experiment.files import as_json, cannot_write, write_file, write_json
from lamina.experiment.folder import FORMAT, Lock, differences, is_ours
from lamina.experiment.records import Record, read_json, read_record
from lamina.experiment.run import (
    build,
    build_algorithm,
    build_model,
    build_partition,
    build_schedule,
    load_data,
    resolved,
)
from lamina.history import History, Row

Settings = dict[str, Any]  # dotted keys to values
Grid = dict[str, list[Any]]

MOST_AT_ONCE = 64  # runs that are open together: each holds a few files and its model
NEAR = 0.05  # of a range: so close to its end is on the edge
STUDY = "study.db"
MOST_NAMED = 5  # keys that differ, in one line
NO_MORE_ROUNDS = 1 << 62  # a study compares scores after the same number of rounds: it cannot be trained further
# what tuning sets itself, or what would make scores incomparable
NOT_TUNED = ("train.seed", "train.rounds", "data.validation", "data.name", "data.dir", "run", "compare", "tune")


# --- grids -------------------------------------------------------------------------------------------------------


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
    """The experiment's grid: a paper's for its algorithm, or the file's own; every key with its values once."""
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
        grid[key] = [value for i, value in enumerate(values) if value not in values[:i]]
    if not grid:
        raise BadInput(
            f"nothing to try: give --grid NAME ({', '.join(GRIDS)}), a table [tune.grid], or tune.sampler = 'tpe'"
        )
    return grid


@dataclass(frozen=True)
class Range:
    """What Optuna may choose a value from: numbers between two ends, or a list."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def samples(self) -> tuple[Any, ...]:
        """Values to check before anything runs."""
        return self.choices or (self.low, self.high)


def find_space(experiment: Experiment) -> dict[str, Range]:
    """The ranges of ``[tune.space]``."""
    space = {}
    for key, given in _dotted(experiment.tune.space, leaves=("low", "high", "log", "choices")).items():
        where = f"tune.space: '{key}'"
        if not isinstance(given, Mapping) or not given:
            raise BadInput(f"{where} must be a table: {{ low = 0.001, high = 1.0, log = true }} or {{ choices = […] }}")
        if set(given) == {"choices"}:
            choices = given["choices"]
            if not isinstance(choices, list) or not choices or not all(_is_plain(value) for value in choices):
                raise BadInput(f"{where}: choices must be a list of numbers, words, or true and false")
            space[key] = Range(choices=tuple(choices))
            continue
        if not {"low", "high"} <= set(given) <= {"low", "high", "log"}:
            raise BadInput(
                f"{where} has the keys {', '.join(given)}: it needs low and high (and log), or choices alone"
            )
        low, high, log = given["low"], given["high"], given.get("log", False)
        if not (is_number(low) and is_number(high) and low < high and isinstance(log, bool)):
            raise BadInput(f"{where}: low and high must be numbers, low the smaller one, and log true or false")
        if log and low <= 0:
            raise BadInput(f"{where}: low = {low} has no logarithm: it must be above 0, or log = false")
        space[key] = Range(low, high, log)
    if not space:
        raise BadInput("nothing to try: tune.sampler = 'tpe' chooses from the ranges in [tune.space]")
    return space


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


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
    for key in sorted(settings, key=lambda key: not key.endswith(".name")):  # a name drops the old one's options
        for refused in NOT_TUNED:
            if key == refused or key.startswith(f"{refused}."):
                raise BadInput(f"'{key}' cannot be tuned")
        if "." not in key:
            raise BadInput(f"'{key}' is no key of an experiment: write section.key, for example \"train.lr\"")
        set_key(tree, key.split("."), settings[key])
    made = parse(tree, source="tune")
    build_algorithm(made), build_partition(made), build_schedule(made)  # a wrong option costs no time
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
        return self._values(lambda history: best_of(history, self.metric))

    @property
    def last(self) -> list[float]:
        """The last value of every run that has any."""
        return self._values(lambda history: history.last(self.metric))

    @property
    def score(self) -> float:
        """What decides: the mean of the best values; NaN if it does not count."""
        return statistics.fmean(self.best) if self.best and not self.remark else math.nan

    def _values(self, of: Callable[[History], float]) -> list[float]:
        values = [of(record.history) for record in self.records]
        return [value for value in values if not math.isnan(value)]


def best_of(history: History, metric: str) -> float:
    """The largest accuracy or the smallest loss of a run, NaN if there is none."""
    if metric == "accuracy":
        return history.best()
    return min((value for value in history.column(metric) if not math.isnan(value)), default=math.nan)


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
            self._points = [
                dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())
            ]
            for settings in self._points:
                with_settings(experiment, settings)
        else:
            self._optuna = _import_optuna()
            self.space = find_space(experiment)
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
        self.metric = "accuracy" if self._loaded.train.classes is not None else "loss"
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
        return max(counting, key=lambda trial: trial.score * self._sign) if counting else None

    @property
    def _sign(self) -> int:
        return 1 if self.metric == "accuracy" else -1

    def run(self) -> bool:
        """Run what is left of it; whether it was finished, not stopped."""
        try:
            return self._run_grid() if self.grid else self._run_sampled()
        except OSError as error:
            raise cannot_write(self.folder, error) from error

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
            tuning["space"] = {
                key: list(own.choices) if own.choices else [own.low, own.high, "log" if own.log else "linear"]
                for key, own in self.space.items()
            }
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

    def _read(self, name: str, settings: Settings, *, pruned: bool = False) -> Trial:
        places = [self.folder / name / f"seed{seed}" for seed in self._seeds]
        records = [read_record(place) for place in places if (place / "metrics.jsonl").exists()]
        return Trial(name, settings, self.metric, records, self.spec.seeds, pruned)

    # --- a grid

    def _run_grid(self) -> bool:
        lock = Lock(self.folder)
        try:
            if not is_ours(self.folder):  # an earlier tuning's stays until its runs are known to be the same
                write_json(self.folder / "config.json", self._config)
            names = [folder_name(settings) for settings in self._points]
            # seeds outside: those that hold out different samples cannot be stacked, neighbours can
            runs = [(i, seed) for seed in self._seeds for i in range(len(names))]
            finished = True
            for first in range(0, len(runs), MOST_AT_ONCE):
                part = runs[first : first + MOST_AT_ONCE]
                said = [f"{written(self._points[i])}, seed {seed}" for i, seed in part]
                finished = run_side_by_side(
                    [self._planned(names[i], self._points[i], seed) for i, seed in part],
                    overwrite=self._overwrite,
                    stop=self._stop,
                    on_round=lambda i, row, said=said: self._on_round(said[i], row),  # type: ignore[misc]
                    on_end=lambda i, record, said=said: self._on_end(said[i], record),  # type: ignore[misc]
                )
                if not finished:
                    break
            write_json(self.folder / "config.json", self._config)
            self.trials = [self._read(name, settings) for name, settings in zip(names, self._points, strict=True)]
            self._save()
            return finished
        finally:
            lock.release()

    # --- Optuna

    def _run_sampled(self) -> bool:
        optuna = self._optuna
        with self.turn():
            self._recognise()
            study = optuna.create_study(
                storage=f"sqlite:///{(self.folder / STUDY).absolute()}",
                study_name="tune",  # Hyperband's brackets depend on it
                load_if_exists=True,
                direction="maximize" if self.metric == "accuracy" else "minimize",
                pruner=self._pruner(),
            )
        finished = True
        while finished:
            with self.turn():
                claimed = self._claim(study)
            if claimed is None:
                break
            trial, lock = claimed
            try:
                finished = self._run_trial(study, trial)
            finally:
                lock.release()
        with self.turn():
            self.trials = [
                self._read(trial_name(t.number), dict(t.params), pruned=t.state == optuna.trial.TrialState.PRUNED)
                for t in study.get_trials(deepcopy=False)
            ]
            self._save()
        return finished

    def _recognise(self) -> None:
        """Refuse a folder whose trials would not be comparable with ours; begin a new one."""
        if self._overwrite:
            (self.folder / STUDY).unlink(missing_ok=True)
            for old in self.folder.glob("trial[0-9]*"):
                shutil.rmtree(old)
        if not self._overwrite and is_ours(self.folder):
            stored = read_json(self.folder / "config.json")
            differing = differences(stored, self._config, NO_MORE_ROUNDS)
            if differing:
                raise BadInput(
                    f"the folder '{self.folder}' holds another tuning: {', '.join(differing[:MOST_NAMED])}; "
                    "choose another folder with --out, or give --overwrite"
                )
        else:
            write_json(self.folder / "config.json", self._config)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """One worker at a time: wait until it is our turn to look at the study and to write the tables."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # freed when the file is closed, or its process killed
            yield

    def _claim(self, study: Any) -> tuple[Any, Lock] | None:
        """A trial that a killed worker left, or else a new one, with its lock; None if there are enough."""
        optuna = self._optuna
        trials = study.get_trials(deepcopy=False)
        for left in trials:
            if left.state == optuna.trial.TrialState.RUNNING:
                with contextlib.suppress(BadInput):  # another worker holds the lock: it is running
                    lock = Lock(self.folder / trial_name(left.number))
                    study.sampler = self._sampler(left.number)
                    return optuna.trial.Trial(study, left._trial_id), lock
        if len(trials) >= self.spec.trials:
            return None
        study.sampler = self._sampler(len(trials))
        trial = study.ask()
        return trial, Lock(self.folder / trial_name(trial.number))

    def _sampler(self, number: int) -> Any:
        """A sampler whose draws depend on the trial's number alone, whichever worker makes it and when."""
        seed = rng.torch_seed(self.experiment.train.seed, "tune", number) % 2**32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            # workers keep away from what others are trying at the moment
            return self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)

    def _pruner(self) -> Any:
        pruners = self._optuna.pruners
        if self.spec.pruner == "median":
            return pruners.MedianPruner()
        if self.spec.pruner == "hyperband":
            return pruners.HyperbandPruner(max_resource=self.experiment.train.rounds)
        return pruners.NopPruner()

    def _run_trial(self, study: Any, trial: Any) -> bool:
        """Run a trial's seeds and tell the study how it ended; whether it did, and was not stopped."""
        state = self._optuna.trial.TrialState
        settings = {key: _suggest(trial, key, own) for key, own in self.space.items()}
        name = trial_name(trial.number)
        said = [f"{name}, {written(settings)}, seed {seed}" for seed in self._seeds]
        reported = set(study.get_trials(deepcopy=False)[trial.number].intermediate_values)
        try:
            planned = [self._planned(name, settings, seed) for seed in self._seeds]
        except BadInput as error:  # each value alone was allowed; started again, the study goes on without this trial
            study.tell(trial.number, state=state.FAIL)
            raise BadInput(f"{name}, {written(settings)}: {error}") from error
        pruned = False

        def look(i: int, row: Row) -> None:
            """Ask the pruner after every evaluated round of the first seed."""
            nonlocal pruned
            self._on_round(said[i], row)
            if i == 0 and self.metric in row and math.isfinite(row[self.metric]):
                if row["round"] not in reported:  # a round that is run again after a kill
                    trial.report(float(row[self.metric]), int(row["round"]))
                pruned = pruned or bool(trial.should_prune())

        finished = run_side_by_side(
            planned,
            overwrite=False,
            stop=lambda: pruned or self._stop(),
            on_round=look,
            on_end=lambda i, record: self._on_end(said[i], record),
        )
        outcome = self._read(name, settings)
        if finished and outcome.remark == "":
            study.tell(trial.number, outcome.score)
        elif outcome.remark == "diverged":
            # not "failed", which the sampler would pass over: it should learn to keep away
            study.tell(trial.number, state=state.PRUNED)
        elif pruned:
            study.tell(trial.number, state=state.PRUNED)
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
        lines = []
        for key in self.keys:
            value = self.best.settings[key]
            low, high = self._is_at_edge(key, value)
            if low != high:
                tried, way = "the grid" if self.grid else "the range", "smaller" if low else "larger"
                lines.append(f"the best {key} = {value:g} lies on the edge of {tried}: try {way} values")
        return lines

    def _is_at_edge(self, key: str, value: Any) -> tuple[bool, bool]:
        """Whether a value is at the lower and at the upper end, with something allowed beyond it."""
        values = self.grid.get(key) or self.space[key].choices or (self.space[key].low, self.space[key].high)
        if not all(is_number(other) for other in values) or min(values) == max(values):
            return False, False
        low, high, place = min(values), max(values), value
        near = 0.0
        if key in self.space and not self.space[key].choices:
            if self.space[key].log:
                low, high, place = math.log(low), math.log(high), math.log(value)
            near = NEAR * (high - low)
        bounds = self._bounds(key)
        return place <= low + near and value != bounds[0], place >= high - near and value != bounds[1]

    def _bounds(self, key: str) -> tuple[float | None, float | None]:
        """The ends of what an algorithm's option may be: no edge to go beyond."""
        section, _, name = key.partition(".")
        known = algorithms.options(algorithms.find(self.experiment.algorithm.name)) if section == "algorithm" else {}
        if name not in known:
            return None, None
        return known[name].metadata.get("low"), known[name].metadata.get("high")

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
            f"the best of {ended} trials by {self.score_name}: {best.score:.4f}, mean over {best.seeds} seed(s)",
            f"chosen on {self.chosen_on()}",
        ]
        tree = with_settings(self.experiment, best.settings).model_dump(exclude_unset=True)
        tree.get("run", {}).pop("out", None)  # that is where the tuned experiment's own runs go
        write_file(self.folder / "best.toml", ("".join(f"# {line}\n" for line in head) + as_toml(tree)).encode())


def _suggest(trial: Any, key: str, own: Range) -> Any:
    if own.choices:
        return trial.suggest_categorical(key, own.choices)
    if is_whole(own.low) and is_whole(own.high):
        return trial.suggest_int(key, own.low, own.high, log=own.log)
    return trial.suggest_float(key, own.low, own.high, log=own.log)


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise missing_extra("optuna", "tune", "tune.sampler = 'tpe'") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def trial_name(number: int) -> str:
    """The folder of one of Optuna's trials."""
    return f"trial{number:03d}"


def short_names(keys: Sequence[str]) -> list[str]:
    """Keys without their sections, where that leaves them apart.

    >>> short_names(["train.lr", "algorithm.decay"]), short_names(["model.name", "algorithm.name"])
    (['lr', 'decay'], ['model.name', 'algorithm.name'])
    """
    ends = [key.rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]


def written(settings: Settings) -> str:
    """Settings in a line, for people.

    >>> written({"train.lr": 0.1, "algorithm.decay": 0.0})
    'lr 0.1, decay 0'
    """
    names = short_names(list(settings))
    return ", ".join(f"{name} {shown(value)}" for name, value in zip(names, settings.values(), strict=True))


def shown(value: Any) -> str:
    """A value, for people."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def folder_name(settings: Settings) -> str:
    """A folder's name that tells a grid's points apart.

    >>> folder_name({"train.lr": 0.1, "algorithm.decay": 0.0})
    'lr0.1-decay0.0'
    """
    parts = [
        f"{name}{value!r}" if is_number(value) else f"{name}-{shown(value)}"
        for name, value in zip(short_names(list(settings)), settings.values(), strict=True)
    ]
    return re.sub(r"[^\w.+-]+", "_", "-".join(parts))


# --- TOML --------------------------------------------------------------------------------------------------------


def as_toml(tree: Mapping[str, Any], prefix: str = "") -> str:
    """Nested tables as TOML, which Python reads but does not write; what is None is left out.

    >>> print(as_toml({"train": {"lr": 0.1, "schedule": {"name": "cosine"}}}), end="")
    <BLANKLINE>
    [train]
    lr = 0.1
    <BLANKLINE>
    [train.schedule]
    name = "cosine"
    """
    tables = {key: value for key, value in tree.items() if isinstance(value, Mapping)}
    values = {key: value for key, value in tree.items() if value is not None and key not in tables}
    text = f"\n[{prefix}]\n" if values and prefix else ""
    text += "".join(f"{_toml_key(key)} = {_toml_value(value)}\n" for key, value in values.items())
    for key, inner in tables.items():
        text += as_toml(inner, f"{prefix}.{_toml_key(key)}" if prefix else _toml_key(key))
    return text


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(inner) for inner in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)
