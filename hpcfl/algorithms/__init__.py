"""Algorithms: one file each, which reads like the paper's pseudo-code."""
