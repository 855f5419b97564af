"""Models as other people write them: what `zoo.py` trains, with synthetic data of the right shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Draw = Callable[..., Tensor]


class Case(NamedTuple):
    """A model with its data, and the settings that differ from the defaults of `lamina.Simulation`."""

    module: nn.Module
    inputs: Any
    targets: Tensor
    loss: str = "cross_entropy"


class ViT(nn.Module):
    """A vision transformer: a convolution for the patches, a parameter for the positions, torch's encoder."""

    def __init__(self, width: int = 192, depth: int = 6, heads: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Parameter(torch.randn(1, 64, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.encoder(x)).mean(1))


class Attention(nn.Module):
    """Causal self-attention through torch's fused function."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of a sequence."""
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    """A transformer block with the norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply attention and the two-layer network."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small GPT: embeddings of tokens and of positions."""

    def __init__(self, vocabulary: int = 512, length: int = 128, width: int = 256, depth: int = 4, heads: int = 4):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Predict the next token at every position."""
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CharLSTM(nn.Module):
    """Two LSTM layers over characters, as in LEAF's Shakespeare."""

    def __init__(self, vocabulary: int = 90, width: int = 256) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(vocabulary, 8), nn.LSTM(8, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Predict the next character."""
        return self.head(self.lstm(self.embedding(x))[0][:, -1])


def convolution(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Module:
    """Return a convolution with BatchNorm and ReLU6."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU6())


class Inverted(nn.Module):
    """MobileNetV2's block: widen, a depthwise convolution, narrow."""

    def __init__(self, inputs: int, outputs: int, stride: int, factor: int) -> None:
        super().__init__()
        hidden, self.skips = inputs * factor, stride == 1 and inputs == outputs
        self.body = nn.Sequential(
            convolution(inputs, hidden, 1),
            convolution(hidden, hidden, 3, stride, hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block, with a skip connection where the shapes allow it."""
        return x + self.body(x) if self.skips else self.body(x)


def mobilenet(classes: int = 10) -> nn.Module:
    """Return MobileNetV2 with BatchNorm, for small images."""
    stages = [(1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    layers, width = [convolution(3, 32)], 32
    for factor, outputs, blocks, stride in stages:
        for i in range(blocks):
            layers.append(Inverted(width, outputs, stride if i == 0 else 1, factor))
            width = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes)]
    return nn.Sequential(*layers, convolution(320, 1280, 1), *head)


class UNet(nn.Module):
    """A U-Net with GroupNorm and three levels."""

    def __init__(self, width: int = 32, classes: int = 4) -> None:
        super().__init__()
        self.level1, self.level2, self.level3 = self._block(3, width), self._block(width, 2 * width), None
        self.level3 = self._block(2 * width, 4 * width)
        self.up2, self.back2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), self._block(4 * width, 2 * width)
        self.up1, self.back1 = nn.ConvTranspose2d(2 * width, width, 2, 2), self._block(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Module:
        first = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
        return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Classify every pixel."""
        high = self.level1(x)
        middle = self.level2(F.max_pool2d(high, 2))
        low = self.level3(F.max_pool2d(middle, 2))
        x = self.back2(torch.cat([self.up2(low), middle], 1))
        return self.head(self.back1(torch.cat([self.up1(x), high], 1)))


class Table(nn.Module):
    """A network for rows of numbers and categories, which it takes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(50, 8) for _ in range(6))
        first = [nn.Linear(48 + 20, 256), nn.ReLU(), nn.Dropout(0.1)]
        self.net = nn.Sequential(*first, nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Predict a number."""
        embedded = [embedding(categories[:, i]) for i, embedding in enumerate(self.embeddings)]
        return self.net(torch.cat([numbers, *embedded], 1))


class Data:
    """Draws inputs and targets for a number of samples."""

    def __init__(self, samples: int) -> None:
        self.samples, self.generator = samples, torch.Generator().manual_seed(0)

    def numbers(self, *shape: int) -> Tensor:
        """Return normal numbers."""
        return torch.randn(self.samples, *shape, generator=self.generator)

    def classes(self, count: int, *shape: int) -> Tensor:
        """Return whole numbers below `count`."""
        return torch.randint(0, count, (self.samples, *shape), generator=self.generator)


def vit(data: Data) -> Case:
    """ViT, 2.7 million parameters."""
    return Case(ViT(), data.numbers(3, 32, 32), data.classes(10))


def gpt(data: Data) -> Case:
    """The small GPT, 3.5 million parameters."""
    tokens = data.classes(512, 128)
    return Case(GPT(), tokens, tokens, "causal_lm")


def lstm(data: Data) -> Case:
    """The LSTM, 0.8 million parameters."""
    return Case(CharLSTM(), data.classes(90, 80), data.classes(90))


def mobilenetv2(data: Data) -> Case:
    """MobileNetV2 with BatchNorm, 2.2 million parameters."""
    return Case(mobilenet(), data.numbers(3, 32, 32), data.classes(10))


def unet(data: Data) -> Case:
    """The U-Net on 64 × 64 pixels, 0.5 million parameters."""
    return Case(UNet(), data.numbers(3, 64, 64), data.classes(4, 64, 64))


def table(data: Data) -> Case:
    """The network for tables."""
    inputs = {"numbers": data.numbers(20), "categories": data.classes(50, 6)}
    return Case(Table(), inputs, data.numbers(), "mse")


def mlp(data: Data) -> Case:
    """A network with one hidden layer, as small as they come."""
    module = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    return Case(module, data.numbers(784), data.classes(10))


def cnn(data: Data) -> Case:
    """A small convolutional network."""
    features = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return Case(nn.Sequential(*features, nn.Flatten(), nn.Linear(800, 10)), data.numbers(1, 28, 28), data.classes(10))


class GRU(nn.Module):
    """A small GRU over a sequence of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(9, 32, batch_first=True), nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Classify a sequence."""
        return self.head(self.gru(x)[0][:, -1])


def gru(data: Data) -> Case:
    """The GRU with 32 units."""
    return Case(GRU(), data.numbers(64, 9), data.classes(6))


def bert(data: Data) -> Case:
    """BERT of transformers, 4 layers of 256."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024,
        max_position_embeddings=128, num_labels=10,
    )  # fmt: skip
    inputs = {"input_ids": data.classes(1000, 64), "attention_mask": torch.ones(data.samples, 64, dtype=torch.long)}
    return Case(BertForSequenceClassification(config), inputs, data.classes(10))


def llama_lora(data: Data) -> Case:
    """Llama of transformers, 6 layers of 512, with adapters of rank 8."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=512, num_hidden_layers=6, num_attention_heads=8, intermediate_size=1536,
        max_position_embeddings=128,
    )  # fmt: skip
    tokens = data.classes(1000, 64)
    adapted = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    return Case(adapted, tokens, tokens, "causal_lm")


def gpt2(data: Data) -> Case:
    """GPT-2 small of transformers, 124 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = data.classes(50257, 256)
    return Case(GPT2LMHeadModel(GPT2Config()), tokens, tokens, "causal_lm")


def gpt2_lora(data: Data) -> Case:
    """GPT-2 small with adapters of rank 8."""
    from peft import LoraConfig, get_peft_model

    case = gpt2(data)
    return case._replace(module=get_peft_model(case.module, LoraConfig(r=8, target_modules=["c_attn"])))


CASES: dict[str, Callable[[Data], Case]] = {
    function.__name__.replace("_", "-"): function
    for function in (vit, gpt, lstm, mobilenetv2, unet, table, mlp, cnn, gru, bert, llama_lora, gpt2, gpt2_lora)
}
