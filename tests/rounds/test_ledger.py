"""The ledger: bytes of a payload, fields that clients cache, and the cost of an algorithm in models."""

from typing import NamedTuple

import numpy as np
import torch

from lamina.algorithms import FedAvg
from lamina.rounds.ledger import Ledger, WireCost, payload_bytes, upload_bytes, wire_cost


class Payload(NamedTuple):
    x: torch.Tensor
    v: torch.Tensor | None = None


def test_a_field_counts_by_its_type_and_none_is_not_sent():
    both = Payload(torch.zeros(3), torch.zeros(3, dtype=torch.float64))
    assert payload_bytes(both) == {"x": 12, "v": 24}
    assert upload_bytes(both) == 36
    assert payload_bytes(Payload(torch.zeros(3))) == {"x": 12}


def test_a_cached_field_is_sent_once_per_version_to_each_client():
    ledger, payload = Ledger(4), Payload(torch.zeros(3), torch.zeros(2))
    assert ledger.down(payload, {"v": 0}, np.array([0, 1])) == 2 * 12 + 2 * 8
    assert ledger.down(payload, {"v": 0}, np.array([1, 2])) == 2 * 12 + 8  # client 1 holds version 0
    assert ledger.down(payload, {"v": 1}, np.array([0, 1])) == 2 * 12 + 2 * 8
    assert ledger.down(payload, {"v": 1}, np.array([2, 3])) == 2 * 12 + 2 * 8  # absent when version 1 was made
    assert ledger.down(payload, {"v": 1}, np.arange(4)) == 4 * 12


def test_a_field_without_a_version_is_sent_in_every_round():
    ledger, payload = Ledger(2), Payload(torch.zeros(3), torch.zeros(2))
    assert [ledger.down(payload, {}, np.arange(2)) for _ in range(2)] == [40, 40]


def test_fedavg_costs_one_model_each_way_and_keeps_nothing():
    assert wire_cost(FedAvg()) == WireCost(down=1.0, up=1.0, client_state=0.0)
