"""`lamina time`: the table, and errors in one line."""

import pytest

from helpers import call


@pytest.fixture
def runs(here, capsys):
    for algorithm in ("fedavg", "fedlada"):
        changes = ["--set", f"algorithm={algorithm}", "--set", "data.partition=iid"]  # 179 or 180 samples a client
        assert call("run", "small.toml", *changes, "--out", f"runs/{algorithm}", "-q") == 0
    capsys.readouterr()
    return here


def cells(text):
    """The cells of the table's rows, whose columns are at least two blanks apart."""
    return [[cell for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]


def test_the_table(runs, capsys):
    assert call("time", "runs", "--clock", "4g", "--clock", "home", "--step-seconds", "0.5", "--target", "0.01") == 0
    head, *rows = cells(capsys.readouterr().out)
    assert [cell.strip() for cell in head] == [
        "curve", "clock", "rounds", "s per round", "s in all", "rounds to 1%", "s to 1%", "s to first touch"
    ]  # fmt: skip
    assert [row[1].strip() for row in rows] == ["4g", "4g", "home", "home"]
    # FedAvg: 64 * 16 + 16 + 16 * 10 + 10 numbers of 4 bytes each way, over 14.7 and 13.6 Mbit/s, and six batches
    bits = 32 * (64 * 16 + 16 + 16 * 10 + 10)
    seconds = bits / 14.7e6 + bits / 13.6e6 + 0.053 + 6 * 0.5
    expected = [3, seconds, 3 * seconds, 1, seconds, seconds]  # the first round is good enough
    assert [float(cell) for cell in rows[0][2:]] == pytest.approx(expected, rel=1e-2)


def test_transfers_alone_are_said_to_be_so(runs, capsys):
    assert call("time", "runs", "--clock", "4g") == 0
    assert "4g counts transfers alone: give --step-seconds" in capsys.readouterr().out


def test_a_clock_of_the_file_and_the_runs_own(runs, capsys):
    (runs / "slow.toml").write_text('[clock]\nname = "home"\nstep_seconds = 2\n')
    (runs / "timed.toml").write_text('extends = "small.toml"\n[clock]\nname = "home"\nstep_seconds = 2\n')
    assert call("run", "timed.toml", "--out", "timed", "-q") == 0
    assert call("run", "small.toml", "--out", "plain", "-q") == 0
    assert call("time", "timed") == 0
    own = cells(capsys.readouterr().out)[1]
    assert call("time", "plain", "--clock", "slow.toml") == 0
    assert cells(capsys.readouterr().out)[1][2:] == own[2:]


def test_a_private_run_has_the_time_that_its_rows_leave_out(runs, capsys):
    clock = '[train]\nlocal_steps = 2\nsampling = "bernoulli"\n[clock]\nname = "home"\nstep_seconds = 2\n'
    (runs / "open.toml").write_text(f'extends = "small.toml"\n{clock}')
    private = '[privacy]\nbound = 0.5\nnoise_multiplier = 2.0\ndelta = 1e-3\nsecret = "secret"\n'
    (runs / "private.toml").write_text(f'extends = "small.toml"\n{clock}{private}')
    times = []
    for name in ("open", "private"):
        assert call("run", f"{name}.toml", "--out", name, "-q") == 0
        assert call("time", name) == 0
        text = capsys.readouterr().out
        times.append(cells(text)[1][1:5])
        assert ("the time of other cohorts" in " ".join(text.split())) == (name == "private")
        assert call("report", name, "--clock", "4g") == 0
        assert ("note: private runs with secret cohorts" in capsys.readouterr().out) == (name == "private")
    assert times[0] == times[1]
    assert "clock_seconds" not in (runs / "private" / "metrics.jsonl").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/fedavg", "--clock", "5g"], "unknown clock '5g'"),
        (["runs/fedavg", "--clock", "small.toml"], "'small.toml' has no [clock]"),
        (["runs/fedavg", "--clock", "nowhere.toml"], "cannot read the experiment file 'nowhere.toml'"),
        (["runs/fedavg"], "the run has no clock: give one, --clock 4g"),
        (["runs/fedavg", "--step-seconds", "1"], "--step-seconds changes a clock: give one"),
        (["runs/fedavg", "--clock", "4g", "--step-seconds", "-1"], "clock.step_seconds = -1.0 is not a number >= 0"),
        (["nowhere", "--clock", "4g"], "no folder 'nowhere'"),
        (["empty", "--clock", "4g"], "no finished round in empty"),
    ],
)
def test_user_errors_are_one_line(runs, capsys, arguments, message):
    (runs / "empty").mkdir()
    (runs / "empty" / "metrics.jsonl").touch()
    (runs / "empty" / "config.json").write_bytes((runs / "runs" / "fedavg" / "config.json").read_bytes())
    assert call("time", *arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
