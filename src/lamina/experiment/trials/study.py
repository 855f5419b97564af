"""Optuna's part of tuning: the ranges of values, and a study whose trials several processes share.

The study is stored in SQLite beside the runs. A process holds the lease of the trial it runs, so that the next process
recognises and claims a trial whose process was killed.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from lamina.base import rng
from lamina.base.errors import BadInput, is_number, missing_extra, short_repr
from lamina.experiment.trials.settings import Range, Settings
from lamina.storage.leases import Lease, claim, take

FILE = "study.db"
WRITE_TIMEOUT_S = 60  # for another process to finish writing to the study
RESUME = "run the same command again to resume; if that fails, start again with --overwrite (overwrite=True)"


def find_space(space: Mapping[str, Any]) -> dict[str, Range]:
    """Return the ranges of ``[tune.space]``, given by dotted keys."""
    ranges = {}
    for key, given in space.items():
        table = {"choices": given} if isinstance(given, list) else given
        if not _is_range(table):
            raise BadInput(
                f"tune.space: '{key}' = {short_repr(given)}: must be a list of values, or a table such as "
                "{ low = 0.001, high = 1.0, log = true }, with low below high and, if log is true, above 0"
            )
        ranges[key] = Range(**{**table, "choices": tuple(table.get("choices", ()))})
    if not ranges:
        raise BadInput("nothing to try: tune.sampler = 'tpe' chooses from the ranges in [tune.space]")
    return ranges


def _is_range(table: Any) -> bool:
    """Return whether a value is a table of choices, or of the ends of a range."""
    if not isinstance(table, Mapping):
        return False
    if set(table) == {"choices"}:
        choices = table["choices"]
        return isinstance(choices, list) and choices != [] and all(isinstance(x, str | int | float) for x in choices)
    if not {"low", "high"} <= set(table) <= {"low", "high", "log"}:
        return False
    low, high, log = table["low"], table["high"], table.get("log", False)
    is_sound = is_number(low) and is_number(high) and low < high and isinstance(log, bool)
    return is_sound and (low > 0 or not log)


class Study:
    """The study in a tuning's folder, and the one trial of it that this process runs.

    Problems with its file raise `BadInput`. The caller sees to it that no other process uses the study meanwhile.
    """

    def __init__(self, folder: Path, space: Mapping[str, Range], *, pruner: str, rounds: int, seed: int) -> None:
        try:
            import optuna
        except ImportError as error:
            raise missing_extra("optuna", "tune", "tune.sampler = 'tpe'") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # its warnings come as errors, which we say in a line
        self._optuna: Any = optuna
        self._folder, self._space, self._seed = folder, space, seed
        pruners = {
            "none": optuna.pruners.NopPruner(),
            # after a round or two, accuracies near chance say nothing: what is slow at first may win
            "median": optuna.pruners.MedianPruner(n_warmup_steps=rounds // 4),
            "hyperband": optuna.pruners.HyperbandPruner(max_resource=rounds),
        }
        self._pruner: Any = pruners[pruner]
        self._study: Any = None
        self._trial: Any = None  # the one that is claimed, with its lease and the rounds that Optuna knows
        self._lease: Lease | None = None
        self._reported: set[int] = set()

    @property
    def url(self) -> str:
        """Return the address of the study's database."""
        return f"sqlite:///{(self._folder / FILE).absolute()}"

    def open(self, *, maximise: bool) -> None:
        """Open or create the study."""
        with self._in_a_line():
            options = {"connect_args": {"timeout": WRITE_TIMEOUT_S}}
            storage = self._optuna.storages.RDBStorage(self.url, engine_kwargs=options)
            self._study = self._optuna.create_study(
                storage=storage,
                study_name="tune",  # Hyperband's brackets depend on it
                load_if_exists=True,
                direction="maximize" if maximise else "minimize",
                pruner=self._pruner,
            )

    def claim(self, most: int) -> tuple[str, Settings] | None:
        """Lease a trial of a killed process, or a new one; return its folder and settings, None if `most` exist."""
        trials = self._trials()
        with self._in_a_line():
            for left in filter(self._is_running, trials):
                lease = claim(self._folder / trial_name(left.number))
                if lease is None:  # its process may be alive
                    continue
                if self._is_running(self._trials()[left.number]):
                    self._study.sampler = self._sampler(left.number)
                    return self._take(self._optuna.trial.Trial(self._study, left._trial_id), lease)
                lease.release()  # its process has ended it since we looked
            if len(trials) >= most:
                return None
            self._study.sampler = self._sampler(len(trials))
            trial = self._study.ask()
        folder = self._folder / trial_name(trial.number)
        if folder.exists():  # of a study that was deleted
            shutil.rmtree(folder)
        return self._take(trial, take(folder))

    def _take(self, trial: Any, lease: Lease) -> tuple[str, Settings]:
        self._trial, self._lease = trial, lease
        try:
            with self._in_a_line():
                settings = {key: values.suggest(trial, key) for key, values in self._space.items()}
            self._reported = set(self._trials()[trial.number].intermediate_values)
        except BaseException:
            self.release()
            raise
        return trial_name(trial.number), settings

    def report(self, number: int, value: float) -> bool:
        """Report the value of a round; return whether the pruner would stop here."""
        with self._in_a_line():
            if number not in self._reported:  # else a round that is run again after a kill
                self._trial.report(value, number)
            return bool(self._trial.should_prune())

    def end(self, outcome: float | Literal["pruned", "failed"]) -> None:
        """Report the score of the claimed trial, or that there is none."""
        states = self._optuna.trial.TrialState
        with self._in_a_line():
            if isinstance(outcome, str):
                self._study.tell(self._trial.number, state=states.PRUNED if outcome == "pruned" else states.FAIL)
            else:
                self._study.tell(self._trial.number, outcome)

    @property
    def running(self) -> int:
        """Return how many trials have not ended."""
        return sum(map(self._is_running, self._trials()))

    def release(self) -> None:
        """Release the claimed trial; if it has not ended, the next process that looks resumes it."""
        if self._lease is not None:
            self._lease.release()

    def proposed(self) -> list[tuple[str, Settings, bool]]:
        """Return the folder name and the settings of all trials in order, and whether they were pruned."""
        pruned = self._optuna.trial.TrialState.PRUNED
        return [(trial_name(t.number), dict(t.params), t.state == pruned) for t in self._trials()]

    def _is_running(self, trial: Any) -> bool:
        return bool(trial.state == self._optuna.trial.TrialState.RUNNING)

    def _trials(self) -> list[Any]:
        with self._in_a_line():
            return list(self._study.get_trials(deepcopy=False))

    def _sampler(self, number: int) -> Any:
        """Return a sampler whose draws depend only on the trial's number, not on the process."""
        seed = rng.torch_seed(self._seed, "tune", number) % 2**32
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            # processes keep away from what others are trying at the moment
            return self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)

    @contextlib.contextmanager
    def _in_a_line(self) -> Iterator[None]:
        """Turn the nested exceptions of SQLite into one line."""
        from sqlalchemy.exc import SQLAlchemyError  # comes with Optuna

        try:
            yield
        # RuntimeError: the tables are of another version of Optuna
        except (SQLAlchemyError, self._optuna.exceptions.StorageInternalError, RuntimeError) as error:
            inner = error if isinstance(error, SQLAlchemyError) else error.__cause__
            cause = getattr(inner, "orig", None) or inner or error
            what = f"cannot use the study '{self._folder / FILE}': {str(cause).splitlines()[0]}"
            raise BadInput(f"{what}; {RESUME}") from error


def remove_study(folder: Path) -> None:
    """Delete the study in a tuning's folder, and its trials' folders."""
    for path in folder.glob(f"{FILE}*"):  # a journal of a killed process would be played back into a new file
        path.unlink()
    for path in folder.glob("trial[0-9]*"):
        shutil.rmtree(path)


def trial_name(number: int) -> str:
    """Return the name of a trial's folder."""
    return f"trial{number:03d}"
