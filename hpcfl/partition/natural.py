"""``natural``: the clients, and clusters, that the data themselves have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcfl.data import Dataset
from hpcfl.errors import InputError
from hpcfl.partition import Partition
from hpcfl.registry import register


@register("partition", "natural")
@dataclass(frozen=True, kw_only=True)
class Natural(Partition):
    """Client k of the data is client k of the run, with its cluster where the data know clusters."""

    def natural_clusters(self, data: Dataset) -> np.ndarray:
        client = _clients(data)
        return np.zeros(client.max() + 1, np.int64) if data.cluster is None else data.cluster

    def owners(self, data: Dataset, part: np.ndarray, seed: int) -> np.ndarray:
        return _clients(data)


def _clients(data: Dataset) -> np.ndarray:
    if data.client is None:
        raise InputError(
            'partition.name = "natural": this data set has no natural clients; use "iid", "classes", "degrees" '
            'or "dirichlet", or data that have them (data.name = "omniglot", "synthetic", "hierarchical-linear", or '
            '"file" with an array "client")'
        )
    return data.client
