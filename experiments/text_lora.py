"""Text by rule, and a small GPT-2 with LoRA adapters: what `text-lora.toml` trains.

Needs ``pip install -e '.[transformers]'``. Nothing is downloaded: the base model has random weights and stays frozen.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import lamina

NOUNS = ["fox", "dog", "hen", "owl", "boat", "ship", "port", "wave", "stove", "soup", "bread", "salt"]
VERBS = ["sees", "likes", "finds", "wants", "meets", "needs"]
ADJECTIVES = ["red", "old", "warm", "small", "quiet", "salty"]
WORDS = [".", "the", "a", *NOUNS, *VERBS, *ADJECTIVES]
TEST_FRACTION = 0.2  # of every author's text, at its end


def load(authors: int = 12, words: int = 320, context: int = 16, seed: int = 0) -> lamina.data.Splits:
    """Return windows of `context` words, the inputs and the targets of a causal language model.

    The column `author` names the client.
    """
    random = np.random.default_rng(seed)
    train, test = [], []
    for author in range(authors):
        text = torch.tensor([WORDS.index(word) for word in write(random, author, words)])
        windows = text.unfold(0, context, context // 4)
        border = int(len(windows) * (1 - TEST_FRACTION))
        train.append(windows[:border])
        test.append(windows[border + 3 :])  # no test word is in a training window
    return lamina.data.Splits(*(_dataset(parts) for parts in (train, test)))


def write(random: np.random.Generator, author: int, words: int) -> list[str]:
    """Write sentences of an author, who mostly writes about four of the nouns."""
    favourites = [NOUNS[(4 * (author % 3) + i) % len(NOUNS)] for i in range(4)]
    text: list[str] = []
    while len(text) < words:
        subject, thing = (random.choice(favourites if random.random() < 0.8 else NOUNS) for _ in range(2))
        verb = VERBS[(NOUNS.index(subject) + int(random.random() < 0.3)) % len(VERBS)]
        adjective = ADJECTIVES[NOUNS.index(thing) // 2]
        text += ["the", str(subject), verb, "a", adjective, str(thing), "."]
    return text[:words]


def _dataset(parts: list[Tensor]) -> lamina.Dataset:
    windows = torch.cat(parts)
    author = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    # the loss `causal_lm` compares the outputs at every word with the word that follows it
    return lamina.Dataset(windows, windows, len(WORDS), name="text by rule", columns={"author": author})


def gpt2(classes: int, width: int = 32, layers: int = 1, rank: int = 8, adapters: bool = True) -> nn.Module:
    """Return a small GPT-2 of random weights, of which only the LoRA adapters are trained."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=classes, n_positions=64, n_embd=width, n_layer=layers, n_head=4, initializer_range=0.2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(config)
    if adapters:
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
        model = get_peft_model(model, lora)
    return model
