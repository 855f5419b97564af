"""The feed: crops and flips against a naive version, normalisation against arithmetic by hand."""

import numpy as np
import pytest
import torch

from lamina.base import rng
from lamina.base.errors import BadInput
from lamina.data.feed import Augment, augment, prepare, training_inputs


def words(seed: int, *shape: int) -> torch.Tensor:
    counters = torch.arange(int(np.prod(shape))).reshape(shape)
    return rng.bits(rng.key(seed, "test-feed"), counters)


def images(*shape: int) -> torch.Tensor:
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def every_crop(image: torch.Tensor, pad: int, flip: bool) -> dict[tuple[int, int, bool], torch.Tensor]:
    """All results torchvision's RandomCrop(padding=pad) + RandomHorizontalFlip can give for one image."""
    height, width = image.shape[-2:]
    padded = torch.nn.functional.pad(image, (pad, pad, pad, pad))
    crops = {}
    for top in range(2 * pad + 1):
        for left in range(2 * pad + 1):
            crop = padded[:, top : top + height, left : left + width]
            crops[top, left, False] = crop
            if flip:
                crops[top, left, True] = crop.flip(-1)
    return crops


@pytest.mark.parametrize(("pad", "flip"), [(1, True), (2, False), (0, True)])
def test_every_crop_and_flip_is_right_and_equally_likely(pad, flip):
    image = images(3, 5, 7)
    crops = every_crop(image, pad, flip)
    n = 400 * len(crops)
    changed = augment(image.expand(n, 3, 5, 7), words(1, n), pad, flip)
    seen = {which: int((changed == crop).flatten(1).all(1).sum()) for which, crop in crops.items()}
    assert sum(seen.values()) == n  # each result is one of them, and they are all different
    # Binomial with mean 400 and standard deviation below 20: five of them either way.
    assert all(300 < count < 500 for count in seen.values()), seen


def test_crop_alone_and_flip_alone_are_independent():
    image = images(1, 4, 4)
    n = 4000
    changed = augment(image.expand(n, 1, 4, 4), words(2, n), 1, True)
    crops = every_crop(image, 1, True)
    top_and_flipped = sum(
        int((changed == crop).flatten(1).all(1).sum())
        for (top, _, mirrored), crop in crops.items()
        if top == 0 and mirrored
    )
    assert abs(top_and_flipped / n - 1 / 6) < 5 * (1 / 6 * 5 / 6 / n) ** 0.5


def test_an_image_depends_on_its_own_word_only():
    x, keys = images(6, 3, 8, 8), words(3, 6)
    together = augment(x, keys, 2, True)
    for i in range(6):
        torch.testing.assert_close(augment(x[i : i + 1], keys[i : i + 1], 2, True)[0], together[i])
    assert not torch.equal(together, x)


def test_leading_axes_are_as_good_as_a_flat_batch():
    x, keys = images(2, 3, 4, 1, 6, 5), words(4, 2, 3, 4)
    stacked = augment(x, keys, 3, True)
    flat = augment(x.reshape(24, 1, 6, 5), keys.reshape(24), 3, True)
    torch.testing.assert_close(stacked.reshape(24, 1, 6, 5), flat)


def test_channels_move_together_and_float_images_work():
    x = images(8, 1, 6, 6).float().expand(8, 3, 6, 6)
    changed = augment(x, words(5, 8), 2, True)
    assert changed.dtype == torch.float32
    assert torch.equal(changed[:, 0], changed[:, 2])


def test_padding_larger_than_the_image_gives_black():
    changed = augment(images(200, 1, 2, 2), words(6, 200), 50, False)
    assert int((changed.flatten(1) == 0).all(1).sum()) > 150


def test_nothing_to_do_returns_the_images():
    x = images(2, 1, 4, 4)
    assert augment(x, words(0, 2), 0, False) is x


def test_no_value_is_read_by_the_host():
    """Meta tensors have no values: any .item(), nonzero or boolean indexing would raise."""
    x = torch.empty(2, 5, 3, 8, 8, dtype=torch.uint8, device="meta")
    keys = torch.empty(2, 5, dtype=torch.int64, device="meta")
    out = prepare(augment(x, keys, 2, True), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), torch.bfloat16)
    assert out.shape == x.shape
    assert out.dtype == torch.bfloat16


def test_augment_record_applies_its_settings_and_checks_them():
    x, keys = images(5, 3, 8, 8), words(7, 5)
    torch.testing.assert_close(Augment(pad=1, flip=False)(x, keys), augment(x, keys, 1, False))
    for bad in (-1, 1.5, True, "4"):
        with pytest.raises(BadInput, match="pad"):
            Augment(pad=bad)
    with pytest.raises(BadInput, match="flip"):
        Augment(flip=0.5)
    for bad in (0, 1.5, float("nan"), "half"):
        with pytest.raises(BadInput, match="crop_probability"):
            Augment(crop_probability=bad)
    with pytest.raises(BadInput, match=r"unknown augmentation: fill 'white'.*black, mean"):
        Augment(fill="white")


def test_a_crop_has_its_probability_independent_of_the_flip():
    image, n, p = images(1, 5, 5), 40_000, 0.3
    changed = augment(image.expand(n, 1, 5, 5), words(8, n), 2, True, crop_probability=p)
    seen = {
        which: int((changed == crop).flatten(1).all(1).sum()) / n for which, crop in every_crop(image, 2, True).items()
    }
    assert sum(seen.values()) == pytest.approx(1)
    for (top, left, _), share in seen.items():  # an image keeps its place without a crop, and in 1 of 25 crops
        expected = 0.5 * (p / 25 + (1 - p) * (top == left == 2))
        assert abs(share - expected) < 5 * (expected * (1 - expected) / n) ** 0.5


def simulator_image(image, word, pad, mean, std, probability):
    """One image as the public simulator of FedLADA's first author makes it: normalised, flipped, perhaps cropped."""
    offsets = 2 * pad + 1
    down, right, mirrored = word % offsets, word // offsets % offsets, word // offsets**2 % 2
    cropped = word // (2 * offsets**2) / (2**53 / (2 * offsets**2)) < probability
    image = (image.astype(np.float64) / 255 - mean[:, None, None]) / std[:, None, None]
    image = image[:, :, ::-1] if mirrored else image
    if not cropped:
        return image
    channels, height, width = image.shape
    extended = np.zeros((channels, height + 2 * pad, width + 2 * pad))
    extended[:, pad:-pad, pad:-pad] = image
    right = 2 * pad - right if mirrored else right  # lamina cuts before it mirrors
    return extended[:, down : down + height, right : right + width]


def test_the_simulators_images_are_padded_with_the_mean_colour():
    x, keys = images(60, 3, 6, 5), words(9, 60)
    mean, std = np.array([0.49, 0.48, 0.45]), np.array([0.25, 0.24, 0.26])
    protocol = Augment(2, crop_probability=0.5, fill="mean")
    inputs = training_inputs(x, keys, protocol, tuple(mean), tuple(std), torch.float64)
    expected = [
        simulator_image(image.numpy(), int(word), 2, mean, std, 0.5) for image, word in zip(x, keys, strict=True)
    ]
    np.testing.assert_allclose(inputs.numpy(), expected, rtol=1e-12, atol=0)
    assert 0 < (inputs == 0).flatten(1).any(1).sum() < 60  # some images have the padding, others not


def test_black_padding_is_black_before_the_normalisation():
    x, keys = images(30, 1, 4, 4), words(10, 30)
    inputs = training_inputs(x, keys, Augment(2, fill="black"), (0.5,), (0.25,), torch.float64)
    torch.testing.assert_close(inputs, prepare(augment(x, keys, 2, True), (0.5,), (0.25,), torch.float64))
    assert inputs.min() == -2  # (0 - 0.5) / 0.25


def test_augmenting_what_is_no_image_is_refused():
    with pytest.raises(BadInput, match="switch augmentation off"):
        augment(torch.zeros(5, 10), words(0, 5), 4, True)


def test_prepare_scales_and_normalises_per_channel():
    x = torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8).reshape(1, 2, 1, 2)
    out = prepare(x, (0.5, 0.2), (0.25, 0.1), torch.float64)
    # channel 0: (0 - .5) / .25, (1 - .5) / .25; channel 1: (.2 - .2) / .1, (.4 - .2) / .1
    torch.testing.assert_close(out.flatten(), torch.tensor([-2.0, 2.0, 0.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(prepare(x, None, None).flatten(), torch.tensor([0.0, 1.0, 0.2, 0.4]))


def test_prepare_rounds_to_a_short_type_once():
    x = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    exact = prepare(x, (0.1307,), (0.3081,), torch.float32)
    assert torch.equal(prepare(x, (0.1307,), (0.3081,), torch.bfloat16), exact.to(torch.bfloat16))


def test_prepare_casts_features_and_leaves_tokens():
    features = torch.tensor([[1.5, 200.0]], dtype=torch.float64)
    assert torch.equal(prepare(features, None, None, torch.float32), features.float())
    tokens = torch.tensor([[3, 70000]])
    assert prepare(tokens, None, None, torch.float32) is tokens
