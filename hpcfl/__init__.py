"""hpcfl: personalized federated learning on HPC machines, over MPI."""

__version__ = "0.1.0"
