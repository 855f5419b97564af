"""Compare algorithms fairly: the same initial weights, clients and batches, and every method tuned the same way.

If the file gives values to try (``[compare.grid]``: rates, and the methods' own options), each combination is run once
on a seed that no final run has. The one with the best final value of the first metric, its mean over the last ten
rounds on held-out *training* data, is chosen. The test data are used only in the final runs, one per seed; with
``compare.select = "test"``, as in the papers, they choose, too. To save time, ``compare.tuning_rounds`` may be fewer
rounds, or several numbers: after each, only the best third continues. A rate that starts slowly may win late, so a
search in stages ends only when the best combination has been compared with all its neighbours on the grid after the
last of these rounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lamina
from lamina import algorithms
from lamina.base.errors import BadInput, is_whole, short_repr
from lamina.base.text import plural
from lamina.channel.channel import as_channel
from lamina.experiment.build import build_algorithm, build_parts, build_schedule, chosen_target, resolved
from lamina.experiment.config import AlgorithmSection, Experiment, parse
from lamina.experiment.runs.records import FORMAT, REPLACED, delete_runs, is_ours, read_json
from lamina.experiment.sections import Named
from lamina.experiment.trials.settings import Range, Settings, folder_name, neighbours, points, written
from lamina.experiment.trials.trial import Trial, refuse_nan
from lamina.experiment.trials.trials import Job, Trials, tuned_on_a_reported_seed, tuning_seed
from lamina.objective.objective import Objective, copy_module
from lamina.storage.files import write_csv, write_json, writing_to
from lamina.training.metrics import is_percent

TUNING_FOLDER = "tuning"
CONTINUED_FRACTION, MIN_CONTINUED = 1 / 3, 3  # of the candidates, after each of several tuning_rounds


class Comparison(Trials):
    """The comparison of an experiment file in a folder.

    The runs are in ``<algorithm>/seed<n>`` and ``tuning/<algorithm>/lr<rate>…``. While it runs, `entries` grows: a
    trial for each algorithm, with its chosen settings and its finished runs. The options are those of `Trials`.
    """

    def __init__(self, experiment: Experiment, folder: Path, **options: Any) -> None:
        spec = experiment.compare
        super().__init__(experiment, spec, "algorithms", folder, **options)
        self.entries: list[Trial] = []
        # of each algorithm: the folders of its jobs so far; then its settings, final runs and candidates
        self._folders: dict[str, dict[Path, None]] = {name: {} for name in spec.algorithms}
        self._final: dict[str, tuple[Settings, list[Job], list[Trial]]] = {}
        if not spec.algorithms:
            raise BadInput("compare.algorithms is empty: name at least one algorithm")
        for name in {**spec.grid, **spec.options}:
            if ":" not in name:  # settings of a method that is left out are fine, a misspelt name is not
                algorithms.find(spec.algorithm_of(name))
        owners: dict[str, str] = {}
        for label in spec.algorithms:
            if label == TUNING_FOLDER or not re.search(r"\w", label):
                raise BadInput(f"compare.algorithms: '{label}' cannot name a folder of runs: choose another name")
            first_label = owners.setdefault(label_folder(label), label)
            if first_label != label:
                raise BadInput(
                    f"compare.algorithms: '{first_label}' and '{label}' would share the folder "
                    f"'{label_folder(label)}': choose names that differ in a letter or digit"
                )
        self._choices = all_points(experiment)
        first = with_algorithm(experiment, spec.algorithms[0])
        every = [with_algorithm(experiment, name) for name in spec.algorithms]
        simulation = self._load(first, every)
        for each in every:  # refuses patterns of private parts that fit no name, and a model that a method cannot train
            _, protocol, *_ = build_parts(each)
            objective = Objective(copy_module(simulation.objective.module), protocol.loss, protocol.private)
            build_algorithm(each).check_model(objective.layers)
        if is_percent(self.metric) and not 0 < spec.target <= 1:
            value = f"{'an' if self.metric[0] in 'aeiou' else 'a'} {self.metric}"
            raise BadInput(f"compare.target = {spec.target:g}: must be {value} above 0 and up to 1, as 0.9")
        self._config = {"lamina": lamina.__version__, "format": FORMAT, **resolved(first, simulation)}
        del self._config["algorithm"]  # each method has its own, with its own rate
        self._config.pop("title", None)  # as it has its own title
        self._config["train"]["lr"] = experiment.train.lr
        self._config["algorithms"] = {}

    def run(self) -> bool:
        """Run what is left, with other processes that do the same; return whether all runs finished."""
        with self._joined():
            finished = self._run([self._plan(name) for name in self._choices])
            if not finished:
                self._save()
            return finished

    def _prepare(self) -> None:
        if self._is_replaced:  # all of them first, so that no old run is ever taken for a new one
            delete_runs(self.folder, [*self.folder.glob("*/seed*"), *self.folder.glob("tuning/*/*")])
            self._write()
            (self.folder / REPLACED).unlink()
        elif not is_ours(self.folder):  # the tables of an earlier one stay until its runs are known to be the same
            self._write()

    @property
    def target(self) -> float | None:
        """Return the value of the first metric to reach, if there is one."""
        return chosen_target(self.experiment, self.metric)

    def _plan(self, name: str) -> Generator[list[Job]]:
        """Yield the jobs of an algorithm: those that help to choose its settings, if there is a choice; every seed."""
        choice = self._choices[name]
        candidates = (yield from self._tune(name)) if len(choice) > 1 else []
        refuse_nan(f"{name}: ", self.metric, candidates)
        settings = max(candidates, key=lambda trial: trial.score_key).settings if candidates else choice[0]
        first = self.experiment.train.seed
        jobs = [self._new_job(name, settings, seed) for seed in range(first, first + self.experiment.compare.seeds)]
        self._final[name] = settings, jobs, candidates
        yield jobs
        self._save()

    def _tune(self, name: str) -> Generator[list[Job], None, list[Trial]]:
        """Try all points, in stages if there are several tuning_rounds; return their trials."""
        rounds, candidates = tuning_rounds(self.experiment), self._choices[name]
        stages = [rounds[i:] for i in range(len(rounds))]  # of each, its rounds and those of the stages after it
        trials: dict[int, Trial] = {}
        selected = list(range(len(candidates)))
        for stage in stages:
            yield from self._try(name, selected, stage, trials)
            count = max(MIN_CONTINUED, math.ceil(CONTINUED_FRACTION * len(selected)))
            selected = sorted(selected, key=lambda i: -trials[i].score_key)[:count]  # ties keep their order
        best = None
        while best != (first := max(trials, key=lambda i: trials[i].score_key)):  # until no neighbour is better
            best = first
            selected = [best, *neighbours(candidates, candidates[best])]
            for stage in stages:  # one by one: only runs that are at the same round train side by side
                yield from self._try(name, selected, stage, trials)
        return [trials[i] for i in range(len(candidates))]

    def _try(
        self, name: str, selected: Sequence[int], stage: Sequence[int], trials: dict[int, Trial]
    ) -> Generator[list[Job]]:
        """Yield the jobs that train selected points up to the rounds of a stage, then update their trials."""
        rounds, seed = stage[0], tuning_seed(self.experiment)
        jobs = {
            i: self._new_job(name, self._choices[name][i], seed, stage)
            for i in selected
            if i not in trials or (trials[i].remark != "diverged" and len(trials[i].histories[0]) < rounds)
        }
        yield list(jobs.values())
        for i, job in jobs.items():
            trials[i] = Trial(job.folder.name, self._choices[name][i], [self._record(job.folder).up_to(rounds)])

    def _new_job(self, name: str, settings: Settings, seed: int, stage: Sequence[int] = ()) -> Job:
        """Return a final run or, with the rounds of a stage and of those after it, a tuning run."""
        experiment, folder = with_algorithm(self.experiment, name, settings), label_folder(name)
        folder = f"{TUNING_FOLDER}/{folder}/{folder_name(settings)}" if stage else f"{folder}/seed{seed}"
        if stage:  # perhaps shorter, but each round has the rate of that round in the final runs
            changed: dict[str, Any] = {"rounds": self._rounds_in_folder(folder, stage)}
            if "schedule" not in experiment.objects.settings:
                options = vars(build_schedule(experiment))
                changed["schedule"] = Named(name=experiment.train.schedule.name, **options)
            experiment = experiment.changed(train=changed)
        job = self._job(experiment, seed, folder, f"{name}, {written(settings)}", name, tuning=bool(stage))
        self._folders[name][job.folder] = None
        return job

    def _rounds_in_folder(self, folder: str, stage: Sequence[int]) -> int:
        """Return the rounds of a tuning run: those of a later stage if it had been continued before."""
        path = self.folder / folder
        stored = read_json(path / "config.json").get("train", {}) if is_ours(path) else {}
        if isinstance(stored, Mapping) and stored.get("seed") == self.experiment.train.seed:
            raise tuned_on_a_reported_seed(self.folder, self.experiment.train.seed)
        rounds = stored.get("rounds") if isinstance(stored, Mapping) else None
        return next((each for each in stage if is_whole(rounds) and each == rounds), stage[0])

    @property
    def runs(self) -> list[Path]:
        """Return the folders of its runs that have begun, which tables, picture and report show."""
        folders = [folder for name in self._choices for folder in self._folders[name]]
        return [each for each in folders if each not in self._unchecked and (each / "metrics.jsonl").exists()]

    def notes(self) -> list[str]:
        """Return remarks for the reader: how settings were chosen, runs that diverged, best values on the edge."""
        lines = []
        spec, given = self.experiment.compare, self.experiment.train.lr
        if any(len(choice) > 1 for choice in self._choices.values()):
            on = self._held_out() if spec.select == "validation" else "the test data"
            what = "rates" if all(choice[0].keys() == {"lr"} for choice in self._choices.values()) else "settings"
            *stages, rounds = tuning_rounds(self.experiment)
            first = f"first {rounds} rounds" if rounds > 1 else "first round"
            short = f", in the {first}" if rounds < self.experiment.train.rounds else ""
            lines.append(f"{what} were chosen on {on}{short}")
            if spec.select == "validation" and self.experiment.train.local_steps is None:
                lines.append("final runs hold nothing out, so their epochs may have more steps (see train.local_steps)")
            if stages:
                after = " and ".join([*map(str, stages[:-1]), plural(stages[-1], "round")])
                third = f"the best third of what was tried continued after {after} (at least {MIN_CONTINUED})"
                lines.append(f"{third}; all neighbours of the chosen {what} on the grid were also run to the end")
        untuned = [name for name in self._choices if name not in spec.grid or spec.grid[name].lr is None]
        if given is not None and untuned:
            lines.append(f"train.lr = {given:g} is used for {', '.join(untuned)}: no rates in [compare.grid]")
        elif untuned and len(self._choices) > 1:
            lines.append(
                f"default rates are used for {', '.join(untuned)}: a fair comparison tries several "
                "(lr=[...] in Python, [compare.grid] in a file)"
            )
        for entry in self.entries:
            lines += entry.bad_endings
            if len(entry.settings) > 1 and entry.candidates:
                lines.append(f"{entry.name}: {written(entry.settings)} was chosen")
            for key, value in entry.settings.items():
                tried = Range(choices=tuple(trial.settings[key] for trial in entry.candidates) or (value,))
                if warning := tried.edge_warning(value, spec.algorithm_of(entry.name), key):
                    lines.append(f"{entry.name}: {warning}")
        return lines

    def rounds(self) -> list[dict[str, Any]]:
        """Return a row for every round of every finished run."""
        return [
            {"algorithm": entry.name, "learning_rate": entry.lr, "seed": record.seed, **row}
            for entry in self.entries
            for record in entry.records
            for row in record.history
        ]

    def _save(self) -> None:
        """Read the finished runs, in the order of the algorithms, and write the tables."""
        self.entries, self._config["algorithms"] = [], {}
        for name in filter(self._final.__contains__, self._choices):
            settings, jobs, candidates = self._final[name]
            records = [self._record(job.folder) for job in jobs if job in self._ended]
            if records:
                self.entries.append(Trial(name, settings, records, len(jobs), candidates=candidates))
                self._config["algorithms"][name] = {"lr": settings["lr"], **records[-1].config["algorithm"]}
        with self._turn():
            self._write()

    def _write(self) -> None:
        """Write the configuration, the rounds of every finished run, and the scores of all tuning runs."""
        columns = dict.fromkeys(column for entry in self.entries for run in entry.histories for column in run.columns)
        score = self.score_name.replace(" ", "_")
        tried = [
            {
                "algorithm": entry.name,
                "learning_rate": trial.lr,
                **trial.settings,
                "rounds": len(trial.histories[0]),
                score: trial.score,
                "chosen": trial.settings == entry.settings,
            }
            for entry in self.entries
            for trial in entry.candidates
        ]
        options = dict.fromkeys(key for choice in self._choices.values() for key in choice[0] if key != "lr")
        with writing_to(self.folder):
            write_json(self.folder / "config.json", self._config)
            write_csv(self.folder / "rounds.csv", ["algorithm", "learning_rate", "seed", *columns], self.rounds())
            tried_columns = ["algorithm", "learning_rate", *options, "rounds", score, "chosen"]
            write_csv(self.folder / "tuning.csv", tried_columns, tried)


def all_points(experiment: Experiment) -> dict[str, list[Settings]]:
    """Return the settings to try for each algorithm; a wrong name or option is refused before anything runs."""
    tuning_rounds(experiment)
    choices = {name: points_of(experiment, name) for name in experiment.compare.algorithms}
    for name, choice in choices.items():
        for settings in choice:
            build_algorithm(with_algorithm(experiment, name, settings))
    return choices


def count_runs(experiment: Experiment) -> int:
    """Return how many runs a comparison has, those that only help to choose settings included."""
    choices = all_points(experiment).values()
    return sum(experiment.compare.seeds + (len(choice) if len(choice) > 1 else 0) for choice in choices)


def points_of(experiment: Experiment, name: str) -> list[Settings]:
    """Return the settings to try for an algorithm: a rate, and options if its grid has any."""
    spec, rate = experiment.compare, experiment.train.lr
    rate = rate or algorithms.find(spec.algorithm_of(name)).card.lr
    return points({"lr": [rate], **(spec.grid[name].values() if name in spec.grid else {})})


def tuning_rounds(experiment: Experiment) -> list[int]:
    """Return the rounds of tuning runs, stage by stage."""
    given, rounds = experiment.compare.tuning_rounds, experiment.train.rounds
    stages = [rounds] if given is None else given
    if not stages or sorted(set(stages)) != stages or stages[-1] > rounds:
        expected = f"a number, or a list of growing numbers, at most train.rounds = {rounds}"
        raise BadInput(f"compare.tuning_rounds = {stages}: must be {expected}")
    return stages


def label_folder(label: str) -> str:
    """Return the folder of an algorithm's runs.

    >>> label_folder("my_project.methods:Mine"), label_folder("fedlada (alpha=0.05)")
    ('my_project.methods.Mine', 'fedlada_alpha_0.05')
    """
    return re.sub(r"[^\w.+-]+", "_", label.replace(":", ".")).strip("_")


def with_algorithm(experiment: Experiment, label: str, settings: Settings | None = None) -> Experiment:
    """Return the experiment with one algorithm of its comparison, and settings of its grid.

    Options are those of [algorithm] if it is about that one, then of [compare.options], then the settings'. There,
    `private` says which parts of the model stay with the client in the runs of this one, and `channel` and `privacy`
    replace the sections of these names.
    """
    section, name = experiment.algorithm, experiment.compare.algorithm_of(label)
    options = {"preset": section.preset, **section.options()} if section.name == name else {}
    table = {key: value for key, value in experiment.compare.options.get(label, {}).items() if key != "name"}
    tried, sections = dict(settings or {}), _own_sections(experiment, label, table)
    train = {"lr": tried.pop("lr", experiment.train.lr), "private": table.pop("private", experiment.train.private)}
    if "name" in tried:
        raise BadInput(f"[compare.grid.{label}] has no key 'name': the table's own name says which algorithm it is")
    preset = {**table, **tried}.get("preset", "")
    if not isinstance(preset, str):
        raise BadInput(f"compare.options.{label}.preset = {preset!r}: must be the name of a preset")
    chosen = AlgorithmSection(name=name, **{**options, **table, **tried})
    return experiment.changed(train=train).model_copy(update={"algorithm": chosen, **sections})


def _own_sections(experiment: Experiment, label: str, table: dict[str, Any]) -> dict[str, Any]:
    """Take `channel` and `privacy` out of the options of an entry; return them as sections of its experiment."""
    tree: dict[str, Any] = {}
    if "channel" in table:
        tree["channel"] = as_channel(table.pop("channel")).record() or {}
    if "privacy" in table:
        given, base = table.pop("privacy"), experiment.privacy
        if given != "none" and not isinstance(given, Mapping):
            raise BadInput(f'compare.options.{label}.privacy = {short_repr(given)}: must be a table, or "none"')
        tree["privacy"] = None if given == "none" else {**({} if base is None else base.model_dump()), **given}
    parsed = parse(tree, source=f"compare.options.{label}") if tree else experiment
    return {name: getattr(parsed, name) for name in tree}
