"""Copy the lines of lamina's logger to the ``log.txt`` of every open run."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TextIO

from lamina.base.text import printable
from lamina.base.warnings_once import print_warnings_once

print_warnings_once()


class LogLines(logging.Handler):
    """Writes the lines of lamina's logger to the logs of all open runs, including lines from before they were opened.

    A line about one run, with its folder as ``about``, goes only to that run's log.
    """

    prints = False  # so `WarningsOnce` still prints

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self.about: Path | None = None  # the run of lines without an ``about``
        self._lines: list[tuple[Path | None, str]] = []
        self._files: list[tuple[Path, TextIO]] = []

    def __enter__(self) -> LogLines:
        logger = logging.getLogger("lamina")
        self._level = logger.level
        logger.setLevel(min(logging.INFO, logger.level or logging.INFO))
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("lamina")
        logger.removeHandler(self)
        logger.setLevel(self._level)
        for _folder, file in self._files:
            with contextlib.suppress(OSError):
                file.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; a log that cannot be written does not end the run."""
        about = getattr(record, "about", self.about)
        line = printable(self.format(record), lines=record.exc_info is not None) + "\n"
        self._lines.append((about, line))
        with contextlib.suppress(OSError):
            for folder, file in self._files:
                if about in (None, folder):
                    file.write(line)
                    file.flush()

    def follow(self, folder: Path) -> None:
        """Open a run's log and write the lines so far to it."""
        with contextlib.suppress(OSError):
            file = (folder / "log.txt").open("a", encoding="utf-8")
            self._files.append((folder, file))
            file.write("".join(line for about, line in self._lines if about in (None, folder)))
            file.flush()
