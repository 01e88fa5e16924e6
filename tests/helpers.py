"""Small federations in one process: engines made by hand, ranks that are threads, rounds without a coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcfl import rng
from hpcfl.algorithm import RoundDecision, State
from hpcfl.build import Population, make_group
from hpcfl.comm import Comm
from hpcfl.coordinator import flip_coins
from hpcfl.dense import Dense
from hpcfl.engine import Engine
from hpcfl.evaluate import personal_models
from hpcfl.group import pack
from hpcfl.head import Head
from hpcfl.models import Spec
from hpcfl.models.dense import Linear
from hpcfl.placement import place
from hpcfl.round import Account, Round
from hpcfl.splits import TRAIN
from hpcfl.task import Task
from hpcfl.topology import Topology

CPU = torch.device("cpu")


class Hub:
    """The meeting point of the threads that play the ranks of one communicator."""

    def __init__(self, size: int):
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)
        self.children: dict[tuple[int, ...], list[Hub]] = {}
        self.lock = threading.Lock()

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values

    def child(self, ranks: tuple[int, ...], number: int) -> Hub:
        with self.lock:
            hubs = self.children.setdefault(ranks, [])
            if len(hubs) == number:
                hubs.append(Hub(len(ranks)))
            return hubs[number]

    def abort(self) -> None:
        self.barrier.abort()
        for hub in [hub for hubs in self.children.values() for hub in hubs]:
            hub.abort()


class ThreadComm(Comm):
    """One rank among threads. Its MAX and MIN lose a NaN like those of MPI: what a comparison makes of it."""

    def __init__(self, hub: Hub, rank: int):
        super().__init__()
        self.hub, self.rank, self.size = hub, rank, hub.size
        self.groups: dict[tuple[int, ...], int] = {}

    def allreduce(self, array, op, phase="communicate"):
        assert array.flags.c_contiguous
        result, *rest = self.hub.exchange(self.rank, array.copy())
        for other in rest:
            with np.errstate(all="ignore"):
                keep = {"sum": None, "max": result > other, "min": result < other}[op]
                result = result + other if keep is None else np.where(keep, result, other)
        array[...] = result

    def bcast(self, value):
        return self.hub.exchange(self.rank, value)[0]

    def gather(self, value):
        values = self.hub.exchange(self.rank, value)
        return values if self.rank == 0 else None

    def gather_rows(self, rows):
        return self.gather(rows.copy())

    def scatter_arrays(self, parts):
        return dict(self.bcast(parts)[self.rank])

    def barrier(self):
        self.hub.barrier.wait()

    def group(self, ranks):
        key = tuple(ranks)
        number = self.groups[key] = self.groups.get(key, -1) + 1
        return ThreadComm(self.hub.child(key, number), key.index(self.rank))

    def node(self):
        return self.group(range(self.size))


def on_ranks(size: int, work: Callable[[Comm], Any], *, fails: type[Exception] | None = None) -> list[Any]:
    """Every rank's work(comm), in rank order. fails: an exception that counts as a result; any other one is raised."""
    hub = Hub(size)
    results: list[Any] = [None] * size
    broken: list[BaseException] = []

    def rank(r: int) -> None:
        try:
            results[r] = work(ThreadComm(hub, r))
        except Exception as error:
            if fails is not None and isinstance(error, fails):
                results[r] = error
            else:
                broken.append(error)
                hub.abort()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if broken:
        raise next((e for e in broken if not isinstance(e, threading.BrokenBarrierError)), broken[0])
    return results


Samples = Sequence[tuple[np.ndarray, np.ndarray]]  # x [n_i, ...], y [n_i] of each client


def least_squares(sizes: Iterable[int], features: int = 3, seed: int = 0) -> Samples:
    """Regression data of clients that differ: each has a true model of its own, and a scale of its own."""
    g = np.random.default_rng(seed)
    data = []
    for n in sizes:
        x = g.normal(size=(n, features)) * g.uniform(0.5, 1.5)
        data.append((x, x @ g.normal(size=features) + 0.1 * g.normal(size=n)))
    return data


def classes(sizes: Iterable[int], features: int = 4, number: int = 3, seed: int = 0) -> Samples:
    """Classification data of clients that differ."""
    g = np.random.default_rng(seed)
    data = []
    for n in sizes:
        x = g.normal(size=(n, features))
        data.append((x, (x @ g.normal(size=(features, number))).argmax(1)))
    return data


def minibatch(data: Samples, client: int, round: int, t: int, size: int | None, seed: int = 0) -> Any:
    """x, y of a client's local step t, by the documented rule: permutations keyed (client, round, epoch)."""
    x, y = data[client]
    if size is None:
        return x, y
    per_epoch = -(-len(y) // size)
    stream = rng.stream(seed, rng.Purpose.BATCHES, client=client, round=round, step=t // per_epoch)
    mine = stream.permutation(len(y))[t % per_epoch * size :][:size]
    return x[mine], y[mine]


def least_squares_gradient(w: np.ndarray, x: np.ndarray, y: np.ndarray, l2: float = 0.0) -> np.ndarray:
    """Gradient of mean((x w - y)^2) / 2 + l2/2 |w|^2."""
    return x.T @ (x @ w - y) / len(y) + l2 * w


ONE_AT_A_TIME = (
    threading.Lock()
)  # ranks that are threads share torch's global generator, which building a model draws from


def make_engine(
    data: Samples,
    algorithm: Any,
    *,
    model: Any = None,
    number: int | None = None,
    dtype: torch.dtype = torch.float64,
    world: Comm | None = None,
    cluster: Sequence[int] | None = None,
    own_classes: Sequence[int] | None = None,
    backend: str = "auto",
    seed: int = 0,
    **options: Any,
) -> Engine:
    """Collective over the world. An engine for these clients, all of whose samples are for training.

    model: a registered model, absent: linear without bias; or a torch module (copied). number: of classes.
    own_classes: of each client, where labels are its own.
    """
    world = Comm() if world is None else world
    x, y = (np.concatenate([client[k] for client in data]) for k in (0, 1))
    sizes = np.array([len(y) for _, y in data])
    of = np.zeros(len(sizes), np.int64) if cluster is None else np.asarray(cluster)
    placement = place(of, sizes, world.size)
    ids = placement.hosted(world.rank)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    arrays = pack(x, y if number is None else y.astype(np.int64), owner, np.full(len(y), TRAIN), ids)
    count = np.zeros((len(sizes), 3), np.int64)
    count[:, TRAIN] = sizes
    own = None if own_classes is None else np.asarray(own_classes)
    population = Population(of, count, None, x.shape[1:], number, 1.0, 0.0, own)
    group = make_group(arrays, ids, population, CPU, dtype, seed=seed, own_heads=algorithm.own_heads)
    model = Linear(bias=False) if model is None else model
    with ONE_AT_A_TIME:
        module = deepcopy(model) if isinstance(model, torch.nn.Module) else model.build(Spec(x.shape[1:], number))
        l2 = getattr(model, "l2", 0.0)
        task = Task(module, x.shape[1:], number, l2=l2, backend=backend, device=CPU, dtype=dtype)
    return Engine(task, group, Topology.build(world, world.node(), placement), algorithm, seed=seed, **options)


def ready(data: Samples, options: Any, **engine_options: Any) -> tuple[Engine, Any]:
    """Collective over the world. An engine as by ``make_engine``, and the algorithm of these options, prepared."""
    engine = make_engine(data, options, **engine_options)
    return engine, options.prepare(engine)


def decide(engine: Engine, index: int, participants: Sequence[int] | None = None, **coins: Any) -> RoundDecision:
    """The decision for one round; absent participants: everyone."""
    ids = np.arange(engine.group.population) if participants is None else np.array(participants, np.int64)
    fell = {name: np.array(sides, bool) for name, sides in coins.items()}
    return RoundDecision(index, ids, fell, evaluate=False, checkpoint=False, stop=None)


def drawn(
    engine: Engine, algorithm: Any, cohorts: Sequence[Sequence[int] | None], first: int = 0
) -> Iterator[RoundDecision]:
    """The decisions for rounds with these participants (None: everyone), and the coins of a run with the same seed."""
    probabilities = algorithm.coins(engine.topology.placement.clusters)
    coins = flip_coins(engine.seed, first, len(cohorts), probabilities) if cohorts else {}
    for k, participants in enumerate(cohorts):
        yield decide(engine, first + k, participants, **{name: fell[k] for name, fell in coins.items()})


def play(
    engine: Engine,
    algorithm: Any,
    rounds: int | Sequence[Sequence[int] | None],
    state: State | None = None,
    first: int = 0,
    accounts: list[Account] | None = None,
) -> State:
    """The state of a prepared algorithm after rounds: their number, or the participants of each (None: everyone)."""
    state = algorithm.init(engine.task, engine.group) if state is None else state
    for decision in drawn(engine, algorithm, [None] * rounds if isinstance(rounds, int) else rounds, first):
        round = Round(engine, decision)
        state = algorithm.round(state, round)
        if accounts is not None:
            accounts.append(round.account)
    return state


def personal(engine: Engine, algorithm: Any, state: State, rounds_done: int) -> Tensor:
    """[C, P] the personal models of this rank's clients, in group order."""
    models = torch.full((engine.group.clients, engine.task.layout.size), torch.nan, dtype=engine.task.dtype)
    for rows, w in personal_models(engine, algorithm, state, rounds_done):
        models[torch.from_numpy(rows)] = w
    return models


def cloned(state: State) -> State:
    """A copy that shares no memory, as a checkpoint would make."""
    return State(*({name: t.clone() for name, t in part.items()} for part in (state.shared, state.local)))


def same_bits(a: Tensor | np.ndarray, b: Tensor | np.ndarray) -> bool:
    """Equal to the bit, NaNs and signs of zeros included."""
    a, b = (np.ascontiguousarray(t.numpy() if isinstance(t, Tensor) else t) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


class TwoLayers:
    """A network with one hidden layer, client by client in plain torch: body and head are flat vectors, as in Split."""

    def __init__(self, hidden: int, bias: bool = True, l2: float = 0.0):
        """bias: of the head; the body has one."""
        self.hidden, self.bias, self.l2 = hidden, bias, l2

    def outputs(self, theta: Tensor, W: Tensor, x: Any, own: int | None = None) -> Tensor:
        """[n, O] of the samples x [n, d]; own: the number of outputs that the client has, the first ones."""
        x = torch.as_tensor(x, dtype=theta.dtype)
        first = theta[: self.hidden * x.shape[1]].view(self.hidden, -1)
        h = torch.relu(x @ first.T + theta[first.numel() :])
        number = len(W) // (self.hidden + self.bias)
        last = W[: number * self.hidden].view(number, self.hidden)
        outputs = h @ last.T + (W[last.numel() :] if self.bias else 0.0)
        return outputs[:, :own]

    def loss(self, theta: Tensor, W: Tensor, x: Any, y: Any, own: int | None = None) -> Tensor:
        """Mean cross entropy, plus the penalty."""
        outputs, y = self.outputs(theta, W, x, own), torch.as_tensor(y)
        entropy = (torch.logsumexp(outputs, 1) - outputs[torch.arange(len(y)), y]).mean()
        return entropy + self.l2 / 2 * ((theta**2).sum() + (W**2).sum())

    def gradients(self, theta: Tensor, W: Tensor, x: Any, y: Any, own: int | None = None) -> tuple[Tensor, Tensor]:
        """By body and head, from automatic differentiation."""
        leaves = [v.detach().clone().requires_grad_() for v in (theta, W)]
        return torch.autograd.grad(self.loss(*leaves, x, y, own), leaves)


def adam(theta: Tensor, m: Tensor, v: Tensor, g: Tensor, t: int, lr: float) -> tuple[Tensor, Tensor, Tensor]:
    """Step t = 1, 2, ... of Algorithm 1 of Kingma, Ba 2015, with its default settings."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
    return theta - lr * m_hat / (torch.sqrt(v_hat) + 1e-8), m, v


def written_gradients(monkeypatch: Any) -> list[str]:
    """A list that grows by "body" or "head" whenever such a gradient of a fully connected network is computed."""
    calls, of_body, of_head = [], Dense.batched_gradient, Head.gradient

    def body(self, w, saved, slope):
        calls.append("body" if self.is_body else "whole")
        return of_body(self, w, saved, slope)

    def head(self, W, phi, slope):
        write = of_head(self, W, phi, slope)

        def written(factor, base):
            calls.append("head")
            return write(factor, base)

        return written

    monkeypatch.setattr(Dense, "batched_gradient", body)
    monkeypatch.setattr(Head, "gradient", head)
    return calls
