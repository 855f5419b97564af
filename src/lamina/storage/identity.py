"""The identity of a run: the settings that decide its trajectory, stored with every checkpoint.

A checkpoint continues only the run that wrote it. What does not belong to the identity may differ when a run is
resumed: the number of rounds, the device, the engine, the precision, the test data, what is evaluated and how often.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from lamina import rng
from lamina.aggregation import AGGREGATIONS
from lamina.algorithms import registry
from lamina.algorithms.contract import Algorithm, options
from lamina.batch import map_batch
from lamina.clients import Clients
from lamina.contents import function_digest
from lamina.data.dataset import Dataset
from lamina.data.feed import Augment
from lamina.errors import BadInput
from lamina.losses import LOSSES
from lamina.objective import Objective
from lamina.plan import Plan
from lamina.protocol import PROBED_ROUNDS, Protocol, function_name
from lamina.schedules import SCHEDULES, Schedule
from lamina.storage.files import as_json
from lamina.text import listed

Identity = Mapping[str, Any]  # by the name of the setting, as JSON gives it back

CHUNK_BYTES = 1 << 24  # how much of the data is hashed at a time
DIGESTS_IN_WORDS = {
    "model": "the model's layers or frozen weights",
    "model_attributes": "the settings of the model's layers, such as a dropout rate",
    "loss_attributes": "the values that the loss holds",
    "partition": "the split of the samples among clients",
    "training_data": "the training data",
}
SAME_LOSS = 1e-3  # relative; devices round differently

_data_digests: WeakKeyDictionary[Dataset, str] = WeakKeyDictionary()  # the runs of a comparison share their data


def of_run(algorithm: Algorithm, objective: Objective, plan: Plan, data: Dataset | None = None) -> Identity:
    """Return the identity of a run.

    Args:
        algorithm: the algorithm, with its options.
        objective: the model and its loss.
        plan: the training settings and the clients.
        data: the training data; None on a federation's server, which does not see them.
    """
    protocol = plan.protocol
    facts = {
        "algorithm": algorithm.card.name,
        **{f"algorithm.{name}": getattr(algorithm, name) for name in options(type(algorithm))},
        "model": _model_digest(objective),
        "model_attributes": _hash([objective.attributes, sorted(objective.always_evaluated)]),
        "parameters": objective.layers.size,
        "clients": plan.clients.count,
        **{each.name: getattr(protocol, each.name) for each in dataclasses.fields(protocol)},
        "loss": _loss_name(objective),
        "loss_attributes": function_digest(objective.loss),
        "schedule": _schedule(protocol.schedule),
        "epochs": (protocol.epochs or 1) if protocol.local_steps is None else None,
        "aggregation": _described(protocol.aggregation),
        "augmentation": None if protocol.augmentation is None else _described(protocol.augmentation),
    }
    if data is not None:
        facts |= {
            "samples": len(data),
            "sample_shape": map_batch(lambda values: list(values.shape[1:]), data.x),
            "partition": _partition_digest(plan.clients),
            "training_data": _data_digest(data),
            "loss_value": _loss_value(objective, data),
        }
    return {name: _plain(value) for name, value in facts.items()}


def refuse_other(folder: Path, number: int, stored: Identity, own: Identity) -> None:
    """Refuse the checkpoint of another run; the line names the settings that differ, with both values.

    A setting that the checkpoint lacks was added later: it had its default.
    """
    stored = {**_defaults(own), **stored}
    differing = [name for name in stored if name in own and not _same(name, stored[name], own[name])]
    if "algorithm" in differing:  # its options are others, too: the name says enough
        differing = [name for name in differing if not name.startswith("algorithm.")]
    if differing:
        named = listed([_difference(name, stored[name], own[name]) for name in differing])
        raise BadInput(
            f"the checkpoint of round {number} in '{folder}' is of another run: {named}; use the settings it was "
            "written with, or another folder"
        )


def _defaults(own: Identity) -> Identity:
    """Return the defaults of the settings of a run and of the options of its algorithm."""
    cls = registry().get(own["algorithm"])
    prefixes = {"": Protocol} | ({} if cls is None else {"algorithm.": cls})
    return {prefix + name: value for prefix, kind in prefixes.items() for name, value in _fields(kind).items()}


def _fields(kind: type[Any]) -> Identity:
    """Return the defaults of a record's fields, by name."""
    fields = {each.name: each.default for each in dataclasses.fields(kind)}
    return {name: _plain(value) for name, value in fields.items() if value is not dataclasses.MISSING}


def _without_new_fields(words: str, stored: str) -> str:
    """Return a described record without the fields that the stored one lacks, if they have their defaults."""
    name, _, inner = words.removesuffix(")").partition("(")
    kinds: list[type[Any]] = [Augment, *SCHEDULES.values(), *AGGREGATIONS.values()]
    kind = next((one for one in kinds if one.__name__ == name), None)
    new = [f"{key}={value}" for key, value in _fields(kind).items() if f"{key}=" not in stored] if kind else []
    return f"{name}({', '.join(part for part in re.split(r', (?=[a-z_]+=)', inner) if part not in new)})"


def _difference(name: str, stored: Any, own: Any) -> str:
    """Return in words how a setting differs; of a digest, only that it does."""
    if name in DIGESTS_IN_WORDS and "(" not in f"{stored}{own}":  # a partition may be described by its options
        return f"{DIGESTS_IN_WORDS[name]} ({name}) changed"
    return f"{name} = {_shown(stored)} (here {_shown(own)})"


def _shown(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)


def _same(name: str, stored: Any, own: Any) -> bool:
    if name in ("schedule", "aggregation", "augmentation") and stored and own and "(" in own:
        return bool(stored in (own, _without_new_fields(own, stored)))
    if name != "loss_value":
        return bool(stored == own)
    return stored is None or own is None or math.isclose(stored, own, rel_tol=SAME_LOSS, abs_tol=1e-6)


# --- settings as text and numbers -----------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """Return a setting as JSON would give it back; numpy's numbers are plain ones."""
    return as_json(value.item() if isinstance(value, np.generic) else value)


def _described(value: Any) -> str:
    """Return an object in words that are the same in every process: no addresses, as a default repr has."""
    name = type(value).__qualname__
    if not dataclasses.is_dataclass(value):
        return name
    fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return f"{name}({', '.join(f'{key}={inner}' for key, inner in fields.items())})"


def _schedule(schedule: Schedule) -> str:
    """Return the schedule in words; one of the user's own that is no dataclass is told by its first rates."""
    words = _described(schedule)
    if dataclasses.is_dataclass(schedule):
        return words
    factors = [float(schedule.factor(number)) for number in range(1, PROBED_ROUNDS + 1)]
    return f"{words} {_hash(factors)}"


def _loss_name(objective: Objective) -> str:
    loss = objective.loss
    known = [name for name, function in LOSSES.items() if function is loss]
    return known[0] if known else function_name(loss)


def _loss_value(objective: Objective, data: Dataset) -> float | None:
    """Return a user's loss at made-up outputs, because two functions may share a name; None if it cannot be told."""
    if _loss_name(objective) in LOSSES:
        return None
    try:
        with torch.no_grad():
            inputs = data.inputs(slice(2), objective.dtype)
            like = objective.outputs(objective.start, objective.buffers, inputs, train=False)
            made_up = torch.linspace(-1, 1, like.numel(), dtype=like.dtype, device=like.device).reshape(like.shape)
            value = float(objective.loss(made_up, data.y[:2]).double().mean())
    except Exception:  # whatever a user's loss raises on such outputs
        return None
    return value if math.isfinite(value) else None


# --- digests --------------------------------------------------------------------------------------------------------


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _model_digest(objective: Objective) -> str:
    """Return a digest of the module's layers and of the weights that do not train; the others are in the checkpoint."""
    return _hash(
        [
            repr(objective.module),
            str(objective.dtype),
            {name: list(shape) for name, shape in objective.layers.shapes.items()},
            {name: list(buffer.shape) for name, buffer in objective.buffers.items()},
            {name: content_digest(value) for name, value in objective.frozen.items()},
        ]
    )


def _partition_digest(clients: Clients) -> str:
    if clients.moving is not None:
        partition, _, seed, samples = clients.moving
        return f"{_described(partition)} {_hash([seed, samples])}"
    parts = clients.parts
    return hashlib.sha256(b"".join(part.astype("<i8").tobytes() for part in (parts.bounds, parts.samples))).hexdigest()[
        :16
    ]


def _data_digest(data: Dataset) -> str:
    """Return a digest of samples, labels and normalisation; made once per data set."""
    if data not in _data_digests:
        facts = [_plain(data.mean), _plain(data.std), map_batch(content_digest, data.x), content_digest(data.y)]
        _data_digests[data] = _hash(facts)
    return _data_digests[data]


def dataset_digest(data: Dataset) -> str:
    """Return a digest of a data set's samples, labels and normalisation, the same on every device."""
    return _data_digest(data)


def structure_digest(objective: Objective) -> str:
    """Return a digest of a model's layers, plain attributes and frozen weights; trainable weights do not count."""
    return _hash([_model_digest(objective), objective.attributes, sorted(objective.always_evaluated)])


def splits_digest(train: Dataset, test: Dataset | None) -> str:
    """Return a digest of the contents of training and test data."""
    return _hash([_data_digest(data) for data in (train, test) if data is not None])


def content_digest(values: Tensor) -> str:
    """Return a digest of a tensor's type, shape and bytes that is the same on every device.

    Sums of 64-bit words, each times an odd number that depends on its place, tell any change of one word for certain,
    and take a few milliseconds on a GPU, where copying the data to the host and hashing them would take seconds.
    """
    if values.device.type not in ("cpu", "cuda"):
        values = values.cpu()
    flat = values.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8) if flat.numel() else flat.new_zeros(0, dtype=torch.uint8)
    sums, odd = [], torch.zeros(0, dtype=torch.int64, device=values.device)
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        padded = torch.zeros(-(-len(chunk) // 8) * 8, dtype=torch.uint8, device=values.device)
        padded[: len(chunk)] = chunk
        words = padded.view(torch.int64)
        if len(odd) < len(words):
            odd = rng.fork(len(data), torch.arange(len(words), device=values.device)) | 1
        sums.append((words * odd[: len(words)]).sum())
    return _hash([str(values.dtype), list(values.shape), torch.stack(sums).tolist() if sums else []])
