"""Print repeated warnings only once, by Python's own handler or by those of the user."""

from __future__ import annotations

import logging
import math
import time

REPEAT_AFTER_S = 60.0  # since a text last came; so a notebook's cell that is run again warns again
NEW = "is_new_to_lamina"  # attribute of a record


class WarningsOnce(logging.Handler):
    """Prints the warnings of lamina's logger unless another handler does; a hundred simulations print a text once.

    Handlers that the user has set up get a filter that drops repeated warnings of lamina. The logs of runs get all.
    """

    prints = False  # beside another handler

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._times: dict[str, float] = {}  # when each text last came

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning that is not a repetition, or let the other handlers do so."""
        handlers = printing_handlers()
        for handler in handlers:
            if self.is_new not in handler.filters:
                handler.addFilter(self.is_new)
        if self.is_new(record) and logging.lastResort and not handlers:
            logging.lastResort.handle(record)

    def is_new(self, record: logging.LogRecord) -> bool:
        """Return whether a record is no repetition of a warning of lamina."""
        if record.levelno < logging.WARNING or not f"{record.name}.".startswith("lamina."):
            return True
        if NEW not in record.__dict__:  # the first of several handlers asks
            text, now = record.getMessage(), time.monotonic()
            record.__dict__[NEW] = now - self._times.get(text, -math.inf) > REPEAT_AFTER_S
            self._times[text] = now
        return bool(record.__dict__[NEW])

    def forget(self) -> None:
        """Print every text again."""
        self._times.clear()


def print_warnings_once() -> None:
    """Let lamina's logger print warnings; called when the Python API, or the logs of runs, are imported."""
    logger = logging.getLogger("lamina")
    if not any(isinstance(handler, WarningsOnce) for handler in logger.handlers):
        logger.addHandler(WarningsOnce())


def printing_handlers() -> list[logging.Handler]:
    """Return the other handlers that lamina's lines reach and that may print, such as those of the user."""
    logger = logging.getLogger("lamina")
    handlers = [*logger.handlers, *(logging.getLogger().handlers if logger.propagate else [])]
    return [handler for handler in handlers if getattr(handler, "prints", True)]
