"""What samples look like, as JSON, and new inputs in their form."""

import json

import pytest
import torch

import lamina
from lamina.data.samples import describe_samples, in_form_of, new_inputs, sample_like
from lamina.objective.batch import map_batch

IMAGES = torch.randint(0, 256, (4, 1, 3, 3), dtype=torch.uint8)
NUMBERS = torch.randn(4, 2)


@pytest.mark.parametrize(
    "data",
    [
        lamina.Dataset(IMAGES, [0, 2, 1, 0], mean=(0.5,), std=(0.25,), name="tiles"),
        lamina.Dataset((NUMBERS, torch.tensor([[1], [2], [3], [4]])), ["b", "a", "b", "a"]),
        lamina.Dataset({"ids": [[1, 2], [3], [4], [5]], "flags": torch.ones(4, 3, dtype=torch.bool)}, NUMBERS),
        lamina.Dataset(NUMBERS, torch.randint(0, 3, (4, 5)), classes=7),
    ],
    ids=["images", "tuple", "dict", "maps"],
)
def test_a_described_sample_is_described_in_the_same_way(data):
    facts = json.loads(json.dumps(describe_samples(data)))
    like = sample_like(facts)
    assert json.loads(json.dumps(describe_samples(like))) == facts
    shapes = map_batch(lambda values: (values.shape[1:], values.dtype), data.x)
    assert map_batch(lambda values: (values.shape[1:], values.dtype), like.x) == shapes
    assert len(like) == 1


def test_new_images_take_the_normalisation_and_grey_ones_their_channel():
    like = sample_like(describe_samples(lamina.Dataset(IMAGES, [0, 2, 1, 0], mean=(0.5,), std=(0.25,))))
    new = new_inputs(IMAGES[:2, 0].numpy(), like)
    assert (new.mean, new.std, len(new)) == ((0.5,), (0.25,), 2)
    assert torch.equal(new.x, IMAGES[:2])


def test_targets_keep_the_training_datas_numbers():
    like = sample_like(describe_samples(lamina.Dataset(NUMBERS, ["a", "b", "c", "a"])))
    assert in_form_of(lamina.Dataset(NUMBERS[:2], ["c", "a"]), like).y.tolist() == [2, 0]
    with pytest.raises(lamina.BadInput, match="'d'"):
        in_form_of(lamina.Dataset(NUMBERS[:1], ["d"]), like)


@pytest.mark.parametrize(
    ("x", "problem"),
    [
        (5, "of type int"),
        (torch.randn(2), r"one sample of shape \[2\]"),
        (torch.randn(3, 2, 2), r"the model takes \[samples, 2\]"),
        ({"a": NUMBERS}, "of type dict"),
        (["a", "b"], "holds text"),
        ([], "empty"),
    ],
)
def test_inputs_of_another_kind_are_refused(x, problem):
    with pytest.raises(lamina.BadInput, match=problem):
        new_inputs(x, sample_like(describe_samples(lamina.Dataset(NUMBERS, [0, 1, 0, 1]))))
