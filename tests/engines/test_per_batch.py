"""A loss of a whole batch gets the batches of one client, in every engine and wherever it is computed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import lamina
from lamina.engines.ranks import Ranks
from small_simulations import assert_same, form

PARTS = [range(70), range(70, 75), range(75, 96)]  # ragged, and one larger than a batch of an evaluation
X = torch.randn(96, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OWNER = torch.tensor([client for client, part in enumerate(PARTS) for _ in part])
ENGINES = ("loop", "captured")


class Views(nn.Module):
    """Two views of every sample, as contrastive learning compares them."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, x):
        return F.normalize(torch.tanh(self.one(x)), dim=1), F.normalize(self.two(x), dim=1)


def contrast(outputs, targets):
    one, two = outputs
    return F.cross_entropy(one @ two.T / 0.5, torch.arange(len(one)))


def simulate(engine, loss=contrast, **settings):
    torch.manual_seed(0)
    settings = {"algorithm": "fedavg", "clients": PARTS, "batch_size": 8, "lr": 0.3, **settings}
    return lamina.Simulation(
        Views().double(), (X, OWNER), engine=engine, loss=lamina.losses.per_batch(loss), device="cpu", **settings
    )


def test_a_step_follows_the_gradient_of_the_batch():
    run = simulate("auto", clients=1, batch_size=None)
    assert form(run) == "loop"
    assert "the loss is one of a whole batch (per_batch)" in run.engine.why
    run.run(1)
    torch.manual_seed(0)
    model = Views().double()
    contrast(model(X), OWNER).backward()
    for name, parameter in model.named_parameters():
        expected = parameter.detach() - 0.3 * parameter.grad
        torch.testing.assert_close(run.model.get_parameter(name).detach(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["fedlamb", "mime", "scaffold"])
def test_the_engines_that_keep_clients_apart_agree(algorithm):
    runs = [simulate(engine, algorithm=algorithm, test=(X, OWNER)) for engine in ENGINES]
    for run in runs:
        run.run(2)
    assert_same(runs[1].state, runs[0].state, 1e-9)
    assert runs[1].history.column("loss") == pytest.approx(runs[0].history.column("loss"), rel=1e-9)
    with pytest.raises(lamina.BadInput, match="'stacked' is not possible here: the loss is one of a whole batch"):
        simulate("stacked")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_loss_sees_one_client_at_a_time_and_few_samples_of_all_its_data(engine):
    seen = []

    def watched(outputs, targets):
        seen.append(targets.tolist())
        return contrast(outputs, targets)

    mixed = torch.arange(96).reshape(2, 48).T.flatten()  # the samples of the test data belong to nobody
    run = simulate(
        engine, watched, algorithm="mime", local_test=0.2, metrics=["loss"], diagnostics=["gradient"],
        test=(X[mixed], OWNER[mixed]),
    )  # fmt: skip
    started = len(seen)
    run.run(1)
    of_clients = [owners for owners in seen[started:] if len(set(owners)) == 1]
    assert [len(owners) for owners in seen[started:] if len(set(owners)) > 1] == [48, 48]
    assert {owners[0] for owners in of_clients} == {0, 1, 2}
    assert max(map(len, of_clients)) <= 64


def test_client_columns_are_the_losses_of_the_clients():
    run = simulate("loop", client_metrics=True, metrics=["loss"], test=(X, OWNER))
    row = run.run(1)[-1]
    with torch.no_grad():
        whole = [contrast(run.model(X[part]), None) for part in PARTS[1:]]
        halves = [contrast(run.model(X[part]), None) for part in (range(35), range(35, 70))]
    expected = torch.stack([torch.stack(halves).mean(), *whole])
    assert row["client_loss"] == pytest.approx(float(expected.mean()), rel=1e-9)
    assert row["client_loss_std"] == pytest.approx(float(expected.std(correction=0)), rel=1e-9)


def test_processes_share_the_clients_of_a_loss_that_keeps_them_apart(monkeypatch):
    monkeypatch.setattr(Ranks, "current", classmethod(lambda cls: cls(0, 2)))
    assert form(simulate("auto")) == "captured"
