"""Load data sets by name, from files in the data directory or from the Hugging Face hub."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lamina.base import rng
from lamina.base.errors import BadInput, LaminaError, nearest, unknown
from lamina.data import hub
from lamina.data.dataset import Dataset, Splits, as_dataset
from lamina.data.readers import cifar, idx, shakespeare, tinyimagenet
from lamina.data.readers.files import ENVIRONMENT_VARIABLE, Place, PublishedSet, data_directory
from lamina.data.readers.own import FORMATS, check_names, check_types, load_format, load_own


@dataclass(frozen=True)
class HubCopy:
    """Where the hub keeps a set: repository, test split, and the usual normalisation."""

    repository: str
    test: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Source:
    """A named data set: what it is, where its files are, and how they are read."""

    description: str
    read: Callable[[Path], Splits | None]
    """Reads the files under the data directory; None when there are none."""
    files: str = ""
    """The files expected there, in words; empty if it needs none."""
    published: str = ""
    """The address they can be downloaded from."""
    hub: HubCopy | None = None
    locate: Callable[[Path], Place | None] = lambda _root: None
    """Returns where the files are under the data directory, and which are missing; None when there are none."""

    @property
    def expected(self) -> str:
        """The expected files and their address, in words."""
        return f"{self.files} (from {self.published})" if self.published else self.files


def load(
    name: str, data_dir: str | os.PathLike[str] | None = None, *, client: str | None = None, **options: Any
) -> Splits:
    """Load a data set by name, as the `[data]` section of an experiment file does.

    Args:
        name: A data set of `SOURCES`, a file format of `FORMATS`, or ``package.module:function``: a function of your
            own that returns training and test data.
        data_dir: Where the files are: by default, the directory LAMINA_DATA, else ./data; for a file format, the
            current folder.
        client: The column that names the client of every sample.
        options: The options of a file format or of your own function.

    >>> train, test = load("digits")
    >>> train
    Dataset('digits', 1438 samples of [1, 8, 8] torch.float32, 10 classes)
    """
    check_options(name, options, {"client": client})
    if ":" in name:
        return load_own(name, data_dir, options, client)
    if name in FORMATS:
        return load_format(name, data_dir, options, client)
    source = SOURCES[name]
    root = data_directory(data_dir, source.expected) if source.files else Path()
    splits, reason = source.read(root), ""
    if splits is None and source.hub is not None:
        try:
            splits = _from_hub(name, source.hub)
        except LaminaError as error:
            reason = f"; {error}"
    if splits is not None:
        return splits
    raise BadInput(
        f"no files of {name} in '{root.absolute()}'{reason}: expected there {source.expected}; put them there, or set "
        f"{ENVIRONMENT_VARIABLE} (or data.dir, data_dir=) to where they are, or pip install -e '.[hub]' and be online"
    )


def check_options(name: str, options: Mapping[str, Any], other_keys: Mapping[str, Any]) -> None:
    """Refuse an unknown name, and options that the data set or format does not have, lacks or cannot use.

    `other_keys` are further keys of `[data]`; a format takes those that it has a parameter for. The options of a user's
    own function are checked when it is loaded.
    """
    if name in FORMATS:
        read = FORMATS[name].read
        check_names(name, read, options, other_keys)
        check_types(read, options)
    elif ":" not in name and name not in SOURCES:
        raise unknown("data set", name, [*SOURCES, *FORMATS])
    elif ":" not in name and options:
        option, keys = next(iter(options)), ["name", *other_keys]
        raise BadInput(f"[data] has no key '{option}'{nearest(option, keys)} (keys: {', '.join(keys)})")


def _from_hub(name: str, copy: HubCopy) -> Splits:
    splits = hub.fetch(copy.repository)
    missing = [part for part in ("train", copy.test) if part not in splits]
    if missing:
        raise BadInput(f"the hub's {copy.repository} has no split '{missing[0]}' (splits: {', '.join(splits)})")
    train, test = (as_dataset(splits[part], mean=copy.mean, std=copy.std, name=name) for part in ("train", copy.test))
    return Splits(train, test)


def _digits(_root: Path) -> Splits:
    """Read scikit-learn's 1797 digits of 8x8 pixels in 17 grey levels, divided by 16, which rounds nothing."""
    table = _digits_table()
    x = torch.from_numpy((table[:, :-1] / 16).astype(np.float32).reshape(-1, 1, 8, 8))
    whole = Dataset(x, torch.from_numpy(table[:, -1].astype(np.int64)), classes=10, name="digits")
    # The set has no official split: this one is part of lamina and never changes with the run's seed.
    return Splits(*whole.holdout(0.2, seed=rng.key(0, "digits")))


@functools.cache
def _digits_table() -> NDArray[np.float64]:
    """Return [1797, 65], pixels and label, from scikit-learn's own file: importing scikit-learn takes seconds."""
    package = importlib.util.find_spec("sklearn")
    for folder in [] if package is None else package.submodule_search_locations or []:
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.exists():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # another scikit-learn may keep it elsewhere

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels])


def _idx_source(files: PublishedSet, description: str, published: str, repository: str) -> Source:
    (release,) = files.releases
    words = f"{', '.join(file.name for file in release.files)}, in {files.name}/ or {release.folder}/"
    copy = HubCopy(repository, "test", files.mean, files.std)
    return Source(description, files.read, words, published, copy, files.locate)


def _cifar_source(files: PublishedSet, description: str, words: str) -> Source:
    words = f"{words}, in {files.name}/ or directly"
    copy = HubCopy(f"uoft-cs/{files.name}", "test", files.mean, files.std)
    return Source(description, files.read, words, "https://www.cs.toronto.edu/~kriz/cifar.html", copy, files.locate)


SOURCES: dict[str, Source] = {
    "digits": Source("1,797 handwritten digits, 8x8 grey; comes with scikit-learn, nothing to download", _digits),
    "mnist": _idx_source(
        idx.MNIST,
        "70,000 handwritten digits, 28x28 grey, 10 classes",
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "ylecun/mnist",
    ),
    "fashion-mnist": _idx_source(
        idx.FASHION_MNIST,
        "70,000 pieces of clothing, 28x28 grey, 10 classes",
        "https://github.com/zalandoresearch/fashion-mnist",
        "zalando-datasets/fashion_mnist",
    ),
    "cifar10": _cifar_source(
        cifar.CIFAR10,
        "60,000 photographs, 32x32 colour, 10 classes",
        "the folder cifar-10-batches-bin/ (of cifar-10-binary.tar.gz) or cifar-10-batches-py/ (of "
        "cifar-10-python.tar.gz), unpacked",
    ),
    "cifar100": _cifar_source(
        cifar.CIFAR100,
        "60,000 photographs, 32x32 colour, 100 classes in 20 groups (column coarse_label)",
        "the folder cifar-100-binary/ (of cifar-100-binary.tar.gz) or cifar-100-python/ (of cifar-100-python.tar.gz), "
        "unpacked",
    ),
    "tinyimagenet": Source(
        "110,000 photographs, 64x64 colour, 200 classes; the validation images are the test set",
        tinyimagenet.read_set,
        "the unzipped folder tiny-imagenet-200/ (train/<wnid>/images/*.JPEG, val/images/*.JPEG, "
        "val/val_annotations.txt), in tinyimagenet/ or directly",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        HubCopy("zh-plus/tiny-imagenet", "valid", tinyimagenet.MEAN, tinyimagenet.STD),
        tinyimagenet.locate,
    ),
    "shakespeare": Source(
        "Shakespeare's plays, 65 characters; 181 speakers with 500 characters or more (column speaker)",
        shakespeare.read_set,
        "input.txt, in shakespeare/ or directly",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        locate=shakespeare.locate,
    ),
}
