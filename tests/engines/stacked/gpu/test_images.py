"""One kernel prepares images as `lamina.data.feed` does, to the last bit of float32."""

import pytest
import torch

from lamina.data.feed import Augment, training_inputs

if not torch.cuda.is_available():
    pytest.skip("no GPU here", allow_module_level=True)

from lamina.engines.stacked.gpu.images import prepare_images

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
    on_gpu = data.cuda(), index.cuda(), None if keys is None else keys.cuda()
    for dtype in (torch.float32, torch.bfloat16):
        images = prepare_images(*on_gpu, augmentation, mean, std, dtype)
        assert torch.equal(images.cpu(), expected.to(dtype))
