"""Brings data to a local disk, or makes a lazy file system fetch it."""
