"""The command line, ``lamina``: a module for every command or group of commands; `lamina --help` lists them.

Exit codes: 0 done, 1 a bug, 2 bad input, 3 training diverged, 130 interrupted.
"""

from __future__ import annotations

import errno
import functools
import io
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import click
import typer

from lamina import __version__
from lamina.base.errors import Diverged, LaminaError, short_repr
from lamina.cli import (  # noqa: F401 (a module's commands enter the app when it is imported)
    compare,
    doctor,
    export,
    flower,
    listing,
    predict,
    report,
    reproduce,
    run,
    tune,
    watch,
)
from lamina.cli.base import Interrupted, WarningLines, app, discard, echo, err, out, print_problem

EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_INTERRUPTED = 2, 3, 130
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
WIDTH_FOR_PROGRAMS = 1000  # of output that is not on a terminal, so that nothing is folded


def main(arguments: list[str] | None = None) -> None:
    """Run a command; report lamina's own errors in one line and an exit code."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # for the user's algorithms and models, "my_module:MyClass"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks must not stop a run
    if not out.is_terminal:
        out.width = WIDTH_FOR_PROGRAMS
    warnings = WarningLines()
    logging.getLogger("lamina").addHandler(warnings)
    try:
        sys.exit(run_command(arguments))
    finally:
        out.quiet = False
        logging.getLogger("lamina").removeHandler(warnings)


@functools.cache
def command_line() -> click.Command:
    """Return the whole command line as click's object, built once."""
    return typer.main.get_command(app)


def run_command(arguments: list[str] | None) -> int:
    """Run a command and return its exit code; an error that the user can act on is printed as one line."""
    try:
        code = command_line().main(arguments, prog_name="lamina", standalone_mode=False)
        if sys.stdout is not None:  # None if the parent process closed it
            sys.stdout.flush()  # an error now is reported; at exit it would be lost
        return int(code or 0)
    except click.UsageError as error:
        print_usage_error(error)
    except (click.Abort, KeyboardInterrupt):
        echo("interrupted", err)
        return EXIT_INTERRUPTED
    except Interrupted as error:
        if os.environ.get("RANK", "0") == "0":  # of the processes that torchrun starts, one says so
            echo(str(error), err)
        return EXIT_INTERRUPTED
    except Diverged as error:
        print_problem("diverged", error)
        return EXIT_DIVERGED
    except LaminaError as error:
        print_problem("error", error)
    except OSError as error:
        if error.filename is not None:  # a path that no command checked: too long, no permission, ...
            print_problem("error", f"cannot use {short_repr(error.filename)}: {error.strerror}")
        elif error.errno in FULL_DISK:  # functions that write files name them, so this is the standard output
            discard(sys.stdout)
            print_problem("error", f"cannot write to the standard output: {error.strerror}")
        else:
            raise
    except (MemoryError, RuntimeError) as error:
        from lamina.engines.stacked.memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:200]
        print_problem("error", f"out of memory ({reason}): take a smaller model, batch or cohort")
    return EXIT_BAD_INPUT


def print_usage_error(error: click.UsageError) -> None:
    """Print in one line what is wrong with a command; nothing if its help was shown instead."""
    problem, *hints = " ".join(error.format_message().split()).split(" Did you mean ")
    if problem:
        command = error.ctx.command_path if error.ctx else "lamina"
        nearest = f"; did you mean {hints[0]}" if hints else ""  # click and typer both may give one
        print_problem("error", f"{problem[0].lower()}{problem[1:].rstrip('.')}{nearest}; see {command} --help")


def print_version(wanted: bool) -> None:
    """Print the version and exit, if asked for."""
    if wanted:
        echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Options before the command; the help text is the app's."""
