"""The format of messages: tensors as raw little-endian arrays, one per field, and nothing to unpickle.

A message down holds

- ``down``: an `ArrayRecord` with one array per field of the algorithm's Down that this node does not hold already;
- ``buffers``: an `ArrayRecord` with the model's floating buffers (BatchNorm's statistics), if it has any;
- ``task``: a `ConfigRecord` with the numbers of `Task`: all a node has to know about the round.

A reply holds ``up`` and ``buffers`` likewise, and ``figures``, a `MetricRecord`; or only ``problem``, a `ConfigRecord`.
Its ``answer`` repeats the token of the message it replies to. Messages down are signed, see `lamina.flower.signing`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from lamina.algorithms.contract import Algorithm
from lamina.algorithms.declaration import options
from lamina.base.errors import BadInput
from lamina.channel.bits import pack_bits, unpack_bits
from lamina.channel.codecs import Part
from lamina.flower.internals import serialised_bytes
from lamina.objective.objective import Buffers, Objective
from lamina.objective.private import Private
from lamina.rounds.settings import TrainSettings

RAW = "lamina.raw"  # how the bytes of an array are to be read: the numbers one after another, little-endian
ANSWER = "answer"  # the record of a reply that says to which message it is one
GRADIENT = "train.gradient"  # Mime's first exchange: the full gradient at x


class Unreadable(Exception):
    """An array that is not what it should be; the text says how."""


def encode(tensor: Tensor) -> Array:
    """Return a tensor as an array of Flower's."""
    if sys.byteorder != "little":
        raise BadInput("lamina.flower sends little-endian numbers, and this machine is big-endian: use another")
    return Array(dtype_name(tensor), tuple(tensor.shape), RAW, _bytes_of(tensor))


def decode(array: Array, like: Tensor) -> Tensor:
    """Return the tensor in an array, which must have the dtype and shape of `like`, whatever it says about itself."""
    if array.stype != RAW:
        raise Unreadable(f"is encoded as {shorten(array.stype, 40)!r}, not {RAW!r}")
    if array.dtype != dtype_name(like):
        raise Unreadable(f"is {shorten(array.dtype, 40)}, not {dtype_name(like)}")
    if tuple(array.shape) != tuple(like.shape):
        raise Unreadable(f"has shape {shorten(str(list(array.shape)), 40)}, not {list(like.shape)}")
    size = like.numel() * like.element_size()
    if len(array.data) != size:
        raise Unreadable(f"holds {len(array.data)} bytes, not {size}")
    if size == 0:
        return torch.empty_like(like)
    return torch.frombuffer(bytearray(array.data), dtype=like.dtype).reshape(like.shape).to(like.device)


def dtype_name(tensor: Tensor) -> str:
    """Return ``float32`` and the like."""
    return str(tensor.dtype).removeprefix("torch.")


def pack(payload: Any) -> dict[str, Array]:
    """Return the fields of a Down or an Up that are not None, as arrays."""
    return {name: encode(value) for name, value in payload._asdict().items() if value is not None}


def pack_upload(up: Any, parts: Mapping[str, Sequence[Part]]) -> dict[str, Array]:
    """Return an upload as arrays: `parts` of the fields that pass codecs, and the other fields of `up`."""
    others = {name: value for name, value in up._asdict().items() if value is not None and name not in parts}
    return {name: encode(value) for name, value in (others | part_tensors(parts)).items()}


def part_tensors(parts: Mapping[str, Sequence[Part]]) -> dict[str, Tensor]:
    """Return the tensors that are sent of fields that pass codecs, by the field's name and the part's number."""
    return {
        f"{name}.{i}": part.values if part.most is None else pack_bits(part.values, part.bits)
        for name, several in parts.items()
        for i, part in enumerate(several)
    }


def read_parts(tensors: Mapping[str, Tensor], like: Mapping[str, Sequence[Part]]) -> dict[str, list[Tensor]]:
    """Return the parts in the tensors that `part_tensors` made; `like` are parts of the same counts and bits."""
    read: dict[str, list[Tensor]] = {}
    for name, several in like.items():
        for i, part in enumerate(several):
            values = tensors[f"{name}.{i}"]
            if part.most is not None:
                values = unpack_bits(values.cpu(), part.bits, part.values.shape[-1]).to(part.values.device)
                if bool((values > part.most).any()):
                    raise Unreadable("holds a code that its codec does not send")
            read.setdefault(name, []).append(values)
    return read


def floating(buffers: Mapping[str, Tensor]) -> Buffers:
    """Return the floating buffers, which are sent."""
    return {name: value for name, value in buffers.items() if value.is_floating_point()}


def content_of(records: Mapping[str, Mapping[str, Any]]) -> RecordDict:
    """Return a message's content from plain mappings: arrays, numbers (a reply's figures) or settings."""
    content = RecordDict()
    for name, entries in records.items():
        if not entries:
            continue
        if all(isinstance(value, Array) for value in entries.values()):
            content[name] = ArrayRecord(dict(entries))
        else:
            content[name] = MetricRecord(dict(entries)) if name == "figures" else ConfigRecord(dict(entries))
    return content


def entries_of(content: RecordDict, name: str, kind: type[Any] = ConfigRecord) -> dict[str, Any]:
    """Return the entries of a record; none if there is no such record, or it is of another kind."""
    record: Any = content.get(name)
    return dict(record) if isinstance(record, kind) else {}


def token_of(content: RecordDict) -> str:
    """Return the token of a message down; empty if it has none."""
    token = entries_of(content, "task").get("token")
    return token if isinstance(token, str) and HEX.fullmatch(token) else ""


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    return hashlib.sha256(_bytes_of(tensor)).hexdigest()


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def payload_bytes(content: RecordDict) -> int:
    """Return the bytes of the arrays themselves, which the ledger counts."""
    return sum(len(a.data) for r in content.values() if isinstance(r, ArrayRecord) for a in r.values())


def wire_bytes(content: RecordDict) -> int:
    """Return the bytes of the whole content as Flower serialises it, without copying the arrays."""
    frame = RecordDict()
    for name, record in content.items():
        if isinstance(record, ArrayRecord):
            record = ArrayRecord({key: Array(a.dtype, tuple(a.shape), a.stype, b"") for key, a in record.items()})
        frame[name] = record
    return serialised_bytes(frame) + payload_bytes(content)


def shorten(text: str, most: int = 200) -> str:
    """Return text from elsewhere as a printable part of one line."""
    line = "".join(c if c.isprintable() else " " for c in str(text)[: 4 * most])
    line = " ".join(line.split())
    return line if len(line) <= most else line[: most - 1] + "…"


# --- what a node is asked to do ------------------------------------------------------------------------------------

HEX = re.compile(r"[0-9a-f]{8,64}")  # names of runs and exchanges, and digests: never a path
SAME_VERSION = "install the same version of lamina on both sides"


Hex = Annotated[str, Field(pattern=f"^{HEX.pattern}$")]
OptionalHex = Annotated[str, Field(pattern=f"^({HEX.pattern})?$")]
FieldName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]  # of a Down record
Number = Annotated[int, Field(ge=0, le=10**9)]
Texts = Field(max_length=100)


class Task(BaseModel):
    """Everything but tensors that a node needs for a round; it has no protocol settings of its own."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)

    run: Hex  # lamina's name of the run, which survives a restart of the server
    token: Hex  # of this exchange: names the client state it makes
    app: Hex  # what server and node must agree on, see `fingerprint`
    number: int = Field(ge=1, lt=2**63)  # grows from task to task; a node refuses a number that is not its largest
    round: int = Field(ge=1, le=10**9)
    client: Number
    clients: Number
    participation: float = Field(gt=0, le=1)
    settings: str = Field(max_length=10_000)  # JSON of `TrainSettings.local_record`
    base: OptionalHex  # the token of the exchange whose client state the server last accepted; "": start without state
    keep: list[Hex] = Texts  # tokens the server may still name as base, beside this exchange's
    held: list[FieldName] = Texts  # Down fields the node should hold
    held_digests: list[Hex] = Texts
    gradient: OptionalHex  # the token of the exchange in which the node sent its full gradient (Mime)

    @functools.cached_property
    def protocol(self) -> TrainSettings:
        """The settings of this client's training in this round."""
        try:
            return TrainSettings.from_local_record(json.loads(self.settings))
        except (BadInput, ValueError, RecursionError) as error:
            why = shorten(str(error)) if isinstance(error, BadInput) else "its settings are not JSON"
            raise BadInput(f"the server's message makes no sense: {why}; {SAME_VERSION}") from None

    @classmethod
    def read(cls, content: RecordDict) -> Task:
        """Return the task in a message; everything is validated, because paths on the node's disk are made of it."""
        fault = None
        try:
            task = cls(**entries_of(content, "task"))
        except ValidationError as error:
            fault = error.errors()[0]
        if fault is not None:  # raised here, because what a node reports leaves out the words of other exceptions
            value = None if fault["type"] == "missing" else fault["input"]
            raise BadInput(
                f"the server's message says {fault['loc'][0]} = {shorten(repr(value), 40)}: it speaks another "
                f"protocol; {SAME_VERSION}"
            )
        if task.client >= task.clients or len(task.held) != len(task.held_digests):
            raise BadInput(f"the server's message is for client {task.client} of {task.clients}, and makes no sense")
        _ = task.protocol  # validates the settings
        return task


def fingerprint(algorithm: Algorithm, objective: Objective) -> str:
    """Return a hash of what server and node must agree on: algorithm, layout, and frozen weights.

    Trainable weights and floating buffers are sent; what is not sent must be the same on both sides.
    """
    fixed = objective.frozen | {n: b for n, b in objective.buffers.items() if not b.is_floating_point()}
    facts = {
        "algorithm": algorithm.card.name,
        "options": {name: repr(getattr(algorithm, name)) for name in options(type(algorithm))},
        "dtype": str(objective.dtype),
        "layers": {name: list(shape) for name, shape in objective.layers.shapes.items()},
        "buffers": {name: list(b.shape) for name, b in objective.buffers.items()},
        "private": [] if objective.private is None else _private_facts(objective, objective.private),
        "fixed": {name: digest(value) for name, value in fixed.items()},
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _private_facts(objective: Objective, private: Private) -> list[str]:
    """Return the names of the private parts and digests of their initial values, which no message holds."""
    starts = [objective.private_start, *(objective.buffers[name] for name in private.buffers)]
    return [*private.names, *(digest(start) for start in starts if start is not None)]
