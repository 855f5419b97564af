"""The clock's seconds are those of a real federation whose nodes have slow links."""

import pytest

from federation.harness import NODES, Job, Say, left
from federation.throttle import Throttled
from lamina import Clock
from lamina.experiment.config import parse

ROUNDS = 2  # the first waits for the nodes to connect, and is not measured
HIDDEN = 20_000  # 1.5 million parameters, 6 MB: FedLADA sends three times as much down, and twice as much up
NODE_LINKS = {"download": [16.0, 10.0, 8.0], "upload": [5.0, 8.0, 3.2]}
CLOCKS = {
    "own links": Clock(**NODE_LINKS),
    "shared link": Clock(**NODE_LINKS, server_link=12.0),
}


def experiment(clock):
    return parse(
        {
            "data": {"name": "digits", "clients": NODES, "partition": {"name": "iid"}},
            "model": {"name": "mlp", "hidden": HIDDEN},
            "algorithm": {"name": "fedlada"},
            "train": {"rounds": ROUNDS, "participation": 1.0, "batch_size": "full"},
            "run": {"device": "cpu", "evaluate_every": ROUNDS},
            **({} if clock is None else {"clock": clock.record()}),
        }
    )


def measure(federation, clock, folder):
    """Run a federation on links of a clock; return its rounds and the seconds of the last."""
    federation.follow_clock(clock)
    job = Job(federation, experiment(clock), folder, quorum=1.0, deadline=150)
    job.wait()
    rows = job.rows()
    return rows, rows[-1]["seconds"]


# On a shared link the nodes' own links count as well, so this one alone is tested by default.
@pytest.mark.parametrize("name", [pytest.param("own links", marks=pytest.mark.long), "shared link"])
@pytest.mark.seconds(600)
def test_a_round_takes_what_the_clock_says(name, tmp_path):
    federation = Throttled(tmp_path / "federation", NODES, say=Say())
    with federation:
        # what Flower's processes and its polling take besides, measured without slow links: the clock's `overhead`
        _, overhead = measure(federation, None, tmp_path / "free")
        rows, measured = measure(federation, CLOCKS[name], tmp_path / "slow")
        predicted = rows[-1]["clock_seconds"] - rows[-2]["clock_seconds"]
        print(f"{name}: {measured:.1f} s a round, predicted {overhead:.1f} + {predicted:.1f} s", flush=True)
        assert predicted > 0.5 * overhead  # else the links make no difference
        assert measured == pytest.approx(overhead + predicted, rel=0.2)
    assert left(federation) == []
