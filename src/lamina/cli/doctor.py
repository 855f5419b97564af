"""``lamina doctor``: list installed packages, devices and data sets, with advice on what is missing."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from pathlib import Path
from typing import Any

from lamina import __version__
from lamina.base.errors import BadInput
from lamina.base.text import plural
from lamina.cli.base import app, echo, out

NEEDED = ("torch", "numpy", "scikit-learn", "matplotlib", "pydantic", "rich", "safetensors", "typer")
EXTRAS = {  # extra: its package, and what for
    "flower": ("flwr", "lamina flower"),
    "hub": ("datasets", "data sets from the Hugging Face hub, by name"),
    "images": ("pillow", "TinyImageNet and your own pictures"),
    "mlflow": ("mlflow", "lamina run --mlflow"),
    "report": ("plotly", "lamina report"),
    "table": ("pandas", "history.to_pandas() and data in tables"),
    "tensorboard": ("tensorboard", "lamina run --tensorboard"),
    "tune": ("optuna", "lamina tune"),
}
GIB = 2**30


@app.command()
def doctor() -> None:
    """List what is installed, devices, threads and data, with advice on what is missing."""
    advice: list[str] = []
    sections = {
        "installed": installed(advice),
        "devices": devices(advice),
        "threads": threads(advice),
        "data": data(advice),
    }
    for section, lines in sections.items():
        out.print(f"[bold]{section}[/]", highlight=False)
        for name, value in lines.items():
            echo(f"  {name:<15} {'–' if value is None else value}")
    out.print("[bold]advice[/]" if advice else "nothing to advise", highlight=False)
    for line in advice:
        echo(f"  - {line}")


def version(package: str) -> str | None:
    """Return the version of an installed package, without importing it."""
    from importlib import metadata  # imported here: it is slow, and every command imports this module

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed(advice: list[str]) -> dict[str, Any]:
    """Return the versions of lamina, of the packages it requires and of those that its extras install."""
    import torch

    versions = {"lamina": __version__, "python": platform.python_version()} | {name: version(name) for name in NEEDED}
    versions["torch"] = torch.__version__  # includes the build, cpu or cuda
    missing = [name for name, number in versions.items() if number is None]
    if missing:
        advice.append(f"{', '.join(missing)} not installed: pip install -e . again")
    for extra, (package, purpose) in EXTRAS.items():
        versions[package] = version(package)
        if versions[package] is None:
            advice.append(f"{purpose}: pip install -e '.[{extra}]'")
    return versions


def devices(advice: list[str]) -> dict[str, Any]:
    """Return processor and GPUs, and whether lamina's own kernels run on them."""
    import torch

    from lamina.engines.stacked.layers.convolution import kernels_for
    from lamina.experiment.runs.environment import processor

    gpus: dict[str, str] = {}
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(number)
        kernels = None
        with contextlib.suppress(Exception):  # whatever a broken triton raises when it is imported
            kernels = kernels_for(torch.device("cuda", number), torch.float32)
        size, capability = f"{facts.total_memory / GIB:.1f} GiB", f"capability {facts.major}.{facts.minor}"
        with_kernels = f"{'without' if kernels is None else 'with'} lamina's kernels"
        gpus[f"gpu {number}"] = f"{facts.name}, {size}, {capability}, {with_kernels}"
    if not gpus and Path("/dev/nvidia0").exists():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
        advice.append(f"there is an NVIDIA GPU, but torch {built} and cannot use it: see pytorch.org/get-started")
    if gpus and version("triton") is None:
        advice.append("stacked convolutions on the GPU are faster with lamina's kernels: pip install triton")
    if gpus and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        advice.append("triton needs a C compiler on the GPU machine: install gcc")
    cores = {"cores": os.cpu_count() or 1, "usable cores": usable_cores()}
    return {"cpu": processor(), **cores, **(gpus or {"gpus": "none"}), "triton": version("triton")}


def usable_cores() -> int:
    """Return how many cores this process may use: a scheduler or a container may allow fewer than there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no container, or one of another kind
        return cores


def threads(advice: list[str]) -> dict[str, Any]:
    """Return how many threads torch uses, and how they wait."""
    import torch

    count, usable = torch.get_num_threads(), usable_cores()
    settings = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    if count > 1 and (settings["OMP_WAIT_POLICY"] or "").upper() != "PASSIVE":
        advice.append("on a machine you share, export OMP_WAIT_POLICY=PASSIVE: OpenMP's waiting threads spin otherwise")
    if count > usable or (os.cpu_count() or 1) > usable:
        yours = f"{plural(usable, 'core')} {'is' if usable == 1 else 'are'} yours"
        advice.append(f"only {yours}: set run.threads and OMP_NUM_THREADS to {usable} at most")
    return {"torch": count, **settings}


def data(advice: list[str]) -> dict[str, Any]:
    """Return the data directory and the data sets found in it; None for a set without files."""
    from lamina.data.readers.files import ENVIRONMENT_VARIABLE, data_directory
    from lamina.data.readers.sources import SOURCES

    try:
        root = data_directory()
    except BadInput as error:
        advice.append(str(error))
        return {"directory": None}
    places: dict[str, Any] = {"directory": str(root.absolute())}
    for name, source in SOURCES.items():
        if not source.files:
            places[name] = "comes with scikit-learn"
            continue
        place = source.locate(root)
        places[name] = None if place is None else str(place.path)
        if place is None:
            advice.append(f"{name} is not in {places['directory']}: put there {source.expected}")
        elif place.missing:
            places[name] += " (incomplete)"
            advice.append(f"{name}: {place.path} lacks {', '.join(place.missing)}: put all of its files there")
    absent = [name for name, place in places.items() if place is None]
    if absent:
        from_hub = "; `datasets` is installed: if online, they are downloaded from the hub" * bool(version("datasets"))
        advice.append(f"{', '.join(absent)}: or set {ENVIRONMENT_VARIABLE} to where they are{from_hub}")
    return places
