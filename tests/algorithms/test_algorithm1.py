"""Lazy synchronisation of the second moment: when it happens, what it costs, and which version a client holds."""

from __future__ import annotations

import pytest

from lamina.rounds import ledger
from paper_problem import BYTES, make, simulate


@pytest.mark.parametrize("name", ["fedams", "fedlamb", "mime", "mimelamb"])
def test_the_second_moment_is_synchronised_in_every_third_round(name: str) -> None:
    lazy = make(name, {"sync_every": 3})
    assert [r for r in range(1, 8) if lazy.is_sync(r)] == [3, 6]
    assert [lazy.down_versions(r)["v_hat"] for r in range(1, 8)] == [0, 0, 0, 1, 1, 1, 2]
    assert lazy.cycle == 3
    assert (make(name).down_versions(5), make(name).is_sync(5)) == ({}, True)


def test_the_paper_counts_no_second_moment_in_rounds_without_synchronisation() -> None:
    lazy = make("fedlamb", {"sync_every": 2})
    assert [lazy.paper_models(r) for r in (1, 2, 3, 4)] == [1, 2, 1, 2]


@pytest.mark.parametrize("name", ["fedams", "fedlamb", "mime", "mimelamb"])
@pytest.mark.parametrize("every", [2, 3])
def test_lazy_synchronisation_bytes(name: str, every: int) -> None:
    """Up: x always, v (or G) in rounds divisible by Z. Down: x always, v_hat to those who hold another version (A16).

    Before round r the server has updated v_hat floor((r - 1) / Z) times; that count is the version.
    """
    simulation = simulate(make(name, {"sync_every": every}))
    history, held, late = simulation.run(10), {}, 0
    for r, row in enumerate(history, 1):
        cohort = simulation.plan.cohort(r).tolist()
        version = (r - 1) // every
        stale = [i for i in cohort if held.get(i) != version]
        late += sum(i in held for i in stale) if (r - 1) % every else 0
        held |= dict.fromkeys(cohort, version)
        assert row["bytes_down"] == (len(cohort) + len(stale)) * BYTES
        assert row["bytes_up"] == (len(cohort) + len(cohort) * (r % every == 0)) * BYTES
    assert late > 0, "no client was late to a synchronisation: the case tests nothing"


@pytest.mark.parametrize("name", ["fedams", "fedlamb", "mime", "mimelamb"])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_lazy_synchronisation_cost_at_best(name: str, every: int) -> None:
    """A client always active receives v_hat once and sends v once in Z rounds: 1 + 1/Z each way."""
    cost = ledger.wire_cost(make(name, {"sync_every": every}))
    assert (cost.down, cost.up) == pytest.approx((1 + 1 / every, 1 + 1 / every), rel=1e-12)
