"""Checked reading of a config.json: a value of a wrong type or range is a StartupError."""

from __future__ import annotations

from typing import Any

from quire.errors import StartupError, short_repr

MAX_SIZE = 2**31 - 1
MAX_NUMBER = 1e30  # far beyond any theta or factor, and with room for products
MAX_LIST_LENGTH = 1024
REQUIRED: Any = object()


class ConfigReader:
    """A config object, and its name in errors. A null counts as absent if there is a default."""

    def __init__(self, config: dict[str, Any], where: str = "config.json") -> None:
        self.config, self.source = config, where

    def _get(self, name: str, default: Any, kind: str) -> Any:
        value = self.config.get(name)
        if value is None and default is REQUIRED:
            raise StartupError(f"{self.source} has no {name}", f"It must be {kind}")
        return default if value is None else value

    def _error(self, name: str, value: Any, kind: str) -> StartupError:
        return StartupError(f"{name} in {self.source} must be {kind}, got {short_repr(value)}")

    def get_int(self, name: str, default: Any = REQUIRED, maximum: int = MAX_SIZE, minimum: int = 1) -> Any:
        """Return an integer from `minimum` to `maximum`."""
        kind = f"an integer from {minimum} to {maximum}"
        value = self._get(name, default, kind)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise self._error(name, value, kind)
        return value

    def get_float(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a number above 0, up to MAX_NUMBER."""
        kind = f"a number above 0, up to {MAX_NUMBER:g}"
        value = self._get(name, default, kind)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            raise self._error(name, value, kind)
        return float(value)

    def get_floats(self, name: str) -> tuple[float, ...]:
        """Return a list of 1 to MAX_LIST_LENGTH numbers above 0, up to MAX_NUMBER."""
        kind = f"a list of 1 to {MAX_LIST_LENGTH} numbers above 0, up to {MAX_NUMBER:g}"
        values = self._get(name, REQUIRED, kind)
        if not isinstance(values, list) or not 1 <= len(values) <= MAX_LIST_LENGTH:
            raise self._error(name, values, kind)
        if not all(type(value) in (int, float) and 0 < value <= MAX_NUMBER for value in values):
            raise self._error(name, values, kind)
        return tuple(map(float, values))

    def get_bool(self, name: str, default: bool) -> bool:
        value = self._get(name, default, "true or false")
        if not isinstance(value, bool):
            raise self._error(name, value, "true or false")
        return value

    def get_str(self, name: str, default: str) -> str:
        value = self._get(name, default, "a string")
        if not isinstance(value, str):
            raise self._error(name, value, "a string")
        return value

    def get_object(self, name: str) -> dict[str, Any]:
        """Return an object, empty if it is absent."""
        value = self._get(name, {}, "an object")
        if not isinstance(value, dict):
            raise self._error(name, value, "an object")
        return value

    def get_token_ids(self, name: str) -> tuple[int, ...]:
        """Return the ids of a token id or a list of them; none if it is absent."""
        value = self._get(name, (), "")
        items = [value] if isinstance(value, int) else value
        if not isinstance(items, list | tuple):
            raise self._error(name, value, "a token id or a list of them")
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise self._error(name, value, "a token id or a list of them")
        return tuple(items)

    def require_value(self, name: str, allowed: Any) -> None:
        """Raise StartupError unless the option is absent or has the `allowed` value, its default and the only one that
        is implemented."""
        value = self.config.get(name)
        if value is not None and value != allowed:
            raise StartupError(f"{name}={short_repr(value)} in {self.source} is not supported", f"Only {allowed!r} is")
