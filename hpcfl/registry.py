"""The registry of algorithms, models, data sets and partitions.

Adding one is one file with ``@register(kind, name)`` on a frozen dataclass: in the built-in folder of its kind, in a
file given by ``--plugin``, or in a package with an entry point in the group ``hpcfl.plugins``.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hpcfl.errors import InputError, nearest
from hpcfl.options import make, options

T = TypeVar("T", bound=type)

FOLDERS = {
    "algorithm": "hpcfl.algorithms",
    "model": "hpcfl.models",
    "data": "hpcfl.data",
    "partition": "hpcfl.partition",
}

_registered: dict[str, dict[str, type]] = {kind: {} for kind in FOLDERS}


def register(kind: str, name: str) -> Callable[[T], T]:
    """Class decorator: makes a frozen dataclass known as ``name``; its fields are its options in the job file.

    Raises InputError for an unknown kind and for a name that another class already has.
    """
    if kind not in FOLDERS:
        raise InputError(f'register("{kind}", "{name}"): unknown kind{nearest(kind, FOLDERS)}')

    def add(cls: T) -> T:
        if not dataclasses.is_dataclass(cls):
            raise InputError(f'register("{kind}", "{name}"): {cls.__name__} is no dataclass; write @dataclass below it')
        other = _registered[kind].get(name)
        if other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
            raise InputError(
                f'{kind} "{name}" in {cls.__module__}: the name is taken by {other.__module__}; choose another'
            )
        _registered[kind][name] = options(cls)
        return cls

    return add


def registered(kind: str) -> Mapping[str, type]:
    """All classes of a kind by name, after importing the built-in folder."""
    package = importlib.import_module(FOLDERS[kind])
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{FOLDERS[kind]}.{module.name}")
    return dict(sorted(_registered[kind].items()))


def lookup(kind: str, name: str) -> type:
    """The class of that name. Raises InputError that names the nearest one."""
    classes = registered(kind)
    if name not in classes:
        raise InputError(f'{kind}.name = "{name}": unknown {kind}{nearest(name, classes)}')
    return classes[name]


def build(kind: str, table: Mapping[str, Any]) -> Any:
    """Instance from a job file's table: its ``name`` picks the class, the other keys are the options."""
    values = dict(table)
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise InputError(f"{kind}.name: required, a string{nearest(str(name), registered(kind))}")
    return make(lookup(kind, name), values, kind)


def load_plugins(files: list[Path]) -> None:
    """Import the user's files and the installed entry points. Raises InputError with the place of the mistake."""
    for entry in importlib.metadata.entry_points(group="hpcfl.plugins"):
        _run_plugin(entry.load, f"entry point {entry.name}")
    for file in files:
        if not file.is_file():
            raise InputError(f"--plugin {file}: no such file")
        name = f"hpcfl_plugin_{file.stem}"
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise InputError(f"--plugin {file}: not a Python file; expected a name that ends in .py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        _run_plugin(partial(spec.loader.exec_module, module), f"--plugin {file}")


def _run_plugin(load: Callable[[], Any], where: str) -> None:
    try:
        load()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except Exception as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        line = (
            f", line {error.lineno}" if isinstance(error, SyntaxError) else f", line {place.tb_lineno}" if place else ""
        )
        raise InputError(f"{where}{line}: {type(error).__name__}: {error}") from error
