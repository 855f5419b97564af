"""Comparisons and tunings from Python: tables, figures, pages, resuming, and one line for mistakes."""

import pytest
import torch
from torch import nn

import lamina
from lamina.experiment.runs.records import read_record
from lamina.experiment.trials.compare import Comparison
from two_classes import DATA, X, Y, fixed_net, net, numbers, own_metric, simulate


def compare(model=net, algorithms=None, **more):
    algorithms = algorithms or ["fedavg", lamina.FedLamb(decay=0.01)]
    settings = {"test": DATA, "clients": 4, "rounds": 2, "seeds": 2, "lr": {"fedavg": [0.01, 0.5], "fedlamb": 0.05}}
    return lamina.compare(model, more.pop("data", DATA), algorithms, device="cpu", **settings | more)


def test_a_comparison_has_a_table_a_plot_a_frame_and_a_page(tmp_path):
    result = compare(out=tmp_path / "c", seed=1)
    assert [row[0] for row in result.table().rows] == ["fedavg", "fedlamb"]
    assert (result.table().head[3], result.table().head[-1]) == ("kB to\ntarget", "kB\nin all")
    # 34 parameters of 4 bytes, to and from 4 clients in 2 rounds
    assert result.table().rows[0][-1] == "2.2"
    assert result.settings["fedavg"]["lr"] == 0.5
    assert str(result.table()).splitlines()[0] == "mean ± std of 2 seeds; target: test accuracy 90%"
    assert "<table>" in result._repr_html_()
    assert "chosen on 20% of the training data" in repr(result)
    assert read_record(tmp_path / "c/fedlamb/seed1").config["algorithm"]["decay"] == 0.01
    frame = pytest.importorskip("pandas") and result.to_pandas()
    assert len(frame) == 2 * 2 * 2
    assert set(frame["algorithm"]) == {"fedavg", "fedlamb"}
    assert len(result.plot(tmp_path / "curves.png").axes) == 2
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(lamina.BadInput, match="cannot save the picture"):
        result.plot("curves.doc")
    pytest.importorskip("plotly")
    page = result.report(tmp_path / "page.html").read_text()
    assert "Fed-LAMB" in page
    assert '"partitions":[{"title":' in page  # how the data were split, which were passed as objects


def test_a_baseline_adds_differences_to_the_table_and_leads_the_page(tmp_path):
    result = compare(
        fixed_net(), {"plain": "fedavg", "small α": lamina.FedLada(alpha=0.05)}, lr=0.1, out=tmp_path / "c"
    )
    assert not [heading for heading in result.table().head if "difference" in heading]
    table = result.table(baseline="small α")
    column = table.head.index("difference\nto small α")
    plain, small = (
        [read_record(tmp_path / "c" / name / f"seed{seed}").final() for seed in (0, 1)] for name in ("plain", "small_α")
    )
    lead = 50 * (plain[0] - small[0] + plain[1] - small[1])
    assert float(table.rows[0][column].split()[0]) == pytest.approx(lead, abs=0.051)
    assert table.rows[1][column] == "–"
    with pytest.raises(lamina.BadInput, match=r"algorithm in this comparison.*did you mean 'plain'"):
        result.table(baseline="plane")
    pytest.importorskip("plotly")
    page = result.report(tmp_path / "page.html", baseline="small α").read_text()
    assert "<th>difference to FedLADA" in page
    assert '"baseline":1' in page
    assert "<th>difference to FedAvg" in result.report(tmp_path / "page.html").read_text()


def test_tuning_runs_have_a_seed_that_is_not_reported(tmp_path):
    compare(algorithms=["fedavg"], lr=[0.01, 0.5], out=tmp_path / "c", seed=5)
    assert {read_record(path).seed for path in (tmp_path / "c/tuning/fedavg").iterdir()} == {4}
    assert {read_record(path).seed for path in (tmp_path / "c/fedavg").glob("seed*")} == {5, 6}
    lamina.tune(net, DATA, "fedavg", rounds=1, clients=4, seeds=2, grid={"lr": [0.1]}, device="cpu", out=tmp_path / "t")
    assert {read_record(path).seed for path in (tmp_path / "t").glob("*/seed*")} == {-1, -2}


def test_folders_that_were_tuned_on_a_reported_seed_are_refused_in_one_line(tmp_path, monkeypatch):
    """Earlier versions tuned on the first seed; with one rate, the final runs resume."""
    with monkeypatch.context() as patch:
        patch.setattr("lamina.experiment.trials.compare.tuning_seed", lambda experiment: 0)
        patch.setattr("lamina.experiment.trials.tune.tuning_seed", lambda experiment, number: number)
        patch.setattr("lamina.experiment.trials.compare.tuned_on_a_reported_seed", None)
        patch.setattr(Comparison, "_rounds_in_folder", lambda self, folder, stage: stage[0])
        given = {"algorithms": ["fedavg"], "seeds": 1, "lr": [0.01, 0.5], "out": tmp_path / "c"}
        first = compare(**given)
        tuned = {"rounds": 1, "clients": 4, "grid": {"lr": [0.1]}, "device": "cpu", "out": tmp_path / "t"}
        lamina.tune(net, DATA, "fedavg", **tuned)
    line = "an earlier version of lamina tuned in '.*' on seed 0, which is reported: choose another with --out"
    with pytest.raises(lamina.BadInput, match=line) as error:
        compare(**given)
    assert "\n" not in str(error.value)
    with pytest.raises(lamina.BadInput, match=line):
        lamina.tune(net, DATA, "fedavg", **tuned)
    rate = first.settings["fedavg"]["lr"]
    again = compare(**given | {"lr": rate})
    assert numbers(again.histories["fedavg"][0]) == numbers(first.histories["fedavg"][0])
    assert compare(**given, overwrite=True).notes


@pytest.mark.long
def test_a_comparison_resumes_and_refuses_other_objects(tmp_path):
    first = compare(out=tmp_path / "c", seeds=1)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").glob("*/seed*/metrics.jsonl")}
    again = compare(out=tmp_path / "c")
    assert all(path.stat().st_mtime_ns == time_ for path, time_ in before.items())
    assert len(again.histories["fedavg"]) == 2
    assert numbers(again.histories["fedavg"][0]) == numbers(first.histories["fedavg"][0])
    masked = lamina.Dataset(X, Y, mask=torch.ones(120, 5, dtype=torch.bool))
    for other in ((X * 2, Y), masked):
        with pytest.raises(lamina.BadInput, match=r"another run: .* \(data\.content\) changed"):
            compare(data=other, out=tmp_path / "c")
    with pytest.raises(lamina.BadInput, match=r"another run: model\."):
        compare(model=lambda: nn.Linear(5, 2), out=tmp_path / "c")


def test_a_comparison_equals_single_simulations():
    """The same rounds as `Simulation` gives, with a module, with lists of clients and with objects for settings."""
    clients = [list(range(0, 50)), list(range(50, 110))]  # ten samples belong to nobody
    more = {"clients": clients, "schedule": lamina.schedules.Exponential(0.5), "batch_size": None}
    result = compare(model=fixed_net(), algorithms=["fedavg"], lr=0.3, seeds=1, **more)
    single = simulate(lr=0.3, **more)
    for row, other in zip(numbers(result.histories["fedavg"][0]), numbers(single.run(2)), strict=True):
        assert row == pytest.approx(other)


def test_default_rates_are_said_to_be_untuned():
    assert compare(algorithms=["fedavg", "fedlada"], lr=None, seeds=1, rounds=1).notes == [
        "default rates are used for fedavg, fedlada: a fair comparison tries several "
        "(lr=[...] in Python, [compare.grid] in a file)"
    ]


def test_lists_of_clients_can_be_tuned():
    result = compare(algorithms=["fedavg"], lr=[0.01, 0.5], seeds=1, clients=[range(60), range(60, 120)])
    assert len(result.histories["fedavg"]) == 1


def test_tuning_finds_the_best_of_a_grid(tmp_path):
    result = lamina.tune(
        net, DATA, lamina.FedLamb(decay=0.1), clients=4, rounds=2, device="cpu", out=tmp_path / "t", seed=1,
        grid={"lr": (1e-6, 0.1), "decay": [0, 0.01]},
    )  # fmt: skip
    assert result.best["train.lr"] == 0.1
    assert result.score > 0.5
    assert len(result.table().rows) == 4
    assert [line for line in repr(result).splitlines() if line.startswith("note: best: lr 0.1")]
    assert len(pytest.importorskip("pandas") and result.to_pandas()) == 4
    assert result.plot().axes[0].get_xscale() == "log"
    assert not (tmp_path / "t" / "best.toml").exists()  # no file can name these objects


@pytest.mark.long
def test_two_settings_of_one_algorithm_are_compared(tmp_path):
    given = {"small: α/2": lamina.FedLada(alpha=0.05), "plain": "fedavg", "large": lamina.FedLada(alpha=0.5)}
    rates = {"small: α/2": 0.1, "plain": 0.5, "large": [0.001, 0.1]}
    result = compare(fixed_net(), given, lr=rates, seeds=1, out=tmp_path / "c")
    assert [row[0] for row in result.table().rows] == list(given)
    for name, algorithm in given.items():
        alone = simulate(algorithm=algorithm, lr=result.settings[name]["lr"]).run(2)
        assert numbers(result.histories[name][0]) == numbers(alone)
    assert result.report(tmp_path / "page.html").exists()
    again = compare(fixed_net(), given, lr=rates, seeds=1, out=tmp_path / "c")
    assert again.table().rows == result.table().rows


def test_options_of_a_factory_can_be_tuned():
    def sized(hidden=2):
        return nn.Sequential(nn.Linear(5, hidden), nn.Linear(hidden, 2))

    result = lamina.tune(sized, DATA, "fedavg", clients=4, rounds=1, device="cpu", grid={"model.hidden": [1, 8]})
    assert result.best["model.hidden"] in (1, 8)
    assert result.plot().axes


def test_a_list_in_the_space_of_a_tuning_is_a_choice():
    pytest.importorskip("optuna")
    settings = {"clients": 4, "rounds": 1, "trials": 3, "device": "cpu"}
    result = lamina.tune(net, DATA, "fedavg", space={"lr": [0.1, 0.2], "epochs": range(1, 3)}, **settings)
    tried = result.to_pandas()
    assert len(tried) == 3
    assert set(tried["train.lr"]) <= {0.1, 0.2}
    assert set(tried["train.epochs"]) <= {1, 2}


def test_comparisons_and_tunings_judge_by_the_first_metric():
    table = compare(metrics=[own_metric()], target=0.01, seeds=1).table()
    assert "test bias 0.01" in table.title
    assert "final\nbias" in table.head
    tuned = lamina.tune(net, DATA, "fedavg", rounds=2, clients=4, grid={"lr": [1e-6, 0.5]}, device="cpu", metrics="f1")
    assert "final validation f1, %" in tuned.table().head
    assert tuned.plot().axes[0].get_ylabel() == "final validation f1, %"


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: compare(test=None), r"give test=\(x, y\)"),
        (lambda: compare(algorithms=["fedavg", lamina.FedAvg()], lr=None), "is given twice: name the two"),
        (lambda: compare(algorithms={"tuning": "fedavg"}, lr=None), "'tuning' cannot name a folder"),
        (
            lambda: compare(algorithms={"a b": "fedavg", "a_b": "fedlamb"}, lr=None),
            "'a b' and 'a_b' would share the folder 'a_b'",
        ),
        (lambda: compare(algorithms=["fedavgg"], lr=None), "did you mean 'fedavg'"),
        (lambda: compare(data=(DATA, (X[:9], Y[:9])), test=None), r"a pair of pairs: pass .* as test=\(x, y\)"),
        (lambda: compare(lr={"fedlada": 0.1}), "no algorithm 'fedlada' in this comparison"),
        (lambda: compare(batchsize=3), "no setting 'batchsize'; did you mean 'batch_size'"),
        (lambda: compare(learning_rate=0.1), "no setting 'learning_rate'; did you mean 'lr'"),
        (lambda: compare(optimizer="adam"), "no setting 'optimizer'; did you mean 'algorithms'"),
        (lambda: compare(num_rounds=3), "no setting 'num_rounds'; did you mean 'rounds'"),
        (lambda: compare(callbacks=[]), r"no setting 'callbacks': train a lamina.Simulation, .*\(on_round=…\)"),
        (lambda: compare(resume=True), r"no setting 'resume'; help\(lamina.compare\) lists them"),
        (lambda: lamina.tune(net, DATA, optimizer="adam"), "no setting 'optimizer'; did you mean 'algorithm'"),
        (lambda: compare(seeds=0), "compare.seeds = 0"),
        (lambda: compare(mu=0.1), "no setting 'mu': 'mu' is an option of DiLoCo, FedAvgM, FedNova, FedProx"),
        (lambda: compare(augmentation=3), "augmentation is 3, which changes no samples"),
        (lambda: compare(schedule=lamina.schedules.Cosine), "schedule is the class Cosine"),
        (lambda: compare(loss=torch.nn.NLLLoss), "loss is the class NLLLoss: give loss='nll'"),
        (lambda: compare(algorithms=[lamina.FedAvg]), "algorithm is the class FedAvg"),
        (lambda: compare(grid=[0.1]), "grid is .0.1.: give the values to try by their names"),
        (lambda: compare(grid={"fedavg": [0.1]}), "the grid of 'fedavg' is .0.1.: give the values"),
        (lambda: lamina.tune(net, DATA, grid=[0.1]), "grid is .0.1.: give the values to try by their names"),
        (lambda: lamina.tune(net, DATA, "fedavg", grid={"mu": [1]}), "to tune: 'mu' is an option of DiLoCo, "),
        (lambda: compare(model=3), "model is 3"),
        (lambda: lamina.tune(net, DATA), "give grid= or space="),
        (lambda: lamina.tune(net, DATA, grid={"lrr": [1]}), "no setting 'lrr' to tune; did you mean 'lr'"),
        (
            lambda: lamina.tune(net, DATA, grid={"learning_rate": [1]}),
            "'learning_rate' to tune; did you mean 'lr'",
        ),
    ],
)
def test_mistakes_are_refused_in_one_line(mistake, message):
    with pytest.raises(lamina.BadInput, match=message) as error:
        mistake()
    assert "\n" not in str(error.value)
