"""Experiments on whole engines: the work as data, a run of it, what was measured, tables and pictures."""
