"""Volumes: cases and their splits, reading regions of any format, and patches as pure functions of their position."""
