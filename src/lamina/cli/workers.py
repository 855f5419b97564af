"""Start several processes that share the runs of one command: `--workers` on this machine, `--slurm` on a cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import click
import typer

from lamina.base.errors import BadInput, missing_extra
from lamina.base.text import plural
from lamina.base.workers import Worker, is_worker
from lamina.cli import base

if TYPE_CHECKING:
    from lamina.experiment.config import Compare, Tune

Workers = Annotated[
    int,
    typer.Option("--workers", metavar="N", min=1, help="share the runs among N processes, one per GPU"),
]
Slurm = Annotated[
    str | None,
    typer.Option(
        "--slurm", metavar="KEY=VALUE,…", help="submit the workers to Slurm: partition, gpus, minutes as time"
    ),
]
SLURM_DEFAULTS = {"gpus": "1", "time": "1440"}
CLUSTER = "slurm"  # as submitit names it
POLL_S = 0.1


def launch(
    workers: int, slurm: str | None, runs: int, folder: Path, replaced: Sequence[tuple[Path, Compare | Tune]] = ()
) -> bool:
    """Start this command as several workers, if asked for; return False if this process itself is to do the work.

    Args:
        workers: how many.
        slurm: the options of Slurm jobs; None to start processes here.
        runs: how many there are to share.
        folder: of all runs.
        replaced: the folders whose runs are to be deleted first, each with its section of the experiment file.
    """
    if is_worker() or (workers == 1 and slurm is None):
        return False
    if workers > runs:
        raise BadInput(f"--workers {workers}: there is no work for so many, only {plural(runs, 'run')}")
    from lamina.experiment.trials.trials import mark_replaced

    for place, section in replaced:  # here, and not in the workers: one must not delete what another one has trained
        mark_replaced(place, section)
    command = [sys.executable, "-m", "lamina", *this_command(without=("workers", "slurm", "overwrite"))]
    if slurm is not None:
        submit(command, workers, slurm, folder)
        return True
    code = run_workers(command, workers)
    if code:
        raise typer.Exit(code)
    return True


def this_command(without: Collection[str]) -> list[str]:
    """Return the words of the command that is running, but for some options."""
    context = click.get_current_context()
    words = [str(context.info_name)]
    for parameter in context.command.params:
        value, option = context.params.get(parameter.name or ""), parameter.opts[0]
        if parameter.name in without or value is None or value is False:
            continue
        is_argument = isinstance(parameter, click.Argument)
        for one in value if isinstance(value, list | tuple) else [value]:
            words += ([] if is_argument else [option]) + ([] if value is True else [str(one)])
    return words


# --- on this machine --------------------------------------------------------------------------------------------------


def run_workers(command: list[str], count: int) -> int:
    """Run workers to their end; return the exit code of the first one, which shows progress and results."""
    gpus = visible_gpus()

    def start(number: int) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (it is read when the worker has ended)
        environment = {**os.environ, **Worker(number, 1 if gpus else count).environment()}
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = gpus[(number - 1) % len(gpus)]
        quiet: dict[str, Any] = {} if number == 1 else {"stdout": subprocess.DEVNULL, "stderr": errors}
        words = command if number == 1 or "--quiet" in command else [*command, "--quiet"]
        # A group of its own: Ctrl-C reaches this process only, which forwards it once.
        return subprocess.Popen(words, env=environment, process_group=0, **quiet), errors

    started = {number: start(number) for number in range(1, count + 1)}
    left, reported = dict(started), set()
    with forwarded_signals([process for process, _ in started.values()]) as signals:
        while left:
            time.sleep(POLL_S)
            for number in [number for number, (process, _) in left.items() if process.poll() is not None]:
                process, errors = left.pop(number)
                if process.returncode < 0 and not signals:
                    report_end(number, process, errors)
                    reported.add(number)
    first = started[1][0].returncode
    for number, (process, errors) in started.items():
        if process.returncode not in (0, first) and number not in reported and not signals:
            report_end(number, process, errors)
    if first < 0 and not signals:  # the others have finished its runs, and nobody has shown the results
        first = subprocess.run(command, env={**os.environ, **Worker(1).environment()}, check=False).returncode
    return first if first >= 0 else 128 - first


@contextlib.contextmanager
def forwarded_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Send Ctrl-C and SIGTERM on to processes; yield the signals so far."""
    signals: list[int] = []

    def forward(number: int, frame: object) -> None:
        signals.append(number)
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report_end(number: int, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """Print in one line how a worker ended before its time."""
    code = process.returncode
    how = f"was ended by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with code {code}"
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    why = f": {lines[-1].strip()}" if lines else ""
    base.print_problem("warning", f"worker {number} (process {process.pid}) {how}{why}; the others finish its runs")


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [one.strip() for one in chosen.split(",") if one.strip()]
    import torch

    return [str(i) for i in range(torch.cuda.device_count())]


# --- on a cluster -----------------------------------------------------------------------------------------------------


def submit(command: list[str], workers: int, given: str, folder: Path) -> None:
    """Submit workers to Slurm and print how to watch them."""
    options = slurm_options(given)
    os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")  # its own logging would close all other handlers
    try:
        import submitit
    except ImportError as error:
        raise missing_extra("submitit", "slurm", "--slurm") from error
    if CLUSTER == "slurm" and shutil.which("sbatch") is None:
        raise BadInput("--slurm: there is no Slurm on this machine (sbatch was not found); --workers N works without")
    logs = folder.with_name(f"{folder.name}-slurm")
    executor = submitit.AutoExecutor(folder=logs, cluster=CLUSTER)
    executor.update_parameters(name="lamina", gpus_per_node=options.pop("gpus"), timeout_min=options.pop("time"))
    if CLUSTER == "slurm" and "partition" in options:
        executor.update_parameters(slurm_partition=options.pop("partition"))
    if CLUSTER == "slurm" and options:
        executor.update_parameters(slurm_additional_parameters=options)
    # Every worker shows the results, in its log: any of them may be the last one.
    task = submitit.helpers.CommandFunction(command, env={**os.environ, **Worker(1).environment()})
    jobs = [executor.submit(task) for _ in range(workers)]
    base.echo(f"submitted {plural(workers, 'job')}: {', '.join(job.job_id for job in jobs)}; their logs are in {logs}/")
    base.echo(f"watch the runs with: lamina watch {folder}")


def slurm_options(given: str) -> dict[str, Any]:
    """Return the options of Slurm jobs.

    >>> slurm_options("partition=gpu,time=60,account=me")
    {'gpus': 1, 'time': 60, 'partition': 'gpu', 'account': 'me'}
    """
    options: dict[str, Any] = dict(SLURM_DEFAULTS)
    for pair in filter(None, given.split(",")):
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise BadInput(f"--slurm '{given}': write KEY=VALUE pairs, for example partition=gpu,gpus=1,time=600")
        options[key.strip()] = value.strip()
    for key in SLURM_DEFAULTS:
        if not options[key].isdecimal():
            raise BadInput(f"--slurm {key}={options[key]}: must be a whole number{' of minutes' * (key == 'time')}")
        options[key] = int(options[key])
    return options
