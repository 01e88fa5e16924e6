"""``hierarchical-logistic``: a surrogate of donor data: very many tiny clients, nearly all of their rows successes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpcfl.data import Dataset
from hpcfl.errors import InputError
from hpcfl.options import Count, InnerShare, NonNegative
from hpcfl.registry import register
from hpcfl.rng import Purpose, stream

SLOPES = np.array([0.5, -0.5])  # of log gifts and log days, in the mean over clusters
ROWS = 3.44, 1.0  # mean and deviation of the logarithm of a client's rows beyond min_rows: 60 rows in the mean
GIFTS = 1.2, 1.0  # of the logarithm of the earlier gifts but one
DAYS = 5.3, 0.9  # of the logarithm of the days since the last gift
LOG_GIFTS = 1.39, 0.85  # mean and deviation of the covariates, which they are standardised by
LOG_DAYS = 5.3, 0.9
CALIBRATION = 1 << 15  # rows of the sample that the intercept is found from


@register("data", "hierarchical-logistic")
@dataclass(frozen=True)
class HierarchicalLogistic:
    """Stands in for the donor data of Async-L2GD (Lyu, Hanzely, Kolar 2022), which may not be passed on.

    A client is a postal code, a cluster a state, a row an appeal, a success (class 1) a gift in reply. For cluster j
    and its client i, with N(mean, variance):
      c_j ~ N(center, cluster_variance) [3],  theta_i ~ N(c_j, client_variance) [3]
      g = 1 + floor(e^N(1.2, 1)) earlier gifts,  d = ceil(e^N(5.3, 0.81)) days since the last one
      x = ((log g - 1.39) / 0.85, (log d - 5.3) / 0.9, 1),  y = 1 with probability 1 / (1 + e^-<x, theta_i>)
      n_i = min(min_rows + floor(e^N(3.44, 1)), max_rows)
    center = (0.5, -0.5, b), with the b for which the expected probability is ``success`` (found on one fixed sample:
    the same for every seed). The sizes of the clusters fall off like the quantiles of an exponential distribution,
    about as those of the states of the USA do; clients are numbered cluster by cluster. Of the paper's data are the
    number of clients, the kind of clusters, the covariates, the least rows and the success; the rest is a guess.

    x [n, 3] float64 has the intercept's column, for models without bias. truth [N, 3] is theta: <x, theta_i> are the
    log-odds of class 1. No split of its own (published: partition.test_share = 0.2).
    """

    clients: Count = 29490
    clusters: Count = 51
    cluster_variance: NonNegative = 0.1
    client_variance: NonNegative = 0.1
    success: InnerShare = 0.94
    min_rows: Count = 10
    max_rows: Count = 400

    def __post_init__(self) -> None:
        if self.clusters > self.clients:
            raise InputError(
                f"data.clusters = {self.clusters}, data.clients = {self.clients}: more clusters than clients; "
                "every cluster needs one at least"
            )
        if self.min_rows > self.max_rows:
            raise InputError(
                f"data.min_rows = {self.min_rows}, data.max_rows = {self.max_rows}: expected min_rows <= max_rows"
            )

    def load(self, seed: int) -> Dataset:
        """All clients' rows, client by client."""
        cluster = np.repeat(np.arange(self.clusters), skewed_sizes(self.clients, self.clusters))
        center = np.array([*SLOPES, self.intercept()])
        z = np.array([stream(seed, Purpose.DATA, step=1, client=j).standard_normal(3) for j in range(self.clusters)])
        centers = center + math.sqrt(self.cluster_variance) * z  # [K, 3]
        made = [self._draws(seed, i) for i in range(self.clients)]
        z, rows, uniform = (np.concatenate(arrays) for arrays in zip(*made, strict=True))
        theta = centers[cluster] + math.sqrt(self.client_variance) * z.reshape(-1, 3)  # [N, 3]
        client = np.repeat(np.arange(self.clients), [len(u) for _, _, u in made])
        x = covariates(rows)
        y = uniform < probability((x * theta[client]).sum(1))
        return Dataset(x, y.astype(np.int64), 2, client=client, cluster=cluster, truth=theta)

    def intercept(self) -> float:
        """The intercept in the mean over clusters, by bisection."""
        g = stream(0, Purpose.DATA, step=2)
        x = covariates(g.standard_normal((CALIBRATION, 2)))
        deviation = math.sqrt(self.cluster_variance + self.client_variance)
        offset = x[:, :2] @ SLOPES + deviation * (x * g.standard_normal(x.shape)).sum(1)
        high = abs(offset).max() + 750  # e^-750 = 0
        low = -high
        for _ in range(64):
            middle = (low + high) / 2
            low, high = (middle, high) if probability(middle + offset).mean() < self.success else (low, middle)
        return float(high)

    def _draws(self, seed: int, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """One client's standard normal numbers, of its parameters [3] and rows [n_i, 2], and uniform ones [n_i]."""
        g = stream(seed, Purpose.DATA, client=i)
        *theta, size = g.standard_normal(4).tolist()
        n = min(self.min_rows + int(math.exp(ROWS[0] + ROWS[1] * size)), self.max_rows)
        return np.array(theta), g.standard_normal((n, 2)), g.random(n)


def covariates(z: np.ndarray) -> np.ndarray:
    """x [n, 3] from standard normal numbers [n, 2]."""
    gifts = 1 + np.floor(np.exp(GIFTS[0] + GIFTS[1] * z[:, 0]))
    days = np.ceil(np.exp(DAYS[0] + DAYS[1] * z[:, 1]))
    scaled = [(np.log(v) - mean) / deviation for v, (mean, deviation) in ((gifts, LOG_GIFTS), (days, LOG_DAYS))]
    return np.stack([*scaled, np.ones(len(z))], 1)


def probability(log_odds: np.ndarray) -> np.ndarray:
    """Of a success: 1 / (1 + e^-log_odds)."""
    return np.exp(-np.logaddexp(0, -log_odds))


def skewed_sizes(clients: int, clusters: int) -> np.ndarray:
    """Clients of each cluster [K], descending: one each, the others in proportion to exponential quantiles."""
    weight = -np.log((np.arange(clusters) + 0.5) / clusters)
    exact = weight / weight.sum() * (clients - clusters)
    sizes = np.floor(exact).astype(np.int64)
    sizes[np.argsort(sizes - exact, kind="stable")[: clients - clusters - sizes.sum()]] += 1
    return 1 + sizes
