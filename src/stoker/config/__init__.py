"""The config: its keys, how it is read, refused and written."""

from stoker.config.loading import Resolved, load_config
from stoker.config.machine import fit_to_machine
from stoker.config.schema import Config
from stoker.config.writing import config_as_yaml, config_values

__all__ = ["Config", "Resolved", "config_as_yaml", "config_values", "fit_to_machine", "load_config"]
