"""Measures this host; has no opinions."""
