"""What an algorithm is: a frozen dataclass of hyper-parameters with an initial state and a round.

An algorithm file contains no MPI, device, padding or participation code: a ``Block`` gives it some clients of this rank
for the local phase, a ``Round`` the collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
from torch import Tensor

from hpcfl.errors import InputError
from hpcfl.group import Group
from hpcfl.options import Count, Positive
from hpcfl.schedules import CONSTANT, Schedule
from hpcfl.task import Task

if TYPE_CHECKING:
    from hpcfl.block import Block
    from hpcfl.engine import Engine
    from hpcfl.round import Round
    from hpcfl.theory.predictions import Prediction

Rows = Mapping[str, Tensor]  # name -> one row per client in hand: [C, ...]
Weighting = Literal["client", "sample"]


@dataclass(frozen=True)
class State:
    """Everything an algorithm remembers between rounds."""

    shared: Mapping[str, Tensor] = field(default_factory=dict)  # equal on all ranks: [P], [K, P], optimiser moments
    local: Mapping[str, Tensor] = field(default_factory=dict)  # one row per client of this rank: [C, ...] (rows.Kept)


@dataclass(frozen=True)
class RoundDecision:
    """All that rank 0 decides for one round; identical on every rank after the broadcast of its plan."""

    index: int  # round number, from 0
    participants: np.ndarray  # sorted client ids
    coins: Mapping[str, np.ndarray]  # the coins that the algorithm declared, bool
    evaluate: bool
    checkpoint: bool
    stop: str | None  # after it: "done", "stopped:why"; None: go on


class Algorithm(Protocol):
    """The protocol of a registered algorithm. Its dataclass fields are its options in the job file."""

    evaluated: ClassVar[tuple[str, ...]]  # which models it has: "personal", "global"
    exposed: ClassVar[tuple[str, ...]]  # local state [C, 1] to record at every evaluation

    def coins(self, n_clusters: int) -> Mapping[str, np.ndarray]:
        """Name -> probabilities of the coins that rank 0 flips each round; {} for most."""

    def init(self, task: Task, group: Group) -> State:
        """The state before the first round. Collective-free."""

    def round(self, state: State, r: Round) -> State:
        """One round. May branch on ``r.decision`` only: collectives must be entered by all ranks alike."""

    def personal(self, b: Block, own: Rows) -> Tensor:
        """[C, P] the model that each client of the block would use."""

    def local_model(self, b: Block, own: Rows, sent: Rows) -> Tensor:
        """[C, P] the model that each participant holds after its local work, from its new rows and what it sends."""

    def global_model(self, state: State) -> Tensor:
        """[P] the model of the server."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every algorithm has, with what most say about it: a mixin."""

    evaluated: ClassVar[tuple[str, ...]] = ("personal",)
    exposed: ClassVar[tuple[str, ...]] = ()
    least_squares: ClassVar[bool] = False  # made for linear regression only
    whole_cohort: ClassVar[bool] = False  # every client must take part in every round
    own_heads: ClassVar[bool] = False  # a client's model is its own in the last layer: it has the outputs it needs

    @property
    def minibatch(self) -> int | None:
        """Samples of a minibatch; None: full batch."""
        return None

    def prepare(self, engine: Engine) -> Work:
        """Collective over the world, once before the first round: the algorithm that runs, with what it needs to know.

        Raises InputError, on all ranks alike, for options that do not fit the data.
        """
        return self

    def predict(self, engine: Engine, cohort: int, rounds: int, accuracy: float) -> Iterator[Prediction]:
        """What theory says of the prepared algorithm in so many rounds, for ``hpcfl theory``. On one rank.

        cohort: participants of a round. Raises InputError where there is no theory for it.
        """
        raise InputError("hpcfl theory: there is no theory for this algorithm")

    def minimiser(self, engine: Engine) -> np.ndarray | None:
        """[N, P] the personal models that it converges to, where they can be solved for. On one rank."""
        return None

    def local_model(self, b: Block, own: Rows, sent: Rows) -> Tensor:
        """[C, P] the model that each participant holds after its local work, from its new rows and what it sends."""
        raise InputError('run.protocol = "participants": this algorithm does not say which model a participant holds')

    def coins(self, n_clusters: int) -> Mapping[str, np.ndarray]:
        return {}

    def local_work(self, samples: np.ndarray) -> np.ndarray:
        """Number of local steps per client in a round, from its number of training samples [C]."""
        return np.ones_like(samples)


@dataclass(frozen=True, kw_only=True)
class Descent(Work):
    """Options of every algorithm that follows minibatch gradients: a mixin."""

    lr: Positive = 0.1
    lr_schedule: Schedule = CONSTANT
    batch_size: Count | None = None  # absent: full batch

    @property
    def minibatch(self) -> int | None:
        return self.batch_size


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Descent):
    """Options of the algorithms whose clients take several local steps per round: a mixin."""

    local_steps: Count | None = None  # minibatch steps per round; default 1 where local_epochs is absent, too
    local_epochs: Count | None = None  # or passes over the client's data per round

    def __post_init__(self) -> None:
        if self.local_steps is not None and self.local_epochs is not None:
            raise InputError("algorithm.local_steps and algorithm.local_epochs: give one of the two, not both")
        if self.local_epochs is not None and self.lr_schedule.name == "theory":
            raise InputError(
                'algorithm.lr_schedule = "theory" counts local steps alike on all clients; give algorithm.local_steps'
            )

    def local_work(self, samples: np.ndarray) -> np.ndarray:
        if self.local_epochs is None:
            return np.full_like(samples, self.local_steps or 1)
        return self.local_epochs * -(-samples // (self.batch_size or np.maximum(samples, 1)))


def one_or_each(name: str, value: float | tuple[float, ...], count: int, of: str) -> np.ndarray:
    """[count] float64 from one number, or from one per client or cluster. Raises InputError for another number."""
    if not isinstance(value, tuple):
        return np.full(count, float(value))
    if len(value) != count:
        raise InputError(f"algorithm.{name}: {len(value)} values, expected one, or one per {of} ({count})")
    return np.array(value, np.float64)
