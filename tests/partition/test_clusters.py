"""Clusters that the user asks for: a number, sizes, a file; and every mistake in them as one line."""

import numpy as np
import pytest

from hpcfl.data import Dataset
from hpcfl.errors import InputError
from hpcfl.partition import deal
from hpcfl.partition.classes import Classes
from hpcfl.partition.dirichlet import Dirichlet
from hpcfl.partition.iid import Iid
from hpcfl.partition.natural import Natural

CLIENTS = 10
NATURAL = [0, 0, 2, 1, 1, 2, 0, 1, 2, 2]


def dataset(cluster=NATURAL):
    client = np.arange(200) % CLIENTS
    return Dataset(
        np.zeros((200, 1), np.uint8), np.arange(200) // 10 % 4, 4, client=client, cluster=cluster and np.array(cluster)
    )


def make(kind, **options):
    return kind(**options) if kind is Natural else kind(clients=CLIENTS, **options)


def clusters(kind=Natural, data=None, **options):
    shares = deal(make(kind, **options), dataset() if data is None else data, 0)
    assert shares.cluster.dtype == np.int64
    return shares.cluster.tolist()


def refused(kind=Natural, data=None, **options):
    """The one line that the deal is refused with."""
    with pytest.raises(InputError) as error:
        clusters(kind, data, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


every = pytest.mark.parametrize("kind", [Iid, Classes, Dirichlet, Natural])


@every
def test_given_clusters_replace_the_natural_ones_and_nothing_else(kind, tmp_path):
    (tmp_path / "c.csv").write_text("client,cluster\n" + "".join(f"{k},{k % 2}\n" for k in range(CLIENTS)))
    assert clusters(kind) == (NATURAL if kind is Natural else [0] * CLIENTS)
    assert clusters(kind, clusters=2) == [0] * 5 + [1] * 5
    assert clusters(kind, clusters=(1, 7, 2)) == [0] + [1] * 7 + [2] * 2
    assert clusters(kind, cluster_file=str(tmp_path / "c.csv")) == [0, 1] * 5
    plain, given = (deal(make(kind, clusters=c), dataset(), 3) for c in (None, 4))
    np.testing.assert_array_equal(plain.client, given.client)
    np.testing.assert_array_equal(plain.split, given.split)


@pytest.mark.parametrize("number", range(1, CLIENTS + 1))
def test_a_number_cuts_into_stretches_of_nearly_equal_size(number):
    cluster = clusters(Iid, clusters=number)
    assert cluster == sorted(cluster)
    sizes = np.bincount(cluster)
    assert (len(sizes), sizes.sum()) == (number, CLIENTS)
    assert np.ptp(sizes) <= 1


def test_without_natural_clusters_all_clients_are_one():
    assert clusters(Natural, dataset(None)) == [0] * CLIENTS
    assert clusters(Natural, dataset(None), clusters=5) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_too_many_clusters():
    line = (
        "partition.clusters = 11: more clusters than clients (partition.clients = 10); every cluster needs one at least"
    )
    assert refused(Iid, clusters=11) == line
    assert refused(clusters=11) == line.replace("partition.clients = 10", "the data have 10 clients")
    assert "[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]: more clusters than" in refused(Iid, clusters=(1,) * 11)
    assert refused(Iid, clusters=10**30).startswith(f"partition.clusters = {10**30}: more clusters than clients")


@pytest.mark.parametrize("sizes", [(10, 1), (4, 5), (9,), (10**30,)])
def test_sizes_that_do_not_sum_up(sizes):
    expected = f"partition.clusters = {list(sizes)}: sizes that sum up to {sum(sizes)}; expected 10"
    assert refused(Iid, clusters=sizes) == expected + " (partition.clients = 10)"
    assert refused(clusters=sizes) == expected + " (the data have 10 clients)"


def test_a_gap_in_the_datas_own_numbers():
    gap = [0, 0, 2, 4, 4, 2, 0, 5, 2, 2]
    assert refused(data=dataset(gap)) == (
        "data: cluster 1 has no client, but the highest cluster is 5; number the clusters 0, 1, ... without gaps, "
        "or set partition.clusters or partition.cluster_file"
    )
    assert clusters(data=dataset(gap), clusters=2) == [0] * 5 + [1] * 5
    assert clusters(Iid, data=dataset(gap)) == [0] * CLIENTS


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Writes c.csv into the current folder, which ``read`` and ``wrong`` give to the partition."""
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "c.csv").write_bytes(text if isinstance(text, bytes) else text.encode())

    return write


def lines(cluster, order=range(CLIENTS)):
    return "client,cluster\n" + "".join(f"{k},{cluster[k]}\n" for k in order)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (lines(NATURAL), NATURAL),
        (lines(NATURAL, reversed(range(CLIENTS))), NATURAL),
        (lines(["b", "b", "a", "c", "a", "a", "a", "a", "a", "a"]), [1, 1, 0, 2, 0, 0, 0, 0, 0, 0]),
        (lines(["10", "2", "b"] + ["2"] * 7), [0, 1, 2] + [1] * 7),  # one name makes all of them names
        (lines(["Zürich, Kreis 1"] * CLIENTS).replace("Zürich, Kreis 1", '"Zürich, Kreis 1"'), [0] * CLIENTS),
        (lines(["1_0", "1_1"] * 5), [0, 1] * 5),
        (lines(["00", "01"] * 5), [0, 1] * 5),
        ("\ufeff" + lines(NATURAL).replace("\n", "\r\n"), NATURAL),  # as spreadsheets write it
        (" client , cluster \n\n" + "\n".join(f" {k} ,\t{c} " for k, c in enumerate(NATURAL)) + "\n,\n\n", NATURAL),
    ],
)
def test_files(file, text, expected):
    file(text)
    assert clusters(cluster_file="c.csv") == expected
    assert clusters(Iid, cluster_file="c.csv") == expected


GOOD = lines(NATURAL)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "is empty; expected the header client,cluster and a line per client"),
        ("\n \n", "is empty; expected the header client,cluster and a line per client"),
        ("0,1\n", 'the header is "0,1"; expected client,cluster'),
        (GOOD.replace(",", ";"), 'the header is "client;cluster"; expected client,cluster'),
        (GOOD.replace("client,cluster", "cluster,client"), 'the header is "cluster,client"; expected client,cluster'),
        (b"client,cluster\n0,\xff\n", "not a CSV file in UTF-8: 'utf-8' codec can't decode byte 0xff"),
        (b"\x89HDF\r\n\x1a\n" + bytes(100), "not a CSV file in UTF-8: "),
        ('client,cluster\n0,"a\n', "not a CSV file in UTF-8: unexpected end of data"),
        (f"client,cluster\n0,{'a' * 200_000}\n", "not a CSV file in UTF-8: field larger than field limit"),
        (GOOD + "3\n", 'line 12: "3"; expected a client and a cluster'),
        (GOOD + "3,\n", 'line 12: "3,"; expected a client and a cluster'),
        (GOOD + ",1\n", 'line 12: ",1"; expected a client and a cluster'),
        (GOOD + "3,1,1\n", 'line 12: "3,1,1"; expected a client and a cluster'),
        (GOOD + '"3\n4",1\n', r'client "3\n4" is not in the run'),
        (GOOD + "10,1\n", 'line 12: client "10" is not in the run; expected 0..9 (the data have 10 clients)'),
        (GOOD + "-1,1\n", 'line 12: client "-1" is not in the run; expected 0..9'),
        (GOOD + "1.0,1\n", 'line 12: client "1.0" is not in the run; expected 0..9'),
        (GOOD + "oslo,1\n", 'line 12: client "oslo" is not in the run; expected 0..9'),
        (GOOD + "9" * 5000 + ",1\n", "is not in the run; expected 0..9"),
        (GOOD + "\n4,2\n", "lines 6 and 13: client 4 is in cluster '1' and in '2'; expected one line per client"),
        (GOOD + "4,1\n", "lines 6 and 12: client 4 is in cluster '1' twice; expected one line per client"),
        (GOOD.replace("4,1\n", ""), "no line for 1 of 10 clients: 4 (the data have 10 clients)"),
        (lines(NATURAL, [9, 2]), "no line for 8 of 10 clients: 0, 1, 3, 4, 5, ... (the data have 10 clients)"),
        ("client,cluster\n", "no line for 10 of 10 clients: 0, 1, 2, 3, 4, ..."),
        (
            GOOD.replace("4,1\n", "4,-1\n"),
            "line 6: cluster = -1; expected a number 0, 1, ..., or names for all clusters",
        ),
        (GOOD.replace("4,1\n", "4,1.0\n"), "line 6: cluster = 1.0; expected a number 0, 1, ..., or names"),
        (GOOD.replace("4,1\n", f"4,1{'0' * 20}\n"), f"line 6: cluster = 1{'0' * 20}; expected a number 0, 1, ..."),
        (
            GOOD.replace(",2\n", ",3\n"),
            "cluster 2 has no client, but the highest cluster is 3; number the clusters 0, 1, ... without gaps",
        ),
        (lines([c + 1 for c in NATURAL]), "cluster 0 has no client, but the highest cluster is 3"),
        (lines([10**17] + [0] * 9), f"cluster 1 has no client, but the highest cluster is {10**17}"),
    ],
)
def test_mistakes_in_files(file, text, line):
    file(text)
    message = refused(cluster_file="c.csv")
    assert message.startswith('partition.cluster_file = "c.csv": ')
    assert line in message
    assert len(message) < 250


def test_the_option_for_the_number_of_clients_is_named(file):
    file(GOOD + "10,1\n")
    assert "expected 0..9 (partition.clients = 10)" in refused(Iid, cluster_file="c.csv")


def test_files_that_cannot_be_read(tmp_path):
    folder = refused(cluster_file=str(tmp_path))
    assert folder == f'partition.cluster_file = "{tmp_path}": no such file ({tmp_path})'
    assert "no such file (/" in refused(cluster_file="nowhere.csv")
    assert "File name too long" in refused(cluster_file="x" * 5000)


def test_both_options():
    with pytest.raises(
        InputError, match=r"^partition\.clusters and partition\.cluster_file: give one of the two, not both$"
    ):
        Iid(clients=3, clusters=1, cluster_file="c.csv")
