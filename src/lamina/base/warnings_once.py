"""Print warnings where the user has set up no logging, as Python does, but repeated ones only once."""

from __future__ import annotations

import logging
import math
import time

REPEAT_AFTER_S = 60.0  # since a text last came; so a notebook's cell that is run again warns again


class WarningsOnce(logging.Handler):
    """Prints the warnings of lamina's logger unless another handler does; a hundred simulations print a text once."""

    prints = False  # beside another handler

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._times: dict[str, float] = {}  # when each text last came

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning that is not a repetition."""
        text, now = record.getMessage(), time.monotonic()
        is_new = now - self._times.get(text, -math.inf) > REPEAT_AFTER_S
        self._times[text] = now
        if is_new and logging.lastResort and not has_handler():
            logging.lastResort.handle(record)


def print_warnings_once() -> None:
    """Let lamina's logger print warnings; called when the Python API, or the logs of runs, are imported."""
    logger = logging.getLogger("lamina")
    if not any(isinstance(handler, WarningsOnce) for handler in logger.handlers):
        logger.addHandler(WarningsOnce())


def has_handler() -> bool:
    """Return whether lamina's lines reach any other handler that may print, such as one that the user has set up."""
    logger = logging.getLogger("lamina")
    handlers = [*logger.handlers, *(logging.getLogger().handlers if logger.propagate else [])]
    return any(getattr(handler, "prints", True) for handler in handlers)
