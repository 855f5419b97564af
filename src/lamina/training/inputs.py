"""Algorithms, models and data as Python passes them: objects, functions that create them, or names."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from lamina import algorithms, models
from lamina.algorithms.contract import Algorithm
from lamina.base import rng
from lamina.base.errors import BadInput, short_repr
from lamina.base.text import listed
from lamina.data import hub
from lamina.data.dataset import Dataset
from lamina.data.joining import as_data
from lamina.data.matching import inherit_normalisation
from lamina.data.readers import sources
from lamina.models.registry import Factory
from lamina.objective.batch import map_batch
from lamina.training.preflight.targets import check_alike


def as_algorithm(algorithm: Any) -> Algorithm:
    """Return an algorithm, given as an object, by name or as a table with a name and options."""
    if isinstance(algorithm, Mapping) and "name" in algorithm:
        return algorithms.create(**algorithm)
    if not isinstance(algorithm, str | Algorithm):
        given = f"the class {algorithm.__name__}" if isinstance(algorithm, type) else short_repr(algorithm)
        if getattr(algorithm, "ndim", 0):  # the targets
            raise BadInput("algorithm is an array: pass the data as a pair, Simulation(model, (x, y), algorithm)")
        raise BadInput(f"algorithm is {given}: give a name or an instance such as lamina.FedLamb()")
    if isinstance(algorithm, Algorithm) and not hasattr(algorithm, "card"):
        raise BadInput(f"the class {type(algorithm).__name__} has no card: decorate it with @lamina.algorithm(...)")
    return algorithms.create(algorithm) if isinstance(algorithm, str) else algorithm


def as_splits(data: Any, test: Any = None) -> tuple[Dataset, Dataset | None]:
    """Return training and test data, given as objects, as a pair of `Dataset`s, or by the name of a data set.

    Either may be a list or a dict with the data sets of the clients. A dict of test data without a key that is a client
    holds test sets by name: runs are judged by the first, which gets the others as `more_tests`.
    """
    if isinstance(data, str):
        data = sources.load(data)
    if isinstance(data, tuple) and len(data) == 2 and all(isinstance(part, Dataset) for part in data):
        data, test = data[0], data[1] if test is None else test
    elif isinstance(data, tuple) and len(data) == 2 and _are_train_and_test(*data):
        raise BadInput(
            "the data are a pair of pairs: pass only (x, y) of the training data there, and the others as test=(x, y); "
            "two inputs and two targets of one shape are a lamina.Dataset(x, y); for the data of two clients, give a "
            "list: [(x, y), (x, y)]"
        )
    train_data = as_data(data)
    if isinstance(test, Mapping) and not hub.is_hub_dataset(test) and not _has_client(train_data, test):
        return train_data, _with_more_tests(train_data, test)
    test_data = None if test is None else as_data(test)
    if test_data is not None:
        _check_clients(train_data, test_data)
        if not isinstance(test, Dataset):
            test_data = inherit_normalisation(test_data, train_data)
        check_alike(train_data, test_data)
    return train_data, test_data


def _with_more_tests(data: Dataset, named: Mapping[Any, Any]) -> Dataset:
    """Return the first of several test sets, with the others."""
    if not named or not all(isinstance(name, str) and name.isidentifier() for name in named):
        raise BadInput(f"test is a dict with the keys {short_repr(list(named))}: name every test set by a word")
    if any(each is None for each in named.values()):
        raise BadInput("a test set in the dict of test data is None: give its data, or leave it out")
    first, *others = (cast(Dataset, as_splits(data, each)[1]) for each in named.values())
    return dataclasses.replace(first, more_tests=dict(zip(list(named)[1:], others, strict=True)))


def _has_client(train: Dataset, test: Mapping[Any, Any]) -> bool:
    """Return whether some key of a dict of test data is a client of the training data, or written almost like one."""
    if train.client_column is None:
        return False
    clients = {str(name).casefold() for name in train.columns[train.client_column].tolist()}
    return any(str(key).casefold() in clients for key in test)


def _check_clients(train: Dataset, test: Dataset) -> None:
    """Refuse test data by client whose clients are not those of the training data."""
    if test.client_column is None:
        return
    if train.client_column is None:
        raise BadInput("the test data are given client by client, but the training data are not: give both so")
    names, tested = (sorted({*data.columns[data.client_column or ""].tolist()}) for data in (train, test))
    unknown = [name for name in tested if name not in names]
    if unknown:
        known = listed([repr(name) for name in names])
        raise BadInput(f"client {unknown[0]!r} has test data but no training data (clients: {known})")


def _are_train_and_test(one: Any, two: Any) -> bool:
    """Return whether two values are a pair (x, y) each, and not several inputs and their targets."""
    pairs = [
        value
        for value in (one, two)
        if isinstance(value, tuple) and len(value) == 2 and all(getattr(part, "ndim", 0) for part in value)
    ]
    sizes = {len(part) for pair in pairs for part in pair}
    return len(pairs) == 2 and (len(sizes) > 1 or all(a.shape[1:] == b.shape[1:] for a, b in zip(*pairs, strict=True)))


def as_model(model: nn.Module | Factory | str | Mapping[str, Any], data: Dataset, seed: int) -> nn.Module:
    """Return a module to train: a copy of one, a new one of a function, one by name or by a table with its options.

    A function and a name give weights that depend only on the seed, the same as in `lamina run`.
    """
    seed = rng.torch_seed(seed, "weights")
    if isinstance(model, Mapping) and "name" in model:
        options = dict(model)
        refuse_given(options)
        return create_model(options.pop("name"), data, seed, **options)
    if isinstance(model, nn.Module):
        try:
            return copy.deepcopy(model)
        except Exception as error:  # whatever an attribute of the user's module raises
            hint = "; use torch.nn.utils.parametrizations.weight_norm" if "weight_norm" in str(error) else ""
            reason = str(error).partition(".")[0]
            raise BadInput(
                f"the model cannot be copied ({reason}){hint}; or give a function that returns it"
            ) from error
    if not (isinstance(model, str) or callable(model)):
        wanted = "an nn.Module, a function that returns one, or a name (`lamina list models`)"
        raise BadInput(f"model is {short_repr(model)}: give {wanted}")
    return create_model(model, data, seed)


def refuse_given(options: Mapping[str, Any]) -> None:
    """Refuse options of a model that lamina gives itself."""
    for key, source in (("seed", "train.seed"), ("classes", "the data"), ("input_shape", "the data")):
        if key in options:
            raise BadInput(f"model.{key} follows from {source}: take it out of [model]")


def create_model(model: Factory | str, data: Dataset, /, seed: int, **options: Any) -> nn.Module:
    """Return a new module for the samples and classes of a data set."""
    shape = map_batch(lambda values: tuple(values.shape[1:]), data.x)  # of a tuple or dict, one shape for each
    return models.create(model, input_shape=shape, classes=data.classes or 1, seed=seed, **options)
