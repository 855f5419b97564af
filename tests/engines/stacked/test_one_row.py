"""One row: what its client kept, and the upload of a rank without clients."""

import torch

from lamina.algorithms import FedLada
from lamina.engines.stacked.one_row import empty_upload, model_of, record_of
from lamina.engines.stacked.rows import Member, RoundInProgress, Row
from small_simulations import simulation


def test_a_rank_without_clients_knows_what_the_others_send():
    run = simulation("mlp", FedLada(), "stacked", private=["*bias*"])
    member = Member(run.algorithm, run.state, run.next_plan(), run.protocol)
    up, trust = empty_upload(run.objective, member, run.algorithm.broadcast(run.state.server, None), False)
    sent = [value for value in up if value is not None]
    assert {value.shape for value in sent} == {run.state.server.x.shape}
    assert not any(value.any() for value in sent)
    assert len(trust) == 0


def test_a_row_sees_what_its_client_has_kept():
    run = simulation("mlp", FedLada(), "stacked", private=["*bias*"])
    run.run(1)
    plan = run.plan.round(2)
    now = RoundInProgress([Member(run.algorithm, run.state, plan, run.protocol)], [])
    for c, client in enumerate(plan.cohort.tolist()):
        x, _ = model_of(run.objective, now, Row(0, c, 1.0))
        assert torch.equal(x, run.client_parameters(client)[0])
        if client in run.state.clients:
            assert record_of(run.objective, now, Row(0, c, 1.0)) is run.state.clients[client]
