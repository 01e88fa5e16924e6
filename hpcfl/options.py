"""Option types for the dataclasses that users configure, and their validation with readable messages.

A registered class is a frozen dataclass; its fields are its options in the job file. Ranges are types: ``alpha: Share``
cannot be 1.5, and the message says so without any code in the algorithm.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hpcfl.errors import InputError, nearest

Share = Annotated[float, Field(ge=0, le=1)]  # [0, 1]
PositiveShare = Annotated[float, Field(gt=0, le=1)]  # (0, 1]
OpenShare = Annotated[float, Field(ge=0, lt=1)]  # [0, 1)
InnerShare = Annotated[float, Field(gt=0, lt=1)]  # (0, 1)
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1, le=10**15)]
CountOrZero = Annotated[int, Field(ge=0, le=10**15)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]
Shares = Annotated[tuple[Share, ...], Field(min_length=1)]
Counts = tuple[Count, ...]
Sizes = Annotated[tuple[Count, ...], Field(min_length=1)]
Numbers = Annotated[tuple[float, ...], Field(min_length=1)]
Positives = Annotated[tuple[Positive, ...], Field(min_length=1)]
OpenShares = Annotated[tuple[OpenShare, ...], Field(min_length=1)]
NonNegatives = Annotated[tuple[NonNegative, ...], Field(min_length=1)]

T = TypeVar("T")

MEANING = {  # the types' names in words, for people
    "Share": "number in [0, 1]",
    "Shares": "list of numbers in [0, 1]",
    "PositiveShare": "number in (0, 1]",
    "OpenShare": "number in [0, 1)",
    "InnerShare": "number in (0, 1)",
    "Positive": "number > 0",
    "NonNegative": "number >= 0",
    "Count": "whole number >= 1",
    "CountOrZero": "whole number >= 0",
    "Counts": "list of whole numbers >= 1",
    "Sizes": "list of whole numbers >= 1",
    "Numbers": "list of numbers",
    "Positives": "list of numbers > 0",
    "OpenShares": "list of numbers in [0, 1)",
    "Objective": '"mean" or "sum"',
    "TauRule": '"balance", "bound" or "exact"',
    "NonNegatives": "list of numbers >= 0",
    "Schedule": 'table, e.g. {name = "exponential", decay = 0.99}',
    "Weighting": '"client" or "sample"',
    "bool": "true or false",
    "float": "number",
    "int": "whole number",
    "str": "string",
}

EXPECTED = {
    "float_type": "a number",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "a table",
    "dataclass_type": "a table",
    "model_attributes_type": "a table",
    "model_type": "a table",
    "int_from_float": "a whole number",
    "too_short": "a list that is not empty",
}

MEMBERS = {"float", "int", "str", "bool", "constant", "exponential", "theory"}  # of unions, in pydantic's locations

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


def options(cls: type) -> type:
    """Class decorator: unknown keys and wrong types are errors when the dataclass is made from a job file."""
    cls.__pydantic_config__ = STRICT  # type: ignore[attr-defined]  # read by pydantic, unknown to dataclasses
    return cls


def make(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """An instance of the dataclass ``cls`` from a job file's table.

    where: name of the table, for messages. Raises InputError that lists every mistake, one line each.
    """
    try:
        # as JSON, where strict means what it does in TOML: "0.1" is no number, but an array is a tuple
        return TypeAdapter(cls).validate_json(json.dumps(dict(values), default=str))
    except ValidationError as error:
        raise InputError("\n".join(explain(error, cls, where))) from None


def explain(error: ValidationError, cls: type, where: str) -> list[str]:
    """One line per mistake: where, what was given, what was expected, the nearest valid name."""
    errors = error.errors()
    lines: list[str] = []
    for e in errors:
        alternatives = [o for o in errors if shared_place(o["loc"], e["loc"]) and not beside_the_point(o)]
        deeper = any(len(place(o["loc"])) > len(place(e["loc"])) for o in alternatives)
        if alternatives and (beside_the_point(e) or (deeper and e["type"].endswith("_type"))):
            continue
        if e["type"].endswith("_type") and any(not o["type"].endswith("_type") for o in alternatives):
            continue  # of "a number or a list of numbers", only speak of the one that was meant
        path = place(e["loc"])
        name = ".".join([where, *path])
        if e["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            hint = nearest(path[-1], known(cls)) if len(path) == 1 else ""
            line = f"{name}: unknown option{hint}"
        elif e["type"].startswith("missing"):
            line = f"{name}: required, but not given"
        elif e["type"] == "union_tag_invalid":
            tags = [t.strip(" '") for t in e["ctx"]["expected_tags"].split(",")]
            line = f'{name}.name = "{e["ctx"]["tag"]}": unknown{nearest(e["ctx"]["tag"], tags)}'
        elif e["type"] == "union_tag_not_found":
            line = f"{name}.name: required, but not given"
        else:
            kinds = sorted({EXPECTED[o["type"]] for o in alternatives if o["type"] in EXPECTED})
            message = e["msg"].removeprefix("Input should be ")
            if e["type"] == "literal_error":
                expected = " or ".join([*kinds, message])
            else:
                expected = " or ".join(kinds) if e["type"] in EXPECTED else message
            line = f"{name} = {shown(e['input'])}: expected {expected}"
        if line not in lines:
            lines.append(line)
    return lines


def beside_the_point(error: ErrorDetails) -> bool:
    """That something is no word of a list, where it is no word at all."""
    return error["type"] == "literal_error" and not isinstance(error["input"], str)


def place(loc: tuple[int | str, ...]) -> list[str]:
    """The names in a job file on the way to a mistake, without pydantic's names of union members."""
    names = [
        p for k, p in enumerate(loc) if k == 0 or not (isinstance(p, str) and (not p.isidentifier() or p in MEMBERS))
    ]
    return [str(p) for p in names]


def shared_place(a: tuple[int | str, ...], b: tuple[int | str, ...]) -> bool:
    """Whether two mistakes are about the same value, or about a value and its part."""
    x, y = place(a), place(b)
    return x[: len(y)] == y or y[: len(x)] == x


def known(cls: type) -> list[str]:
    """Names of a dataclass's options."""
    return [f.name for f in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []


def user_path(text: str) -> Path:
    """A path that the user gave, with ~ as the home folder. Raises InputError for the home of nobody."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InputError(f"{text}: there is no such user, whose home folder it would be in") from None


def shown(value: Any) -> str:
    """A value as in the job file, cut to fit a line."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
