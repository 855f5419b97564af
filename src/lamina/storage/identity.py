"""The identity of a run: the settings that decide its trajectory, stored with every checkpoint.

A checkpoint continues only the run that wrote it. What does not belong to the identity may differ when a run is
resumed: the number of rounds, the device, the engine, the precision, the test data, what is evaluated and how often.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm
from lamina.algorithms.declaration import options
from lamina.base import rng
from lamina.base.text import listed
from lamina.data.dataset import Dataset
from lamina.data.feed import as_augmentation
from lamina.data.mapped import Mapped
from lamina.data.partitions import Partition, columns_read
from lamina.objective.batch import map_batch
from lamina.objective.fingerprint import code_digests, is_laminas, value_digest
from lamina.objective.losses import LOSSES, Loss, as_loss
from lamina.objective.objective import Objective
from lamina.rounds.clients import Clients
from lamina.rounds.plan import Plan
from lamina.rounds.settings import TrainSettings, is_own_augmentation
from lamina.storage.files import as_json

Identity = Mapping[str, Any]  # by the name of the setting, as JSON gives it back

CHUNK_BYTES = 1 << 24  # how much of the data is hashed at a time
DIGESTS_IN_WORDS = {  # of a checkpoint's identity, then of a run's config.json
    "model": "the model's layers or frozen weights",
    "model_values": "the settings of the model's layers, such as a dropout rate",
    "loss_values": "the weights or other values of the loss",
    "algorithm_values": "the values that the class of the algorithm holds",
    "aggregation_values": "the settings of the aggregation",
    "augmentation_values": "the values that the augmentation holds",
    "partition": "the split of the samples among clients",
    "reallocation": "the split of the samples among clients",
    "training_data": "the training data",
    "data_digest": "the contents of the data",
    "metrics_values": "the settings of the metrics",
    "data.content": "the contents of the data",
    "data.partition.values": "the settings of the partition",
    "model.values": "the model's layers, settings or initial weights",
}
ACCEPT = "resume anyway with --set run.accept_changed_code=true (accept_changed_code=True)"

_data_digests: WeakKeyDictionary[Dataset, str] = WeakKeyDictionary()  # the runs of a comparison share their data


def of_run(algorithm: Algorithm, objective: Objective, plan: Plan, data: Dataset | None = None) -> Identity:
    """Return the identity of a run.

    Args:
        algorithm: the algorithm, with its options.
        objective: the model and its loss.
        plan: the training settings and the clients.
        data: the training data; None on a federation's server, which does not see them.
    """
    facts = {
        "algorithm.name": algorithm.card.name,
        **{f"algorithm.{name}": getattr(algorithm, name) for name in options(type(algorithm))},
        "model": _model_digest(objective),
        "model_values": json_digest([objective.attributes, sorted(objective.always_evaluated)]),
        "parameters": objective.layers.size,
        "clients": plan.clients.count,
        **plan.protocol.record(),
        **held_values(algorithm, objective.loss, plan.protocol),
        "code": code_digests(parts_with_code(algorithm, objective.module, plan.protocol)),
    }
    if data is not None:
        facts |= {
            "samples": len(data),
            "sample_shape": map_batch(lambda values: list(values.shape[1:]), data.x),
            **_partition_digest(plan.clients),
            "training_data": dataset_digest(data),
        }
    return cast(Identity, as_json(facts))


def differences(stored: Identity, own: Identity) -> str:
    """Return the settings that differ, in a line with both values; of a digest, only that it differs.

    `code_changes` compares the user's code.
    """
    # another algorithm has other options: its name says enough
    renamed = tuple(key.removesuffix("name") for key in stored if key.endswith(".name") and stored[key] != own.get(key))
    lines = []
    for key in {**stored, **own}:
        values = [stored.get(key), own.get(key)]
        if key == "code" or values[0] == values[1] or (key.startswith(renamed) and not key.endswith(".name")):
            continue
        words = DIGESTS_IN_WORDS.get(key)
        before, now = ("none" if value is None else json.dumps(value) for value in values)
        lines.append(f"{words} ({key}) changed" if words else f"{key} = {before} (now {now})")
    return listed(lines)


def code_changes(stored: Identity, own: Identity) -> str:
    """Return which files of the user's have changed, in a line; empty if none has."""
    before, now = stored.get("code") or {}, own.get("code") or {}
    files = [file for file in sorted({**before, **now}) if before.get(file) != now.get(file)]
    words = ("is new" if file not in before else "changed" if file in now else "is no longer used" for file in files)
    return listed([f"{file} {what}" for file, what in zip(files, words, strict=True)])


# --- digests --------------------------------------------------------------------------------------------------------


def json_digest(value: Any) -> str:
    """Return a short digest of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def held_values(algorithm: Algorithm, loss: Loss, protocol: TrainSettings) -> dict[str, str | None]:
    """Return digests of the values that a user's loss, algorithm, aggregation and augmentation hold.

    Those of lamina's own are None.
    """
    others = {"algorithm_values": type(algorithm), "aggregation_values": protocol.aggregation}
    digests = {name: None if is_laminas(value) else value_digest(value) for name, value in others.items()}
    is_named = any(loss is function for function in LOSSES.values())
    augmentation = as_augmentation(protocol.augmentation) if is_own_augmentation(protocol.augmentation) else None
    if augmentation is not None:
        digests["augmentation_values"] = value_digest(augmentation)
    return {"loss_values": None if is_named else value_digest(loss), **digests}


def parts_with_code(algorithm: Algorithm, model: Any, protocol: TrainSettings) -> list[Any]:
    """Return the parts of a run that a user may have written, except for data and metrics."""
    augmentation = as_augmentation(protocol.augmentation)
    return [type(algorithm), model, as_loss(protocol.loss), protocol.aggregation, protocol.schedule, augmentation]


def _model_digest(objective: Objective) -> str:
    """Return a digest of the module's layers and of the weights that do not train; the others are in the checkpoint."""
    return json_digest(
        [
            repr(objective.module),
            str(objective.dtype),
            {name: list(shape) for name, shape in objective.layers.shapes.items()},
            {name: list(buffer.shape) for name, buffer in objective.buffers.items()},
            {name: content_digest(value) for name, value in objective.frozen.items()},
        ]
    )


def _partition_digest(clients: Clients) -> dict[str, str]:
    if clients.reallocation is not None:
        partition, _, seed, samples = clients.reallocation
        return {"reallocation": value_digest([partition, seed, samples])}
    numbers = (part.astype("<i8").tobytes() for part in (clients.parts.bounds, clients.parts.samples))
    return {"partition": hashlib.sha256(b"".join(numbers)).hexdigest()[:16]}


def dataset_digest(data: Dataset) -> str:
    """Return a digest of a data set's samples, labels and normalisation, the same on every device; made once."""
    if data not in _data_digests:
        facts = [as_json(data.mean), as_json(data.std), *(map_batch(content_digest, part) for part in (data.x, data.y))]
        _data_digests[data] = json_digest(facts)
    return _data_digests[data]


def structure_digest(objective: Objective) -> str:
    """Return a digest of a model's layers, plain attributes and frozen weights; trainable weights do not count."""
    return json_digest([_model_digest(objective), objective.attributes, sorted(objective.always_evaluated)])


def splits_digest(train: Dataset, test: Dataset | None, partition: Partition) -> str:
    """Return a digest of the contents of training and test data, and of the columns that a partition splits by."""
    contents = [None if data is None else dataset_digest(data) for data in (train, test)]
    more_tests = {} if test is None else test.more_tests
    contents += [part for name, data in more_tests.items() for part in (name, dataset_digest(data))]
    columns = (train.columns[name].astype(str).tolist() for name in columns_read(partition, train))
    return json_digest([*contents, *(hashlib.sha256("\0".join(values).encode()).hexdigest() for values in columns)])


def content_digest(values: Tensor | Mapped) -> str:
    """Return a digest of a tensor's type, shape and bytes that is the same on every device.

    Sums of 64-bit words, each times an odd number that depends on its place, tell any change of one word for certain,
    and take a few milliseconds on a GPU, where copying the data to the host and hashing them would take seconds.
    """
    if isinstance(values, Mapped):
        return json_digest([list(values.shape), *map(content_digest, values.chunks())])
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
    return json_digest([str(values.dtype), list(values.shape), torch.stack(sums).tolist() if sums else []])
