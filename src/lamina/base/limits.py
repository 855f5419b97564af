"""Refuse absurd sizes, and whatever needs more memory than is available, before anything is allocated.

The bounds are far beyond any real experiment. Estimates of memory are lower bounds: what is refused could not run.
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.base.errors import BadInput, is_number, is_whole, short_repr

if TYPE_CHECKING:
    import torch

MOST = 100_000_000  # rounds, epochs, local steps, trials: counts without a bound of their own
MOST_BATCH = 10**15  # samples; a batch larger than the client means all of its samples, so this only keeps int64 safe
MOST_CLIENTS = 10_000_000
MOST_SEEDS = 10_000
LEAST_SEED, MOST_SEED = -(10**39), 10**39  # room for any 16 bytes; thousands of digits fit no name and no message
MOST_THREADS = 1_024
MOST_POINTS = 100_000  # combinations of a grid's values
MOST_UNITS = 1_000_000_000  # of one layer of a model

MODEL_COPIES = 8  # of the parameters while a model is trained, at least: measured were 11 (FedAvg) to 19 (Fed-LAMB)
SURELY_FITS = 64 << 20  # bytes; less is not compared with the memory that is left


def check_count(name: str, value: Any, most: int = MOST, least: int = 1) -> int:
    """Return `value` as an int; refuse all but whole numbers from `least` to `most`."""
    if not is_whole(value) or value < least:
        raise BadInput(f"{name} = {short_repr(value)} is not a whole number >= {least}")
    if value > most:
        raise BadInput(f"{name} = {short_repr(value)} exceeds the limit of {most}")
    return int(value)


def check_number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
) -> float:
    """Return `value` as a float; refuse all but finite numbers within the bounds.

    >>> check_number("dropout", 0.5, least=0, below=1)
    0.5
    """
    if is_number(value) and math.isfinite(value) and least <= value <= most and above < value < below:
        return float(value)
    signs = {">": above, ">=": least, "<": below, "<=": most}
    bounds = " and ".join(f"{sign} {bound:g}" for sign, bound in signs.items() if math.isfinite(bound))
    raise BadInput(f"{name} = {short_repr(value)} is not a number {bounds}")


def check_switch(name: str, value: Any) -> None:
    """Refuse a value that is neither true nor false."""
    if not isinstance(value, bool):
        raise BadInput(f"{name} = {short_repr(value)} is neither true nor false")


def check_seed(seed: Any) -> None:
    """Refuse a seed that is not a whole number, or too long for the name of a folder."""
    if not is_whole(seed) or not LEAST_SEED <= seed <= MOST_SEED:
        raise BadInput(f"seed = {short_repr(seed)} is not a whole number of at most 39 digits")


def check_memory(what: str, needed: int, advice: str, device: torch.device | None = None) -> None:
    """Refuse an allocation of at least `needed` bytes if less is available on the device (None: the host).

    `what` names it in the message, `advice` says what to do.
    """
    if needed <= SURELY_FITS:
        return
    available = available_bytes(device)
    if available is not None and needed > available:
        place = "this machine" if device is None or device.type == "cpu" else f"the device {device}"
        raise BadInput(f"{what} needs at least {in_bytes(needed)}, {place} has {in_bytes(available)} free: {advice}")


def in_bytes(count: int) -> str:
    """Return a number of bytes with a unit.

    >>> in_bytes(640), in_bytes(2_500_000), in_bytes(999_900_000), in_bytes(549_755_813_888), in_bytes(10**30)
    ('640 B', '2.5 MB', '1 GB', '550 GB', '1e+15 PB')
    """
    for unit, size in (("PB", 10**15), ("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= 0.9995 * size:  # which three digits round to 1
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def available_bytes(device: torch.device | None = None) -> int | None:
    """Return the available memory of a device (None: the host), or None if it is unknown."""
    if device is not None and device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    if device is not None and device.type != "cpu":
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):  # without /proc: all there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
