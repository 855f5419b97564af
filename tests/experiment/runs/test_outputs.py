"""Files that commands write for the user: nothing foreign is replaced, and a kill leaves no half file."""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from helpers import Killed, call, said_in_one_line
from lamina import BadInput
from lamina.data.drawing import partition_picture
from lamina.report import build, figures, save

TOML = """
[data]
clients = 6
partition = { name = "classes", k = 2 }

[model]
name = "mlp"
hidden = 4

[train]
rounds = 2
batch_size = 128
lr = 0.05
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a finished run."""
    place = tmp_path_factory.mktemp("finished")
    with contextlib.chdir(place):
        Path("small.toml").write_text(TOML)
        assert call("run", "small.toml", "--out", "r", "--quiet") == 0
    return place


@pytest.fixture
def here(empty_folder, finished):
    shutil.copytree(finished, empty_folder, dirs_exist_ok=True)
    return empty_folder


# --- what may be replaced ----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("command", ["export", "report"])
@pytest.mark.parametrize(
    "name", ["r/metrics.jsonl", "r/config.json", "r/model.safetensors", "r/checkpoints/x", "r/new.csv", "thesis.txt"]
)
def test_run_files_and_foreign_files_are_refused(here, capsys, command, name):
    Path("thesis.txt").write_text("years of work")
    target = here / name
    before = target.read_bytes() if target.exists() else None
    for path in (target, here / "link"):
        if path != target:
            path.symlink_to(target)
        assert call(command, "r", "--out", str(path)) == 2
        assert "choose another" in said_in_one_line(capsys)
        assert (target.read_bytes() if target.exists() else None) == before
    assert (here / "link").is_symlink()
    assert call("run", "small.toml", "--out", "r", "--quiet") == 0  # nothing strange lies in the folder


def test_an_earlier_export_and_an_empty_file_are_replaced(here):
    assert call("export", "r", "--out", "a.csv") == 0
    table = Path("a.csv").read_bytes()
    Path("a.csv").write_bytes(table + b"\n" * 9)
    Path("empty.csv").touch(mode=0o600)
    for name in ("a.csv", "empty.csv"):
        assert call("export", "r", "--out", name) == 0
        assert Path(name).read_bytes() == table
    assert stat.S_IMODE(Path("empty.csv").stat().st_mode) == 0o600  # a private file stays private


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_is_kept_and_its_target_written(here, exists):
    (here / "elsewhere").mkdir()
    target, link = here / "elsewhere" / "table.csv", here / "link.csv"
    if exists:
        target.touch()
    link.symlink_to("elsewhere/table.csv")
    assert call("export", "r", "--out", "link.csv") == 0
    assert link.is_symlink()
    assert not target.is_symlink()
    assert target.read_text().startswith("run,data,model")
    assert [path.name for path in target.parent.iterdir()] == ["table.csv"]


@pytest.mark.parametrize("command", ["export", "report"])
def test_pipes_and_devices_are_refused(here, capsys, command):
    os.mkfifo("pipe")
    Path("null").symlink_to("/dev/null")
    for name in ("pipe", "null"):
        assert call(command, "r", "--out", name) == 2
        assert f"cannot write '{name}': it is not a file" in said_in_one_line(capsys)
    assert Path("/dev/null").is_char_device()


def test_a_foreign_file_that_looks_half_written_is_not_written_through(here):
    """A link beside the target, named like the temporary file, leads nowhere."""
    Path("mine.txt").write_text("mine")
    Path("a.csv.partial").symlink_to("mine.txt")
    assert call("export", "r", "--out", "a.csv") == 0
    assert Path("mine.txt").read_text() == "mine"


# --- kills and full disks ----------------------------------------------------------------------------------------


@pytest.fixture
def killed_while_writing(monkeypatch):
    """Kill every write before it is finished: half of the data is in the file."""

    def die(handle):
        os.ftruncate(handle, os.fstat(handle).st_size // 2)
        raise Killed

    monkeypatch.setattr(os, "fsync", die)


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if not path.name.endswith(".partial")}


def test_a_report_is_replaced_at_once(here, killed_while_writing, monkeypatch):
    arguments = ("report", "r", "--out", "out/report.html", "--quiet")
    with pytest.raises(Killed):
        call(*arguments)
    assert contents("out") == {}
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert call(*arguments) == 0
    assert Path("out/report.html").read_text().endswith("</html>\n")


@pytest.mark.long
@pytest.mark.parametrize("ending", ["svg", "pdf", "png"])
def test_figures_are_replaced_at_once(here, monkeypatch, killed_while_writing, ending):
    monkeypatch.setattr(figures, "FORMATS", (ending,))
    monkeypatch.setattr(figures, "curve_figure", lambda *_: Figure((0.5, 0.5)))  # quickly drawn
    report = build.build(["r"])
    monkeypatch.setattr(build.Report, "tables", lambda report: [])
    with pytest.raises(Killed):
        save.save_files(report, Path())
    assert not list(here.glob(f"*.{ending}"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        (first, *_) = save.save_files(report, Path())
        save.save_files(report, Path())  # ours: replaced
        whole = first.read_bytes()
    with pytest.raises(Killed):
        save.save_files(report, Path())
    assert first.read_bytes() == whole
    first.write_bytes(b"a figure of somebody else's")
    with pytest.raises(BadInput, match="is there and is no figure of a report: choose another place with --figures"):
        save.save_files(report, Path())


def test_tables_are_replaced_at_once(here, monkeypatch):
    monkeypatch.setattr(figures, "report_figures", lambda report: [])
    report = build.build(["r"])
    save.save_files(report, Path("out"))
    before, replace = contents("out"), Path.replace

    def die(path, target):
        if Path(target).suffix == ".csv":
            raise Killed
        return replace(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        with pytest.raises(Killed):
            save.save_files(report, Path("out"))
    assert contents("out") == before
    save.save_files(report, Path("out"))
    Path("out", "results.csv").write_text("years of work")
    with pytest.raises(BadInput, match="is there and is no table of a report"):
        save.save_files(report, Path("out"))
    with pytest.raises(BadInput, match="is inside the run folder"):
        save.save_files(report, Path("r"))


def test_a_picture_from_python_is_replaced_at_once(tmp_path, killed_while_writing):
    picture = tmp_path / "p.png"
    picture.write_bytes(b"the old one")
    with pytest.raises(Killed):
        partition_picture([[0, 1], [2]], None, picture)
    assert picture.read_bytes() == b"the old one"


def test_a_picture_of_no_known_format_is_one_line(tmp_path):
    with pytest.raises(BadInput, match="cannot save the picture"):
        partition_picture([[0, 1], [2]], None, tmp_path / "p.nonsense")


@pytest.mark.long
@pytest.mark.parametrize("left", [b"", b"\0" * 4096])
def test_a_comparison_replaces_the_empty_report_of_an_older_lamina(here, left):
    arguments = ("compare", "small.toml", "--out", "c", "--algorithms", "fedavg", "--seeds", "1", "--quiet")
    assert call(*arguments) == 0
    page = Path("c/report.html").read_bytes()
    Path("c/report.html").write_bytes(left)
    assert call(*arguments) == 0
    assert Path("c/report.html").read_bytes() == page


def test_a_copy_of_a_papers_experiment_is_whole_or_not_there(here, killed_while_writing):
    with pytest.raises(Killed):
        call("reproduce", "lamb-mnist-cnn-iid-e1", "--write", "mine.toml")
    assert not Path("mine.toml").exists()


# --- the two streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "r"],
        ["list", "algorithms"],
        ["--help"],
        ["--version"],
        ["run", "small.toml", "--out", "r"],
        ["watch", "r", "--once"],
        ["doctor"],
    ],
)
def test_a_full_disk_behind_the_output_is_one_line(here, capsys, monkeypatch, arguments):
    with open("/dev/full", "w") as full:  # noqa: PTH123 (as the shell opens it)
        monkeypatch.setattr("sys.stdout", full)
        assert call(*arguments) == 2
    assert said_in_one_line(capsys) == "error: cannot write to the standard output: No space left on device\n"


@pytest.mark.long
def test_a_table_that_a_full_disk_swallows_is_no_success(here):
    """In a process of its own: click wraps that standard output in another way than a file opened by a test."""
    command = [sys.executable, "-m", "lamina", "export", "r"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_an_output_in_the_current_folder_needs_a_name(here, capsys):
    for out in ("", ".", "/"):
        assert call("export", "r", "--out", out) == 2
        assert "it is not a file" in said_in_one_line(capsys)


def test_much_output_to_a_full_disk_is_one_line(here, capsys, monkeypatch):
    metrics = Path("r/metrics.jsonl")
    first = json.loads(metrics.read_text().splitlines()[0])
    metrics.write_text("".join(json.dumps({**first, "round": i}) + "\n" for i in range(1, 500)))
    with open("/dev/full", "w") as full:  # noqa: PTH123 (as the shell opens it)
        monkeypatch.setattr("sys.stdout", full)
        assert call("export", "r") == 2
    assert "cannot write to the standard output" in said_in_one_line(capsys)


def test_a_closed_pipe_ends_the_output_in_silence(here, capsys, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        monkeypatch.setattr("lamina.cli.base.out.quiet", False)  # rich silences its console for good: undo that
        assert call("list", "algorithms") == 1
    assert capsys.readouterr().err == ""


def test_warnings_that_cannot_be_printed_do_not_end_a_run(here, monkeypatch):
    Path("r/environment.json").unlink()
    with open("/dev/full", "w") as full:  # noqa: PTH123 (as the shell opens it)
        monkeypatch.setattr("sys.stderr", full)
        assert call("run", "small.toml", "--out", "r", "--quiet", "--set", "train.rounds=3") == 0
        assert call("run", "small.toml", "--out", "r", "--quiet", "--set", "train.rounds=1") == 2
    assert len(Path("r/metrics.jsonl").read_text().splitlines()) == 3
