"""Checks of a run before it starts: what a careful person would look at, ticked off by a program."""
