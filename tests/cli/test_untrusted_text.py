"""Names, paths and files that nobody vouches for: none commands a terminal, a spreadsheet, or hangs a command."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from importlib import resources

import pytest

from control_characters import CONTROL, NASTY
from helpers import call
from lamina import BadInput
from lamina.base.text import csv_cell, plural, printable
from lamina.experiment.config import load
from lamina.report.tables import Table as ReportTable
from lamina.report.tables import to_csv
from lamina.storage.files import write_csv

SMALL = '[data]\nclients = 5\n[model]\nname = "mlp"\nhidden = 4\n[train]\nrounds = 1\n'


@pytest.fixture
def here(empty_folder):
    (empty_folder / "small.toml").write_text(SMALL)
    return empty_folder


def one_line(capsys):
    """Return the printed error, which must be one line."""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


# --- the terminal


def test_control_characters_of_names_do_not_reach_the_terminal(here, capsys):
    for arguments in (
        ("show", NASTY),
        ("list", NASTY),
        ("run", f"{NASTY}.toml"),
        ("run", "small.toml", "--set", f"algorithm.name={NASTY}"),
        ("run", "small.toml", "--set", f"data.name={NASTY}"),
        ("run", "small.toml", "--set", f"train.{NASTY}=1"),
        ("watch", "--once", NASTY),
        ("report", NASTY),
        (NASTY,),
    ):
        assert call(*arguments) == 2
        assert not CONTROL.search(one_line(capsys))


def test_control_characters_in_warnings_and_the_log_are_written_out(here, capsys):
    (here / "mine.py").write_text(
        "import logging\nimport torch\n\n"
        f"def make():\n    logging.getLogger('lamina.x').warning({NASTY!r} + '\\nforged')\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
    )
    assert call("run", "small.toml", "--out", "run", "--set", "model.name=mine:make") == 0
    printed = capsys.readouterr().err
    log = (here / "run" / "log.txt").read_text()
    for text in (printed, log):
        assert "\\x1b[2J" in text
        assert "\\nforged" in text
        assert not CONTROL.search(text)


def test_every_error_is_one_printable_line():
    assert str(BadInput(f"no '{NASTY}'\nforged")) == printable(f"no '{NASTY}'\nforged")
    assert "\n" not in str(BadInput("a\nb"))


# --- spreadsheets

FORMULAS = ["=1+1", "+cmd", "-cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "\r=1"]


@pytest.mark.parametrize("text", FORMULAS)
def test_a_text_cell_is_no_formula(text, tmp_path):
    assert csv_cell(text)[0] not in "=+-@\t\r"
    write_csv(tmp_path / "a.csv", ["name", text], [{"name": text, text: -0.5}])
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert all(cell[0] not in "=+@\t\r" for row in rows for cell in row)
    assert rows[1] == [csv_cell(text), "-0.5"]
    rows = list(csv.reader(io.StringIO(to_csv(ReportTable("t", ["a"], [[text], ["-1e-05"]])))))
    assert rows == [["a"], [csv_cell(text)], ["-1e-05"]]


def test_numbers_stay_numbers():
    assert [csv_cell(value) for value in (-1, -0.5, "-0.5", "-inf", "+3", "", "fedavg")] == [
        -1, -0.5, "-0.5", "-inf", "+3", "", "fedavg"
    ]  # fmt: skip


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's script")
def test_the_page_exports_the_same_cells():
    script = (resources.files("lamina.report") / "page.js").read_text(encoding="utf-8")
    interval = next(line for line in script.splitlines() if line.startswith("const INTERVAL"))
    source = script[script.index("function csvOf") : script.index("function latexOf")]
    rows = [[cell, "+1.2 [-0.1, +2.5]"] for cell in ("=1+1", "-0.5", "-1e-05", "@x", "a,b", "-", "∞", "–")]
    program = (
        f"const headOf = () => ['a', 'b']; const rowsOf = () => {json.dumps(rows)};\n"
        f"{interval}\n{source}\nprocess.stdout.write(csvOf(null));"
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    assert done.stdout == to_csv(ReportTable("t", ["a", "b"], rows))


# --- files and paths


def test_an_experiment_file_may_begin_with_a_byte_order_mark(here):
    (here / "bom.toml").write_bytes(b"\xef\xbb\xbf" + SMALL.encode())
    assert load(here / "bom.toml") == load(here / "small.toml")


@pytest.mark.parametrize("path", ["a" * 5000, "a/" * 3000, "a" * 256], ids=["long", "deep", "long name"])
def test_an_overlong_path_is_one_line(here, capsys, path):
    for arguments in (
        ("run", path),
        ("run", "small.toml", "--out", path),
        ("run", "small.toml", "--set", f"run.out={path}"),
        ("run", "small.toml", "--set", "data.name=mnist", "--set", f"data.dir={path}"),
        ("compare", "small.toml", "--out", path),
        ("watch", path),
        ("watch", "--once", path),
        ("report", path),
        ("export", path),
        ("reproduce", path),
        ("flower", "new", path),
    ):
        assert call(*arguments) == 2, arguments
        one_line(capsys)


def test_a_nul_in_a_name_is_one_line(here, capsys):
    for key in ("data.name", "model.name", "algorithm.name"):
        assert call("run", "small.toml", "--set", f'{key}="a\\u0000b"') == 2
        assert "\\x00" in one_line(capsys)


# --- the rest of the command line


def test_a_model_must_be_a_class_or_a_function(here, capsys):
    (here / "made.py").write_text("import torch\nnet = torch.nn.Linear(64, 10)\n")
    assert call("run", "small.toml", "--set", "model.name=made:net") == 2
    assert "is an instance of Linear: name a class" in one_line(capsys)


def test_ctrl_c_while_torch_is_imported_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text(  # one that takes long to import
        "import sys, time\nsys.stderr.write('ready\\n')\nsys.stderr.flush()\ntime.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "lamina", "run", "small.toml"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stderr.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err == "interrupted; finished rounds are kept; run the same command again to resume\n"


def test_ctrl_c_outside_any_command_is_one_line(monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("lamina.cli.command_line", interrupted)
    assert call("--version") == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(("count", "text"), [(0, "0 rounds"), (1, "1 round"), (2, "2 rounds")])
def test_plurals(count, text):
    assert plural(count, "round") == text


def test_control_characters_are_written_out_in_csv():
    assert csv_cell("a\x1b[2Jb") == "a\\x1b[2Jb"
