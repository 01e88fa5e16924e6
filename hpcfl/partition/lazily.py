"""What ``deal`` does, without the samples and client by client: for data that are made or read on demand."""

from __future__ import annotations

import numpy as np

from hpcfl.data import Survey
from hpcfl.errors import InputError
from hpcfl.partition import DEFAULT_TEST_SHARE, Partition, check_clients, check_own_split, clusters_of, drawn_counts
from hpcfl.partition.natural import Natural
from hpcfl.registry import registered
from hpcfl.rng import Purpose, stream
from hpcfl.splits import TEST, TRAIN, VALIDATION


def deal_counts(partition: Partition, survey: Survey) -> tuple[np.ndarray, np.ndarray]:
    """Cluster of each client [N], and its samples per split [N, 3], as ``deal`` would have it.

    Raises InputError as ``deal`` does, and for a partition that needs to look at the samples.
    """
    if type(partition) is not Natural:
        names = [name for name, kind in registered("partition").items() if kind is type(partition)]
        raise InputError(
            f'data.lazy = true: nobody holds samples that partition.name = "{names[0]}" could deal; set it to '
            '"natural", the clients that the data have, or leave data.lazy out'
        )
    if partition.labels == "local":
        raise InputError('data.lazy = true: partition.labels = "local" needs to see all labels; leave one of them out')
    own = survey.own_split and partition.test_share is None
    count = survey.count.copy()
    if own:
        check_own_split(partition, count.sum(0))
    else:
        count[:] = 0
        count[:, TRAIN] = survey.count.sum(1)
    natural = np.zeros(len(count), np.int64) if survey.cluster is None else survey.cluster
    cluster = clusters_of(partition, natural)
    share = 0.0 if own else DEFAULT_TEST_SHARE if partition.test_share is None else partition.test_share
    if share or partition.validation_share:
        test, validation = drawn_counts(partition, count[:, TRAIN], share)
        count += np.stack([-test - validation, validation, test], 1)
    check_clients(partition, count, own)
    return cluster, count


def arranged(
    x: np.ndarray, y: np.ndarray, part: np.ndarray | None, *, count: np.ndarray, client: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """A client's samples in the order train, validation, test, as ``deal`` draws them from ``Purpose.SPLIT``.

    x, y, part: as the data have them; part: their own split, None where it is not used. count: [3] samples per split.
    """
    validation, test = int(count[VALIDATION]), int(count[TEST])
    if part is None:
        split, pool = np.zeros(len(y), np.uint8), np.arange(len(y))
    else:
        split, pool = part.copy(), np.flatnonzero(part == TRAIN)
        validation -= int(np.count_nonzero(part == VALIDATION))
        test -= int(np.count_nonzero(part == TEST))
    if validation or test:
        pool = pool[np.argsort(stream(seed, Purpose.SPLIT, client=client).random(len(pool)), kind="stable")]
        split[pool[:test]] = TEST
        split[pool[test : test + validation]] = VALIDATION
    order = np.argsort(split, kind="stable")
    return x[order], y[order]
