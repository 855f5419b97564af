"""Run one experiment: build it from its configuration, train, and keep its records in a folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import SafetensorError
from safetensors.torch import save

import lamina
from lamina import algorithms, models, rng
from lamina.data import partitions, sources
from lamina.data.dataset import Dataset, Splits
from lamina.data.feed import Augment
from lamina.engines.stacked.ranks import Ranks
from lamina.errors import BadInput, nearest
from lamina.experiment.config import Experiment, Named
from lamina.history import Row
from lamina.plan import SCHEDULES, Schedule, make_schedule
from lamina.simulation import Simulation

THREADED_FROM = 1_000_000  # parameters; below this a second thread costs more than it brings
DEFAULT_CLIENTS = 10


def load_data(experiment: Experiment) -> Splits:
    """The experiment's training and test data."""
    return sources.load(experiment.data.name, experiment.data.dir)


def build(experiment: Experiment, splits: Splits | None = None) -> Simulation:
    """Make the simulation an experiment describes."""
    data, train, run = experiment.data, experiment.train, experiment.run
    algorithm = build_algorithm(experiment)  # before the data are read: a wrong option costs no time
    partition, schedule = build_partition(experiment), build_schedule(experiment)
    splits = splits or load_data(experiment)
    return Simulation(
        build_model(experiment, splits.train),
        splits.train,
        algorithm,
        test=splits.test,
        clients=count_clients(experiment),
        partition=partition,
        participation=train.participation,
        sampling=train.sampling,
        batch_size=train.batch_size,
        epochs=train.epochs,
        local_steps=train.local_steps,
        lr=train.lr,
        schedule=schedule,
        clip=train.clip,
        weighting=train.weighting,
        loss=train.loss,
        augmentation=Augment(data.augment_pad, data.augment_flip) if data.augment else None,
        seed=train.seed,
        device=run.device,
        engine=run.engine,
        precision=run.precision,
        evaluate_every=run.evaluate_every,
        client_metrics=run.client_metrics,
        trust_ratios=run.trust_ratios,
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


def versions() -> dict[str, str]:
    """What the numbers depend on beside the configuration; the first key marks a file as lamina's."""
    return {"lamina": lamina.__version__, "torch": torch.__version__, "python": platform.python_version()}


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
    config["train"]["lr"] = simulation.plan.lr
    config["train"]["schedule"] |= _values(simulation.plan.schedule)
    config["run"]["device"] = str(simulation.device)
    config["run"]["threads"] = choose_threads(experiment, simulation.objective.start.numel())
    return {**versions(), **config}


def _values(record: Any) -> dict[str, Any]:
    """The fields of a frozen record by name."""
    return {name: getattr(record, name) for name in _fields(type(record))}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write valid JSON, which knows no infinity: such numbers become strings."""
    path.write_text(json.dumps(_plain(value), indent=2, default=str, allow_nan=False) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- the folder --------------------------------------------------------------------------------------------------


def check_writable(folder: Path) -> None:
    """Refuse, before any work is done, a folder that could not be made or written to."""
    try:
        place = folder.absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            raise BadInput(f"'{place}' is a file, not a folder: choose another with --out")
        usable = os.access(place, os.R_OK | os.W_OK | os.X_OK)
    except OSError as error:
        raise cannot_write(folder, error) from error
    if not usable:
        raise BadInput(f"cannot write to the folder '{folder}': no permission in '{place}'; choose another with --out")


def is_ours(folder: Path) -> bool:
    """Whether lamina wrote the folder's config.json."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "lamina" in config


def cannot_write(folder: Path, error: OSError) -> BadInput:
    """The error for a folder the system refuses to write to."""
    return BadInput(f"cannot write to the folder '{folder}': {error.strerror or error}")


class RunFolder:
    """The records of a run: ``config.json``, ``metrics.jsonl`` (a line per finished round), ``model.safetensors``.

    Nothing is written, and with `overwrite` nothing replaced, before the first round is finished: a run that fails
    at once leaves no folder that would stand in the way of the corrected one.
    """

    FILES = ("config.json", "metrics.jsonl", "model.safetensors", "model.safetensors.partial")

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self.path = path
        self._metrics: TextIO | None = None
        check_writable(path)
        found = [inner.name for inner in path.iterdir()] if path.exists() else []
        foreign = sorted(set(found) - set(self.FILES))
        if foreign or (found and not is_ours(path)):
            holds = f"holds other files ('{foreign[0]}')" if foreign else "holds files that are not a run's"
            raise BadInput(f"the folder '{path}' {holds}: choose a new or an empty one with --out")
        if found and not overwrite:
            raise BadInput(f"the folder '{path}' holds another run: choose another with --out, or give --overwrite")
        self._replaced = found

    def record(self, row: Row, config: Mapping[str, Any]) -> None:
        """Append a finished round, the first time with the configuration; it is on disk when this returns."""
        # valid JSON has no NaN and no infinity
        numbers = {name: value if math.isfinite(value) else None for name, value in row.items()}
        try:
            if self._metrics is None:
                self._metrics = self._begin(config)
            self._metrics.write(json.dumps(numbers, allow_nan=False) + "\n")
            self._metrics.flush()
            os.fsync(self._metrics.fileno())
        except FileExistsError as error:
            raise BadInput(f"another run is writing to the folder '{self.path}': choose another with --out") from error
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def _begin(self, config: Mapping[str, Any]) -> TextIO:
        self.path.mkdir(parents=True, exist_ok=True)
        for name in self._replaced:
            (self.path / name).unlink(missing_ok=True)
        metrics = (self.path / "metrics.jsonl").open("x", encoding="utf-8")  # x: two runs never share the file
        write_json(self.path / "config.json", config)
        return metrics

    def save_model(self, simulation: Simulation) -> Path:
        """Write the trained weights."""
        target, partial = self.path / "model.safetensors", self.path / "model.safetensors.partial"
        state = {name: t.detach().cpu().contiguous().clone() for name, t in simulation.model.state_dict().items()}
        try:
            partial.write_bytes(save(state))  # safetensors' own save_file would hide the file from the group
            partial.replace(target)
        except (OSError, SafetensorError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise BadInput(f"cannot save the model to '{target}': {reason}; the metrics are kept") from error
        return target

    def close(self) -> None:
        """Close the metrics; no more rounds can follow."""
        if self._metrics is not None:
            self._metrics.close()


def join_ranks(experiment: Experiment) -> tuple[Experiment, Ranks]:
    """Under torchrun, join the other processes: each takes a share of every cohort, on a GPU of its own if there are.

    gloo and NCCL, one node or many, are torch.distributed's; nothing is decided here but the device.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return experiment, Ranks(0, 1)
    device = experiment.run.device
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if experiment.run.engine == "loop":
        raise BadInput("torchrun shares the cohort of the stacked engine: run.engine = 'loop' runs in one process only")
    torch.distributed.init_process_group("nccl" if on_gpu else "gloo")
    settings = experiment.run.model_copy(update={"device": device, "engine": "stacked"})
    return experiment.model_copy(update={"run": settings}), Ranks.current()


def run(
    simulation: Simulation,
    experiment: Experiment,
    folder: RunFolder | None,
    on_round: Callable[[Row], None] | None = None,
) -> None:
    """Run an experiment to its end; every finished round is on disk before the next begins.

    Without a folder nothing is written: under torchrun only the first process keeps records.
    """
    torch.set_num_threads(choose_threads(experiment, simulation.objective.start.numel()))
    config = resolved(experiment, simulation)

    def finished(row: Row) -> None:
        if folder is not None:
            folder.record(row, config)
        if on_round is not None:
            on_round(row)

    try:
        simulation.run(experiment.train.rounds, finished)
        if folder is not None:
            folder.save_model(simulation)
    finally:
        if folder is not None:
            folder.close()
