"""The commits that a run records."""

import subprocess
from pathlib import Path

import lamina
from lamina.experiment.runs.environment import environment, git_commit, own_commit


def commit_in(folder):
    """Make a repository with one commit, and return its hash."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "--no-gpg-sign", "-m", "a"], check=True)
    return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_of_a_folder_in_a_repository(tmp_path, monkeypatch):
    inner = tmp_path / "repository" / "inner"
    inner.mkdir(parents=True)
    expected = commit_in(inner.parent)
    assert git_commit(inner) == expected
    assert git_commit(Path("/")) is None
    monkeypatch.setenv("PATH", "")  # no git
    assert git_commit(inner.parent) is None


def test_the_commit_of_lamina_itself_is_kept(tmp_path, monkeypatch):
    """A run is mostly started outside lamina's repository; the working directory's commit says nothing of lamina's."""
    package = tmp_path / "checkout" / "src" / "lamina"
    package.mkdir(parents=True)
    commit = commit_in(tmp_path / "checkout")
    monkeypatch.setattr(lamina, "__file__", str(package / "__init__.py"))
    monkeypatch.chdir("/")
    found = environment("cpu")
    assert (found["commit"], found["lamina_commit"]) == (None, commit)
    installed = tmp_path / "checkout" / ".venv" / "lib" / "site-packages" / "lamina"
    monkeypatch.setattr(lamina, "__file__", str(installed / "__init__.py"))
    assert own_commit() != commit  # that of the project it is installed for
