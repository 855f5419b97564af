"""The package as users install it: one version, and a wheel that runs the README's demo."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import lamina

ROOT = Path(__file__).parent.parent


def test_the_citation_has_this_version():
    assert f"\nversion: {lamina.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.long
def test_the_wheel_runs_the_demo_without_the_clone(tmp_path):
    """In a new environment: an undeclared dependency or a file that the wheel lacks ends in an error."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command):
        finished = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    run(sys.executable, "-m", "build", "--outdir", "dist", str(ROOT))
    assert len(list((tmp_path / "dist").glob("lamina-*.tar.gz"))) == 1
    (wheel,) = (tmp_path / "dist").glob("lamina-*.whl")
    run(sys.executable, "-m", "venv", "new")
    run("new/bin/pip", "install", "-q", "--no-compile", "-c", str(ROOT / "constraints.txt"), str(wheel))
    printed = run("new/bin/lamina", "demo")
    table = re.search(r"```text\n( +mean ± std.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[1]
    rows = [line.split() for line in printed.splitlines()]
    assert all(line.split() in rows for line in table.splitlines() if "─" not in line)
    assert (tmp_path / "runs" / "demo-compare" / "comparison.png").exists()
    shutil.rmtree(tmp_path / "new")  # more than a gigabyte, and pytest keeps the folders of three sessions
