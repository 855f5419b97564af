"""Compare algorithms fairly: the same initial weights, clients and batches, and every method tuned the same way.

If the file gives values to try (``[compare.grid]``: rates, and the methods' own options), each combination is run once
on the first seed, and the one with the best accuracy on held-out *training* data is chosen (the smallest loss where
there is no accuracy). The test data are used only in the final runs, one per seed; with ``compare.select = "test"``, as
in the papers, they also choose. To save time, ``compare.tuning_rounds`` may be fewer rounds, or several numbers: after
each, only the best third continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import lamina
from lamina import algorithms
from lamina.errors import BadInput, Diverged, is_whole
from lamina.experiment.build import build_algorithm, build_schedule, resolved
from lamina.experiment.config import AlgorithmSection, Experiment, Schedule
from lamina.experiment.records import FORMAT, Record, read_json, read_record
from lamina.experiment.run_files import check_folder, delete_runs, is_ours
from lamina.experiment.settings import Settings, at_ends, folder_name, points, way_beyond, written
from lamina.experiment.trackers import Trackers
from lamina.experiment.tuner import Job, Trial, Tuner
from lamina.history import History, Row
from lamina.storage.files import write_csv, write_json, writing_to
from lamina.text import plural

MAX_NAMED_RUNS = 5
CONTINUED_FRACTION, MIN_CONTINUED = 1 / 3, 3  # of the candidates, after each of several tuning_rounds


@dataclass
class Entry:
    """The results of one algorithm so far, from finished runs only."""

    name: str
    title: str
    settings: Settings  # "lr", and the options that were chosen
    tuning: list[Trial]
    seeds: list[int] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)  # one per seed
    diverged: list[str] = field(default_factory=list)  # one line for every run that did

    @property
    def lr(self) -> float:
        """Return the learning rate."""
        return float(self.settings["lr"])


class Watcher:
    """Observer of a comparison's progress; the base class ignores every event."""

    def round_finished(self, job: Job, row: Row) -> None:
        """Handle a finished round."""

    def run_ended(self, job: Job, record: Record) -> None:
        """Handle a run that is complete or has diverged, now or in an earlier start of the comparison."""


class Comparison:
    """The comparison of an experiment file in a folder; `run` adds to `entries` as runs finish.

    Every run has a folder of its own, ``<algorithm>/seed<n>`` or ``tuning/<algorithm>/lr<rate>…``, so that a
    comparison started again skips complete runs and resumes the others.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: Path,
        *,
        overwrite: bool = False,
        watcher: Watcher = Watcher(),  # noqa: B008 (it has no state)
        stop: Callable[[], bool] = lambda: False,
        trackers: Sequence[str] = (),
    ) -> None:
        check_folder(folder, "algorithms", "a comparison's", overwrite=overwrite)  # before the data are read
        Trackers(trackers, folder)  # so that a missing package is named at once
        self.experiment, self.folder = experiment, folder
        self._overwrite, self._watcher = overwrite, watcher
        self.entries: list[Entry] = []
        self._jobs: list[Job] = []  # all jobs so far
        spec = experiment.compare
        if not spec.algorithms:
            raise BadInput("compare.algorithms is empty: name at least one algorithm")
        self._tuner = Tuner(experiment, spec, folder, stop, trackers)
        tuning_rounds(experiment)  # refuses invalid ones
        for name in {**spec.grid, **spec.options}:
            if ":" not in name:  # settings of a method that is left out are fine, a misspelt name is not
                algorithms.find(name)
        # Build every algorithm before anything runs, so that a wrong name or option costs no time.
        self._choices = {name: points_of(experiment, name) for name in spec.algorithms}
        for name, choice in self._choices.items():
            for settings in choice:
                build_algorithm(with_algorithm(experiment, name, settings))
        first = with_algorithm(experiment, spec.algorithms[0])
        simulation = self._tuner.load(first)
        self.metric = simulation.metric
        if self.metric == "accuracy" and spec.target > 1:
            raise BadInput(f"compare.target = {spec.target:g}: must be an accuracy above 0 and up to 1, as 0.9")
        self.clients = simulation.plan.clients.count
        self._config = {"lamina": lamina.__version__, "format": FORMAT, **resolved(first, simulation)}
        del self._config["algorithm"]  # each method has its own, with its own rate
        self._config.pop("title", None)  # as it has its own title
        self._config["train"]["lr"] = experiment.train.lr
        self._config["algorithms"] = {}

    def run(self) -> bool:
        """Run what is left; return whether all runs finished."""
        with self._tuner.locked():
            if self._overwrite:  # all of them first, so that no old run is ever taken for a new one
                delete_runs([*self.folder.glob("*/seed*"), *self.folder.glob("tuning/*/*")])
            # the tables of an earlier comparison stay until its runs are known to be the same
            if self._overwrite or not is_ours(self.folder):
                self._save()
            return all(self._run_algorithm(name) for name in self._choices)

    @property
    def target(self) -> float | None:
        """Return the test accuracy to reach; without an accuracy the test loss, if the file gives one."""
        spec = self.experiment.compare
        return spec.target if self.metric == "accuracy" or "target" in spec.model_fields_set else None

    def _run_algorithm(self, name: str) -> bool:
        """Choose the settings if there is a choice, then run every seed; return whether all runs finished."""
        choice, first_seed = self._choices[name], self.experiment.train.seed
        tuning = self._tune(name) if len(choice) > 1 else []
        if tuning is None:
            return False
        settings = max(tuning, key=lambda trial: trial.rank).settings if tuning else choice[0]
        seeds = range(first_seed, first_seed + self.experiment.compare.seeds)
        jobs = [self._job(name, settings, seed) for seed in seeds]
        finished = self._run(jobs)
        entry = Entry(name, algorithms.find(name).card.title, settings, tuning)
        for job in jobs:
            record = read_record(job.folder) if (job.folder / "metrics.jsonl").exists() else None
            if record is not None and record.ended:
                entry.seeds.append(job.seed)
                entry.histories.append(record.history)
                entry.diverged += [f"{job}: {record.diverged}"] if record.diverged else []
                self._config["algorithms"][name] = {"lr": entry.lr, **record.config["algorithm"]}
        if entry.seeds:
            self.entries.append(entry)
        self._save()
        return finished

    def _tune(self, name: str) -> list[Trial] | None:
        """Try all points, the best third for longer if there are several tuning_rounds; None if it was stopped."""
        stages, candidates = tuning_rounds(self.experiment), self._choices[name]
        trials: dict[int, Trial] = {}
        continued = list(range(len(candidates)))
        for n, rounds in enumerate(stages):
            jobs = [self._job(name, candidates[i], self.experiment.train.seed, stages[n:]) for i in continued]
            if not self._run(jobs):
                return None
            for i, job in zip(continued, jobs, strict=True):
                record = read_record(job.folder).up_to(rounds)
                trials[i] = Trial(job.folder.name, job.settings, self.metric, [record], 1)
            count = max(MIN_CONTINUED, math.ceil(CONTINUED_FRACTION * len(continued)))
            continued = sorted(continued, key=lambda i: -trials[i].rank)[:count]  # ties keep their order
        return [trials[i] for i in range(len(candidates))]

    def _job(self, name: str, settings: Settings, seed: int, stages: Sequence[int] = ()) -> Job:
        """Return one run, final or, with the stages that are left, for tuning."""
        experiment, place = with_algorithm(self.experiment, name, settings), Path(name.replace(":", "."))
        folder = "tuning" / place / folder_name(settings) if stages else place / f"seed{seed}"
        if stages:  # perhaps shorter, but each round has the rate of that round in the final runs
            schedule = Schedule(name=experiment.train.schedule.name, **vars(build_schedule(experiment)))
            changed = {"rounds": self._rounds_in_folder(folder, stages), "schedule": schedule}
            experiment = experiment.model_copy(update={"train": experiment.train.model_copy(update=changed)})
        label = f"{name}, {written(settings)}, seed {seed}"
        return self._tuner.job(experiment, settings, seed, folder, label, tuning=bool(stages))

    def _rounds_in_folder(self, folder: Path, stages: Sequence[int]) -> int:
        """Return the rounds of a tuning run: those of a later stage if it had been continued before."""
        place = self.folder / folder
        stored = read_json(place / "config.json").get("train", {}) if is_ours(place) else {}
        rounds = stored.get("rounds") if isinstance(stored, Mapping) else None
        return next((stage for stage in stages if is_whole(rounds) and stage == rounds), stages[0])

    def _run(self, jobs: list[Job]) -> bool:
        self._jobs += jobs
        return self._tuner.run(jobs, self._watcher.round_finished, self._watcher.run_ended)

    @property
    def runs(self) -> list[Path]:
        """Return the folders of its runs that have begun, which tables, picture and report show."""
        folders = dict.fromkeys(job.folder for job in self._jobs)  # a tuning run may have several stages
        return [folder for folder in folders if (folder / "metrics.jsonl").exists()]

    def left_out(self) -> list[str]:
        """Return the runs of an earlier comparison in the same folder that are not part of this one."""
        found = {metrics.parent for metrics in self.folder.glob("*/seed*/metrics.jsonl")} - set(self.runs)
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def notes(self) -> list[str]:
        """Return remarks for the reader: how settings were chosen, runs that diverged, best values on the edge."""
        lines = []
        others = self.left_out()
        if others:
            more = f" and {len(others) - MAX_NAMED_RUNS} more" if len(others) > MAX_NAMED_RUNS else ""
            lines.append(
                f"the folder holds runs that were not asked for now, and are in no table: "
                f"{', '.join(others[:MAX_NAMED_RUNS])}{more}; `lamina report {self.folder}` shows all"
            )
        spec, given = self.experiment.compare, self.experiment.train.lr
        if any(len(choice) > 1 for choice in self._choices.values()):
            held_out = f"{spec.validation:.0%} of the training data, held out"
            on = held_out if spec.select == "validation" else "the test data"
            what = "rates" if all(choice[0].keys() == {"lr"} for choice in self._choices.values()) else "settings"
            *stages, rounds = tuning_rounds(self.experiment)
            first = f"first {rounds} rounds" if rounds > 1 else "first round"
            short = f", in the {first}" if rounds < self.experiment.train.rounds else ""
            lines.append(f"{what} were chosen on {on}{short}")
            if stages:
                after = " and ".join([*map(str, stages[:-1]), plural(stages[-1], "round")])
                lines.append(f"the best third of what was tried went on after {after} (at least {MIN_CONTINUED})")
        untuned = [name for name in self._choices if name not in spec.grid or spec.grid[name].lr is None]
        if given is not None and untuned:
            lines.append(f"train.lr = {given:g} is used for {', '.join(untuned)}: no rates in [compare.grid]")
        for entry in self.entries:
            lines += entry.diverged
            if len(entry.settings) > 1 and entry.tuning:
                lines.append(f"{entry.name}: {written(entry.settings)} was chosen")
            for key, value in entry.settings.items():
                ends = at_ends(value, [trial.settings[key] for trial in entry.tuning] or [value])
                way = way_beyond(value, ends, entry.name, key)
                if way:
                    what = f"{entry.name}: the best {key} {value:g} lies on the edge of those tried"
                    lines.append(f"{what}; try {way} values")
        return lines

    def _save(self) -> None:
        """Write the configuration, the rounds of every finished run, and the scores of all tuning runs."""
        self._tuner.refuse_lost()
        histories = [history for entry in self.entries for history in entry.histories]
        columns = dict.fromkeys(column for history in histories for column in history.columns)
        rounds = [
            {"algorithm": entry.name, "learning_rate": entry.lr, "seed": seed, **row}
            for entry in self.entries
            for seed, history in zip(entry.seeds, entry.histories, strict=True)
            for row in history
        ]
        score = f"best_{self.experiment.compare.select}_{self.metric}"
        tried = [
            {
                "algorithm": entry.name,
                "learning_rate": trial.settings["lr"],
                **{key: value for key, value in trial.settings.items() if key != "lr"},
                "rounds": len(trial.records[0].history),
                score: trial.score,
                "chosen": trial.settings == entry.settings,
            }
            for entry in self.entries
            for trial in entry.tuning
        ]
        options = dict.fromkeys(key for choice in self._choices.values() for key in choice[0] if key != "lr")
        with writing_to(self.folder):
            write_json(self.folder / "config.json", self._config)
            write_csv(self.folder / "rounds.csv", ["algorithm", "learning_rate", "seed", *columns], rounds)
            write_csv(
                self.folder / "tuning.csv", ["algorithm", "learning_rate", *options, "rounds", score, "chosen"], tried
            )


def refuse_all_diverged(entries: Iterable[Entry]) -> None:
    """Raise the error for a comparison without a single run that did not diverge."""
    lines = [line for entry in entries for line in entry.diverged]
    rounds = [len(history) for entry in entries for history in entry.histories]
    if rounds and len(lines) == len(rounds):
        raise Diverged(f"every run diverged; the first: {lines[0]}", round=rounds[0] + 1, client=None, layer="")


def points_of(experiment: Experiment, name: str) -> list[Settings]:
    """Return the settings to try for an algorithm: a rate, and options if its grid has any."""
    spec, rate = experiment.compare, experiment.train.lr or algorithms.find(name).card.lr
    return points({"lr": [rate], **(spec.grid[name].values() if name in spec.grid else {})})


def tuning_rounds(experiment: Experiment) -> list[int]:
    """Return the rounds of tuning runs, stage by stage."""
    given, rounds = experiment.compare.tuning_rounds, experiment.train.rounds
    stages = [rounds] if given is None else given
    if not stages or sorted(set(stages)) != stages:
        raise BadInput(f"compare.tuning_rounds = {stages}: must be a number, or a list of growing numbers")
    if stages[-1] > rounds:
        shown = stages if len(stages) > 1 else stages[0]
        raise BadInput(f"compare.tuning_rounds = {shown}: must be at most train.rounds = {rounds}")
    return stages


def with_algorithm(experiment: Experiment, name: str, settings: Settings | None = None) -> Experiment:
    """Return the experiment with one algorithm of its comparison, and settings of its grid.

    Options are those of [algorithm] if it is about that one, then of [compare.options], then the settings'.
    """
    section = experiment.algorithm
    options = {"preset": section.preset, **section.options()} if section.name == name else {}
    own = experiment.compare.options.get(name, {})
    tried = dict(settings or {})
    lr = tried.pop("lr", experiment.train.lr)
    for key, given in (("options", own), ("grid", tried)):
        if "name" in given:
            raise BadInput(f"[compare.{key}.{name}] has no key 'name': the table's own name says which algorithm it is")
    preset = {**own, **tried}.get("preset", "")
    if not isinstance(preset, str):
        raise BadInput(f"compare.options.{name}.preset = {preset!r}: must be the name of a preset")
    return experiment.model_copy(
        update={
            "algorithm": AlgorithmSection(name=name, **{**options, **own, **tried}),
            "train": experiment.train.model_copy(update={"lr": lr}),
        }
    )
