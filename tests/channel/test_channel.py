"""A channel between the uploads and their mean: in every engine, with every kind of method, and over restarts."""

import numpy as np
import pytest
import torch
from torch import nn

import lamina
from codec_cases import pairs
from lamina.base.errors import BadInput
from lamina.channel.channel import OPEN, Channel, as_channel
from lamina.engines.personal import unpack

X = torch.randn(100, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 3, (100,), generator=torch.Generator().manual_seed(1))
PARTS = [range(0, 10), range(10, 30), range(30, 33), range(33, 70), range(70, 100)]  # ragged


def network(seed=2):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def simulation(algorithm="fedlamb", engine="loop", model=None, **changed):
    settings = {"clients": PARTS, "batch_size": 8, "lr": 0.02, "participation": 0.6, "weighting": "examples"}
    return lamina.Simulation(model or network(), (X, Y), algorithm, engine=engine, **{**settings, **changed})


def assert_same(one, other):
    torch.testing.assert_close(one.state.server.x, other.state.server.x, rtol=1e-9, atol=1e-11)
    for a, b in zip(one.history, other.history, strict=True):
        assert a["bytes_up"] == b["bytes_up"]
        assert a["bytes_down"] == b["bytes_down"]
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-9)


@pytest.mark.parametrize(("codec", "algorithm", "feedback"), pairs(0), ids=str)
def test_the_stacked_engine_agrees_with_the_loop(algorithm, codec, feedback):
    channel = Channel(codec, feedback=feedback, down="bf16" if feedback else None)
    runs = [simulation(algorithm, engine, channel=channel) for engine in ("loop", "stacked")]
    for run in runs:
        run.run(3)
    assert_same(*runs)


@pytest.mark.long
@pytest.mark.parametrize(("codec", "name", "feedback"), pairs(1), ids=str)
def test_the_captured_engine_agrees_with_the_loop(codec, name, feedback):
    """On a CPU its steps are not captured, but its rows and their order are those of a GPU."""
    runs = [simulation(name, e, channel=Channel(codec, feedback=feedback)) for e in ("loop", "captured")]
    for run in runs:
        run.run(2)
    assert_same(*runs)


@pytest.mark.parametrize("changed", [{"private": ["3.*"]}, {"aggregation": "median"}, {"clip": 0.1}], ids=str)
def test_with_private_parts_and_robust_means(changed):
    runs = [simulation(engine=e, channel=Channel("sign", feedback=True), **changed) for e in ("loop", "stacked")]
    for run in runs:
        run.run(3)
    assert_same(*runs)


@pytest.mark.parametrize("feedback", [False, True])
def test_members_of_a_population_end_as_if_they_ran_alone(feedback):
    channel = {"codec": [{"name": "randk", "share": 0.3}, "qsgd"], "feedback": feedback}
    make = lambda i: simulation("fedlada", "stacked", seed=i, lr=0.01 * (1 + i), channel=channel)  # noqa: E731
    together, alone = [make(i) for i in range(3)], [make(i) for i in range(3)]
    lamina.Population(together).run(3)
    for one, other in zip(together, alone, strict=True):
        other.run(3)
        assert_same(one, other)


@pytest.mark.long
@pytest.mark.parametrize(("codec", "name", "feedback"), pairs(2), ids=str)
def test_a_population_agrees_with_its_members_alone(codec, name, feedback):
    channel = Channel(codec, feedback=feedback)
    settings = [{"seed": i, "lr": 0.01 * (1 + i), "channel": channel} for i in range(2)]
    members, alone = ([simulation(name, "stacked", **each) for each in settings] for _ in range(2))
    lamina.Population(members).run(2)
    for one, other in zip(members, alone, strict=True):
        other.run(2)
        assert_same(one, other)


def test_members_with_other_channels_cannot_be_stacked():
    runs = [simulation(engine="stacked", channel=each) for each in ("qsgd", "sign")]
    with pytest.raises(BadInput, match="they differ in channel"):
        lamina.Population(runs)


@pytest.mark.parametrize("given", ["none", None, Channel(), {"codec": "none"}, []])
def test_no_codec_is_the_same_run_bit_for_bit(given):
    one, other = simulation(), simulation(channel=given)
    for run in (one, other):
        run.run(2)
    assert torch.equal(one.state.server.x, other.state.server.x)
    assert other.protocol.channel == OPEN
    assert one.history[-1]["bytes_up"] == other.history[-1]["bytes_up"]


@pytest.mark.parametrize("codec", ["sign", {"name": "qsgd", "bits": 2}, {"name": "sketch", "share": 0.2}], ids=str)
def test_what_was_sent_and_the_rest_are_what_was_wanted(codec):
    """The sum over the rounds of what is read, plus the rest, is the sum of the uploads: nothing is lost for ever."""

    sent, wanted, channel = {}, {}, Channel(codec, feedback=True)
    original = Channel.send

    def watch(self, algorithm, up, down, rests, link):
        result = original(self, algorithm, up, down, rests, link)
        key = tuple(link.client.tolist())
        sent[key], wanted[key] = result.up, up
        return result

    run = simulation("scaffold", participation=1.0, channel=channel, weighting="clients")
    totals = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "send", watch)
        for _ in range(4):
            sent.clear()
            wanted.clear()
            run.run(1)
            for client, key in enumerate(sent):
                for name in ("delta", "delta_c"):
                    difference = getattr(wanted[key], name) - getattr(sent[key], name)
                    totals[client, name] = totals.get((client, name), 0) + difference
            assert len(sent) == len(PARTS)
    for client in range(len(PARTS)):
        rests = unpack(run.state.clients[client]).rests
        assert set(rests) == {"delta", "delta_c"}
        for name, rest in rests.items():
            torch.testing.assert_close(rest, totals[client, name])
            assert float(rest.norm()) > 0


@pytest.mark.parametrize("codec", [{"name": "sign", "scale": "model"}, {"name": "topk", "share": 3 / 18}], ids=str)
def test_fedams_on_the_server_with_a_codec_is_fedcams(codec):
    """Wang, Lin and Chen 2022, Algorithm 2, option 2, in numpy: the codec sees the whole vector, weights and bias."""
    algorithm = lamina.algorithms.create("fedams_server", "option2", beta1=0.9, beta2=0.99, server_lr=0.5)
    run = simulation(
        algorithm, model=nn.Linear(5, 3).double(), channel=Channel(codec, feedback=True), weighting="clients",
        batch_size=None, local_steps=2, lr=0.1, clients=PARTS, seed=3, device="cpu",
    )  # fmt: skip
    x, y = run.state.server.x.numpy().copy(), Y.numpy()
    inputs = np.concatenate([X.numpy(), np.ones((len(X), 1))], 1)
    m, v, v_hat = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    errors = {i: np.zeros_like(x) for i in range(len(PARTS))}
    for number in range(1, 7):
        cohort, reads = run.plan.round(number).cohort.tolist(), []
        for client in cohort:
            local, rows = x.copy(), list(PARTS[client])
            for _ in range(2):
                weights = np.concatenate([local[:15].reshape(3, 5), local[15:, None]], 1)
                logits = inputs[rows] @ weights.T
                p = np.exp(logits - logits.max(1, keepdims=True))
                p /= p.sum(1, keepdims=True)
                p[np.arange(len(rows)), y[rows]] -= 1
                gradient = p.T @ inputs[rows] / len(rows)
                local -= 0.1 * np.concatenate([gradient[:, :5].ravel(), gradient[:, 5]])
            w = local - x + errors[client]
            read = np.abs(w).sum() / w.size * np.where(w >= 0, 1.0, -1.0)
            if codec["name"] == "topk":
                read = np.where(np.abs(w) >= np.sort(np.abs(w))[-3], w, 0.0)
            errors[client] = w - read  # an absent client keeps its old one
            reads.append(read)
        mean = np.mean(reads, 0)
        m, v = 0.9 * m + 0.1 * mean, 0.99 * v + 0.01 * mean**2
        v_hat = np.maximum(v_hat, v)
        x = x + 0.5 * m / (np.sqrt(v_hat) + 1e-3)
        run.run(1)
        np.testing.assert_allclose(run.state.server.x.numpy(), x, rtol=1e-9, atol=1e-12)
        sent = 3 + 8 if codec["name"] == "sign" else 3 * 8 + 2  # 18 bits and a float64; 3 float64 and places of 5 bits
        assert run.history[-1]["bytes_up"] == len(cohort) * sent


def test_second_moments_are_sent_as_differences_and_stay_non_negative():
    """With 1 bit per number, v itself would be flat in every layer; its difference from the broadcast is not."""
    run = simulation("fedlamb", channel="sign", participation=1.0)
    run.run(1)
    moved = run.state.server.v_hat
    assert (moved >= 0).all()
    assert len(moved.unique()) > len(run.objective.layers.sizes)
    plain = simulation("fedlamb", channel=Channel("sign", fields={"v": "none"}), participation=1.0)
    plain.run(1)
    exact = simulation("fedlamb", participation=1.0)
    exact.run(1)
    torch.testing.assert_close(plain.state.server.v_hat, exact.state.server.v_hat)
    assert plain.history[-1]["bytes_up"] > run.history[-1]["bytes_up"]


def test_a_resumed_run_continues_with_its_rests(tmp_path):
    whole = simulation("scaffold", channel=Channel("sign", feedback=True))
    whole.run(4)
    for rounds in (2, 4):
        part = simulation("scaffold", channel=Channel("sign", feedback=True), out=tmp_path / "run")
        part.run(rounds)
    assert torch.equal(part.state.server.x, whole.state.server.x)
    with pytest.raises(BadInput, match="channel"):
        simulation("scaffold", channel=Channel("qsgd"), out=tmp_path / "run").run(5)


def test_the_broadcast_in_16_bits():
    run = simulation("fedlada", channel={"down": "bf16"}, participation=1.0)
    open_run = simulation("fedlada", participation=1.0)
    for each in (run, open_run):
        each.run(1)
    size, buffers = run.objective.layers.size, 12 * 8
    assert open_run.history[0]["bytes_down"] == 5 * (3 * 8 * size + buffers)
    assert run.history[0]["bytes_down"] == 5 * (3 * 2 * size + buffers)
    assert run.history[0]["bytes_up"] == open_run.history[0]["bytes_up"]
    assert not torch.equal(run.state.server.x, open_run.state.server.x)
    torch.testing.assert_close(run.state.server.x, open_run.state.server.x, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_nan_that_a_codec_would_lose_ends_the_run(engine):
    class Broken(type(lamina.algorithms.create("fedavg"))):
        def finish(self, local, down, client, info):
            up, client = super().finish(local, down, client, info)
            hole = torch.zeros_like(up.delta)
            hole[..., 0] = float("nan")
            return up._replace(delta=up.delta + hole), client

    run = simulation(Broken(), engine, channel={"name": "randk", "share": 0.02})
    with pytest.raises(lamina.Diverged):
        run.run(3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"codec": "qsgd", "fields": {"momentum": "sign"}},
            "an upload of fedlamb has no field 'momentum' (its fields: delta, v",
        ),
        ({"codecs": "qsgd"}, "channel has no option 'codecs'; did you mean 'codec'"),
        ({"feedback": True}, "there is no codec: name one"),
        ({"codec": "qsgd", "feedback": "yes"}, "is neither true nor false"),
        ({"down": "qsgd"}, "channel: down = 'qsgd' must be 'bf16', or left out"),
        (
            {"codec": "topk", "share": 0.1},
            "no option 'share': give it with the codec's name, codec = { name = 'topk', sha",
        ),
        ({"name": "sign", "feedback": True}, "no option 'name': a codec is named by codec = 'topk' or codec = {"),
        ({"codec": {"name": "qsgd", 4: 1}}, "channel: {'name': 'qsgd', 4: 1} is no codec"),
        ({"codec": "sign", "fields": {1: "qsgd"}}, "an upload of fedlamb has no field '1'"),
        ({"fields": "qsgd"}, "no table of codecs"),
    ],
)
def test_bad_input_is_one_line(given, message):
    with pytest.raises(BadInput) as error:
        simulation(channel=given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_channel_in_words():
    chained = [{"name": "topk", "share": 0.05}, {"name": "qsgd", "bits": 4, "bucket": 64}]
    given = {"codec": chained, "fields": {"v": "bf16", "m": "none"}, "feedback": True, "down": "bf16"}
    assert as_channel(given).label == "topk 5% then qsgd 4 bits bucket=64, v bf16, m none, feedback, down bf16"
    assert [as_channel(each).label for each in ("none", "sign", "sketch")] == ["none", "sign", "sketch 10%"]


def test_a_file_and_its_record_say_the_same(tmp_path):
    (tmp_path / "e.toml").write_text(
        '[train]\nrounds = 2\n[channel]\nfeedback = true\ncodec = [{name = "topk", share = 0.1}, "qsgd"]\n'
        '[channel.fields]\nv = "bf16"\n'
    )
    run = lamina.experiment.config.load(tmp_path / "e.toml")
    channel = as_channel(run.channel.model_dump())
    assert as_channel(channel.record()) == channel
    assert channel.fields["v"][0].is_relative
