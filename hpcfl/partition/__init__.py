"""Partitions: which client owns which sample, and which of a client's samples are for training, validation and test.

A registered partition says who owns what; ``deal`` does the rest, alike for all of them. Everything is a pure function
of (partition, data, seed): ownership is drawn from ``Purpose.PARTITION``, the split of client k's samples from
``Purpose.SPLIT`` with client k alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hpcfl.data import Dataset
from hpcfl.errors import InputError
from hpcfl.options import Count, OpenShare, Sizes
from hpcfl.partition.clusters import check_numbers, cut, read_clusters
from hpcfl.rng import Purpose, stream
from hpcfl.splits import TEST, TRAIN, VALIDATION

DEFAULT_TEST_SHARE = 0.2
NO_SAMPLES = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Shares:
    """Who owns which sample, and for what.

    client: [n] int64 owner of each sample. split: [n] uint8 TRAIN, VALIDATION, TEST. cluster: [N] int64 cluster of each
    client, 0..K-1 without gaps (zeros where there are no clusters). With local labels, label: [n] int64 class of each
    sample, as its place among the sorted classes of its owner; classes: [N] int64 their number.
    """

    client: np.ndarray
    split: np.ndarray
    cluster: np.ndarray
    label: np.ndarray | None = None
    classes: np.ndarray | None = None

    @property
    def n_clients(self) -> int:
        return len(self.cluster)

    def counts(self, part: int) -> np.ndarray:
        """Samples of each client in one part (TRAIN, VALIDATION, TEST): [N]."""
        return np.bincount(self.client[self.split == part], minlength=self.n_clients)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """What every partition shares.

    test_share: share of a client's samples kept for the test. Absent: the data's own split where it brings one, else
    0.2. Given: the data's own split is dropped and every client's samples are split anew (0: no test samples).
    validation_share: share of a client's training samples kept for validation. Both counts are rounded to the nearest.
    min_samples: training samples that every client must have. Training comes first: a test takes at least one sample
    of a client, but none that training needs, so a client with just min_samples samples (1: a single one) has no test.
    clusters: so many clusters of nearly equal size, of clients with consecutive numbers; or the size of each. Absent:
    those of cluster_file, else those that the data know, else one.
    cluster_file: CSV file, relative to the current folder, with the header client,cluster and a line per client.
    Clusters are numbers 0, 1, ... or names, which are numbered in alphabetical order.
    labels: "global", the classes of the data; or "local", those of each client alone, numbered 0, 1, ... in the order
    of the data's: a model has as many outputs as the client with the most classes needs.
    """

    test_share: OpenShare | None = None
    validation_share: OpenShare = 0.0
    min_samples: Count = 1
    clusters: Count | Sizes | None = None
    cluster_file: str | None = None
    labels: Literal["global", "local"] = "global"

    def __post_init__(self) -> None:
        if self.clusters is not None and self.cluster_file is not None:
            raise InputError("partition.clusters and partition.cluster_file: give one of the two, not both")

    def natural_clusters(self, data: Dataset) -> np.ndarray:
        """Cluster of each client as the data know it: [N] int64; its length is the number of clients."""
        raise InputError(f"partition {type(self).__name__}: defines no natural_clusters(data); derive it from Dealt")

    def owners(self, data: Dataset, part: np.ndarray, seed: int) -> np.ndarray:
        """Owner of each sample: [n] int64. part: [n] uint8, the data's own split where it is used, else all TRAIN."""
        raise InputError(f"partition {type(self).__name__}: defines no owners(data, part, seed)")

    def own_split(self, data: Dataset) -> np.ndarray | None:
        """The data's own split [n] where it is used."""
        return data.split if self.test_share is None else None

    def drawn_test_share(self, data: Dataset) -> float:
        """Share of each client's samples that ``deal`` will draw for the test; 0 where the data's own split is used."""
        if self.own_split(data) is not None:
            return 0.0
        return DEFAULT_TEST_SHARE if self.test_share is None else self.test_share


@dataclass(frozen=True, kw_only=True)
class Dealt(Partition):
    """A partition that deals the samples to a number of clients that the user chose.

    clients: number of clients. Clusters and clients that the data bring are not looked at.
    """

    clients: Count

    def natural_clusters(self, data: Dataset) -> np.ndarray:
        return np.zeros(self.clients, np.int64)


def deal(partition: Partition, data: Dataset, seed: int) -> Shares:
    """Deal every sample to exactly one client and one part.

    Raises InputError where the partition is not possible: it names the option, or the client that would be left
    without samples. In a set's own split a natural client may lack test samples (the data say so); a client of a
    dealt partition may not.
    """
    own = partition.own_split(data)
    part = np.full(len(data), TRAIN, np.uint8) if own is None else own
    if own is not None:
        check_own_split(partition, np.bincount(own, minlength=3))
    if isinstance(partition, Dealt):
        _check_feasible(partition, part)
    cluster = clusters_of(partition, partition.natural_clusters(data))
    owner = np.asarray(partition.owners(data, part, seed))
    if owner.shape != part.shape or owner.dtype.kind not in "iu" or owner.min() < 0 or owner.max() >= len(cluster):
        raise InputError(
            f"partition {type(partition).__name__}: owners() gave {owner.dtype} {list(owner.shape)}; expected "
            f"[{len(part)}] integers in 0..{len(cluster) - 1}"
        )
    split = _split(partition, owner, part, partition.drawn_test_share(data), len(cluster), seed)
    owner = owner.astype(np.int64, copy=False)
    shares = Shares(owner, split, cluster, *(_local(data, owner) if partition.labels == "local" else ()))
    check_clients(partition, np.stack([shares.counts(part) for part in (TRAIN, VALIDATION, TEST)], 1), own is not None)
    return shares


def clusters_of(partition: Partition, natural: np.ndarray) -> np.ndarray:
    """Cluster of each client [N]: those that the user asks for, else the natural ones."""
    clients = len(natural)
    known = f"partition.clients = {clients}" if isinstance(partition, Dealt) else f"the data have {clients} clients"
    if partition.clusters is not None:
        return cut(partition.clusters, clients, known)
    if partition.cluster_file is not None:
        return read_clusters(partition.cluster_file, clients, known)
    try:
        check_numbers(natural)
    except InputError as error:
        raise InputError(f"data: {error}, or set partition.clusters or partition.cluster_file") from None
    return natural


def _split(
    partition: Partition, owner: np.ndarray, part: np.ndarray, test_share: float, clients: int, seed: int
) -> np.ndarray:
    """Draw each client's test and validation samples from those that ``part`` leaves for training: [n] uint8."""
    split = part.copy()
    if test_share == partition.validation_share == 0:
        return split
    pool = np.flatnonzero(part == TRAIN)
    pool = pool[np.argsort(owner[pool], kind="stable")]  # client by client, each in the order of the data
    sizes = np.bincount(owner[pool], minlength=clients)
    draws = np.concatenate(
        [stream(seed, Purpose.SPLIT, client=k).random(size) for k, size in enumerate(sizes.tolist())]
    )
    pool = pool[np.lexsort((draws, owner[pool]))]
    test, validation = drawn_counts(partition, sizes, test_share)
    place = np.arange(len(pool)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    split[pool[place < np.repeat(test + validation, sizes)]] = VALIDATION
    split[pool[place < np.repeat(test, sizes)]] = TEST
    return split


def drawn_counts(partition: Partition, sizes: np.ndarray, test_share: float) -> tuple[np.ndarray, np.ndarray]:
    """Test and validation samples that are drawn out of each client's ``sizes`` samples for training: [N], [N]."""
    spare = np.maximum(sizes - partition.min_samples, 0)
    test = np.minimum(np.maximum(_rounded(test_share * sizes), test_share > 0), spare)
    return test, np.minimum(_rounded(partition.validation_share * (sizes - test)), spare - test)


def _local(data: Dataset, owner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every sample's class as its place among its owner's classes [n], and their number [N]."""
    if data.classes is None:
        raise InputError('partition.labels = "local": numbers classes, and a regression set has none; leave it out')
    owned = np.zeros((int(owner.max()) + 1, data.classes), bool)
    owned[owner, data.y] = True
    return (owned.cumsum(1) - 1)[owner, data.y], owned.sum(1)


def _rounded(values: np.ndarray) -> np.ndarray:
    return np.floor(values + 0.5).astype(np.int64)


def shuffled(key: np.ndarray, seed: int) -> dict[int, np.ndarray]:
    """The samples of each value of an integer key [n], in random order: value -> indices."""
    order = stream(seed, Purpose.PARTITION).permutation(len(key))
    order = order[np.argsort(key[order], kind="stable")]
    values, starts = np.unique(key[order], return_index=True)
    return dict(zip(values.tolist(), np.split(order, starts[1:]), strict=True))


def labels(data: Dataset, name: str) -> np.ndarray:
    """The class labels [n]. Raises InputError for a regression set."""
    if data.classes is None:
        raise InputError(
            f'partition.name = "{name}": deals by class, and a regression set has none; use "iid" or "natural"'
        )
    return data.y


def check_own_split(partition: Partition, total: np.ndarray) -> None:
    """total [3]: samples of the whole set in each part of its own split."""
    if not total[TEST]:
        raise InputError(
            "partition.test_share is absent and the data's own split has no test sample; set partition.test_share "
            "(0: no test) to split each client's samples instead"
        )
    if partition.validation_share and total[VALIDATION]:
        raise InputError(
            f"partition.validation_share = {partition.validation_share}: the data's own split has validation samples; "
            "leave it out, or set partition.test_share too to split each client's samples instead"
        )


def _check_feasible(partition: Dealt, part: np.ndarray) -> None:
    available = int((part == TRAIN).sum())
    if partition.clients * partition.min_samples > available:
        most = available // partition.min_samples
        raise InputError(
            f"partition.clients = {partition.clients}, partition.min_samples = {partition.min_samples}: the data have "
            f"{available} samples to train on, enough for at most {most} clients"
        )


def check_clients(partition: Partition, counts: np.ndarray, own_split: bool) -> None:
    """counts [N, 3]: samples of each client in each part."""
    few = np.flatnonzero(counts[:, TRAIN] < partition.min_samples)
    if len(few):
        count = int(counts[few[0], TRAIN])
        have = f"{count} training sample{'s' * (count != 1)}" if counts[few[0]].any() else "no sample at all"
        advice = "use fewer clients" if isinstance(partition, Dealt) else "leave such clients out of the data"
        raise InputError(
            f"partition.min_samples = {partition.min_samples}: client {few[0]} has {have}{_others(few)}; {advice}"
        )
    if own_split and isinstance(partition, Dealt):
        few = np.flatnonzero(counts[:, TEST] == 0)
        if len(few):
            raise InputError(
                f"partition.clients = {partition.clients}: client {few[0]} has no test sample{_others(few)}, since the "
                f"data's own split has {counts[:, TEST].sum()}; use fewer clients, or set partition.test_share "
                "to split each client's samples instead"
            )


def _others(clients: np.ndarray) -> str:
    more = len(clients) - 1
    return f" (and so for {more} other client{'s' * (more > 1)})" if more else ""
