"""When rank 0 wants checkpoints and stops, on a clock that the test turns; and the plans that come of it."""

from __future__ import annotations

import numpy as np
import pytest

from hpcfl.agenda import SHARE, SOONEST, SPEED, Agenda
from hpcfl.coordinator import Coordinator

COINS = {"global": np.array([0.1]), "cluster": np.array([0.0, 0.5, 1.0, 0.3])}
EPOCH = 1_700_000_000  # of the wall clock where the other one is 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(clock: Clock, *, asked=lambda: None, size: float = 0, environment=None, **options) -> Agenda:
    return Agenda(
        asked,
        **{"every": "auto", "max_walltime": None, "started": 0.0} | options,
        size=lambda: size,
        environment=environment or {},
        clock=clock,
        wall=lambda: EPOCH + clock.now,
    )


def run(clock: Clock, agenda: Agenda, plan: float, cost: float, end: float) -> list[float]:
    """When checkpoints were made, in a run of plans and checkpoints that take so many seconds."""
    made = []
    while clock.now < end:
        agenda.stop()
        clock.now += plan
        if agenda.due():
            clock.now += cost
            agenda.saved(cost)
            made.append(clock.now)
    return made


@pytest.mark.parametrize("cost", [0.001, 3.0, 6.5, 40.0, 300.0])
def test_checkpoints_take_a_tenth_of_the_time_at_most(cost):
    clock = Clock()
    agenda = make(clock)
    made = run(clock, agenda, 1.0, cost, 20_000)
    assert (agenda.count, agenda.seconds) == (len(made), pytest.approx(cost * len(made)))
    gaps = np.diff(made)
    assert min(gaps) >= max(SOONEST, cost / SHARE)
    assert max(gaps) <= max(SOONEST, cost / SHARE) + cost + 1
    for k, time in enumerate(made[1:], 2):  # of the first nobody knows before how long it takes
        assert k * cost <= SHARE * time + cost * (1 - SHARE)


def test_the_cost_of_the_first_checkpoint_is_estimated_from_its_size():
    for size, first in ((0, SOONEST), (100 * SPEED, 1000)):
        clock = Clock()
        (made, *_) = run(clock, make(clock, size=size), 1.0, 0.0, 1100)
        assert made == pytest.approx(first, abs=1)


def test_the_end_gets_a_checkpoint_where_it_costs_little():
    clock = Clock()
    agenda = make(clock, size=SPEED)  # a second
    clock.now = 9.0
    assert not agenda.last()
    clock.now = 11.0
    assert agenda.last()
    agenda.saved(1.0)
    assert not agenda.last()
    clock.now = 21.0
    assert agenda.last()
    assert make(clock, size=1e15, every=5).last()
    assert make(clock, size=1e15, every="1h").last()
    assert not make(clock, every="off").last()


def test_rounds_a_time_and_off():
    clock = Clock()
    by_rounds, by_time, off = (make(clock, every=every) for every in (7, "90s", "off"))
    assert [agenda.rounds for agenda in (by_rounds, by_time, off)] == [7, None, None]
    assert [agenda.off for agenda in (by_rounds, by_time, off)] == [False, False, True]
    clock.now = 89.0
    assert not by_time.due()
    clock.now = 1e6
    assert [agenda.due() for agenda in (by_rounds, by_time, off)] == [False, True, False]
    by_time.saved(1e4)  # who says how often gets it, whatever it costs
    clock.now += 89
    assert not by_time.due()
    clock.now += 1
    assert by_time.due()


@pytest.mark.parametrize(("plan", "cost"), [(1.0, 0.0), (3.0, 5.0), (0.1, 20.0)])
def test_a_stop_before_the_end_of_the_time_leaves_time_for_a_plan_and_a_checkpoint(plan, cost):
    clock = Clock()
    clock.now = 20.0  # torch and the data took so long
    agenda = make(clock, max_walltime="200s", size=1e3)
    agenda.saved(cost)
    while agenda.stop() is None:
        clock.now += plan
        assert clock.now < 200
    assert agenda.stop() == "walltime"
    assert clock.now + plan + cost <= 200 - 2
    assert clock.now + 4 * plan + 3 * cost >= 200 - 4  # and is not much too early


def test_the_longest_plan_counts():
    clock = Clock()
    agenda = make(clock, max_walltime="200s")
    agenda.stop()
    clock.now = 40.0
    agenda.stop()  # 40 s for a plan
    while agenda.stop() is None:
        clock.now += 1
    assert clock.now == 200 - 2 * 40 - 2 + 1


def test_the_end_of_a_slurm_job_counts_too():
    clock = Clock()
    clock.now = 100.0
    for walltime, end, expected in (
        (None, EPOCH + 500, 500),
        ("300s", EPOCH + 500, 300),
        ("700s", EPOCH + 500, 500),
        ("700s", "Unknown", 700),
        (None, "", None),
    ):
        agenda = make(clock, max_walltime=walltime, environment={"SLURM_JOB_END_TIME": str(end)})
        assert agenda.deadline == expected


def test_who_asks_is_told_first():
    clock, reasons = Clock(), [None, "signal SIGUSR1"]
    agenda = make(clock, asked=lambda: reasons.pop(0), max_walltime="10s")
    assert agenda.stop() is None
    clock.now = 9.0
    assert agenda.stop() == "signal SIGUSR1"


def decisions(coordinator: Coordinator, agenda: Agenda | None, clock: Clock, pace: float):
    """Every decision of a run, with its plans; a round takes ``pace`` seconds, a checkpoint one."""
    done, plans, made = 0, [], []
    while not plans or not plans[-1].stop:
        plans.append(coordinator.plan(done, pace, agenda))
        made += plans[-1].decisions(coordinator.everyone)
        done += plans[-1].count
        clock.now += pace * plans[-1].count
        if agenda and plans[-1].checkpoint:
            agenda.saved(1.0)
    return plans, made


@pytest.mark.parametrize(
    ("every", "quick", "slow"),
    [
        (5, {5, 10, 15, 20, 23}, {5, 10, 15, 20, 23}),
        (7, {7, 14, 21, 23}, {7, 14, 21, 23}),
        (100, {23}, {23}),
        ("off", set(), set()),
        (
            "10s",
            {23},
            {6, 12, 18, 23},
        ),  # when a plan is made the time is over, and after its rounds comes the checkpoint
        ("1h", {23}, {23}),
        ("auto", {23}, {23}),
    ],
)
def test_checkpoints_cut_plans_and_change_no_decision(every, quick, slow):
    coordinator = Coordinator(seed=1, rounds=23, clients=9, cohort=4, eval_every=4, coins=COINS)
    for pace, expected in ((0.01, quick), (2.0, slow)):
        clock = Clock()
        _, plain = decisions(coordinator, None, Clock(), pace)
        plans, made = decisions(coordinator, make(clock, every=every), clock, pace)
        for a, b in zip(plain, made, strict=True):
            assert (a.index, a.evaluate, a.stop) == (b.index, b.evaluate, b.stop)
            assert np.array_equal(a.participants, b.participants)
            assert all(np.array_equal(a.coins[name], b.coins[name]) for name in COINS)
        assert {plan.first + plan.count for plan in plans if plan.checkpoint} == expected


@pytest.mark.parametrize(("every", "checkpoint"), [(100, True), ("auto", True), ("off", False)])
def test_a_stop_is_a_plan_without_rounds(every, checkpoint):
    coordinator = Coordinator(seed=1, rounds=23, clients=9, cohort=4, eval_every=4, coins=COINS)
    clock = Clock()
    agenda = make(clock, asked=lambda: "signal SIGUSR1" if clock.now >= 10 else None, every=every)
    plans, made = decisions(coordinator, agenda, clock, 2.0)
    assert len(made) == 5
    assert not any(plan.checkpoint for plan in plans[:-1])
    last = plans[-1]
    assert (last.first, last.count, last.evaluate) == (5, 0, False)
    assert (last.stop, last.checkpoint) == ("stopped:signal SIGUSR1", checkpoint)
    assert coordinator.plan(23, 2.0, agenda).stop == "done"  # nothing is left to stop
