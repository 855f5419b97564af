"""Python does what the command line does: run folders, comparisons, tuning, tables, figures and progress."""

import dataclasses
import io
import json
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from rich.console import Console
from torch import nn

import lamina
from helpers import call
from lamina.experiment.runs.records import read_record
from lamina.objective.fingerprint import value_digest
from lamina.objective.losses import CrossEntropy
from lamina.training import progress
from lamina.training.metrics import METRICS
from lamina.training.progress import IntervalLines, NotebookBars

X = torch.randn(120, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
DATA = (X, Y)


def net():
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))


def fixed_net():
    torch.manual_seed(0)
    return net()


def simulate(model=None, data=DATA, algorithm="fedavg", **more):
    return lamina.Simulation(model or fixed_net(), data, algorithm, test=DATA, device="cpu", **{"clients": 4} | more)


def compare(model=net, algorithms=None, **more):
    algorithms = algorithms or ["fedavg", lamina.FedLamb(decay=0.01)]
    settings = {"test": DATA, "clients": 4, "rounds": 2, "seeds": 2, "lr": {"fedavg": [0.01, 0.5], "fedlamb": 0.05}}
    return lamina.compare(model, more.pop("data", DATA), algorithms, device="cpu", **settings | more)


def numbers(history):
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in history]


# --- a simulation with a folder ---------------------------------------------------------------------------------------


def test_a_simulation_with_a_folder_resumes_and_ends_as_one_run(tmp_path):
    whole = simulate()
    whole.run(5)
    first = simulate(out=tmp_path / "r")
    first.run(2)
    first.run(1)
    rows = []
    again = simulate(out=tmp_path / "r")
    assert numbers(again.history) == numbers(first.history)  # before `run`
    assert torch.equal(again.state.server.x, first.state.server.x)
    history = again.run(5, on_round=rows.append)
    assert [row["round"] for row in rows] == [4, 5]
    assert numbers(history) == numbers(whole.history) == numbers(read_record(tmp_path / "r").history)
    assert torch.equal(again.state.server.x, whole.state.server.x)
    for name in ("config.json", "environment.json", "log.txt", "model.safetensors", "best.safetensors"):
        assert (tmp_path / "r" / name).exists()
    done = simulate(out=tmp_path / "r")
    done.run(3)  # the folder is further
    assert done.state.round == 5
    done.run(3)  # 6 in all
    assert done.state.round == 6


def test_a_round_that_the_folder_lacks_is_trained_again(tmp_path):
    simulation = simulate(out=tmp_path / "r")
    simulation.run_round()
    assert [row["round"] for row in simulation.run(2)] == [1, 2]
    assert numbers(simulation.history) == numbers(simulate().run(2))


def test_the_folder_is_the_one_of_lamina_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.toml").write_text(
        """
        [data]
        clients = 4
        [model]
        name = "mlp"
        [algorithm]
        name = "fedavg"
        [train]
        rounds = 1
        participation = 1.0
        [run]
        device = "cpu"
        """
    )
    assert call("run", "a.toml", "--out", "r", "-q") == 0
    stored = json.loads((tmp_path / "r" / "config.json").read_text())
    simulation = lamina.Simulation("mlp", "digits", "fedavg", clients=4, device="cpu", out="r")
    assert len(simulation.run(2)) == 2  # resumed after the command's round
    now = json.loads((tmp_path / "r" / "config.json").read_text())
    assert now["train"].pop("rounds") == 2
    assert stored["train"].pop("rounds") == 1
    assert now == stored
    assert call("run", "a.toml", "--out", "r", "-q", "--set", "train.rounds=2") == 0  # complete


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data": (X + 1, Y)}, "holds another run: the contents of the data (data.content) changed; choose"),
        (
            {"model": nn.Sequential(nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 2))},
            "settings or initial weights (model.values) changed",
        ),
        ({"lr": 0.2}, "train.lr = 0.1 (now 0.2)"),
        ({"algorithm": lamina.FedAvg(decay=0.1)}, "algorithm.decay"),
        (
            {"loss": lambda outputs, targets: (outputs[:, 0] - targets) ** 2},
            "the weights or other values of the loss (loss_values) changed",
        ),
        ({"clients": [range(60), range(60, 120)]}, "data.partition"),
        ({"partition": lamina.data.Classes(k=1)}, "data.partition"),
    ],
)
def test_a_folder_of_another_simulation_is_refused(tmp_path, changes, named):
    simulate(out=tmp_path / "r").run(1)
    other = simulate(out=tmp_path / "r", **changes)
    with pytest.raises(lamina.BadInput, match="holds another run") as error:
        other.run(2)
    assert named in str(error.value)
    other = simulate(out=tmp_path / "r", overwrite=True, **changes)
    assert len(other.run(1)) == 1


def with_factor(factor):
    scope = {"cross_entropy": nn.functional.cross_entropy}
    exec(f"def loss(o, t): return cross_entropy(o, t, reduction='none') * {factor}", scope)
    return scope["loss"]


def scaled_net(slope):
    return nn.Sequential(nn.Linear(5, 4), nn.LeakyReLU(slope), nn.Linear(4, 2))


def hit_rate(factor):
    return lamina.Metric("hit_rate", lambda outputs, targets: factor * (outputs.argmax(1) == targets).double().mean())


@pytest.mark.parametrize(
    ("setting", "one", "other", "key"),
    [
        ("loss", with_factor(1), with_factor(2), "loss_values"),
        ("loss", CrossEntropy(weight=[1.0, 1.0]), CrossEntropy(weight=[1.0, 2.0]), "loss_values"),
        ("model", lambda: scaled_net(0.1), lambda: scaled_net(0.2), "model_values"),
        ("metrics", hit_rate(1), hit_rate(0.5), "metrics_values"),
    ],
    ids=["loss", "weights", "model", "metric"],
)
def test_changed_code_behind_a_name_is_another_run(tmp_path, monkeypatch, setting, one, other, key):
    module = SimpleNamespace(thing=one)
    monkeypatch.setitem(sys.modules, "own_thing", module)
    settings = {"out": tmp_path / "r", setting: "own_thing:thing"}
    simulate(**settings).run(1)
    simulate(**settings).run(1)
    module.thing = other
    with pytest.raises(lamina.BadInput, match=key):
        simulate(**settings).run(1)


def test_the_digest_of_code_does_not_depend_on_the_order_of_a_set():
    assert list(frozenset([0, 8])) != list(frozenset([8, 0]))  # as sets of strings are in other processes
    one, other, third = (eval(f"lambda o, t: o in {numbers}", {}) for numbers in ("{0, 8}", "{8, 0}", "{0, 16}"))
    assert value_digest(one) == value_digest(other) != value_digest(third)


def test_changed_code_of_an_algorithm_is_another_run(tmp_path):
    def fast(factor):
        @lamina.algorithm("fast_avg", title="Fast", reference="", lr=0.1)
        class Fast(lamina.FedAvg):
            def step(self, local, down, grad, lr, layers):
                return super().step(local, down, grad, factor * lr, layers)

        return Fast()

    with mock.patch.dict(lamina.algorithms.registry()):
        for _ in range(2):
            simulate(algorithm=fast(1), out=tmp_path / "r").run(1)
        with pytest.raises(lamina.BadInput, match="class of the algorithm"):
            simulate(algorithm=fast(2), out=tmp_path / "r").run(1)


def test_a_change_of_laminas_own_metrics_makes_no_other_run(tmp_path, monkeypatch):
    simulate(out=tmp_path / "r", metrics=["f1", hit_rate(1)]).run(1)
    changed = dataclasses.replace(METRICS["f1"], function=METRICS["f1_micro"].function)
    monkeypatch.setitem(METRICS, "f1", changed)
    assert len(simulate(out=tmp_path / "r", metrics=["f1", hit_rate(1)]).run(1)) == 1


def test_a_changed_loss_of_the_same_name_is_another_run(tmp_path):
    simulate(out=tmp_path / "r", loss=with_factor(1)).run(1)
    simulate(out=tmp_path / "r", loss=with_factor(1)).run(1)
    with pytest.raises(lamina.BadInput, match="loss_values"):
        simulate(out=tmp_path / "r", loss=with_factor(2)).run(1)


def test_a_diverged_folder_raises_again(tmp_path):
    for _ in range(2):
        wild = simulate(out=tmp_path / "r", lr=1e30)
        with pytest.raises(lamina.Diverged):
            wild.run(3)


def test_names_and_factories_give_weights_by_seed():
    data = lamina.data.load("digits")
    first, same, other = (lamina.Simulation("mlp", data, device="cpu", seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.objective.start, same.objective.start)
    assert not torch.equal(first.objective.start, other.objective.start)
    made = [lamina.Simulation(net, DATA, device="cpu", seed=seed).objective.start for seed in (0, 0, 1)]
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert first.test_data is not None


# --- comparisons and tuning -------------------------------------------------------------------------------------------


def test_a_comparison_has_a_table_a_plot_a_frame_and_a_page(tmp_path):
    result = compare(out=tmp_path / "c")
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
        net, DATA, lamina.FedLamb(decay=0.1), clients=4, rounds=2, device="cpu", out=tmp_path / "t",
        grid={"lr": (1e-6, 0.1), "decay": [0, 0.01]},
    )  # fmt: skip
    assert result.best["train.lr"] == 0.1
    assert result.score > 0.5
    assert len(result.table().rows) == 4
    assert [line for line in repr(result).splitlines() if line.startswith("note: best: lr 0.1")]
    assert len(pytest.importorskip("pandas") and result.to_pandas()) == 4
    assert result.plot().axes[0].get_xscale() == "log"
    assert not (tmp_path / "t" / "best.toml").exists()  # no file can name these objects


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
        (lambda: compare(seeds=0), "compare.seeds = 0"),
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


# --- what is shown ----------------------------------------------------------------------------------------------------


def test_a_simulation_and_its_history_show_themselves():
    simulation = simulate()
    assert "rounds: 0" in repr(simulation)
    simulation.run(1)
    assert "FedAvg" in repr(simulation)
    assert simulation._repr_html_().count("<table>") == 2


def test_a_long_history_is_shortened():
    history = lamina.History([{"round": r, "loss": 1 / r} for r in range(1, 101)])
    lines = str(history).splitlines()
    assert len(lines) == 12
    assert [line.split()[0] for line in lines[5:8]] == ["5", "…", "96"]
    assert history._repr_html_().count("<tr>") == 12
    assert len(str(history[:30]).splitlines()) == 31


def test_progress_is_shown_in_a_terminal_only_unless_asked(capsys):
    simulation = simulate()
    simulation.run(1)
    assert capsys.readouterr() == ("", "")
    simulation.run(1, progress=True)
    assert "FedAvg" in capsys.readouterr().err
    simulation.run(1, progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_notebook_gets_html_bars(monkeypatch):
    drawn = []
    handle = SimpleNamespace(update=lambda value: drawn.append(value))
    IPython = pytest.importorskip("IPython.display")
    monkeypatch.setattr(IPython, "display", lambda bars, display_id: handle)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    with progress.python_bars(["a<b"], None, total=4, state="") as bars:
        assert isinstance(bars, NotebookBars)
        bars.update("a<b", {"round": 1, "accuracy": 0.5}, completed=1)
        html = drawn[0]._repr_mimebundle_((), ())["text/html"]
        assert "a&lt;b" in html
        assert "1/4" in html
        assert "accuracy 0.500" in html
    assert len(drawn) == 2  # the bar, and nothing at the end
    assert not progress.python_bars(["a"], False).live


def test_bars_show_names_as_they_are():
    """No word between colons becomes an emoji, and no bracket is read as markup."""
    name, state = "a:heart:[b]", "try [/x] :heart:"
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    with progress.Bars([name], console, is_shown=True) as bars:
        bars.update(name, state=state, total=2, completed=1)
    shown = console.file.getvalue()
    assert name in shown
    assert state in shown


def test_a_log_gets_lines_at_intervals(monkeypatch):
    clock, lines = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    log = IntervalLines("fedavg", 100, 0, lines.append)
    for number in range(1, 101):
        clock[0] += 3
        log.round_finished({"round": number, "accuracy": 0.5, "train_loss": 1.0})
    assert len(lines) == 10
    assert lines[0] == "fedavg: round 10 of 100, accuracy 0.500, train loss 1, 270 s left"


def test_a_population_refuses_folders(tmp_path):
    with pytest.raises(lamina.BadInput, match="a population writes no folders"):
        lamina.Population([simulate(out=tmp_path / "r"), simulate()])


def bias(outputs, targets):
    return (outputs.argmax(1) - targets).float().mean().abs()


def sharper_bias(outputs, targets):
    return (outputs.argmax(1) - targets).float().mean().abs() ** 2


def own_metric(function=bias):
    return lamina.Metric("bias", function, larger_is_better=False)


def test_a_folder_keeps_own_metrics_and_held_out_clients(tmp_path):
    settings = {"metrics": [own_metric(), "accuracy"], "heldout_clients": (0,), "local_test": 0.2, "out": tmp_path}
    simulate(**settings).run(1)
    history = simulate(**settings).run(2)
    assert (history.metric, len(history), read_record(tmp_path).history.metric) == ("bias", 2, "bias")
    for changed in ({"metrics": [own_metric(sharper_bias), "accuracy"]}, {"local_test": 0.3}, {"heldout_clients": [1]}):
        with pytest.raises(lamina.BadInput, match="holds another run"):
            simulate(**settings | changed).run(2)


def test_comparisons_and_tunings_judge_by_the_first_metric():
    table = compare(metrics=[own_metric()], target=0.01, seeds=1).table()
    assert "test bias 0.01" in table.title
    assert "best\nbias" in table.head
    tuned = lamina.tune(net, DATA, "fedavg", rounds=2, clients=4, grid={"lr": [1e-6, 0.5]}, device="cpu", metrics="f1")
    assert "best validation f1, %" in tuned.table().head
    assert tuned.plot().axes[0].get_ylabel() == "best validation f1, %"


def test_data_may_have_the_name_of_a_file_format(tmp_path):
    named = lamina.Dataset(X, Y, name="images")
    simulate(data=named, out=tmp_path).run(1)
    assert read_record(tmp_path).config["data"]["name"] == "own images"
