"""The response to the learning rate: which rates were tried, and which is the best."""

from lamina.experiment.runs.records import find_records
from lamina.report import build
from lamina.report.rates import rates_table, responses
from run_folders import write_run


def test_the_response_to_the_learning_rate(tmp_path):
    for lr, best in ((0.01, 0.5), (0.1, 0.9), (1.0, 0.7)):
        write_run(tmp_path / "tuning" / "fedavg" / f"lr{lr}", [0.1, best], lr=lr, data={"validation": 0.2})
        write_run(tmp_path / "tuning" / "fedcm" / f"lr{lr}", [0.1, lr / 2], lr=lr, algorithm="fedcm")
    write_run(
        tmp_path / "tuning" / "fedavg" / "lr10", [0.99], lr=10.0, rounds=2, diverged="x", data={"validation": 0.2}
    )
    write_run(tmp_path / "fedavg" / "seed0", [0.1, 0.8])
    report = build.build([tmp_path])
    assert [curve.name for curve in report.curves] == ["FedAvg (Fed-SGD)"]  # tuning runs are no curves
    averaged, other = sorted(report.responses, key=lambda response: not response.label.startswith("FedAvg"))[:2]
    assert (averaged.chosen, averaged.on, averaged.warning) == (0.1, "validation", "")  # what diverged is never best
    assert [trial.remark for _, trial in averaged.tried] == ["", "", "", "diverged"]
    assert other.chosen == 1.0
    assert "the best learning rate 1 lies on the edge of those tried; try larger ones" in " ".join(report.notes)


def test_a_rate_stands_for_the_best_of_the_other_settings(tmp_path):
    """Decay 0.01 is better at the low rate and diverges at the high one."""
    grid = {"grid": {"fedlamb": {"lr": [0.1, 1.0], "decay": [0.0, 0.01]}, "fedavg": {"lr": [0.1, 1.0]}}}
    best = {(0.1, 0.0): 0.5, (0.1, 0.01): 0.8, (1.0, 0.0): 0.6, (1.0, 0.01): 0.99}
    for (lr, decay), value in best.items():
        write_run(
            tmp_path / "tuning" / "fedlamb" / f"lr{lr}-decay{decay}", [0.1, value], lr=lr, algorithm="fedlamb",
            options={"decay": decay}, compare=grid, diverged="x" if value == 0.99 else None,
        )  # fmt: skip
        if not decay:
            write_run(tmp_path / "tuning" / "fedavg" / f"lr{lr}", [0.3, 0.4], lr=lr, compare=grid)
    by_label = {response.label: response for response in build.build([tmp_path]).responses}
    assert set(by_label) == {"Fed-LAMB", "FedAvg (Fed-SGD)"}
    tried = [(lr, trial.best, trial.remark, trial.name) for lr, trial in by_label["Fed-LAMB"].tried]
    assert tried == [(0.1, [0.8], "", "decay 0.01"), (1.0, [0.6], "", "decay 0")]
    table = rates_table(list(by_label.values()))
    assert table.head == ["curve", "lr", "with", "final accuracy, %", "on", ""]
    assert [row[2] for row in table.rows if row[0] == "FedAvg (Fed-SGD)"] == ["–", "–"]


def two_comparisons(folder):
    """The first tunes on validation data and takes 0.03 of five; the second takes another rate as it is."""
    for lr in (0.003, 0.01, 0.03, 0.1):
        write_run(folder / "a" / "tuning" / "fedams" / f"lr{lr}", [0.1, 0.9 - abs(lr - 0.03)], lr=lr,
                  algorithm="fedams", data={"validation": 0.2})  # fmt: skip
    write_run(folder / "a" / "fedams" / "seed0", [0.1, 0.9], lr=0.03, algorithm="fedams")
    write_run(folder / "b" / "fedams" / "seed0", [0.1, 0.8], lr=0.3, algorithm="fedams")


def test_validation_and_test_accuracies_are_labelled(tmp_path):
    two_comparisons(tmp_path)
    report = build.build([tmp_path])
    assert [(response.label, response.on) for response in report.responses] == [
        ("Fed-AMS, validation", "validation"), ("Fed-AMS, test", "test")
    ]  # fmt: skip
    only = build.build([tmp_path / "a"])
    assert [response.label for response in only.responses] == ["Fed-AMS"]


def test_without_several_rates_there_is_no_response(two):
    assert responses(find_records([two])) == []
