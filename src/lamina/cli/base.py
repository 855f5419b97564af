"""Shared by all commands: the app, common options, the consoles and what is printed on them, progress and stopping."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich import box
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lamina.base.limits import in_bytes
from lamina.base.text import plural, printable

if TYPE_CHECKING:
    from lamina.engines.ranks import Ranks
    from lamina.training.history import History
    from lamina.training.progress import Bars

# Commands import torch, pydantic and the experiment package inside their functions, so that --help needs none of them.
UNFOLDED_CHARACTERS = 20  # longer text in a cell may be folded

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Layer-wise, locally adaptive federated optimisation: Fed-LAMB, Mime-LAMB, FedLADA and their baselines.",
)


# --- the two streams --------------------------------------------------------------------------------------------------


class SafeConsole(Console):
    """A console that shows control characters as text, so that no name from a file or a node controls the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does; only control codes of rich itself (`Segment.control`) reach the terminal."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text, lines=True), style)


class ErrorConsole(SafeConsole):
    """The console of warnings, errors and progress; a command continues if it cannot be written to."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print as rich does; discard everything after a write error."""
        try:
            super().print(*args, **kwargs)
        except OSError:
            discard(sys.stderr)


out = SafeConsole(emoji=False)  # with emoji, a run's name a:heart:b would be printed as a❤b
err = ErrorConsole(stderr=True, emoji=False)


def be_quiet(quiet: bool) -> bool:
    """Print no results and no progress, if asked for: where results are not printed, `out.quiet` is set."""
    out.quiet = quiet
    return quiet


def discard(stream: TextIO) -> None:
    """Discard the buffer of a stream and all later output; otherwise Python fails again at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def print_problem(kind: str, text: object) -> None:
    """Print an error or a warning as one line."""
    err.print(f"[red]{kind}:[/]", escape(printable(str(text))), highlight=False, soft_wrap=True)


def echo(line: str, console: Console = out) -> None:
    """Print a line as it is: no markup, no colours, no folding."""
    console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def echo_progress(line: str) -> None:
    """Print a line about progress, which is not part of the result, to standard error, unless the command is quiet."""
    if not out.quiet:
        echo(line, err)


def echo_text(text: str) -> None:
    """Print text for programs unchanged."""
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


class WarningLines(logging.Handler):
    """Print the warnings of lamina's logger, one line each; repeated warnings are printed once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning."""
        line = record.getMessage()
        if line not in self._printed:
            self._printed.add(line)
            print_problem("warning", line)


# --- options of several commands -------------------------------------------------------------------------------------

File = Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="the experiment file")]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN…", help="a run's folder, or a folder of such folders")]
Set = Annotated[list[str] | None, typer.Option("--set", help="override a key, e.g. train.lr=0.1; may be repeated")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace what the folder holds of an earlier run")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="also write TensorBoard's event files")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", callback=be_quiet, help="print nothing but errors")]


# --- tables and progress ----------------------------------------------------------------------------------------------


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    right: Sequence[str] = (),
    no_wrap: Sequence[str] = (),
    optional: Sequence[str] = (),
    title: str | None = None,
    caption: str = "",
) -> Table:
    """Return a table whose cells are text, not markup, and which fits the standard output.

    `right`, `no_wrap` and `optional` name columns: aligned to the right, never folded, and left out on a narrow
    terminal, the least important one first.
    """
    rows = list(rows)
    unbounded = out.options.update(max_width=10_000)  # rich measures nothing as wider than the console
    for count in range(len(optional) + 1):
        hidden = optional[:count]
        more = f"a wider terminal shows {', '.join(reversed(hidden))}".replace("\n", " ") if hidden else ""
        notes = escape("; ".join(filter(None, (caption, more))))
        fitted = Table(box=box.SIMPLE_HEAD if title else None, pad_edge=False, title_style="bold")
        fitted.title, fitted.caption = title, notes or None
        for heading in headings:
            if heading not in hidden:
                justify: JustifyMethod = "right" if heading in right else "left"
                fitted.add_column(escape(heading), justify=justify, overflow="fold", no_wrap=heading in no_wrap)
        for row in rows:
            cells = [cell for heading, cell in zip(headings, row, strict=True) if heading not in hidden]
            fitted.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))
        if count == len(optional):  # nothing more to leave out, so it need not be measured, which takes long
            break
        for column in fitted.columns:
            column.max_width = None if column.no_wrap else UNFOLDED_CHARACTERS
        fits = out.measure(fitted, options=unbounded).maximum <= out.width
        for column in fitted.columns:
            column.max_width = None
        if fits:
            break
    return fitted


def print_summary(history: History, title: str = "") -> None:
    """Print a run in words: its rounds, the best and last value of its first metric, what it sent, its time."""
    score = "not evaluated"
    for name in ("node_loss", f"node_{history.metric}", "loss", history.metric):
        if name in history.columns:
            score = f"best {name.replace('_', ' ')} {history.best(name):.4f}, last {history.last(name):.4f}"
    sent = in_bytes(int(history.total("bytes_down") + history.total("bytes_up")))
    clock = f", {history.last('clock_seconds'):.3g} s by its clock" if "clock_seconds" in history.columns else ""
    seconds = f", {history.total('seconds'):.1f} s" if "seconds" in history.columns else ""
    echo(f"{title}{plural(len(history), 'round')}, {score}, {sent} sent{seconds}{clock}")


def print_complete(folder: Path, history: History, more: str = "train.rounds") -> None:
    """Say that nothing is left to do in a run's folder."""
    done = plural(len(history), "round")
    echo(f"{folder}/ is complete: {done}; raise {more} for more, or start again with --overwrite")


def round_bars(names: Iterable[str], **options: Any) -> Bars:
    """Return live bars, one for each name, with the last score and the time left; shown on a terminal only."""
    from lamina.training.progress import Bars

    return Bars(names, err, is_shown=not out.quiet and err.is_terminal, **options)


# --- stopping ---------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """The user pressed Ctrl-C, which typer would ignore silently; the text says what is kept."""


@contextlib.contextmanager
def interruptible(kept: str) -> Iterator[None]:
    """Turn Ctrl-C into `Interrupted`, inside the command, where typer cannot swallow it."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {kept}") from None


def how_to_resume(overwrite: bool = False) -> str:
    """Return what to do to resume a command that was stopped."""
    return f"run the same command again{' without --overwrite' * overwrite} to resume"


resumable = interruptible(f"finished rounds are kept; {how_to_resume()}")  # decorates a command that trains


def this_rank() -> Ranks:
    """Return the place of this process among those that torchrun started."""
    from lamina.engines.ranks import Ranks

    return Ranks.current()


class Stop:
    """Handle Ctrl-C and SIGTERM: after the first, `stop()` is true and training ends with the round; the second kills.

    Under torchrun, which sends its processes a signal that they also got from the terminal, the second is ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self.requested

    def _ask(self, number: int, frame: object) -> None:
        if not self.requested and this_rank().rank == 0:
            err.print("stopping after this round; once more to stop at once", highlight=False)
        self.requested = True
        if this_rank().world == 1:
            self.__exit__()

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
