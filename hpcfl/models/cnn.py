"""Convolutional network for images."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from hpcfl.errors import InputError
from hpcfl.models import Headed, Spec
from hpcfl.options import Count, Counts, OpenShare
from hpcfl.registry import register


class Channels(nn.Module):
    """[B, H, W] -> [B, 1, H, W]; images that have channels already pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) if x.dim() == 3 else x


@register("model", "cnn")
@dataclass(frozen=True)
class CNN(Headed):
    """Convolutions with ReLU and max-pooling, then hidden layers with ReLU.

    The defaults are the CNN of APFL's released code (5x5 convolutions with 20 and 50 channels, 512 hidden units), with
    padding that keeps the size, so that small images work, too. PFLEGO's networks: channels = [64, 64], pool = 3,
    hidden = [384, 192] for CIFAR-10; channels = [64, 64, 64, 64], kernel = 3, hidden = [] for Omniglot.
    pool: 2: windows of 2x2, stride 2, n pixels become n/2 rounded down; 3: windows of 3x3, stride 2, n/2 rounded up,
    padded as "SAME" in TensorFlow and JAX.
    hidden: units of the hidden layer, or of each of several; [] for none. One is called fc, several fc1, fc2, ...
    dropout: after every hidden layer.
    """

    channels: Counts = (20, 50)
    kernel: Count = 5
    pool: Literal[2, 3] = 2
    hidden: Count | Counts = 512
    dropout: OpenShare = 0.0

    def build(self, spec: Spec) -> nn.Module:
        hidden = (self.hidden,) if isinstance(self.hidden, int) else self.hidden
        self._check(spec.shape, hidden)
        layers: OrderedDict[str, nn.Module] = OrderedDict(channels=Channels())
        incoming = spec.shape[0] if len(spec.shape) == 3 else 1
        height, width = spec.shape[-2:]
        for k, outgoing in enumerate(self.channels, 1):
            layers[f"conv{k}"] = nn.Conv2d(incoming, outgoing, self.kernel, padding="same")
            layers[f"relu{k}"] = nn.ReLU()
            layers[f"pool{k}"] = nn.MaxPool2d(2) if self.pool == 2 else same_pool(height, width)
            height, width = (n // 2 if self.pool == 2 else -(-n // 2) for n in (height, width))
            incoming = outgoing
        layers["flatten"] = nn.Flatten()
        features = incoming * height * width
        for k, units in enumerate(hidden, 1):
            fc, prefix = ("fc", "") if len(hidden) == 1 else (f"fc{k}", f"fc{k}_")
            layers[fc] = nn.Linear(features, units)
            layers[f"{prefix}relu"] = nn.ReLU()
            layers[f"{prefix}dropout"] = nn.Dropout(self.dropout)
            features = units
        layers["out"] = self.head(features, spec.outputs)
        return nn.Sequential(layers)

    def _check(self, shape: tuple[int, ...], hidden: Counts) -> None:
        if len(shape) not in (2, 3):
            raise InputError(f'model.name = "cnn": needs images, but one sample has shape {shape}; use "mlp"')
        if self.pool == 2 and min(shape[-2:]) < 2 ** len(self.channels):
            raise InputError(
                f"model.channels = {list(self.channels)}: {len(self.channels)} poolings need images of at least "
                f"{2 ** len(self.channels)} pixels a side, got {shape[-2]}x{shape[-1]}"
            )
        if self.dropout and not hidden:
            raise InputError(
                f"model.dropout = {self.dropout}: comes after hidden layers, but model.hidden = [] asks for none; "
                "leave it out, or give the units of a hidden layer"
            )


def same_pool(height: int, width: int) -> nn.Module:
    """3x3 max-pooling with stride 2 and padding "SAME": [B, C, H, W] -> [B, C, ceil(H/2), ceil(W/2)].

    "SAME" pads an odd side by one on both ends, and an even one by one at its end, as ``ceil_mode`` does.
    """
    return nn.MaxPool2d(3, stride=2, padding=(height % 2, width % 2), ceil_mode=True)
