"""The measurement of the linear speed-up: the fitted slope, the search for the fastest rate, and the page."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lamina import BadInput
from lamina.experiment.build import build, load_data
from lamina.experiment.config import Experiment, load
from lamina.experiment.trials.compare import points_of, with_algorithm

sys.path.insert(0, str(Path(__file__).parents[2] / "reproduction"))  # as a script there has it

import speedup
import speedup_page
from figures import DRAWN_FROM

SMALL = [
    "data.name=digits", "data.clients=10", "model.hidden=8", "train.rounds=16", "compare.seeds=2", "compare.target=0.5",
    "compare.grid.fedavg.lr=[0.0001,0.2,1e30]",
]  # fmt: skip


def test_slope_of_one_factor_is_that_of_linear_regression() -> None:
    from scipy import stats  # which takes a second to import

    rng = np.random.default_rng(0)
    work = np.array([10, 20, 40, 80, 160, 320])
    rounds = 3000 / work**0.8 * np.exp(0.1 * rng.standard_normal(6))
    (slope,) = speedup.slopes(rounds, work)
    expected = stats.linregress(np.log(work), np.log(rounds))
    width = stats.t.ppf(0.975, 4) * expected.stderr
    assert slope == pytest.approx((expected.slope, expected.slope - width, expected.slope + width), rel=1e-10)


def test_interval_contains_the_true_slopes_in_95_per_cent_of_cases() -> None:
    """Of two factors, whose exponents are -0.9 and -0.4."""
    rng = np.random.default_rng(1)
    clients, steps = np.repeat([2, 4, 8, 16], 3), np.tile([5, 10, 20], 4)
    inside = np.zeros(2)
    for _ in range(600):
        rounds = 500 * clients**-0.9 * steps**-0.4 * np.exp(0.2 * rng.standard_normal(12))
        fitted = speedup.slopes(rounds, clients, steps)
        inside += [one.low <= true <= one.high for one, true in zip(fitted, (-0.9, -0.4), strict=True)]
    assert (np.abs(inside / 600 - 0.95) < 0.03).all()


def test_slopes_without_an_answer() -> None:
    (slope,) = speedup.slopes([8, 4], [1, 2])
    assert slope.value == pytest.approx(-1)
    assert slope.low == -np.inf
    with pytest.raises(BadInput, match="tell the factors apart"):
        speedup.slopes([8, 4, 2], [1, 2, 4], [2, 4, 8])


def run(clients: int, lr: float, seed: int, rounds: int, outcome: str = speedup.REACHED, steps: int = 5) -> speedup.Run:
    return speedup.Run("fedavg", clients, steps, lr, seed, rounds, outcome, 0.5, "a device")


def test_only_rates_that_cannot_win_are_stopped() -> None:
    training = [
        speedup.Training(None, 2, lr, seed, rounds, outcome)  # type: ignore[arg-type]
        for lr, seed, rounds, outcome in [
            (0.1, 0, 10, speedup.REACHED), (0.1, 1, 10, speedup.REACHED),  # the fastest so far
            (0.2, 0, 4, speedup.REACHED), (0.2, 1, 23, ""),  # sqrt(4 * 24) < 10
            (0.3, 0, 4, speedup.REACHED), (0.3, 1, 25, ""),  # sqrt(4 * 26) > 10
            (0.4, 0, 2, speedup.DIVERGED), (0.4, 1, 2, ""),
        ]
    ]  # fmt: skip
    other = speedup.Training(None, 4, 0.3, 0, 99)  # type: ignore[arg-type]  # another point
    speedup.stop_slower([*training, other])
    assert [one.outcome for one in training[2:]] == [
        speedup.REACHED, "", speedup.REACHED, speedup.SLOWER, speedup.DIVERGED, speedup.SLOWER
    ]  # fmt: skip
    assert other.outcome == ""


def test_rounds_are_those_of_runs_alone(tmp_path: Path) -> None:
    """Every point's fastest rate and its rounds, against the same runs one by one; a file is continued."""
    experiment = load(speedup.STUDIES / "fashion-mnist.toml", [*SMALL, 'compare.algorithms=["fedavg"]'])
    path = tmp_path / "digits.csv"
    speedup.measure(experiment, path, [5, 10], [8])
    before = path.read_text()
    speedup.measure(experiment, path, [5, 10], [8])
    assert path.read_text() == before
    splits = load_data(experiment)
    for (_, clients, steps), runs in speedup.by_point(speedup.read(path)).items():
        outcomes = {one.lr: one.outcome for one in runs}
        assert outcomes == {0.0001: speedup.SLOWER, 0.2: speedup.REACHED, 1e30: speedup.DIVERGED}
        alone = []
        for seed in range(2):
            variant = with_algorithm(experiment, "fedavg", {"lr": 0.2})
            changed = {"participation": clients / 10, "local_steps": steps, "seed": seed}
            variant = variant.model_copy(update={"train": variant.train.model_copy(update=changed)})
            rows = build(variant, splits).run(12)
            alone.append(next(row["round"] for row in rows if row["accuracy"] >= 0.5))
        assert [one.rounds for one in runs if one.lr == 0.2] == alone
        found = speedup.best(runs)
        assert found is not None
        assert found == pytest.approx((0.2, np.sqrt(alone[0] * alone[1]), False))


def test_page_has_the_slopes_and_figures(tmp_path: Path) -> None:
    """Rounds that fall as clients x steps rise have slope -1; a point that no rate reached is left out and shown."""
    runs = [
        run(clients, lr, seed, round(3200 / (clients * steps)) * factor, steps=steps)
        for clients in (2, 4, 8)
        for steps in (5, 10)
        for lr, factor in ((0.1, 1), (0.2, 3))
        for seed in (0, 1)
    ]
    runs.append(run(16, 0.1, 0, 1000, speedup.TOO_LONG))
    for name in ("fashion-mnist", "cifar10"):
        speedup.write(tmp_path / f"{name}.csv", runs)
    speedup_page.write(tmp_path, tmp_path)
    text = (tmp_path / "speed-up.md").read_text()
    assert "| cifar10 | FedAvg (Fed-SGD) | 6 of 7 | −1.00 (−1.00 to −1.00) | yes | −1.00" in text
    assert "| FedAvg (Fed-SGD) | 4 | 160.0 (0.1†) | 80.0 (0.1†) |" in text
    assert "| FedAvg (Fed-SGD) | 16 | – | – |" in text or "| FedAvg (Fed-SGD) | 16 | - | - |" in text
    assert "Model `mlp` (hidden 50), 100 clients, dirichlet (alpha 0.6), batches of 32" in text
    assert "Model `small_cnn` in bf16, 100 clients, dirichlet (alpha 0.6), batches of 32" in text
    assert "Learning rates: FedAvg (Fed-SGD) 0.1, 0.2." in text
    assert "25 runs, 2 of each setting, 0 diverged; 12 s on a device" in text
    assert {path.name for path in tmp_path.glob("*.png")} == {"speed-up-fed-lamb.png", "speed-up-fedlada.png"}


def test_the_commands_in_the_text_run_the_rates_that_the_grid_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of CIFAR-10, whose measurements have more rates than the experiment file."""
    points: set[tuple[str, int, int, float]] = set()

    def note(experiment: Experiment, _: Path, clients: list[int], steps: list[int]) -> None:
        for name in experiment.compare.algorithms:
            rates = [settings["lr"] for settings in points_of(experiment, name)]
            points.update(itertools.product([name], clients, steps, rates))

    monkeypatch.setattr(speedup, "measure", note)
    for command in re.findall(r"^ *python (reproduction/speedup.py .*)$", speedup_page.HEAD.read_text("utf-8"), re.M):
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        speedup.main()
    study = load(speedup.STUDIES / "cifar10.toml")
    grid = {name: [settings["lr"] for settings in points_of(study, name)] for name in study.compare.algorithms}
    runs = speedup.read(speedup.STUDIES / "cifar10.csv")
    further = {(run.algorithm, run.clients, run.steps, run.lr) for run in runs if run.lr not in grid[run.algorithm]}
    assert points == further


@pytest.mark.long
def test_the_committed_page_is_made_from_the_committed_measurements(tmp_path: Path) -> None:
    speedup_page.write(speedup.STUDIES, tmp_path)
    written = sorted(tmp_path.iterdir())
    assert [path.name for path in written] == ["speed-up-fed-lamb.png", "speed-up-fedlada.png", "speed-up.md"]
    for path in written:
        committed = speedup_page.PAGES / path.name
        if path.suffix == ".md":
            assert committed.read_text(encoding="utf-8") == path.read_text(encoding="utf-8"), "run speedup.py"
        else:  # another matplotlib may draw other pixels
            digests = [Image.open(file).info[DRAWN_FROM] for file in (committed, path)]
            assert digests[0] == digests[1], f"{path.name}: run python reproduction/speedup.py"
