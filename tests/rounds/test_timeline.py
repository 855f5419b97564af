"""The seconds of a run's rounds, from its plan and its bytes."""

import numpy as np
import pytest

import lamina
from lamina.base import rng
from lamina.rounds.clock import Clock
from lamina.rounds.ledger import Ledger
from lamina.rounds.settings import TrainSettings
from lamina.rounds.timeline import Timeline

ONE_SECOND_STEPS = Clock(step_seconds=1.0, latency=100.0)


def timeline(algorithm, clock=ONE_SECOND_STEPS, clients=10, **settings):
    return Timeline(clock, TrainSettings(0.1, **{"batch_size": 4, "epochs": 2} | settings), algorithm, clients)


def row(number, down=0, up=0):
    return {"round": number, "bytes_down": down, "bytes_up": up}


def test_rounds_add_up_and_wait_for_the_slowest():
    clock = Clock(step_seconds=[1.0, 2.0, 0.5], download=[8.0, 8.0, 1.0], upload=8.0)
    line = timeline(lamina.FedAvg(), clock, clients=3)
    # 2 MB down and 4 MB up for two clients: 1 s + 3 * 2 s + 2 s, and 8 s + 2 * 0.5 s + 2 s
    cohort, sizes, steps = np.array([1, 2]), np.array([12, 8]), np.array([3, 2])
    assert line.add(row(1, 2_000_000, 4_000_000), cohort, sizes, steps) == pytest.approx(11.0)
    # then client 0 alone: 1 s + 4 * 1 s + 1 s
    assert line.add(row(2, 1_000_000, 1_000_000), np.array([0]), np.array([16]), np.array([4])) == pytest.approx(17.0)


@pytest.mark.parametrize(
    ("algorithm", "gradients", "exchanges"),
    [
        ("fedavg", 6, 1),
        ("scaffold", 6, 1),
        ("mimelamb", 6 + 3, 1),  # a gradient over all of 11 samples is three batches of four
        ("mimelamb, control", 2 * 6 + 3, 2),  # each gradient also at x; the server first collects full gradients
    ],
)
def test_extra_passes_count(algorithm, gradients, exchanges):
    name, _, control = algorithm.partition(", ")
    made = lamina.create(name, **({"control_variate": True} if control else {}))
    seconds = timeline(made).add(row(1), np.array([0]), np.array([11]), np.array([6]))  # two passes over 11 samples
    assert seconds == gradients + 100 * exchanges


class Twice(lamina.FedAvg):
    """FedAvg with a second gradient in every step."""

    def needs(self, round):
        return lamina.Needs(second_gradient=True)


def test_second_gradients_count():
    assert timeline(Twice()).add(row(1), np.array([0]), np.array([11]), np.array([6])) == 12 + 100


def test_clients_that_keep_a_field_download_less():
    """With lazy synchronisation, who receives what follows from the rounds before: compare with a ledger's memory."""
    algorithm, clients = lamina.FedLamb(sync_every=3), 12
    line, ledger, mixed = timeline(algorithm, clients=clients), Ledger(clients), 0
    x, v_hat = 1000, 700  # bytes; any
    for number in range(1, 30):
        cohort = rng.sample(rng.key(0, "test", number), clients, 5)
        version = algorithm.down_versions(number)["v_hat"]
        held = ledger.held.setdefault("v_hat", np.full(clients, -1))
        expected = x + v_hat * (held[cohort] != version)
        held[cohort] = version
        np.testing.assert_allclose(line.downloads(row(number, int(expected.sum())), cohort), expected)
        mixed += len(set(expected.tolist())) > 1
    assert mixed > 5  # in these rounds the mean would have been wrong


def test_a_resumed_timeline_continues():
    algorithm, rows, cohorts = lamina.FedLamb(sync_every=4), [], []
    whole = timeline(algorithm, Clock(download=1.0, upload=1.0))
    amounts = np.array([8, 8]), np.array([4, 4])
    for number in range(1, 9):
        cohorts.append(rng.sample(rng.key(0, "test", number), 10, 2))
        rows.append(row(number, 10**6 * (4 if number == 1 else 3), 10**6))
        rows[-1]["clock_seconds"] = whole.add(rows[-1], cohorts[-1], *amounts)
    resumed = timeline(algorithm, Clock(download=1.0, upload=1.0))
    resumed.resume(rows[:5], cohorts[:5], 5)
    for number in range(5, 8):
        assert resumed.add(rows[number], cohorts[number], *amounts) == rows[number]["clock_seconds"]
