"""What a results file contains: every dataset with its axes, type and meaning.

No file is touched here. results.py writes this list, results/README.md documents it, a test holds both to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

FORMAT_VERSION = (1, 4)  # (major, minor): a reader understands every minor version of its major version
FILETYPE = "hpcfl results"

KINDS = ("local", "cluster", "global")  # the codes of /rounds/kind
PHASES = ("compute", "communicate", "wait", "evaluate", "write")  # the columns of /timing
RECENT = 10  # rounds whose participants' tests are summarised
HIGHER_IS_BETTER = {"loss": False, "accuracy": True, "squared_error": False}
MEANING = {"loss": "loss", "accuracy": "share of samples classified correctly", "squared_error": "squared error"}
NAMES = {"evaluated": "client"}  # of axes' scales, where not the axis' own
GROWING = ("round", "evaluation", "rank")  # axes that a resumed run may make longer: more rounds, other ranks


@dataclass(frozen=True)
class Schema:
    """Sizes and names that fix the whole file before the first round."""

    clients: int
    rounds: int
    evaluations: int
    ranks: int
    clusters: int
    classes: int | None  # None: regression
    models: tuple[str, ...]  # which are evaluated: "personal", "global"
    splits: tuple[str, ...]  # ("train", "test") or with "validation"
    metrics: tuple[str, ...]  # ("loss", "accuracy") or ("loss", "squared_error")
    exposed: tuple[str, ...] = ()  # scalars per client that the algorithm exposes, e.g. ("alpha",)
    coins: Mapping[str, int] = field(default_factory=dict)  # name -> number of coins, e.g. {"cluster": K}
    truth: bool = False  # the clients' true parameters are known
    participants: bool = False  # the participants of every round are tested after their local work
    own_classes: bool = False  # labels are each client's own
    dtype: str = "float32"  # of the values per client and of the models
    parameters: Sequence[tuple[str, tuple[int, ...]]] | None = None  # (name, shape) in flat order: save the models
    evaluated: np.ndarray | None = field(default=None, compare=False)  # [E] the clients evaluated, ascending; None: all

    def __post_init__(self) -> None:
        for what, given, valid in (
            ("models", self.models, {"personal", "global"}),
            ("splits", self.splits, {"train", "validation", "test"}),
            ("metrics", self.metrics, set(HIGHER_IS_BETTER)),
        ):
            if not given or not set(given) <= valid or len(set(given)) != len(given):
                raise ValueError(f"Schema.{what} = {given}: expected different names out of {sorted(valid)}")
        if "test" not in self.splits:
            raise ValueError(f'Schema.splits = {self.splits}: expected "test" among them')
        taken = {"personal", "global", "evaluation", "client"} & set(self.exposed)
        if taken:
            raise ValueError(f"Schema.exposed = {self.exposed}: {sorted(taken)} are names of the format; choose others")

    @property
    def metric(self) -> str:
        """The metric that tables and plots show first: accuracy or squared error."""
        return self.metrics[-1]

    @property
    def chooser(self) -> str:
        """The split on which the best evaluation is chosen."""
        return "validation" if "validation" in self.splits else "test"

    @property
    def estimated(self) -> tuple[str, ...]:
        """The models whose estimation errors are measured."""
        return self.models if self.truth else ()

    @property
    def measured(self) -> str:
        """The axis of the clients in /per_client."""
        return "client" if self.evaluated is None else "evaluated"

    @property
    def averages_by_coins(self) -> bool:
        """Whether one coin "global" and a coin "cluster" of each cluster say who averages in a round."""
        return self.coins.get("global") == 1 and self.coins.get("cluster") == self.clusters

    @property
    def size(self) -> int:
        """P, the number of parameters of one model (0 where models are not saved)."""
        return sum(math.prod(shape) for _, shape in self.parameters or ())

    @property
    def lengths(self) -> dict[str, int]:
        """Length of every axis by name."""
        lengths = {"round": self.rounds, "evaluation": self.evaluations, "client": self.clients, "rank": self.ranks}
        lengths |= {"cluster": self.clusters} | {f"{name}_coin": number for name, number in self.coins.items()}
        lengths |= {"class": self.classes} if self.classes is not None else {}
        lengths |= {"evaluated": len(self.evaluated)} if self.evaluated is not None else {}
        return lengths | ({"parameter": self.size} if self.parameters is not None else {})


@dataclass(frozen=True)
class Field:
    """One dataset. ``axes`` are names of dimension scales; a scale is its own only axis."""

    path: str
    axes: tuple[str, ...]
    dtype: str
    units: str
    long_name: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def group(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def fill(self) -> Any:
        """What stands in a row that was never written: NaN, -1, or 255."""
        kind = np.dtype(self.dtype).kind
        return np.nan if kind == "f" else -1 if kind == "i" else 255


def scales(schema: Schema) -> Iterator[Field]:
    """The dimension scales, each in the group where it is at home (others hold hard links to it)."""
    yield Field("/clients/client", ("client",), "int64", "1", "client number")
    if schema.classes is not None:
        yield Field("/clients/class", ("class",), "int64", "1", "class label")
    yield Field("/clusters/cluster", ("cluster",), "int64", "1", "cluster number")
    yield Field("/rounds/round", ("round",), "int64", "1", "round index, from 0")
    for name in schema.coins:
        yield Field(f"/rounds/{name}_coin", (f"{name}_coin",), "int64", "1", f'number of the coin "{name}"')
    yield Field("/evaluations/evaluation", ("evaluation",), "int64", "1", "evaluation index, from 0")
    if schema.evaluated is not None:
        text = "client number: a fixed random sample is evaluated"
        yield Field("/per_client/client", ("evaluated",), "int64", "1", text)
    yield Field("/timing/rank", ("rank",), "int64", "1", "MPI rank")
    if schema.parameters is not None:
        yield Field("/final/models/parameter", ("parameter",), "int64", "1", "position in the flat model")


def fields(schema: Schema) -> Iterator[Field]:
    """Every dataset that is not a scale, except the two strings of /config."""
    yield from _clients(schema)
    yield Field("/clusters/n_clients", ("cluster",), "int64", "1", "number of clients")
    yield Field("/clusters/n_train", ("cluster",), "int64", "1", "number of training samples")
    yield from _rounds(schema)
    yield from _evaluations(schema)
    for phase in PHASES:
        yield Field(f"/timing/{phase}", ("rank",), "float64", "s", f"time in: {phase}")
    yield from _final(schema)


def _clients(schema: Schema) -> Iterator[Field]:
    yield Field("/clients/cluster", ("client",), "int64", "1", "cluster of the client (0 where there are none)")
    for split in ("train", "validation", "test"):
        yield Field(f"/clients/n_{split}", ("client",), "int64", "1", f"number of {split} samples")
    if schema.own_classes:
        text = "number of classes of the client, which are numbered 0, 1, ... in the order of the data's"
        yield Field("/clients/n_classes", ("client",), "int64", "1", text)
    if schema.classes is not None:
        text = "number of training samples per class"
        yield Field("/clients/class_counts", ("client", "class"), "int64", "1", text)


def _rounds(schema: Schema) -> Iterator[Field]:
    flags = {"flag_values": np.arange(len(KINDS), dtype="uint8"), "flag_meanings": " ".join(KINDS)}
    yield Field("/rounds/kind", ("round",), "uint8", "1", "widest average of the round", flags)
    yield Field("/rounds/n_participants", ("round",), "int64", "1", "number of clients that took part")
    yield Field("/rounds/seconds", ("round",), "float64", "s", "duration of the round")
    yield Field("/rounds/train_loss", ("round",), "float64", "1", "training loss during the round's local work")
    for way in ("up", "down"):
        direction = "clients to server" if way == "up" else "server to clients"
        text = f"vectors that a real federation would have sent, {direction}"
        yield Field(f"/rounds/vectors_{way}", ("round",), "int64", "1", text)
        yield Field(f"/rounds/bytes_{way}", ("round",), "int64", "byte", text.replace("vectors", "bytes"))
    for way in ("forward", "backward"):
        text = f"{way} passes of a minibatch through the model's body, mean over the participants"
        yield Field(f"/rounds/{way}_passes", ("round",), "float64", "1", text)
    for metric in schema.metrics if schema.participants else ():
        text = f"{MEANING[metric]} of the participants' models after their local work, mean over their test samples"
        yield Field(f"/rounds/participants_test_{metric}", ("round",), "float64", "1", text)
    for name in schema.coins:
        text = f'outcome of the coins "{name}": 1 came up, 0 did not'
        yield Field(f"/rounds/coins_{name}", ("round", f"{name}_coin"), "uint8", "1", text)


def _evaluations(schema: Schema) -> Iterator[Field]:
    axis, each = ("evaluation",), ("evaluation", schema.measured)
    yield Field("/evaluations/round", axis, "int64", "1", "rounds done before the evaluation")
    yield Field("/evaluations/seconds", axis, "float64", "s", "time since the start of the run")
    for name in schema.exposed:
        yield Field(f"/per_client/{name}", each, schema.dtype, "1", f"{name} of each client")
    for model, split, metric in measures(schema):
        what = f"{MEANING[metric]} of the {model} model, {split} samples"
        key = f"{model}_{split}_{metric}"
        over = f"over the N clients with {split} samples, m_i = /per_client/{model}/{split}_{metric}"
        yield Field(f"/evaluations/{key}", axis, "float64", "1", f"{what}: mean over clients, sum_i m_i / N {over}")
        text = f"{what}: mean over samples, sum_i n_i m_i / sum_i n_i {over}, n_i = /clients/n_{split}"
        yield Field(f"/evaluations/{key}_by_sample", axis, "float64", "1", text)
        text = f"{what}, mean over the client's samples"
        yield Field(f"/per_client/{model}/{split}_{metric}", each, schema.dtype, "1", text)
    for model in schema.estimated:
        text = f"estimation error of the {model} model, |theta_i - theta_i*|, theta_i* the client's true parameters"
        yield Field(f"/per_client/{model}/estimation_error", each, schema.dtype, "1", text)
        yield Field(f"/evaluations/{model}_estimation_error", axis, "float64", "1", f"{text}: mean over clients")


def _final(schema: Schema) -> Iterator[Field]:
    yield Field("/final/evaluation", (), "int64", "1", "the evaluation summarised here: the last one")
    yield Field("/final/round", (), "int64", "1", "rounds done before it")
    yield Field("/final/rounds", (), "int64", "1", "rounds done in the whole run")
    for name, dtype, units in _TOTALS:
        yield Field(f"/final/{name}", (), dtype, units, f"sum of /rounds/{name} over the whole run")
    for model, split, metric in measures(schema):
        if split != "test":
            continue
        what = f"{MEANING[metric]} of the {model} model, test samples, m_i of the N clients that have some"
        worst = "lowest" if HIGHER_IS_BETTER[metric] else "highest"
        choice = {"chosen_on": schema.chooser}
        if schema.chooser == "test":
            choice["comment"] = "chosen by the very test values it reports, so it is optimistic"
        best = f"{'highest' if worst == 'lowest' else 'lowest'} /evaluations/{model}_{schema.chooser}_{metric}"
        for name, text, extra in (
            ("mean", "sum_i m_i / N", {}),
            ("mean_by_sample", "sum_i n_i m_i / sum_i n_i, n_i = /clients/n_test", {}),
            ("std", "standard deviation over clients, sqrt(sum_i (m_i - mean)^2 / N)", {}),
            ("worst_decile", f"mean over the ceil(N/10) clients with the {worst} m_i", {}),
            ("best", f"mean over clients at the evaluation with the {best}", choice),
        ):
            yield Field(f"/final/{model}_test_{metric}_{name}", (), "float64", "1", f"{what}: {text}", extra)
        text = f"evaluation with the {best}, the first of equals"
        yield Field(f"/final/{model}_test_{metric}_best_evaluation", (), "int64", "1", text, choice)
    for metric in schema.metrics if schema.participants else ():
        what = f"/rounds/participants_test_{metric} in the last {RECENT} rounds"
        yield Field(f"/final/participants_test_{metric}_mean", (), "float64", "1", f"{what}: mean")
        text = f"{what}: standard deviation, sqrt(sum (m - mean)^2 / rounds)"
        yield Field(f"/final/participants_test_{metric}_std", (), "float64", "1", text)
    for model in schema.estimated:
        what = f"estimation error of the {model} model"
        yield Field(f"/final/{model}_estimation_error_mean", (), "float64", "1", f"{what}: mean over clients")
        text = f"{what}: standard deviation over clients, sqrt(sum_i (e_i - mean)^2 / N)"
        yield Field(f"/final/{model}_estimation_error_std", (), "float64", "1", text)
    if schema.averages_by_coins:
        text = "in the whole run in which"
        yield Field("/final/global_rounds", (), "int64", "1", f'rounds {text} the coin "global" came up')
        for name, which in (("cluster", "its own coin came up and the global one did not"), ("mean", "either did")):
            yield Field(f"/final/{name}_rounds", ("cluster",), "int64", "1", f"rounds of each cluster {text} {which}")
    if schema.parameters is not None:
        for model in schema.models:
            axes = ("client", "parameter") if model == "personal" else ("parameter",)
            yield Field(f"/final/models/{model}", axes, schema.dtype, "1", f"{model} model at the end, flat")


_TOTALS = (
    ("seconds", "float64", "s"),
    ("vectors_up", "int64", "1"),
    ("vectors_down", "int64", "1"),
    ("bytes_up", "int64", "byte"),
    ("bytes_down", "int64", "byte"),
)
TOTALS = tuple(name for name, _, _ in _TOTALS)


def measures(schema: Schema) -> Iterator[tuple[str, str, str]]:
    """(model, split, metric) of everything that an evaluation measures."""
    for model in schema.models:
        for split in schema.splits:
            for metric in schema.metrics:
                yield model, split, metric
