"""The command line, ``lamina``: a module for every command or group of commands; `lamina --help` lists them.

Exit codes: 0 done, 1 a bug, a failed audit or a difference, 2 bad input, 3 training diverged, 130 interrupted.
"""

from __future__ import annotations

import errno
import functools
import io
import itertools
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import click
import typer

from lamina import __version__
from lamina.base.errors import Diverged, LaminaError, nearest, short_repr
from lamina.cli import (  # noqa: F401 (a module's commands enter the app when it is imported)
    audit,
    compare,
    conform,
    doctor,
    export,
    flower,
    frontier,
    listing,
    predict,
    report,
    reproduce,
    run,
    time,
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
        print_usage_error(error, sys.argv[1:] if arguments is None else arguments)
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


def print_usage_error(error: click.UsageError, arguments: list[str]) -> None:
    """Print in one line what is wrong with a command; nothing if its help was shown instead."""
    problem, *hints = " ".join(error.format_message().split()).split(" Did you mean ")
    if problem:
        command = error.ctx.command_path if error.ctx else "lamina"
        hint = f"; did you mean {hints[0]}" if hints else ""  # click and typer both may give one
        if error.ctx and any("--set" in option.opts for option in error.ctx.command.params):
            problem, hint = problem.partition(". (Did you mean")[0], set_hint(error, arguments) or hint
        print_problem("error", f"{problem[0].lower()}{problem[1:].rstrip('.')}{hint}; see {command} --help")


def set_hint(error: click.UsageError, arguments: list[str]) -> str:
    """Return how a key that was given as an option, or as an argument key=value, is set."""
    from lamina.cli.conform import settable_names
    from lamina.experiment.config import key_places

    if not isinstance(error, click.NoSuchOption):
        given = [word for word in arguments if "=" in word and f"({word}" in error.format_message()]
        return f"; give it as --set {given[0]}" if given else ""
    command = error.ctx.command if error.ctx else None
    option, command_name = error.option_name, command.name if command else None
    if command_name == "conform":  # which reads no experiment file
        places = {name: name for name in settable_names()}
    else:
        places = key_places(*(section for section in ("compare", "tune") if section == command_name))
    words = list(itertools.chain.from_iterable(word.split("=", 1) for word in arguments))
    values = words[words.index(option) + 1 :][:1] if option in words else []
    value = values[0] if values and not values[0].startswith("--") else "…"
    ways = {name: f"; give it as --set {key}={value}" for name, key in places.items()}
    ways |= {key: ways[name] for name, key in places.items()}  # --train.lr
    known_options = [name.lstrip("-") for parameter in command.params for name in parameter.opts] if command else []
    return nearest(option.lstrip("-"), known_options, ways).replace("mean '", "mean '--")


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
