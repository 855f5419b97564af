"""How many rows (clients) are trained at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lamina.engines.stacked.engine import Member, Stacked

CACHE_BYTES = 4 << 20  # what a CPU core can hope to keep in its caches between two steps


def rows_that_fit(engine: Stacked, member: Member) -> int:
    """As many rows as suit the device's memory, at least one."""
    objective = engine.objective
    model_bytes = objective.start.numel() * objective.start.element_size()
    if objective.device.type == "cpu":
        return max(1, CACHE_BYTES // model_bytes)
    return 1_000_000
