"""Measure the seconds per round of lamina, its peers and a plain PyTorch loop on the same work; print one table.

    python benchmarks/speed.py --install                # once: install the peers, each in its own environment
    python benchmarks/speed.py                          # on a CPU: W1 and W2 with one thread
    python benchmarks/speed.py W2 --only pfl,lamina --rounds 3 --json w2.json
    python benchmarks/speed.py --device cuda            # W1 to W5; lamina in fp32 and bf16

Contenders run one at a time, each between two runs of the plain loop. Warm-up rounds are not counted. README.md in this
folder says how the comparison is kept fair.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import workloads
from contender import RESULT
from peers.install import BENCHMARKS, REQUIREMENTS, install, interpreter

PEER_WORKLOADS = ("W1", "W2")
PEERS_ON_GPU = ("pfl", "blazefl")
OTHER_ENGINE_ON_CPU = {"W1": "stacked", "W2": "loop"}  # a second engine to measure
PROJECTED_ROUNDS = {"W1": 1500, "W4": 100, "W5": 20}
MAX_SAMPLE_DIFFERENCE = 0.02  # relative to the plan's
COLUMNS = "{:9} {:24} {:>11} {:>14} {:>10} {:>7} {:>9} {:>8} {:>7}"


@dataclass(frozen=True)
class Contender:
    """A module to run, and what the table calls it."""

    family: str  # "plain", "lamina", or the name of a peer
    label: str
    module: str
    options: tuple[str, ...] = ()


@dataclass
class Row:
    """One line of the table, and of the JSON file."""

    workload: str
    contender: str
    problem: str = ""  # not installed, failed, or did other work
    note: str = ""  # the details, printed below the table
    seconds: float | None = None  # the median of the timed rounds
    plain: float | None = None  # the plain loop's seconds: the mean of the runs just before and after
    start: float | None = None  # the set-up, and the time by which the warm-up exceeds later rounds
    result: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
        """Return the row as a line of the table."""
        if self.seconds is None:
            return f"{self.workload:9} {self.contender:24} {self.problem}"
        ratio, speed_up = ("", "") if self.plain is None else (self.seconds / self.plain, self.plain / self.seconds)
        parameters, samples = f"{self.result['parameters']:,}", f"{self.result['samples']:,.0f}"
        cells = [_seconds(self.seconds), _digits(ratio, 2), _digits(speed_up, 2), f"{self.start:.1f}"]
        accuracy = f"{100 * self.result['accuracy']:.0f} %"
        line = COLUMNS.format(self.workload, self.contender, parameters, samples, *cells, accuracy)
        return f"{line}  {self.problem}".rstrip()


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else f"{value:.5f}"


def _digits(value: float | str, digits: int) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}f}"


# --- contenders -----------------------------------------------------------------------------------------------


def contenders(workload: str, a: argparse.Namespace) -> list[Contender]:
    """Return the chosen contenders of a workload, without the plain loop."""
    ours = [Contender("lamina", f"lamina {p}", "ours", ("--precision", p)) for p in a.precision]
    if not a.on_gpu and workload in OTHER_ENGINE_ON_CPU:
        engine = OTHER_ENGINE_ON_CPU[workload]
        ours.append(Contender("lamina", f"lamina fp32, {engine}", "ours", ("--engine", engine)))
    peers = [Contender(p, p, f"peers.{p}") for p in (PEERS_ON_GPU if a.on_gpu else REQUIREMENTS)]
    return [c for c in ours + (peers if workload in PEER_WORKLOADS else []) if c.family in a.only]


def run(contender: Contender, workload: str, data: Path, a: argparse.Namespace) -> Row:
    """Run one contender in a process of its own, and return its row of the table."""
    row = Row(workload, contender.label)
    installation = (Path(sys.executable), [BENCHMARKS.parent / "src"])
    if contender.family in REQUIREMENTS:
        installation = interpreter(contender.family)
    if installation is None:
        row.problem = f"not installed: python benchmarks/speed.py --install {contender.family}"
        row.problem += " (or peers/carry.sh)" if a.on_gpu else ""
        return row
    python, folders = installation
    command = [python, "-m", contender.module, workload, "--data", data, "--device", a.device]
    command += ["--rounds", a.rounds, "--warmup", a.warmup, "--threads", a.threads, *contender.options]
    print(f"{workload}: {contender.label} …", end=" ", file=sys.stderr, flush=True)
    # ray and flwr write their files to the same folder
    with tempfile.TemporaryDirectory(prefix="bench") as scratch, Path(scratch, "output").open("w+b") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=scratch,
            env=environment(a, [BENCHMARKS, *folders], scratch),
            stdout=output,  # a pipe would stay open as long as any helper process lives
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        try:
            process.wait()
        finally:
            end_group(process.pid)
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    results = [line.removeprefix(RESULT) for line in lines if line.startswith(RESULT)]
    if process.returncode or not results:
        row.problem, row.note = "failed (see below)", "\n".join(lines[-15:])
        print("failed", file=sys.stderr)
        return row
    take(row, json.loads(results[-1]), contender, a)
    print(f"{_seconds(row.seconds)} s", file=sys.stderr)
    return row


def environment(a: argparse.Namespace, path: list[Path], scratch: str) -> dict[str, str]:
    """Return the environment variables of all contenders; libraries read most of them when they are imported."""
    n = str(a.threads)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in path),
        "OMP_NUM_THREADS": n,
        "MKL_NUM_THREADS": n,
        "OPENBLAS_NUM_THREADS": n,
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would slow their neighbours
        "NPROC": n,  # the size of XLA's thread pools, which XLA_FLAGS does not limit
        "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={str(a.threads > 1).lower()}",
        "PFL_PYTORCH_DEVICE": a.device,
        "FLWR_HOME": scratch,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_TMPDIR": scratch,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # ray's default is a lower priority than that of the other contenders
    }


def end_group(group: int) -> None:
    """Kill the processes that a contender left behind, such as ray's after a crash."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def take(row: Row, result: dict[str, Any], contender: Contender, a: argparse.Namespace) -> None:
    """Fill a row with a contender's result, and check that it did the work of the plan."""
    w = workloads.WORKLOADS[row.workload]
    scale = w.members if contender.family == "plain" else 1  # the plain loop runs one member of a population
    row.result = result | {"samples": result["samples"] * scale}
    median = statistics.median(result["seconds"])
    row.seconds = median * scale
    row.start = result["setup"] + max(0.0, sum(result["warmup"]) - median * len(result["warmup"]))
    if contender.family in REQUIREMENTS:
        row.contender = result["version"].split(",")[0]
    elif "engine" in result and "--engine" not in contender.options:
        row.contender += f" ({result['engine']})"

    expected = w.samples(a.warmup + a.rounds) * w.members
    excess = row.result["samples"] / expected - 1
    if result["parameters"] != w.parameters or abs(excess) > MAX_SAMPLE_DIFFERENCE:
        row.problem = "not the same work"
        row.note = f"expected {w.parameters:,} parameters and {expected:,.0f} samples a round"
    elif excess:
        row.note = f"processes {100 * excess:+.1f} % samples"


def one_workload(workload: str, data: Path, a: argparse.Namespace) -> list[Row]:
    """Run a workload: plain loop, contender, plain loop, contender, …, plain loop; return its rows of the table."""
    w = workloads.WORKLOADS[workload]
    workloads.save(workload, data)
    plain = Contender("plain", "plain loop", "plain")
    rows, plain_runs = [], []
    for contender in contenders(workload, a):
        if contender.family in REQUIREMENTS and interpreter(contender.family) is None:
            rows.append(run(contender, workload, data, a))
            continue
        if not plain_runs:
            plain_runs.append(run(plain, workload, data, a))
        rows.append(run(contender, workload, data, a))
        plain_runs.append(run(plain, workload, data, a))
        before, after = plain_runs[-2].seconds, plain_runs[-1].seconds
        rows[-1].plain = (before + after) / 2 if before and after else None
    if not plain_runs:
        plain_runs.append(run(plain, workload, data, a))
    for path in data.iterdir():
        path.unlink()

    timed = [row.seconds for row in plain_runs if row.seconds is not None]
    first = next((row for row in plain_runs if row.seconds is not None), plain_runs[0])
    if timed:
        first.seconds = first.plain = statistics.median(timed)
        first.note = f"median of {len(timed)} runs, {_seconds(min(timed))} to {_seconds(max(timed))} s"
        first.result["seconds_of_runs"] = timed
    if w.members > 1:
        first.contender = f"plain loop, 1 x {w.members}"
        first.note += f"; timed on one of {w.members} members and multiplied by {w.members}"
    return [first, *rows]


# --- the table --------------------------------------------------------------------------------------------------


def heading(a: argparse.Namespace) -> str:
    """Return the lines above the table."""
    pinned = f" on {a.threads} core(s)" if a.cores else ""
    return (
        f"{a.device}, {a.threads} thread(s){pinned}, Python {platform.python_version()}, "
        f"median of {a.rounds} rounds after {a.warmup} of warm-up\n"
        + COLUMNS.format(
            "workload", "contender", "parameters", "samples/round", "s/round", "ratio", "speed-up", "start s", "acc."
        )
    )


def footnotes(rows: list[Row], a: argparse.Namespace) -> list[str]:
    """Return the lines below the table."""
    lines = [
        "",
        "ratio: seconds per round divided by those of the plain loop just before and after; speed-up: the inverse.",
        "start: the set-up, and the time by which the warm-up exceeds later rounds.",
        "acc.: accuracy on training samples after the last round.",
    ]
    versions = dict.fromkeys(row.result["version"] for row in rows if row.result)
    lines += [f"versions: {'; '.join(versions)}"]
    lines += [f"{row.workload} {row.contender}: {row.note}" for row in rows if row.note]
    if a.on_gpu:
        lines += [f"not run on a GPU: {', '.join(peer for peer in REQUIREMENTS if peer not in PEERS_ON_GPU)}"]
        for workload, rounds in PROJECTED_ROUNDS.items():
            times = {r.contender: r.start + rounds * r.seconds for r in rows if r.workload == workload and r.seconds}
            shown = ", ".join(f"{name} {_seconds(seconds)} s" for name, seconds in times.items())
            lines += [f"projected, {workload}, the start and {rounds} rounds: {shown}"] if times else []
    return lines


def arguments() -> argparse.Namespace:
    """Parse and check the command line."""
    families = ["lamina", *REQUIREMENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help="W1 to W5; default: W1 W2 on a CPU, all on a GPU")
    parser.add_argument(
        "--only", default=",".join(families), help=f"some of {', '.join(families)}; the plain loop always runs"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-pin", action="store_true", help="let contenders use more cores than threads (CPU)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", help="lamina's precisions; default: fp32, on a GPU fp32,bf16")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--install", nargs="?", const=",".join(REQUIREMENTS), metavar="PEERS", help="default: all")
    a = parser.parse_args()
    a.on_gpu = a.device.startswith("cuda")
    a.workloads = a.workloads or (list(workloads.WORKLOADS) if a.on_gpu else list(PEER_WORKLOADS))
    a.precision = (a.precision or ("fp32,bf16" if a.on_gpu else "fp32")).split(",")
    a.only, a.install = a.only.split(","), a.install.split(",") if a.install else []
    for given, choices in ((a.workloads, workloads.WORKLOADS), (a.only, families), (a.install, REQUIREMENTS)):
        if unknown := set(given) - set(choices):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(choices)}")
    return a


def main() -> None:
    """Run all chosen workloads and print the table."""
    a = arguments()
    if a.install:
        for peer in a.install:
            install(peer)
        return
    a.cores = []
    if not a.on_gpu and not a.no_pin and hasattr(os, "sched_setaffinity"):
        a.cores = sorted(os.sched_getaffinity(0))[-a.threads :]
        os.sched_setaffinity(0, a.cores)  # all contenders inherit it, with their helper threads and processes
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # `run` then kills the contender's processes
    print(heading(a), flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as data:
        for workload in a.workloads:
            done = one_workload(workload, Path(data), a)
            print(*(row.line() for row in done), sep="\n", flush=True)
            rows += done
            if a.json:
                settings = {k: v for k, v in vars(a).items() if k not in ("json", "install")}
                settings |= {"python": platform.python_version(), "machine": platform.platform()}
                a.json.write_text(json.dumps({"settings": settings, "rows": [vars(row) for row in rows]}, indent=1))
    print(*footnotes(rows, a), sep="\n")
    sys.exit(any(row.problem and not row.problem.startswith("not installed") for row in rows))


if __name__ == "__main__":
    main()
