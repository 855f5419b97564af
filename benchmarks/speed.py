"""Seconds per round: lamina, its peers and a plain PyTorch loop in one table, in one sitting, on the same work.

    python benchmarks/speed.py --install                # the peers' environments, once
    python benchmarks/speed.py                          # on a CPU: W1 and W2, one thread each
    python benchmarks/speed.py W2 --only pfl,lamina --rounds 3 --json w2.json
    python benchmarks/speed.py --device cuda            # W1 to W4, fp32 and bf16

One process at a time, each contender between two runs of the plain loop; warm-up rounds are left out. README.md beside
this file says how the comparison is kept fair.
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
PEERS_ON_GPU = ("pfl",)
FORCED_ON_CPU = {"W1": "stacked", "W2": "loop"}  # the engine that the automatic choice does not take
PROJECTED = {"W1": 1500, "W4": 100}  # rounds of a whole experiment
MOST_EXTRA_SAMPLES = 0.02  # how much more or less than the others a contender may process
COLUMNS = "{:9} {:24} {:>11} {:>14} {:>10} {:>7} {:>9} {:>8} {:>7}"


@dataclass(frozen=True)
class Contender:
    family: str  # plain, lamina, or a peer
    label: str
    module: str
    options: tuple[str, ...] = ()


@dataclass
class Row:
    """One line of the table, and of the JSON file."""

    workload: str
    contender: str
    problem: str = ""  # not installed, failed, or other work than the plain loop's
    note: str = ""  # the whole story of the problem, or what else a reader should know
    seconds: float | None = None  # median of a round
    plain: float | None = None  # the plain loop's, mean of the runs just before and after
    start: float | None = None  # what the first rounds and setting up took beyond the later rounds
    result: dict[str, Any] = field(default_factory=dict)

    def line(self) -> str:
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


# --- who runs what ----------------------------------------------------------------------------------------------


def contenders(workload: str, a: argparse.Namespace) -> list[Contender]:
    ours = [Contender("lamina", f"lamina {p}", "ours", ("--precision", p)) for p in a.precision]
    if not a.on_gpu and workload in FORCED_ON_CPU:
        engine = FORCED_ON_CPU[workload]
        ours.append(Contender("lamina", f"lamina fp32, {engine}", "ours", ("--engine", engine)))
    peers = [Contender(p, p, f"peers.{p}") for p in (PEERS_ON_GPU if a.on_gpu else REQUIREMENTS)]
    return [c for c in ours + (peers if workload in PEER_WORKLOADS else []) if c.family in a.only]


def run(contender: Contender, workload: str, data: Path, a: argparse.Namespace) -> Row:
    """Run one contender in a process of its own."""
    row = Row(workload, contender.label)
    installation = (Path(sys.executable), [BENCHMARKS.parent / "src"])
    if contender.family in REQUIREMENTS:
        installation = interpreter(contender.family)
    if installation is None:
        row.problem = f"not installed: python benchmarks/speed.py --install {contender.family}"
        row.problem += " (or peers/carry_pfl.sh)" if a.on_gpu else ""
        return row
    python, folders = installation
    command = [python, "-m", contender.module, workload, "--data", data, "--device", a.device]
    command += ["--rounds", a.rounds, "--warmup", a.warmup, "--threads", a.threads, *contender.options]
    print(f"{workload}: {contender.label} …", end=" ", file=sys.stderr, flush=True)
    # the folder also takes ray's and flwr's own files
    with tempfile.TemporaryDirectory(prefix="bench") as scratch, Path(scratch, "output").open("w+b") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=scratch,
            env=environment(a, [BENCHMARKS, *folders], scratch),
            stdout=output,  # a file, not a pipe: a helper process that lives on would keep a pipe open
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
    """The same for every contender; most of it is read when a library is imported."""
    n = str(a.threads)
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in path),
        "OMP_NUM_THREADS": n,
        "MKL_NUM_THREADS": n,
        "OPENBLAS_NUM_THREADS": n,
        "OMP_WAIT_POLICY": "PASSIVE",  # spinning threads would slow their neighbours
        "NPROC": n,  # the size of XLA's thread pools, which its flag alone does not bound
        "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={str(a.threads > 1).lower()}",
        "PFL_PYTORCH_DEVICE": a.device,
        "FLWR_HOME": scratch,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_TMPDIR": scratch,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # ray would give way to whatever else the machine does, the others would not
    }


def end_group(group: int) -> None:
    """End what a contender left behind (ray's helpers, after a crash or an interrupt)."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def take(row: Row, result: dict[str, Any], contender: Contender, a: argparse.Namespace) -> None:
    """Fill a row with what a contender reported, after checking that it did the same work."""
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

    expected = w.samples * w.members
    excess = row.result["samples"] / expected - 1
    if result["parameters"] != w.parameters or abs(excess) > MOST_EXTRA_SAMPLES:
        row.problem = "not the same work"
        row.note = f"not {w.parameters:,} parameters and {expected:,} samples a round"
    elif excess:
        row.note = f"processes {100 * excess:+.1f} % samples"


def one_workload(workload: str, data: Path, a: argparse.Namespace) -> list[Row]:
    """Plain loop, contender, plain loop, contender, …, plain loop."""
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
    pinned = f" on {a.threads} core(s)" if a.cores else ""
    return (
        f"{a.device}, {a.threads} thread(s){pinned}, Python {platform.python_version()}, "
        f"median of {a.rounds} rounds after {a.warmup} of warm-up\n"
        + COLUMNS.format(
            "workload", "contender", "parameters", "samples/round", "s/round", "ratio", "speed-up", "start s", "acc."
        )
    )


def footnotes(rows: list[Row], a: argparse.Namespace) -> list[str]:
    lines = ["", "ratio: seconds of a round to those of the plain loop just before and after; speed-up: the inverse."]
    lines += [
        "start: setting up, and what the warm-up took beyond later rounds. acc.: on training samples, at the end."
    ]
    versions = dict.fromkeys(row.result["version"] for row in rows if row.result)
    lines += [f"versions: {'; '.join(versions)}"]
    lines += [f"{row.workload} {row.contender}: {row.note}" for row in rows if row.note]
    if a.on_gpu:
        lines += ["not run on a GPU: flower, fedjax"]
        for workload, rounds in PROJECTED.items():
            times = {r.contender: r.start + rounds * r.seconds for r in rows if r.workload == workload and r.seconds}
            shown = ", ".join(f"{name} {seconds / 60:.1f} min" for name, seconds in times.items())
            lines += [f"projected, {workload} x {rounds} rounds with the start: {shown}"] if times else []
    return lines


def arguments() -> argparse.Namespace:
    families = ["lamina", *REQUIREMENTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help="W1 W2 W3 W4; default: W1 W2 on a CPU, all on a GPU")
    parser.add_argument("--only", default=",".join(families), help=f"of {', '.join(families)} (plain always runs)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-pin", action="store_true", help="on a CPU: more cores than threads may be used")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", help="lamina's, one or more: fp32,tf32,bf16; default: fp32, on a GPU fp32,bf16")
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
    a = arguments()
    if a.install:
        for peer in a.install:
            install(peer)
        return
    a.cores = []
    if not a.on_gpu and not a.no_pin and hasattr(os, "sched_setaffinity"):
        a.cores = sorted(os.sched_getaffinity(0))[-a.threads :]
        os.sched_setaffinity(0, a.cores)  # inherited by every contender: helper threads and processes count too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of `run`, which ends the contender's processes
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
