"""The page about a run, and the live view."""
