"""The flat vector and its layers."""

import pytest
import torch
from torch import nn

from lamina import BadInput, Layers


def model():
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 4))


def test_flatten_and_unflatten_are_inverse_and_keep_leading_axes():
    layers = Layers.of(model())
    flat = torch.randn(5, 2, layers.size)
    named = layers.unflatten(flat)
    assert named["0.weight"].shape == (5, 2, 3, 2, 3, 3)
    assert torch.equal(layers.flatten(named), flat)


def test_unflatten_gives_views():
    layers = Layers.of(model())
    flat = torch.zeros(layers.size)
    layers.unflatten(flat)["3.bias"].fill_(1.0)
    assert flat.sum() == 4


@pytest.mark.parametrize("by", ["tensor", "module", "model"])
def test_norms_are_those_of_the_named_tensors(by):
    net = model()
    layers = Layers.of(net)
    stacked = torch.stack([layers.flatten(dict(net.named_parameters())).detach() * s for s in (1.0, -2.0)])
    norms = layers.norms(stacked, by)
    for i, name in enumerate(layers.group_names(by)):
        parts = [p for n, p in net.named_parameters() if name in (n, n.rpartition(".")[0]) or by == "model"]
        expected = torch.cat([p.flatten() for p in parts]).norm()
        assert torch.allclose(norms[:, i], torch.stack([expected, 2 * expected]))
    spread = layers.spread(norms, by)
    assert spread.shape == stacked.shape
    # summing s^2 over the vector counts each squared norm once per element
    sizes = [sum(p.numel() for n, p in net.named_parameters() if g in (n, n.rpartition(".")[0]) or by == "model")
             for g in layers.group_names(by)]  # fmt: skip
    assert torch.allclose((spread**2).sum(-1), (norms**2 * torch.tensor(sizes)).sum(-1))


def test_first_nonfinite_names_the_layer():
    layers = Layers.of(model())
    flat = torch.zeros(layers.size)
    assert layers.first_nonfinite(flat) is None
    layers.unflatten(flat)["1.bias"][2] = float("inf")
    assert layers.first_nonfinite(flat) == "1.bias"


def test_frozen_parameters_and_tied_weights():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[0].bias.requires_grad_(False)
    net[1].weight = net[0].weight
    assert Layers.of(net).names == ("0.weight", "1.bias")


def test_no_trainable_parameter_is_said():
    with pytest.raises(BadInput, match="no trainable parameter"):
        Layers.of(nn.ReLU())


SHAPES = {
    "in": (4, 3),
    "bias": (4,),
    "conv": (2, 3, 2, 2),
    "tokens": (2, 3, 5),
    "other": (4, 3),
    "cube": (2, 1, 2, 2, 3),
}


def test_functions_of_matrices_get_all_tensors_with_two_axes_or_more():
    layers, seen = Layers(SHAPES), {}

    def note(matrices, shape):
        seen[shape] = tuple(matrices.shape)
        return 2 * matrices

    u = torch.randn(5, 2, layers.size)  # clients and experiments
    doubled = layers.unflatten(layers.map_matrices(note, u))
    assert seen == {(4, 3): (20, 4, 3), (2, 3, 2, 2): (10, 2, 12), (2, 3, 5): (20, 3, 5), (2, 1, 2, 2, 3): (10, 2, 12)}
    for name, values in layers.unflatten(u).items():
        torch.testing.assert_close(doubled[name], values if name == "bias" else 2 * values)


def test_every_matrix_comes_back_to_its_place():
    layers = Layers(SHAPES)
    u = torch.randn(3, layers.size)
    assert torch.equal(layers.map_matrices(lambda matrices, shape: matrices, u), u)
    rows = layers.unflatten(layers.map_matrices(lambda matrices, shape: matrices.cumsum(1), u))
    for name, values in layers.unflatten(u).items():
        whole = values if name == "tokens" else values.reshape(3, values.shape[1], -1)
        expected = values if name == "bias" else whole.cumsum(-2).reshape(values.shape)
        torch.testing.assert_close(rows[name], expected)


def test_a_choice_by_tensor():
    layers = Layers(SHAPES)
    chosen = layers.unflatten(layers.where_matrix(torch.ones(3, layers.size), torch.zeros(3, layers.size)))
    assert {name for name, values in chosen.items() if values.all()} == set(SHAPES) - {"bias"}
    hidden = layers.unflatten(layers.where_matrix(torch.ones(layers.size), torch.zeros(layers.size), "hidden"))
    assert {name for name, values in hidden.items() if values.all()} == {"conv", "tokens", "other"}


def test_parts_know_which_matrices_are_the_first_and_the_last():
    layers = Layers(SHAPES)
    assert layers.matrices("hidden") == ("conv", "tokens", "other")
    assert sum((part.matrices("hidden") for part in layers.parts()), ()) == ("conv", "tokens", "other")
    for part, name in zip(layers.parts(), SHAPES, strict=True):
        assert part.matrices() == (() if name == "bias" else (name,))
