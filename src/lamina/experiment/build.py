"""Build what an experiment file describes: data, model, algorithm, schedule, and the simulation of them all."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch

from lamina import aggregation, algorithms, models, rng
from lamina.clients import DEFAULT_CLIENTS
from lamina.data import partitions, sources
from lamina.data.dataset import Dataset, Splits
from lamina.data.feed import Augment
from lamina.devices import choose_device
from lamina.diagnostics import check_names
from lamina.engines.stacked.engine import Stacked
from lamina.engines.stacked.ranks import Ranks
from lamina.errors import BadInput, nearest
from lamina.experiment.config import Experiment, Named
from lamina.experiment.objects import describe_code
from lamina.inputs import as_algorithm, create_model
from lamina.metrics import Metric, description, find_all
from lamina.named import field_values
from lamina.protocol import Protocol, Settings, describe
from lamina.schedules import SCHEDULES, Schedule, make_schedule
from lamina.storage.identity import splits_digest
from lamina.training import Training

THREADED_FROM = 1_000_000  # parameters; below this a second thread costs more than it brings
DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")  # what a file may name; the last two are torch's, and untested


def load_data(experiment: Experiment) -> Splits:
    """Return the training and test data; with `data.validation`, held-out training data replace the test data."""
    data = experiment.data
    splits = experiment.objects.data or sources.load(data.name, data.dir, client=data.client, **data.options())
    if experiment.data.validation is None:
        return splits
    return Splits(*splits.train.holdout(experiment.data.validation, experiment.train.seed))


def build(experiment: Experiment, splits: Splits | None = None, *, like: Training | None = None) -> Training:
    """Return the training run of an experiment; `like`, which differs only in numbers, lends it its engine."""
    data, run = experiment.data, experiment.run
    check_device(run.device)
    algorithm = as_algorithm(build_algorithm(experiment))  # before the data are read: a mistake in it costs no time
    partition, settings, metrics = build_partition(experiment), settings_of(experiment), build_metrics(experiment)
    splits = splits or load_data(experiment)
    return Training(
        build_model(experiment, splits.train),
        splits.train,
        splits.test,
        algorithm,
        Protocol.of(algorithm, settings),
        device=choose_device(run.device),
        clients=count_clients(experiment),
        partition=partition,
        heldout_clients=data.heldout_clients,
        local_test=data.local_test,
        metrics=metrics,
        client_metrics=run.client_metrics,
        evaluate_every=run.evaluate_every,
        engine=like or run.engine,
        precision=run.precision,
        deterministic=run.deterministic,
        trust_ratios=run.trust_ratios,
        diagnostics=check_names(run.diagnostics or ()),
    )


def settings_of(experiment: Experiment) -> Settings:
    """Return the settings of the experiment's protocol, as arguments of `Simulation` and `Federation`."""
    data, train = experiment.data, experiment.train
    same = {name: getattr(train, name) for name in type(train).model_fields if name in Protocol.__dataclass_fields__}
    augment_options = {each.name: getattr(data, f"augment_{each.name}") for each in dataclasses.fields(Augment)}
    own = {
        "batch_size": None if train.batch_size == "full" else train.batch_size,
        "epochs": train.epochs if train.local_steps is None else None,
        "schedule": build_schedule(experiment),
        "aggregation": build_aggregation(experiment),
        "augmentation": Augment(**augment_options) if data.augment else None,
    }
    return cast(Settings, same | own | dict(experiment.objects.settings))


def check_device(name: str) -> None:
    """Refuse an unknown or unavailable device."""
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        raise BadInput(f"run.device = '{name}': must be auto, cpu or cuda (the second GPU is cuda:1)")
    if kind == "cuda" and not torch.cuda.is_available():
        raise BadInput(
            f"run.device = '{name}': torch finds no GPU here; cpu or auto runs without one, and `lamina doctor` "
            "says what is missing"
        )


def build_algorithm(experiment: Experiment) -> algorithms.Algorithm:
    """Return the algorithm of an experiment."""
    section = experiment.algorithm
    names = algorithms.options(algorithms.find(section.name))
    options = _checked_options("algorithm", section, names, other_keys=("name", "preset"))
    return algorithms.create(section.name, section.preset, **options)


def build_model(experiment: Experiment, data: Dataset) -> torch.nn.Module:
    """Return the model, with initial weights that depend only on the seed: the same for every algorithm."""
    section, given = experiment.model, experiment.objects.model
    for key, source in (("seed", "train.seed"), ("classes", "the data"), ("input_shape", "the data")):
        if key in section.options():
            raise BadInput(f"model.{key} follows from {source}: take it out of [model]")
    if isinstance(given, torch.nn.Module):
        return given  # a simulation copies it
    card = models.registry().get(section.name) if given is None else None
    options = _checked_options("model", section, card and card.options)
    return create_model(given or section.name, data, rng.torch_seed(experiment.train.seed, "weights"), **options)


def build_partition(experiment: Experiment) -> partitions.Partition:
    """Return how the samples are split among the clients."""
    if experiment.objects.partition is not None:
        return experiment.objects.partition
    section, options = experiment.data.partition, experiment.data.partition.options()
    is_moving = section.name == "reallocate"
    names = _fields(partitions.PARTITIONS.get(str(options.get("base", "iid")) if is_moving else section.name))
    if is_moving and names is not None:
        names = ["base", *names]
    return partitions.make(section.name, **_checked_options("data.partition", section, names))


def build_schedule(experiment: Experiment) -> Schedule:
    """Return how the learning rate changes over rounds."""
    if "schedule" in experiment.objects.settings:
        return cast(Schedule, experiment.objects.settings["schedule"])
    section = experiment.train.schedule
    options = _checked_options("train.schedule", section, _fields(SCHEDULES.get(section.name)))
    if section.name == "cosine":
        options.setdefault("rounds", experiment.train.rounds)
    return make_schedule(section.name, **options)


def build_aggregation(experiment: Experiment) -> aggregation.Aggregation:
    """Return how the server combines the uploads."""
    if "aggregation" in experiment.objects.settings:
        return cast(aggregation.Aggregation, experiment.objects.settings["aggregation"])
    section = experiment.train.aggregation
    names = _fields(aggregation.AGGREGATIONS.get(section.name))
    return aggregation.make(section.name, **_checked_options("train.aggregation", section, names))


def build_metrics(experiment: Experiment) -> Sequence[Metric] | None:
    """Return the metrics; None for the default."""
    return find_all(experiment.objects.metrics or experiment.train.metrics)


def build_parts(experiment: Experiment) -> None:
    """Refuse a wrong option of the algorithm, the partition and so on before anything runs."""
    for build_part in (build_algorithm, build_partition, build_schedule, build_aggregation, build_metrics):
        build_part(experiment)


def count_clients(experiment: Experiment) -> int | None:
    """Return the number of clients; None if a column names them."""
    if experiment.data.clients is None and experiment.data.partition.name != "by-column":
        return DEFAULT_CLIENTS
    return experiment.data.clients


def choose_threads(experiment: Experiment, parameters: int) -> int:
    """Return the number of threads for torch: one for small models, which a second one slows down."""
    if experiment.run.threads is not None:
        return experiment.run.threads
    return 1 if parameters < THREADED_FROM else max(1, (os.cpu_count() or 1))


def _fields(cls: type[Any] | None) -> list[str] | None:
    return None if cls is None else [field.name for field in dataclasses.fields(cls)]


def _checked_options(
    place: str, section: Named, names: Iterable[str] | None, other_keys: Sequence[str] = ("name",)
) -> dict[str, Any]:
    """Return the options of a section; refuse one that is not among the names, if they are known."""
    options = section.options()
    names = list(options if names is None else names)
    for key in options:
        if key not in names:
            has = f"options of {section.name}: {', '.join(names)}" if names else f"{section.name} has no options"
            raise BadInput(f"[{place}] has no key '{key}'{nearest(key, [*other_keys, *names])} ({has})")
    return options


def resolved(experiment: Experiment, simulation: Training) -> dict[str, Any]:
    """Return the whole configuration, with every default and every "auto" replaced by the value used."""
    config = experiment.model_dump()
    partition = build_partition(experiment)
    config["data"]["clients"] = simulation.reserved.dealt
    # Settings of later versions are left out unless they are used, so that run folders from before can be resumed.
    later = (("data", "client"), ("data", "heldout_clients"), ("data", "local_test"), ("train", "metrics"))
    for section, key in later:
        if config[section][key] is None:
            del config[section][key]
    if experiment.train.metrics is not None:
        config["metrics"] = description(simulation.metrics)
    if isinstance(partition, partitions.Reallocate):
        config["data"]["partition"] = {"name": "reallocate", "base": "iid", **experiment.data.partition.options()}
        partition = partition.base
    config["data"]["partition"] |= field_values(partition)
    if experiment.model.name in models.registry() and experiment.objects.model is None:
        defaults = models.registry()[experiment.model.name].options
        config["model"] = {"name": experiment.model.name, **defaults, **experiment.model.options()}
    config["algorithm"] |= field_values(simulation.algorithm)
    config["train"]["lr"] = simulation.protocol.lr
    config["train"]["schedule"] |= field_values(simulation.protocol.schedule)
    combination = simulation.protocol.aggregation
    if isinstance(combination, aggregation.Mean):
        del config["train"]["aggregation"]  # for the same reason
    else:
        config["train"]["aggregation"] = describe(combination, aggregation.name_of(combination))
    config["run"]["device"] = str(simulation.device)
    config["run"]["engine"] = engine.forward.name if isinstance(engine := simulation.engine, Stacked) else "loop"
    config["run"]["threads"] = choose_threads(experiment, simulation.objective.start.numel())
    config["run"]["ranks"] = Ranks.current().world
    if experiment.algorithm.name not in algorithms.registry():  # a report does not run the user's code to learn it
        config["title"] = simulation.algorithm.card.title
    describe_code(config, simulation)
    experiment.objects.describe(config, simulation)
    if experiment.objects.data is None and experiment.data.name not in sources.SOURCES:
        # files of the user's own may change between two runs
        config["data_digest"] = splits_digest(simulation.train_data, simulation.test_data)
        if simulation.train_data.class_names is not None:
            config["class_names"] = list(simulation.train_data.class_names)
    return config
