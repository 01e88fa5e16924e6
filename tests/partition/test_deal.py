"""What holds for every partition: an exact disjoint cover, the split's sizes, determinism, streams that do not mix."""

import numpy as np
import pytest

from hpcfl.data import TEST, TRAIN, VALIDATION, Dataset
from hpcfl.errors import InputError
from hpcfl.partition import Dealt, Partition, Shares, deal
from hpcfl.partition.classes import Classes
from hpcfl.partition.dirichlet import Dirichlet
from hpcfl.partition.iid import Iid
from hpcfl.partition.natural import Natural

CLIENTS = 7
KINDS = [Iid, Classes, Dirichlet, Natural]


def dataset(n=600, classes=10, seed=0, own=False, cluster=False):
    rng = np.random.default_rng(seed)
    client = rng.permutation(np.arange(n) % CLIENTS)
    return Dataset(
        np.zeros((n, 1), np.uint8),
        rng.integers(classes, size=n),
        classes,
        client=client,
        cluster=np.arange(CLIENTS) % 3 if cluster else None,
        split=np.where(np.arange(n) < n * 5 // 6, TRAIN, TEST).astype(np.uint8) if own else None,
    )


def make(kind, **options):
    return kind(**options) if kind is Natural else kind(clients=CLIENTS, **options)


every = pytest.mark.parametrize("kind", KINDS)


@every
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_cover_and_counts(kind, own, seed):
    data = dataset(seed=seed, own=own)
    shares = deal(make(kind, validation_share=0.1, min_samples=3), data, seed)
    assert shares.client.shape == shares.split.shape == (len(data),)
    assert (shares.client.dtype, shares.split.dtype, shares.cluster.dtype) == (np.int64, np.uint8, np.int64)
    assert shares.n_clients == CLIENTS
    assert np.isin(shares.client, range(CLIENTS)).all()
    assert sum(shares.counts(p).sum() for p in (TRAIN, VALIDATION, TEST)) == len(data)
    assert shares.counts(TRAIN).min() >= 3
    assert shares.counts(TEST).min() >= 1
    sizes = np.bincount(shares.client, minlength=CLIENTS)
    if own:
        assert ((shares.split == TEST) == (data.split == TEST)).all()
        pool = shares.counts(TRAIN) + shares.counts(VALIDATION)
    else:
        np.testing.assert_array_less(abs(shares.counts(TEST) - 0.2 * sizes), 1.01)
        pool = sizes - shares.counts(TEST)
    np.testing.assert_array_less(abs(shares.counts(VALIDATION) - 0.1 * pool), 1.01)


@every
def test_same_seed_same_bits_and_another_seed_another_deal(kind):
    data = dataset()
    a, b, c = (deal(make(kind), data, seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(a.client, b.client)
    np.testing.assert_array_equal(a.split, b.split)
    assert (a.split != c.split).any()
    assert (a.client != c.client).any() == (kind is not Natural)


@every
@pytest.mark.parametrize("own", [False, True])
def test_shares_of_the_split_do_not_change_the_ownership(kind, own):
    data = dataset(own=own)
    first = deal(make(kind), data, 1)
    for options in ({"validation_share": 0.3}, {} if own else {"test_share": 0.4}):
        np.testing.assert_array_equal(deal(make(kind, **options), data, 1).client, first.client)


@every
def test_test_samples_stay_when_validation_is_added(kind):
    data = dataset()
    a, b = deal(make(kind), data, 1), deal(make(kind, validation_share=0.25), data, 1)
    np.testing.assert_array_equal(a.split == TEST, b.split == TEST)
    assert (b.split == VALIDATION).sum() > 100


@every
def test_a_given_test_share_replaces_the_own_split(kind):
    own, none = dataset(own=True), dataset()
    for share in (0.0, 0.2, 0.5):
        a, b = (deal(make(kind, test_share=share), data, 2) for data in (own, none))
        np.testing.assert_array_equal(a.client, b.client)
        np.testing.assert_array_equal(a.split, b.split)
        assert (a.split == TEST).mean() == pytest.approx(share, abs=0.01)
    default = deal(make(kind), none, 2)
    np.testing.assert_array_equal(default.split, deal(make(kind, test_share=0.2), none, 2).split)


def test_a_clients_split_depends_on_the_seed_and_the_client_alone():
    """More clients, in another order of the data, leave the split of the first ones as it was."""
    sizes = [5, 12, 1, 30]
    client = np.repeat(np.arange(4), sizes)
    more = np.concatenate([np.full(9, 4), client])
    splits = []
    for c in (client, more):
        data = Dataset(np.zeros((len(c), 1), np.uint8), np.zeros(len(c), np.int64), 1, client=c)
        splits.append(deal(Natural(validation_share=0.2), data, 11).split)
    np.testing.assert_array_equal(splits[0], splits[1][9:])


def test_clients_of_the_same_size_have_different_splits():
    client = np.repeat(np.arange(8), 40)
    data = Dataset(np.zeros((320, 1), np.uint8), np.zeros(320, np.int64), 1, client=client)
    rows = deal(Natural(), data, 0).split.reshape(8, 40)
    assert len({row.tobytes() for row in rows}) == 8
    assert (rows == TEST).sum(1).tolist() == [8] * 8


def test_test_samples_are_drawn_evenly_over_the_positions():
    client = np.repeat(np.arange(2000), 10)
    data = Dataset(np.zeros((20000, 1), np.uint8), np.zeros(20000, np.int64), 1, client=client)
    share = (deal(Natural(test_share=0.3), data, 0).split.reshape(2000, 10) == TEST).mean(0)
    np.testing.assert_allclose(share, 0.3, atol=0.04)


def test_training_comes_first():
    """[sizes] with min_samples 1 and 3: (train, validation, test) by hand."""
    client = np.repeat(np.arange(6), [1, 2, 3, 4, 5, 10])
    data = Dataset(np.zeros((25, 1), np.uint8), np.zeros(25), None, client=client)

    def rows(keep=slice(None), **options):
        shares = deal(Natural(**options), data, 0)
        return np.stack([shares.counts(p) for p in (TRAIN, VALIDATION, TEST)], 1).tolist()[keep]

    assert rows() == [[1, 0, 0], [1, 0, 1], [2, 0, 1], [3, 0, 1], [4, 0, 1], [8, 0, 2]]
    assert rows(test_share=0.9) == [[1, 0, 0], [1, 0, 1], [1, 0, 2], [1, 0, 3], [1, 0, 4], [1, 0, 9]]
    assert rows(test_share=0.0) == [[n, 0, 0] for n in (1, 2, 3, 4, 5, 10)]
    assert rows(validation_share=0.5) == [[1, 0, 0], [1, 0, 1], [1, 1, 1], [1, 2, 1], [2, 2, 1], [4, 4, 2]]
    with pytest.raises(InputError, match=r"client 0 has 1 training sample \(and so for 1 other client\)"):
        rows(min_samples=3)


def test_natural_clusters_are_kept_and_dealt_clients_have_none():
    data = dataset(cluster=True)
    np.testing.assert_array_equal(deal(Natural(), data, 0).cluster, data.cluster)
    np.testing.assert_array_equal(deal(Natural(), data, 0).client, data.client)
    assert deal(Natural(), dataset(), 0).cluster.tolist() == [0] * CLIENTS
    assert deal(Iid(clients=4), data, 0).cluster.tolist() == [0] * 4


def test_own_validation_samples_are_kept():
    split = np.array([TRAIN, VALIDATION, TEST] * 40, np.uint8)
    data = Dataset(np.zeros((120, 1), np.uint8), np.arange(120) % 2, 2, split=split)
    for kind in (Iid, Dirichlet):
        np.testing.assert_array_equal(deal(kind(clients=3), data, 0).split, split)
    assert deal(Iid(clients=3), data, 0).counts(VALIDATION).tolist() == [14, 13, 13]


@pytest.mark.parametrize("n", [10, 11, 97, 500])
@pytest.mark.parametrize("own", [False, True])
def test_iid_sizes_differ_by_one_at_most(n, own):
    data = dataset(n, own=own)
    for seed in range(3):
        shares = deal(Iid(clients=2 if own else 10, test_share=None if own else 0.0), data, seed)
        for p in (TRAIN, TEST):
            assert np.ptp(shares.counts(p)) <= 1


def test_iid_clients_have_every_class_in_proportion():
    data = dataset(20000)
    shares = deal(Iid(clients=10), data, 0)
    counts = np.array([np.bincount(data.y[shares.client == k], minlength=10) for k in range(10)])
    np.testing.assert_allclose(counts, 200, atol=60)


def test_the_deal_of_the_whole_does_not_depend_on_the_samples():
    a, b = dataset(seed=0), dataset(seed=1)
    np.testing.assert_array_equal(deal(Iid(clients=5), a, 0).client, deal(Iid(clients=5), b, 0).client)


class Wrong(Dealt):
    def owners(self, data, part, seed):
        return np.full(len(data), self.clients)


def test_a_plugins_mistakes_are_named():
    data = dataset(10)
    with pytest.raises(InputError, match=r"Wrong: owners\(\) gave int64 \[10\]; expected \[10\] integers in 0..2"):
        deal(Wrong(clients=3), data, 0)
    with pytest.raises(InputError, match=r"defines no natural_clusters\(data\)"):
        deal(Partition(), data, 0)
    with pytest.raises(InputError, match="defines no owners"):
        deal(Dealt(clients=2), data, 0)


def test_counts_of_shares():
    shares = Shares(np.array([0, 2, 2]), np.array([TRAIN, TEST, TEST], np.uint8), np.zeros(3, np.int64))
    assert [shares.counts(p).tolist() for p in (TRAIN, VALIDATION, TEST)] == [[1, 0, 0], [0, 0, 0], [0, 0, 2]]


def refused(partition, data, *parts):
    with pytest.raises(InputError) as error:
        deal(partition, data, 0)
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize("kind", [Iid, Classes, Dirichlet])
def test_more_clients_than_samples(kind):
    refused(kind(clients=11), dataset(10), "partition.clients = 11", "10 samples", "at most 10 clients")
    refused(kind(clients=10**15), dataset(10), "at most 10 clients")
    refused(kind(clients=6, min_samples=2), dataset(10), "partition.min_samples = 2", "at most 5 clients")
    refused(kind(clients=9), dataset(10, own=True), "8 samples to train on", "at most 8 clients")


def test_too_few_own_test_samples():
    data = dataset(10, own=True)
    for kind in (Iid, Dirichlet):
        refused(kind(clients=3), data, "partition.clients = 3: client ", "has no test sample, since the")
        refused(kind(clients=3), data, "own split has 2; use fewer clients, or set partition.test_share")
        assert deal(kind(clients=3, test_share=0.0), data, 0).counts(TEST).tolist() == [0, 0, 0]


def test_own_split_that_cannot_be_used():
    split = np.zeros(10, np.uint8)
    data = Dataset(np.zeros((10, 1), np.uint8), np.zeros(10, np.int64), 1, split=split)
    refused(Iid(clients=2), data, "the data's own split has no test sample", "partition.test_share")
    split[:] = [TRAIN, VALIDATION, TEST, TEST, TRAIN] * 2
    refused(Iid(clients=2, validation_share=0.1), data, "partition.validation_share = 0.1", "validation samples")
    assert deal(Iid(clients=2, validation_share=0.5, test_share=0.2), data, 0).counts(VALIDATION).tolist() == [2, 2]


def test_natural_mistakes():
    data = dataset()
    nobody = Dataset(data.x, data.y, 10)
    refused(Natural(), nobody, 'partition.name = "natural": this data set has no natural clients', '"iid"')
    client = np.where(data.client == 3, 4, data.client)
    refused(Natural(), Dataset(data.x, data.y, 10, client=client), "client 3 has no sample at all; leave such clients")
    split = np.where(data.client == 5, TEST, TRAIN).astype(np.uint8)
    refused(Natural(), Dataset(data.x, data.y, 10, client=data.client, split=split), "client 5 has 0 training samples")
    split = np.where(data.client == 5, TRAIN, TEST).astype(np.uint8)
    split[:50] = TRAIN  # the data say who has test samples
    shares = deal(Natural(), Dataset(data.x, data.y, 10, client=data.client, split=split), 0)
    assert shares.counts(TEST)[5] == 0


@pytest.mark.parametrize(("kind", "name"), [(Classes, "classes"), (Dirichlet, "dirichlet")])
def test_regression_has_no_classes(kind, name):
    data = Dataset(np.zeros((20, 1)), np.zeros(20), None, client=np.arange(20) % 2)
    refused(kind(clients=2), data, f'partition.name = "{name}"', "regression", '"iid" or "natural"')
    assert deal(Iid(clients=2), data, 0).counts(TRAIN).tolist() == [8, 8]
    assert deal(Natural(), data, 0).counts(TRAIN).tolist() == [8, 8]
