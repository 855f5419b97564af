"""The command line: ``lamina run``, ``lamina compare``, ``lamina list``, ``lamina show``.

Exit codes: 0 done, 1 a bug, 2 bad input, 3 training diverged, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lamina import __version__, algorithms, models
from lamina.algorithms.contract import allowed, options
from lamina.data import partitions, sources
from lamina.errors import Diverged, LaminaError, unknown
from lamina.experiment import compare as comparing
from lamina.experiment import run as running
from lamina.experiment.config import Experiment, load
from lamina.history import Row
from lamina.ledger import wire_cost

EXIT_BAD_INPUT, EXIT_DIVERGED, EXIT_INTERRUPTED = 2, 3, 130
WIDTH_FOR_PROGRAMS = 1000  # output that is not on a terminal is read by a program: nothing is folded

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Layer-wise, locally adaptive federated optimisation: Fed-LAMB, Mime-LAMB, FedLADA and their baselines.",
)
out = Console()
err = Console(stderr=True)

File = Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="the experiment file")]
Set = Annotated[list[str] | None, typer.Option("--set", help="override a key, e.g. train.lr=0.1; may be repeated")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print nothing but errors")]


class Interrupted(Exception):
    """The user pressed Ctrl-C, which typer alone would pass over in silence; the text says what is kept."""


@contextlib.contextmanager
def interruptible(kept: str) -> Iterator[None]:
    """Turn Ctrl-C into `Interrupted`, inside the command, where typer cannot swallow it."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {kept}") from None


def main(arguments: list[str] | None = None) -> None:
    """Entry point: run the command, turn lamina's own errors into one line and an exit code."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # algorithms and models of the user's own, "my_module:MyClass"
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character the terminal lacks must not end a run
    if not out.is_terminal:
        out.width = WIDTH_FOR_PROGRAMS
    try:
        app(arguments)
    except Diverged as error:
        say("diverged", error)
        sys.exit(EXIT_DIVERGED)
    except LaminaError as error:
        say("error", error)
        sys.exit(EXIT_BAD_INPUT)
    except Interrupted as error:
        err.print(str(error), highlight=False)
        sys.exit(EXIT_INTERRUPTED)


def say(what: str, error: LaminaError) -> None:
    """Print an error as one line; its text may hold brackets, which are not markup."""
    err.print(f"[red]{what}:[/]", escape(str(error)), highlight=False, soft_wrap=True)


def tell(line: str) -> None:
    """Print a line as it is: no markup, no colours, no folding."""
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def print_version(wanted: bool) -> None:
    """Print the version and end, if asked for."""
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


@app.command()
@interruptible("finished rounds are kept")
def run(
    file: File,
    overrides: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="folder for the records")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier run in that folder")] = False,
    quiet: Quiet = False,
) -> None:
    """Train one experiment; its metrics and the trained model go to a folder."""
    experiment = load(file, overrides or [])
    path = out_folder or Path(experiment.run.out or default_folder(file, experiment))
    experiment, ranks = running.join_ranks(experiment)
    simulation = running.build(experiment)  # first: a wrong name matters more than a folder in the way
    folder = running.RunFolder(path, overwrite=overwrite) if ranks.rank == 0 else None
    quiet = quiet or folder is None
    with progress_bar(experiment.train.rounds, quiet) as advance:
        name = experiment.algorithm.name
        running.run(simulation, experiment, folder, on_round=lambda row: advance(name, row))
    if not quiet:
        history = simulation.history
        sent = history.total("bytes_down") + history.total("bytes_up")
        tell(
            f"{simulation.algorithm.card.title}: {len(history)} rounds, best accuracy {history.best():.4f}, "
            f"last {history.last():.4f}, {sent / 1e6:.1f} MB sent, {history.total('seconds'):.1f} s"
        )
        tell(f"records and model in {path}/")


@app.command()
@interruptible("nothing is finished yet")
def compare(
    file: File,
    overrides: Set = None,
    names: Annotated[str | None, typer.Option("--algorithms", help="comma-separated names")] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", help="runs per algorithm", min=1)] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="folder for picture and tables")] = None,
    quiet: Quiet = False,
) -> None:
    """Compare algorithms on the same clients and batches; prints the table and saves the picture."""
    chosen = list(overrides or [])
    if names is not None:
        chosen.append("compare.algorithms=[" + ",".join(f'"{n.strip()}"' for n in names.split(",")) + "]")
    if seeds is not None:
        chosen.append(f"compare.seeds={seeds}")
    experiment = load(file, chosen)
    path = out_folder or Path("runs") / f"{file.stem}-compare"
    comparing.check_folder(path)  # before the data are read
    comparison = comparing.Comparison(experiment)
    with progress_bar(comparison.count_rounds(), quiet) as advance:

        def progress(job: comparing.Job, row: Row) -> None:
            advance(f"{job.algorithm} {'tuning ' if job.tuning else ''}lr {job.lr:g} seed {job.seed}", row)

        try:
            comparison.run(path, progress)
        except KeyboardInterrupt:
            if not comparison.entries:
                raise
            finished = False
        else:
            finished = True
    show_comparison(comparison, path, quiet)
    if not finished:
        raise Interrupted("interrupted; table, picture and CSV are of the finished runs")


def show_comparison(comparison: comparing.Comparison, path: Path, quiet: bool) -> None:
    """Save the picture of the finished runs; print their table and what a reader should know about them."""
    from lamina.report import comparison as report  # matplotlib takes a second to import: only here

    data = comparison.experiment.data
    extra = ", ".join(f"{key}={value}" for key, value in data.partition.options().items())
    dealt = f"{data.partition.name} ({extra})" if extra else data.partition.name
    report.picture(comparison.entries, path / "comparison.png", f"{data.name}, {dealt}, {comparison.clients} clients")
    if not quiet:
        symbols = report.Symbols() if out.encoding.startswith("utf") else report.ASCII
        out.print(report.table(comparison.entries, comparison.experiment.compare.target, symbols))
        for line in comparison.notes():
            tell(f"note: {line}")
        tell(f"picture and tables in {path}/")


@app.command(name="list")
def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="algorithms, models, datasets or partitions")],
) -> None:
    """List what can be named in an experiment file."""
    lists = {
        "algorithms": list_algorithms,
        "models": list_models,
        "datasets": list_datasets,
        "partitions": list_partitions,
    }
    if what not in lists:
        raise unknown("list", what, lists)
    lists[what]()


@app.command()
def show(name: Annotated[str, typer.Argument(help="an algorithm")]) -> None:
    """Show an algorithm's options, with defaults, and its presets."""
    cls = algorithms.find(name)
    tell(f"{cls.card.title} ({cls.card.reference}); lr {cls.card.lr:g} unless given")
    made = Table(box=None, pad_edge=False)
    for heading in ("option", "default", "allowed", "meaning"):
        made.add_column(heading, overflow="fold")
    for option, field in options(cls).items():
        made.add_row(option, str(field.default), allowed(cls, option), field.metadata["doc"])
    out.print(made)
    for preset, values in cls.card.presets.items():
        tell(f"preset {preset}: {', '.join(f'{k} = {v}' for k, v in values.items())}")


@app.command(name="version")
def version_() -> None:
    """Print the version."""
    tell(__version__)


def default_folder(file: Path, experiment: Experiment) -> str:
    """Where a run goes if nobody says."""
    return f"runs/{file.stem}-{experiment.algorithm.name.replace(':', '.')}-seed{experiment.train.seed}"


class progress_bar:  # noqa: N801 (used as a function)
    """A context that gives ``advance(what, row)``: a live bar on a terminal, nothing anywhere else."""

    def __init__(self, total: int, quiet: bool) -> None:
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
        self.task = self.bar.add_task("starting", total=total, accuracy="–")

    def __enter__(self) -> progress_bar:
        self.bar.start()
        return self

    def __call__(self, what: str, row: Row) -> None:
        """Show one more finished round."""
        accuracy = f"{row['accuracy']:.3f}" if "accuracy" in row else "–"
        self.bar.update(self.task, advance=1, description=f"{what} round {row['round']}", accuracy=accuracy)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()


def list_algorithms() -> None:
    """Name, title, wire cost and paper of every algorithm."""
    made = Table(box=None, pad_edge=False, caption="down, up, keeps: models (d parameters) per active client and round")
    for heading in ("name", "title", "down", "up", "keeps", "lr", "reference"):
        made.add_column(heading, overflow="fold")
    for name, cls in sorted(algorithms.registry().items()):
        cost, card = wire_cost(cls()), cls.card
        made.add_row(
            name, card.title, f"{cost.down:g}", f"{cost.up:g}", f"{cost.client_state:g}", f"{card.lr:g}", card.reference
        )
    out.print(made)


def list_models() -> None:
    """Name, description and options of every model."""
    made = Table(box=None, pad_edge=False)
    for heading in ("name", "description", "options"):
        made.add_column(heading, overflow="fold")
    for name, card in models.registry().items():
        made.add_row(name, card.description, ", ".join(f"{k}={v}" for k, v in card.options.items()))
    out.print(made)


def list_datasets() -> None:
    """Name and description of every data set."""
    made = Table(box=None, pad_edge=False)
    for heading in ("name", "description"):
        made.add_column(heading, overflow="fold")
    for name, source in sources.SOURCES.items():
        made.add_row(name, source.description)
    out.print(made)


def list_partitions() -> None:
    """Name, description and options of every partition."""
    made = Table(box=None, pad_edge=False)
    for heading in ("name", "description", "options"):
        made.add_column(heading, overflow="fold")
    for name, description in partitions.describe().items():
        made.add_row(name, description, ", ".join(partition_options(name)))
    out.print(made)


def partition_options(name: str) -> list[str]:
    """A partition's options with their defaults, as they are written in an experiment file."""
    if partitions.PARTITIONS[name] is partitions.Reallocate:
        return ["base=iid", "and the options of the base"]
    fields = dataclasses.fields(partitions.PARTITIONS[name])
    return [f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default}" for f in fields]


if __name__ == "__main__":
    main()
