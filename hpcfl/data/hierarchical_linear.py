"""``hierarchical-linear``: linear regressions whose true parameters vary between clusters, and between clients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpcfl.data import TEST, TRAIN, Dataset
from hpcfl.errors import InputError
from hpcfl.options import Count, CountOrZero, NonNegative, NonNegatives, Numbers
from hpcfl.registry import register
from hpcfl.rng import Purpose, stream


@register("data", "hierarchical-linear")
@dataclass(frozen=True)
class HierarchicalLinear:
    """The hierarchical linear model of Async-L2GD (Lyu, Hanzely, Kolar 2022), the size of its simulated data.

    For cluster j and its client i, with N(mean, variance):
      c_j ~ N(center, cluster_variance) [dim],  theta_i ~ N(c_j, client_variance_j) [dim]
      x ~ N(0, 1) [dim],  y = <x, theta_i> + N(0, noise_variance)
    x [n, dim], y [n] float64; truth [N, dim] is theta, the parameters of the model "linear" with bias = false. Client
    j * clients_per_cluster + k does not depend on the number of clusters, its parameters and its first observations not
    on the number of observations.

    center: one number, or one per coordinate. client_variance: one number, or one per cluster.
    observations: of every client, for training. test_observations: of every client, besides; they are the set's own
    test split. 0: no split of its own; partition.test_share = 0 then keeps all observations for training.
    """

    clusters: Count = 20
    clients_per_cluster: Count = 20
    dim: Count = 20
    observations: Count = 10
    test_observations: CountOrZero = 100
    center: float | Numbers = 0.0
    cluster_variance: NonNegative = 1.0
    client_variance: NonNegative | NonNegatives = 1.0
    noise_variance: NonNegative = 1.0

    def __post_init__(self) -> None:
        _check_length("center", self.center, "coordinate", "dim", self.dim)
        _check_length("client_variance", self.client_variance, "cluster", "clusters", self.clusters)

    def load(self, seed: int) -> Dataset:
        """All clients' observations, client by client, each one's training observations first."""
        n, d = self.clusters * self.clients_per_cluster, self.dim
        cluster = np.repeat(np.arange(self.clusters), self.clients_per_cluster)
        centers = _normals(seed, 1, self.clusters, d)
        own = _normals(seed, 0, n, d + self.observations * (d + 1))
        test = _normals(seed, 2, n, self.test_observations * (d + 1))

        centers = np.array(self.center) + math.sqrt(self.cluster_variance) * centers  # [K, dim]
        deviation = np.broadcast_to(np.sqrt(self.client_variance), self.clusters)[cluster]
        theta = centers[cluster] + deviation[:, None] * own[:, :d]  # [N, dim]
        rows = np.concatenate([own[:, d:], test], 1).reshape(n, -1, d + 1)  # [N, observations of both kinds, dim + 1]
        x = rows[..., :d]
        y = (x * theta[:, None]).sum(2) + math.sqrt(self.noise_variance) * rows[..., d]

        split = np.repeat(np.array([TRAIN, TEST], np.uint8), [self.observations, self.test_observations])
        return Dataset(
            x.reshape(-1, d),
            y.reshape(-1),
            None,
            client=np.repeat(np.arange(n), len(split)),
            cluster=cluster,
            split=np.tile(split, n) if self.test_observations else None,
            truth=theta,
        )


def _normals(seed: int, step: int, streams: int, size: int) -> np.ndarray:
    """Standard normal numbers [streams, size], row k from a stream of its own."""
    return np.array([stream(seed, Purpose.DATA, step=step, client=k).standard_normal(size) for k in range(streams)])


def _check_length(option: str, value: float | tuple[float, ...], of: str, count_option: str, count: int) -> None:
    if isinstance(value, tuple) and len(value) != count:
        raise InputError(
            f"data.{option}: {len(value)} values, expected one, or one per {of} (data.{count_option} = {count})"
        )
