"""Install the peers with pinned versions, each in its own virtual environment, and find their interpreters."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ENVIRONMENTS = BENCHMARKS / ".venvs"
CARRIED = BENCHMARKS / ".carried"  # peers in pure Python, unpacked by carry.sh for machines without internet

REQUIREMENTS = {
    "pfl": ["torch==2.13.0", "pfl[pytorch]==0.6.0"],
    "blazefl": ["torch==2.13.0", "blazefl[contrib,reproducibility]==2.0.3"],
    "flower": ["torch==2.13.0", "flwr[simulation]==1.41.0", "ray==2.55.1"],
    "fedjax": ["fedjax==0.0.17", "dm-haiku==0.0.17", "jax==0.10.2", "jaxlib==0.10.2"],
}
MIN_PYTHON = {"blazefl": (3, 12)}  # newer than lamina's


def install(peer: str) -> None:
    """Install a peer into its own environment."""
    least = MIN_PYTHON.get(peer, (3, 11))
    if sys.version_info < least:
        version = ".".join(map(str, least))
        print(f"{peer}: skipped, because it needs Python {version} or newer: run this command with one", flush=True)
        return
    folder = ENVIRONMENTS / peer
    print(f"{peer}: {' '.join(REQUIREMENTS[peer])}", flush=True)
    if not _python(peer).exists():
        venv.create(folder, with_pip=True)
    subprocess.run([_python(peer), "-m", "pip", "install", "--quiet", *REQUIREMENTS[peer]], check=True)
    _stamp(peer).write_text("\n".join(REQUIREMENTS[peer]))


def interpreter(peer: str) -> tuple[Path, list[Path]] | None:
    """Return the Python that can import a peer and the folders to put on its path; None if it is not installed."""
    if _stamp(peer).exists() and _stamp(peer).read_text() == "\n".join(REQUIREMENTS[peer]):
        return _python(peer), []
    if (CARRIED / peer).exists():
        return Path(sys.executable), [CARRIED]
    return None


def _python(peer: str) -> Path:
    return ENVIRONMENTS / peer / "bin" / "python"


def _stamp(peer: str) -> Path:
    return ENVIRONMENTS / peer / ".installed"  # written last, so that an unfinished installation is not used
