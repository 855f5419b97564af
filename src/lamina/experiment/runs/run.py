"""Train the runs of an experiment, from where their folders say they were, and keep their records.

Under torchrun several processes train one run and share its folder: the first one writes all but the checkpoints of
the clients that the others train.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from lamina.base.errors import Diverged
from lamina.data.partitions import label_counts
from lamina.engines.devices import choose_device
from lamina.engines.ranks import Ranks, everywhere
from lamina.engines.stacked.engine import Stacked
from lamina.experiment.build import choose_threads
from lamina.experiment.config import Experiment
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.runs.model_file import describe_model
from lamina.storage.checkpoint import Checkpoints, load_newest
from lamina.storage.identity import of_run
from lamina.training.evaluation import refuse_nonfinite
from lamina.training.history import History, Row
from lamina.training.population import Population
from lamina.training.training import Training

CHECKPOINT_THREADS = 8
MOST_CLASS_COUNTS = 100_000  # clients times classes: a larger partition.json would slow down reports


class RankFolder:
    """The part of a run's folder that a process other than the first writes: the state of the clients it trains."""

    def __init__(self, path: Path, rank: int, *, found: bool, accept_changed_code: bool = False) -> None:
        folder = path / "checkpoints" / f"rank-{rank}"
        self.checkpoints = Checkpoints(folder, accept_changed_code=accept_changed_code)
        self.diverged: Diverged | None = None
        self._found = found  # whether the first process resumes a run

    def rounds(self) -> list[int]:
        """Return the rounds that this process could resume after."""
        return self.checkpoints.rounds() if self._found else []

    def resume_after(self, number: int) -> History:
        """Return an empty history: the first process keeps it."""
        return History()

    def checkpoint(self, simulation: Training) -> None:
        """Save the state after this round."""
        self.checkpoints.save(simulation.state)

    def record(self, row: Row, simulation: Training) -> None:
        """Do nothing: the first process records the round."""

    def stopped(self, number: int) -> None:
        """Do nothing: the first process logs it."""

    def finish(self, simulation: Training) -> None:
        """Do nothing: the first process writes the model."""

    def diverge(self, error: Diverged) -> None:
        """Note that the run has diverged; the first process records how."""
        self.diverged = error

    def close(self) -> None:
        """Do nothing: the first process holds the lock."""


def join_ranks(experiment: Experiment) -> tuple[Experiment, Ranks]:
    """Under torchrun, join the other processes; return the experiment on this process's device, and its rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return experiment, Ranks(0, 1)
    device = experiment.run.device
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    # processes that share a GPU cannot use NCCL
    is_shared = on_gpu and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
    if on_gpu:
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % max(1, torch.cuda.device_count())}"
    choose_device(device)  # refuses one that cannot be used; only now, so that no process touches another's GPU
    if on_gpu:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if on_gpu and not is_shared else "gloo")
    return experiment.changed(run={"device": device}), Ranks.current()


def open_folder(path: Path, config: Mapping[str, Any], **options: Any) -> RunFolder | RankFolder:
    """Open the run's folder, or under torchrun this process's part of it if the first process accepts the folder.

    The options are those of `RunFolder`.
    """
    ranks = Ranks.current()
    if ranks.world == 1:
        return RunFolder(path, config, **options)
    shared: list[Any] = [None]
    if ranks.rank == 0:
        try:
            folder = RunFolder(path, config, **options)
            shared = [{"found": bool(folder.rounds()), "ended": folder.ended}]
            return folder
        finally:  # tell the others, even if the folder is refused
            torch.distributed.broadcast_object_list(shared)
    torch.distributed.broadcast_object_list(shared)
    if shared[0] is None or shared[0]["ended"]:
        raise SystemExit(0)  # the first process reports, and its exit code counts
    accept = bool(config["run"].get("accept_changed_code"))
    return RankFolder(path, ranks.rank, found=shared[0]["found"], accept_changed_code=accept)


def restore(simulations: Sequence[Training], folders: Sequence[RunFolder | RankFolder]) -> None:
    """Load the state of the newest round that all folders have, if there is one, into simulations."""
    rounds = set.intersection(*(set(folder.rounds()) for folder in folders))
    ranks = Ranks.current()
    if ranks.world > 1:
        everyones: list[Any] = [None] * ranks.world
        torch.distributed.all_gather_object(everyones, rounds)
        rounds = set.intersection(*everyones)
    stores, starts = [folder.checkpoints for folder in folders], [simulation.start() for simulation in simulations]
    for store, simulation in zip(stores, simulations, strict=True):
        store.identity = of_run(simulation.algorithm, simulation.objective, simulation.plan, simulation.train_data)
    # the records of all clients might not fit a GPU: the stacked engine takes those it needs, and says where they stay
    home = torch.device("cpu") if isinstance(simulations[0].engine, Stacked) else None
    for simulation, loaded in zip(
        simulations, load_newest(stores, starts, rounds, everywhere, home) or [], strict=False
    ):
        simulation.state, _ = loaded


def resume(simulations: Sequence[Training], folders: Sequence[RunFolder | RankFolder]) -> int:
    """Restore simulations from the newest round that all their folders have, and return its number."""
    restore(simulations, folders)
    resume_histories(simulations, folders)
    return simulations[0].state.round


def resume_histories(simulations: Sequence[Training], folders: Sequence[RunFolder | RankFolder]) -> None:
    """Give restored simulations the rounds that they have trained."""
    for simulation, folder in zip(simulations, folders, strict=True):
        simulation.history = folder.resume_after(simulation.state.round)


def train(
    simulations: Sequence[Training],
    folders: Sequence[RunFolder | RankFolder],
    experiment: Experiment,
    *,
    stop: Callable[[], bool] = lambda: False,
    on_round: Callable[[int, Row], None] = lambda i, row: None,
) -> bool:
    """Run simulations that are at the same round to the end, side by side if there are several.

    A finished round is in the metrics before the next begins. Checkpoints of all are written together, so that they
    are never more than one apart. Return whether training was stopped before the last round; the folders know which
    runs diverged. A run that its patience stops is complete, and the others continue.
    """
    rounds, every = experiment.train.rounds, experiment.run.checkpoint_every
    torch.set_num_threads(choose_threads(experiment, simulations[0].objective.start.numel()))
    for folder, simulation in zip(folders, simulations, strict=True):
        if isinstance(folder, RunFolder):
            folder.partition, folder.model = describe_partition(simulation), describe_model(simulation, experiment)
            folder.preprocessing = simulation.train_data.preprocessing
    population = Population(simulations) if len(simulations) > 1 else None
    diverged: dict[int, Diverged] = {}
    for i, simulation in enumerate(simulations):  # killed after the checkpoint of a round with an infinite test loss
        if len(simulation.history):
            try:
                refuse_nonfinite(simulation.history[-1])
            except Diverged as error:
                diverged[i] = error
                folders[i].diverge(error)
    if population is not None:
        population.diverged |= diverged
    number = max(simulation.state.round for simulation in simulations)
    complete = {i for i, simulation in enumerate(simulations) if i not in diverged and _has_stopped(simulation)}
    _for_each(complete, lambda i: folders[i].finish(simulations[i]))  # killed before its model was written
    while number < rounds and len(diverged) + len(complete) < len(simulations):
        number += 1
        due = {"evaluate": number == rounds, "continues": number % every != 0}  # a checkpoint would wait for a GPU
        rows, failed = _run_round(simulations, population, diverged, **due)
        for i, row in rows.items():
            folders[i].record(row, simulations[i])
            on_round(i, row)
        stopped = not everywhere(not stop()) and number < rounds
        # A run that diverges leaves the population: save the others, so that this round is not repeated without it.
        ended = {i for i in rows if i not in failed and _has_stopped(simulations[i])}
        if number % every == 0 or number == rounds or stopped or failed or ended:
            _for_each(rows, lambda i: folders[i].checkpoint(simulations[i]))
        _for_each(ended, lambda i: folders[i].finish(simulations[i]))
        complete |= ended
        for i, reason in failed.items():
            folders[i].diverge(reason)
        diverged |= failed
        if stopped and len(diverged) + len(complete) < len(simulations):
            for i in rows.keys() - complete:
                folders[i].stopped(number)
            return True
    left = [i for i in range(len(simulations)) if i not in diverged and i not in complete]
    _for_each(left, lambda i: folders[i].finish(simulations[i]))
    return False


def _has_stopped(simulation: Training) -> bool:
    """Return whether a run has stopped early, in all processes alike: the first one alone has the whole history."""
    may_stop = simulation.patience is not None or simulation.accountant is not None
    return may_stop and not everywhere(not simulation.has_stopped)


def describe_partition(simulation: Training) -> dict[str, Any] | None:
    """Return how many samples of each class every client holds; None without classes or if these are many numbers.

    None also with differential privacy: the counts are the clients' own data, and have no noise.
    If the data are split again in every round, the counts are those of the first round's cohort.
    """
    if simulation.protocol.privacy is not None:
        return None
    clients, labels = simulation.all_clients, simulation.train_data.labels
    parts = clients.parts if clients.reallocation is None else clients.samples(1, simulation.plan.cohort(1))
    if labels is None or len(parts) * (labels.max() + 1) > MOST_CLASS_COUNTS:
        return None
    return {"class_counts": label_counts(parts, labels).tolist()}


def _for_each(runs: Iterable[int], write: Callable[[int], None]) -> None:
    """Write something of several runs at a time: most of it is waiting for the disk."""
    with ThreadPoolExecutor(CHECKPOINT_THREADS) as pool:
        list(pool.map(write, runs))


def _run_round(
    simulations: Sequence[Training],
    population: Population | None,
    diverged: Mapping[int, Diverged],
    **due: bool,
) -> tuple[dict[int, Row], dict[int, Diverged]]:
    """Run one round; return the rows of the runs that finished it, and those that diverged in or after it."""
    if population is not None:
        rows = population.run_round(**due)
        return rows, {i: error for i, error in population.diverged.items() if i not in diverged}
    rows = {}
    try:
        rows[0] = simulations[0].run_round(**due)
        refuse_nonfinite(rows[0])
    except Diverged as error:
        return rows, {0: error}
    return rows, {}
