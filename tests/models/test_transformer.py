"""The small transformer for text."""

import pytest
import torch

import lamina
from lamina import models

TEXTS = torch.randint(0, 11, (24, 9), generator=torch.Generator().manual_seed(0))


def test_logits_at_a_position_depend_on_no_later_token():
    net = models.create("transformer", (9,), 11, seed=0, width=8, heads=2)
    changed = TEXTS.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    before, after = net(TEXTS), net(changed)
    assert before.shape == (24, 9, 11)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5], after[:, 5])


def test_it_trains_stacked_as_in_the_loop():
    def history(engine):
        net = models.create("transformer", (9,), 11, seed=0, width=8, heads=2).double()
        settings = {"loss": "causal_lm", "lr": 0.05, "batch_size": 4, "engine": engine, "device": "cpu"}
        return lamina.Simulation(net, (TEXTS, TEXTS), "fedlamb", clients=4, **settings).run(3)

    loop, stacked = history("loop"), history("stacked")
    assert stacked.column("train_loss") == pytest.approx(loop.column("train_loss"), rel=1e-9)
    assert loop[-1]["train_loss"] < loop[0]["train_loss"]


def test_what_it_cannot_take_is_refused_in_one_line():
    with pytest.raises(lamina.BadInput, match=r"transformer needs texts \[tokens\], not \[1, 28, 28\]"):
        models.create("transformer", (1, 28, 28), 10)
    with pytest.raises(lamina.BadInput, match="width = 10 is not a multiple of heads = 4"):
        models.create("transformer", (9,), 11, width=10)
