"""Tables and plots of finished and running runs: they read results files and nothing else."""
