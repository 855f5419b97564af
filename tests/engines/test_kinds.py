"""Every kind of input, target, loss and layer gives the same trajectory in the loop, the stacked engine and vmap."""

import pytest
import torch

import lamina
from kinds import KINDS, TRANSFORMERS, simulation

NO_VMAP = ("recurrent",)  # torch has no rule for an LSTM


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind in TRANSFORMERS else ()) for kind in KINDS]
)
def test_all_engines_agree(kind):
    engines = ("loop", "stacked") if kind in NO_VMAP else ("loop", "stacked", "captured")
    runs = [simulation(kind, engine) for engine in engines]
    for run in runs:
        run.run(2)
    expected = runs[0]
    for run in runs[1:]:
        torch.testing.assert_close(run.state.server.x, expected.state.server.x, rtol=1e-9, atol=1e-11)
        for row, own in zip(run.history, expected.history, strict=True):
            assert {k: v for k, v in row.items() if "seconds" not in k} == {
                k: pytest.approx(v, rel=1e-9, abs=1e-12) for k, v in own.items() if "seconds" not in k
            }
    assert not torch.equal(expected.state.server.x, expected.objective.start)


@pytest.mark.parametrize("kind", ["dict", "dict_targets", "per_batch"])
def test_the_gradients_over_all_data_agree(kind):
    runs = [simulation(kind, engine, "mime", participation=1.0) for engine in ("loop", "stacked")]
    for run in runs:
        run.run(2)
    torch.testing.assert_close(runs[1].state.server.x, runs[0].state.server.x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", ["dict", "dict_targets"])
def test_a_checkpoint_is_restored_and_refuses_other_data(tmp_path, kind):
    run = simulation(kind)
    run.run(1)
    run.save(tmp_path)
    again = simulation(kind)
    again.restore(tmp_path)
    assert torch.equal(again.state.server.x, run.state.server.x)
    with pytest.raises(lamina.BadInput, match="of another run"):
        simulation("tuple").restore(tmp_path)


@pytest.mark.parametrize("kind", ["dict", "dict_targets"])
def test_simulations_with_dict_inputs_or_targets_form_a_population(kind):
    alone = simulation(kind, lr=0.01)
    together = lamina.Population([simulation(kind, lr=lr) for lr in (0.01, 0.1)])
    alone.run(2)
    together.run(2)
    torch.testing.assert_close(
        together.simulations[0].state.server.x, alone.state.server.x, rtol=1e-9, atol=1e-11
    )  # fmt: skip
