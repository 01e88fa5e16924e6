"""Softmax cross entropy of a classification, half the squared error of a regression."""

from __future__ import annotations

import torch
from torch import Tensor

from hpcfl.batch import Batch


def sample_losses(outputs: Tensor, batch: Batch, classes: int | None) -> Tensor:
    """Per sample: outputs [C, B, O] -> [C, B]."""
    if classes is None:
        return 0.5 * (outputs.squeeze(-1) - batch.y) ** 2
    outputs = masked(outputs, batch)
    return torch.logsumexp(outputs, -1) - outputs.gather(-1, batch.y.unsqueeze(-1)).squeeze(-1)


def loss_and_slope(outputs: Tensor, batch: Batch, classes: int | None, dim: int = 2) -> tuple[Tensor, Tensor]:
    """Weighted loss [C] and its derivative by the outputs [C, B, O], in closed form. dim: 1 for outputs [C, O, B]."""
    y, weight = batch.y.unsqueeze(dim), batch.weight.unsqueeze(dim)
    if classes is None:
        slope = outputs - y
        loss = 0.5 * (slope**2 * weight).flatten(1).sum(1)
    else:
        logs = torch.log_softmax(masked(outputs, batch, dim), dim)
        loss = -(logs.gather(dim, y).squeeze(dim) * batch.weight).sum(1)
        slope = logs.exp_().scatter_add_(dim, y, torch.full_like(y, -1, dtype=logs.dtype))
    return loss, slope.mul_(weight)


def masked(outputs: Tensor, batch: Batch, dim: int = 2) -> Tensor:
    """The outputs, -inf where a client does not have them: such a class has probability zero and no gradient."""
    if batch.mask is None:
        return outputs
    return outputs + (batch.mask if dim == 2 else batch.mask.transpose(1, 2))
