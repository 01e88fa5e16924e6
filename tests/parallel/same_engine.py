"""A small engine on a given topology, for checks of collectives: a linear model on random samples."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from hpcfl.algorithm import LocalSGD
from hpcfl.engine import Engine
from hpcfl.group import Group
from hpcfl.round import Sent
from hpcfl.task import Task
from hpcfl.topology import Topology


def engine(topology: Topology) -> Engine:
    """Every client has its number of samples of three features, a regression in float64."""
    placement = topology.placement
    ids = placement.hosted(topology.world.rank)
    count = np.zeros((len(ids), 3), np.int64)
    count[:, 0] = placement.samples[ids]
    n = int(count.sum())
    x, y = torch.ones(n, 3, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    group = Group(placement.clients, ids, placement.cluster[ids], count, x, y, 1.0, 0.0, torch.float64)
    task = Task(nn.Linear(3, 1), (3,), None, device=torch.device("cpu"), dtype=torch.float64)
    return Engine(task, group, topology, LocalSGD(), seed=0)


def rows_of(machine: Engine, values: np.ndarray, participants: np.ndarray) -> Sent:
    """What this rank's participants would have sent: their rows of values [N, P], in two pieces."""
    ids = machine.group.ids[machine.hosted(participants)]
    sent = Sent()
    for part in np.array_split(ids, 2):
        if len(part):
            sent.rows.append(torch.from_numpy(values[part]))
            sent.clients.append(part)
    return sent
