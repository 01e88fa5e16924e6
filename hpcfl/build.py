"""The build phase: data, partition, placement, model, engine. Everything that can be checked before a round is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from hpcfl import rng
from hpcfl.algorithm import Algorithm, Work
from hpcfl.comm import Comm
from hpcfl.config import Job
from hpcfl.coordinator import Coordinator
from hpcfl.data import Dataset
from hpcfl.device import choose_device, settle
from hpcfl.engine import Engine
from hpcfl.errors import InputError
from hpcfl.group import Group, pack
from hpcfl.models import Spec
from hpcfl.on_demand import OnDemand, Read
from hpcfl.partition import Shares, deal
from hpcfl.partition.lazily import arranged, deal_counts
from hpcfl.placement import place
from hpcfl.splits import SPLITS, TEST, TRAIN, VALIDATION
from hpcfl.store import check_place, check_scratch
from hpcfl.task import Task
from hpcfl.topology import Topology


@dataclass(frozen=True)
class Population:
    """What is known of all clients on every rank."""

    cluster: np.ndarray  # [N]
    count: np.ndarray  # [N, 3] samples per split
    class_counts: np.ndarray | None  # [N, classes of the data] of the training samples; of a classification
    shape: tuple[int, ...]  # of one sample
    classes: int | None  # outputs of the model; None: regression
    scale: float
    shift: float
    own_classes: np.ndarray | None = None  # [N] with local labels: classes of each client
    on_demand: np.dtype | None = None  # type of x where samples are made or read on demand

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that hold samples; a test split is always listed."""
        return tuple(s for k, s in enumerate(SPLITS) if k in (TRAIN, TEST) or self.count[:, k].any())


@dataclass(frozen=True)
class Built:
    """A job, ready to run on this rank."""

    engine: Engine
    algorithm: Algorithm  # prepared
    coordinator: Coordinator
    population: Population
    data: str  # SHA-256 of them and their owners


def build(job: Job, world: Comm) -> Built:
    """Collective over the world. Raises InputError on all ranks alike when the job cannot be run."""
    _expect(job.algorithm, Work, "the class of the algorithm must inherit from")
    settle(job.run.threads)
    node = world.node()
    device = world.together(lambda: choose_device(job.run.device, node.rank))
    check_place(job.run.state, job.algorithm, device)
    world.together(lambda: check_scratch(job.run.state, job.run.scratch))
    dtype = getattr(torch, job.run.dtype)
    source = world.together(lambda: _source(job) if node.rank == 0 else None)
    data = _compare(world, source)
    population = node.bcast(source.population if source else None)
    clients = len(population.cluster)
    cohort = job.run.cohort(clients)
    if job.algorithm.whole_cohort and cohort < clients:
        raise InputError(
            f"run.participation: {cohort} of {clients} clients a round, but {job.algorithm_name} needs all of them in "
            "every round; leave run.participation and run.clients_per_round out"
        )
    placement = place(population.cluster, population.count[:, TRAIN], world.size)
    neighbours = node.gather(world.rank)
    spec = Spec(population.shape, population.classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng.seed_for(job.run.seed, rng.Purpose.INIT))
        module = job.model.build(spec)
    _expect(module, torch.nn.Module, _given(job.model, "build", module))
    l2 = getattr(job.model, "l2", 0.0)
    task = Task(module, spec.shape, spec.classes, l2=l2, backend=job.run.backend, device=device, dtype=dtype)
    parts = None
    if source and neighbours:
        parts = [source.part(placement.hosted(r), task.layout.size) for r in neighbours]
    del source
    arrays = node.scatter_arrays(parts)
    del parts
    read = None if population.on_demand is None else world.together(lambda: reader(job, population))
    hosted, own_heads = placement.hosted(world.rank), job.algorithm.own_heads
    group = make_group(arrays, hosted, population, device, dtype, seed=job.run.seed, own_heads=own_heads, read=read)
    world.together(lambda: check_range(arrays, group))
    topology = Topology.build(world, node, placement)
    engine = Engine(
        task,
        group,
        topology,
        job.algorithm,
        seed=job.run.seed,
        reduction=job.run.reduction,
        block=job.run.block,
        eval_clients=job.run.eval_clients,
    )
    algorithm = job.algorithm.prepare(engine)
    algorithm.init(task, group.some(np.zeros(0, np.int64)))  # what it refuses, it does before there is a folder
    if job.run.protocol == "participants" and type(algorithm).local_model is Work.local_model:
        raise InputError(
            f'run.protocol = "participants": {job.algorithm_name} does not say which model a participant holds after '
            "its local work; leave run.protocol out"
        )
    if job.run.protocol == "participants" and not population.count[:, TEST].any():
        raise InputError(
            'run.protocol = "participants": tests the participants of every round, but no client has a test sample; '
            "give partition.test_share, or leave run.protocol out"
        )
    coordinator = Coordinator(
        seed=job.run.seed,
        rounds=job.run.rounds,
        clients=clients,
        cohort=cohort,
        eval_every=job.run.eval_every,
        coins=algorithm.coins(placement.clusters),
    )
    return Built(engine, algorithm, coordinator, population, data)


@dataclass(frozen=True)
class Source:
    """What one process per node knows of the data: all samples and who owns them, or nothing but the population."""

    population: Population
    held: tuple[Dataset, Shares] | None

    def part(self, ids: np.ndarray, parameters: int) -> dict[str, np.ndarray]:
        """What a rank with these clients gets, as by ``pack``. parameters: of a model."""
        if self.held is None:
            population = self.population
            y = np.zeros(0, np.int64 if population.classes else np.float64)
            return {"x": np.zeros((0, *population.shape), population.on_demand), "y": y}
        data, shares = self.held
        y = data.y if shares.label is None else shares.label
        return pack(data.x, y, shares.client, shares.split, ids, _truth(data, shares, parameters))

    def digest(self) -> str:
        """SHA-256 of all samples and their owners; with samples on demand, of their numbers and the clusters."""
        arrays = [self.population.cluster, self.population.count]
        if self.held is not None:
            data, shares = self.held
            arrays += [a for a in (data.x, data.y, data.truth, shares.client, shares.split) if a is not None]
        digest = hashlib.sha256()
        for array in arrays:
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def _source(job: Job) -> Source:
    if not getattr(job.data, "lazy", False):
        held = load(job)
        return Source(_population(*held), held)
    survey = job.data.survey(job.run.seed)
    cluster, count = deal_counts(job.partition, survey)
    shape, scale, shift = survey.shape, survey.scale, survey.shift
    return Source(Population(cluster, count, None, shape, survey.classes, scale, shift, None, survey.dtype), None)


def reader(job: Job, population: Population) -> Read:
    """What makes or reads a client's samples, in the order that a group has them in."""
    read = job.data.reader(job.run.seed, population.count.sum(1))
    own_split = job.partition.test_share is None

    def samples(client: int) -> tuple[np.ndarray, np.ndarray]:
        x, y, part = read(client)
        part = part if own_split else None
        return arranged(x, y, part, count=population.count[client], client=client, seed=job.run.seed)

    return samples


def load(job: Job) -> tuple[Dataset, Shares]:
    """The data set and who owns what: a pure function of the job, run by one process per node."""
    data = job.data.load(job.run.seed)
    _expect(data, Dataset, _given(job.data, "load", data))
    return data, deal(job.partition, data, job.run.seed)


def make_group(
    arrays: dict[str, np.ndarray],
    ids: np.ndarray,
    population: Population,
    device: torch.device,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    own_heads: bool = False,
    read: Read | None = None,
) -> Group:
    """A rank's group from its packed samples, on its device. Floating-point data are kept in the run's dtype.

    own_heads: every client has a head of its own, with as many outputs as it has classes. read: where samples come from
    that are not among the arrays.
    """
    # by way of one dimension: a channel dimension of size 1 may have any stride, and torch chooses its kernels by it
    x = torch.from_numpy(arrays["x"].reshape(-1)).view(arrays["x"].shape)
    y = torch.from_numpy(arrays["y"])
    mask = None
    own, classes = population.own_classes, population.classes
    if own_heads and classes is not None and own is not None and own.min() != classes:
        other = np.arange(classes) >= own[ids, None]
        mask = torch.zeros(other.shape, dtype=dtype).masked_fill_(torch.from_numpy(other), -torch.inf).to(device)
    x = (x if x.dtype == torch.uint8 else x.to(dtype)).to(device)
    y = (y if population.classes else y.to(dtype)).to(device)
    return Group(
        population=len(population.cluster),
        ids=ids,
        cluster=population.cluster[ids],
        count=population.count[ids],
        x=x,
        y=y,
        scale=population.scale,
        shift=population.shift,
        dtype=dtype,
        truth=torch.from_numpy(arrays["truth"]) if "truth" in arrays else None,
        seed=seed,
        mask=mask,
        source=None if read is None else OnDemand(read, (x, y)),
    )


def _expect(value: object, kind: type, complaint: str) -> None:
    """Raises InputError where a plug-in gives something else. complaint: what is said before the kind's name."""
    if not isinstance(value, kind):
        raise InputError(f"{complaint} {kind.__module__}.{kind.__qualname__}")


def _given(by: object, method: str, value: object) -> str:
    return f"{type(by).__name__}.{method} gave a {type(value).__name__}, expected a"


def check_range(arrays: dict[str, np.ndarray], group: Group) -> None:
    """Raises InputError where finite data are not in the run's dtype."""
    for name, stored, values in (("x", arrays["x"], group.x), ("y", arrays["y"], group.y)):
        if stored.dtype == np.float64 and values.dtype == torch.float32 and not values.isfinite().all():
            raise InputError(
                f'data: {name} has values beyond those of float32; scale them, or give run.dtype = "float64"'
            )


def _truth(data: Dataset, shares: Shares, parameters: int) -> np.ndarray | None:
    """The clients' true parameters [N, P] where the clients are the data's own and the model has such parameters."""
    if data.truth is None or data.client is None or data.truth.shape != (shares.n_clients, parameters):
        return None
    return data.truth if np.array_equal(shares.client, data.client) else None


def _population(data: Dataset, shares: Shares) -> Population:
    n = len(shares.cluster)
    count = np.stack([np.bincount(shares.client[shares.split == s], minlength=n) for s in (TRAIN, VALIDATION, TEST)], 1)
    class_counts = None
    if data.classes:
        train = shares.split == TRAIN
        cells = shares.client[train] * data.classes + data.y[train]
        class_counts = np.bincount(cells, minlength=n * data.classes).reshape(n, data.classes)
    classes = data.classes if shares.classes is None else int(shares.classes.max())
    shape = data.x.shape[1:]
    return Population(shares.cluster, count, class_counts, shape, classes, data.scale, data.shift, shares.classes)


def _compare(world: Comm, source: Source | None) -> str:
    """Collective over the world: the data's digest. All nodes must have read and dealt the same."""
    digests = {digest for digest in world.gather(source.digest() if source else None) or () if digest}
    digest, *others = world.bcast(sorted(digests))
    if others:
        raise InputError(
            "data: the nodes of this job read different data or clusters; data.root, data.path and "
            "partition.cluster_file must name the same files on all of them"
        )
    return digest
