"""The config keys, one file for each thing they concern."""
