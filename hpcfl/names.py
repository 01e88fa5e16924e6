"""Short names of options, for labels and files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """Of keys like "algorithm.lr" what is after the last dot, where that is no other key's, too; else the whole key."""
    last = {key: key.rpartition(".")[2] for key in keys}
    counts = Counter(last.values())
    return {key: name if counts[name] == 1 else key for key, name in last.items()}
