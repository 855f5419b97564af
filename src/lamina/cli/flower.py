"""``lamina flower``: a federation on Flower. Flower is imported only when one of these commands needs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lamina.base.errors import BadInput
from lamina.cli import base
from lamina.cli.base import Interrupted, Overwrite, Quiet, Set, echo, echo_progress, how_to_resume
from lamina.storage.files import check_writable

if TYPE_CHECKING:
    from lamina.flower.local.jobs import Job

flower = typer.Typer(no_args_is_help=True, help="Run a federation of separate processes or machines, on Flower.")
base.app.add_typer(flower, name="flower")
BAR = "federation"  # what the bar on a terminal is called


# --- keys ------------------------------------------------------------------------------------------------------------


@flower.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder for the keys; made if it is not there")],
    hosts: Annotated[
        list[str] | None, typer.Option("--host", help="name or IP address of the server; may be repeated")
    ] = None,
) -> None:
    """Make the server's keys: an authority, a TLS certificate for the SuperLink, a key that signs tasks."""
    from lamina.flower.keys import make_server_keys

    files = make_server_keys(folder, hosts or [])
    echo(f"secret, stays here: {files.key}, {files.server_key}, {files.signing_key}")
    echo(f"for every node:     {files.certificate}, {files.verifying_key}")
    echo(f"for the SuperLink:  {files.server_certificate}")
    echo_ends(folder)


@flower.command()
def renew(folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder that `flower keys` made")]) -> None:
    """Make a new certificate for the server; its key, its hosts and all other keys stay. Needs ca.key.

    Then restart the SuperLink and reload the reverse proxy. Nodes need nothing, unless ca.crt is new as well.
    """
    from lamina.flower.keys import ServerKeys
    from lamina.flower.keys import renew as renew_certificates

    new = renew_certificates(folder)
    echo(f"new: {', '.join(map(str, new))}")
    if ServerKeys(folder).certificate in new:
        echo("send ca.crt to every node, and restart its SuperNode before the old ca.crt ends")
    echo_ends(folder)


def echo_ends(folder: Path) -> None:
    """Print when the certificates in a folder end."""
    from lamina.flower.keys import ends

    shown = ", ".join(f"{path} on {end:%Y-%m-%d}" for path, end in ends(folder).items())
    echo(f"certificates end:   {shown}; `lamina flower renew {folder}` makes new ones")


@flower.command(name="node-key")
def node_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the private key; the public one goes to FILE.pub")],
) -> None:
    """Make a node's key pair, on the node itself: only FILE.pub is handed over."""
    from lamina.flower.keys import make_node_key

    private, public = make_node_key(file)
    echo(f"secret, stays on this node: {private}")
    echo(f"for the server:             {public}")


# --- a new app -------------------------------------------------------------------------------------------------------


@flower.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder that is new or empty")],
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="nodes of the federation")] = 3,
) -> None:
    """Write a Flower app for your own model and data. It runs as it is; its README says how to deploy it."""
    from lamina.cli.flower_template import write_new_app

    package = write_new_app(folder, nodes)
    echo(f"wrote a Flower app to {folder}/: put your model into {package}/model.py, your data into {package}/data.py")
    echo(f"try it: lamina flower up {folder} --nodes {nodes}")


# --- a node, before it joins ------------------------------------------------------------------------------------------


@flower.command(name="check-node")
def check_node(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder of the Flower app")],
    node_config: Annotated[
        str, typer.Option("--node-config", help="what flower-supernode will be given under the same name")
    ],
) -> None:
    """Try the app on this node's own data before it joins: load data and model, train one step, change nothing.

    Prints what the node has and would send. Each problem is one line, and the exit code is then 2.
    """
    from lamina.flower.dry_run import check_node

    problems = check_node(folder, node_config, echo)
    for problem in problems:
        base.print_problem("error", problem)
    if problems:
        raise typer.Exit(2)
    echo("ready to join")


# --- a run, while it runs ---------------------------------------------------------------------------------------------


@flower.command()
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the run's folder, on the server's machine")],
    metrics: Annotated[
        bool, typer.Option("--metrics", help="print numbers in Prometheus' text format; exit 0")
    ] = False,
) -> None:
    """Say how a run of a federation goes; the exit code is for health checks.

    0: it runs or is complete. 3: it diverged. 4: it stopped before its last round. 5: it runs, and the last attempt at
    a round missed the quorum.
    """
    from lamina.flower.status import EXIT_CODES, Status

    status = Status.read(run)
    if metrics:
        base.echo_text(status.metrics())
        return
    for line in status.lines():
        echo(line)
    raise typer.Exit(EXIT_CODES[status.state])


# --- a federation on this machine ------------------------------------------------------------------------------------


@flower.command()
@base.resumable
def up(
    what: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT.toml|DIR", help="an experiment file, or the folder of a Flower app")
    ],
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="nodes to start, one per client")] = 3,
    overrides: Set = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="folder for the records")] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", min=1, help="seconds a node has to answer; default: 600")
    ] = None,
    quorum: Annotated[
        float | None, typer.Option("--quorum", min=0, max=1, help="part of the clients that must answer; default: 0.5")
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment as a federation of processes on this machine; started again, it resumes.

    Starts a SuperLink and SuperNodes (TLS and node authentication with generated keys, loopback only, no network),
    runs the experiment, and ends them all.
    """
    from lamina.flower.local.federation import LocalFederation
    from lamina.flower.local.jobs import AppJob, FileJob
    from lamina.flower.local.processes import FederationFailed

    given = {"deadline": deadline, "quorum": quorum}
    options = {name: value for name, value in given.items() if value is not None}
    if what.is_dir() and (overrides or options):
        raise BadInput("--set, --deadline and --quorum are for experiment files: an app has its own settings")
    job = AppJob(what, out_folder) if what.is_dir() else FileJob(what, overrides or [], nodes, out_folder, options)
    if job.is_complete(overwrite=overwrite):
        base.print_complete(job.out, job.history())
        return
    before = 0 if overwrite else len(job.history())
    place = job.out.with_name(job.out.name + ".federation")
    check_writable(place)
    display = Display(job, overwrite=overwrite)
    with display.bars, LocalFederation(place, nodes, say=display.say) as federation:
        try:
            status = job.run(federation, overwrite=overwrite, say=display.say, tick=display.update)
        except KeyboardInterrupt:
            done = len(job.history())
            raise Interrupted(f"stopped after round {done}; {how_to_resume(overwrite)}") from None
        except FederationFailed as error:
            raise FederationFailed(f"{error}; {how_to_resume(overwrite)}") from error
    if status["status"] != "finished:completed":
        raise job.failed(status, place / "logs", how_to_resume())
    if len(job.history()) == before:
        base.print_complete(job.out, job.history(), "the app's rounds")
    else:
        base.print_summary(job.history())
        echo(f"records and model in {job.out}/; to look at them: lamina report {job.out}")


class Display:
    """Shows how a run goes: a bar on a terminal, else a line per round; and the warnings in the server's log."""

    def __init__(self, job: Job, *, overwrite: bool = False) -> None:
        self._job = job
        self._rounds = 0 if overwrite else len(job.history())  # that have been shown
        self._log_lines = len(self._read_log())  # that have been shown
        shown = {"state": "starting", "score": "", "total": job.rounds, "completed": self._rounds}
        self.bars = base.round_bars([BAR], **shown)
        if self._rounds:
            echo_progress(f"resuming after round {self._rounds}")

    def say(self, what: str) -> None:
        """Say what is being done now."""
        if self.bars.live:
            self.bars.update(BAR, state=what)
        else:
            echo_progress(what)

    def update(self) -> None:
        """Show what is new in the run's folder."""
        lines = self._read_log()
        if len(lines) < self._log_lines:
            self._log_lines = 0  # the log was restarted or truncated
        for line in lines[self._log_lines :]:
            _, _, level, text = [*line.split(" ", 3), "", "", ""][:4]  # after the date and the time
            if level == "WARNING":
                echo_progress(text)
        self._log_lines = len(lines)
        history, rounds = self._job.history(), self._job.rounds
        metric = history.metric if history.metric != "loss" else ""  # without a metric, a line names the round only
        for row in history[self._rounds :]:
            self.bars.update(BAR, row, total=rounds, completed=row["round"], state="training")
            if not self.bars.live:
                score = f": {metric} {row[metric]:.4f}" if metric in row else ""
                echo_progress(f"round {row['round']}/{rounds or '?'}{score}")
        self._rounds = max(self._rounds, len(history))

    def _read_log(self) -> list[str]:
        """Return the complete lines of the server's log."""
        try:
            text = (self._job.out / "log.txt").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return text.split("\n")[:-1]
