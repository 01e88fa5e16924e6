"""``synthetic``: labels of one random linear model per client, on inputs of one random mean per client."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpcfl.data import TRAIN, Dataset, Reader, Survey
from hpcfl.errors import InputError
from hpcfl.options import Count, NonNegative
from hpcfl.registry import register
from hpcfl.rng import Purpose, stream


@register("data", "synthetic")
@dataclass(frozen=True)
class Synthetic:
    """Synthetic(alpha, beta) of FedProx (Li et al., MLSys 2020), with the sample counts of pFedMe's experiments.

    For client k, with N(mean, variance):
      u_k ~ N(0, alpha),  W_k ~ N(u_k, 1) [dim, classes],  b_k ~ N(u_k, 1) [classes]       (models)
      B_k ~ N(0, beta),   v_k ~ N(B_k, 1) [dim],  x ~ N(v_k, diag(j^-1.2)), j = 1..dim     (inputs)
      y = argmax softmax(x W_k + b_k),  n_k = 5 (floor(e^z) + 50), z ~ N(4, 2^2)
    alpha and beta are variances, as the papers write them; the released generators use theirs as standard deviations,
    so that their "(0.5, 0.5)" is alpha = beta = 0.25 here ("(0, 0)" and "(1, 1)" are the same). The recipe's u_k moves
    the logits of all classes alike, so alpha changes no label: the clients' models differ as much at alpha = 0.

    samples: the number of samples of every client; absent: the recipe's n_k, 250 at least and about 2,265 in the mean.
    iid: one W, b ~ N(0, 1) for all clients and v_k = 0; needs alpha = beta = 0.
    x [n, dim] float32; client k is the natural client of its samples and does not depend on the number of clients. The
    set brings no split: the published experiments keep a tenth of each client's samples for the test
    (partition.test_share = 0.1).
    lazy: make a client's samples, the same ones, whenever they are needed, so that nobody holds them all: for very many
    clients, with the partition "natural".
    """

    alpha: NonNegative = 1.0
    beta: NonNegative = 1.0
    clients: Count = 100
    dim: Count = 60
    classes: Count = 10
    samples: Count | None = None
    iid: bool = False
    lazy: bool = False

    def __post_init__(self) -> None:
        if self.iid and (self.alpha or self.beta):
            raise InputError(
                f"data.iid = true with data.alpha = {self.alpha}, data.beta = {self.beta}: "
                "clients that are alike need alpha = 0 and beta = 0"
            )

    def load(self, seed: int) -> Dataset:
        """All clients' samples, client by client."""
        made = [self._client(seed, k) for k in range(self.clients)]
        x, y = (np.concatenate(arrays) for arrays in zip(*made, strict=True))
        client = np.repeat(np.arange(self.clients), [len(labels) for _, labels in made])
        return Dataset(x, y, self.classes, client=client)

    def survey(self, seed: int) -> Survey:
        """Sizes alone."""
        count = np.zeros((self.clients, 3), np.int64)
        if self.samples is None:
            count[:, TRAIN] = [drawn_size(stream(seed, Purpose.DATA, client=k)) for k in range(self.clients)]
        else:
            count[:, TRAIN] = self.samples
        return Survey(count, (self.dim,), np.dtype(np.float32), self.classes)

    def reader(self, seed: int, sizes: np.ndarray) -> Reader:
        """Makes one client's samples."""
        return lambda k: (*self._client(seed, k), None)

    def _client(self, seed: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        """x [n_k, dim], y [n_k] of one client."""
        g = stream(seed, Purpose.DATA, client=k)
        n = drawn_size(g)  # drawn even where it is not used, so that the models stay the same
        u = g.normal(0, math.sqrt(self.alpha))
        w, b = g.normal(u, 1, (self.dim, self.classes)), g.normal(u, 1, self.classes)
        v = g.normal(g.normal(0, math.sqrt(self.beta)), 1, self.dim)
        if self.iid:
            shared = stream(seed, Purpose.DATA, step=1)
            w, b = shared.normal(0, 1, (self.dim, self.classes)), shared.normal(0, 1, self.classes)
            v = np.zeros(self.dim)
        deviation = np.arange(1, self.dim + 1) ** -0.6
        x = v + deviation * g.standard_normal((n if self.samples is None else self.samples, self.dim))
        return x.astype(np.float32), (x @ w + b).argmax(1)  # softmax keeps the order


def drawn_size(g: np.random.Generator) -> int:
    """The recipe's n_k: the first thing that a client's stream is asked for."""
    return 5 * (int(g.lognormal(4, 2)) + 50)
