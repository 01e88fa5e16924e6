"""The objective F of known clusters for linear regressions as one quadratic of all N P numbers, by dense algebra."""

from __future__ import annotations

import numpy as np


class Dense:
    """Sum of f_i(x_i) = 1/2 x_i' H_i x_i - b_i' x_i and of the pull towards the means; x: [N, P]."""

    def __init__(self, data, cluster, gamma, alpha, *, objective="mean", l2=0.0, bias=False):
        """data: x, y of each client; cluster [N], gamma [N], alpha [K]."""
        self.cluster, self.gamma, self.alpha = (np.asarray(values) for values in (cluster, gamma, alpha))
        self.H, self.b = [], []
        for x, y in data:
            x, scale = np.hstack([x, np.ones((len(y), 1))]) if bias else x, len(y) if objective == "sum" else 1
            self.H.append(scale * (x.T @ x / len(y) + l2 * np.eye(x.shape[1])))
            self.b.append(scale * x.T @ y / len(y))
        self.H, self.b = np.array(self.H), np.array(self.b)

    def weights(self):
        """Of the clusters' means and of that of all: [N] each, and the strength of the pull towards it."""
        for j, alpha in enumerate(self.alpha):
            yield self.gamma * (self.cluster == j), 1 - alpha
        if self.alpha.any():
            yield self.gamma * self.alpha[self.cluster], 1.0

    def pull(self):
        """[N, N]: 1/2 sum_i w_i ||x_i - mean||^2 has the matrix diag(w) - w w' / sum w."""
        return sum(scale * (np.diag(w) - np.outer(w, w) / w.sum()) for w, scale in self.weights())

    def gradients(self, x):
        """Of the f_i, [N, P]."""
        return np.einsum("nij,nj->ni", self.H, x) - self.b

    def gradient(self, x):
        """Of F, [N, P]."""
        return self.gradients(x) + self.pull() @ x

    def deviations(self, x):
        """x_i - mean of all (where alpha = 0, there is none: x_i), x_i - mean of the cluster: [N, P] each."""
        means = [np.average(x, axis=0, weights=w) for w, _ in self.weights()]
        within, between = means[: len(self.alpha)], means[len(self.alpha) :]
        return x - sum(between), x - np.array(within)[self.cluster]

    def minimiser(self):
        """[N, P], that of least norm where there are many."""
        n, p = self.b.shape
        matrix = np.kron(self.pull(), np.eye(p))
        for i, own in enumerate(self.H):
            matrix[i * p : (i + 1) * p, i * p : (i + 1) * p] += own
        return np.linalg.lstsq(matrix, self.b.ravel(), rcond=1e-12)[0].reshape(n, p)
