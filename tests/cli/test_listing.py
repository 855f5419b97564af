"""``lamina list``, ``show``, ``--version`` and ``--help``: what they print; the last two import nothing slow."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import lamina
from helpers import call
from lamina import __version__, models
from lamina.experiment.trials.tune import paper_grids

HEAVY = ("torch", "numpy", "pydantic", "matplotlib", "sklearn", "lamina.experiment")


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("algorithms", ["fedlada_lamb", "mimelamb", "Sun et al. 2023"]),
        ("models", ["resnet18", "cifar_cnn"]),
        ("datasets", ["digits", "tinyimagenet"]),
        ("partitions", ["dirichlet", "reallocate"]),
        ("clocks", ["home", "download=14.7, upload=13.6, latency=0.053"]),
        ("papers", ["lamb-mnist-cnn-iid-e1", "lada-table1-cifar10"]),
    ],
)
def test_list(capsys, what, expected):
    assert call("list", what) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in expected)


def test_list_algorithms_shows_the_wire_cost(capsys):
    assert call("list", "algorithms") == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("fedlada "))
    assert line.split()[2:5] == ["3", "2", "0"]


def test_show_lists_options_and_presets(capsys):
    assert call("show", "fedlamb") == 0
    printed = capsys.readouterr().out
    assert "phi_min" in printed
    assert "preset authors" in printed


def test_show_says_what_an_experiment_trains_and_sends(tmp_path, capsys):
    file = tmp_path / "small.toml"
    file.write_text('model = { name = "mlp", hidden = 4 }\nalgorithm = "fedlada"\n')
    assert call("show", str(file)) == 0
    printed = capsys.readouterr().out
    size = 65 * 4 + 5 * 10
    assert f"mlp trains and sends all of its {size} parameters" in printed
    line = next(x for x in printed.splitlines() if x.startswith("fedlada "))
    assert line.split()[1:6:2] == [f"{size * 4 * models / 1e3:.1f}" for models in (3, 2, 0)]
    assert line.split()[-1] == "stacked"
    assert "engine stacked on cpu: the fastest for this model" in printed
    for engine in ("loop", "stacked"):
        file.write_text(f'model = {{ name = "mlp", hidden = 4 }}\n[run]\nengine = "{engine}"\n')
        assert call("show", str(file)) == 0
        assert f"engine {engine} on cpu: engine='{engine}' was asked for" in capsys.readouterr().out


def test_show_counts_both_exchanges_of_the_original_mime(tmp_path, capsys):
    file = tmp_path / "original.toml"
    model = 'model = { name = "resnet9", width = 4, norm = "batch" }\n'
    file.write_text(model + 'algorithm = { name = "mime", preset = "mime" }\n')
    assert call("show", str(file)) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("mime "))
    net = models.create("resnet9", (1, 8, 8), 10, width=4, norm="batch")
    size = 4 * sum(parameter.numel() for parameter in net.parameters())
    channels = sum(norm.num_features for norm in net.modules() if isinstance(norm, nn.BatchNorm2d))
    statistics = 4 * 2 * channels  # a mean and a variance for each
    expected = [4 * size + 2 * statistics, 3 * size + statistics, 0]
    assert line.split()[1:6:2] == [f"{size / 1e3:.1f}" for size in expected]


def test_show_describes_a_class_of_the_users_own(capsys):
    assert call("show", "lamina:FedLamb") == 0
    of_class = capsys.readouterr().out
    assert call("show", "fedlamb") == 0
    assert capsys.readouterr().out == of_class


def test_the_help_names_every_grid(capsys):
    assert call("tune", "--help") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in paper_grids())


def test_quick_commands_import_nothing_heavy():
    """They answer at once: importing torch alone takes seconds."""
    code = (
        "import sys, lamina.cli\n"
        "for words in sys.argv[1:]:\n"
        "    try:\n"
        "        lamina.cli.main(words.split())\n"
        "    except SystemExit as ended:\n"
        "        assert not ended.code, words\n"
        f"    assert not set({HEAVY!r}) & set(sys.modules), words\n"
    )
    helps = ("--help", "run --help", "compare --help", "tune --help", "report --help", "flower --help")
    commands = ("--version", *helps)
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(__version__)


def test_public_names_are_imported_on_first_use():
    assert dir(lamina) == sorted(lamina.__all__)
    assert all(getattr(lamina, name) is not None for name in lamina.__all__)
    with pytest.raises(AttributeError, match="module 'lamina' has no attribute 'Simulatoin'"):
        lamina.Simulatoin  # noqa: B018


def test_the_list_of_algorithms_has_whole_names_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setattr("lamina.cli.WIDTH_FOR_PROGRAMS", 40)
    assert call("list", "algorithms") == 0
    firsts = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert {"fedlada_lamb", "fedadam_star", "mimelamb"} <= set(firsts)


def test_show_a_run(empty_folder, capsys):
    data = torch.randn(20, 3), torch.tensor([0, 1] * 10)
    simulation = lamina.Simulation(
        torch.nn.Linear(3, 2), data, "fedavg", test=data, clients=2, device="cpu", lr=1.0, out="runs/x"
    )
    simulation.run(3)
    capsys.readouterr()
    values = simulation.history.column("accuracy")
    for path in ("runs/x", "runs/x/"):
        assert call("show", path) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "fedavg on data, 2 clients" in printed
        assert "3 of 3 rounds, complete" in printed
        assert f"accuracy: last {values[-1]:.4f}, best {max(values):.4f}" in printed
        assert "lamina predict runs/x new.csv" in printed
    lamina.Simulation(
        torch.nn.Linear(3, 2), data, "fedavg", test=data, clients=2, device="cpu", lr=1e-9, out="runs/y", patience=2
    ).run(9)
    assert call("show", "runs/y") == 0
    assert "3 of 9 rounds, complete: stopped early, as train.patience says" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["predict", "runs/x/config.json", "new.csv"], "'runs/x/config.json' is a file: give a run's folder, 'runs/x'"),
        (["predict", "e.toml", "new.csv"], "'e.toml' is a file: give a run's folder"),
        (["predict", "runs", "new.csv"], "no config.json, but one with such a folder: runs/x"),
        (["predict", "runs/y", "new.csv"], "'runs/y' is not a run's folder: it has no config.json"),
        (["predict", "runs/x", "runs/x"], "'runs/x' is a run's folder, not data"),
        (["predict", "runs/x", "e.toml"], "'e.toml' is a .toml file, not data"),
        (["show", "runs"], "'runs' is not a run's folder"),
        (["show", "runs/x/config.json"], "'runs/x/config.json' is a file: give a run's folder, 'runs/x'"),
        (["run", "runs/x"], "'runs/x' is a run's folder: `lamina run runs/x/config.json` runs it again"),
        (["run", "runs"], "'runs' is a folder; give an experiment file"),
        (["compare", "runs/x"], "'runs/x' is a run's folder"),
    ],
)  # fmt: skip
def test_a_folder_for_a_file_or_the_reverse(empty_folder, capsys, words, line):
    data = torch.randn(20, 3), torch.tensor([0, 1] * 10)
    lamina.Simulation(torch.nn.Linear(3, 2), data, "fedavg", clients=2, device="cpu", out="runs/x").run(1)
    (empty_folder / "e.toml").write_text("")
    capsys.readouterr()
    assert call(*words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert line in said
    assert "not valid JSON" not in said
