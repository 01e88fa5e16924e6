"""Rank 0's decisions, broadcast as plans: who takes part, which coins fell, when to evaluate and to stop.

Decisions are pure functions of (seed, round), except those that follow the clock. How rounds are cut into plans may
never change a result; it only saves broadcasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hpcfl import rng
from hpcfl.agenda import Agenda
from hpcfl.algorithm import RoundDecision

COIN_BLOCK = 1024  # rounds whose coins come from one stream


@dataclass(frozen=True)
class Plan:
    """The decisions for the next rounds, up to the next evaluation or checkpoint, or about a second of work.

    A plan without rounds stops the run where it is.
    """

    first: int
    count: int
    participants: list[np.ndarray] | None  # per round; None: everyone in every round
    coins: Mapping[str, np.ndarray]  # [count, n] bool
    evaluate: bool  # after the last round
    checkpoint: bool  # then
    stop: str | None  # then: "done", "stopped:why"

    def decisions(self, everyone: np.ndarray) -> Iterator[RoundDecision]:
        """One decision per round; everyone: all client ids."""
        for k in range(self.count):
            last = k == self.count - 1
            yield RoundDecision(
                index=self.first + k,
                participants=everyone if self.participants is None else self.participants[k],
                coins={name: fell[k] for name, fell in self.coins.items()},
                evaluate=self.evaluate and last,
                checkpoint=self.checkpoint and last,
                stop=self.stop if last else None,
            )


def draw_participants(seed: int, round: int, clients: int, cohort: int) -> np.ndarray:
    """Sorted ids of a round's participants: uniform, without replacement."""
    return np.sort(
        rng.stream(seed, rng.Purpose.PARTICIPATION, round=round).choice(clients, cohort, replace=False, shuffle=False)
    )


def flip_coins(seed: int, first: int, count: int, probabilities: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Name -> [count, n] bool for rounds first..first+count-1. A round's coins do not depend on first and count."""
    total = sum(len(p) for p in probabilities.values())
    if total == 0:
        return {}
    blocks = range(first // COIN_BLOCK, (first + count - 1) // COIN_BLOCK + 1)
    draws = np.concatenate([rng.stream(seed, rng.Purpose.COINS, round=b).random((COIN_BLOCK, total)) for b in blocks])
    draws = draws[first - blocks[0] * COIN_BLOCK :][:count]
    out, column = {}, 0
    for name, p in probabilities.items():
        out[name] = draws[:, column : column + len(p)] < p
        column += len(p)
    return out


class Coordinator:
    """Makes the plans of a run; only rank 0's are used."""

    def __init__(
        self,
        *,
        seed: int,
        rounds: int,
        clients: int,
        cohort: int,
        eval_every: int,
        coins: Mapping[str, np.ndarray],
        seconds_per_plan: float = 1.0,
    ):
        self.seed, self.rounds, self.clients, self.cohort, self.eval_every = seed, rounds, clients, cohort, eval_every
        self.coins, self.seconds_per_plan = coins, seconds_per_plan
        self.everyone = np.arange(clients)

    def plan(self, first: int, seconds_per_round: float | None, agenda: Agenda | None = None) -> Plan:
        """The plan that starts with round ``first``; seconds_per_round: as measured, None when nothing is known yet.

        agenda: what clock and signals want; None: nothing but rounds and evaluations.
        """
        stop = agenda.stop() if agenda and first < self.rounds else None
        if stop or first == self.rounds:
            wanted = bool(stop) and not (agenda and agenda.off)
            return Plan(first, 0, None, {}, False, wanted, f"stopped:{stop}" if stop else "done")
        evaluation = min((first // self.eval_every + 1) * self.eval_every, self.rounds)
        every = agenda.rounds if agenda and agenda.rounds else self.rounds
        checkpoint = min((first // every + 1) * every, self.rounds)
        most = 1 if seconds_per_round is None else max(1, int(self.seconds_per_plan / max(seconds_per_round, 1e-9)))
        count = min(evaluation - first, checkpoint - first, most)
        end = first + count
        last = end == self.rounds
        wanted = agenda is not None and (agenda.last() if last else end == checkpoint or agenda.due())
        participants = None
        if self.cohort < self.clients:
            participants = [draw_participants(self.seed, r, self.clients, self.cohort) for r in range(first, end)]
        return Plan(
            first,
            count,
            participants,
            flip_coins(self.seed, first, count, self.coins),
            end == evaluation,
            wanted,
            "done" if last else None,
        )
