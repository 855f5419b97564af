"""`lamina tune`: the trials it prints, the choice it names, and the picture of learning rates."""

from helpers import call, sets


def test_every_trial_is_printed_with_the_choice(here, capsys):
    grid = "tune.grid={'train.lr' = [0.02, 1e-6]}"
    assert call("tune", "small.toml", "--out", "t", *sets("train.rounds=1", grid)) == 0
    printed = capsys.readouterr()
    assert [line.split()[0] for line in printed.out.splitlines()[1:3]] == ["0.02", "1e-06"]
    assert "run the best with: lamina run t/best.toml" in printed.out
    assert printed.out.endswith("runs, picture and tables in t/\n")
    assert len(printed.err.splitlines()) == 2  # a line for every run, off a terminal
    assert (here / "t" / "learning-rates.png").read_bytes().startswith(b"\x89PNG")


def test_without_learning_rates_there_is_no_picture(here):
    grid = "tune.grid={'algorithm.decay' = [0.0, 0.01]}"
    assert call("tune", "small.toml", "--out", "t", "--quiet", *sets("train.rounds=1", grid)) == 0
    assert (here / "t" / "best.toml").exists()
    assert not (here / "t" / "learning-rates.png").exists()


def test_options_override_the_file(here, capsys):
    grid = "tune.grid={'train.lr' = [0.02]}"
    assert call("tune", "small.toml", "--seeds", "2", *sets("train.rounds=1", grid)) == 0
    assert len(list((here / "runs" / "small-tune").rglob("metrics.jsonl"))) == 2
    capsys.readouterr()
    assert call("tune", "small.toml", "--grid", "lamb-papr") == 2
    assert "lamb-papr" in capsys.readouterr().err


def test_nothing_is_chosen_if_every_trial_diverges(here, capsys):
    grid = "tune.grid={'train.lr' = [1e37, 1e38]}"
    assert call("tune", "small.toml", "--out", "t", *sets("algorithm={name='fedavg'}", grid)) == 3
    assert "no trial ran to its end: nothing is chosen" in capsys.readouterr().out
    assert not (here / "t" / "best.toml").exists()
