"""Finds the fastest settings of a config or a script by short trials, one change at a time."""
