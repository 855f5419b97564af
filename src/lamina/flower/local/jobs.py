"""What ``lamina flower up`` runs on a local federation: an experiment file, or a Flower app of the user's own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from lamina.base.errors import BadInput, Diverged, LaminaError
from lamina.base.text import plural
from lamina.data.readers.own import FORMATS
from lamina.experiment.config import Experiment, load
from lamina.experiment.runs.folder import RunFolder
from lamina.experiment.runs.metrics_file import MetricsFile
from lamina.experiment.runs.records import REPLACED, is_ours, read_diverged, read_json, remove_records
from lamina.flower.apps import AppFolder
from lamina.flower.federation import Federation
from lamina.flower.local.federation import LocalFederation
from lamina.flower.local.processes import FederationFailed
from lamina.storage.files import check_writable
from lamina.training.history import History


class Job:
    """A run: where its records go, and how it is given to Flower."""

    def __init__(self, out: Path, rounds: int | None) -> None:
        self.out, self._rounds = out, rounds

    @property
    def rounds(self) -> int | None:
        """Rounds in all; None: not known yet."""
        if self._rounds is None and (self.out / "config.json").exists():
            with contextlib.suppress(BadInput, KeyError):
                self._rounds = int(read_json(self.out / "config.json")["train"]["rounds"])
        return self._rounds

    def history(self) -> History:
        """Return the finished rounds."""
        metrics = self.out / "metrics.jsonl"
        return History(MetricsFile(metrics).read().rows) if metrics.exists() else History()

    def is_complete(self, *, overwrite: bool) -> bool:
        """Return whether nothing is left to do; raise an error for the folder of another run, or one that diverged."""
        raise NotImplementedError

    def app(self, folder: Path) -> Path:
        """Return the folder of the Flower app: `folder`, if it is written here."""
        raise NotImplementedError

    def run(
        self, federation: LocalFederation, *, overwrite: bool, say: Callable[[str], None], tick: Callable[[], None]
    ) -> dict[str, Any]:
        """Run on a federation that has been started, and return the run's status; Ctrl-C stops the run first."""
        if overwrite and is_ours(self.out):
            remove_records(self.out)
            (self.out / "config.json").unlink()
            (self.out / REPLACED).unlink()
        say("submitting the run")
        nodes = federation.folder / "nodes.json"
        nodes.write_text(json.dumps(federation.node_ids))
        key = federation.keys.signing_key
        settings = {"out": str(self.out.absolute()), "nodes": str(nodes), "signing-key": str(key)}
        run = federation.submit(self.app(federation.folder / "app"), settings)
        say("waiting for the first round")
        try:
            return federation.wait(run, tick=tick)
        except KeyboardInterrupt:
            say("stopping the run; once more to stop at once")
            with contextlib.suppress(LaminaError):
                federation.stop_run(run)
            raise

    def failed(self, status: Mapping[str, Any], logs: Path, to_resume: str) -> LaminaError:
        """Return the error for a run that did not complete."""
        how = read_diverged(self.out)
        if how is not None:
            return Diverged(how["message"], round=how["round"], client=how["client"], layer=how["layer"])
        why = str(status.get("status-details", "")).removeprefix("ServerApp failed with exception: ").strip()
        rounds = len(self.history())
        kept = f"{plural(rounds, 'round')} {'is' if rounds == 1 else 'are'} kept; {to_resume}; " if rounds else ""
        ended = status["status"].removeprefix("finished:")
        return FederationFailed(f"the run {ended}{': ' + why if why else ''} ({kept}logs: {logs}/)")


class FileJob(Job):
    """An experiment file. Its app is written here, and only builds the federation that the file describes."""

    def __init__(
        self, file: Path, overrides: Sequence[str], nodes: int, out: Path | None, options: Mapping[str, float]
    ) -> None:
        experiment = load(file, overrides)
        name = f"{file.stem}-{experiment.algorithm.name.replace(':', '.')}-seed{experiment.train.seed}-flower"
        super().__init__(out or Path(experiment.run.out or f"runs/{name}"), experiment.train.rounds)
        data = experiment.data
        changed: dict[str, Any] = {}
        all_train = data.heldout_clients is None and data.partition.name != "by-column"  # as many as data.clients says
        if all_train and data.clients is None:
            changed["clients"] = nodes
        if data.dir is not None or data.name in FORMATS:  # Flower's processes may work elsewhere
            changed["dir"] = str(Path(data.dir or "").absolute())
        self.experiment = experiment.changed(data=changed)
        self.options = options  # of the federation, beside what the file says
        federation = Federation.from_experiment(self.experiment, **options)
        self.config, clients = federation.config(), federation.plan.clients.count
        if clients != nodes:
            advice = f"give --nodes {clients}" + f", or --set data.clients={nodes}" * all_train
            raise BadInput(f"the experiment has {plural(clients, 'client')}, and every client is a node: {advice}")

    def is_complete(self, *, overwrite: bool) -> bool:
        """Look into the folder as the server app will."""
        with RunFolder(self.out, self.config, overwrite=overwrite) as folder:
            if folder.diverged is not None:
                raise folder.diverged
            return folder.complete

    def app(self, folder: Path) -> Path:
        """Write the app; its run configuration says where the records go."""
        return write_app(folder, self.experiment, {**self.options, "out": None})


class AppJob(Job):
    """A Flower app of the user's own, such as `lamina flower new` writes; only its run configuration is set here."""

    def __init__(self, folder: Path, out: Path | None) -> None:
        app = AppFolder.read(folder)
        missing = [key for key in ("out", "nodes", "signing-key") if key not in app.config]
        if missing:
            keys = ", ".join(f'{key} = ""' for key in missing)
            raise BadInput(f"{folder / 'pyproject.toml'}: [tool.flwr.app.config] lacks {keys}")
        super().__init__(out or Path("runs") / app.name, None)
        self.folder = folder

    def is_complete(self, *, overwrite: bool) -> bool:
        """Return False: only the app knows, and it ends at once if so."""
        check_writable(self.out)
        return False

    def app(self, folder: Path) -> Path:
        """Return the user's own folder."""
        return self.folder


def write_app(folder: Path, experiment: Experiment, options: Mapping[str, Any]) -> Path:
    """Write a Flower app that builds the federation of an experiment; return its folder."""
    settings = {"experiment": experiment.model_dump(exclude_unset=True), "options": options}
    package = folder / "lamina_up"
    package.mkdir(parents=True, exist_ok=True)
    template = resources.files("lamina").joinpath("flower", "template", "up")
    (folder / "pyproject.toml").write_bytes(template.joinpath("pyproject.toml.in").read_bytes())
    (package / "__init__.py").write_bytes(template.joinpath("shim.py.in").read_bytes())
    (package / "settings.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return folder
