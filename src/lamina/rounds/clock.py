"""The clock: how long a round takes on a network, as a pure function of the plan and of the bytes that are sent.

Durations depend on a client's steps, bytes and link, never on weights. So all engines agree on them without a message,
finished runs can be timed (timeline.py), and a plan knows before a round which clients would be late (plan.py).

A client's round is half a round trip, the download, the gradients of its local steps, the upload, half a round trip.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lamina.base import rng
from lamina.base.errors import BadInput, is_number, short_repr, unknown
from lamina.base.limits import check_number
from lamina.base.registry import explain_options, field_values, refuse_unknown_options
from lamina.base.text import plural
from lamina.data.parts import Indices

Seconds = NDArray[np.float64]  # or bits, or gradients, by client
BITS_PER_BYTE, MEGA = 8, 1e6
ROUNDING = 1e-9  # of two transfers that end together, relative to their time


@dataclass(frozen=True)
class Lognormal:
    """A quantity that differs between clients: median * exp(sigma * z), with z drawn once for every client."""

    median: float
    sigma: float


ByClient = float | Lognormal | tuple[float, ...]  # one number, drawn for every client, or listed by client


class Task(NamedTuple):
    """What a round asks of its clients."""

    gradients: NDArray[Any]  # [C] mini-batch gradients that every client computes
    down: NDArray[Any]  # [C] bytes that every client receives
    up: NDArray[Any]  # [C] bytes that every client sends
    exchanges: int = 1  # messages from the server that every client answers


@dataclass(frozen=True)
class Clock:
    """How fast clients compute and send, and for whom a round does not wait.

    >>> clock = Clock(step_seconds=0.1, download=80, upload=8, latency=0.5)
    >>> task = Task(gradients=np.array([10]), down=np.array([1e6]), up=np.array([1e6]))
    >>> clock.ready(task, np.array([0]), clients=1, seed=0)  # 0.5 + 8 / 80 + 10 * 0.1 + 8 / 8
    array([2.6])

    The first three may also be a table by client: a list, or {"median": …, "sigma": …}, which is drawn from the seed.
    A client's download and upload speed share one draw: a poor link is poor in both directions.

    Args:
        step_seconds: seconds that a client needs for the gradient of one mini-batch.
        download: megabits per second from the server to a client; None: in no time.
        upload: the same from a client to the server.
        flops_per_second: what a client computes in a second; a simulation, and `lamina time`, count the FLOPs of a
            mini-batch's gradient and replace this by `step_seconds`.
        latency: seconds of a round trip.
        server_link: megabits per second of the server's own link, in each direction, that the transfers of a round
            share; None: it is never the bottleneck.
        overhead: seconds that a client's round takes besides, such as a framework's polling.
        deadline: seconds from the start of a round; clients that would answer later are not asked.
        over_select: how many times as many clients are drawn; the fastest of them are asked.
    """

    step_seconds: ByClient = 0.0
    download: ByClient | None = None
    upload: ByClient | None = None
    flops_per_second: ByClient | None = None
    latency: float = 0.0
    server_link: float | None = None
    overhead: float = 0.0
    deadline: float | None = None
    over_select: float = 1.0

    def __post_init__(self) -> None:
        for name, bounds in SPREAD.items():
            object.__setattr__(self, name, _by_client(f"clock.{name}", getattr(self, name), bounds))
        for name, bounds in NUMBERS.items():
            if getattr(self, name) is not None:
                check_number(f"clock.{name}", getattr(self, name), **bounds)
        if self.flops_per_second is not None and self.step_seconds != 0:
            raise BadInput("clock: step_seconds and flops_per_second both say how fast clients compute: give one")
        if not any(getattr(self, name) for name in (*SPREAD, "latency", "server_link", "overhead")):
            raise BadInput(
                f"the clock counts nothing: name one ({', '.join(PRESETS)}), or give step_seconds, download and upload"
            )

    @property
    def chooses(self) -> bool:
        """Whether some of the clients that are drawn may not be asked."""
        return self.deadline is not None or self.over_select > 1

    def record(self) -> dict[str, Any]:
        """Return the clock as the `[clock]` section of an experiment file writes it."""
        return {name: _plain(value) for name, value in field_values(self).items()}

    def with_flops(self, flops: float) -> Clock:
        """Return the clock with seconds per step in place of FLOP/s; `flops` are those of a mini-batch's gradient."""
        speed = self.flops_per_second
        if speed is None:
            return self
        if isinstance(speed, Lognormal):
            seconds: ByClient = Lognormal(flops / speed.median, speed.sigma)
        else:
            seconds = tuple(flops / each for each in speed) if isinstance(speed, tuple) else flops / speed
        return dataclasses.replace(self, step_seconds=seconds, flops_per_second=None)

    def ready(self, task: Task, cohort: Indices, clients: int, seed: int) -> Seconds:
        """Return the seconds after which the answer of every active client has arrived [C].

        Transfers in the same direction share the server's link fairly: each has the same part of it, or less if its
        own link is slower (max-min fairness, as TCP flows of equal round trips have it).

        Args:
            task: what the clients have to do.
            cohort: their numbers [C].
            clients: the number of all clients.
            seed: the source of what is drawn for every client.
        """
        if self.flops_per_second is not None:
            raise BadInput("clock.flops_per_second: the FLOPs of a step are not known here: give step_seconds")
        link = _normals(rng.key(seed, "clock link"), cohort)
        steps = _normals(rng.key(seed, "clock steps"), cohort)

        def values(name: str, draws: Seconds) -> Seconds:
            return _values(f"clock.{name}", getattr(self, name), cohort, clients, draws)

        now = np.full(len(cohort), self.overhead + self.latency * (task.exchanges - 0.5))
        now = self._arrivals(now, task.down, values("download", link))
        now = now + task.gradients * values("step_seconds", steps)
        return self._arrivals(now, task.up, values("upload", link)) + self.latency / 2

    def _arrivals(self, starts: Seconds, size: NDArray[Any], speeds: Seconds) -> Seconds:
        """Return when transfers of so many bytes end that begin at `starts`."""
        bits = size * BITS_PER_BYTE
        if self.server_link is None:
            return np.asarray(starts + bits / (speeds * MEGA), dtype=np.float64)
        return shared_ends(starts, bits, speeds * MEGA, self.server_link * MEGA)

    def kept(self, ready: Seconds, asked: int) -> Indices:
        """Return the places in the cohort, ascending, of at most `asked` clients that are asked.

        These are the fastest that meet the deadline, and the fastest of all if none does: a round is never empty.
        """
        fastest = np.argsort(ready, kind="stable")[:asked]
        in_time = fastest if self.deadline is None else fastest[ready[fastest] <= self.deadline]
        return np.sort(in_time if len(in_time) else fastest[:1])


def shared_ends(starts: Seconds, bits: Seconds, speeds: Seconds, capacity: float) -> Seconds:
    """Return when transfers end that share a link of so many bits per second, each at most at its own speed.

    >>> shared_ends(np.zeros(2), np.array([10.0, 10.0]), np.array([1.0, 100.0]), capacity=6.0)
    array([10.,  2.])
    """
    ends, left = starts.astype(np.float64), bits.astype(np.float64)
    waiting = left > 0
    now = 0.0
    while waiting.any():
        active = waiting & (starts <= now)
        if not active.any():
            now = float(starts[waiting].min())
            continue
        rates = _fair_rates(speeds[active], capacity)
        seconds = left[active] / rates  # until each would end
        arrival = float(starts[waiting & ~active].min(initial=np.inf))  # of another one
        step = min(float(seconds.min()), arrival - now)
        left[active] -= rates * step
        now = arrival if step < seconds.min() else now + step
        done = np.flatnonzero(active)[seconds <= step * (1 + ROUNDING)]
        ends[done], waiting[done] = now, False
    return ends


def _fair_rates(speeds: Seconds, capacity: float) -> Seconds:
    """Return the rate of every transfer: the same for all, or its own speed where that is lower."""
    ascending = np.sort(speeds)
    before = np.concatenate([[0.0], np.cumsum(ascending)[:-1]])
    shares = (capacity - before) / np.arange(len(speeds), 0, -1)
    limited = np.flatnonzero(ascending > shares)
    return speeds if not len(limited) else np.minimum(speeds, shares[limited[0]])


# --- values by client -------------------------------------------------------------------------------------------------

ABOVE_0: dict[str, float] = {"above": 0}
LEAST_0: dict[str, float] = {"least": 0}
# the fields that may differ between clients, then the plain numbers, with their bounds
SPREAD = {"step_seconds": LEAST_0, "download": ABOVE_0, "upload": ABOVE_0, "flops_per_second": ABOVE_0}
NUMBERS: dict[str, dict[str, float]] = {
    "latency": LEAST_0,
    "server_link": ABOVE_0,
    "overhead": LEAST_0,
    "deadline": ABOVE_0,
    "over_select": {"least": 1},
}


def _by_client(name: str, given: Any, bounds: Mapping[str, float]) -> ByClient | None:
    """Return a number, a lognormal or a tuple by client from how a user writes it."""
    if given is None and name != "clock.step_seconds":
        return None
    if isinstance(given, Mapping) and given.keys() == {"median", "sigma"}:
        given = Lognormal(**given)
    if isinstance(given, Lognormal):
        check_number(f"{name}.sigma", given.sigma, least=0)
        return Lognormal(check_number(f"{name}.median", given.median, **bounds), float(given.sigma))
    if isinstance(given, list | tuple | np.ndarray) and len(given):
        return tuple(check_number(f"{name}[{client}]", each, **bounds) for client, each in enumerate(given))
    if is_number(given):
        return check_number(name, given, **bounds)
    raise BadInput(
        f"{name} = {short_repr(given)}: give a number, a list with a number for every client, or "
        "{ median = …, sigma = … }"
    )


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it."""
    if isinstance(value, Lognormal):
        return field_values(value)
    return list(value) if isinstance(value, tuple) else value


def _values(name: str, value: ByClient | None, cohort: Indices, clients: int, draws: Seconds) -> Seconds:
    """Return the value of every active client [C]; a speed of None is infinite."""
    if isinstance(value, Lognormal):
        return np.asarray(value.median * np.exp(value.sigma * draws))
    if isinstance(value, tuple):
        if len(value) != clients:
            raise BadInput(f"{name} lists {plural(len(value), 'client')}, and there are {clients}")
        return np.array(value)[cohort]
    return np.full(len(cohort), np.inf if value is None else value)


def _normals(stream: int, clients: Indices) -> Seconds:
    """Return a standard normal number for every client, by the method of Box and Muller."""
    uniform = [(rng.bits(stream, 2 * clients + side) + 0.5) * 2.0**-53 for side in (0, 1)]
    return np.asarray(np.sqrt(-2 * np.log(uniform[0])) * np.cos(2 * np.pi * uniform[1]))


# --- clocks by name ---------------------------------------------------------------------------------------------------

# Networks alone, without computing time: docs/how-to/time-on-a-network.md has the sources.
PRESETS: dict[str, dict[str, Any]] = {
    "lan": {"download": 1000.0, "upload": 1000.0, "latency": 0.001, "server_link": 1000.0},
    "fibre": {"download": 1000.0, "upload": 500.0, "latency": 0.004},
    "home": {"download": 100.0, "upload": 20.0, "latency": 0.028},
    "4g": {"download": 14.7, "upload": 13.6, "latency": 0.053},
    "mixed": {
        "download": {"median": 100.0, "sigma": 1.0},
        "upload": {"median": 20.0, "sigma": 1.0},
        "latency": 0.028,
    },
}


def make_clock(name: str | None = None, **options: Any) -> Clock:
    """Return a clock by name, with other values for some of its options.

    >>> make_clock("home", step_seconds=0.2).upload
    20.0
    """
    if name is not None and name not in PRESETS:
        raise unknown("clock", str(name), PRESETS)
    refuse_unknown_options("the clock", options, [field.name for field in dataclasses.fields(Clock)])
    return Clock(**{**(PRESETS[name] if name else {}), **options})


def as_clock(given: Any) -> Clock | None:
    """Return a clock given by name, as a table or as an object."""
    if given is None or isinstance(given, Clock):
        return given
    if isinstance(given, str):
        return make_clock(given)
    if isinstance(given, Mapping) and all(isinstance(key, str) for key in given):
        return make_clock(**given)
    raise BadInput(
        f"clock is {short_repr(given)}: give a name ({', '.join(PRESETS)}), a table such as {{'name': '4g', "
        "'step_seconds': 0.2}, or a lamina.Clock"
    )


explain_options(Clock)
