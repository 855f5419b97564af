"""The clock's seconds are those of a real federation whose nodes have slow links."""

import pytest

from federation.harness import NODES, Job, Say, left
from federation.throttle import Throttled
from lamina import Clock
from lamina.experiment.config import parse

# The first round waits for the nodes to connect, the second is measured on fast links and the third on slow ones.
FAST, SLOW = 2, 3
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
            "train": {"rounds": SLOW, "participation": 1.0, "batch_size": "full"},
            "run": {"device": "cpu"},
            "clock": clock.record(),
        }
    )


# On a shared link the nodes' own links count as well, so this one alone is tested by default.
@pytest.mark.parametrize("name", [pytest.param("own links", marks=pytest.mark.long), "shared link"])
@pytest.mark.seconds(600)
def test_a_round_takes_what_the_clock_says(name, tmp_path):
    federation, clock = Throttled(tmp_path / "federation", NODES, say=Say()), CLOCKS[name]
    with federation:
        job = Job(federation, experiment(clock), tmp_path, quorum=1.0, deadline=150)

        def slow_down():
            """Slow the links down before the nodes ask for tasks of the last round, which they do every 3 seconds."""
            if len(job.rows()) == FAST:
                federation.follow_clock(clock)

        job.wait(slow_down, every=0.05)
        rows = job.rows()
        # what Flower's processes and its polling take besides: the clock's `overhead`
        overhead, measured = (rows[number - 1]["seconds"] for number in (FAST, SLOW))
        predicted = rows[SLOW - 1]["clock_seconds"] - rows[FAST - 1]["clock_seconds"]
        print(f"{name}: {measured:.1f} s a round, predicted {overhead:.1f} + {predicted:.1f} s", flush=True)
        assert predicted > 0.5 * overhead  # else the links make no difference
        assert measured == pytest.approx(overhead + predicted, rel=0.2)
    assert left(federation) == []
