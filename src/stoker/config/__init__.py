"""The config: keys, reading, validation, writing."""

from stoker.config.reading import Resolved, load_config
from stoker.config.reference import config_as_yaml, config_values
from stoker.config.schema import Config

__all__ = ["Config", "Resolved", "config_as_yaml", "config_values", "load_config"]
