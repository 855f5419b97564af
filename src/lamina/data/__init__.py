"""Data: sets by name or of your own, partitions among clients, and the feed every engine uses."""

from __future__ import annotations

from lamina.data.dataset import Dataset, Splits, as_dataset
from lamina.data.feed import Augment, augment, prepare
from lamina.data.partitions import (
    IID,
    PARTITIONS,
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
from lamina.data.picture import partition_picture
from lamina.data.readers.files import data_directory
from lamina.data.readers.own import FORMATS, Format
from lamina.data.readers.sources import SOURCES, Source, load

__all__ = [
    "FORMATS",
    "IID",
    "PARTITIONS",
    "SOURCES",
    "Augment",
    "ByColumn",
    "Classes",
    "Dataset",
    "Dirichlet",
    "Format",
    "Partition",
    "Reallocate",
    "Shards",
    "Source",
    "Splits",
    "as_dataset",
    "augment",
    "data_directory",
    "label_counts",
    "load",
    "make",
    "partition_picture",
    "prepare",
    "split_dataset",
]
