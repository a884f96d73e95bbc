"""Configs of other programs: what each of their keys means here, and a config of ours that says so."""
