"""What comparisons and tunings share: run an experiment with several settings in one folder, and score the runs."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lamina.data.dataset import Splits
from lamina.errors import BadInput
from lamina.experiment.build import build, load_data
from lamina.experiment.config import Compare, Experiment, Tune
from lamina.experiment.records import Record
from lamina.experiment.settings import Settings
from lamina.experiment.side_by_side import Job, run_side_by_side
from lamina.history import History, Row, rank
from lamina.simulation import Simulation
from lamina.storage.locks import Lock, lost


@dataclass(frozen=True)
class Trial:
    """Settings that were tried, and the runs with them so far, one per seed."""

    name: str  # of its folder
    settings: Settings
    metric: str  # "accuracy" or "loss"
    records: list[Record]
    seeds: int  # how many runs it should have
    pruned: bool = False

    @property
    def remark(self) -> str:
        """Return why the trial does not count; empty if it does."""
        if any(record.diverged for record in self.records):
            return "diverged"
        if self.pruned:
            return "pruned"
        is_complete = len(self.records) == self.seeds and all(record.complete for record in self.records)
        return "" if is_complete else "not finished"

    @property
    def best(self) -> list[float]:
        """Return the best value of every run that has any."""
        return self._values(lambda history: history.best(self.metric, optional=True))

    @property
    def last(self) -> list[float]:
        """Return the last value of every run that has any."""
        return self._values(lambda history: history.last(self.metric, optional=True))

    @property
    def score(self) -> float:
        """Return the mean of the best values, by which trials are chosen; NaN if the trial does not count."""
        return statistics.fmean(self.best) if self.best and not self.remark else math.nan

    @property
    def rank(self) -> float:
        """Return a number that is the larger, the better the trial is."""
        return rank(self.score, self.metric)

    def _values(self, of: Callable[[History], float]) -> list[float]:
        values = [of(record.history) for record in self.records]
        return [value for value in values if not math.isnan(value)]


class Tuner:
    """The runs of a comparison or a tuning in one folder.

    Args:
        experiment: the file.
        section: its [compare] or [tune] section, which says what data settings are chosen on.
        folder: where the runs are written.
        stop: asked after every round whether to stop.
        trackers: names of trackers that follow every run.
    """

    def __init__(
        self,
        experiment: Experiment,
        section: Compare | Tune,
        folder: Path,
        stop: Callable[[], bool],
        trackers: Sequence[str] = (),
    ) -> None:
        if experiment.data.validation is not None:
            kind = type(section).__name__.lower()
            raise BadInput(f"data.validation is for single runs: lamina {kind} holds out {kind}.validation by itself")
        self._section, self._folder, self._stop, self._trackers = section, folder, stop, trackers
        self._splits: dict[tuple[float | None, int], Splits] = {}  # by held-out fraction and seed
        self._ended: dict[Path, None] = {}  # the folders of runs that have ended
        self._lock: Lock | None = None

    def load(self, experiment: Experiment) -> Simulation:
        """Load the data and build one run, whose device all other runs use."""
        self._loaded = load_data(experiment)
        simulation = build(experiment, self._loaded)
        if simulation.test_data is not None:  # on the device already: else every run would copy them
            self._loaded = Splits(simulation.train_data, simulation.test_data)
        return simulation

    def job(
        self, experiment: Experiment, settings: Settings, seed: int, folder: Path, label: str, *, tuning: bool = True
    ) -> Job:
        """Return one run; a tuning run is evaluated on held-out training data, unless the test data decide."""
        held_out = self._section.validation if tuning and self._section.select == "validation" else None
        train = experiment.train.model_copy(update={"seed": seed})
        data = experiment.data.model_copy(update={"validation": held_out})
        experiment = experiment.model_copy(update={"train": train, "data": data})
        return Job(experiment, settings, self._folder / folder, label, tuning)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder's lock; at the end, raise an error if records of finished runs are gone."""
        self._lock = Lock(self._folder)
        try:
            yield
            self.refuse_lost()
            for place in self._ended:
                if not (place / "metrics.jsonl").exists():
                    raise lost(place)
        finally:
            self._lock.release()

    def refuse_lost(self) -> None:
        """Raise an error if the folder was removed, emptied or replaced."""
        if self._lock is not None:
            self._lock.refuse_lost()

    def run(
        self,
        jobs: Sequence[Job],
        on_round: Callable[[Job, Row], None],
        on_end: Callable[[Job, Record], None],
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Run what is left of some runs, as populations where they can be stacked; return whether all finished."""
        self.refuse_lost()

        def ended(job: Job, record: Record) -> None:
            self._ended[job.folder] = None
            on_end(job, record)

        return run_side_by_side(
            jobs,
            self._folder,
            self._splits_of,
            stop=lambda: stop() or self._stop(),
            on_round=on_round,
            on_end=ended,
            trackers=self._trackers,
        )

    def _splits_of(self, experiment: Experiment) -> Splits:
        """Return the data of a run; every seed holds out samples of its own."""
        held_out, seed = experiment.data.validation, experiment.train.seed
        if held_out is None:
            return self._loaded
        if (held_out, seed) not in self._splits:
            self._splits[held_out, seed] = Splits(*self._loaded.train.holdout(held_out, seed))
        return self._splits[held_out, seed]
