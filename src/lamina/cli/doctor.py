"""``lamina doctor``: list installed packages, devices and data sets, with advice on what is missing."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any

from lamina import __version__
from lamina.cli.base import app, echo, out

NEEDED = ("torch", "numpy", "scikit-learn", "matplotlib", "pydantic", "rich", "safetensors", "typer")
EXTRAS = {  # extra: its package, and what for
    "flower": ("flwr", "lamina flower"),
    "hub": ("datasets", "data sets from the Hugging Face hub, by name"),
    "images": ("pillow", "TinyImageNet and your own pictures"),
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
        "threads": threads(),
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
    return {"cpu": processor(), "cores": os.cpu_count(), **(gpus or {"gpus": "none"}), "triton": version("triton")}


def threads() -> dict[str, Any]:
    """Return how many threads torch uses, and how they wait."""
    import torch

    settings = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    return {"torch": torch.get_num_threads(), **settings}


def data(advice: list[str]) -> dict[str, Any]:
    """Return the data directory and the data sets found in it; None for a set without files."""
    from lamina.data.readers.files import ENVIRONMENT_VARIABLE, data_directory
    from lamina.data.readers.sources import SOURCES

    places: dict[str, Any] = {"directory": str(data_directory().absolute())}
    for name, source in SOURCES.items():
        if not source.files:
            places[name] = "comes with scikit-learn"
            continue
        place = source.locate(data_directory())
        places[name] = None if place is None else str(place.path) + " (incomplete)" * bool(place.missing)
        if place is None or place.missing:
            state = "is missing" if place is None else "is incomplete"
            advice.append(f"{name} {state}: the data directory ({ENVIRONMENT_VARIABLE}) needs {source.expected}")
    return places
