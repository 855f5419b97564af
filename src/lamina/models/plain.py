"""The papers' perceptron and convolutional networks: each is one `nn.Sequential` with named layers.

Every factory takes the shape of one input and the number of classes and returns logits; sizes that the
papers state (320, 1600, 12544 ...) follow from the input's shape, so a model fits any data set with large
enough images. A dropout of 0 leaves the layer out; parameter names do not depend on it.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lamina.base.limits import check_number
from lamina.models.registry import checked_shape, choice, image, model, whole, wholes


class SMU(nn.Module):
    """The smooth maximum unit: SMU(x) = (x + x erf(mu x)) / 2 (Biswas et al. 2021; Sun et al. 2023, Table 8).

    It tends to ReLU as mu grows, and is the exact GELU at mu = 1/sqrt(2). mu is fixed, not trained: Sun et al.
    "select a proper mu" without giving it.

    >>> SMU(mu=1e6)(torch.tensor([-2.0, 0.0, 3.0])).tolist()
    [0.0, 0.0, 3.0]
    """

    def __init__(self, mu: float = 1.0) -> None:
        super().__init__()
        self.mu = check_number("mu", mu, least=0)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the activation elementwise."""
        return 0.5 * (x + x * torch.erf(self.mu * x))

    def extra_repr(self) -> str:
        """Show mu when the module is printed."""
        return f"mu={self.mu:g}"


def _activation(name: str, mu: float) -> nn.Module:
    """Make ``relu``, ``gelu`` (its tanh form, as in Sun et al.'s Table 8) or ``smu``."""
    choice("activation", name, ("relu", "gelu", "smu"))
    if name == "relu":
        return nn.ReLU()
    return nn.GELU(approximate="tanh") if name == "gelu" else SMU(mu)


def chain(**layers: nn.Module | None) -> nn.Sequential:
    """Return an `nn.Sequential` of named layers, in the order given, without those that are None."""
    return nn.Sequential(OrderedDict((name, layer) for name, layer in layers.items() if layer is not None))


@model(paper="Karimi, Li & Li (MNIST)")
def mlp(
    input_shape: tuple[int, ...], classes: int, *, hidden: int = 200, dropout: float = 0.0, depth: int = 1
) -> nn.Module:
    """Perceptron with one hidden layer of 200 units, any input shape.

    Linear - dropout - ReLU - Linear; 159,010 parameters on 784 inputs and 10 classes. The final paper has no
    dropout; its drafts do, and the authors' code has .5, before the ReLU. `depth` is the number of hidden layers, all
    of the same width; in the papers there is one.
    """
    inputs = math.prod(checked_shape("mlp", input_shape, classes))
    p = check_number("dropout", dropout, least=0, below=1)
    width = whole("hidden", hidden)
    layers: dict[str, nn.Module | None] = {}
    for i in range(1, whole("depth", depth) + 1):
        number = str(i) if i > 1 else ""
        layers[f"hidden{number}"] = nn.Linear(inputs if i == 1 else width, width)
        layers[f"drop{number}"] = nn.Dropout(p) if p else None
        layers[f"relu{number}"] = nn.ReLU()
    return chain(flatten=nn.Flatten(), **layers, output=nn.Linear(width, classes))


@model(paper="Karimi, Li & Li (MNIST, Fashion-MNIST)")
def cnn(input_shape: tuple[int, ...], classes: int, *, dropout: float = 0.5) -> nn.Module:
    """Two 5x5 convolutions (10 and 20 channels) and a hidden layer of 50, the common MNIST network.

    conv - pool - ReLU - conv - Dropout2d - pool - ReLU - 320 to 50 - ReLU - dropout - output; 21,840 parameters
    on 1x28x28 and 10 classes. `dropout` is that of both dropout layers (the authors' code has .5).
    """
    channels, height, width = image("cnn", input_shape, classes, least=16)
    height, width = (((n - 4) // 2 - 4) // 2 for n in (height, width))  # 28 -> 24 -> 12 -> 8 -> 4
    p = check_number("dropout", dropout, least=0, below=1)
    return chain(
        conv1=nn.Conv2d(channels, 10, 5),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(10, 20, 5),
        drop2=nn.Dropout2d(p) if p else None,
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        hidden=nn.Linear(20 * height * width, 50),
        relu3=nn.ReLU(),
        drop3=nn.Dropout(p) if p else None,
        output=nn.Linear(50, classes),
    )


@model(paper="lamina (digits)")
def small_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two padded 3x3 convolutions (16 and 32 channels) and a linear layer, for images as small as 8x8.

    conv - ReLU - conv - ReLU - pool - output; 9,930 parameters on 1x8x8 and 10 classes. Of no paper: it is here
    for scikit-learn's digits, which are too small for the others.
    """
    channels, height, width = image("small_cnn", input_shape, classes, least=2)
    return chain(
        conv1=nn.Conv2d(channels, 16, 3, padding=1),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(16, 32, 3, padding=1),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        output=nn.Linear(32 * (height // 2) * (width // 2), classes),
    )


@model(paper="Sun et al. 2023, appendix A.2 (CIFAR-10)")
def lenet(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    activation: str = "relu",
    mu: float = 1.0,
    channels: Sequence[int] = (64, 64),
    hidden: Sequence[int] = (384, 192),
) -> nn.Module:
    """LeNet with ReLU, GELU or SMU: two 5x5 convolutions, two hidden linear layers and the output.

    conv - act - pool - conv - act - pool - hidden layers - output; 797,962 parameters on 3x32x32 and 10 classes.
    `activation` is relu, gelu (tanh form) or smu (with its `mu`). The paper says "2 convolutional layers and 2
    full-connection layers" without widths; we read it as McMahan et al. 2017 describe theirs, with the output
    layer not counted, which is also the LeNet (64-64-384-192) of FedLADA's first author's public simulator. Literally
    two linear layers are ``hidden=[384]``; the CIFAR network in the Fed-LAMB authors' code (62,006 parameters) is
    ``channels=[6, 16], hidden=[120, 84]``.
    """
    depth, height, width = image("lenet", input_shape, classes, least=16)
    height, width = (((n - 4) // 2 - 4) // 2 for n in (height, width))  # 32 -> 28 -> 14 -> 10 -> 5
    first, second = wholes("channels", channels, length=2)
    sizes = (second * height * width, *wholes("hidden", hidden))
    layers: dict[str, nn.Module] = {}
    for i in range(1, len(sizes)):
        layers[f"hidden{i}"] = nn.Linear(sizes[i - 1], sizes[i])
        layers[f"act{i + 2}"] = _activation(activation, mu)
    return chain(
        conv1=nn.Conv2d(depth, first, 5),
        act1=_activation(activation, mu),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(first, second, 5),
        act2=_activation(activation, mu),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        **layers,
        output=nn.Linear(sizes[-1], classes),
    )


@model(paper="pfl-research (Granqvist et al. 2024), CIFAR-10 benchmark")
def cifar_cnn(input_shape: tuple[int, ...], classes: int, *, dropout: float = 0.5) -> nn.Module:
    """Two 3x3 convolutions (32 and 64 channels) and a hidden layer of 128, pfl-research's benchmark network.

    conv - ReLU - conv - ReLU - pool - dropout .25 - 12544 to 128 - ReLU - dropout .5 - output, Xavier-uniform weights;
    1,626,442 parameters on 3x32x32 and 10 classes. `dropout` is the last one's; the first has half of it.
    """
    channels, height, width = image("cifar_cnn", input_shape, classes, least=6)
    height, width = ((n - 4) // 2 for n in (height, width))  # 32 -> 30 -> 28 -> 14
    p = check_number("dropout", dropout, least=0, below=1)
    network = chain(
        conv1=nn.Conv2d(channels, 32, 3),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 3),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        drop2=nn.Dropout(p / 2) if p else None,
        flatten=nn.Flatten(),
        hidden=nn.Linear(64 * height * width, 128),
        relu3=nn.ReLU(),
        drop3=nn.Dropout(p) if p else None,
        output=nn.Linear(128, classes),
    )
    for layer in network:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return network


@model(paper="Karimi, Li & Li, drafts (CIFAR-10)")
def cifar_cnn3(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """Three 3x3 convolutions (32, 64 and 64 channels) and two linear layers.

    conv - ReLU - pool - conv - ReLU - pool - conv - ReLU - 1024 to 64 - ReLU - output; 122,570 parameters on 3x32x32
    and 10 classes. The drafts give no widths: these are TensorFlow's CIFAR tutorial's, the best known network
    of that form. (The authors' public code has another one for CIFAR: see `lenet`.)
    """
    channels, height, width = image("cifar_cnn3", input_shape, classes, least=18)
    height, width = (((n - 2) // 2 - 2) // 2 - 2 for n in (height, width))  # 32 -> 30 -> 15 -> 13 -> 6 -> 4
    return chain(
        conv1=nn.Conv2d(channels, 32, 3),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 3),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(64, 64, 3),
        relu3=nn.ReLU(),
        flatten=nn.Flatten(),
        hidden=nn.Linear(64 * height * width, 64),
        relu4=nn.ReLU(),
        output=nn.Linear(64, classes),
    )
