"""Convolutional network for images."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hpcfl.errors import InputError
from hpcfl.models import Penalised, Spec
from hpcfl.options import Count, Counts, OpenShare
from hpcfl.registry import register


class Channels(nn.Module):
    """[B, H, W] -> [B, 1, H, W]; images that have channels already pass."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) if x.dim() == 3 else x


@register("model", "cnn")
@dataclass(frozen=True)
class CNN(Penalised):
    """Convolutions with ReLU and 2x2 max-pooling, then one hidden layer.

    The defaults are the CNN of APFL's released code (5x5 convolutions with 20 and 50 channels, 512 hidden units), with
    padding that keeps the size, so that small images work, too.
    """

    channels: Counts = (20, 50)
    kernel: Count = 5
    hidden: Count = 512
    dropout: OpenShare = 0.0

    def build(self, spec: Spec) -> nn.Module:
        if len(spec.shape) not in (2, 3):
            raise InputError(f'model.name = "cnn": needs images, but one sample has shape {spec.shape}; use "mlp"')
        incoming = spec.shape[0] if len(spec.shape) == 3 else 1
        if min(spec.shape[-2:]) < 2 ** len(self.channels):
            raise InputError(
                f"model.channels = {list(self.channels)}: {len(self.channels)} poolings need images of at least "
                f"{2 ** len(self.channels)} pixels a side, got {spec.shape[-2]}x{spec.shape[-1]}"
            )
        layers: OrderedDict[str, nn.Module] = OrderedDict(channels=Channels())
        for k, outgoing in enumerate(self.channels):
            layers[f"conv{k + 1}"] = nn.Conv2d(incoming, outgoing, self.kernel, padding="same")
            layers[f"relu{k + 1}"] = nn.ReLU()
            layers[f"pool{k + 1}"] = nn.MaxPool2d(2)
            incoming = outgoing
        layers["flatten"] = nn.Flatten()
        with torch.no_grad():
            width = nn.Sequential(layers)(torch.zeros(1, *spec.shape)).shape[1]
        layers["fc"] = nn.Linear(width, self.hidden)
        layers["relu"] = nn.ReLU()
        layers["dropout"] = nn.Dropout(self.dropout)
        layers["out"] = nn.Linear(self.hidden, spec.outputs)
        return nn.Sequential(layers)
