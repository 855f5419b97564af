"""``lamina flower``: a federation on Flower. Flower is imported only when one of these commands needs it."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lamina.cli.base import Interrupted, Overwrite, Quiet, Set, app, best_and_last, err, interruptible, tell
from lamina.cli.run import TO_GO_ON
from lamina.errors import BadInput, missing_extra
from lamina.storage.files import check_writable
from lamina.text import plural

if TYPE_CHECKING:
    from lamina.flower.local.jobs import Job

flower = typer.Typer(no_args_is_help=True, help="Run a federation of separate processes or machines, on Flower.")
app.add_typer(flower, name="flower")


def need_flower() -> None:
    """Say in one line what to install if Flower is missing."""
    if importlib.util.find_spec("flwr") is None:
        raise missing_extra("flwr", "flower", "lamina flower")


# --- keys ------------------------------------------------------------------------------------------------------------


@flower.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder for the keys; made if it is not there")],
    hosts: Annotated[
        list[str] | None, typer.Option("--host", help="name or IP address of the server; may be repeated")
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=0, help="also make keys of so many nodes, to try it out")] = 0,
) -> None:
    """Make the server's keys: an authority, a TLS certificate for the SuperLink, a key that signs tasks."""
    need_flower()
    from lamina.flower.keys import make_authority, make_node_key, refuse_existing
    from lamina.flower.signing import key_files, make_signing_key

    refuse_existing(*key_files(folder))
    made = make_authority(folder, hosts or [])
    signing, verifying = make_signing_key(folder)
    tell(f"secret, stays here: {made.key}, {made.server_key}, {signing}")
    tell(f"for every node:     {made.certificate}, {verifying}")
    tell(f"for the SuperLink:  {made.server_certificate}")
    for number in range(nodes):
        private, public = make_node_key(folder / f"node-{number}")
        tell(f"node {number}: {private} is the node's secret, {public} is registered with the server")


@flower.command(name="node-key")
def node_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the private key; the public one goes to FILE.pub")],
) -> None:
    """Make a node's key pair, on the node itself: only FILE.pub is handed over."""
    need_flower()
    from lamina.flower.keys import make_node_key

    private, public = make_node_key(file)
    tell(f"secret, stays on this node: {private}")
    tell(f"for the server:             {public}")


# --- a new app -------------------------------------------------------------------------------------------------------


@flower.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder that is new or empty")],
    model: Annotated[
        str | None, typer.Option("--model", help="one of lamina's models; else a small one to edit")
    ] = None,
    data: Annotated[str, typer.Option("--data", help="the data set to begin with")] = "digits",
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="nodes of the federation")] = 3,
) -> None:
    """Write a Flower app for your own model and data. It runs as it is; its README says how, also on three machines."""
    from lamina.cli.flower_template import write_new_app

    package = write_new_app(folder, model, data, nodes)
    tell(f"wrote a Flower app to {folder}/: put your model into {package}/model.py, your data into {package}/data.py")
    tell(f"try it: lamina flower up {folder} --nodes {nodes}")


# --- a federation on this machine ------------------------------------------------------------------------------------


@flower.command()
@interruptible(f"finished rounds are kept; {TO_GO_ON}")
def up(
    what: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT.toml|DIR", help="an experiment file, or the folder of a Flower app")
    ],
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="nodes to start, one per client")] = 3,
    overrides: Set = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="neither TLS nor node authentication")] = False,
    out_folder: Annotated[Path | None, typer.Option("--out", help="folder for the records")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=1, max=65535, help="the SuperLink's port; default: a free one")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", min=1, help="seconds a node has to answer; default: 600")
    ] = None,
    quorum: Annotated[
        str | None,
        typer.Option("--quorum", help="who must answer: a part (0.5, 1.0) or a number (2) of clients; default: 0.5"),
    ] = None,
    keep_logs: Annotated[bool, typer.Option("--keep-logs", help="keep the logs of a run that went well, too")] = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment as a federation of processes on this machine; started again, it goes on.

    Starts a SuperLink and SuperNodes (TLS and node authentication with generated keys, loopback only, no network),
    runs the experiment, and ends them all.
    """
    need_flower()
    from lamina.flower.local.federation import LocalFederation
    from lamina.flower.local.jobs import AppJob, FileJob
    from lamina.flower.local.processes import private_files

    options: dict[str, float] = {} if deadline is None else {"deadline": deadline}
    if quorum is not None:
        options["quorum"] = read_quorum(quorum)
    if what.is_dir() and (overrides or options):
        raise BadInput("--set, --deadline and --quorum are for experiment files: an app has its own settings")
    job = AppJob(what, out_folder) if what.is_dir() else FileJob(what, overrides or [], nodes, out_folder, options)
    if job.is_complete(overwrite=overwrite):
        if not quiet:
            tell_complete(job, "train.rounds")
        return
    before = 0 if overwrite else len(job.history())
    place = job.out.with_name(job.out.name + ".federation")
    check_writable(place)
    with terminate_as_interrupt(), private_files(), Display(job, quiet, anew=overwrite) as display:
        federation = LocalFederation(place, nodes, secure=not insecure, port=port, say=display.say, warn=display.line)
        with federation:
            try:
                status = job.run(federation, overwrite=overwrite, say=display.say, tick=display.update)
            except KeyboardInterrupt:
                to_go_on = TO_GO_ON + " without --overwrite" * overwrite
                raise Interrupted(f"stopped after round {len(job.history())}; {to_go_on}") from None
    if not status.completed:
        raise job.failed(status, place / "logs", TO_GO_ON)
    for name in ("app", "command", "superlink", *(() if keep_logs else ("logs",))):
        shutil.rmtree(place / name, ignore_errors=True)  # keys and the nodes' state stay: more rounds may be wanted
    if not quiet and len(job.history()) == before:
        tell_complete(job, "the app's rounds")
    elif not quiet:
        summary(job, place / "logs" if keep_logs else None)


def tell_complete(job: Job, more: str) -> None:
    """Say that nothing is left to do."""
    done = plural(len(job.history()), "round")
    tell(f"{job.out}/ is complete: {done}; more with {more}, anew with --overwrite")


def read_quorum(text: str) -> float:
    """Return a quorum: a whole number of clients, or a fraction of them."""
    value = 0.0
    with contextlib.suppress(ValueError):
        value = int(text) if text.isdecimal() else float(text)
    if not value > 0 or (isinstance(value, float) and value > 1):
        raise BadInput(f"--quorum {text}: give a part of the clients (0.5, 1.0) or a number of them (2)")
    return value


def summary(job: Job, logs: Path | None) -> None:
    """Say how a run went and what to do with it."""
    history = job.history()
    sent = history.total("bytes_down") + history.total("bytes_up")
    tell(
        f"{plural(len(history), 'round')}, {best_and_last(history)}, {sent / 1e6:.1f} MB sent, "
        f"{history.total('seconds'):.1f} s"
    )
    tell(f"records and model in {job.out}/; to look at them: lamina report {job.out}")
    if logs is not None:
        tell(f"logs of all processes in {logs}/")


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Let SIGTERM, and a terminal that is closed, end the command as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Display:
    """Shows how a run goes: a bar on a terminal, else a line per round; and the warnings in the server's log."""

    def __init__(self, job: Job, quiet: bool, *, anew: bool = False) -> None:
        self._job, self._quiet = job, quiet
        self._live = not quiet and err.is_terminal
        self._seen = 0 if anew else len(job.history())  # rounds
        self._log = Tail(job.out / "log.txt")
        self._metrics_size = -1
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=err,
            transient=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting", total=job.rounds, completed=self._seen, note="")

    def __enter__(self) -> Display:
        self._bar.start()
        if self._seen:
            self.line(f"going on after round {self._seen}")
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, what: str) -> None:
        """Say what is being done now."""
        if self._live:
            self._bar.update(self._task, description=what)
        else:
            self.line(what)

    def line(self, text: str) -> None:
        """Print a line that stays, above the bar if there is one."""
        if not self._quiet:
            err.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self) -> None:
        """Show what is new in the run's folder."""
        for line in self._log.lines():
            _, _, level, text = [*line.split(" ", 3), "", "", ""][:4]  # after the date and the time
            if level == "WARNING":
                self.line(text)
        size = file_size(self._job.out / "metrics.jsonl")
        if size == self._metrics_size:
            return
        self._metrics_size = size
        history, rounds = self._job.history(), self._job.rounds
        for row in history[self._seen :]:
            accuracy = f"accuracy {row['accuracy']:.4f}" if "accuracy" in row else ""
            self._bar.update(
                self._task, total=rounds, completed=row["round"], description=f"round {row['round']}", note=accuracy
            )
            if not self._live:
                self.line(f"round {row['round']}/{rounds or '?'}{': ' + accuracy if accuracy else ''}")
        self._seen = max(self._seen, len(history))


class Tail:
    """The lines that are added to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, file_size(path)

    def lines(self) -> list[str]:
        """Return the lines that are new since the last call."""
        if file_size(self._path) < self._read:
            self._read = 0  # the file was begun anew, or cut back
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._read)
            complete, newline, _ = file.read().rpartition(b"\n")
            self._read += len(complete) + len(newline)
            return complete.decode(errors="replace").splitlines()
        return []


def file_size(path: Path) -> int:
    """Return the size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
