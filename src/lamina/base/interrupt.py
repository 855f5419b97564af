"""Let Ctrl-C end the command line in one line during the seconds it takes to import torch.

A KeyboardInterrupt would print a traceback, or abort if it is raised inside torch's C++ code. Programs that import
lamina are not affected.
"""

# Little is imported here: until the handler is set, Ctrl-C is a traceback.
import os
import signal
import sys


def _end(number: int, frame: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(130)


def guard() -> None:
    """Let Ctrl-C end the command while it is imported or exits, unless SIGINT is ignored, as in a background job."""
    as_script = bool(sys.argv) and sys.argv[0].rpartition(os.sep)[2] == "lamina"
    as_module = ("-m", "lamina") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    if (as_script or as_module) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:
            signal.signal(signal.SIGINT, _end)
        except ValueError:  # not in the main thread
            return


def end_guard() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


guard()
