"""The deployment's configuration: TOML, environment and flags to frozen, strict dataclasses, or all that is wrong."""

from tokenflow.config.load import Catalogue, Loaded, load
from tokenflow.config.model import (
    AuthConfig,
    Config,
    HttpConfig,
    KeyConfig,
    LimitsConfig,
    ModelConfig,
    PluginsConfig,
    ServerConfig,
    StreamConfig,
    TimeoutsConfig,
)
from tokenflow.config.raw import Flag
from tokenflow.config.schema import schema
from tokenflow.config.show import show
from tokenflow.config.strays import strays
from tokenflow.config.template import template

__all__ = [
    "AuthConfig",
    "Catalogue",
    "Config",
    "Flag",
    "HttpConfig",
    "KeyConfig",
    "LimitsConfig",
    "Loaded",
    "ModelConfig",
    "PluginsConfig",
    "ServerConfig",
    "StreamConfig",
    "TimeoutsConfig",
    "load",
    "schema",
    "show",
    "strays",
    "template",
]
