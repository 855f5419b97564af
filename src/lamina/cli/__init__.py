"""The command line, ``lamina``: a module for every command or group of commands; `lamina --help` lists them.

Exit codes: 0 done, 1 a bug, 2 bad input, 3 training diverged, 130 interrupted.
"""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Annotated

import click
import typer

from lamina import __version__
from lamina.cli import (  # noqa: F401 (a module's commands enter the app when it is imported)
    compare,
    doctor,
    export,
    flower,
    listing,
    report,
    reproduce,
    run,
    tune,
    watch,
)
from lamina.cli.base import Interrupted, WarningLines, app, checked_output, out, say, tell, tell_progress
from lamina.engines.stacked.memory import is_out_of_memory
from lamina.engines.stacked.ranks import Ranks
from lamina.errors import Diverged, LaminaError, short_repr
from lamina.interrupt import end_guard, guard

EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_INTERRUPTED = 2, 3, 130
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
        with checked_output():
            end_guard()
            code = app(arguments, prog_name="lamina", standalone_mode=False)
        sys.exit(code)
    except click.UsageError as error:
        say_usage(error)
        sys.exit(EXIT_BAD_INPUT)
    except (click.Abort, KeyboardInterrupt):
        tell_progress("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except Diverged as error:
        say("diverged", error)
        sys.exit(EXIT_DIVERGED)
    except LaminaError as error:
        say("error", error)
        sys.exit(EXIT_BAD_INPUT)
    except OSError as error:  # a path that no command checked: too long, no permission, ...
        if error.filename is None:
            raise
        say("error", f"cannot use {short_repr(error.filename)}: {error.strerror}")
        sys.exit(EXIT_BAD_INPUT)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        say("error", f"out of memory ({' '.join(str(error).split())[:200]}): take a smaller model, batch or cohort")
        sys.exit(EXIT_BAD_INPUT)
    except Interrupted as error:
        if Ranks.current().rank == 0:
            tell_progress(str(error))
        sys.exit(EXIT_INTERRUPTED)
    finally:
        guard()
        logging.getLogger("lamina").removeHandler(warnings)


def say_usage(error: click.UsageError) -> None:
    """Print in one line what is wrong with a command; nothing if its help was shown instead."""
    problem, *hints = " ".join(error.format_message().split()).split(" Did you mean ")
    if problem:
        command = error.ctx.command_path if error.ctx else "lamina"
        nearest = f"; did you mean {hints[0]}" if hints else ""  # click and typer both may give one
        say("error", f"{problem[0].lower()}{problem[1:].rstrip('.')}{nearest}; see {command} --help")


def print_version(wanted: bool) -> None:
    """Print the version and exit, if asked for."""
    if wanted:
        tell(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Options before the command; the help text is the app's."""


@app.command(name="version")
def version_() -> None:
    """Print the version."""
    tell(__version__)
