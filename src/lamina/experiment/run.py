"""Train the runs of an experiment, from where their folders say they were, and keep their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from lamina.engines.stacked.engine import Stacked
from lamina.engines.stacked.ranks import Ranks
from lamina.errors import Diverged
from lamina.experiment.build import choose_threads
from lamina.experiment.config import Experiment
from lamina.experiment.folder import RunFolder
from lamina.experiment.ranks import RankFolder, everywhere
from lamina.experiment.trackers import Trackers
from lamina.history import Row
from lamina.metrics import refuse_nonfinite
from lamina.population import Population
from lamina.simulation import Simulation
from lamina.storage.checkpoint import load_newest
from lamina.storage.identity import of_run

CHECKPOINT_THREADS = 8


@dataclass
class Ended:
    """How training ended."""

    stopped: bool = False  # on request, before the last round
    diverged: dict[int, Diverged] = field(default_factory=dict)  # by number in the list of simulations


def go_on(simulations: Sequence[Simulation], folders: Sequence[RunFolder | RankFolder]) -> int:
    """Restore simulations from the newest round that all their folders have, and return its number."""
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
    states = load_newest(stores, starts, rounds, everywhere, home)
    for i, (simulation, folder) in enumerate(zip(simulations, folders, strict=True)):
        if states is not None:
            simulation.state, _ = states[i]
        simulation.history = folder.go_on_after(simulation.state.round)
    return simulations[0].state.round


def train(
    simulations: Sequence[Simulation],
    folders: Sequence[RunFolder | RankFolder],
    experiment: Experiment,
    *,
    stop: Callable[[], bool] = lambda: False,
    on_round: Callable[[int, Row], None] | None = None,
    trackers: Sequence[Trackers] = (),
) -> Ended:
    """Run simulations that are at the same round to the end, side by side if there are several.

    A finished round is in the metrics before the next begins. Checkpoints of all are written together, so that they
    are never more than one apart. Trackers, if there are any, belong to the simulations in their order.
    """
    rounds, every = experiment.train.rounds, experiment.run.checkpoint_every
    torch.set_num_threads(choose_threads(experiment, simulations[0].objective.start.numel()))
    population = Population(simulations) if len(simulations) > 1 else None
    ended = Ended()
    for i, simulation in enumerate(simulations):  # killed after the checkpoint of a round with an infinite test loss
        if len(simulation.history):
            try:
                refuse_nonfinite(simulation.history[-1])
            except Diverged as error:
                ended.diverged[i] = error
                folders[i].diverge(error)
    if population is not None:
        population.diverged |= ended.diverged
    number = max(simulation.state.round for simulation in simulations)
    while number < rounds and len(ended.diverged) < len(simulations):
        number += 1
        rows, failed = _run_round(simulations, population, ended, evaluate=number == rounds)
        for i, row in rows.items():
            folders[i].record(row, simulations[i])
            if trackers:
                trackers[i].write(simulations[i].history)
            if on_round is not None:
                on_round(i, row)
        ended.stopped = not everywhere(not stop()) and number < rounds
        # A run that diverges leaves the population: save the others, so that this round is not repeated without it.
        if number % every == 0 or number == rounds or ended.stopped or failed:
            _for_each(rows, lambda i: folders[i].checkpoint(simulations[i]))
        for i, how in failed.items():
            folders[i].diverge(how)
        ended.diverged |= failed
        if ended.stopped:
            for i in rows:
                folders[i].stopped(number)
            return ended
    _for_each(
        [i for i in range(len(simulations)) if i not in ended.diverged], lambda i: folders[i].finish(simulations[i])
    )
    return ended


def _for_each(runs: Iterable[int], write: Callable[[int], None]) -> None:
    """Write something of several runs at a time: most of it is waiting for the disk."""
    chosen = list(runs)
    if len(chosen) == 1:
        write(chosen[0])
    elif chosen:
        with ThreadPoolExecutor(CHECKPOINT_THREADS) as pool:
            list(pool.map(write, chosen))


def _run_round(
    simulations: Sequence[Simulation], population: Population | None, ended: Ended, *, evaluate: bool
) -> tuple[dict[int, Row], dict[int, Diverged]]:
    """Run one round; return the rows of the runs that finished it, and those that diverged in or after it."""
    if population is not None:
        rows = population.run_round(evaluate=evaluate)
        return rows, {i: error for i, error in population.diverged.items() if i not in ended.diverged}
    rows = {}
    try:
        rows[0] = simulations[0].run_round(evaluate=evaluate)
        refuse_nonfinite(rows[0])
    except Diverged as error:
        return rows, {0: error}
    return rows, {}
