"""Data: sets by name or of your own, partitions among clients, and the feed every engine uses."""

from __future__ import annotations

from lamina.data.dataset import Dataset, Splits, as_dataset
from lamina.data.drawing import partition_picture
from lamina.data.feed import Augment
from lamina.data.partitions import (
    IID,
    ByColumn,
    Classes,
    Dirichlet,
    Partition,
    Reallocate,
    Shards,
    label_counts,
    make,
    split_dataset,
)
from lamina.data.preprocessing import TablePreprocessing
from lamina.data.readers.files import data_directory
from lamina.data.readers.sources import load

__all__ = [
    "IID",
    "Augment",
    "ByColumn",
    "Classes",
    "Dataset",
    "Dirichlet",
    "Partition",
    "Reallocate",
    "Shards",
    "Splits",
    "TablePreprocessing",
    "as_dataset",
    "data_directory",
    "label_counts",
    "load",
    "make",
    "partition_picture",
    "split_dataset",
]
