"""The objective: a module's outputs, loss and gradient as functions of the flat parameter vector."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from kinds import draw, integers
from lamina import BadInput
from lamina.objective.objective import ONE_SAMPLE, Objective, buffer_bytes, copy_module

X, Y = draw(6, 4), integers(3, 6)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()


def expected_gradient(module, weights=None):
    """Return torch's own gradient of the mean loss, or of the weighted sum, as one vector."""
    losses = F.cross_entropy(module(X), Y, reduction="none")
    loss = losses.mean() if weights is None else losses @ weights
    return torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(module.parameters()))]), loss.detach()


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 0.0, 1.0, 2.0, 0.25, 0.25], dtype=torch.float64)])
def test_the_gradient_is_torchs(weights):
    objective = Objective(network())
    expected, expected_loss = expected_gradient(network(), weights)
    gradient, loss = objective.gradient(objective.start, dict(objective.buffers), X, Y, weights=weights)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(loss, expected_loss)
    parameters = objective.layers.unflatten(objective.start)
    named, loss = objective.gradient_at(parameters, dict(objective.buffers), X, Y, weights=weights)
    torch.testing.assert_close(objective.layers.flatten(named), expected)
    torch.testing.assert_close(loss, expected_loss)


def test_training_updates_the_given_buffers_and_never_the_module():
    module = network()
    before, plain = copy.deepcopy(module.state_dict()), network()
    objective = Objective(module)
    buffers = {name: buffer.clone() for name, buffer in objective.buffers.items()}
    torch.testing.assert_close(objective.outputs(objective.start, buffers, X, train=True), plain(X))
    torch.testing.assert_close(buffers, dict(plain.named_buffers()))
    torch.testing.assert_close(objective.outputs(objective.start, buffers, X, train=False), plain.eval()(X))
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    written = objective.module_at(objective.start + 1, buffers)
    assert written is module
    torch.testing.assert_close(module[3].bias.detach(), before["3.bias"] + 1)
    assert torch.equal(module[1].running_mean, buffers["1.running_mean"])


def test_a_layer_that_the_user_put_into_evaluation_mode_stays_there():
    module = network()
    module[1].eval()
    objective = Objective(module)
    buffers = dict(objective.buffers)
    for train in (False, True, False):
        objective.outputs(objective.start, buffers, X, train=train)
    assert torch.equal(buffers["1.running_mean"], torch.zeros(5).double())
    assert objective.in_type(torch.float32).always_evaluated == {"1"}


def test_tied_weights_are_trained_as_one():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
    module[1].weight = module[0].weight
    objective = Objective(module, "mse")
    assert (objective.layers.names, objective.tied) == (("0.weight",), {"0.weight"})
    doubled = objective.outputs(2 * objective.start, {}, X, train=True)
    torch.testing.assert_close(doubled, 4 * module(X))


def test_elements_whose_gradient_is_rounding_are_set_to_zero():
    objective = Objective(network())
    kept = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    objective.kept_gradients = {"3.bias": kept}
    expected, _ = expected_gradient(network())
    expected[-2] = 0
    gradient, _ = objective.gradient(objective.start, dict(objective.buffers), X, Y)
    torch.testing.assert_close(gradient, expected)
    parameters = objective.layers.unflatten(objective.start)
    named, _ = objective.gradient_at(parameters, dict(objective.buffers), X, Y)
    torch.testing.assert_close(objective.layers.flatten(named), expected)


def changed(change):
    module = network()
    change(module)
    return Objective(module)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: Objective(nn.Linear(4, 3).double()), "different shapes"),
        (lambda: Objective(network().float()), "different types"),
        (lambda: changed(lambda module: setattr(module[1], "eps", 0.1)), "layers or attributes"),
        (lambda: changed(lambda module: module[1].eval()), "evaluation mode"),
        (lambda: Objective(network(), "nll"), "different losses"),
        (lambda: changed(lambda module: module[1].running_mean.add_(1)), "different buffers"),
    ],
)
def test_objectives_that_differ_in_more_than_weights_say_how(other, message):
    assert message in Objective(network()).difference(other())


def test_objectives_that_differ_in_weights_do_not_differ():
    with torch.no_grad():
        other = changed(lambda module: module[0].weight.add_(1))
    assert Objective(network()).difference(other) == ""


def test_frozen_parameters_are_counted():
    module = network()
    assert Objective(module).frozen_note() == ""
    module[0].requires_grad_(False)
    assert Objective(module).frozen_note().startswith("trains 28 of 53 parameters")
    other = copy.deepcopy(module)
    other[0].bias.add_(1)
    assert "different frozen parameters" in Objective(module).difference(Objective(other))


class Reentrant(nn.Linear):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Objective(nn.LazyLinear(3)), "has no shape yet"),
        (lambda: Objective(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())), "must have one floating dtype"),
        (lambda: gradient(Objective(network()), X[:1], Y[:1]), ONE_SAMPLE),
        (
            lambda: gradient(Objective(nn.Sequential(nn.Linear(4, 4), Reentrant(4, 3)).double()), X, Y),
            "use_reentrant=False",
        ),
        (
            lambda: gradient(Objective(network(), lambda outputs, y: outputs[:, 0].detach()), X, Y),
            "there is no gradient",
        ),
        (lambda: Objective(network().float()).refuse_rate(1e39), r"lr = 1e\+39 is more than a float32 can hold"),
    ],
    ids=["lazy", "types", "one sample", "reentrant", "no gradient", "rate"],
)
def test_what_cannot_be_trained_is_refused(make, message):
    with pytest.raises(BadInput, match=message):
        make()


def gradient(objective, x, y):
    return objective.gradient(objective.start, dict(objective.buffers), x, y)


def test_a_module_that_has_run_can_be_copied():
    module = nn.utils.spectral_norm(nn.Linear(4, 3)).double()
    module(X).sum()  # leaves a weight of the graph in an attribute, which torch does not copy
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(module)
    copied = copy_module(module)
    assert torch.equal(copied.weight, module.weight)
    assert copied.weight_orig is not module.weight_orig


def test_only_floating_buffers_are_sent():
    assert buffer_bytes(Objective(network()).buffers) == 2 * 5 * 8  # not the number of batches
