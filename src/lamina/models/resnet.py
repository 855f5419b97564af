"""Residual networks for small images (He et al. 2016), with GroupNorm or BatchNorm."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import relu

from lamina.base.errors import BadInput
from lamina.models.plain import chain
from lamina.models.registry import choice, image, model, whole

Norm = Callable[[int], nn.Module]  # the number of channels -> a normalisation layer


class BasicBlock(nn.Module):
    """ReLU(x + norm(conv(ReLU(norm(conv(x)))))), x projected by a 1x1 convolution where its shape changes."""

    def __init__(self, inputs: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = norm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != channels:
            self.shortcut = chain(conv=nn.Conv2d(inputs, channels, 1, stride=stride, bias=False), norm=norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, inputs, h, w] to [batch, channels, h/stride, w/stride]."""
        out = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(out)) + self.shortcut(x))


@model(paper="Karimi, Li & Li; Sun et al. 2023 (CIFAR-10/100, TinyImageNet)")
def resnet18(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    norm: str = "group",
    groups: int = 2,
    width: int = 64,
    stem: str = "cifar",
) -> nn.Module:
    """ResNet-18 for small images: two residual blocks in each of four stages.

    11,173,962 parameters for 3 channels and 10 classes, with either `norm`: group (of `groups` groups) or batch.
    `width` is that of the first stage. The `stem` is one 3x3 convolution of stride 1; ``stem="imagenet"`` (7x7 of
    stride 2 and a max-pool, 11,181,642 parameters) is what FedLADA's first author's public simulator uses on CIFAR too.
    """
    return _resnet("resnet18", 2, input_shape, classes, norm, groups, width, stem)


@model(paper="Karimi, Li & Li, drafts (CIFAR-10)")
def resnet9(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    norm: str = "group",
    groups: int = 2,
    width: int = 64,
    stem: str = "cifar",
) -> nn.Module:
    """ResNet-9 for small images: one residual block in each of four stages.

    4,903,242 parameters for 3 channels and 10 classes; options as for `resnet18`. This is the ResNet-9 of the Fed-LAMB
    authors' public code (there with ``norm="batch"``), nine 3x3 convolutions; others give the name to another network.
    """
    return _resnet("resnet9", 1, input_shape, classes, norm, groups, width, stem)


def _resnet(
    name: str, blocks: int, input_shape: tuple[int, ...], classes: int, norm: str, groups: int, width: int, stem: str
) -> nn.Module:
    channels, _, _ = image(name, input_shape, classes, least=8)
    width = whole("width", width)
    make = _norm(norm, whole("groups", groups), width)
    if choice("stem", stem, ("cifar", "imagenet")) == "cifar":
        conv, pool = nn.Conv2d(channels, width, 3, padding=1, bias=False), None
    else:
        conv = nn.Conv2d(channels, width, 7, stride=2, padding=3, bias=False)
        pool = nn.MaxPool2d(3, stride=2, padding=1)
    network = chain(
        conv=conv,
        norm=make(width),
        relu=nn.ReLU(),
        stem_pool=pool,
        stage1=_stage(blocks, width, width, 1, make),
        stage2=_stage(blocks, width, 2 * width, 2, make),
        stage3=_stage(blocks, 2 * width, 4 * width, 2, make),
        stage4=_stage(blocks, 4 * width, 8 * width, 2, make),
        pool=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        output=nn.Linear(8 * width, classes),
    )
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):  # He et al.'s initialisation, as in torchvision
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return network


def _stage(blocks: int, inputs: int, channels: int, stride: int, norm: Norm) -> nn.Sequential:
    first = BasicBlock(inputs, channels, stride, norm)
    return nn.Sequential(first, *(BasicBlock(channels, channels, 1, norm) for _ in range(blocks - 1)))


def _norm(norm: str, groups: int, width: int) -> Norm:
    if choice("norm", norm, ("group", "batch")) == "batch":
        return nn.BatchNorm2d
    if width % groups:
        raise BadInput(f"groups must divide the {width} channels of the first stage, {groups} does not")
    return lambda channels: nn.GroupNorm(groups, channels)
