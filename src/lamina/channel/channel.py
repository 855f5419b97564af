"""`Channel`: what happens to a client's upload before the mean, and to the broadcast before a client sees it.

Every field of an upload that is a vector passes codecs; numbers per layer or per client are sent as they are. The mean,
robust means and diagnostics work on what the server reads. Algorithms know nothing of it.

Two things make a coarse codec bearable:

- **error feedback** (`feedback`): a client adds what its last upload left out to the next one, and keeps the new rest;
- **differences**: a field that estimates a quantity which the broadcast holds as well (a second moment) is sent as the
  difference from that, and where the result is negative but must not be, it is cut at zero.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lamina.algorithms.contract import Algorithm
from lamina.algorithms.rehearsal import sent_vectors
from lamina.base import rng
from lamina.base.errors import BadInput, short_repr
from lamina.base.limits import check_switch
from lamina.base.registry import field_values, refuse_unknown_options
from lamina.channel.codecs import CODECS, Codec, Codecs, Part, Streams, as_codecs, decode, encode, floats, name_of
from lamina.objective.layers import Layers

NO_CODEC = "none"


class Link(NamedTuple):
    """What both ends of the channel know: the layout of vectors, and the keys of random numbers [..., 1]."""

    layers: Layers
    client: Tensor  # of this client in this round
    cohort: Tensor  # of all clients of this round

    @classmethod
    def of(cls, layers: Layers, clients: Any, cohort: Any, device: torch.device) -> Link:
        """Return the link of one client, or of rows of clients, from the round plan's keys."""
        keys = [torch.as_tensor(each, dtype=torch.int64, device=device).unsqueeze(-1) for each in (clients, cohort)]
        return cls(layers, *keys)

    def streams(self, name: str) -> Streams:
        """Return the keys for a field."""
        tag = -2 - zlib.crc32(name.encode())  # training takes other numbers from the client's stream: -1 and up
        return Streams(rng.fork(self.client, tag), rng.fork(self.cohort, tag))


class Route(NamedTuple):
    """How a field is sent."""

    codecs: Codecs
    reference: str | None  # the field of the broadcast that it is sent as the difference from
    keeps_rest: bool
    is_non_negative: bool


class Sent(NamedTuple):
    """What a client sends, what the server reads from it, and what was left out."""

    parts: dict[str, list[Part]]  # by field that passes codecs
    up: Any  # as the server reads it
    rests: dict[str, Tensor]  # by field with error feedback


@dataclass(frozen=True)
class Channel:
    """What an upload passes on its way to the mean.

    Args:
        codec: of all fields of the uploads: a name, a table with a name and options, an object, or a list of codecs of
            which each shrinks the numbers that the one before leaves ("topk", then "qsgd"). "none": as they are.
        fields: other codecs for single fields, by name.
        feedback: error feedback, for all fields that are not sent as differences.
        down: "bf16" rounds what the server broadcasts.
    """

    codec: Any = NO_CODEC
    fields: Mapping[str, Any] = field(default_factory=dict)
    feedback: bool = False
    down: Literal["bf16"] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.fields, Mapping):
            raise BadInput(f"channel: fields = {short_repr(self.fields)} is no table of codecs by field of the upload")
        check_switch("channel: feedback", self.feedback)
        if self.down not in (None, "bf16"):
            raise BadInput(f"channel: down = {short_repr(self.down)} must be 'bf16', or left out")
        object.__setattr__(self, "codec", _codecs(self.codec))
        object.__setattr__(self, "fields", {name: _codecs(given) for name, given in self.fields.items()})
        if self.feedback and not self.has_codecs:
            raise BadInput("channel: feedback adds what a codec has left out, and there is no codec: name one")

    @property
    def has_codecs(self) -> bool:
        """Whether any field passes a codec."""
        return bool(self.codec) or any(self.fields.values())

    @property
    def label(self) -> str:
        """The channel in words.

        >>> as_channel({"codec": {"name": "qsgd", "bits": 4}, "feedback": True}).label, OPEN.label
        ('qsgd 4 bits, feedback', 'none')
        """
        parts = [_words(self.codec), *(f"{name} {_words(codecs)}" for name, codecs in self.fields.items())]
        return ", ".join([*parts, *["feedback"] * self.feedback, *([f"down {self.down}"] if self.down else [])])

    def check(self, algorithm: Algorithm, layers: Layers) -> None:
        """Refuse codecs for fields that the algorithm does not send."""
        names = sent_vectors(algorithm, layers) if self.fields else ()
        refuse_unknown_options(f"channel: an upload of {algorithm.card.name}", self.fields, names, (), noun="field")

    def routes(self, algorithm: Algorithm, layers: Layers) -> dict[str, Route]:
        """Return how every field is sent that passes codecs."""
        routes = {}
        for name in sent_vectors(algorithm, layers) if self.has_codecs else ():
            codecs: Codecs = self.fields.get(name, self.codec)
            if not codecs:
                continue
            reference = None if all(codec.is_relative for codec in codecs) else algorithm.references.get(name)
            keeps_rest = self.feedback and reference is None
            chosen = tuple(codec.for_feedback() for codec in codecs) if keeps_rest else codecs
            routes[name] = Route(chosen, reference, keeps_rest, name in algorithm.non_negative)
        return routes

    def first_rests(self, algorithm: Algorithm, x: Tensor, layers: Layers) -> dict[str, Tensor]:
        """Return the rests of a client that has sent nothing yet, for models x."""
        routes = self.routes(algorithm, layers).items()
        return {name: torch.zeros_like(x) for name, route in routes if route.keeps_rest}

    def send(self, algorithm: Algorithm, up: Any, down: Any, rests: Mapping[str, Tensor], link: Link) -> Sent:
        """Return what a client sends in place of an upload; `rests` are those of its last uploads."""
        parts, read, new_rests = {}, {}, dict(rests)
        for name, route in self.routes(algorithm, link.layers).items():
            value = getattr(up, name)
            if value is None:  # lazy synchronisation: not in this round
                continue
            wanted = value if route.reference is None else value - getattr(down, route.reference)
            if route.keeps_rest:
                wanted = wanted + rests[name]
            parts[name] = encode(route.codecs, wanted, link.layers.sizes, link.streams(name))
            numbers = [part.values.to(wanted.dtype) for part in parts[name]]
            got = decode(route.codecs, numbers, link.layers.sizes, link.streams(name))
            if route.keeps_rest:
                new_rests[name] = wanted - got
            read[name] = _as_read(route, got, down)
        return Sent(parts, up._replace(**read), new_rests)

    def read(self, algorithm: Algorithm, up: Any, parts: Mapping[str, Sequence[Tensor]], down: Any, link: Link) -> Any:
        """Return the upload that the server reads; `up` holds the fields that pass no codec."""
        read = {}
        for name, numbers in parts.items():
            route = self.routes(algorithm, link.layers)[name]
            read[name] = _as_read(route, decode(route.codecs, numbers, link.layers.sizes, link.streams(name)), down)
        return up._replace(**read)

    def parts_like(self, algorithm: Algorithm, up: Any, link: Link) -> dict[str, list[Part]]:
        """Return parts of the counts and types that a client sends in place of an upload."""
        routes = self.routes(algorithm, link.layers).items()
        return {
            name: encode(route.codecs, torch.zeros_like(value), link.layers.sizes, link.streams(name))
            for name, route in routes
            if (value := getattr(up, name)) is not None
        }

    def upload_bytes(self, algorithm: Algorithm, up: Any, layers: Layers) -> int:
        """Return the bytes of one client's upload."""
        routes, total = self.routes(algorithm, layers), 0
        for name, value in up._asdict().items():
            if value is not None and name in routes:
                total += _sent_bytes(routes[name].codecs, tuple(layers.sizes), value.dtype)
            elif value is not None:
                total += floats(value).size
        return total

    def narrow(self, down: Any, layers: Layers) -> Any:
        """Return the broadcast as it is sent: with vectors of 16 bits, if `down` asks for it."""
        if self.down is None:
            return down
        return type(down)(*(value if value is None else self.narrow_vector(value, layers) for value in down))

    def narrow_vector(self, value: Tensor, layers: Layers) -> Tensor:
        """Return a vector of a broadcast as it is sent; numbers per layer or client are sent as they are."""
        is_vector = value.shape[-1] == layers.size and value.is_floating_point()
        return value.to(torch.bfloat16) if self.down is not None and is_vector else value

    def seen(self, value: Tensor, layers: Layers) -> Tensor:
        """Return a vector of a broadcast as clients see it."""
        return self.narrow_vector(value, layers).to(value.dtype)

    def seen_broadcast(self, down: Any, layers: Layers) -> Any:
        """Return the broadcast as clients see it."""
        if self.down is None:
            return down
        return type(down)(*(value if value is None else self.seen(value, layers) for value in down))

    def record(self) -> dict[str, Any] | None:
        """Return the channel as an experiment file writes it; None if everything is sent as it is."""
        if self == OPEN:
            return None
        return {
            "codec": _tables(self.codec),
            "fields": {name: _tables(codecs) for name, codecs in self.fields.items()},
            "feedback": self.feedback,
            "down": self.down,
        }


def as_channel(given: Any) -> Channel:
    """Return a channel given as one, as its arguments in a table, or as its codecs."""
    if isinstance(given, Channel):
        return given
    if given is None:
        return OPEN
    own = list(field_values(OPEN))
    if isinstance(given, Mapping) and ("name" not in given or not given.keys().isdisjoint(own)):
        refuse_unknown_options("channel", given, own, (), places_of_options())
        return Channel(**given)
    return Channel(codec=given)


def places_of_options() -> dict[str, str]:
    """Return a hint for every option of a codec that is given to the channel."""
    hints = {"name": ": a codec is named by codec = 'topk' or codec = { name = 'topk', … }"}
    for name, codec in CODECS.items():
        for option in field_values(codec()):
            hints.setdefault(option, f": give it with the codec's name, codec = {{ name = '{name}', {option} = … }}")
    return hints


def _codecs(given: Any) -> Codecs:
    if given in (NO_CODEC, {"name": NO_CODEC}):
        return ()
    if isinstance(given, list | tuple) and not given:
        return ()
    return as_codecs(given)


def _tables(codecs: Codecs) -> list[dict[str, Any]]:
    return [{"name": name_of(codec)} | field_values(codec) for codec in codecs]


def _words(codecs: Codecs) -> str:
    return " then ".join(map(_codec_words, codecs)) or NO_CODEC


def _codec_words(codec: Codec) -> str:
    """Return a codec's name, its bits or share, and the other options that differ from their defaults."""
    default, parts = field_values(type(codec)()), [name_of(codec)]
    for name, value in field_values(codec).items():
        if name in ("bits", "share"):
            parts.append(f"{value} bits" if name == "bits" else f"{100 * value:g}%")
        elif value != default[name]:
            parts.append(f"{name}={value}")
    return " ".join(parts)


def _as_read(route: Route, got: Tensor, down: Any) -> Tensor:
    if route.reference is not None:
        got = got + getattr(down, route.reference)
    return got.clamp(min=0) if route.is_non_negative else got


@functools.lru_cache(maxsize=256)
def _sent_bytes(codecs: Codecs, sizes: tuple[int, ...], dtype: torch.dtype) -> int:
    key = torch.zeros(1, dtype=torch.int64)
    return sum(part.size for part in encode(codecs, torch.zeros(sum(sizes), dtype=dtype), sizes, Streams(key, key)))


OPEN = Channel()  # everything is sent as it is
