"""Tune an experiment: try values of its keys, each as an ordinary run, and keep what scores best.

The values are a grid (the file's own or a paper's, by name), whose runs train side by side as populations, or
Optuna proposes them (`study.py`). The score is the best accuracy of a run, on held-out *training* data unless
``tune.select = "test"``, and the mean over seeds decides; where nothing is classified it is the lowest loss.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lamina
from lamina.errors import BadInput, Diverged, unknown
from lamina.experiment.build import (
    build_aggregation,
    build_algorithm,
    build_model,
    build_partition,
    build_schedule,
    resolved,
)
from lamina.experiment.config import Experiment, parse, set_key
from lamina.experiment.records import FORMAT, Record, differences, flatten, read_json, read_record
from lamina.experiment.run_files import CHOOSE_ANOTHER, check_folder, delete_runs, is_ours
from lamina.experiment.settings import Grid, Settings, at_ends, folder_name, points, way_beyond, written
from lamina.experiment.study import Claimed, Range, Study, find_space
from lamina.experiment.toml import as_toml, replace_length
from lamina.experiment.tuner import Job, Trial, Tuner
from lamina.history import Row
from lamina.storage.files import as_json, write_csv, write_file, write_json, writing_to
from lamina.storage.locks import turn
from lamina.text import plural

NO_MORE_ROUNDS = 1 << 62  # trials of a study are compared after the same number of rounds, so that cannot grow
# what tuning sets itself, or what would make scores incomparable
NOT_TUNED = ("train.seed", "train.rounds", "data.validation", "data.name", "data.dir", "run", "compare", "tune")


def _one_three_five(first: int, last: int) -> list[float]:
    """Return 1, 3 and 5 times the powers of ten between two exponents.

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
    """Return the grid of an experiment: a paper's for its algorithm, or the file's own."""
    given, name = experiment.tune.grid, experiment.algorithm.name
    if isinstance(given, str):
        if given not in GRIDS:
            raise unknown("grid", given, GRIDS)
        if name not in GRIDS[given]:
            raise BadInput(f"the grid '{given}' has no values for {name} (it has them for {', '.join(GRIDS[given])})")
        return GRIDS[given][name]
    grid: Grid = {}
    for key, values in flatten(given).items():
        if not isinstance(values, list) or not values:
            raise BadInput(f"tune.grid: '{key}' must be a list of values to try, for example [0.01, 0.1]")
        grid[key] = values
    if not grid:
        raise BadInput(
            f"nothing to try: give --grid NAME ({', '.join(GRIDS)}), a table [tune.grid], or tune.sampler = 'tpe'"
        )
    return grid


def with_settings(experiment: Experiment, settings: Settings) -> Experiment:
    """Return the experiment with some keys set, validated as a file would be."""
    tree = experiment.model_dump(exclude_unset=True)
    replace_length(tree, list(settings))
    for key in sorted(settings, key=lambda key: not key.endswith(".name")):  # a name drops the old one's options
        for refused in NOT_TUNED:
            if key == refused or key.startswith(f"{refused}."):
                raise BadInput(f"'{key}' cannot be tuned")
        if "." not in key:
            raise BadInput(f"'{key}' is no key of an experiment: write section.key, for example \"train.lr\"")
        set_key(tree, key.split("."), settings[key])
    changed = parse(tree, source="tune")
    for build_part in (build_algorithm, build_partition, build_schedule, build_aggregation):
        build_part(changed)  # refuses a wrong option before anything runs
    return changed


class Tuning:
    """The tuning of an experiment file in a folder; `run` fills `trials`.

    Every run has a folder of its own, ``<trial>/seed<n>``, so that a tuning started again skips complete runs and
    resumes the others. With Optuna several processes may share a folder.
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
        self._overwrite = overwrite
        self.watch(lambda run, row: None, lambda run, record: None)
        self.trials: list[Trial] = []
        self._tuner = Tuner(experiment, self.spec, folder, stop)
        self._seeds = range(experiment.train.seed, experiment.train.seed + self.spec.seeds)
        self.grid: Grid = {}
        self.space: dict[str, Range] = {}
        if self.spec.sampler == "grid":
            self.grid = find_grid(experiment)
            self._points = points(self.grid)
            for settings in self._points:
                with_settings(experiment, settings)
        else:
            self.space = find_space(flatten(self.spec.space, leaves=("low", "high", "log", "choices")))
            rounds, seed = experiment.train.rounds, experiment.train.seed
            self._study = Study(folder, self.space, pruner=self.spec.pruner, rounds=rounds, seed=seed)
            for key, values in self.space.items():
                for value in values.samples:
                    with_settings(experiment, {key: value})
        simulation = self._tuner.load(experiment)
        for key in self.keys:
            if key.startswith("model."):  # a model checks its options when it is built
                for value in self.grid.get(key) or self.space[key].samples:
                    build_model(with_settings(experiment, {key: value}), simulation.train_data)
        self.metric = simulation.metric
        self.title = simulation.algorithm.card.title
        self._config = self._describe(resolved(experiment, simulation))

    def watch(self, on_round: Callable[[str, Row], None], on_end: Callable[[str, Record], None]) -> None:
        """Set what is called with a run's label and row after a round, and with its label and record at its end."""
        self._on_round: Callable[[Job, Row], None] = lambda job, row: on_round(job.label, row)
        self._on_end: Callable[[Job, Record], None] = lambda job, record: on_end(job.label, record)

    @property
    def keys(self) -> list[str]:
        """Return the keys that are tuned."""
        return list(self.grid or self.space)

    @property
    def count(self) -> int:
        """Return how many trials there are in the end."""
        return len(self._points) if self.grid else self.spec.trials

    @property
    def best(self) -> Trial | None:
        """Return the trial that counts and scores best; None if there is none yet."""
        counting = [trial for trial in self.trials if not math.isnan(trial.score)]
        return max(counting, key=lambda trial: trial.rank, default=None)

    def refuse_all_diverged(self) -> None:
        """Raise the error for a tuning without a single trial that did not diverge."""
        diverged = [record for trial in self.trials for record in trial.records if record.diverged]
        if diverged and all(trial.remark == "diverged" for trial in self.trials):
            line, number = f"every run diverged; the first: {diverged[0].diverged}", len(diverged[0].history) + 1
            raise Diverged(line, round=number, client=None, layer="")

    def run(self) -> bool:
        """Run what is left; return whether all runs finished."""
        with writing_to(self.folder):
            return self._run_grid() if self.grid else self._run_study()

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """Wait until no other process writes the tables."""
        return turn(self.folder)

    def _describe(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration common to all trials, and the values to try."""
        for key in self.keys:
            *outer, last = key.split(".")
            section: Any = config
            for name in outer:
                section = section.get(name, {})
            section.pop(last, None)
        tuning: dict[str, Any] = {"sampler": self.spec.sampler, "select": self.spec.select, "seeds": self.spec.seeds}
        tuning["validation"] = self.spec.validation if self.spec.select == "validation" else None
        space = {key: values.described for key, values in self.space.items()}
        tuning |= {"grid": self.grid} if self.grid else {"space": space}
        return dict(as_json({"lamina": lamina.__version__, "format": FORMAT, "tuning": tuning, **config}))

    def _jobs(self, name: str, settings: Settings, label: str) -> list[Job]:
        """Return the runs of a trial, one per seed."""
        experiment = with_settings(self.experiment, settings)
        return [
            self._tuner.job(experiment, settings, seed, Path(name, f"seed{seed}"), f"{label}, seed {seed}")
            for seed in self._seeds
        ]

    def _read(self, name: str, settings: Settings, pruned: bool = False) -> Trial:
        places = [self.folder / name / f"seed{seed}" for seed in self._seeds]
        records = [read_record(place) for place in places if (place / "metrics.jsonl").exists()]
        return Trial(name, settings, self.metric, records, self.spec.seeds, pruned)

    def _run_grid(self) -> bool:
        with self._tuner.locked():
            if self._overwrite:
                delete_runs(self.folder.glob("*/seed*"))
            if not is_ours(self.folder):  # the one of an earlier tuning stays until its runs are known to be the same
                write_json(self.folder / "config.json", self._config)
            named = [(folder_name(settings), settings) for settings in self._points]
            trials = [self._jobs(name, settings, written(settings)) for name, settings in named]
            # Seeds outside: runs that hold out different samples cannot be stacked, neighbours can.
            jobs = [job for same_seed in zip(*trials, strict=True) for job in same_seed]
            finished = self._tuner.run(jobs, self._on_round, self._on_end)
            self._tuner.refuse_lost()
            write_json(self.folder / "config.json", self._config)
            self.trials = [self._read(name, settings) for name, settings in named]
            self._save()
            return finished

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
        """Refuse a folder whose trials cannot be compared with this tuning's; write the configuration of a new one."""
        if self._overwrite:
            self._study.remove()
        elif is_ours(self.folder):
            differing = differences(read_json(self.folder / "config.json"), self._config, NO_MORE_ROUNDS)
            if differing:
                raise BadInput(f"the folder '{self.folder}' holds another tuning: {differing}; {CHOOSE_ANOTHER}")
            return
        write_json(self.folder / "config.json", self._config)

    def _run_trial(self, trial: Claimed) -> bool:
        """Run a trial's seeds and tell the study how it ended; return whether it did, and was not stopped."""
        label = f"{trial.name}, {written(trial.settings)}"
        try:
            jobs = self._jobs(trial.name, trial.settings, label)
        except BadInput as error:  # each value alone was allowed; started again, the study continues without this trial
            trial.end("failed")
            raise BadInput(f"{label}: {error}") from error
        pruned = False

        def ask_pruner(job: Job, row: Row) -> None:
            """Ask the pruner after every evaluated round of the first seed."""
            nonlocal pruned
            self._on_round(job, row)
            if job is jobs[0] and self.metric in row and math.isfinite(row[self.metric]):
                pruned = trial.report(int(row["round"]), float(row[self.metric])) or pruned

        finished = self._tuner.run(jobs, ask_pruner, self._on_end, stop=lambda: pruned)
        outcome = self._read(trial.name, trial.settings)
        if finished and outcome.remark == "":
            trial.end(outcome.score)
        elif outcome.remark == "diverged":
            trial.end("pruned")  # not "failed", which the sampler ignores: it should learn to avoid such values
        elif pruned:
            trial.end("pruned")
            self._on_end(jobs[0], outcome.records[0])
        else:
            return False  # the study counts it as running, and the next process without a trial resumes it
        return True

    @property
    def score_name(self) -> str:
        """Return the name of the score."""
        return f"best {self.spec.select} {self.metric}"

    def edges(self) -> list[str]:
        """Return a warning for every key whose best value is the smallest or largest one tried."""
        if self.best is None:
            return []
        tried, lines = "the grid" if self.grid else "the range", []
        for key in self.keys:
            value = self.best.settings[key]
            ends = at_ends(value, self.grid[key]) if self.grid else self.space[key].ends(value)
            option = key.removeprefix("algorithm.")  # a key of another section has a dot, and is no option
            way = way_beyond(value, ends, self.experiment.algorithm.name, option)
            if way:
                lines.append(f"the best {key} = {value:g} lies on the edge of {tried}: try {way} values")
        return lines

    def chosen_on(self) -> str:
        """Return which data the choice was made on."""
        if self.spec.select == "test":
            return "the test data, as the papers do: what the best reaches there is too good"
        return f"{self.spec.validation:.0%} of the training data, held out"

    def _save(self) -> None:
        """Write a table of all trials, and the best configuration as an experiment file."""
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
        head = (
            f"# the best of {plural(ended, 'trial')} by {self.score_name}: {best.score:.4f}, mean over "
            f"{plural(best.seeds, 'seed')}\n# chosen on {self.chosen_on()}\n"
        )
        tree = with_settings(self.experiment, best.settings).model_dump(exclude_unset=True)
        tree.get("run", {}).pop("out", None)  # that is where the tuned experiment's own runs go
        write_file(self.folder / "best.toml", (head + as_toml(tree)).encode())
