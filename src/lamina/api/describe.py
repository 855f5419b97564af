"""Experiments from Python: described by arguments, with objects where a file has names, and recorded in a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from lamina import algorithms
from lamina.algorithms.declaration import option_places
from lamina.base.errors import BadInput, is_whole, nearest, short_repr
from lamina.channel.channel import as_channel
from lamina.channel.privacy import as_privacy
from lamina.data.dataset import Dataset, Splits
from lamina.data.feed import Augment
from lamina.data.partitions import PARTITIONS, ByColumn, Reallocate, as_partition
from lamina.data.readers.own import FORMATS
from lamina.engines.ranks import Ranks
from lamina.experiment.build import resolved
from lamina.experiment.config import Experiment, Run, Train, parse
from lamina.experiment.objects import Objects
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.runs.log_lines import LogLines
from lamina.experiment.runs.metrics_file import MetricsFile
from lamina.experiment.runs.records import read_record
from lamina.experiment.runs.run import RankFolder, open_folder, restore, resume, train
from lamina.experiment.sections import Data, augment_keys
from lamina.rounds.aggregation import AGGREGATIONS, as_aggregation
from lamina.rounds.aggregation import name_of as aggregation_name
from lamina.rounds.clients import Clients, refuse_odd_clients
from lamina.rounds.clock import as_clock
from lamina.rounds.schedules import SCHEDULES, as_schedule
from lamina.rounds.settings import as_table, function_name, refuse_no_augmentation, schedule_name
from lamina.training.history import Row
from lamina.training.inputs import as_algorithm, as_splits
from lamina.training.metrics import find_all
from lamina.training.training import Stop, Training

Table = dict[str, Any]
SECTIONS: dict[str, Any] = {"train": Train, "data": Data, "run": Run}
BESIDE_SECTIONS = ("augmentation", "channel", "privacy", "clock", "metrics")  # settings with a form of their own
GIVEN_CLIENTS = "client"  # the column that holds the client of each sample, if clients are lists


def describe(
    model: Any,
    data: Any,
    algorithm: Any = None,
    *,
    test: Any = None,
    clients: Any = None,
    partition: Any = None,
    settings: Mapping[str, Any],
    **sections: Table,
) -> Experiment:
    """Return an experiment.

    Args:
        model: a module, a function that returns a new one, a name, or a table such as {"name": "mlp", "hidden": 64}.
        data: as for `Simulation`.
        algorithm: an algorithm or a name.
        test: test data, unless `data` includes them.
        clients: a number, or a list of sample indices for each.
        partition: a partition, a name or a table.
        settings: keys of the `[train]`, `[data]` and `[run]` sections; those of `[train]` may be objects.
        sections: further sections, as tables.
    """
    refuse_odd_clients(clients)
    tree: dict[str, Table] = {"train": {"participation": 1.0}, "data": {}, "run": {}, **sections}
    objects: dict[str, Any] = {}
    tree["model"] = _model(model, objects)
    if algorithm is not None:
        name, options = algorithm_section(algorithm)
        tree["algorithm"] = {"name": name, **options}
    if isinstance(data, str) and test is None and (clients is None or is_whole(clients)):
        tree["data"]["name"] = data
    else:
        objects["data"] = Splits(*cast(tuple[Dataset, Dataset], as_splits(data, test)))
        name = objects["data"].train.name
        tree["data"]["name"] = f"own {name}" if name in FORMATS else name  # a format would need its options
    if clients is not None and not is_whole(clients):
        if objects["data"].train.client_column is not None:
            raise BadInput("the data are given client by client: leave clients out")
        objects["data"] = _with_clients(objects["data"], clients)
        partition = {"name": "by-column", "column": GIVEN_CLIENTS}
    elif clients is not None:
        tree["data"]["clients"] = int(clients)
    elif partition is None and "data" in objects and objects["data"].train.client_column is not None:
        partition = ByColumn(objects["data"].train.client_column)
    if partition is not None:
        tree["data"]["partition"] = _partition(partition, objects)
    object_settings: Table = {}
    for key, value in settings.items():
        if key == "metrics":
            _set_metrics(tree, objects, value)
        else:
            _set(tree, object_settings, key, value)
    return parse(tree, source="arguments").with_objects(Objects(settings=object_settings, **objects))


def refuse_unknown_settings(caller: Callable[..., Any], settings: Iterable[str]) -> None:
    """Refuse settings that `compare` or `tune` does not have; the message names the nearest, or where one goes."""
    keys = [*BESIDE_SECTIONS, *(name for kind in SECTIONS.values() for name in kind.model_fields)]
    places = option_places() | {"on_round": ": train a lamina.Simulation, simulation.run(on_round=…)"}
    for key in settings:
        if key not in keys:
            hint = nearest(key, [*keys, *inspect.signature(caller).parameters], places)
            hint = hint or f"; help(lamina.{caller.__name__}) lists them"
            raise BadInput(f"there is no setting '{key}'{hint}")


def algorithm_section(algorithm: Any) -> tuple[str, Table]:
    """Return the name of an algorithm and, of an object or a table, its options."""
    if isinstance(algorithm, str):
        return algorithm, {}
    algorithm = as_algorithm(algorithm)
    name = algorithm.card.name
    if algorithms.registry().get(name) is not type(algorithm):
        raise BadInput(f"the class of the algorithm '{name}' was defined again: also create the algorithm again")
    return name, {option: getattr(algorithm, option) for option in algorithms.options(type(algorithm))}


def compared_algorithms(given: Any) -> dict[str, Table]:
    """Return the tables of `[compare.options]` for algorithms to compare, by their names in the comparison.

    >>> compared_algorithms({"small": algorithms.create("fedlada", alpha=0.05)})["small"]["alpha"]
    0.05
    >>> list(compared_algorithms(["fedavg", algorithms.create("fedlada", alpha=0.05)]))
    ['fedavg', 'fedlada']
    >>> compared_algorithms({"fedper": {"name": "fedavg", "private": ["head.*"]}})["fedper"]["private"]
    ['head.*']
    """
    if isinstance(given, Mapping):
        tables = {}
        for label, algorithm in given.items():
            table = dict(algorithm) if isinstance(algorithm, Mapping) else {}
            settings = {key: table.pop(key) for key in ("private", "channel", "privacy") if key in table}
            name, options = algorithm_section(table or algorithm)
            tables[str(label)] = {"name": name, **options, **settings}
        return tables
    several = [given] if isinstance(given, str | algorithms.Algorithm) else list(given)
    tables = dict(map(algorithm_section, several))
    if len(tables) < len(several):
        raise BadInput("an algorithm is given twice: name the two, as in {'small': FedLada(alpha=0.05), 'large': …}")
    return tables


def _model(model: Any, objects: Table) -> Any:
    if isinstance(model, str | Mapping):
        return model
    if not callable(model):
        raise BadInput(f"model is {short_repr(model)}: give an nn.Module, a function that returns one, or a name")
    objects["model"] = model
    return {"name": type(model).__name__ if isinstance(model, nn.Module) else function_name(model)}


def _partition(partition: Any, objects: Table) -> Any:
    if isinstance(partition, Reallocate):
        return {"base": partition.base.name} | as_table(partition.base, "reallocate")
    if type(partition) in PARTITIONS.values():
        return as_table(partition, partition.name)
    if isinstance(partition, str | Mapping):
        return partition
    objects["partition"] = as_partition(partition)
    return {"name": type(partition).__name__}


def _with_clients(splits: Splits, clients: Sequence[Any]) -> Splits:
    """Return data with a column that names the client of each sample, without samples that belong to no client.

    The samples of each client are in the order of its list, which decides its batches.
    """
    parts = Clients(clients, samples=len(splits.train)).parts
    owners, samples = np.full(len(splits.train), -1), np.arange(len(splits.train))
    for client in range(len(parts)):
        owners[parts[client]] = client
        samples[np.sort(parts[client])] = parts[client]
    train = dataclasses.replace(splits.train, columns={**splits.train.columns, GIVEN_CLIENTS: owners})
    wanted = samples[owners >= 0]
    return splits._replace(train=train if np.array_equal(wanted, np.arange(len(train))) else train.subset(wanted))


def _set_metrics(tree: dict[str, Table], objects: Table, given: Any) -> None:
    """Set the metrics by their names; if some are objects, they also go to `objects`."""
    metrics = find_all(given)
    if metrics is None:
        return
    names = [given] if isinstance(given, str) else given
    if isinstance(names, Sequence) and all(isinstance(name, str) for name in names):
        tree["train"]["metrics"] = list(names)
    else:
        tree["train"]["metrics"] = [metric.name for metric in metrics]
        objects["metrics"] = metrics


def _set(tree: dict[str, Table], object_settings: Table, key: str, value: Any) -> None:
    """Set one key in its section; an object that no file can name goes to `object_settings`."""
    if key == "augmentation":
        refuse_no_augmentation(value)
        if value is None or isinstance(value, str | Augment):
            tree["data"] |= augment_keys(value)
        else:
            object_settings[key] = value
        return
    if key == "channel":
        tree["channel"] = as_channel(value).record() or {}
        return
    if key == "privacy":
        privacy = as_privacy(value)
        if privacy is not None:
            tree["privacy"] = {
                n: v for n, v in (privacy.record() | {"secret": privacy.secret}).items() if v is not None
            }
        return
    if key == "clock":
        clock = as_clock(value)
        if clock is not None:
            tree["clock"] = ({"name": value} if isinstance(value, str) else {}) | clock.record()
        return
    section = next(name for name, kind in SECTIONS.items() if key in kind.model_fields)
    if value is None:
        value = "full" if key == "batch_size" else None
    elif key in ("schedule", "aggregation") and not isinstance(value, str | Mapping):
        classes, name_of = (SCHEDULES, schedule_name) if key == "schedule" else (AGGREGATIONS, aggregation_name)
        value = as_schedule(value) if key == "schedule" else as_aggregation(value)
        if type(value) not in classes.values():
            object_settings[key] = value
        value = as_table(value, name_of(value))
    elif isinstance(value, torch.device):
        value = str(value)
    elif isinstance(value, np.generic):
        value = value.item()
    elif section == "data" and isinstance(value, tuple | np.ndarray | torch.Tensor):  # numbers of clients
        value = np.asarray(value).tolist()
    elif section == "train" and not isinstance(value, str | int | float | list | tuple | Mapping):  # a loss function
        object_settings[key], value = value, None
    if value is not None:
        tree[section][key] = value


# --- the run folder of a simulation ---------------------------------------------------------------------------------


class Recorder:
    """Trains a simulation in a folder, as `lamina run` does; the arguments are the simulation's, as for `describe`."""

    def __init__(self, folder: Path, *, overwrite: bool, **arguments: Any) -> None:
        self.folder, self._overwrite = folder, overwrite
        self._experiment = describe(**arguments)

    def run(self, simulation: Training, last: int, on_round: Callable[[Row], None]) -> None:
        """Train up to a round, from where the folder says the run was; raise `Diverged` if it diverged, even before."""
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists() and not self._overwrite:
            last = max(last, len(MetricsFile(metrics).read().rows))
        if last == 0:
            return
        with self._opened(simulation, last) as (folder, experiment):
            if isinstance(folder, RunFolder) and folder.complete:
                restore([simulation], [folder])
                simulation.history = folder.history
                return
            if folder.diverged is None:
                simulation.state, _ = simulation.start()  # a round that is not in the folder is trained again
                resume([simulation], [folder])
                self._overwrite = False  # the next call continues this run
                stop = Stop(on_round)
                train([simulation], [folder], experiment, stop=stop, on_round=lambda _, row: stop.call(row))
        if folder.diverged is not None:
            raise folder.diverged

    def restore(self, simulation: Training) -> None:
        """Load the rounds that the folder holds of this run, and change nothing in it; `run` refuses another run's."""
        is_new = self._overwrite or not (self.folder / "metrics.jsonl").exists()
        if is_new or Ranks.current().world > 1:  # several processes read it together, in `run`
            return
        with contextlib.suppress(BadInput):
            rounds = int(read_record(self.folder).config["train"]["rounds"])
            with self._opened(simulation, rounds) as (folder, _):
                assert isinstance(folder, RunFolder)
                if folder.diverged is None:
                    restore([simulation], [folder])
                simulation.history = folder.history if folder.ended else folder.history[: simulation.state.round]

    @contextlib.contextmanager
    def _opened(self, simulation: Training, rounds: int) -> Iterator[tuple[RunFolder | RankFolder, Experiment]]:
        """Open the folder for a run of `rounds` rounds; return it with the experiment."""
        experiment = self._experiment.changed(train={"rounds": rounds})
        with LogLines() as lines, kept_threads():
            config = resolved(experiment, simulation)
            folder = open_folder(self.folder, config, overwrite=self._overwrite, lines=lines)
            try:
                yield folder, experiment
            finally:
                folder.close()


@contextlib.contextmanager
def kept_threads() -> Iterator[None]:
    """Restore the number of torch's threads, which training chooses by the size of the model."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
