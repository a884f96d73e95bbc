"""Measures this machine; has no opinions."""
