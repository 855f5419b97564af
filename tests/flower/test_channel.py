"""Codecs in a federation: exactly their bytes are sent, and the numbers are the simulation's."""

import pytest
import torch
from flwr.app import Array, ArrayRecord

import lamina
from codec_cases import pairs
from flower_setup import MIME, Setup, assert_like_the_simulation, client_of, is_train, small_model
from lamina.channel.privacy import Noise, Privacy
from lamina.flower import wire


def double():
    return small_model(norm=True).double()


@pytest.mark.long
@pytest.mark.parametrize(("codec", "algorithm", "feedback"), pairs(3), ids=str)
def test_the_federation_agrees_with_the_simulation(codec, algorithm, feedback, tmp_path):
    """Also its bytes, which the ledger knows from the codec, and the federation counts in its messages."""
    channel = {"codec": codec, "feedback": feedback, "down": "bf16"}
    no_limit = {"limits": lamina.flower.Limits(times_median=None)}
    setup = Setup(tmp_path, algorithm, model=double, rounds=3, batch_size=5, channel=channel, more=no_limit)
    setup.run()
    assert_like_the_simulation(setup)


def test_mime_with_two_exchanges_sees_the_rounded_model(tmp_path):
    """Its first gradients are sent in float64, as the statistics of BatchNorm are, twice down and once up."""
    channel = {"codec": "qsgd", "down": "bf16"}
    no_limit = {"limits": lamina.flower.Limits(times_median=None)}
    setup = Setup(tmp_path, MIME, model=double, rounds=3, batch_size=5, channel=channel, more=no_limit)
    setup.run()
    assert_like_the_simulation(setup)


@pytest.mark.parametrize(
    ("codec", "part", "damage", "why"),
    [
        ({"name": "topk", "share": 0.1}, "delta.1", lambda data: b"\xff" * len(data), "code that its codec does not"),
        ("qsgd", "delta.1", lambda data: b"\x00\x00\xc0\x7f" * (len(data) // 4), "holds a NaN"),
        ("qsgd", "delta.0", lambda data: data[:-1], "holds 82 bytes, not 83"),
    ],
)
def test_damaged_codes_are_refused(codec, part, damage, why, tmp_path):
    setup = Setup(tmp_path, "fedavg", rounds=1, participation=1.0, channel=codec, more={"attempts": 1})

    def on_reply(grid, node, message, reply):
        if is_train(message, 1) and client_of(node) == 1:
            arrays = dict(reply.content["up"])
            old = arrays[part]
            arrays[part] = Array(old.dtype, old.shape, old.stype, damage(old.data))
            reply.content["up"] = ArrayRecord(arrays)
        return reply

    setup.run(setup.grid(None, on_reply))
    (refused,) = [each for entry in setup.journal for each in entry["refused"]]
    assert why in refused["why"]


def test_codes_of_any_width_survive_the_wire():
    generator = torch.Generator().manual_seed(0)
    for bits in range(1, 25):
        codes = torch.randint(0, 2**bits, (1 << 20 | 5 if bits == 3 else 77,), generator=generator)
        packed = wire.pack_bits(codes, bits)
        assert len(packed) == -(-len(codes) * bits // 8)
        assert torch.equal(wire.unpack_bits(packed, bits, len(codes)), codes)


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "fedlamb"])
def test_differential_privacy_is_the_simulations(algorithm, tmp_path):
    """With the same noise: a federation's is another one otherwise, because its server does not know the data."""
    noise = Noise(b"fixed", 0.3, count_deviation=0.1)
    privacy = Privacy(0.05, 1e-3, 1.0, quantile=0.4, secret_cohorts=False, noise=noise)
    setup = Setup(
        tmp_path, algorithm, model=lambda: small_model().double(), rounds=3, privacy=privacy, channel="qsgd",
        local_steps=2,
    )  # fmt: skip
    setup.run()
    assert_like_the_simulation(setup)
    assert "train_loss" not in setup.rows[-1]
    assert len({row["clip_bound"] for row in setup.rows}) == 3
    assert setup.rows[-1]["epsilon"] > setup.rows[0]["epsilon"] > 0
