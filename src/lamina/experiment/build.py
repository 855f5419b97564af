"""Build what an experiment file describes: data, model, algorithm, schedule, and the simulation of them all."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, cast

import torch

from lamina import algorithms, models
from lamina.algorithms.contract import has_client_models
from lamina.base import rng
from lamina.base.errors import BadInput
from lamina.base.registry import field_values
from lamina.base.text import listed, plural
from lamina.base.workers import this_worker
from lamina.data import partitions
from lamina.data.cropping import with_cropped_test
from lamina.data.dataset import Dataset, Splits
from lamina.data.feed import Augment
from lamina.data.partitions import Partition
from lamina.data.readers import sources
from lamina.engines.devices import choose_device
from lamina.engines.ranks import Ranks
from lamina.experiment.config import Experiment
from lamina.experiment.objects import describe_code
from lamina.rounds import aggregation
from lamina.rounds.clients import DEFAULT_CLIENTS
from lamina.rounds.schedules import Schedule, make_schedule
from lamina.rounds.settings import TrainArguments, TrainSettings
from lamina.storage.identity import splits_digest
from lamina.training.inputs import as_algorithm, create_model, refuse_given
from lamina.training.metrics import ACCURACY, Metric, description, find_all, of_column
from lamina.training.training import RunOptions, Training

THREADED_FROM = 1_000_000  # parameters; below this a second thread costs more than it brings


def load_data(experiment: Experiment) -> Splits:
    """Return the training and test data; with `data.validation`, held-out training data replace all test data."""
    data = experiment.data
    splits = experiment.objects.data or sources.load(data.name, data.dir, client=data.client, **data.options())
    if data.validation is not None:
        return hold_out(experiment, splits)
    return splits if data.test_crop_pad is None else with_cropped_test(splits, data.test_crop_pad)


def hold_out(experiment: Experiment, splits: Splits) -> Splits:
    """Split off the part of the training data that settings are chosen on, in place of test data.

    It is by client if the test data are.
    """
    data, (train, test) = experiment.data, splits
    rest, held_out = train.holdout(cast(float, data.validation), experiment.train.seed)
    partition, heldout = build_partition(experiment), data.heldout_clients
    named = isinstance(heldout, Sequence) and all(isinstance(one, str) for one in heldout)
    if heldout is not None and not named and isinstance(partition, partitions.ByColumn):
        column = partition.column
        lost = sorted(set(train.columns[column].tolist()) - set(rest.columns[column].tolist()))
        if lost:  # the others are numbered again: a client that never trains would train here
            who = f"{plural(len(lost), 'client')} ({listed([str(one) for one in lost], most=3)})"
            raise BadInput(
                f"{who} would have no sample while {data.validation:.0%} of the training data are held out to choose "
                f"settings, and the others would have other numbers: give "
                f"heldout_clients as values of '{column}', or select on the test data (select = \"test\")"
            )
    if test is None or test.client_column is None:
        held_out = dataclasses.replace(held_out, client_column=None)  # all of it together chooses
    return Splits(rest, held_out)


def has_own_models(experiment: Experiment) -> bool:
    """Return whether clients use models of their own: with private parts, or by the algorithm."""
    return bool(experiment.train.private) or has_client_models(build_algorithm(experiment))


def build(experiment: Experiment, splits: Splits | None = None) -> Training:
    """Return the training run of an experiment."""
    data, run = experiment.data, experiment.run
    device = choose_device(run.device)
    options = RunOptions(**{each.name: getattr(run, each.name) for each in dataclasses.fields(RunOptions)})
    algorithm, protocol, partition, metrics = build_parts(experiment)
    as_algorithm(algorithm)  # refuses a class without a card
    protocol.rate(experiment.train.rounds)  # refuses a schedule that ends before
    splits = splits or load_data(experiment)
    return Training(
        build_model(experiment, splits.train),
        splits.train,
        splits.test,
        algorithm,
        protocol,
        options,
        device=device,
        clients=count_clients(experiment),
        partition=partition,
        heldout_clients=data.heldout_clients,
        local_test=data.local_test,
        metrics=metrics,
        patience=experiment.train.patience,
    )


def settings_of(experiment: Experiment) -> TrainArguments:
    """Return the settings of the experiment's protocol, as arguments of `Simulation` and `Federation`."""
    data, train, objects = experiment.data, experiment.train, experiment.objects.settings
    privacy = experiment.privacy
    same = {
        name: getattr(train, name) for name in type(train).model_fields if name in TrainSettings.__dataclass_fields__
    }
    # a run whose noise is given does not depend on the number of rounds: it can be resumed for more of them
    planned = None if privacy is None or privacy.noise_multiplier is not None else train.rounds
    augment_options = {each.name: getattr(data, f"augment_{each.name}") for each in dataclasses.fields(Augment)}
    augment = Augment(**augment_options)
    converted = {
        "batch_size": None if train.batch_size == "full" else train.batch_size,
        "epochs": train.epochs if train.local_steps is None else None,
        "schedule": objects.get("schedule") or build_schedule(experiment),
        "aggregation": objects.get("aggregation")
        or aggregation.make(train.aggregation.name, **train.aggregation.options()),
        "channel": experiment.channel.model_dump(),
        "privacy": None if privacy is None else privacy.model_dump() | {"rounds": privacy.rounds or planned},
        "clock": None if experiment.clock is None else experiment.clock.table(),
        "augmentation": data.augment if isinstance(data.augment, str) else augment if data.augment else None,
    }
    return cast(TrainArguments, same | converted | dict(objects))


def build_algorithm(experiment: Experiment) -> algorithms.Algorithm:
    """Return the algorithm of an experiment."""
    section = experiment.algorithm
    return algorithms.create(section.name, section.preset, **section.options())


def build_model(experiment: Experiment, data: Dataset) -> torch.nn.Module:
    """Return the model, with initial weights that depend only on the seed: the same for every algorithm."""
    section, given = experiment.model, experiment.objects.model
    refuse_given(section.options())
    if isinstance(given, torch.nn.Module):
        return given  # a simulation copies it
    seed = rng.torch_seed(experiment.train.seed, "weights")
    return create_model(given or section.name, data, seed, **section.options())


def build_partition(experiment: Experiment) -> Partition:
    """Return how the samples are split among the clients."""
    if experiment.objects.partition is not None:
        return experiment.objects.partition
    section = experiment.data.partition
    return partitions.make(section.name, **section.options())


def build_schedule(experiment: Experiment) -> Schedule:
    """Return how the learning rate changes over rounds."""
    section = experiment.train.schedule
    length = {"rounds": experiment.train.rounds} if section.name == "cosine" else {}
    return make_schedule(section.name, **length | section.options())


def build_parts(
    experiment: Experiment,
) -> tuple[algorithms.Algorithm, TrainSettings, Partition, Sequence[Metric] | None]:
    """Return the parts of an experiment that need no data; refuse a wrong option of any of them."""
    algorithm = build_algorithm(experiment)
    protocol = TrainSettings.of(algorithm, settings_of(experiment))
    # None: the default metrics
    metrics = find_all(experiment.objects.metrics or experiment.train.metrics)
    return algorithm, protocol, build_partition(experiment), metrics


def count_clients(experiment: Experiment) -> int | None:
    """Return the number of clients; None if a column names them."""
    if experiment.data.clients is None and experiment.data.partition.name != "by-column":
        return DEFAULT_CLIENTS
    return experiment.data.clients


def choose_threads(experiment: Experiment, parameters: int) -> int:
    """Return the number of threads for torch: one for small models, which a second one slows down."""
    if experiment.run.threads is not None:
        return experiment.run.threads
    return 1 if parameters < THREADED_FROM else max(1, (os.cpu_count() or 1) // this_worker().here)


def chosen_target(experiment: Experiment, metric: str) -> float | None:
    """Return the accuracy to reach; if runs are judged by another metric, its target in the file, if any."""
    compare = experiment.compare
    return compare.target if of_column(metric) is ACCURACY or "target" in compare.model_fields_set else None


def resolved(experiment: Experiment, simulation: Training) -> dict[str, Any]:
    """Return the whole configuration, with every default and every "auto" replaced by the value used."""
    config = experiment.model_dump()
    partition = build_partition(experiment)
    config["data"]["clients"] = simulation.reserved.dealt
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
    config["train"]["aggregation"] |= field_values(simulation.protocol.aggregation)
    protocol = simulation.protocol
    private = None if protocol.privacy is None else protocol.privacy.record()
    for name, record in {"channel": protocol.channel.record(), "privacy": private}.items():
        config[name] = record
        if record is None:
            del config[name]
    if simulation.protocol.clock is not None:
        config["clock"] |= simulation.protocol.clock.record()
    config["compare"]["target"] = chosen_target(experiment, simulation.metric)
    config["run"]["device"] = str(simulation.device)
    config["run"]["engine"] = simulation.engine.name
    config["run"]["threads"] = choose_threads(experiment, simulation.objective.start.numel())
    config["run"]["ranks"] = Ranks.current().world
    if experiment.algorithm.name not in algorithms.registry():  # a report does not run the user's code to learn it
        config["title"] = simulation.algorithm.card.title
    describe_code(config, simulation, experiment.objects)
    experiment.objects.describe(config, simulation, partition)
    if experiment.objects.data is None and experiment.data.name not in sources.SOURCES:
        # files of the user's own may change between two runs
        config["data_digest"] = splits_digest(simulation.train_data, simulation.test_data, partition)
        if simulation.train_data.class_names is not None:
            config["class_names"] = list(simulation.train_data.class_names)
    return config
