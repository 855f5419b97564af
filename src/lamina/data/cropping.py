"""Test images that are cropped at random, as some public codes evaluate."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from lamina.base import rng
from lamina.base.errors import BadInput
from lamina.base.limits import check_count
from lamina.data.dataset import Dataset, Splits
from lamina.data.feed import MOST_PADDING, augment

NAME = "cropped"
CHUNK = 1000  # images: the positions of their pixels take memory


def with_cropped_test(splits: Splits, pad: int) -> Splits:
    """Add the test set "cropped": the test images, padded with `pad` black pixels and cropped at random.

    The crops are drawn once, the same for every run and round.
    """
    check_count("data.test_crop_pad", pad, MOST_PADDING, least=1)
    test = splits.test
    if test is None or not isinstance(test.x, Tensor) or test.x.dim() != 4:
        found = "there are none" if test is None else f"found {test!r}"
        raise BadInput(f"data.test_crop_pad needs test images [n, channels, height, width], and {found}: leave it out")
    if NAME in test.more_tests:
        raise BadInput(f"data.test_crop_pad adds the test set '{NAME}', which the data have already: rename theirs")
    keys = torch.from_numpy(np.asarray(rng.bits(rng.key(0, "test crops"), np.arange(len(test)))))
    parts = zip(torch.split(test.x, CHUNK), torch.split(keys, CHUNK), strict=True)
    x = torch.cat([augment(images, words, pad, flip=False) for images, words in parts])
    cropped: Dataset = dataclasses.replace(test, x=x, more_tests={})
    return Splits(splits.train, dataclasses.replace(test, more_tests={**test.more_tests, NAME: cropped}))
