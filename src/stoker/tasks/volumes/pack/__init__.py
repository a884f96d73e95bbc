"""Volumes in any layout into a pack: prepared once, stored for fast reading."""
