"""Tune an experiment: try values of its keys, each as an ordinary run, and keep what scores best.

The values are a grid (the file's own or a paper's, by name), whose runs train side by side as populations, or
Optuna proposes them (`study.py`). The score is the final value of a run's first metric (accuracy, or the loss), its
mean over the last ten rounds, on held-out *training* data unless ``tune.select = "test"``. The mean over seeds decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lamina
from lamina import algorithms
from lamina.base.atomic import write_file
from lamina.base.errors import BadInput, unknown
from lamina.base.text import plural
from lamina.experiment.build import build_model, build_parts, resolved
from lamina.experiment.config import Experiment, parse
from lamina.experiment.runs.records import (
    CHOOSE_ANOTHER,
    FORMAT,
    REPLACED,
    accepted_changes,
    delete_runs,
    differences,
    flatten,
    is_ours,
    read_json,
)
from lamina.experiment.toml import as_toml, fits_any_data, set_keys
from lamina.experiment.trials.settings import Grid, Range, Settings, folder_name, points, written
from lamina.experiment.trials.study import Study, find_space, remove_study
from lamina.experiment.trials.trial import Trial, refuse_nan
from lamina.experiment.trials.trials import WAIT_S, Job, Trials, tuned_on_a_reported_seed, tuning_seed
from lamina.storage.files import as_json, write_csv, write_json, writing_to
from lamina.training.history import Row, mean
from lamina.training.metrics import smaller_is_better

TABLES = ("trials.csv", "best.toml", "learning-rates.png")
NO_MORE_ROUNDS = 1 << 62  # trials of a study are compared after the same number of rounds, so that cannot grow
NOT_TUNED = {  # what tuning sets itself, or what would make scores incomparable
    "train.seed", "train.rounds", "data.name", "data.dir", "data.validation", "data.heldout_clients", "data.local_test",
    "run", "compare", "tune",
}  # fmt: skip


def paper_grids() -> dict[str, list[str]]:
    """Return the names of the papers' grids, each with the algorithms that declare values for it."""
    grids: dict[str, list[str]] = {}
    for name, cls in algorithms.registry().items():
        for grid in cls.card.grids:
            grids.setdefault(grid, []).append(name)
    return grids


def find_grid(experiment: Experiment) -> Grid:
    """Return the grid of an experiment: a paper's for its algorithm, or the file's own."""
    given, name = experiment.tune.grid, experiment.algorithm.name
    declared, grids = algorithms.find(name).card.grids, paper_grids()
    if isinstance(given, str):
        if given not in grids:
            raise unknown("grid", given, grids)
        if given not in declared:
            raise BadInput(f"the grid '{given}' has no values for {name} (it has them for {', '.join(grids[given])})")
        options = declared[given].items()
        return {"train.lr" if option == "lr" else f"algorithm.{option}": [*values] for option, values in options}
    grid: Grid = {}
    for key, values in flatten(given).items():
        if not isinstance(values, list) or not values:
            raise BadInput(f"tune.grid: '{key}' must be a list of values to try, for example [0.01, 0.1]")
        grid[key] = values
    if not grid:
        raise BadInput(
            f"nothing to try: give --grid NAME ({', '.join(grids)}), a table [tune.grid], or tune.sampler = 'tpe'"
        )
    return grid


def count_runs(experiment: Experiment) -> int:
    """Return how many runs a tuning has."""
    spec = experiment.tune
    return spec.seeds * (len(points(find_grid(experiment))) if spec.sampler == "grid" else spec.trials)


def with_settings(experiment: Experiment, settings: Settings) -> Experiment:
    """Return the experiment with some keys set, validated as a file would be."""
    tree = experiment.model_dump(exclude_unset=True)
    for key in settings:
        section, _, option = key.partition(".")
        if not option:
            raise BadInput(f"'{key}' is not a key of an experiment: write section.key, for example \"train.lr\"")
        is_of_data = section == "data" and not fits_any_data(option.partition(".")[0], None)
        if is_of_data or section in NOT_TUNED or key in NOT_TUNED:
            raise BadInput(f"'{key}' cannot be tuned: all trials have the same data, seeds, rounds and way of running")
    changed = parse(set_keys(tree, {tuple(key.split(".")): value for key, value in settings.items()}), source="tune")
    changed = changed.with_objects(experiment.objects)
    build_parts(changed)  # refuses a wrong option before anything runs
    return changed


class Tuning(Trials):
    """The tuning of an experiment file in a folder; `run` fills `trials`.

    The runs are in ``<trial>/seed<n>``. The options are those of `Trials`.
    """

    def __init__(self, experiment: Experiment, folder: Path, **options: Any) -> None:
        self.spec = spec = experiment.tune
        super().__init__(experiment, spec, "tuning", folder, **options)
        self.trials: list[Trial] = []
        self._points: list[Settings] = []  # of a grid
        self._study: Study | None = None
        if spec.sampler == "grid":
            grid = find_grid(experiment)
            self._points = points(grid)
            self.space = {key: Range(choices=tuple(values)) for key, values in grid.items()}
            checked = self._points
        else:
            self.space = find_space(flatten(spec.space, values=("low", "high", "log", "choices")))
            rounds, seed = experiment.train.rounds, experiment.train.seed
            self._study = Study(folder, self.space, pruner=spec.pruner, rounds=rounds, seed=seed)
            checked = [{key: value} for key, values in self.space.items() for value in values.samples]
        simulation = self._load(experiment, [with_settings(experiment, settings) for settings in checked])
        for key, values in self.space.items():
            if key.startswith("model."):  # a model checks its options when it is built
                for value in values.samples:
                    build_model(with_settings(experiment, {key: value}), simulation.train_data)
        self.title = simulation.algorithm.card.title
        self._config = self._describe(resolved(experiment, simulation))

    @property
    def keys(self) -> list[str]:
        """Return the keys that are tuned."""
        return list(self.space)

    @property
    def seeds(self) -> list[int]:
        """Return the seeds of every trial."""
        return [tuning_seed(self.experiment, number) for number in range(self.spec.seeds)]

    @property
    def count(self) -> int:
        """Return how many trials there are in the end."""
        return len(self._points) or self.spec.trials

    @property
    def best(self) -> Trial | None:
        """Return the trial that counts and scores best; None if there is none yet."""
        counting = [trial for trial in self.trials if not math.isnan(trial.score)]
        return max(counting, key=lambda trial: trial.score_key, default=None)

    def run(self) -> bool:
        """Run what is left, with other processes that do the same; return whether all runs finished."""
        with writing_to(self.folder), self._joined():
            return self._run_grid() if self._study is None else self._run_study(self._study)

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
        values = {key: values.described for key, values in self.space.items()}
        tuning["grid" if self._points else "space"] = values
        return dict(as_json({"lamina": lamina.__version__, "format": FORMAT, "tuning": tuning, **config}))

    def _jobs(self, name: str, settings: Settings, label: str) -> list[Job]:
        """Return the runs of a trial, one per seed."""
        experiment = with_settings(self.experiment, settings)
        algorithm = experiment.algorithm.name
        return [self._job(experiment, seed, f"{name}/seed{seed}", label, algorithm) for seed in self.seeds]

    def _read(self, name: str, settings: Settings, pruned: bool = False) -> Trial:
        folders = [self.folder / name / f"seed{seed}" for seed in self.seeds]
        records = [self._record(folder) for folder in folders if (folder / "metrics.jsonl").exists()]
        return Trial(name, settings, records, self.spec.seeds, pruned)

    def _run_grid(self) -> bool:
        named = [(folder_name(settings), settings) for settings in self._points]
        trials = [self._jobs(name, settings, written(settings)) for name, settings in named]
        # Seeds outside: runs that hold out different samples cannot be stacked, neighbours can.
        finished = self._run([iter([[job for same_seed in zip(*trials, strict=True) for job in same_seed]])])
        with self._turn():
            write_json(self.folder / "config.json", self._config)
            self._save_trials([(name, settings, False) for name, settings in named])
        return finished

    def _run_study(self, study: Study) -> bool:
        finished, is_waiting = True, False
        while finished:
            with self._turn():
                claimed = study.claim(self.spec.trials)
                running = study.running
            if claimed is not None:
                is_waiting = False
                try:
                    finished = self._run_trial(study, *claimed)
                finally:
                    study.release()
            elif not running:
                break
            else:
                if not is_waiting:
                    self.on_wait(running * self.spec.seeds)
                is_waiting, finished = True, not self._stop()
                time.sleep(WAIT_S)
        with self._turn():
            self._save_trials(study.proposed())
        return finished

    def _save_trials(self, trials: Iterable[tuple[str, Settings, bool]]) -> None:
        """Read trials, given by name, settings and whether they were pruned, and write the tables."""
        self.trials = [self._read(*trial) for trial in trials]
        self._save()
        refuse_nan("", self.metric, self.trials)

    def _prepare(self) -> None:
        self._recognise()
        if self._study is not None:
            self._study.open(maximise=not smaller_is_better(self.metric))

    def _recognise(self) -> None:
        """Refuse a folder whose trials cannot be compared with this tuning's; write the configuration of a new one."""
        if self._is_replaced:
            delete_runs(self.folder, self.folder.glob("*/seed*"))
            remove_study(self.folder)
            for name in TABLES:
                (self.folder / name).unlink(missing_ok=True)
            write_json(self.folder / "config.json", self._config)
            (self.folder / REPLACED).unlink()
            return
        reported = self.experiment.train.seed
        if any(self.folder.glob(f"*/seed{reported}/metrics.jsonl")):
            raise tuned_on_a_reported_seed(self.folder, reported)
        has_runs = self._study is not None or any(self.folder.glob("*/seed*/metrics.jsonl"))
        if has_runs and is_ours(self.folder):
            stored = read_json(self.folder / "config.json")
            rounds = 0 if self._study is None else NO_MORE_ROUNDS  # the runs of a grid refuse fewer than they have
            if differing := differences(self._grown(stored), self._config, rounds):
                raise BadInput(f"the folder '{self.folder}' holds another tuning: {differing}; {CHOOSE_ANOTHER}")
            if not accepted_changes(stored, self._config, self.folder):
                return
        write_json(self.folder / "config.json", self._config)

    def _grown(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return the stored configuration of a grid with this one's values and seeds, which may be others or more."""
        before, now = stored.get("tuning"), self._config["tuning"]
        if self._study is not None or not isinstance(before, Mapping) or not isinstance(before.get("grid"), Mapping):
            return stored
        grid = {key: now["grid"].get(key, values) for key, values in before["grid"].items()}
        return {**stored, "tuning": {**before, "grid": grid, "seeds": now["seeds"]}}

    def _run_trial(self, study: Study, name: str, settings: Settings) -> bool:
        """Run a trial's seeds and tell the study how it ended; return whether it did, and was not stopped."""
        label = f"{name}, {written(settings)}"
        try:
            jobs = self._jobs(name, settings, label)
        except BadInput as error:  # each value alone was allowed; started again, the study continues without this trial
            with self._turn():
                study.end("failed")
            raise BadInput(f"{label}: {error}") from error
        pruned, show_round = False, self.on_round

        def ask_pruner(job: Job, row: Row) -> None:
            """Ask the pruner after every evaluated round of the first seed."""
            nonlocal pruned
            show_round(job, row)
            if job is jobs[0] and self.metric in row and math.isfinite(row[self.metric]):
                with self._turn():
                    pruned = study.report(int(row["round"]), float(row[self.metric])) or pruned

        self.on_round = ask_pruner
        try:
            finished = self._run([iter([jobs])], stop=lambda: pruned)
        finally:
            self.on_round = show_round
        trial = self._read(name, settings)
        if not (finished and trial.remark == "") and trial.remark != "diverged" and not pruned:
            return False  # the study counts it as running, and the next process without a trial resumes it
        with self._turn():
            if finished and trial.remark == "":
                study.end("failed" if math.isnan(trial.score) else trial.score)
            else:  # also if it diverged: the sampler ignores "failed", and should learn to avoid such values
                study.end("pruned")
        if pruned and trial.remark == "not finished":
            self.on_end(jobs[0], trial.records[0])
        return True

    def edges(self) -> list[str]:
        """Return a warning for every key whose best value is the smallest or largest one tried."""
        best = {} if self.best is None else self.best.settings
        algorithm = self.experiment.algorithm.name
        return [line for key, value in best.items() if (line := self.space[key].edge_warning(value, algorithm, key))]

    def notes(self) -> list[str]:
        """Return remarks: the best values, what data they were chosen on, and those on the edge of what was tried."""
        best = self.best
        lines = [] if best is None else [f"best: {written(best.settings)}; {self.score_name} {best.score:.4f}"]
        return [*lines, f"chosen on {self.chosen_on()}", *self.edges()]

    @property
    def runs(self) -> list[Path]:
        """Return the folders of the runs that have begun."""
        return [record.folder for trial in self.trials for record in trial.records]

    def chosen_on(self) -> str:
        """Return which data the choice was made on."""
        if self.spec.select == "test":
            return "the test data, as the papers do: what the best reaches there is too good"
        return self._held_out()

    @property
    def _columns(self) -> tuple[str, str]:
        """Return the names of the columns that hold a trial's final and best value."""
        return self.score_name.replace(" ", "_"), f"best_{self.spec.select}_{self.metric}"

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for every trial: its values, its scores, and how it ended."""
        score, best = self._columns
        return [
            {
                "trial": trial.name,
                **{key: trial.settings.get(key, "") for key in self.keys},
                "seeds": len(trial.records),
                score: mean(trial.final) if trial.final else "",
                best: mean(trial.best) if trial.best else "",
                "remark": "chosen" if trial is self.best else trial.remark,
            }
            for trial in self.trials
        ]

    def _save(self) -> None:
        """Write a table of all trials, and the best configuration as an experiment file."""
        best = self.best
        write_csv(self.folder / "trials.csv", ["trial", *self.keys, "seeds", *self._columns, "remark"], self.rows())
        if best is None or not self.experiment.objects.is_empty:  # a file cannot name objects
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
