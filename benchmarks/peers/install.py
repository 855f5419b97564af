"""Where the peers are installed, and how: a virtual environment each, with pip, every version that matters pinned."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
ENVIRONMENTS = BENCHMARKS / ".venvs"
CARRIED = BENCHMARKS / ".carried"  # pfl's pure wheels, unpacked by carry_pfl.sh, for machines without pip's internet

REQUIREMENTS = {
    "pfl": ["torch==2.13.0", "pfl[pytorch]==0.6.0"],
    "flower": ["torch==2.13.0", "flwr[simulation]==1.41.0", "ray==2.55.1"],
    "fedjax": ["fedjax==0.0.17", "dm-haiku==0.0.17", "jax==0.10.2", "jaxlib==0.10.2"],
}


def install(peer: str) -> None:
    folder = ENVIRONMENTS / peer
    print(f"{peer}: {' '.join(REQUIREMENTS[peer])}", flush=True)
    if not _python(peer).exists():
        venv.create(folder, with_pip=True)
    subprocess.run([_python(peer), "-m", "pip", "install", "--quiet", *REQUIREMENTS[peer]], check=True)
    _stamp(peer).write_text("\n".join(REQUIREMENTS[peer]))


def interpreter(peer: str) -> tuple[Path, list[Path]] | None:
    """The Python that can import a peer and the folders it needs on its path, or None if it is not installed."""
    if _stamp(peer).exists() and _stamp(peer).read_text() == "\n".join(REQUIREMENTS[peer]):
        return _python(peer), []
    if peer == "pfl" and (CARRIED / "pfl").exists():
        return Path(sys.executable), [CARRIED]
    return None


def _python(peer: str) -> Path:
    return ENVIRONMENTS / peer / "bin" / "python"


def _stamp(peer: str) -> Path:
    return ENVIRONMENTS / peer / ".installed"  # written last, so that half an installation does not count
