"""Ctrl-C in the seconds that the command line takes to import torch: it ends at once, in one line.

A KeyboardInterrupt would end in a traceback, or in an abort where it is raised inside torch's C++ code. Nothing is
changed in a program that merely imports lamina.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from itertools import pairwise
from types import FrameType


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def guard_import() -> None:
    """Let Ctrl-C end the command while it is imported, unless it is ignored, as in the background of a shell."""
    as_script = bool(sys.argv) and sys.argv[0].rpartition(os.sep)[2] == "lamina"
    as_module = ("-m", "lamina") in pairwise(sys.orig_argv)
    if (as_script or as_module) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, _end)


def end_guard() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


guard_import()
