"""Checked reading of a config.json: a value of a wrong type or range is a StartupError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.errors import StartupError, short_repr

MAX_SIZE = 2**31 - 1
MAX_NUMBER = 1e30  # far beyond any theta or factor, and with room for products
MAX_LIST_LENGTH = 1024
REQUIRED: Any = object()
ACTIVATIONS = "silu", "swish", "relu", "relu2", "quick_gelu", "gelu", "gelu_new", "gelu_pytorch_tanh"
"""The names of activations in a config.json that quire.layers.mlp computes."""


def is_number(value: Any) -> bool:
    """Return True for a number above 0, up to MAX_NUMBER."""
    return type(value) in (int, float) and 0 < value <= MAX_NUMBER


class ConfigReader:
    """A config object, and its name in errors. A null counts as absent if there is a default."""

    def __init__(self, config: dict[str, Any], where: str = "config.json") -> None:
        self.config, self.source = config, where

    def with_aliases(self, **aliases: str) -> ConfigReader:
        """Return a reader of the same config in which `name` may also have the key `alias`, for each `alias="name"`, as
        in transformers. A null counts as absent. Raise StartupError if the config has both with different values."""
        config = dict(self.config)
        for alias, name in aliases.items():
            value = config.get(alias)
            if value is None:
                continue
            if config.get(name) is None:
                config[name] = value
            if config[name] != value:
                raise StartupError(
                    f"{self.source} has {alias} {short_repr(value)} and {name} {short_repr(config[name])}",
                    "They are names of one value: give one of them",
                )
        return ConfigReader(config, self.source)

    def _get(self, name: str, default: Any, kind: str, is_valid: Callable[[Any], bool]) -> Any:
        value = self.config.get(name)
        if value is None:
            if default is REQUIRED:
                raise StartupError(f"{self.source} has no {name}", f"It must be {kind}")
            return default
        if not is_valid(value):
            raise StartupError(f"{name} in {self.source} must be {kind}, got {short_repr(value)}")
        return value

    def get_int(self, name: str, default: Any = REQUIRED, maximum: int = MAX_SIZE, minimum: int = 1) -> Any:
        """Return an integer from `minimum` to `maximum`."""
        kind = f"an integer from {minimum} to {maximum}"
        return self._get(name, default, kind, lambda value: type(value) is int and minimum <= value <= maximum)

    def get_float(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a number above 0, up to MAX_NUMBER."""
        value = self._get(name, default, f"a number above 0, up to {MAX_NUMBER:g}", is_number)
        return float(value) if type(value) is int else value

    def get_floats(self, name: str) -> tuple[float, ...]:
        """Return a list of 1 to MAX_LIST_LENGTH numbers above 0, up to MAX_NUMBER."""

        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and 1 <= len(value) <= MAX_LIST_LENGTH and all(map(is_number, value))

        kind = f"a list of 1 to {MAX_LIST_LENGTH} numbers above 0, up to {MAX_NUMBER:g}"
        return tuple(map(float, self._get(name, REQUIRED, kind, is_valid)))

    def get_bool(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value: bool = self._get(name, default, "true or false", lambda value: isinstance(value, bool))
        return value

    def get_str(self, name: str, default: str) -> str:
        """Return a string."""
        value: str = self._get(name, default, "a string", lambda value: isinstance(value, str))
        return value

    def get_activation(self, name: str, default: str) -> str:
        """Return the name of an activation, one of ACTIVATIONS."""
        value = self.get_str(name, default)
        if value not in ACTIVATIONS:
            supported = f"Supported: {', '.join(ACTIVATIONS)}"
            raise StartupError(f"{name} in {self.source} is {short_repr(value)}", supported)
        return value

    def get_object(self, name: str) -> dict[str, Any]:
        """Return an object, empty if it is absent."""
        value: dict[str, Any] = self._get(name, {}, "an object", lambda value: isinstance(value, dict))
        return value

    def get_token_ids(self, name: str) -> tuple[int, ...]:
        """Return the ids of a token id or a list of them; none if it is absent."""

        def is_valid(value: Any) -> bool:
            return all(type(item) is int and item >= 0 for item in (value if isinstance(value, list) else [value]))

        value = self._get(name, [], "a token id or a list of them", is_valid)
        return tuple(value) if isinstance(value, list) else (value,)

    def require_value(self, name: str, allowed: Any) -> None:
        """Raise StartupError unless the option is absent or has the `allowed` value, its default and the only one that
        is implemented."""
        value = self.config.get(name)
        if value is not None and value != allowed:
            raise StartupError(f"{name}={short_repr(value)} in {self.source} is not supported", f"Only {allowed!r} is")
