"""One kernel prepares images as `lamina.data.feed` does, bit for bit. Needs Triton: a GPU, or its interpreter."""

import os

import pytest
import torch

from lamina.data.feed import Augment, training_inputs

pytest.importorskip("triton")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from lamina.engines.stacked.gpu.images import prepare_images

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
AUGMENTATIONS = [
    None,
    Augment(),
    Augment(flip=False),
    Augment(pad=0),
    Augment(pad=0, flip=False),
    Augment(crop_probability=0.3),
    Augment(pad=2, fill="mean"),
    Augment(crop_probability=0.5, flip=False, fill="mean"),
]


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (2, 5, 70), (3, 17, 23), (4, 1, 1)], ids=str)
@pytest.mark.parametrize("augmentation", AUGMENTATIONS, ids=str)
@pytest.mark.parametrize("is_normalised", [True, False])
def test_images_are_those_of_the_feed(shape, augmentation, is_normalised):
    torch.manual_seed(0)
    data = torch.randint(0, 256, (20, *shape), dtype=torch.uint8)
    index, keys = torch.randint(0, 20, (3, 7)), torch.randint(0, 2**53, (3, 7))
    keys = None if augmentation is None else keys
    mean = tuple(0.1 * (i + 1) for i in range(shape[0])) if is_normalised else None
    std = tuple(0.2 + 0.1 * i for i in range(shape[0])) if is_normalised else None
    expected = training_inputs(data[index], keys, augmentation, mean, std)
    given = (None if value is None else value.to(DEVICE) for value in (data, index, keys))
    images = prepare_images(*given, augmentation, mean, std, torch.float32)
    assert torch.equal(images.cpu(), expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter does not round to bfloat16, it cuts off")
def test_images_are_rounded_once():
    data = torch.randint(0, 256, (20, 3, 9, 9), dtype=torch.uint8)
    index, mean, std = torch.randint(0, 20, (3, 7)), (0.1, 0.2, 0.3), (0.2, 0.3, 0.4)
    images = prepare_images(data.to(DEVICE), index.to(DEVICE), None, None, mean, std, torch.bfloat16)
    assert torch.equal(images.cpu(), training_inputs(data[index], None, None, mean, std).bfloat16())
