"""The time of a finished run from its folder: what a run with the clock has recorded itself."""

import json

import pytest

import lamina
from lamina.base.errors import BadInput
from lamina.experiment.runs.network_time import notes_on_time, with_clock
from lamina.experiment.runs.records import read_record
from small_linear import simulate

CLOCK = {
    "step_seconds": {"median": 1.0, "sigma": 1.0}, "download": {"median": 0.01, "sigma": 0.5}, "upload": 0.02,
    "server_link": 0.05, "latency": 0.1,
}  # fmt: skip
SETTINGS = {"clients": 9, "participation": 0.6, "batch_size": 2, "partition": {"name": "dirichlet", "alpha": 0.5}}


def column(record):
    return record.history.column("clock_seconds")


def make(folder, algorithm="fedlamb", rounds=5, **more):
    simulate(algorithm, out=folder, **{**SETTINGS, **more}).run(rounds)
    return folder


def forget(folder, *keys, partition=True):
    """Make a folder one that an earlier version has written: no clock, perhaps no partition.json."""
    config = json.loads((folder / "config.json").read_text())
    for key in keys:
        del config[key]
    (folder / "config.json").write_text(json.dumps(config))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if name != "clock_seconds"} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not partition:
        (folder / "partition.json").unlink()


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("fedlada", {}),
        ("mimelamb", {}),
        (lamina.create("mime", "mime"), {}),
        (lamina.FedLamb(sync_every=3), {}),
        ("scaffold", {"sampling": "bernoulli", "epochs": 2}),
        ("fedavg", {"heldout_clients": 0.3, "local_test": 0.25, "seed": 2**70}),
        ("fedavg", {"local_steps": 7, "partition": {"name": "reallocate"}}),
    ],
    ids=str,
)
def test_a_finished_run_takes_what_it_would_have_recorded(tmp_path, algorithm, more):
    expected = read_record(make(tmp_path / "run", algorithm, clock=CLOCK, **more))
    assert column(with_clock(expected)) == column(expected)  # its own clock: as recorded
    forget(tmp_path / "run", "clock")
    timed = with_clock(read_record(tmp_path / "run"), lamina.Clock(**CLOCK))
    assert column(timed) == pytest.approx(column(expected), rel=1e-12)
    assert timed.history.column("train_loss") == expected.history.column("train_loss")


@pytest.mark.parametrize("is_secret", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        {"sampling": "bernoulli"},
        {"sampling": "bernoulli", "cohort_cap": 5},
        {"participation": 2 / 9, "min_separation": 4},
    ],
    ids=str,
)
def test_a_private_run_takes_as_long_as_an_open_one(tmp_path, sampling, is_secret):
    privacy = {"bound": 1.0, "noise_multiplier": 1.0, "delta": 1e-3, "secret": str(tmp_path / "secret.key")}
    privacy["secret_cohorts"] = is_secret  # otherwise its rows do not tell the time
    more = {"local_steps": 3, "participation": 5 / 9, **sampling}
    expected = read_record(make(tmp_path / "open", "fedavg", clock=CLOCK, **more))  # its cohorts follow from the seed
    private = read_record(make(tmp_path / "run", "fedavg", clock=CLOCK, privacy=privacy, **more))
    assert bool(notes_on_time([private])) == is_secret
    if is_secret:
        assert len(set(private.history.column("clients"))) == 1
        assert "clock_seconds" not in private.history.columns
        assert column(with_clock(private)) == pytest.approx(column(expected), rel=1e-9)
    forget(tmp_path / "run", "clock")
    timed = with_clock(read_record(tmp_path / "run"), lamina.Clock(**CLOCK))
    assert column(timed) == pytest.approx(column(expected), rel=1e-9)


def test_a_private_run_that_does_not_say_its_steps(tmp_path):
    privacy = {"bound": 1.0, "noise_multiplier": 1.0, "delta": 1e-3, "secret": str(tmp_path / "secret.key")}
    run = make(tmp_path / "run", "fedavg", privacy=privacy, local_steps=3)
    forget(run)
    record = read_record(run)
    assert "steps" not in record.history.columns
    assert column(with_clock(record, lamina.Clock(step_seconds=0.5))) == [1.5, 3.0, 4.5, 6.0, 7.5]


def test_the_cohorts_of_a_run_that_did_not_wait_for_all(tmp_path):
    choosing = CLOCK | {"deadline": 4.0, "over_select": 1.4}
    expected = read_record(make(tmp_path / "run", "mimelamb", clock=choosing))
    timed = with_clock(expected, lamina.Clock(**CLOCK))  # another clock, for the same cohorts
    assert column(timed) == pytest.approx(column(expected), rel=1e-12)
    with pytest.raises(BadInput, match=r"cohorts of a finished run are fixed: take deadline and over_select out"):
        with_clock(expected, lamina.Clock(**choosing))


def test_without_the_clients_samples_each_takes_the_mean_number_of_steps(tmp_path):
    run = make(tmp_path / "run", "mimelamb", partition="iid", batch_size=4)  # three or four samples each: one step
    forget(run, partition=False)
    seconds = column(with_clock(read_record(run), lamina.Clock(step_seconds=1.0)))
    assert seconds == [2.0, 4.0, 6.0, 8.0, 10.0]  # a step, and a pass over all data
    fixed = make(tmp_path / "fixed", "mimelamb", local_steps=3)
    forget(fixed, partition=False)
    with pytest.raises(BadInput, match="fixed': clock: the algorithm takes gradients over all of a client's data"):
        with_clock(read_record(fixed), lamina.Clock(step_seconds=1.0))


def test_flops_are_counted_on_the_model_of_the_folder(tmp_path):
    fast = {"flops_per_second": {"median": 1e4, "sigma": 0.5}, "upload": 0.1}
    expected = read_record(make(tmp_path / "run", "fedlada", batch_size=3, clock=fast))
    forget(tmp_path / "run", "clock")
    record = read_record(tmp_path / "run")
    assert column(with_clock(record, lamina.Clock(**fast))) == pytest.approx(column(expected), rel=1e-12)
    (tmp_path / "run" / "partition.json").unlink()
    record.config["train"]["batch_size"] = "full"
    with pytest.raises(BadInput, match="the folder does not say how large a batch is: give step_seconds"):
        with_clock(record, lamina.Clock(**fast))
    record.config["train"]["batch_size"] = 3
    (tmp_path / "run" / "model.json").unlink()  # as in folders of earlier versions
    with pytest.raises(BadInput, match="the folder does not say what the model is: give step_seconds"):
        with_clock(record, lamina.Clock(**fast))


def test_clients_that_a_federation_has_missed_do_not_count(tmp_path):
    run = make(tmp_path / "run", "fedavg", rounds=2, participation=1.0)
    forget(run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"clients": 2, "bytes_down": 120, "bytes_up": 120, "steps": 4}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entries = [{"round": 1, "complete": False, "took_part": []}]
    entries += [{"round": n, "complete": True, "took_part": [{"client": 3}, {"client": n}]} for n in (1, 2)]
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (run / "federation.jsonl").write_text(text + '{"round": 3, "comp')
    # clients 1 and 3 and then 2 and 3, with two steps each
    clock = lamina.Clock(step_seconds=[9, 1, 4, 2, 9, 9, 9, 9, 9])
    assert column(with_clock(read_record(run), clock)) == [4.0, 12.0]


def test_folders_that_cannot_be_timed_are_one_line(tmp_path):
    record = read_record(make(tmp_path / "run", rounds=1))
    with pytest.raises(BadInput, match=r"run': the run has no clock: give one, --clock 4g"):
        with_clock(record)
    with pytest.raises(BadInput, match=r"clock.upload lists 2 clients, and there are 9"):
        with_clock(record, lamina.Clock(upload=[1, 2]))
    record.config["train"]["participation"] = 1.0
    with pytest.raises(BadInput, match=r"round 1 had 5 clients, and its config.json plans 9"):
        with_clock(record, lamina.Clock(upload=1))
    del record.config["data"]["partition"]
    with pytest.raises(BadInput, match="lacks what a clock needs: KeyError"):
        with_clock(record, lamina.Clock(upload=1))
