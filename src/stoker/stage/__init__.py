"""Brings the data to a local disk, once, whole and verified."""
