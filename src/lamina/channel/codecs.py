"""Codecs: how a vector of an upload becomes fewer bits, and what the server reads from them.

A codec is a frozen record of options and two pure functions: `encode` gives the parts that are sent, `decode` the
vector that the server gets. Both accept leading axes (the rows of the stacked engine). What is random follows from
`stream`, which the round plan gives both sides, so every engine and a federation round in the same way.

Some codecs leave numbers that another can shrink further (`top-k` leaves k values): they may be followed by one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from lamina.base import rng
from lamina.base.errors import BadInput, short_repr
from lamina.base.limits import check_count, check_number, check_switch
from lamina.base.registry import create_named, explain_options
from lamina.channel.groups import Groups, positive


class Part(NamedTuple):
    """Numbers that are sent: floats as they are, or codes from 0 to `most` in a few bits each."""

    values: Tensor  # [..., count]
    bits: int  # of each number
    most: int | None = None  # the largest code; None: floats

    @property
    def size(self) -> int:
        """The bytes of one client's numbers; the last byte of codes may have unused bits."""
        return -(-self.values.shape[-1] * self.bits // 8)


def floats(values: Tensor) -> Part:
    """Return numbers that are sent as they are."""
    return Part(values, 8 * values.element_size())


class Codec:
    """Base class of all codecs. `sizes` are the sizes of the vector's layers, one after another."""

    is_relative: ClassVar[bool] = False
    """Whether the error of every number is small relative to the number itself, so that second moments can pass."""
    leaves_numbers: ClassVar[bool] = False
    """Whether the first part are numbers that another codec may shrink further."""
    more_parts: ClassVar[int] = 0
    """How many parts there are beside those numbers."""
    shares_randomness: ClassVar[bool] = False
    """Whether all clients of a round draw the same random numbers."""

    def encode(self, values: Tensor, sizes: Sequence[int], stream: Tensor) -> list[Part]:
        """Return what is sent of vectors [..., n]; `stream` [..., 1] is the key of the random numbers."""
        raise NotImplementedError

    def decode(self, parts: Sequence[Tensor], sizes: Sequence[int], stream: Tensor) -> Tensor:
        """Return the vectors [..., n] that the server reads; parts have the vectors' type, or int64 for codes."""
        raise NotImplementedError

    def for_feedback(self) -> Self:
        """Return the codec as error feedback needs it: with an error that is smaller than the vector.

        The residual would grow without end otherwise. An unbiased codec may have a larger error.
        """
        return self


@dataclass(frozen=True)
class BF16(Codec):
    """Brain floats: 16 bits, the range of float32 with 8 bits of precision, rounded to the nearest."""

    is_relative: ClassVar[bool] = True

    def encode(self, values: Tensor, sizes: Sequence[int], stream: Tensor) -> list[Part]:
        """Return the rounded numbers."""
        return [floats(values.to(torch.bfloat16))]

    def decode(self, parts: Sequence[Tensor], sizes: Sequence[int], stream: Tensor) -> Tensor:
        """Return the rounded numbers."""
        return parts[0]


@dataclass(frozen=True)
class FP16(Codec):
    """Half precision: 11 bits of precision, in multiples of each layer's largest magnitude, so that none is too small.

    Without such a scale, a second moment of 1e-9 would be sent as zero.
    """

    def encode(self, values: Tensor, sizes: Sequence[int], stream: Tensor) -> list[Part]:
        """Return the rounded multiples, and every layer's scale."""
        groups = Groups.of(tuple(sizes), None)
        scale = groups.largest(values)
        return [floats((values / groups.spread(positive(scale))).to(torch.float16)), floats(scale)]

    def decode(self, parts: Sequence[Tensor], sizes: Sequence[int], stream: Tensor) -> Tensor:
        """Return the multiples times the scales."""
        return parts[0] * Groups.of(tuple(sizes), None).spread(parts[1])


@dataclass(frozen=True)
class QSGD(Codec):
    """Codes of a few bits, rounded up or down at random so that their mean is right (Alistarh et al. 2017).

    Every bucket of a layer is sent in multiples of its largest magnitude divided by 2^(bits-1) - 1, as the paper does
    in its experiments. (Its theory divides by the bucket's norm.)

    Args:
        bits: of a code, from 2 (-1, 0 or 1 times the largest magnitude) to 16.
        bucket: how many numbers share a scale.
        at_random: round at random; False: to the nearest, which error feedback needs.
    """

    bits: int = 8
    bucket: int = 512
    at_random: bool = True

    def __post_init__(self) -> None:
        check_count("codec 'qsgd': bits", self.bits, 16, least=2)
        check_count("codec 'qsgd': bucket", self.bucket)
        check_switch("codec 'qsgd': at_random", self.at_random)

    @property
    def _steps(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def encode(self, values: Tensor, sizes: Sequence[int], stream: Tensor) -> list[Part]:
        """Return the codes, and every bucket's largest magnitude."""
        groups, most = Groups.of(tuple(sizes), self.bucket), 2 * self._steps
        scale = groups.largest(values)
        multiples = values * groups.spread(self._steps / positive(scale))
        rounded = multiples.add_(uniform(stream, values)).floor_() if self.at_random else multiples.round_()
        codes = rounded.add_(self._steps).clamp_(0, most)
        return [Part(codes, self.bits, most), floats(scale)]

    def decode(self, parts: Sequence[Tensor], sizes: Sequence[int], stream: Tensor) -> Tensor:
        """Return the multiples times the scales."""
        groups = Groups.of(tuple(sizes), self.bucket)
        return (parts[0].to(parts[1].dtype) - self._steps) * groups.spread(parts[1] / self._steps)

    def for_feedback(self) -> Self:
        """Return the codec that rounds to the nearest."""
        return replace(self, at_random=False)


@dataclass(frozen=True)
class Sign(Codec):
    """One bit per number: its sign, times a mean magnitude (Karimireddy et al. 2019).

    Args:
        scale: of every "layer", or one of the whole "model", as FedCAMS has it.
    """

    scale: Literal["layer", "model"] = "layer"

    def __post_init__(self) -> None:
        if self.scale not in (choices := ("layer", "model")):
            raise BadInput(f"codec 'sign': scale = {short_repr(self.scale)} must be {' or '.join(map(repr, choices))}")

    def encode(self, values: Tensor, sizes: Sequence[int], stream: Tensor) -> list[Part]:
        """Return the signs, and the mean magnitudes."""
        magnitudes = torch.stack([each.abs().mean(-1) for each in torch.split(values, self._sizes(sizes), -1)], -1)
        return [Part((values >= 0).to(values.dtype), 1, 1), floats(magnitudes)]

    def decode(self, parts: Sequence[Tensor], sizes: Sequence[int], stream: Tensor) -> Tensor:
        """Return the signs times the magnitudes."""
        groups = Groups.of(tuple(self._sizes(sizes)), None)
        return (2 * parts[0].to(parts[1].dtype) - 1) * groups.spread(parts[1])

    def _sizes(self, sizes: Sequence[int]) -> list[int]:
        return list(sizes) if self.scale == "layer" else [sum(sizes)]


@dataclass(frozen=True)
class _Share(Codec):
    """A codec that sends a share of the numbers."""

    share: float = 0.01

    leaves_numbers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(f"codec '{name_of(self)}': share", self.share, above=0, most=1)

    def count(self, n: int) -> int:
        """Return how many numbers are sent for a vector of n."""
        return max(1, round(self.share * n))


@dataclass(frozen=True)
class TopK(_Share):
    """The largest numbers of the whole vector, with their places (Stich et al. 2018). Others arrive as zero.

    Args:
        share: of the numbers, at least one.
    """

    more_parts: ClassVar[int] = 1

    def encode(self, values: Tensor, sizes: Sequence[int], stream: Tensor) -> list[Part]:
        """Return the numbers, and their places."""
        n = values.shape[-1]
        places = torch.topk(values.abs(), self.count(n), dim=-1, sorted=False).indices
        return [floats(values.gather(-1, places)), Part(places, max(1, math.ceil(math.log2(n))), n - 1)]

    def decode(self, parts: Sequence[Tensor], sizes: Sequence[int], stream: Tensor) -> Tensor:
        """Return the numbers in their places."""
        kept, places = parts
        return kept.new_zeros(*kept.shape[:-1], sum(sizes)).scatter(-1, places.long(), kept)


@dataclass(frozen=True)
class RandK(_Share):
    """Random numbers of the vector, which the server finds by the round plan. Others arrive as zero.

    One number is drawn from each of k groups of neighbours. So no two draws are the same, and every number is as likely
    as its neighbours (and as all others, if k divides their number).

    Args:
        share: of the numbers, at least one.
        scaled: multiply by the size of the group, so that their mean is right; False: as error feedback needs it.
    """

    scaled: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_switch("codec 'randk': scaled", self.scaled)

    def encode(self, values: Tensor, sizes: Sequence[int], stream: Tensor) -> list[Part]:
        """Return the numbers."""
        places, lengths = self._places(values, values.shape[-1], stream)
        kept = values.gather(-1, places)
        return [floats(kept * lengths.to(kept.dtype) if self.scaled else kept)]

    def decode(self, parts: Sequence[Tensor], sizes: Sequence[int], stream: Tensor) -> Tensor:
        """Return the numbers in their places."""
        kept, n = parts[0], sum(sizes)
        return kept.new_zeros(*kept.shape[:-1], n).scatter(-1, self._places(kept, n, stream)[0], kept)

    def for_feedback(self) -> Self:
        """Return the codec that sends the numbers as they are."""
        return replace(self, scaled=False)

    def _places(self, like: Tensor, n: int, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Return the place of the number drawn from every group, and the sizes of the groups."""
        k = self.count(n)
        bounds = torch.arange(k + 1, device=like.device) * n // k
        lengths = bounds[1:] - bounds[:-1]
        places: Tensor = bounds[:-1] + rng.bits(stream, torch.arange(k, device=like.device)) % lengths
        return places.expand(*like.shape[:-1], -1), lengths


@dataclass(frozen=True)
class Sketch(_Share):
    """A count sketch (Charikar et al. 2002): sums of random groups of numbers with random signs.

    The groups and signs are the same for all clients of a round, so sketches can be added up before they are read. A
    number is read as the mean of its sums, so the vector's mean is right.

    Args:
        share: the numbers sent, as a share of the vector's.
        rows: in how many groups every number is; as many sketches share the numbers that are sent.
        scaled: read whole sums; False: means of the groups, as error feedback needs it.
    """

    share: float = 0.1
    rows: int = 1
    scaled: bool = True

    shares_randomness: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("codec 'sketch': rows", self.rows)
        check_switch("codec 'sketch': scaled", self.scaled)

    def count(self, n: int) -> int:
        """Return how many sums are sent for a vector of n numbers: as many for each row."""
        return self.rows * max(1, super().count(n) // self.rows)

    def encode(self, values: Tensor, sizes: Sequence[int], stream: Tensor) -> list[Part]:
        """Return the sums of all groups of all rows."""
        sums = []
        for group, sign, width in self._hashes(values, values.shape[-1], stream):
            sums.append(values.new_zeros(*values.shape[:-1], width).scatter_add(-1, group, sign * values))
        return [floats(torch.cat(sums, -1))]

    def decode(self, parts: Sequence[Tensor], sizes: Sequence[int], stream: Tensor) -> Tensor:
        """Return every number as the mean of its sums."""
        n, start, total = sum(sizes), 0, parts[0].new_zeros(*parts[0].shape[:-1], sum(sizes))
        for group, sign, width in self._hashes(parts[0], n, stream):
            sums = parts[0][..., start : start + width]
            if not self.scaled:
                ones = torch.ones_like(sign).expand(*sums.shape[:-1], n)
                sums = sums / torch.zeros_like(sums).scatter_add(-1, group, ones).clamp(min=1)
            total = total + sign * sums.gather(-1, group)
            start += width
        return total / self.rows

    def for_feedback(self) -> Self:
        """Return the codec that reads means of groups."""
        return replace(self, scaled=False)

    def _hashes(self, like: Tensor, n: int, stream: Tensor) -> Sequence[tuple[Tensor, Tensor, int]]:
        """Return every number's group and sign, and the number of groups, for each row of the sketch."""
        if stream.device.type == "cpu" and stream.numel() == 1:  # the same for all clients of a round
            hashes = _sketch_hashes(int(stream), n, self.count(n) // self.rows, self.rows, like.dtype)
        else:
            hashes = _make_hashes(stream, n, self.count(n) // self.rows, self.rows, like.dtype)
        return [(group.expand(*like.shape[:-1], n), sign, width) for group, sign, width in hashes]


def _make_hashes(stream: Tensor, n: int, width: int, rows: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, int]]:
    hashes = []
    for row in range(rows):
        words = rng.bits(rng.fork(stream, row), torch.arange(n, device=stream.device))
        hashes.append(((words >> 1) % width, (2 * (words & 1) - 1).to(dtype), width))
    return hashes


@functools.lru_cache(maxsize=4)
def _sketch_hashes(key: int, n: int, width: int, rows: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, int]]:
    return _make_hashes(torch.tensor([key]), n, width, rows, dtype)


CODECS: dict[str, type[Codec]] = {
    "bf16": BF16,
    "fp16": FP16,
    "qsgd": QSGD,
    "sign": Sign,
    "topk": TopK,
    "randk": RandK,
    "sketch": Sketch,
}


def name_of(codec: Codec) -> str:
    """Return the name of a codec, as `make` takes it."""
    return next(name for name, cls in CODECS.items() if type(codec) is cls)


def make(name: str, **options: Any) -> Codec:
    """Make a codec by name.

    >>> make("qsgd", bits=4)
    QSGD(bits=4, bucket=512, at_random=True)
    """
    codec: Codec = create_named("codec", CODECS, name, options)
    return codec


for _codec in CODECS.values():
    explain_options(_codec)


# --- several codecs, one after another --------------------------------------------------------------------------------

Codecs = tuple[Codec, ...]


def as_codecs(given: Any) -> Codecs:
    """Return codecs given by name, as a table with a name and options, as objects, or as a list of those."""
    items = given if isinstance(given, list | tuple) else [given]
    codecs = tuple(_as_codec(each) for each in items)
    for codec, following in itertools.pairwise(codecs):
        if not codec.leaves_numbers:
            able = [name for name, cls in CODECS.items() if cls.leaves_numbers]
            raise BadInput(
                f"channel: codec '{name_of(following)}' cannot follow '{name_of(codec)}', which leaves no numbers to "
                f"shrink: only {', '.join(able)} may be followed by another"
            )
    return codecs


def _as_codec(given: Any) -> Codec:
    if type(given) in CODECS.values():
        codec: Codec = given
        return codec
    if isinstance(given, str):
        return make(given)
    if isinstance(given, Mapping) and "name" in given and all(isinstance(key, str) for key in given):
        return make(**given)
    raise BadInput(
        f"channel: {short_repr(given)} is no codec: give a name ({', '.join(CODECS)}) or a table {{'name': 'qsgd'}}"
    )


class Streams(NamedTuple):
    """The keys of a field's random numbers, [..., 1] each."""

    client: Tensor
    cohort: Tensor  # the same for all clients of a round

    def of(self, codec: Codec, place: int) -> Tensor:
        """Return the key for a codec; `place` is how many codecs follow."""
        key: Tensor = rng.fork(self.cohort if codec.shares_randomness else self.client, place)
        return key


def encode(codecs: Codecs, values: Tensor, sizes: Sequence[int], streams: Streams) -> list[Part]:
    """Return what is sent of vectors [..., n]."""
    first, rest = codecs[0], codecs[1:]
    parts = first.encode(values, sizes, streams.of(first, len(rest)))
    if not rest:
        return parts
    numbers = parts[0].values
    return [*encode(rest, numbers, numbers.shape[-1:], streams), *parts[1:]]


def decode(codecs: Codecs, parts: Sequence[Tensor], sizes: Sequence[int], streams: Streams) -> Tensor:
    """Return the vectors [..., n] that the server reads."""
    first, rest = codecs[0], codecs[1:]
    if rest:
        assert isinstance(first, _Share)
        more = len(parts) - first.more_parts
        parts = [decode(rest, parts[:more], [first.count(sum(sizes))], streams), *parts[more:]]
    return first.decode(parts, sizes, streams.of(first, len(rest)))


def uniform(stream: Tensor, like: Tensor) -> Tensor:
    """Return random numbers in [0, 1) like a tensor [..., n]; `stream` is [..., 1].

    They have 53 bits in double precision, and 16 otherwise: four for each word, since drawing words is what takes time.
    """
    n = like.shape[-1]
    if like.dtype == torch.float64:
        return torch.as_tensor(rng.bits(stream, torch.arange(n, device=like.device))).to(like.dtype) * 2.0**-53
    words: Tensor = rng.fork(stream, torch.arange((n + 3) // 4, device=like.device))
    shorts = words.view(torch.int16)[..., :n]  # from -2^15 to 2^15 - 1
    return shorts.to(like.dtype).mul_(2.0**-16).add_(0.5 + 2.0**-17)
