"""``lamina flower``: a federation on Flower. Flower is imported only when one of these commands needs it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import shutil
import signal
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lamina import models
from lamina.cli.base import Interrupted, Overwrite, Quiet, Set, app, best_and_last, err, interruptible, tell
from lamina.cli.run import TO_GO_ON
from lamina.data import sources
from lamina.errors import BadInput, Diverged, LaminaError, missing_extra, unknown
from lamina.experiment.config import Experiment, load
from lamina.experiment.folder import RunFolder
from lamina.experiment.records import read_json, read_metrics
from lamina.experiment.run_files import FILES, is_ours
from lamina.history import History
from lamina.storage.files import cannot_write, check_writable
from lamina.text import plural

if TYPE_CHECKING:
    from lamina.flower.processes import LocalFederation, RunStatus

flower = typer.Typer(no_args_is_help=True, help="Run a federation of separate processes or machines, on Flower.")
app.add_typer(flower, name="flower")

TEMPLATE = (
    "pyproject.toml",
    "README.md",
    "gitignore",
    "package/__init__.py",
    "package/data.py",
    "package/federation.py",
)
FLWR = "1.41.0"  # what the template's README installs; the one that was tested


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
    if model is not None and model not in models.registry():
        raise unknown("model", model, models.registry())
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"'{folder}' is not an empty folder: choose a new one")
    check_writable(folder)
    values = template_values(folder, model, data, nodes)
    for name, text in render(values, own_model=model is None).items():
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise cannot_write(folder, error) from error
    package = values["package"]
    tell(f"wrote a Flower app to {folder}/: put your model into {package}/model.py, your data into {package}/data.py")
    tell(f"try it: lamina flower up {folder} --nodes {nodes}")


def template_values(folder: Path, model: str | None, data: str, nodes: int) -> dict[str, str]:
    """What is put into the template's places."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.absolute().name.lower()).strip("-") or "federation"
    name = name if name[0].isalpha() else f"app-{name}"
    train = sources.load(data).train
    if train.classes is None:
        raise BadInput(f"'{data}' has no classes: the template is for classification; begin with another data set")
    shape = tuple(train.x.shape[1:])
    return {
        "name": name,
        "package": name.replace("-", "_") + "_app",  # never the name of something installed
        "publisher": "lamina",
        "model": model or "",
        "data": data,
        "shape": repr(shape),
        "inputs": str(math.prod(shape)),
        "classes": str(train.classes),
        "clients": str(nodes),
        "last": str(nodes - 1),
        "flwr": FLWR,
    }


def render(values: Mapping[str, str], *, own_model: bool) -> dict[str, str]:
    """The template's files by name."""
    root = resources.files("lamina").joinpath("flower", "template")
    variant = "package/model.own" if own_model else "package/model.named"
    made = {}
    for name in (*TEMPLATE, variant):
        text = root.joinpath(*f"{name}.in".split("/")).read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace("{{" + key + "}}", value)
        name = "package/model.py" if name == variant else ".gitignore" if name == "gitignore" else name
        made[name.replace("package/", f"{values['package']}/")] = text
    return made


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
    from lamina.flower.processes import LocalFederation, private_files

    options: dict[str, float] = {} if deadline is None else {"deadline": deadline}
    if quorum is not None:
        options["quorum"] = read_quorum(quorum)
    job: Job
    if what.is_dir():
        if overrides or options:
            raise BadInput("--set, --deadline and --quorum are for experiment files: an app has its own settings")
        job = AppJob(what, out_folder)
    else:
        job = FileJob(what, overrides, nodes, out_folder, options)
    if job.complete(overwrite=overwrite):
        if not quiet:
            done = plural(len(job.history()), "round")
            tell(f"{job.out}/ is complete: {done}; more with train.rounds, anew with --overwrite")
        return
    before = 0 if overwrite else len(job.history())
    place = job.out.with_name(job.out.name + ".federation")
    check_writable(place)
    with terminate_as_interrupt(), private_files(), Display(job, quiet, anew=overwrite) as display:
        federation = LocalFederation(place, nodes, secure=not insecure, port=port, say=display.say, warn=display.line)
        with federation:
            if overwrite:
                remove_run(job.out)
            display.say("submitting the run")
            run = federation.submit(*job.submission(federation))
            display.say("waiting for the first round")
            try:
                status = federation.wait(run, tick=display.update)
            except KeyboardInterrupt:
                display.say("stopping the run; once more to stop at once")
                with contextlib.suppress(LaminaError):
                    federation.stop_run(run)
                to_go_on = TO_GO_ON + " without --overwrite" * overwrite
                raise Interrupted(f"stopped after round {len(job.history())}; {to_go_on}") from None
    if not status.completed:
        fail(job, status, place / "logs")
    for name in ("app", "command", "superlink", *(() if keep_logs else ("logs",))):
        shutil.rmtree(place / name, ignore_errors=True)  # keys and the nodes' state stay: more rounds may be wanted
    if not quiet and len(job.history()) == before:
        tell(f"{job.out}/ is complete: {plural(before, 'round')}; more with the app's rounds, anew with --overwrite")
    elif not quiet:
        summary(job, place / "logs" if keep_logs else None)


def read_quorum(text: str) -> float:
    """A quorum as it is written: a whole number is one of clients, anything else a part of them."""
    try:
        value = int(text) if text.isdecimal() else float(text)
    except ValueError as error:
        raise BadInput(f"--quorum {text}: give a part of the clients (0.5, 1.0) or a number of them (2)") from error
    if not value > 0 or (isinstance(value, float) and value > 1):
        raise BadInput(f"--quorum {text}: give a part of the clients (0.5, 1.0) or a number of them (2)")
    return value


class Job:
    """What `up` runs: where its records go, and how it is given to Flower."""

    def __init__(self, out: Path, rounds: int | None) -> None:
        self.out = out
        self._rounds = rounds

    @property
    def rounds(self) -> int | None:
        """Rounds in all; None: not known yet."""
        if self._rounds is None and (self.out / "config.json").exists():
            with contextlib.suppress(BadInput, KeyError):
                self._rounds = int(read_json(self.out / "config.json")["train"]["rounds"])
        return self._rounds

    def history(self) -> History:
        """The rounds that are finished."""
        metrics = self.out / "metrics.jsonl"
        return read_metrics(metrics)[0] if metrics.exists() else History()

    def complete(self, *, overwrite: bool) -> bool:
        """Whether nothing is left to do; refuses a folder that holds another run, or one that diverged."""
        raise NotImplementedError

    def submission(self, federation: LocalFederation) -> tuple[Path, dict[str, str | int | float | bool]]:
        """The Flower app, and what of its run configuration is set."""
        raise NotImplementedError


class FileJob(Job):
    """An experiment file: the app is written here, and does nothing but build the federation the file describes."""

    def __init__(
        self,
        file: Path,
        overrides: Sequence[str] | None,
        nodes: int,
        out: Path | None,
        options: Mapping[str, float],  # of the federation, beside what the file says
    ) -> None:
        from lamina.flower import Federation

        experiment = with_clients(load(file, overrides or []), nodes)
        name = f"{file.stem}-{experiment.algorithm.name.replace(':', '.')}-seed{experiment.train.seed}-flower"
        super().__init__(out or Path(experiment.run.out or f"runs/{name}"), experiment.train.rounds)
        if experiment.data.dir is not None:  # Flower's processes may work elsewhere
            data = experiment.data.model_copy(update={"dir": str(Path(experiment.data.dir).absolute())})
            experiment = experiment.model_copy(update={"data": data})
        self.experiment, self.options = experiment, options
        self.config = Federation.from_experiment(experiment, out=self.out.absolute(), **options).config()
        found = int(self.config["data"]["clients"])
        if found != nodes:
            raise BadInput(f"the experiment has {plural(found, 'client')}: give --nodes {found}")

    def complete(self, *, overwrite: bool) -> bool:
        """Look into the folder as the server app will."""
        with RunFolder(self.out, self.config, overwrite=overwrite) as folder:
            if folder.diverged is not None:
                raise folder.diverged
            return folder.complete

    def submission(self, federation: LocalFederation) -> tuple[Path, dict[str, str | int | float | bool]]:
        """Write the app."""
        folder = federation.folder / "app"
        options = {**self.options, "signing_key": str(federation.signing_key)}
        write_app(folder, self.experiment, self.out, federation.node_ids, options)
        return folder, {}


def write_app(
    folder: Path,
    experiment: Experiment,
    out: Path,
    nodes: Mapping[int, int],
    options: Mapping[str, Any],
    more: str = "",
) -> None:
    """Write a Flower app that builds the federation of an experiment, followed by `more` lines of Python."""
    settings = {
        "experiment": experiment.model_dump(),
        "out": str(out.absolute()),
        "nodes": {str(node): client for node, client in nodes.items()},
        "options": dict(options),
    }
    package = folder / "lamina_up"
    package.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (package / "__init__.py").write_text(SHIM + more, encoding="utf-8")
    (package / "settings.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


PROJECT = """\
[project]
name = "lamina-up"
version = "1.0.0"
description = "An experiment of lamina's"
license = { text = "Apache-2.0" }
dependencies = []

[tool.flwr.app]
publisher = "lamina"

[tool.flwr.app.components]
serverapp = "lamina_up:server"
clientapp = "lamina_up:client"

[tool.flwr.app.config]
"""
SHIM = """\
import json
from pathlib import Path

from lamina.experiment.config import parse
from lamina.flower import Federation

settings = json.loads((Path(__file__).parent / "settings.json").read_text(encoding="utf-8"))
nodes = {int(node): client for node, client in settings["nodes"].items()}
experiment = parse(settings["experiment"])
federation = Federation.from_experiment(experiment, out=settings["out"], nodes=nodes, **settings["options"])
server = federation.server_app()
client = federation.client_app()
"""


class AppJob(Job):
    """A Flower app of the user's own, such as `lamina flower new` writes; only its run configuration is set here."""

    def __init__(self, folder: Path, out: Path | None) -> None:
        try:
            project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
            name, config = project["project"]["name"], project["tool"]["flwr"]["app"]["config"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(
                f"'{folder}' is not the folder of a Flower app (pyproject.toml with [tool.flwr.app.config]): "
                "give an experiment file, or make an app with `lamina flower new`"
            ) from error
        missing = [key for key in ("out", "nodes", "signing-key") if key not in config]
        if missing:
            keys = ", ".join(f'{key} = ""' for key in missing)
            raise BadInput(f"{folder / 'pyproject.toml'}: [tool.flwr.app.config] lacks {keys}")
        super().__init__(out or Path("runs") / name, None)
        self.folder = folder

    def complete(self, *, overwrite: bool) -> bool:
        """Only the app knows: it is started, and ends at once if so."""
        check_writable(self.out)
        return False

    def submission(self, federation: LocalFederation) -> tuple[Path, dict[str, str | int | float | bool]]:
        """Tell the app where its records go, which node is which client, and what it signs tasks with."""
        nodes = federation.folder / "nodes.json"
        nodes.write_text(json.dumps({str(node): client for node, client in federation.node_ids.items()}))
        signing_key = str(federation.signing_key)
        return self.folder, {"out": str(self.out.absolute()), "nodes": str(nodes), "signing-key": signing_key}


def with_clients(experiment: Experiment, nodes: int) -> Experiment:
    """The experiment with as many clients as there are nodes; one that says otherwise is refused."""
    if experiment.data.partition.name == "by-column":
        return experiment  # the column names the clients
    if experiment.data.clients is None:
        return experiment.model_copy(update={"data": experiment.data.model_copy(update={"clients": nodes})})
    if experiment.data.clients != nodes:
        raise BadInput(
            f"the experiment has {plural(experiment.data.clients, 'client')}, and every client is a node: give "
            f"--nodes {experiment.data.clients}, or --set data.clients={nodes}"
        )
    return experiment


def remove_run(folder: Path) -> None:
    """Remove an earlier run's files, and nothing else."""
    if folder.exists() and is_ours(folder):
        for name in FILES - {"lock"}:
            path = folder / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def fail(job: Job, status: RunStatus, logs: Path) -> NoReturn:
    """Raise the error for a run that did not complete."""
    from lamina.flower.processes import FederationFailed

    diverged = job.out / "diverged.json"
    if diverged.exists():
        how = read_json(diverged)
        raise Diverged(how["message"], round=how["round"], client=how["client"], layer=how["layer"])
    said = status.details.removeprefix("ServerApp failed with exception: ").strip()
    rounds = len(job.history())
    kept = f"{plural(rounds, 'round')} {'is' if rounds == 1 else 'are'} kept"
    done = f"{kept}; {TO_GO_ON}; " if rounds else ""
    ended = status.status.removeprefix("finished:")
    raise FederationFailed(f"the run {ended}{': ' + said if said else ''} ({done}logs: {logs}/)")


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
    """How the run goes: a bar on a terminal, else a line per round; whoever is missing is named in a line."""

    def __init__(self, job: Job, quiet: bool, *, anew: bool = False) -> None:
        self._job, self._quiet = job, quiet
        self._live = not quiet and err.is_terminal
        self._seen = 0 if anew else len(job.history())  # rounds
        self._journal, self._log = Tail(job.out / "federation.jsonl"), Tail(job.out / "log.txt")
        self._said: set[str] = set()  # who was named for the last attempt
        self._metrics = -1
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
        self._name_awaited()
        self._name_absent()
        size = file_size(self._job.out / "metrics.jsonl")
        if size == self._metrics:
            return
        self._metrics = size
        history, rounds = self._job.history(), self._job.rounds
        for row in history[self._seen :]:
            accuracy = f"accuracy {row['accuracy']:.4f}" if "accuracy" in row else ""
            self._bar.update(
                self._task, total=rounds, completed=row["round"], description=f"round {row['round']}", note=accuracy
            )
            if not self._live:
                self.line(f"round {row['round']}/{rounds or '?'}{': ' + accuracy if accuracy else ''}")
        self._seen = max(self._seen, len(history))

    def _name_awaited(self) -> None:
        """Show what the server's log says about clients it waits for: before the first round there is nothing else."""
        for line in self._log.lines():
            level, _, said = line.partition(" ")[2].partition(" ")[2].partition(" ")  # after the date and the time
            if level == "WARNING" and said.startswith(("waiting for ", "no node is listed ")):
                self.line(said)

    def _name_absent(self) -> None:
        """Name, for every attempt at a round since the last look, who is not in its mean; once if it is the same."""
        for line in self._journal.lines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                said = [
                    f"{whose(one)} {kind}: {one['why']}" for kind in ("missing", "refused") for one in entry[kind]
                ] + entry.get("notes", [])
                for text in said:
                    if text not in self._said:
                        self.line(f"round {entry['round']}: {text}")
                self._said = set(said)


def whose(entry: Mapping[str, Any]) -> str:
    """Whom an entry of the attendance is about."""
    return f"node {entry['node']}" if entry["client"] is None else f"client {entry['client']}"


class Tail:
    """The lines that are added to a file from now on."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, file_size(path)

    def lines(self) -> list[str]:
        """What is new since the last look."""
        size = file_size(self._path)
        if size < self._read:
            self._read = 0  # begun anew, or cut back
        if size <= self._read:
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            text = file.read(size - self._read)
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").splitlines()


def file_size(path: Path) -> int:
    """The size of a file; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0
