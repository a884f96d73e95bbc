"""The config: its keys, how it is read, refused and written."""

from stoker.config.loading import Resolved, load_config
from stoker.config.schema import Config
from stoker.config.writing import config_as_yaml, config_values

__all__ = ["Config", "Resolved", "config_as_yaml", "config_values", "load_config"]
