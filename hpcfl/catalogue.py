"""``hpcfl list``: what can be named in a job file."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hpcfl.errors import InputError, nearest
from hpcfl.options import MEANING
from hpcfl.registry import load_plugins, registered

KINDS = {"algorithms": "algorithm", "models": "model", "data": "data", "partitions": "partition"}


def print_catalogue(kind: str | None, plugins: Sequence[Path], console: Console) -> None:
    """Prints every registered name of a kind (None: of all) with its options, types and defaults."""
    if kind is not None and kind not in KINDS:
        raise InputError(f"hpcfl list {kind}: unknown kind{nearest(kind, KINDS)}")
    load_plugins(list(plugins))
    for plural in KINDS if kind is None else [kind]:
        console.print(f"[bold]{plural}[/]")
        for name, cls in registered(KINDS[plural]).items():
            summary = (cls.__doc__ or "").strip().partition("\n")[0]
            console.print(f"  [bold cyan]{name}[/]  {summary}", highlight=False, soft_wrap=True)
            for option, kind_of, default in options_of(cls):
                console.print(f"      {option} = {default}  ({kind_of})", markup=False, highlight=False, soft_wrap=True)


def options_of(cls: type) -> list[tuple[str, str, str]]:
    """(name, type, default) of every option."""
    rows = []
    for f in dataclasses.fields(cls):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        default = "required" if required else "absent" if f.default is None else _shown(f.default)
        rows.append((f.name, " or ".join(map(_in_words, re.sub(r" \| None$", "", str(f.type)).split(" | "))), default))
    return rows


def _in_words(kind: str) -> str:
    choices = re.fullmatch(r"Literal\[(.*)\]", kind)
    return choices[1].replace("'", '"') if choices else MEANING.get(kind, kind)


def _shown(value: object) -> str:
    if dataclasses.is_dataclass(value):
        return "{" + ", ".join(f"{f.name} = {_shown(getattr(value, f.name))}" for f in dataclasses.fields(value)) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
