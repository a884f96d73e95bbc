"""Tests of stoker.tune."""
