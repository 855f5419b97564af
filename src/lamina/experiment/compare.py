"""Compare algorithms fairly: the same initial weights, clients and batches, and every method tuned the same way.

If the file gives values to try (``[compare.grid]``: rates, and the methods' own options), each combination is run once
on the first seed and the one with the best accuracy on held-out *training* data is kept (the smallest loss where there
is no accuracy); the test data are looked at only in the final runs, one per seed. (The papers choose on the test data:
``compare.select = "test"``.) To save time,
``compare.tuning_rounds`` may be fewer rounds, or several numbers: after each, only the best third goes on to the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import lamina
from lamina import algorithms
from lamina.data.dataset import Splits
from lamina.errors import BadInput, Diverged, is_whole
from lamina.experiment.config import AlgorithmSection, Experiment, Schedule
from lamina.experiment.folder import Lock, delete_runs, is_ours, lost
from lamina.experiment.records import FORMAT, Record, read_json, read_record
from lamina.experiment.run import build, build_algorithm, build_schedule, load_data, resolved
from lamina.experiment.settings import Settings, at_ends, bounds_of, folder_name, points, way_beyond, written
from lamina.experiment.side_by_side import Planned, check_folder, run_side_by_side
from lamina.experiment.trackers import Trackers
from lamina.history import History, Row, rank
from lamina.storage.files import cannot_write, write_csv, write_json
from lamina.text import plural

MOST_NAMED = 5  # runs that are left out, in one line
GOING_ON, FEWEST_GOING_ON = 1 / 3, 3  # of what is tried, from one of several tuning_rounds to the next


class Attempt(NamedTuple):
    """Settings that were tried."""

    settings: Settings
    score: float  # the best validation accuracy, or the smallest loss; NaN: diverged
    rounds: int


@dataclass
class Entry:
    """One algorithm's results so far; only finished runs enter it."""

    name: str
    title: str
    settings: Settings  # "lr", and the options that were chosen
    tuning: list[Attempt]
    seeds: list[int] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)  # one per seed
    diverged: list[str] = field(default_factory=list)  # one line for every run that did

    @property
    def lr(self) -> float:
        """Its learning rate."""
        return float(self.settings["lr"])


@dataclass(frozen=True)
class Job:
    """One run of a comparison."""

    algorithm: str
    settings: Settings = field(hash=False)  # "lr", and options of the algorithm
    seed: int
    tuning: bool  # it only helps to choose the settings
    rounds: int

    def __str__(self) -> str:
        return f"{self.algorithm}, {written(self.settings)}, seed {self.seed}"

    @property
    def lr(self) -> float:
        """Its learning rate."""
        return float(self.settings["lr"])

    @property
    def folder(self) -> Path:
        """Its folder inside the comparison's."""
        name = self.algorithm.replace(":", ".")
        return Path("tuning", name, folder_name(self.settings)) if self.tuning else Path(name, f"seed{self.seed}")


class Watcher:
    """Whoever follows a comparison; this one looks away."""

    def round_finished(self, job: Job, row: Row) -> None:
        """A run has one round more."""

    def run_ended(self, job: Job, record: Record) -> None:
        """A run is complete, or has diverged; just now or in an earlier start of the comparison."""


class Comparison:
    """The comparison of an experiment file in a folder: checked when made, then `run`; `entries` fills as runs finish.

    Every run has a folder of its own, ``<algorithm>/seed<n>`` or ``tuning/<algorithm>/lr<rate>…``, so that a
    comparison started again skips what is complete and goes on with what is not.
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
        self._overwrite, self._watcher, self._stop, self._trackers = overwrite, watcher, stop, trackers
        self.entries: list[Entry] = []
        self._jobs: list[Job] = []  # all that were looked at
        self._ended: dict[Path, None] = {}  # the folders of those that have ended
        spec = experiment.compare
        if not spec.algorithms:
            raise BadInput("compare.algorithms is empty: name at least one algorithm")
        if experiment.data.validation is not None:
            raise BadInput("data.validation is for single runs: a comparison holds out compare.validation by itself")
        tuning_rounds(experiment)  # refuses what cannot be
        for name in {**spec.grid, **spec.options}:
            if ":" not in name:  # settings for a method left out this time are fine, a misspelt name is not
                algorithms.find(name)
        # All is made once before anything runs, so that a wrong name or option costs no time.
        self._choices = {name: points_of(experiment, name) for name in spec.algorithms}
        for name, choice in self._choices.items():
            for settings in choice:
                build_algorithm(with_algorithm(experiment, name, settings))
        self._splits = load_data(experiment)
        first = with_algorithm(experiment, spec.algorithms[0])
        simulation = build(first, self._splits)
        if simulation.test_data is not None:  # where they are needed: every run would copy them
            self._splits = Splits(simulation.train_data, simulation.test_data)
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
        """Run what is left of it; whether it was finished, not stopped."""
        self._lock = Lock(self.folder)
        try:
            if self._overwrite:  # all at first: whatever ends the comparison, no old run is taken for a new one
                delete_runs([*self.folder.glob("*/seed*"), *self.folder.glob("tuning/*/*")])
            # an earlier comparison's tables stay until its runs are known to be the same
            if self._overwrite or not is_ours(self.folder):
                self._save()
            finished = all(self._run_algorithm(name) for name in self._choices)
            self._refuse_lost()
            return finished
        finally:
            self._lock.release()

    @property
    def target(self) -> float | None:
        """The test accuracy to reach; where there is no accuracy the test loss, if the file gives one."""
        spec = self.experiment.compare
        return spec.target if self.metric == "accuracy" or "target" in spec.model_fields_set else None

    def _refuse_lost(self) -> None:
        """Refuse to go on when a run that has ended is gone."""
        self._lock.refuse_lost()
        for place in self._ended:
            if not (place / "metrics.jsonl").exists():
                raise lost(place)

    def _run_algorithm(self, name: str) -> bool:
        """Choose the settings if there is a choice, then run every seed; whether it was finished."""
        choice, first_seed = self._choices[name], self.experiment.train.seed
        settings, tuning = choice[0], self._tune(name) if len(choice) > 1 else []
        if tuning is None:
            return False
        if tuning:
            settings = max(tuning, key=lambda one: rank(one.score, self.metric)).settings
        seeds = range(first_seed, first_seed + self.experiment.compare.seeds)
        jobs = [Job(name, settings, seed, False, self.experiment.train.rounds) for seed in seeds]
        finished = self._run_jobs(jobs)
        entry = Entry(name, algorithms.find(name).card.title, settings, tuning)
        for job in jobs:
            place = self.folder / job.folder
            record = read_record(place) if (place / "metrics.jsonl").exists() else None
            if record is not None and record.ended:
                entry.seeds.append(job.seed)
                entry.histories.append(record.history)
                entry.diverged += [f"{job}: {record.diverged}"] if record.diverged else []
                self._config["algorithms"][name] = {"lr": entry.lr, **record.config["algorithm"]}
        if entry.seeds:
            self.entries.append(entry)
        self._save()
        return finished

    def _tune(self, name: str) -> list[Attempt] | None:
        """Run all that is to be tried, the best third for longer if there are several tuning_rounds; None: stopped."""
        stages = tuning_rounds(self.experiment)
        tried = going = [Job(name, one, self.experiment.train.seed, True, stages[0]) for one in self._choices[name]]
        reached: dict[Job, int] = {}
        for n, rounds in enumerate(stages):
            reached |= dict.fromkeys(going, rounds)
            jobs = [replace(job, rounds=self._rounds_in_folder(job, stages[n:])) for job in going]
            if not self._run_jobs(jobs):
                return None
            scores = {job: self._score(read_record(self.folder / job.folder), rounds) for job in going}
            many = max(FEWEST_GOING_ON, math.ceil(GOING_ON * len(going)))
            going = sorted(going, key=lambda job: -rank(scores[job], self.metric))[:many]  # the first of equals
        attempts = []
        for job in tried:
            record, rounds = read_record(self.folder / job.folder), reached[job]
            attempts.append(Attempt(job.settings, self._score(record, rounds), min(rounds, len(record.history))))
        return attempts

    def _score(self, record: Record, rounds: int) -> float:
        """What settings are chosen by, in the first rounds."""
        if record.diverged and len(record.history) < rounds:
            return math.nan
        return record.history[:rounds].best(self.metric, optional=True)

    def _rounds_in_folder(self, job: Job, stages: list[int]) -> int:
        """The rounds that a run is to have: those of a later stage if it was on its way there before."""
        place = self.folder / job.folder
        stored = read_json(place / "config.json").get("train", {}) if is_ours(place) else {}
        rounds = stored.get("rounds") if isinstance(stored, Mapping) else None
        return int(rounds) if is_whole(rounds) and rounds in stages else stages[0]

    def _run_jobs(self, jobs: list[Job]) -> bool:
        """Run what is left of some runs of one algorithm, side by side where they can be stacked."""
        self._lock.refuse_lost()
        self._jobs += jobs

        def ended(i: int, record: Record) -> None:
            self._ended[self.folder / jobs[i].folder] = None
            self._watcher.run_ended(jobs[i], record)

        experiments = [self._experiment(job) for job in jobs]
        splits = self._splits
        if experiments[0].data.validation is not None:  # the same samples for all that is tried
            splits = Splits(*splits.train.holdout(experiments[0].data.validation, experiments[0].train.seed))
        return run_side_by_side(
            [
                Planned(experiment, splits, self.folder / job.folder, f"{self.folder.name}/{job.folder.as_posix()}")
                for job, experiment in zip(jobs, experiments, strict=True)
            ],
            stop=self._stop,
            on_round=lambda i, row: self._watcher.round_finished(jobs[i], row),
            on_end=ended,
            trackers=self._trackers,
        )

    def _experiment(self, job: Job) -> Experiment:
        """One run as an experiment of its own."""
        own = with_algorithm(self.experiment, job.algorithm, job.settings)
        train = own.train.model_copy(update={"seed": job.seed})
        if job.tuning:  # shorter perhaps, but each round at the rate that it has in the final runs
            schedule = Schedule(name=train.schedule.name, **vars(build_schedule(own)))
            train = train.model_copy(update={"rounds": job.rounds, "schedule": schedule})
        held_out = own.compare.validation if job.tuning and own.compare.select == "validation" else None
        return own.model_copy(update={"train": train, "data": own.data.model_copy(update={"validation": held_out})})

    @property
    def runs(self) -> list[Path]:
        """The folders of its runs that have begun: what tables, picture and report are about."""
        folders = dict.fromkeys(self.folder / job.folder for job in self._jobs)  # a tuning run may have several stages
        return [folder for folder in folders if (folder / "metrics.jsonl").exists()]

    def left_out(self) -> list[str]:
        """Runs of an earlier comparison in the same folder that this one did not ask for."""
        found = {metrics.parent for metrics in self.folder.glob("*/seed*/metrics.jsonl")} - set(self.runs)
        return sorted(str(path.relative_to(self.folder)) for path in found)

    def notes(self) -> list[str]:
        """What a reader should know: how settings were chosen, runs that diverged, a best value on the edge."""
        lines = []
        others = self.left_out()
        if others:
            more = f" and {len(others) - MOST_NAMED} more" if len(others) > MOST_NAMED else ""
            lines.append(
                f"the folder holds runs that were not asked for now, and are in no table: "
                f"{', '.join(others[:MOST_NAMED])}{more}; `lamina report {self.folder}` shows all"
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
                lines.append(f"the best third of what was tried went on after {after} (at least {FEWEST_GOING_ON})")
        untuned = [name for name in self._choices if name not in spec.grid or spec.grid[name].lr is None]
        if given is not None and untuned:
            lines.append(f"train.lr = {given:g} is used for {', '.join(untuned)}: no rates in [compare.grid]")
        for entry in self.entries:
            lines += entry.diverged
            if len(entry.settings) > 1 and entry.tuning:
                lines.append(f"{entry.name}: {written(entry.settings)} was chosen")
            for key, value in entry.settings.items():
                ends = at_ends(value, [one.settings[key] for one in entry.tuning] or [value])
                way = way_beyond(value, ends, (None, None) if key == "lr" else bounds_of(entry.name, key))
                if way:
                    what = f"{entry.name}: the best {key} {value:g} lies on the edge of those tried"
                    lines.append(f"{what}; try {way} values")
        return lines

    def _save(self) -> None:
        """Write the configuration, every finished run's rounds, and what was tried in tuning."""
        self._lock.refuse_lost()
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
                "learning_rate": one.settings["lr"],
                **{key: value for key, value in one.settings.items() if key != "lr"},
                "rounds": one.rounds,
                score: one.score,
                "chosen": one.settings == entry.settings,
            }
            for entry in self.entries
            for one in entry.tuning
        ]
        options = dict.fromkeys(key for choice in self._choices.values() for key in choice[0] if key != "lr")
        try:
            write_json(self.folder / "config.json", self._config)
            write_csv(self.folder / "rounds.csv", ["algorithm", "learning_rate", "seed", *columns], rounds)
            write_csv(
                self.folder / "tuning.csv", ["algorithm", "learning_rate", *options, "rounds", score, "chosen"], tried
            )
        except OSError as error:
            raise cannot_write(self.folder, error) from error


def refuse_all_diverged(entries: Iterable[Entry]) -> None:
    """Raise the error for a comparison without a single run that did not diverge."""
    lines = [line for entry in entries for line in entry.diverged]
    rounds = [len(history) for entry in entries for history in entry.histories]
    if rounds and len(lines) == len(rounds):
        raise Diverged(f"every run diverged; the first: {lines[0]}", round=rounds[0] + 1, client=None, layer="")


def points_of(experiment: Experiment, name: str) -> list[Settings]:
    """What is tried for an algorithm: a rate, and options if its grid has any; one alone is no choice."""
    spec, rate = experiment.compare, experiment.train.lr or algorithms.find(name).card.lr
    return points({"lr": [rate], **(spec.grid[name].values() if name in spec.grid else {})})


def tuning_rounds(experiment: Experiment) -> list[int]:
    """The rounds of runs that only help to choose settings, stage by stage."""
    given, rounds = experiment.compare.tuning_rounds, experiment.train.rounds
    stages = [rounds] if given is None else given
    if not stages or sorted(set(stages)) != stages:
        raise BadInput(f"compare.tuning_rounds = {stages}: must be a number, or a list of growing numbers")
    if stages[-1] > rounds:
        shown = stages if len(stages) > 1 else stages[0]
        raise BadInput(f"compare.tuning_rounds = {shown}: must be at most train.rounds = {rounds}")
    return stages


def with_algorithm(experiment: Experiment, name: str, settings: Settings | None = None) -> Experiment:
    """The experiment with one algorithm of its comparison, and settings of its grid.

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
