"""Papers' claims: every file that comes with lamina can run, and a claim gets the verdict it deserves."""

import dataclasses
import gzip
import json
import os
import signal
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

import helpers
from lamina.algorithms import find
from lamina.data.readers import idx, sources
from lamina.data.readers.files import PublishedFile
from lamina.experiment.build import build_algorithm
from lamina.experiment.config import load, parse
from lamina.experiment.toml import complete_text
from lamina.experiment.trials import claims, reproduction
from lamina.experiment.trials.compare import with_algorithm
from lamina.training.training import Training

PAPERS = reproduction.papers()
RESULTS = Path(__file__).parents[3] / "reproduction" / "results"


# --- the files ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def own_sources(monkeypatch):
    monkeypatch.setattr(sources, "SOURCES", dict(sources.SOURCES))  # a small version enters one


@pytest.mark.parametrize("name", PAPERS)
def test_every_paper_can_be_run(name):
    text = PAPERS[name].read_text(encoding="utf-8")
    assert text.startswith(("# Karimi, Li & Li", "# Sun et al. 2023", "# Ours, in no paper"))
    assert "rotocol" in complete_text(PAPERS[name])
    plan = reproduction.plan(PAPERS[name], [])  # builds every algorithm with every setting
    assert plan
    for experiment in plan.values():  # every rate is the paper's, none a default
        assert all(experiment.compare.grid[algorithm].lr for algorithm in experiment.compare.algorithms)
        assert not any(len(tried.lr) > 1 for tried in reproduction.small(experiment).compare.grid.values())
    experiment = load(PAPERS[name])
    for claim in experiment.claim:
        ours = set(claims.labels(claim))
        assert claims.variants(experiment).keys() >= claim.variants.keys()
        assert not claim.paper or ours <= claim.paper.keys()  # where a paper has numbers, it has all


def paper_grid(algorithm):
    return find(algorithm).card.grids["lamb-paper"]


OUR_GRIDS = ["lamb-epsilon", "lamb-mnist-mlp-noniid-e3-rate", "lamb-small-rate-code", "lamb-theory-fmnist-cnn-noniid"]
WITH_SMALLER_RATES = ["lamb-drafts-cifar10-resnet9", "lamb-drafts-cifar10-resnet9-noniid"]
SMALLER_RATES = {"fedams": [0.00003], "fedlamb": [0.0003]}  # than the paper's; their files say so
WHOLE_GRIDS = [name for name in PAPERS if name.startswith("lamb") and name not in OUR_GRIDS + WITH_SMALLER_RATES]


@pytest.mark.parametrize("name", WHOLE_GRIDS)
def test_the_lamb_papers_grids_are_whole(name):
    """Rates, lambda and Adp-Fed's server rate: what `lamina tune --grid lamb-paper` tries."""
    for algorithm, tried in load(PAPERS[name]).compare.grid.items():
        assert tried.values() == paper_grid(algorithm)


@pytest.mark.parametrize("name", OUR_GRIDS + WITH_SMALLER_RATES)
def test_where_a_grid_is_ours_it_is_a_part_of_the_papers(name):
    for algorithm, tried in load(PAPERS[name]).compare.grid.items():
        for option, values in tried.values().items():
            ours = SMALLER_RATES.get(algorithm, []) if option == "lr" and name in WITH_SMALLER_RATES else []
            assert set(ours) <= set(values)
            assert set(values) - set(ours) < set(paper_grid(algorithm)[option])


def without(experiment, *keys):
    """An experiment's settings but for some, and but for what compares and claims."""
    tree = experiment.model_dump(exclude={"compare": True, "claim": True})
    for key in keys:
        section, _, name = key.partition(".")
        del tree[section][name]
    return tree


def test_the_small_rate_stands_beside_what_was_chosen():
    made = reproduction.plan(PAPERS["lamb-small-rate-code"], [])
    for variant, other in (("", "lamb-mnist-cnn-iid-e1-code"), ("fashion", "lamb-fmnist-cnn-noniid-e1-code")):
        own, whole = made[variant], load(PAPERS[other])
        assert without(own, "train.rounds") == without(whole, "train.rounds")
        assert own.compare.grid["fedams"].values() == {"lr": [min(whole.compare.grid["fedams"].lr)]}
        facts = json.loads((RESULTS / other / "facts.json").read_text())
        chosen = facts["variants"]["as-given"]["methods"]["fedlamb"]["settings"]
        assert {"lr": own.compare.grid["fedlamb"].lr[0], "decay": own.compare.options["fedlamb"]["decay"]} == chosen
        for name, options in own.compare.options.items():
            assert options["preset"] == whole.compare.options[name]["preset"]


def test_the_rate_that_was_dropped_is_the_best_of_one_epoch():
    own, whole = load(PAPERS["lamb-mnist-mlp-noniid-e3-rate"]), load(PAPERS["lamb-mnist-mlp-noniid-e3"])
    assert without(own, "run.precision") == without(whole, "run.precision")
    settings = {"lr": own.compare.grid["fedlamb"].lr[0], "decay": own.compare.options["fedlamb"]["decay"]}
    for epochs, name, expected in ((1, "fedlamb", settings), (3, "fedams", {"lr": own.compare.grid["fedams"].lr[0]})):
        facts = json.loads((RESULTS / f"lamb-mnist-mlp-noniid-e{epochs}" / "facts.json").read_text())
        assert facts["variants"]["as-given"]["methods"][name]["settings"] == expected


@pytest.mark.parametrize(
    "name", [name for name in PAPERS if name.startswith("lada") and load(PAPERS[name]).model.name == "resnet18"]
)
def test_fedladas_network_is_he_et_als_with_group_norm(name):
    assert load(PAPERS[name]).model.options() == {"norm": "group", "stem": "imagenet"}


def simulator_settings(experiment):
    """The settings in which the simulator of FedLADA's first author differs from the paper's text (B17)."""
    data, train = experiment.data, experiment.train
    augmentation = (data.augment_flip, data.augment_crop_probability, data.augment_fill)
    return augmentation, data.partition.options().get("refill", False), (train.sampling, train.clip)


FROM_LADA = [name for name in PAPERS if load(PAPERS[name]).model.name == "resnet18" and name.startswith("lada")]


@pytest.mark.parametrize("name", [name for name in FROM_LADA if "-text" not in name])
def test_fedladas_experiments_follow_the_simulator(name):
    experiment = load(PAPERS[name])
    refills = experiment.data.partition.name == "dirichlet"
    assert simulator_settings(experiment) == ((True, 0.5, "mean"), refills, ("bernoulli", 10))
    for method in {"fedcm", "scaffold", "fedadam_star"} & set(experiment.compare.algorithms):
        chosen = build_algorithm(with_algorithm(experiment, method))
        assert (chosen.clip_direction, chosen.decay) == (10, 1e-3)
        assert method == "scaffold" or chosen.decay_form == "decoupled"  # the decay is added after the clip


@pytest.mark.parametrize(
    ("name", "without_text", "clipped"),
    [
        ("lada-cifar10-short-text", "lada-cifar10-short", None),
        ("lada-fig5-cifar10-amended-fedadam-text", "lada-fig5-cifar10-amended-fedadam", None),
        ("lada-table7-cifar10-text-clip", "lada-table7-cifar10", 10),
    ],
)
def test_the_text_versions_differ_in_the_simulators_choices_only(name, without_text, clipped):
    own, whole = load(PAPERS[name]), load(PAPERS[without_text])
    changed = ["train.rounds", "train.clip", "train.sampling", "data.partition"]
    changed += [f"data.augment_{option}" for option in ("flip", "crop_probability", "fill")]
    assert without(own, *changed) == without(whole, *changed)
    assert simulator_settings(own) == ((clipped is not None, 1, "black"), False, ("exact", clipped))
    assert own.data.partition.options()["alpha"] == whole.data.partition.options()["alpha"] == 0.6


@pytest.mark.parametrize("name", [name for name in PAPERS if "-text" in name])
def test_a_committed_record_is_of_the_text_version(name):
    """The runs before the simulator's protocol keep the name of the protocol that they were run with."""
    used = json.loads((RESULTS / name / "as-given" / "config.json").read_text())
    expected = load(PAPERS[name])
    given = used["data"]["augment_flip"], used["train"]["clip"], used["train"]["sampling"]
    assert given == (expected.data.augment_flip, expected.train.clip, expected.train.sampling)
    assert {"augment_fill", "augment_crop_probability"}.isdisjoint(used["data"])
    assert "refill" not in used["data"]["partition"]


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("dealt", ["iid", "noniid"])
@pytest.mark.parametrize("cell", ["mnist-mlp", "mnist-cnn", "fmnist-cnn"])
def test_the_lamb_papers_two_figures_are_whole(cell, dealt, epochs):
    """Every panel of Figures 2 and 3 by the same protocol."""
    experiment = load(PAPERS[f"lamb-{cell}-{dealt}-e{epochs}"])
    data, train, spec = experiment.data, experiment.train, experiment.compare
    names = {"mnist": "mnist", "fmnist": "fashion-mnist"}
    assert (names[cell.partition("-")[0]], cell.partition("-")[2]) == (data.name, experiment.model.name)
    assert data.partition.options() == ({"base": "iid"} if dealt == "iid" else {"base": "classes", "k": 2})
    assert (data.clients, train.participation, train.batch_size, train.epochs) == (50, 0.5, 128, epochs)
    stages = {1: [10, 30, 100], 3: [4, 10, 30, 100]}[epochs]  # three epochs show sooner what a rate is worth
    assert (train.rounds, spec.tuning_rounds, spec.seeds, spec.select) == (100, stages, 3, "test")
    assert spec.algorithms == ["fedavg", "fedadam", "fedams", "fedlamb", "mime", "mimelamb"]
    assert "Fed-LAMB and Mime-LAMB above Fed-AMS and Mime" in " ".join(claim.text for claim in experiment.claim)


# --- the command -------------------------------------------------------------------------------------------------

TOML = """
[data]
name = "digits"
clients = 8

[model]
name = "mlp"
hidden = 8

[train]
rounds = 3

[compare]
algorithms = ["fedavg", "fedlamb"]
seeds = 1

[compare.grid]
fedavg.lr = [0.1]
fedlamb.lr = [0.03]

[[claim]]
text = "FedAvg learns at all [in brackets]"
kind = "gap"
expect = ["fedavg", "fedlamb@still"]
at_most = 1.0
within = 1
[claim.paper]
fedavg = 99.5
"fedlamb@still" = inf
[claim.variants]
still = ["train.rounds=1"]
"""


def call(*arguments):
    return helpers.call("reproduce", *arguments)


@pytest.fixture
def here(empty_folder, monkeypatch):
    helpers.skip_pictures(monkeypatch)
    return empty_folder


def test_reproduce_runs_the_variants_and_gives_a_verdict(here, capsys):
    (here / "mine.toml").write_text(TOML)
    assert call("mine.toml") == 0
    message = capsys.readouterr().out
    assert "FedAvg learns at all [in brackets]" in message
    assert "verdict: reproduced (1 of 1 pair, one seed)" in message
    assert "99.5" in message
    assert "not reached" in message
    assert "small version" not in message
    kept = json.loads((here / "runs" / "mine" / "claims.json").read_text())
    assert kept["claims"][0]["verdict"] == "reproduced"
    (pair,) = kept["claims"][0]["pairs"]
    assert (pair["better"], pair["worse"], pair["interval"], pair["seeds"]) == ("fedavg", "fedlamb@still", None, 1)
    assert (pair["outcome"], pair["remark"]) == ("right", "one seed")
    assert kept["claims"][0]["paper"]["fedlamb@still"] == "inf"
    assert len((here / "runs/mine/as-given/fedavg/seed0/metrics.jsonl").read_text().splitlines()) == 3
    assert len((here / "runs/mine/still/fedlamb/seed0/metrics.jsonl").read_text().splitlines()) == 1
    assert not (here / "runs/mine/still/fedavg").exists()  # no claim is about it
    assert "note:" not in message
    assert call("mine.toml", "--quiet") == 0  # nothing is left to do
    assert capsys.readouterr().out == ""


def test_a_verdict_with_other_settings_says_so(here, capsys):
    (here / "mine.toml").write_text(TOML)
    assert call("mine.toml", "--set", "train.rounds=1", "--set", "train.lr=0.2") == 0
    assert "note: not as in the file: train.rounds=1, train.lr=0.2" in capsys.readouterr().out


def write_mnist(folder, samples):
    """Four files in MNIST's format, of images whose brightest row tells their class, and what describes them."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    parts = []
    for stem, n in zip(("train", "t10k"), samples, strict=True):
        labels = draw.integers(0, 10, n, dtype=np.uint8)
        images = draw.integers(0, 60, (n, 28, 28), dtype=np.uint8)
        images[np.arange(n), 2 * labels + 4] += 180
        files = []
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{stem}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
            files.append(PublishedFile(f"{stem}-{kind}-ubyte.gz", array.shape))
        parts.append(tuple(files))
    return parts


@pytest.mark.long
def test_a_small_version_of_a_paper_runs_and_gives_no_verdict(here, monkeypatch, capsys):
    name = "lamb-mnist-cnn-noniid-e1"
    train, test = write_mnist(here / "data" / "mnist", (600, 60))
    release = dataclasses.replace(idx.MNIST.releases[0], train=train, test=test)
    files = dataclasses.replace(idx.MNIST, releases=(release,))
    whole = sources.SOURCES["mnist"]
    sources.SOURCES["mnist"] = type(whole)(whole.description, files.read, whole.files)
    monkeypatch.setenv("LAMINA_DATA", str(here / "data"))
    for size, value in (("ROUNDS", 2), ("TRAIN", 500), ("TEST", 50)):
        monkeypatch.setattr(reproduction, f"SMALL_{size}", value)
    assert call(name, "--scale", "small", "--set", "model.name=mlp") == 0
    message = capsys.readouterr().out
    assert "Adp-Fed is below all other methods" in message
    assert "no verdict about the paper" in message
    assert "verdict:" not in message
    folder = here / "runs" / f"{name}-small"
    assert "verdict" not in (folder / "claims.json").read_text()
    config = json.loads((folder / "as-given" / "config.json").read_text())
    assert config["data"]["name"] == "mnist-small"
    assert config["train"]["rounds"] == 2
    assert not (folder / "as-given" / "tuning").exists()
    assert {name: made["lr"] for name, made in config["algorithms"].items()}["fedams"] == 0.005  # one of the grid
    splits = sources.load("mnist-small")
    assert (len(splits.train), len(splits.test)) == (500, 50)


def test_tuning_rounds_that_a_variant_does_not_reach_are_refused_before_anything_runs(here, capsys):
    tuned = TOML.replace("seeds = 1", "seeds = 1\ntuning_rounds = 2").replace("[0.1]", "[0.1, 0.2]")
    (here / "mine.toml").write_text(tuned)
    assert call("mine.toml") == 2
    message = capsys.readouterr().err
    assert "compare.tuning_rounds = [2]: must be a number, or a list" in message
    assert message.count("\n") == 1
    assert not (here / "runs").exists()
    (here / "mine.toml").write_text(tuned.replace('["train.rounds=1"]', '["train.rounds=2"]'))
    assert call("mine.toml") == 0
    assert "held out, in the first 2 rounds" in capsys.readouterr().out
    folder = here / "runs" / "mine" / "as-given"
    assert len((folder / "tuning/fedavg/lr0.2/metrics.jsonl").read_text().splitlines()) == 2
    assert len((folder / "fedavg/seed0/metrics.jsonl").read_text().splitlines()) == 3


def test_the_small_version_speaks_of_a_round_it_reaches():
    claim = load(PAPERS["lamb-fmnist-cnn-noniid-e1"]).claim[0]
    assert (claim.at, reproduction.in_reach(claim, 20).at, reproduction.in_reach(claim, 50).at) == (50, "final", 50)


def test_without_data_the_small_version_says_which_files_it_wants(here, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if not installed
    monkeypatch.delenv("LAMINA_DATA", raising=False)
    assert call("lamb-mnist-cnn-iid-e1", "--scale", "small") == 2
    message = capsys.readouterr().err
    assert "no files of mnist in" in message
    assert "train-images-idx3-ubyte.gz" in message
    assert "from https://" in message
    assert message.count("\n") == 1


def test_a_papers_file_is_copied_to_be_edited(here, capsys):
    assert call("lamb-mnist-cnn-iid-e1", "--write", "mine.toml") == 0
    assert load("mine.toml") == load(PAPERS["lamb-mnist-cnn-iid-e1"])
    assert Path("mine.toml").read_text().startswith("# Karimi, Li & Li, section 5.1")
    assert "lamina reproduce mine.toml" in capsys.readouterr().out
    Path("mine.toml").write_text("mine")
    assert call("lamb-mnist-cnn-iid-e1", "--write", "mine.toml") == 2
    assert "cannot write 'mine.toml': File exists" in capsys.readouterr().err
    assert Path("mine.toml").read_text() == "mine"


def test_list_and_wrong_names(here, capsys):
    assert helpers.call("list", "papers") == 0
    message = capsys.readouterr().out
    assert all(name in message for name in PAPERS)
    assert call("lada-table7-cifar1") == 2
    assert "did you mean 'lada-table7-cifar10'" in capsys.readouterr().err
    assert call() == 2
    assert "missing argument 'NAME'; see lamina reproduce --help" in capsys.readouterr().err
    assert call("nothing.toml") == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_stop_in_the_last_round_of_a_variant_is_not_forgotten(here, capsys, monkeypatch):
    (here / "mine.toml").write_text(TOML)
    record = Training.record

    def asked(self, *arguments, **options):
        if self.state.round == 3 and self.algorithm.card.name == "fedlamb":  # the last of the file as it is given
            os.kill(os.getpid(), signal.SIGINT)
        return record(self, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Training, "record", asked)
        assert call("mine.toml") == 130
    assert "stopped after a round" in capsys.readouterr().err
    folders = sorted(path.name for path in (here / "runs" / "mine").iterdir())
    assert folders == ["as-given"]
    assert call("mine.toml") == 0
    assert len(list((here / "runs" / "mine").iterdir())) > 2


@pytest.mark.parametrize("field", ["at", "within"])
def test_runs_that_are_too_short_for_a_claim_are_told_before_they_begin(field):
    experiment = parse({"claim": [{"text": "so", "kind": "order", "expect": ["fedavg", "fedlamb@Z=3"], field: 50}]})
    short = experiment.model_copy(update={"train": experiment.train.model_copy(update={"rounds": 49})})
    assert reproduction.too_short(experiment.claim[0], {"": experiment, "Z=3": experiment}) == ""
    note = reproduction.too_short(experiment.claim[0], {"": experiment, "Z=3": short})
    assert note == "no verdict on 'so': it is about round 50, and the runs have 49"


def test_in_the_small_version_a_claim_is_about_the_rounds_there_are():
    def small(rounds=10, **claim):
        judged = parse({"claim": [{"text": "so", "kind": "order", "expect": ["a", "b"], **claim}]}).claim[0]
        judged = reproduction.in_reach(judged, rounds)
        return judged.at, judged.within

    assert small(at=50) == ("final", None)
    assert small(at=5, within=8) == (5, 8)
    assert small(at="last", within=100) == ("last", None)
