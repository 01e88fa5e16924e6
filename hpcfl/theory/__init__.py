"""Theory: what the papers predict, as plain functions of an experiment's numbers."""
