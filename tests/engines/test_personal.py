"""Clients with private parts: the same numbers in every engine, and what the method is defined to be."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import kinds
import lamina
from lamina.algorithms import registry
from lamina.algorithms.contract import LocalModel, Model
from lora import adapted
from second_gradients import Ditto

X = torch.randn(100, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 3, (100,), generator=torch.Generator().manual_seed(1))
PARTS = [range(0, 10), range(10, 30), range(30, 33), range(33, 70), range(70, 100)]  # ragged


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = nn.Linear(5, 6), nn.BatchNorm1d(6)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.body(x)))))


def network():
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Net().double()


def simulation(algorithm="fedlamb", engine="loop", **changed):
    settings = {"clients": PARTS, "batch_size": 8, "lr": 0.02, "participation": 0.6, "private": ["head.*", "norm.*"]}
    return lamina.Simulation(network(), (X, Y), algorithm, engine=engine, **{**settings, **changed})


def client_vectors(run):
    return torch.stack([run.client_parameters(i)[0] for i in range(run.plan.clients.count)])


@pytest.mark.parametrize("engine", ["stacked", "captured"])
@pytest.mark.parametrize("algorithm", [*sorted(registry()), lamina.create("mime", "mime")], ids=str)
def test_engines_agree(algorithm, engine):
    runs = [simulation(algorithm, one) for one in ("loop", engine)]
    histories = [run.run(3) for run in runs]
    torch.testing.assert_close(client_vectors(runs[0]), client_vectors(runs[1]), rtol=1e-9, atol=1e-11)
    for i in range(5):
        for name, value in runs[0].client_parameters(i)[1].items():
            torch.testing.assert_close(runs[1].client_parameters(i)[1][name], value, rtol=1e-9, atol=1e-11)
    for one, other in zip(*histories, strict=True):
        for name in ("train_loss", "update_norm", "consistency", "bytes_up", "bytes_down"):
            assert one[name] == pytest.approx(other[name], rel=1e-9, abs=1e-12), name


def test_engines_agree_on_an_algorithm_with_client_models():
    runs = [simulation(Ditto(), engine, private=[], local_test=0.3) for engine in ("loop", "stacked", "captured")]
    for run in runs:
        run.run(3)
    for run in runs[1:]:
        torch.testing.assert_close(client_vectors(run), client_vectors(runs[0]), rtol=1e-9, atol=1e-11)
        for row, expected in zip(run.history, runs[0].history, strict=True):
            for column in ("client_accuracy_mean", "shared_client_accuracy_mean", "client_accuracy_worst10"):
                assert row[column] == pytest.approx(expected[column], rel=1e-9)
    assert not torch.equal(client_vectors(runs[0])[0], runs[0].state.server.x)


@pytest.mark.parametrize("engine", ["stacked", "captured"])
def test_engines_agree_on_a_private_head_of_several(engine):
    """The model returns a dict, the targets are a dict, and one of its two heads stays with the client."""
    runs = [kinds.simulation("dict_targets", each, private=["size.*"], local_test=0.3) for each in ("loop", engine)]
    for run in runs:
        run.run(3)
    torch.testing.assert_close(client_vectors(runs[1]), client_vectors(runs[0]), rtol=1e-9, atol=1e-11)
    for row, expected in zip(runs[1].history, runs[0].history, strict=True):
        assert row["client_loss_mean"] == pytest.approx(expected["client_loss_mean"], rel=1e-9)
    assert len({tuple(vector.tolist()) for vector in client_vectors(runs[0])}) > 1


@pytest.mark.parametrize(("algorithm", "up", "down"), [("fedavg", 1, 1), ("fedlada", 2, 3)])
def test_engines_agree_on_adapters_half_of_which_is_private(algorithm, up, down):
    """Clients share lora_A and keep lora_B; the frozen layers below are the same everywhere."""
    runs = [
        lamina.Simulation(adapted(5, torch.float64), (X, Y), algorithm, clients=PARTS, batch_size=8, lr=0.05,
                          participation=0.6, private=["*lora_B*"], engine=engine)
        for engine in ("loop", "stacked", "captured")
    ]  # fmt: skip
    for run in runs:
        row = run.run(3)[-1]
        size = row["clients"] * (5 * 2 + 8 * 2) * 8  # of the vectors that the algorithm sends
        assert (row["bytes_up"], row["bytes_down"]) == (up * size, down * size)
        torch.testing.assert_close(client_vectors(run), client_vectors(runs[0]), rtol=1e-9, atol=1e-11)
    start, shared = adapted(5, torch.float64).state_dict(), runs[0].model.state_dict()
    assert [name for name in start if not torch.equal(start[name], shared[name])] == [
        "0.lora_A.weight", "2.lora_A.weight"
    ]  # fmt: skip
    trained = [run.client_model(0)[2].lora_B.weight for run in runs]
    assert all(bool(weight.any()) for weight in trained)


# these servers move shared parameters in another way than local training does; FedExP's evaluates their mean
BY_SERVER = ("fedadam", "fedadam_star", "fedadagrad", "fedyogi", "fedams_server", "fedavgm", "feddyn", "diloco")
BY_SERVER += ("fedexp",)
LOCAL = sorted(registry().keys() - set(BY_SERVER))


@pytest.mark.parametrize("algorithm", [*LOCAL, lamina.create("mime", "mime")], ids=str)
def test_for_its_private_parameters_a_client_is_a_federation_of_one(algorithm):
    """So nothing is different for a client that really is alone."""
    runs = [simulation(algorithm, clients=[range(100)], participation=1, private=parts) for parts in (["head.*"], [])]
    for run in runs:
        run.run(4)
    torch.testing.assert_close(client_vectors(runs[0]), client_vectors(runs[1]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("algorithm", ["fedadam", "fedadam_star", "fedavg"])
def test_private_parameters_end_where_local_training_ends(algorithm):
    """Also with a server that does not take the clients' mean as the new model."""
    server = {"server_lr": 0.5} if algorithm == "fedavg" else {}
    run = simulation(lamina.create(algorithm, **server), clients=[range(100)], participation=1, private=["head.*"])
    plain = simulation("fedavg", clients=[range(100)], participation=1, private=[])
    for one in (run, plain):
        one.run(1)
    trained, by_sgd = run.client_model(0), plain.client_model(0)
    if algorithm != "fedadam_star":  # its clients do not take plain steps
        torch.testing.assert_close(trained.head.weight, by_sgd.head.weight)
    assert not torch.allclose(trained.body.weight, by_sgd.body.weight)


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Parameter(torch.tensor([0.5, -0.3], dtype=torch.float64))
        self.own = nn.Parameter(torch.tensor([0.2], dtype=torch.float64))

    def forward(self, x):
        return x[:, :2] @ self.shared + x[:, 2] * self.own


def test_fedlada_with_a_private_coordinate_as_in_numpy():
    """FedLADA of Sun et al. (Algorithm 3) on linear regression; v and g_a of a private coordinate are the client's."""
    generator = np.random.default_rng(0)
    xs, targets = generator.normal(size=(3, 6, 3)), generator.normal(size=(3, 6))
    alpha, beta1, beta2, lr, steps = 0.3, 0.9, 0.99, 0.05, 4
    run = lamina.Simulation(
        Line(), (torch.from_numpy(xs.reshape(18, 3)), torch.from_numpy(targets.reshape(18))),
        lamina.FedLada(alpha=alpha, beta1=beta1, beta2=beta2, v_init=1e-4, decay=0.0),
        clients=[range(0, 6), range(6, 12), range(12, 18)], batch_size=None, local_steps=steps, lr=lr, loss="mse",
        private=["own"], engine="loop",
    )  # fmt: skip
    run.run(3)

    shared = {"x": np.array([0.5, -0.3]), "v": np.full(2, 1e-4), "g": np.zeros(2)}
    owns = [{"x": np.array([0.2]), "v": np.full(1, 1e-4), "g": np.zeros(1)} for _ in range(3)]
    for _ in range(3):
        deltas, maxima = [], []
        for own, x, target in zip(owns, xs, targets, strict=True):
            start, v, amendment = (np.concatenate([shared[name], own[name]]) for name in ("x", "v", "g"))
            y, m, v_hat = start.copy(), np.zeros(3), v.copy()
            for _ in range(steps):
                gradient = 2 * x.T @ (x @ y - target) / 6
                m = beta1 * m + (1 - beta1) * gradient
                v = beta2 * v + (1 - beta2) * gradient**2
                v_hat = np.maximum(v_hat, v)
                y = y - lr * (alpha * m / np.sqrt(v_hat) + (1 - alpha) * amendment)
            deltas.append((y - start)[:2])
            maxima.append(v_hat[:2])
            own.update(x=y[2:], v=v_hat[2:], g=(start - y)[2:] / (lr * steps))
        moved = np.mean(deltas, 0)
        shared = {"x": shared["x"] + moved, "v": np.mean(maxima, 0), "g": -moved / (lr * steps)}
    np.testing.assert_allclose(run.state.server.x.numpy(), shared["x"], rtol=1e-10)
    for i, own in enumerate(owns):
        np.testing.assert_allclose(run.client_parameters(i)[0].numpy()[2:], own["x"], rtol=1e-10)


def test_private_parts_are_in_no_count_of_bytes():
    row = simulation("fedavg", private=["head.*", "norm.*"]).run(1)[-1]
    assert row["bytes_up"] == row["bytes_down"] == row["clients"] * (5 * 6 + 6) * 8


def test_a_client_that_takes_no_part_keeps_its_part():
    run = simulation("fedlada", participation=0.2)
    before = [run.client_model(i).state_dict() for i in range(5)]
    run.run(1)
    active = set(run.state.clients)
    assert len(active) == 1
    for i in range(5):
        after = run.client_model(i).state_dict()
        names = [name for name, value in after.items() if name.startswith(("head", "norm")) and value.dim()]
        same = [torch.equal(after[name], before[i][name]) for name in names]
        assert not any(same) if i in active else all(same)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_the_shared_model_keeps_the_initial_private_values(engine):
    run = simulation(engine=engine)
    run.run(2)
    start, end = network().state_dict(), run.model.state_dict()
    assert not torch.equal(end["body.weight"], start["body.weight"])
    assert all(torch.equal(end[name], start[name]) for name in start if name.startswith(("head", "norm")))


def test_a_population_ends_as_its_members_alone():
    rates = (0.01, 0.05)
    alone = [simulation("fedlamb", "stacked", lr=lr) for lr in rates]
    together = [simulation("fedlamb", "stacked", lr=lr) for lr in rates]
    lamina.Population(together).run(3)
    for one, other in zip(alone, together, strict=True):
        one.run(3)
        torch.testing.assert_close(client_vectors(other), client_vectors(one), rtol=1e-9, atol=1e-11)


def test_a_run_resumes_with_the_clients_parts(tmp_path):
    def run(out, rounds):
        one = simulation("fedlada", "stacked", out=tmp_path / out)
        one.run(rounds)
        return one

    whole = run("whole", 4)
    run("parts", 2)
    assert torch.equal(client_vectors(run("parts", 4)), client_vectors(whole))
    with pytest.raises(lamina.BadInput, match="private"):
        simulation("fedlada", "stacked", private=["head.*"], out=tmp_path / "whole").run(4)


def test_evaluation_uses_the_clients_own_models():
    labels = torch.cat([(X[list(part)].argmax(1) % 3 + i) % 3 for i, part in enumerate(PARTS)])  # no head suits all
    settings = {"clients": PARTS, "local_test": 0.3, "private": ["head.*"], "participation": 1.0, "lr": 0.1}
    run = lamina.Simulation(network(), (X, labels), "fedavg", **settings)
    row = run.run(3)[-1]
    tests, tested = run.reserved.local_tests, run.reserved.tested
    for prefix, model in (("client_", run.client_model), ("shared_client_", lambda _: run.model)):
        scores = [
            (model(client)(X[part]).argmax(1) == labels[part]).double().mean().item()
            for client, part in zip(tested, tests, strict=True)
        ]
        assert row[f"{prefix}accuracy_mean"] == pytest.approx(np.mean(scores))
        assert row[f"{prefix}accuracy_std"] == pytest.approx(np.std(scores))
    assert (
        "shared_client_accuracy_mean"
        not in lamina.Simulation(network(), (X, labels), "fedavg", **{**settings, "private": []}).evaluate()
    )


@pytest.mark.parametrize("private", [["head.*"], None])
def test_every_clients_figures_are_those_of_the_model_it_uses(private):
    run = simulation(private=private, local_test=0.2, heldout_clients=[1], metrics=["accuracy", "auroc"])
    row = run.run(2)[-1]
    rows = run.evaluate_clients()
    assert [one["client"] for one in rows] == [0, 2, 3, 4]
    for one, test in zip(rows, run.reserved.local_tests, strict=True):
        right = (run.client_model(one["client"])(X[test]).argmax(1) == Y[test]).double().mean().item()
        assert one["accuracy"] == pytest.approx(right)
    assert np.mean([one["accuracy"] for one in rows]) == pytest.approx(row["client_accuracy_mean"])
    assert np.nanmean([one["auroc"] for one in rows]) == pytest.approx(row["client_auroc_mean"])


def test_clients_without_samples_to_evaluate_on_are_refused():
    with pytest.raises(lamina.BadInput, match=r"give local_test=0.2, test data by client, or client_metrics=True"):
        simulation(local_test=None).evaluate_clients()


def test_held_out_clients_see_the_shared_model():
    run = simulation(heldout_clients=[3])
    row = run.run(2)[-1]
    right = (run.model(X[list(PARTS[3])]).argmax(1) == Y[list(PARTS[3])]).double().mean()
    assert row["heldout_accuracy"] == pytest.approx(right.item())


def test_diagnostics_are_refused():
    with pytest.raises(lamina.BadInput, match="one model that all clients share"):
        simulation(diagnostics=["gradient"])


@pytest.mark.parametrize("client", [5, -1, "a", True])
def test_an_unknown_client_is_refused(client):
    with pytest.raises(lamina.BadInput, match=r"there is no client .*0 to 4"):
        simulation().client_model(client)


def test_a_diverging_private_part_is_named():
    with pytest.raises(lamina.Diverged, match="client"):
        simulation("fedavg", "stacked", lr=1e200).run(3)


class Half(NamedTuple):
    v: torch.Tensor


def test_an_algorithm_may_say_which_model_a_client_uses():
    class Slow(lamina.Algorithm):
        def client_init(self, x, layers):
            return Half(x)

        def step(self, local, down, grad, lr, layers):
            return LocalModel(local.y - lr * grad)

        def finish(self, local, down, client, info):
            return super().finish(local, down, client, info)[0], Half((client.v + local.y) / 2)

        def update(self, server, up, info):
            return Model(server.x + up.delta)

        def client_model(self, x, client):
            return client.v

    run = simulation(lamina.algorithm("slow_one", title="Slow", lr=0.1)(Slow)(), private=[], local_test=0.3)
    row = run.run(2)[-1]
    assert torch.equal(run.client_parameters(0)[0], run.state.clients[0].v)
    assert {"client_accuracy_mean", "shared_client_accuracy_mean"} <= set(row)
    registry().pop("slow_one", None)


def seeded(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net().double()


def test_members_of_a_population_start_from_their_own_private_values():
    settings = {"clients": PARTS, "batch_size": 8, "lr": 0.02, "private": ["head.*", "norm.*"], "engine": "stacked"}
    alone, together = (
        [lamina.Simulation(seeded(seed), (X, Y), "fedlada", **settings) for seed in (5, 6)] for _ in range(2)
    )
    lamina.Population(together).run(2)
    for one, other in zip(alone, together, strict=True):
        one.run(2)
        torch.testing.assert_close(client_vectors(other), client_vectors(one), rtol=1e-9, atol=1e-11)


def test_a_checkpoint_holds_where_private_parts_start(tmp_path):
    """A script may restore it into a module with other initial weights, as with shared parameters."""
    runs = [
        lamina.Simulation(seeded(seed), (X, Y), "fedlada", clients=PARTS, batch_size=8, lr=0.02, participation=0.2,
                          private=["head.*", "norm.*"], seed=1)
        for seed in (5, 6)
    ]  # fmt: skip
    runs[0].run(1)
    runs[0].save(tmp_path)
    runs[1].restore(tmp_path)
    for run in runs:
        run.run(3)
    assert torch.equal(client_vectors(runs[0]), client_vectors(runs[1]))
    assert all(torch.equal(a, b) for a, b in zip(*(run.model.state_dict().values() for run in runs), strict=True))


def test_client_metrics_are_those_of_the_clients_own_models():
    shuffled = [list(reversed(part)) for part in reversed(PARTS)]  # not in the order of the samples
    run = simulation("fedavg", clients=shuffled, client_metrics=True, participation=1.0, lr=0.2)
    row = run.run(3)[-1]
    scores = [
        float((run.client_model(i)(X[part]).argmax(1) == Y[part]).double().mean()) for i, part in enumerate(shuffled)
    ]
    assert row["client_accuracy"] == pytest.approx(np.mean(scores))
    assert row["client_accuracy_worst10"] == pytest.approx(min(scores))
    assert row["client_accuracy_std"] == pytest.approx(np.std(scores))
