"""Shared by all commands: the app, common options, the consoles and what is printed on them, the progress bar."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO, TypeVar, cast

import typer
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from lamina.engines.stacked.ranks import Ranks
from lamina.errors import LaminaError
from lamina.history import History, Row
from lamina.text import printable

T = TypeVar("T")
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Layer-wise, locally adaptive federated optimisation: Fed-LAMB, Mime-LAMB, FedLADA and their baselines.",
)


class SafeConsole(Console):
    """A console that shows control characters as text, so that no name from a file or a node controls the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does; only control codes of rich itself (`Segment.control`) reach the terminal."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text, lines=True), style)


def discard(stream: TextIO) -> None:
    """Discard the buffer of a stream and all later output; otherwise Python fails again at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class OutputFailed(LaminaError):
    """The standard output cannot be written to, for example on a full disk."""


class CheckedOutput:
    """A stream whose write errors are raised as `OutputFailed`, to tell them from errors of other files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as the stream does."""
        return self._checked(lambda: self._stream.write(text))

    def flush(self) -> None:
        """Flush as the stream does."""
        self._checked(self._stream.flush)

    def _checked(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except BrokenPipeError:  # the reader closed the pipe: rich and click end silently
            raise
        except OSError as error:
            discard(self._stream)
            raise OutputFailed(f"cannot write to the standard output: {error.strerror or error}") from error


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Report errors of the standard output in one line."""
    stream = sys.stdout
    if stream is None:  # closed by the parent process
        yield
        return
    checked = CheckedOutput(stream)
    sys.stdout = cast(TextIO, checked)
    try:
        yield
        checked.flush()  # an error now is reported; at exit it would be lost
    finally:
        sys.stdout = stream


class ErrorConsole(SafeConsole):
    """The console of warnings, errors and progress; a command continues if it cannot be written to."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print as rich does; discard everything after a write error."""
        try:
            super().print(*args, **kwargs)
        except OSError:
            discard(sys.stderr)


UNFOLDED_CHARACTERS = 20  # longer text in a cell may be folded
out = SafeConsole()
err = ErrorConsole(stderr=True)

File = Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="the experiment file")]
Set = Annotated[list[str] | None, typer.Option("--set", help="override a key, e.g. train.lr=0.1; may be repeated")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace what the folder holds of an earlier run")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="also write TensorBoard's event files")]
MLflow = Annotated[bool, typer.Option("--mlflow", help="also write the rounds to MLflow's local store")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print nothing but errors")]


def say(what: str, text: object) -> None:
    """Print an error or a warning as one line."""
    err.print(f"[red]{what}:[/]", escape(printable(str(text))), highlight=False, soft_wrap=True)


def tell(line: str) -> None:
    """Print a line as it is: no markup, no colours, no folding."""
    out.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def tell_text(text: str) -> None:
    """Print text for programs unchanged."""
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def tell_progress(line: str) -> None:
    """Print a line about progress, which is no part of the result, to standard error."""
    err.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def best_and_last(history: History) -> str:
    """Return the best and last accuracy of a run in words, or the loss where there is no accuracy."""
    for name in ("accuracy", "loss", "node_accuracy", "node_loss"):
        if name in history.columns:
            return f"best {name.replace('_', ' ')} {history.best(name):.4f}, last {history.last(name):.4f}"
    return "not evaluated"


def plain_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    left_out: Sequence[str] = (),
    right: Sequence[str] = (),
    no_wrap: Sequence[str] = (),
    caption: str | None = None,
) -> Table:
    """Return a table without lines, whose cells are text and not markup.

    Args:
        headings: of all columns.
        rows: a cell for each heading.
        left_out: headings of the columns not to show.
        right: headings of right-aligned columns.
        no_wrap: headings of columns that must not be folded.
        caption: a line below the table.
    """
    table = Table(box=None, pad_edge=False, caption=caption)
    shown = [index for index, heading in enumerate(headings) if heading not in left_out]
    for heading in (headings[index] for index in shown):
        justify: JustifyMethod = "right" if heading in right else "left"
        table.add_column(escape(heading), justify=justify, overflow="fold", no_wrap=heading in no_wrap)
    for row in rows:
        cells = [row[index] for index in shown]
        table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in cells))
    return table


def fit_columns(make: Callable[[Sequence[str]], Table], leave_out_first: Sequence[str], console: Console) -> Table:
    """Return a table that fits the console, leaving out as few columns as possible.

    Args:
        make: makes the table without the given columns.
        leave_out_first: the columns that may be left out, in this order.
        console: where the table will be printed.
    """
    unbounded = console.options.update(max_width=10_000)  # rich measures nothing as wider than the console
    left_out: list[str] = []
    while True:
        table, narrow = make(left_out), make(left_out)
        for column in narrow.columns:
            column.max_width = None if column.no_wrap else UNFOLDED_CHARACTERS
        if console.measure(narrow, options=unbounded).maximum <= console.width or len(left_out) == len(leave_out_first):
            return table
        left_out.append(leave_out_first[len(left_out)])


def wanted_trackers(tensorboard: bool, mlflow: bool) -> list[str]:
    """Return the names of the requested trackers."""
    return [name for name, asked in (("tensorboard", tensorboard), ("mlflow", mlflow)) if asked]


class Interrupted(Exception):
    """The user pressed Ctrl-C, which typer would ignore silently; the text says what is kept."""


@contextlib.contextmanager
def interruptible(kept: str) -> Iterator[None]:
    """Turn Ctrl-C into `Interrupted`, inside the command, where typer cannot swallow it."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {kept}") from None


class Stop:
    """Handle Ctrl-C and SIGTERM: after the first, `stop()` is true and training ends with the round; the second kills.

    Under torchrun, which sends its processes a signal that they also got from the terminal, the second is ignored.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        return self.asked

    def _ask(self, number: int, frame: object) -> None:
        if not self.asked and Ranks.current().rank == 0:
            err.print("stopping after this round; once more to stop at once", highlight=False)
        self.asked = True
        if Ranks.current().world == 1:
            self._restore()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def __exit__(self, *_: object) -> None:
        self._restore()


class WarningLines(logging.Handler):
    """Print the warnings of lamina's logger, one line each; repeated warnings are printed once."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a warning."""
        line = record.getMessage()
        if line not in self._said:
            self._said.add(line)
            say("warning", line)


class progress_bar:  # noqa: N801 (used as a function)
    """A context whose value is called with every finished round: a live bar on a terminal, otherwise nothing."""

    def __init__(self, total: int, quiet: bool, done: int = 0) -> None:
        self.live = not quiet and err.is_terminal
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("acc {task.fields[accuracy]}"),
            TimeRemainingColumn(),
            console=err,
            transient=True,
            disable=not self.live,
        )
        self.task = self.bar.add_task("starting", total=total, completed=done, accuracy="–")

    def __enter__(self) -> progress_bar:
        self.bar.start()
        return self

    def __call__(self, what: str, row: Row) -> None:
        """Show one more finished round."""
        accuracy = f"{row['accuracy']:.3f}" if "accuracy" in row else "–"
        self.bar.update(self.task, advance=1, description=f"{what} round {row['round']}", accuracy=accuracy)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
