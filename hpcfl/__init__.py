"""hpcfl: personalized federated learning on HPC machines, over MPI."""

import os

__version__ = "0.1.0"

# The matrix products of MKL give other last bits for other alignments of the same numbers, that is, for other places of
# a client in its block, unless told not to (conditional numerical reproducibility). Read once, at the first product.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
