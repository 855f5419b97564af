"""Run reproductions side by side on one machine: ``python reproduction/batch.py NAME … --out runs --processes 8``.

``lamina reproduce`` trains one method after another, and one method rarely fills a large GPU. This script trains every
method of every variant in a separate process, up to ``--processes`` at a time, in the order of the names. As soon as
all methods of a name are complete, ``lamina reproduce`` computes its tables and verdicts. Started again, it resumes.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lamina.base.atomic import write_file
from lamina.base.errors import LaminaError
from lamina.experiment.config import load
from lamina.experiment.runs.records import read_json
from lamina.experiment.trials import claims, reproduction
from lamina.experiment.trials.compare import label_folder
from lamina.storage.files import write_json

PARTS = ".parts"  # folder of the comparisons of one method each


@dataclass(frozen=True)
class Part:
    """One method of one variant of a reproduction."""

    name: str
    variant: str  # empty: as given
    algorithm: str
    command: list[str]  # without the folder
    into: Path  # folder of the whole comparison

    def __str__(self) -> str:
        return f"{self.name}{' ' * bool(self.variant)}{self.variant}: {self.algorithm}"

    @property
    def folder(self) -> Path:
        """Return the folder that it is trained in."""
        place = self.into.relative_to(self.into.parents[1])
        return self.into.parents[1] / PARTS / place / label_folder(self.algorithm)

    @property
    def is_done(self) -> bool:
        """Return whether its runs are in the folder of the whole comparison."""
        return (self.into / label_folder(self.algorithm)).exists()

    def move(self) -> None:
        """Move its runs to the folder of the whole comparison."""
        name = label_folder(self.algorithm)
        self.into.mkdir(parents=True, exist_ok=True)
        self._add_config()  # tells lamina that it may use the folder
        tuning = self.folder / "tuning" / name
        if tuning.exists():
            (self.into / "tuning").mkdir(exist_ok=True)
            shutil.move(tuning, self.into / "tuning" / name)
        add_rows(self.folder / "tuning.csv", self.into / "tuning.csv")  # `lamina reproduce` needs all methods for it
        shutil.move(self.folder / name, self.into / name)  # last: the part is done
        shutil.rmtree(self.folder)

    def _add_config(self) -> None:
        """Add the method to the settings of the whole comparison."""
        config, whole = read_json(self.folder / "config.json"), self.into / "config.json"
        if whole.exists():
            others = read_json(whole)
            names = others["compare"]["algorithms"], config["compare"]["algorithms"]
            config["compare"]["algorithms"] = list(dict.fromkeys([*names[0], *names[1]]))  # it may be moved again
            config["algorithms"] = {**others["algorithms"], **config["algorithms"]}
        write_json(whole, config)


def add_rows(source: Path, target: Path) -> None:
    """Add the rows of a table to another one, which has no row of their method; columns may differ."""
    tables = [list(csv.DictReader(io.StringIO(path.read_text()))) for path in (target, source) if path.exists()]
    rows = [row for table in tables for row in table]
    if rows:
        first, *rest = ([*table[0]] for table in tables if table)  # a method's own options come before the last three
        options = dict.fromkeys(column for columns in (first, *rest) for column in columns[:-3])
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, [*options, *first[-3:]], restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_file(target, text.getvalue().encode())


def main() -> None:
    """Run all parts, then put them together."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="+", metavar="NAME", help="as of lamina reproduce")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the results (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="that train at a time (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="stop then, after a round of each process")
    parser.add_argument("--only", action="append", default=[], metavar="METHOD", help="train this one; may be repeated")
    parser.add_argument("--set", action="append", default=[], help="as of lamina reproduce; for all names")
    arguments = parser.parse_args()
    try:
        parts = [part for name in arguments.names for part in parts_of(name, arguments.out, arguments.set)]
    except LaminaError as error:
        parser.error(str(error))
    methods = dict.fromkeys(part.algorithm for part in parts)
    for method in arguments.only:
        if method not in methods:
            parser.error(f"--only {method}: choose from {', '.join(methods)}")
    until = float("inf") if arguments.seconds is None else time.monotonic() + arguments.seconds
    given = {stem(name): name for name in arguments.names}
    changed = [word for one in arguments.set for word in ("--set", one)]
    evaluations: dict[str, subprocess.Popen[bytes]] = {}

    def evaluate(name: str) -> None:
        """Start to compute the tables and verdicts of a name whose parts are all done."""
        if all(part.is_done for part in parts if part.name == name):
            command = ["reproduce", given[name], *changed, "--out", str(arguments.out / name)]
            evaluations[name] = start(command, log_of(name))

    def log_of(name: str) -> Path:
        return arguments.out / PARTS / f"{name}.log"

    waiting = [part for part in parts if not part.is_done and part.algorithm in (arguments.only or methods)]
    for name in given:
        evaluate(name)
    complete = train(waiting, arguments.processes, until, evaluate)
    for name, child in evaluations.items():
        code = child.wait()
        complete &= code == 0
        print(f"{name}: {f'ended with code {code}, see' if code else 'tables and verdicts in'} {log_of(name)}")
    sys.exit(0 if complete else 1)


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command of lamina that adds its output to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        command = [sys.executable, "-m", "lamina", *command]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)


def stem(name: str) -> str:
    """Return the name of a reproduction's folder."""
    return reproduction.find(name).stem


def parts_of(name: str, out: Path, overrides: list[str]) -> list[Part]:
    """Return every method of every variant that the claims of a reproduction need."""
    file = reproduction.find(name)
    experiment = load(file, overrides)
    parts = []
    for variant, algorithms in claims.needed(experiment).items():
        into = (out / file.stem / (variant or reproduction.FOLDER_AS_GIVEN)).absolute()
        for algorithm in algorithms:
            alone = f"compare.algorithms={json.dumps([algorithm])}"
            settings = [*overrides, *claims.variants(experiment)[variant], alone]
            command = ["compare", str(file), *(word for setting in settings for word in ("--set", setting)), "--quiet"]
            parts.append(Part(file.stem, variant, algorithm, command, into))
    return parts


def train(waiting: list[Part], processes: int, until: float, completed: Callable[[str], None]) -> bool:
    """Train parts side by side until all have ended or time is up; return whether all were completed.

    After each part that is complete, `completed` is called with its name.
    """
    began, complete = time.monotonic(), True
    running: dict[subprocess.Popen[bytes], Part] = {}
    stopping: set[subprocess.Popen[bytes]] = set()

    def say(line: object) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)

    while running or (waiting and time.monotonic() < until):
        while waiting and len(running) < processes and time.monotonic() < until:
            part = waiting.pop(0)
            child = start([*part.command, "--out", str(part.folder)], part.folder.with_suffix(".log"))
            running[child] = part
            say(f"{part}: started")
        for child, part in list(running.items()):
            if child.poll() is not None:
                del running[child]
                if child.returncode == 0:
                    part.move()
                    say(f"{part}: complete")
                    completed(part.name)
                else:
                    complete = False
                    say(f"{part}: ended with code {child.returncode}, see {part.folder.with_suffix('.log')}")
            elif time.monotonic() > until and child not in stopping:
                child.send_signal(signal.SIGTERM)  # lamina ends the round, writes a checkpoint and stops
                stopping.add(child)
        time.sleep(0.5)
    for part in waiting:
        say(f"{part}: not started")
    return complete and not waiting


if __name__ == "__main__":
    main()
