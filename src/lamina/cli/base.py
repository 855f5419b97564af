"""What every command shares: the app, the two consoles, how a line is said, the progress bar."""

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
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table

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
    """A console that writes control characters out: a name from a file or a node cannot command the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does; only what rich itself adds (`Segment.control`) stays a command."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text, lines=True), style)


def discard(stream: TextIO) -> None:
    """Send what a stream still holds, and all that follows, nowhere; else Python fails again when it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class OutputFailed(LaminaError):
    """The standard output cannot be written to: a full disk behind it, say."""


class CheckedOutput:
    """A stream that raises `OutputFailed`, which tells its errors from those of any other file."""

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
        except BrokenPipeError:  # the reader has seen enough: rich and click end in silence
            raise
        except OSError as error:
            discard(self._stream)
            raise OutputFailed(f"cannot write to the standard output: {error.strerror or error}") from error


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Turn what goes wrong with the standard output into one line."""
    stream = sys.stdout
    if stream is None:  # it was closed by whoever started the command
        yield
        return
    checked = CheckedOutput(stream)
    sys.stdout = cast(TextIO, checked)
    try:
        yield
        checked.flush()  # what is still held back would be lost after the command has reported success
    finally:
        sys.stdout = stream


class ErrorConsole(SafeConsole):
    """The console of warnings, errors and progress; a full disk behind it is no reason to end a command."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print as rich does, if it can be printed."""
        try:
            super().print(*args, **kwargs)
        except OSError:
            discard(sys.stderr)


READABLE_TEXT = 20  # characters of a cell in one line; a longer one may be folded
out = SafeConsole()
err = ErrorConsole(stderr=True)

File = Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="the experiment file")]
Set = Annotated[list[str] | None, typer.Option("--set", help="override a key, e.g. train.lr=0.1; may be repeated")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace what the folder holds of an earlier run")]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="also write TensorBoard's event files")]
MLflow = Annotated[bool, typer.Option("--mlflow", help="also write the rounds to MLflow's local store")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print nothing but errors")]


def say(what: str, text: object) -> None:
    """Print an error or a warning as one line; its text may hold brackets, which are not markup."""
    err.print(f"[red]{what}:[/]", escape(printable(str(text))), highlight=False, soft_wrap=True)


def tell(line: str) -> None:
    """Print a line as it is: no markup, no colours, no folding."""
    out.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def tell_text(text: str) -> None:
    """Print text for programs exactly as it is."""
    if sys.stdout is not None:
        sys.stdout.write(text)
        sys.stdout.flush()


def tell_progress(line: str) -> None:
    """Print a line about something that goes on, where it is no part of the result: to standard error."""
    err.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def best_and_last(history: History) -> str:
    """Say how good a run became: by accuracy, or by the loss where there is no accuracy."""
    for name in ("accuracy", "loss", "node_accuracy", "node_loss"):
        if name in history.columns:
            return f"best {name.replace('_', ' ')} {history.best(name):.4f}, last {history.last(name):.4f}"
    return "not evaluated"


def fit_columns(make: Callable[[Sequence[str]], Table], leave_out_first: Sequence[str], console: Console) -> Table:
    """Return a table with as few columns left out as it takes for the others to stay readable.

    Args:
        make: makes the table without some columns.
        leave_out_first: the columns that may be left out, in this order.
        console: where it is to be printed.
    """
    unbounded = console.options.update(max_width=10_000)  # else nothing is wider than the terminal
    left_out: list[str] = []
    while True:
        table, narrow = make(left_out), make(left_out)
        for column in narrow.columns:
            column.max_width = None if column.no_wrap else READABLE_TEXT
        if console.measure(narrow, options=unbounded).maximum <= console.width or len(left_out) == len(leave_out_first):
            return table
        left_out.append(leave_out_first[len(left_out)])


def wanted_trackers(tensorboard: bool, mlflow: bool) -> list[str]:
    """The names of the trackers that were asked for."""
    return [name for name, asked in (("tensorboard", tensorboard), ("mlflow", mlflow)) if asked]


class Interrupted(Exception):
    """The user pressed Ctrl-C, which typer alone would pass over in silence; the text says what is kept."""


@contextlib.contextmanager
def interruptible(kept: str) -> Iterator[None]:
    """Turn Ctrl-C into `Interrupted`, inside the command, where typer cannot swallow it."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {kept}") from None


class Stop:
    """Ctrl-C and SIGTERM: the first asks, `stop()`, to stop after the round; the second stops at once.

    torchrun passes every signal on to processes that have had it from the terminal: there the second one says nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __call__(self) -> bool:
        """Whether somebody has asked to stop."""
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
    """Shows the warnings of lamina's logger, one line each; what several runs have to say is said once."""

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
    """A context that gives ``advance(what, row)``: a live bar on a terminal, nothing anywhere else."""

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
