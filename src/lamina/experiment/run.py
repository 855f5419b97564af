"""Run one experiment: build it from its configuration, train, and keep its records in a folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from lamina import aggregation, algorithms, models, rng
from lamina.clients import DEFAULT_CLIENTS
from lamina.data import partitions, sources
from lamina.data.dataset import Dataset, Splits
from lamina.data.feed import Augment
from lamina.engines.stacked.engine import Stacked
from lamina.engines.stacked.ranks import Ranks
from lamina.errors import BadInput, Diverged, LaminaError, nearest
from lamina.experiment.config import Experiment, Named
from lamina.experiment.folder import LogLines, RankFolder, RunFolder
from lamina.experiment.trackers import Trackers
from lamina.history import Row
from lamina.population import Population
from lamina.protocol import Protocol, Settings, describe
from lamina.schedules import SCHEDULES, Schedule, make_schedule
from lamina.simulation import Simulation
from lamina.storage.checkpoint import load_newest
from lamina.storage.identity import of_simulation

WRITERS = 8  # runs of a population whose checkpoints are written at a time
THREADED_FROM = 1_000_000  # parameters; below this a second thread costs more than it brings
PROTOCOL_FIELDS = [each.name for each in dataclasses.fields(Protocol)]
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")  # what a file may name; the last two are torch's, and untested


def load_data(experiment: Experiment) -> Splits:
    """The experiment's training and test data; with `data.validation`, held-out training data stand in for the test."""
    splits = sources.load(experiment.data.name, experiment.data.dir)
    if experiment.data.validation is None:
        return splits
    return Splits(*splits.train.holdout(experiment.data.validation, experiment.train.seed))


def build(experiment: Experiment, splits: Splits | None = None, *, like: Simulation | None = None) -> Simulation:
    """Make the simulation an experiment describes; `like` is one that differs in no more than numbers."""
    run = experiment.run
    check_device(run.device)
    algorithm = build_algorithm(experiment)  # before the data are read: a wrong option costs no time
    partition, settings = build_partition(experiment), settings_of(experiment)
    splits = splits or load_data(experiment)
    return Simulation(
        build_model(experiment, splits.train),
        splits.train,
        algorithm,
        test=splits.test,
        clients=count_clients(experiment),
        partition=partition,
        device=run.device,
        engine=like or run.engine,
        precision=run.precision,
        deterministic=run.deterministic,
        evaluate_every=run.evaluate_every,
        client_metrics=run.client_metrics,
        trust_ratios=run.trust_ratios,
        **settings,
    )


def settings_of(experiment: Experiment) -> Settings:
    """Return the settings of the experiment's protocol, as arguments of `Simulation` and `Federation`."""
    data, train = experiment.data, experiment.train
    same = {name: getattr(train, name) for name in type(train).model_fields if name in PROTOCOL_FIELDS}
    own = {
        "batch_size": None if train.batch_size == "full" else train.batch_size,
        "epochs": train.epochs if train.local_steps is None else None,
        "schedule": build_schedule(experiment),
        "aggregation": build_aggregation(experiment),
        "augmentation": Augment(data.augment_pad, data.augment_flip) if data.augment else None,
    }
    return cast(Settings, same | own)


def check_device(name: str) -> None:
    """Refuse a device that is none, or is not here, in words that help; torch has the last word."""
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        raise BadInput(f"run.device = '{name}': must be auto, cpu or cuda (the second GPU is cuda:1)")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput(
            f"run.device = '{name}': torch finds no GPU here; cpu or auto runs without one, and `lamina doctor` "
            "says what is missing"
        )


def build_algorithm(experiment: Experiment) -> algorithms.Algorithm:
    """The experiment's algorithm."""
    section = experiment.algorithm
    _check_keys("algorithm", section, algorithms.options(algorithms.find(section.name)), own=("name", "preset"))
    return algorithms.create(section.name, section.preset, **section.options())


def build_model(experiment: Experiment, data: Dataset) -> torch.nn.Module:
    """The experiment's model, with initial weights that depend on the seed alone: the same for every algorithm."""
    section = experiment.model
    for key, source in (("seed", "train.seed"), ("classes", "the data"), ("input_shape", "the data")):
        if key in section.options():
            raise BadInput(f"model.{key} follows from {source}: take it out of [model]")
    if section.name in models.registry():
        _check_keys("model", section, models.registry()[section.name].options)
    return models.create(
        section.name,
        input_shape=tuple(data.x.shape[1:]),
        classes=data.classes or 1,
        seed=rng.torch_seed(experiment.train.seed, "weights"),
        **section.options(),
    )


def build_partition(experiment: Experiment) -> partitions.Partition:
    """How the experiment deals its samples."""
    section = experiment.data.partition
    base = section.options().get("base", "iid")
    if section.name == "reallocate" and isinstance(base, str) and base in partitions.PARTITIONS:
        _check_keys("data.partition", section, ["base", *_fields(partitions.PARTITIONS[base])])
    elif section.name in partitions.PARTITIONS and section.name != "reallocate":
        _check_keys("data.partition", section, _fields(partitions.PARTITIONS[section.name]))
    return partitions.make(section.name, **section.options())


def build_schedule(experiment: Experiment) -> Schedule:
    """The experiment's learning rate over rounds."""
    section = experiment.train.schedule
    options = section.options()
    if section.name in SCHEDULES:
        _check_keys("train.schedule", section, _fields(SCHEDULES[section.name]))
    if section.name == "cosine":
        options.setdefault("rounds", experiment.train.rounds)
    return make_schedule(section.name, **options)


def build_aggregation(experiment: Experiment) -> aggregation.Aggregation:
    """Return how the experiment combines its clients' uploads."""
    section = experiment.train.aggregation
    if section.name in aggregation.AGGREGATIONS:
        _check_keys("train.aggregation", section, _fields(aggregation.AGGREGATIONS[section.name]))
    return aggregation.make(section.name, **section.options())


def count_clients(experiment: Experiment) -> int | None:
    """How many clients share the data; None if a column names them."""
    if experiment.data.clients is None and experiment.data.partition.name != "by-column":
        return DEFAULT_CLIENTS
    return experiment.data.clients


def choose_threads(experiment: Experiment, parameters: int) -> int:
    """Threads for torch: one for small models, where a second one only waits."""
    if experiment.run.threads is not None:
        return experiment.run.threads
    return 1 if parameters < THREADED_FROM else max(1, (os.cpu_count() or 1))


def _fields(cls: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _check_keys(section: str, given: Named, known: Iterable[str], own: tuple[str, ...] = ("name",)) -> None:
    """Refuse a key that is neither the section's own nor an option of what it names."""
    known = list(known)
    for key in given.options():
        if key not in known:
            has = f"options of {given.name}: {', '.join(known)}" if known else f"{given.name} has no options"
            raise BadInput(f"[{section}] has no key '{key}'{nearest(key, [*own, *known])} ({has})")


# --- the configuration as it was really run ----------------------------------------------------------------------


def resolved(experiment: Experiment, simulation: Simulation) -> dict[str, Any]:
    """The whole configuration, with every default and every "auto" replaced by what was used."""
    config = experiment.model_dump()
    partition = build_partition(experiment)
    config["data"]["clients"] = simulation.plan.clients.count
    if isinstance(partition, partitions.Reallocate):
        config["data"]["partition"] = {"name": "reallocate", "base": "iid", **experiment.data.partition.options()}
        partition = partition.base
    config["data"]["partition"] |= _values(partition)
    if experiment.model.name in models.registry():
        defaults = models.registry()[experiment.model.name].options
        config["model"] = {"name": experiment.model.name, **defaults, **experiment.model.options()}
    config["algorithm"] |= _values(simulation.algorithm)
    config["train"]["lr"] = simulation.protocol.lr
    config["train"]["schedule"] |= _values(simulation.protocol.schedule)
    combination = simulation.protocol.aggregation
    if isinstance(combination, aggregation.Mean):
        del config["train"]["aggregation"]  # so that run folders from before there were others can be resumed
    else:
        config["train"]["aggregation"] = describe(combination, aggregation.name_of(combination))
    config["run"]["device"] = str(simulation.device)
    config["run"]["engine"] = engine.forward.name if isinstance(engine := simulation.engine, Stacked) else "loop"
    config["run"]["threads"] = choose_threads(experiment, simulation.objective.start.numel())
    config["run"]["ranks"] = Ranks.current().world
    if experiment.algorithm.name not in algorithms.registry():  # a report does not run the user's code to learn it
        config["title"] = simulation.algorithm.card.title
    return config


def _values(record: Any) -> dict[str, Any]:
    """The fields of a frozen record by name."""
    return {name: getattr(record, name) for name in _fields(type(record))}


# --- processes ---------------------------------------------------------------------------------------------------


def join_ranks(experiment: Experiment) -> tuple[Experiment, Ranks]:
    """Under torchrun, join the other processes: each takes a share of every cohort, on a GPU of its own if there are.

    gloo and NCCL, one node or many, are torch.distributed's; nothing is decided here but the device.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return experiment, Ranks(0, 1)
    device = experiment.run.device
    check_device(device)
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if experiment.run.engine == "loop":
        raise BadInput("torchrun shares the cohort of the stacked engine: run.engine = 'loop' runs in one process only")
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    settings = experiment.run.model_copy(update={"device": device, "engine": "stacked"})
    return experiment.model_copy(update={"run": settings}), Ranks.current()


def open_folder(
    path: Path, config: Mapping[str, Any], *, overwrite: bool = False, lines: LogLines | None = None
) -> RunFolder | RankFolder:
    """The run's folder, or under torchrun this process's part of it; the first process decides whether it will do."""
    ranks = Ranks.current()
    if ranks.world == 1:
        return RunFolder(path, config, overwrite=overwrite, lines=lines)
    folder: RunFolder | None = None
    said: list[Any] = [None]
    problem: LaminaError | None = None
    if ranks.rank == 0:
        try:
            folder = RunFolder(path, config, overwrite=overwrite, lines=lines)
            said = [{"found": bool(folder.rounds()), "ended": folder.complete or folder.diverged is not None}]
        except LaminaError as error:
            problem = error
    torch.distributed.broadcast_object_list(said)
    if problem is not None:
        raise problem
    if folder is not None:
        return folder
    if said[0] is None or said[0]["ended"]:
        raise SystemExit(0)  # the first process says what there is to say, and its exit code counts
    return RankFolder(path, ranks.rank, found=said[0]["found"])


def everywhere(here: bool) -> bool:
    """Whether something is true in all processes."""
    return int(Ranks.current().add(torch.tensor(int(not here), device=_device_of_ranks()))) == 0


def _device_of_ranks() -> str:
    """Where a number must lie to be added up over the processes."""
    ranks = Ranks.current()
    return "cuda" if ranks.world > 1 and torch.distributed.get_backend() == "nccl" else "cpu"


# --- training ----------------------------------------------------------------------------------------------------


@dataclass
class Ended:
    """How training ended."""

    stopped: bool = False  # on request, before the last round
    diverged: dict[int, Diverged] = field(default_factory=dict)  # by number in the list of simulations


def go_on(simulations: Sequence[Simulation], folders: Sequence[RunFolder | RankFolder]) -> int:
    """Put simulations that run together where their folders say they were: the newest round all of them have."""
    rounds = set.intersection(*(set(folder.rounds()) for folder in folders))
    ranks = Ranks.current()
    if ranks.world > 1:
        everyones: list[Any] = [None] * ranks.world
        torch.distributed.all_gather_object(everyones, rounds)
        rounds = set.intersection(*everyones)
    stores, starts = [folder.checkpoints for folder in folders], [simulation.start() for simulation in simulations]
    for store, simulation in zip(stores, simulations, strict=True):
        store.identity = of_simulation(simulation)
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
                simulation.refuse_nonfinite(simulation.history[-1])
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
        # Who diverges leaves the population: the others are saved, so that this round is not run again without it.
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
        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(write, chosen))


def _run_round(
    simulations: Sequence[Simulation], population: Population | None, ended: Ended, *, evaluate: bool
) -> tuple[dict[int, Row], dict[int, Diverged]]:
    """One round of all: the rows of those that finished it, and who diverged; a row may be its run's last."""
    if population is not None:
        rows = population.run_round(evaluate=evaluate)
        return rows, {i: error for i, error in population.diverged.items() if i not in ended.diverged}
    rows = {}
    try:
        rows[0] = simulations[0].run_round(evaluate=evaluate)
        simulations[0].refuse_nonfinite(rows[0])
    except Diverged as error:
        return rows, {0: error}
    return rows, {}
