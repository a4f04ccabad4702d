"""Settings: `load` merges flags, environment, file and defaults into a `Configuration`."""

from chairlift_service.config.fields import ConfigError
from chairlift_service.config.load import Configuration, check_model, load
from chairlift_service.config.settings import ServiceSettings

__all__ = ["ConfigError", "Configuration", "ServiceSettings", "check_model", "load"]
