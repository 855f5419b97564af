"""The package as users install it: one version, and a wheel that runs the README's demo."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lamina

ROOT = Path(__file__).parent.parent


def test_the_citation_has_this_version():
    assert f"\nversion: {lamina.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.long
def test_the_wheel_runs_the_demo_without_the_clone(tmp_path):
    """In a new environment: an undeclared dependency or a file that the wheel lacks ends in an error.

    The environment has links to what the wheel declares, and to nothing else; pip refuses versions out of range.
    """
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command):
        finished = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    run(sys.executable, "-m", "build", "--outdir", "dist", str(ROOT))
    assert len(list((tmp_path / "dist").glob("lamina-*.tar.gz"))) == 1
    (wheel,) = (tmp_path / "dist").glob("lamina-*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", "new")
    (site_packages,) = (tmp_path / "new" / "lib").glob("python*/site-packages")
    (declared,) = metadata.distributions(path=[str(wheel)])
    for name in sorted(required(declared)):
        link(metadata.distribution(name), site_packages)
    run(sys.executable, "-m", "pip", "--python", "new/bin/python", "install", "-q", "--no-index", str(wheel))
    printed = run("new/bin/lamina", "demo")
    table = re.search(r"```text\n( +mean ± std.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)[1]
    rows = [line.split() for line in printed.splitlines()]
    assert all(line.split() in rows for line in table.splitlines() if "─" not in line)
    assert (tmp_path / "runs" / "demo-compare" / "comparison.png").exists()


def required(distribution):
    """Return the names of what a distribution requires without its extras, and of what that requires in turn."""
    found, left = set(), [(distribution, "")]
    while left:
        requiring, extra = left.pop()
        for requirement in map(Requirement, requiring.requires or ()):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            asked = {(requirement.name, one) for one in ("", *requirement.extras)}
            left += [(metadata.distribution(name), one) for name, one in sorted(asked - found)]
            found |= asked
    return {name for name, _ in found}


def link(distribution, site_packages):
    """Make an installed distribution part of another environment, too; pip checks its version there."""
    for name in sorted({file.parts[0] for file in distribution.files} - {"..", "__pycache__"}):
        if not (site_packages / name).exists():  # several distributions may share a folder
            (site_packages / name).symlink_to(distribution.locate_file(name))
