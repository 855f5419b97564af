"""Read Shakespeare's plays as characters, one client per speaker: the file of char-rnn, 40,000 lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lamina.data.dataset import Dataset, Splits
from lamina.data.readers.files import Place, verify_md5

FILE = "input.txt"
MD5 = "6fb458f1232090904fb40fe944165e91"
CONTEXT = 64  # characters of a sample
LEAST_TEXT = 500  # characters that a speaker has at least
TEST_FRACTION = 0.2  # of every speaker's text, at its end


def locate(root: Path) -> Place | None:
    """Return the folder of the file under the data directory, or None."""
    folders = [folder for folder in (root / "shakespeare", root) if (folder / FILE).exists()]
    return Place(folders[0], []) if folders else None


def read_set(root: Path) -> Splits | None:
    """Read the file under the data directory; None if there is none.

    Inputs and targets are the same windows of characters: the loss `causal_lm` compares the outputs at every character
    with the character that follows. The column `speaker` names the client.
    """
    place = locate(root)
    if place is None:
        return None
    path = place.path / FILE
    content = path.read_bytes()
    verify_md5(path, content, MD5)
    text = content.decode()
    characters = sorted(set(text))
    codes = {character: code for code, character in enumerate(characters)}
    train, test = [], []
    speeches = {name: said for name, said in spoken(text).items() if len(said) >= LEAST_TEXT}
    for said in speeches.values():
        # a window ends with the character that the next one begins with, so that each is predicted once
        windows = torch.tensor([codes[character] for character in said]).unfold(0, CONTEXT, CONTEXT - 1)
        border = len(windows) - max(1, round(TEST_FRACTION * len(windows)))
        train.append(windows[:border])
        test.append(windows[border:])
    return Splits(*(_dataset(parts, list(speeches), characters) for parts in (train, test)))


def spoken(text: str) -> dict[str, str]:
    r"""Return all that every speaker says.

    >>> spoken("All:\nSpeak, speak.\n\nFirst Citizen:\nYou are\nresolved?\n\nAll:\nResolved.\n")
    {'All': 'Speak, speak.\nResolved.', 'First Citizen': 'You are\nresolved?'}
    """
    speeches: dict[str, list[str]] = {}
    for speech in text.strip().split("\n\n"):
        name, _, said = speech.partition(":\n")
        speeches.setdefault(name, []).append(said)
    return {name: "\n".join(parts) for name, parts in speeches.items()}


def _dataset(parts: Sequence[Tensor], names: Sequence[str], characters: Sequence[str]) -> Dataset:
    windows = torch.cat(list(parts))
    speaker = np.repeat(np.array(names), [len(part) for part in parts])
    return Dataset(windows, windows, len(characters), name="shakespeare", columns={"speaker": speaker})
