"""APFL: each client mixes a local model with the global one and learns the weight of the mixture.

Reference: Deng, Kamani, Mahdavi, "Adaptive personalized federated learning", 2020, arXiv 2003.13461, Algorithm 1.

    vbar_i = alpha_i v_i + (1 - alpha_i) w_i                                                                        (1)
    w_i   <- w_i - eta_t grad f_i(w_i; xi_i^t)                                                                      (6)
    v_i   <- v_i - eta_t alpha_i grad f_i(vbar_i; xi_i^t)           the gradient by v of f_i(vbar_i)                (7)
    w      = (1/K) sum_{j in U_t} w_j                               every tau steps                                 (8)
    alpha_i <- clamp(alpha_i - eta_t <v_i - w_i, grad f_i(vbar_i; xi_i^t)>, 0, 1)                                  (10)

(6), (7) and (10) use one minibatch, and the values before the step. Clients who sit out keep v_i and alpha_i.
With ``average``, the theory's outputs, p_t = (t + a)^2 and S_T = sum_{t=1..T} p_t, kept on-line:

    vhat_i = (1/S_T) sum_t p_t (alpha_i v_i^t + (1 - alpha_i) (1/K) sum_{j in U_t} w_j^t)
    what   = (1/(K S_T)) sum_t p_t sum_{j in U_t} w_j^t

Travels per round and participant: w down, w_i up (with ``average`` also the round's weighted sum of w_i^t).
Deviations: a round has tau local steps and then (8); in the paper the average takes the place of the tau-th step. Where
alpha changes during the run, vhat_i mixes with the current alpha (the paper's analysis fixes it).
The released code (``variant = "released"``; github MLOPTPSU/FedTorch) takes (6) first, (7) at the new w and with the
undecayed eta, and (10) after both, with (alpha^2 + (1-alpha)^2) <v - w, grad> + 0.02 alpha for the gradient. It mixes
the outputs of the two models, which is the same for linear ones; here the weights are mixed in both variants.
Limits held by tests: alpha = 0 is FedAvg, alpha = 1 is local training on the same minibatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hpcfl.algorithm import LocalSGD, Rows, State, one_or_each
from hpcfl.averages import Averages, QuadraticWeights
from hpcfl.block import Block
from hpcfl.errors import InputError
from hpcfl.group import Group
from hpcfl.options import NonNegative, Positive, Share, Shares
from hpcfl.registry import register
from hpcfl.round import Round
from hpcfl.schedules import Theory
from hpcfl.task import Task


@register("algorithm", "apfl")
@dataclass(frozen=True)
class APFL(LocalSGD):
    """A learned mixture of a local and the global model."""

    alpha: Share | Shares = 0.5  # initial weight of the LOCAL model: one, or one per client
    alpha_update: Literal["round", "step", "off"] = "round"  # at the first step of a round, at every step, never
    alpha_lr: Positive | None = None  # absent: lr
    variant: Literal["paper", "released"] = "paper"
    average: bool = False  # evaluate vhat_i and what
    average_shift: NonNegative | None = None  # a of p_t; absent: that of the "theory" schedule, else 0

    evaluated: ClassVar[tuple[str, ...]] = ("personal", "global")
    exposed: ClassVar[tuple[str, ...]] = ("alpha",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.average and self.local_epochs is not None:
            raise InputError(
                "algorithm.average = true needs steps that all clients count alike; give local_steps, not local_epochs"
            )

    def init(self, task: Task, group: Group) -> State:
        w = task.start()
        local = {"v": w.repeat(group.clients, 1), "alpha": self._initial_alpha(group).to(w)}
        if not self.average:
            return State({"w": w}, local)
        seen = torch.zeros(group.clients, 1, dtype=torch.int64, device=w.device)
        return State({"w": w, "what": w}, {**local, "vhat": local["v"].clone(), "seen": seen})

    def client(self, b: Block, own: Rows) -> tuple[Rows, Rows]:
        step = self.paper_step if self.variant == "paper" else self.released_step
        w, v, a = b.stack(b.shared["w"]), own["v"], own["alpha"]
        averages = Averages(self.weights, b, own) if self.average else None
        for t in b.steps:
            w, v, a = step(b, t, w, v, a)
            if averages:
                averages.add(b.iteration(t) + 1, v, w)
        own, sent = {"v": v, "alpha": a}, {"w": w}
        return (own, sent) if averages is None else ({**own, **averages.own}, {**sent, **averages.sent})

    def paper_step(self, b: Block, t: int, w: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, lr = b.batch(t), b.lr(t)
        g_bar = b.grad(a * v + (1 - a) * w, batch)
        a_new = self.moved(a, lr, inner(v - w, g_bar)) if self.moves_alpha(t) else a  # (10)
        return w - lr * b.grad(w, batch), v - lr * a * g_bar, a_new  # (6), (7)

    def released_step(self, b: Block, t: int, w: Tensor, v: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, lr = b.batch(t), b.lr(t)
        w = w - lr * b.grad(w, batch)
        g_bar = b.grad(a * v + (1 - a) * w, batch)
        v = v - self.lr_schedule.at(self.lr, 0, 0) * a * g_bar
        return w, v, self.moved(a, lr, released_slope(a, v, w, g_bar)) if self.moves_alpha(t) else a

    def round(self, state: State, r: Round) -> State:
        own, sent = r.clients(self.client, state)
        shared = {"w": r.mean(sent["w"])}  # (8)
        if self.average:
            steps = self.local_steps or 1
            done = self.weights.total((r.decision.index + 1) * steps)
            before = self.weights.total(r.decision.index * steps)
            what = state.shared["what"]
            shared["what"] = what + (1 - before / done) * (r.mean(sent["w_mean"]) - what)
        return State(shared, own)

    def personal(self, b: Block, own: Rows) -> Tensor:
        a = own["alpha"]
        if self.average:
            return a * Averages(self.weights, b, own).vhat + (1 - a) * b.shared["what"]
        return a * own["v"] + (1 - a) * b.shared["w"]  # (1)

    def local_model(self, b: Block, own: Rows, sent: Rows) -> Tensor:
        a = own["alpha"]
        return a * own["v"] + (1 - a) * sent["w"]

    def global_model(self, state: State) -> Tensor:
        return state.shared["what" if self.average else "w"]

    def moves_alpha(self, t: int) -> bool:
        return self.alpha_update == "step" or (self.alpha_update == "round" and t == 0)

    def moved(self, a: Tensor, lr: float, slope: Tensor) -> Tensor:
        """One projected gradient step of alpha."""
        return (a - (self.alpha_lr or lr) * slope).clamp(0, 1)

    @property
    def weights(self) -> QuadraticWeights:
        shift = self.lr_schedule.a if isinstance(self.lr_schedule, Theory) else 0.0
        return QuadraticWeights(shift if self.average_shift is None else self.average_shift)

    def _initial_alpha(self, group: Group) -> Tensor:
        if not isinstance(self.alpha, tuple):
            return torch.full((group.clients, 1), self.alpha, dtype=torch.float64)
        alpha = one_or_each("alpha", self.alpha, group.population, "client")
        return torch.from_numpy(alpha[group.ids, None])


def inner(x: Tensor, y: Tensor) -> Tensor:
    """<x_i, y_i> of every client: [C, P], [C, P] -> [C, 1]."""
    return (x * y).sum(1, keepdim=True)


def released_slope(a: Tensor, v: Tensor, w: Tensor, g_bar: Tensor) -> Tensor:
    """The released code's slope of alpha: alpha g_v + (1-alpha) g_w, for g_v = alpha g, g_w = (1-alpha) g."""
    return (a**2 + (1 - a) ** 2) * inner(v - w, g_bar) + 0.02 * a
