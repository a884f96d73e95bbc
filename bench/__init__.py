"""Benchmarks: ratios measured within one run, in interleaved rounds, with their spread."""
