"""Print repeated warnings only once, by Python's own handler or by those of the user."""

from __future__ import annotations

import logging
import math
import time

REPEAT_AFTER_S = 60.0  # since a text last came; so a notebook's cell that is run again warns again


class Once:
    """A filter that drops the warnings of lamina that have just come."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}  # when each text last came

    def __call__(self, record: logging.LogRecord) -> bool:
        """Return whether a record is no repetition of a warning of lamina."""
        if record.levelno < logging.WARNING or not f"{record.name}.".startswith("lamina."):
            return True
        text, now = record.getMessage(), time.monotonic()
        is_new = now - self._times.get(text, -math.inf) > REPEAT_AFTER_S
        self._times[text] = now
        return is_new

    def forget(self) -> None:
        """Let every text pass again."""
        self._times.clear()


class WarningsOnce(logging.Handler):
    """Prints the warnings of lamina's logger unless another handler does; a hundred simulations print a text once.

    Handlers that the user has set up get a filter that drops repeated warnings of lamina. The logs of runs get all.
    """

    prints = False  # beside another handler

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.once = Once()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning that is not a repetition, or let the other handlers do so, which come after this one."""
        handlers = printing_handlers()
        for handler in handlers:
            if not any(isinstance(each, Once) for each in handler.filters):
                handler.addFilter(Once())
        if self.once(record) and logging.lastResort and not handlers:
            logging.lastResort.handle(record)


def print_warnings_once() -> None:
    """Let lamina's logger print warnings; called when the Python API, or the logs of runs, are imported."""
    logger = logging.getLogger("lamina")
    if not any(isinstance(handler, WarningsOnce) for handler in logger.handlers):
        logger.handlers.insert(0, WarningsOnce())


def printing_handlers() -> list[logging.Handler]:
    """Return the other handlers that lamina's lines reach and that may print, such as those of the user."""
    logger = logging.getLogger("lamina")
    handlers = [*logger.handlers, *(logging.getLogger().handlers if logger.propagate else [])]
    return [handler for handler in handlers if getattr(handler, "prints", True)]
