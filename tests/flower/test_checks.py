"""Bad updates, gradients and evaluations are refused with a reason, and the round continues."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

import lamina
from flower_setup import (
    MIME,
    NODE,
    Setup,
    altered,
    assert_weights,
    change,
    client_of,
    is_train,
    part_of,
    put,
    reference,
    small_model,
    spoiled,
    with_delta,
)
from lamina.base.errors import BadInput, Diverged
from lamina.flower import Limits, Stopped, checks, wire
from lamina.flower.checks import Refused, read_evaluation
from lamina.training.metrics import find_all


def extra_record(content):
    made = RecordDict(dict(content.items()))
    made["more"] = ConfigRecord({"text": "hello"})
    return made


def without(name):
    return lambda content: RecordDict({key: value for key, value in content.items() if key != name})


HOSTILE_PICKLE = (
    b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (83,), }" + b" " * 58 + b"\ncos\n"
)


BAD = {
    "a NaN": (with_delta(lambda d: put(d, float("nan"))), "'delta' holds a NaN or an infinity"),
    "an infinity": (with_delta(lambda d: put(d, float("inf"))), "'delta' holds a NaN or an infinity"),
    "a shape": (with_delta(lambda d: wire.encode(d[:-1])), "'delta' has shape [82], not [83]"),
    "a dtype": (with_delta(lambda d: wire.encode(d.double())), "'delta' is float64, not float32"),
    "too few bytes": (
        with_delta(lambda d: Array("float32", (83,), wire.RAW, b"123")),
        "'delta' holds 3 bytes, not 332",
    ),
    "a lying shape": (
        with_delta(lambda d: Array("float32", (2**31 - 1, 2**31 - 1), wire.RAW, b"")),
        "'delta' has shape",
    ),
    "a pickle": (
        with_delta(lambda d: Array("object", (83,), "numpy.ndarray", HOSTILE_PICKLE)),
        "'delta' is encoded as 'numpy.ndarray'",
    ),
    "a missing field": (lambda c: change(c, "up", delta_c=None), "the field 'delta_c' is missing"),
    "an extra field": (
        lambda c: change(c, "up", more=wire.encode(torch.zeros(3))),
        "it has an unknown field 'more' in 'up'",
    ),
    "an extra record": (extra_record, "it has an unknown record 'more'"),
    "no arrays": (without("up"), "the record 'up' is missing"),
    "no figures": (without("figures"), "the record 'figures' is missing"),
    "nothing": (lambda c: RecordDict(), "the record 'up' is missing"),
    "the wrong kind of record": (
        lambda c: RecordDict({"up": ConfigRecord({"delta": 1}), "figures": c["figures"]}),
        "the record 'up' is missing",
    ),
    "buffers of no model": (
        lambda c: change(c, "buffers", mean=wire.encode(torch.zeros(3))),
        "it has an unknown field 'mean' in 'buffers'",
    ),
    "too large": (
        lambda c: change(c, "up", delta=Array("float32", (83,), wire.RAW, bytes(10**6))),
        "bytes, and the model explains",
    ),
    "a long text": (
        lambda c: change(c, "figures", **{"x" * 10**6: 1.0}),
        "bytes, and the model explains",
    ),
    "no examples": (lambda c: change(c, "figures", examples=0, steps=0), "says 0 examples"),
    "negative examples": (lambda c: change(c, "figures", examples=-5), "says -5 examples"),
    "absurdly many examples": (lambda c: change(c, "figures", examples=10**12, steps=10**12), "1000000000000 examples"),
    "examples as a text": (lambda c: change(c, "figures", examples=[1, 2]), "says [1, 2] examples"),
    "half an example": (lambda c: change(c, "figures", examples=0.5), "says 0.5 examples"),
    "a wrong number of steps": (lambda c: change(c, "figures", steps=1), "says 1 local steps, but 25 examples make 4"),
    "an infinite loss": (lambda c: change(c, "figures", loss=float("inf")), "its training loss is inf"),
    "no loss": (lambda c: change(c, "figures", loss=None), "its figures are not examples, steps and loss"),
    "an absurd norm": (
        with_delta(lambda d: wire.encode(d * 1e6)),
        "the norm of 'delta' is",
    ),
    "an absurd loss": (lambda c: change(c, "figures", loss=1.7e308), "its training loss is 1.7e+308"),
    "an absurd other field": (
        lambda c: change(c, "up", delta_c=wire.encode(torch.full((83,), 1e30))),
        "the norm of 'delta_c' is 9.11043e+30, more than 100 times the round's median",
    ),
}


@pytest.fixture(scope="module")
def bad_run(tmp_path_factory):
    """A run in which client 1 sends another bad update in every round after the first."""
    setup = Setup(tmp_path_factory.mktemp("bad"), "scaffold", participation=1.0, rounds=1 + len(BAD))
    kinds = [None, *BAD]

    def on_reply(grid, node, message, reply):
        if is_train(message) and client_of(node) == 1 and not is_train(message, 1):
            spoil, _ = BAD[kinds[int(message.metadata.group_id) - 1]]
            return Message(spoil(reply.content), reply_to=message)
        return reply

    setup.run(setup.grid(on_reply=on_reply))
    return setup


@pytest.mark.long
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_update_is_refused_and_the_round_continues(kind, bad_run):
    position = 1 + list(BAD).index(kind)
    (refused,) = bad_run.journal[position]["refused"]
    assert (refused["client"], refused["node"]) == (1, str(NODE + 1))
    assert BAD[kind][1] in refused["why"]
    assert (bad_run.rows[position]["clients"], bad_run.rows[position]["refused"]) == (3, 1)


def test_bad_updates_leave_no_trace(bad_run):
    assert f"client 1 (node {NODE + 1}): refused: " in (bad_run.out / "log.txt").read_text()
    absent = {(number, 1) for number in range(2, bad_run.rounds + 1)}
    assert_weights(bad_run, reference(bad_run, absent=absent))  # the mean of the good ones, and no state run ahead


def test_negative_second_moments_are_refused(tmp_path):
    setup = Setup(tmp_path, "fedlada", participation=1.0, rounds=2)
    negative = wire.encode(torch.full((83,), -1.0))
    setup.run(setup.grid(on_reply=spoiled(lambda content: change(content, "up", v_hat=negative), [2])))
    assert "'v_hat' has negative entries" in setup.journal[1]["refused"][0]["why"]
    assert_weights(setup, reference(setup, absent={(2, 1)}))


@pytest.mark.parametrize(
    ("buffer", "value", "why"),
    [
        ("1.running_var", -1.0, "negative entries"),
        ("1.running_mean", float("nan"), "NaN"),
        ("1.running_mean", 1e30, "the norm of the buffer '1.running_mean' is 2.82843e+30, more than 100 times"),
    ],
)
def test_bad_buffers_are_refused(buffer, value, why, tmp_path):
    setup = Setup(tmp_path, "fedavg", model=lambda: small_model(norm=True), batch_size=16, participation=1.0, rounds=2)
    entries = {buffer: wire.encode(torch.full((8,), value))}
    setup.run(setup.grid(on_reply=spoiled(lambda content: change(content, "buffers", **entries), [2])))
    assert why in setup.journal[1]["refused"][0]["why"]
    assert_weights(setup, reference(setup, absent={(2, 1)}))


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_bad_gradient_keeps_a_client_out_of_mimes_round(value, tmp_path):
    setup = Setup(tmp_path, lamina.algorithms.create("mime", "mime"), participation=1.0, rounds=2)
    gradient = wire.encode(torch.full((83,), value))
    on_reply = spoiled(lambda content: change(content, "up", gradient=gradient), [2], kind="train.gradient")
    setup.run(setup.grid(on_reply=on_reply))
    assert "'gradient' " in setup.journal[1]["refused"][0]["why"]
    assert_weights(setup, reference(setup, absent={(2, 1)}))


@pytest.mark.parametrize("algorithm", ["scaffold", "fednova"])
def test_large_updates_can_be_refused(algorithm, tmp_path):
    setup = Setup(tmp_path, algorithm, participation=1.0, more={"limits": Limits(max_norm=1e-6), "attempts": 1})
    with pytest.raises(Stopped, match=r"'delta' has norm .*, over the limit of 1e-06"):
        setup.run()


def test_a_diverging_node_stops_nobody_else(tmp_path):
    """A node whose own training went wrong sends NaN, is refused, and continues from its last good state."""
    setup = Setup(tmp_path, "scaffold", participation=1.0)
    broken = setup.federation()
    broken.data = lambda context: (part_of(context)[0] * 1e30, part_of(context)[1])
    good = setup.client_app()

    def on_send(grid, node, message):
        grid.apps[NODE + 1] = broken.client_app() if is_train(message, 3) else good
        return message

    setup.run(setup.grid(on_send))
    assert setup.journal[2]["refused"][0]["client"] == 1
    assert_weights(setup, reference(setup, absent={(3, 1)}))


def scramble(random, content):
    """A reply with a few things wrong at random."""
    values = [0, -1, 3.5, float("nan"), 2**62, [1, 2], [0.5], "text", b"bytes", True, [True], ["a"]]
    pick = lambda options: options[random.integers(len(options))]  # noqa: E731
    made = RecordDict(dict(content.items()))
    for _ in range(random.integers(1, 4)):
        record, key = (
            pick(["up", "figures", "buffers", "problem", "odd"]),
            pick(["delta", "delta_c", "examples", "loss"]),
        )
        array = Array(pick(["float32", "object", "", "int8"]), pick([(83,), (), (-1,), (2**31 - 1,), (0,)]),
                      pick([wire.RAW, "numpy.ndarray", ""]), pick([b"", bytes(332), HOSTILE_PICKLE]))  # fmt: skip
        try:
            made[record] = pick([ArrayRecord, MetricRecord, ConfigRecord])({key: pick([array, pick(values)])})
        except TypeError:
            made[record] = ArrayRecord({key: array})
    return made


def test_no_reply_makes_the_checks_fail():
    class Up(lamina.algorithms.scaffold.Up):
        pass

    up = Up(torch.ones(83), torch.ones(83))
    sound = wire.content_of({"up": wire.pack(up), "figures": {"examples": 5, "steps": 1, "loss": 0.5}})
    expected = checks.Expected.plain(up, {}, lambda n: 1, Limits(), ("v",))
    gradient = checks.Expected.plain(checks.FullGradient(up.delta), {}, None, Limits())
    assert checks.read_update(sound, expected, 0).examples == 5
    random, refused = np.random.default_rng(0), 0
    for _ in range(300):
        content = scramble(random, sound)
        for read in (
            lambda c: checks.read_update(c, expected, 0),
            lambda c: checks.read_update(c, gradient, 0),
            lambda c: checks.read_evaluation(c, Limits()),
            checks.read_problem,
        ):
            try:
                read(content)
            except checks.Refused:
                refused += 1
    assert refused > 600


@pytest.mark.parametrize(
    ("times", "figures", "why"),
    [
        (5000.0, {"examples": 10_000_000}, "the norm of 'gradient' is"),
        (5000.0, {}, "the norm of 'gradient' is"),
        (1.0, {"examples": 10_000_000}, "its number of examples is 1e+07, more than 100 times the round's median"),
        (1.0, {"examples": 100}, "says 25 examples, and said 100 when it sent its gradient"),
    ],
)
def test_mimes_first_exchange_is_no_way_around_the_checks(times, figures, why, tmp_path):
    setup = Setup(tmp_path, MIME, rounds=2, participation=1.0, weighting="examples")
    setup.run(setup.grid(on_reply=spoiled(altered(times, **figures), kind="train.gradient")))
    for entry in setup.journal:
        (refused,) = entry["refused"]
        assert refused["client"] == 1
        assert why in refused["why"]
    if figures.get("examples") != 100:  # which is refused only after it was in the mean of the gradients
        assert_weights(setup, reference(setup, absent={(1, 1), (2, 1)}))
    assert setup.rows[-1]["loss"] < 2


def test_a_number_of_examples_cannot_buy_the_mean(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=2, weighting="examples")
    steps = int(setup.federation().protocol.steps(np.array([150_000]))[0])
    setup.run(setup.grid(on_reply=spoiled(altered(examples=150_000, steps=steps))))
    for entry in setup.journal:
        (refused,) = entry["refused"]
        assert refused["client"] == 1
        assert "its number of examples is 150000, more than 100 times the round's median" in refused["why"]
    assert_weights(setup, reference(setup, absent={(1, 1), (2, 1)}))


@pytest.mark.parametrize("weight", ["own data", "test data"])
def test_an_evaluation_that_claims_too_much_is_not_used(weight, tmp_path):
    more = {"evaluate_on": "nodes"} | ({"node_test": part_of} if weight == "test data" else {})
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more=more)
    claim = altered(examples=10_000_000, loss=1e20, accuracy=1.0)
    setup.run(setup.grid(on_reply=spoiled(claim, kind="evaluate")))
    assert setup.rows[0]["evaluating_nodes"] == 3
    assert setup.rows[0]["node_loss"] < 10
    (note,) = setup.journal[0]["notes"]
    assert note.startswith(f"evaluation: client 1 (node {NODE + 1}): refused: ")
    assert ("said it trains on 25" in note) == (weight == "own data")


def test_an_evaluation_loss_that_would_overflow_the_mean_is_not_used(tmp_path):
    setup = Setup(tmp_path, "fedavg", participation=1.0, rounds=1, more={"evaluate_on": "nodes"})
    setup.run(setup.grid(on_reply=spoiled(altered(loss=1.7e308), kind="evaluate")))
    assert "its evaluation loss is 1.7e+308" in setup.journal[0]["notes"][0]
    assert setup.rows[0]["node_loss"] < 10


def test_full_gradients_that_are_not_finite_are_divergence(tmp_path):
    def too_large():
        model = small_model()
        for parameter in model.parameters():
            parameter.data *= 1e25
        return model

    setup = Setup(tmp_path, MIME, model=too_large, participation=1.0)
    grid = setup.grid()
    with pytest.raises(Diverged, match="training went non-finite on 4 clients, on client 0 first in "):
        setup.run(grid)
    assert not any(is_train(message) for _, message in grid.seen)


@pytest.mark.parametrize("algorithm", ["fedavg", "mime"])
@pytest.mark.parametrize("lr", [1e12, 1e30])
def test_divergence_is_called_divergence(algorithm, lr, tmp_path):
    setup = Setup(tmp_path, MIME if algorithm == "mime" else "fedavg", participation=1.0, epochs=2, lr=lr)
    for _ in range(2):  # and the run has ended
        with pytest.raises(
            Diverged, match=r"round \d: training went non-finite on \d clients.*lower the learning rate"
        ):
            setup.run()
    assert (setup.out / "diverged.json").exists()


@pytest.mark.parametrize("given", [{"max_norm": -1}, {"times_median": 0}, {"max_examples": 0}])
def test_wrong_limits_are_one_clear_line(given):
    with pytest.raises(BadInput):
        Limits(**given)


@pytest.mark.parametrize(
    ("figures", "why"),
    [
        ({}, "its rmse is None"),
        ({"rmse": -1.0}, "its rmse is -1.0"),
        ({"rmse": float("nan")}, "its rmse is nan"),
        ({"rmse": 1e31}, "its rmse is 1e[+]31"),
        ({"rmse": 2.0, "perplexity": -1.0}, "its perplexity is -1.0"),
        ({"rmse": 2.0, "perplexity/weight": 0.0, "top5_accuracy": 0.5}, "its perplexity/weight is 0.0"),
        ({"rmse": 2.0, "top5_accuracy": 1.5}, "its top5_accuracy is 1.5"),
        ({"rmse": 2.0, "top5_accuracy": 0.5, "top5_accuracy/weight": 0.0}, "its top5_accuracy/weight is 0.0"),
        ({"rmse": 2.0, "top5_accuracy": 0.5, "loss/weight": 2.0}, "its loss/weight is 2.0"),
    ],
)
def test_a_node_must_report_sound_metrics(figures, why):
    tokens = {"perplexity": 0.5, "perplexity/weight": 7.0}  # the mean loss of a token, and how many a sample has
    content = wire.content_of({"figures": {"examples": 5, "loss": 0.5, **tokens, **figures}})
    metrics = find_all(["rmse", "perplexity", "top5_accuracy"])
    with pytest.raises(Refused, match=why):
        read_evaluation(content, Limits(), metrics=metrics)
