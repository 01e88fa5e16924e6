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


def loss_and_slope(outputs: Tensor, batch: Batch, classes: int | None) -> tuple[Tensor, Tensor]:
    """Weighted loss [C] and its derivative by the outputs [C, B, O], in closed form."""
    if classes is None:
        slope = outputs - batch.y.unsqueeze(-1)
        loss = 0.5 * (slope.squeeze(-1) ** 2 * batch.weight).sum(1)
    else:
        logs = torch.log_softmax(masked(outputs, batch), -1)
        label = batch.y.unsqueeze(-1)
        loss = -(logs.gather(-1, label).squeeze(-1) * batch.weight).sum(1)
        slope = logs.exp_().scatter_add_(-1, label, torch.full_like(label, -1, dtype=logs.dtype))
    return loss, slope.mul_(batch.weight.unsqueeze(-1))


def masked(outputs: Tensor, batch: Batch) -> Tensor:
    """The outputs, -inf where a client does not have them: such a class has probability zero and no gradient."""
    return outputs if batch.mask is None else outputs + batch.mask
