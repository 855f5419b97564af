"""The environment of a run: versions, hardware and commits, which its numbers and times depend on."""

from __future__ import annotations

import contextlib
import datetime
import functools
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lamina

GIT_TIMEOUT_S = 5


def environment(device: str) -> dict[str, Any]:
    """Return what the numbers and times of a run depend on beside its configuration."""
    on_gpu = device.startswith("cuda")
    return {
        "lamina": lamina.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device,
        "device_name": torch.cuda.get_device_name(device) if on_gpu else processor(),
        "threads": torch.get_num_threads(),
        "commit": git_commit(Path.cwd()),
        "lamina_commit": own_commit(),
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def processor() -> str:
    """Return the name of the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def own_commit() -> str | None:
    """Return the commit of the checkout that lamina runs from; None if it is installed."""
    here = Path(lamina.__file__).resolve().parent
    is_installed = {"site-packages", "dist-packages"} & set(here.parts)  # a repository above it is another project's
    return None if is_installed else git_commit(here)


@functools.cache
def git_commit(folder: Path) -> str | None:
    """Return the commit checked out in a folder or one above it; None without git or outside a repository."""
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()
