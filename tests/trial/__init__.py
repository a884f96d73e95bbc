"""Tests of `stoker.trial`."""
