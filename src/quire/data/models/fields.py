"""Checked reading of a config.json: every value has the type and range that the models rely on, or a StartupError."""

from __future__ import annotations

from typing import Any

from quire.errors import StartupError, shown

MAX_SIZE = 2**31 - 1
MAX_NUMBER = 1e30  # far beyond any theta or factor, and with room for products
MAX_NUMBERS = 1024
MISSING: Any = object()


class Fields:
    """A config object and what to call it in errors. A null counts as absent wherever there is a default."""

    def __init__(self, config: dict[str, Any], where: str = "config.json") -> None:
        self.config, self.where = config, where

    def _get(self, name: str, default: Any, kind: str) -> Any:
        value = self.config.get(name)
        if value is None and default is MISSING:
            raise StartupError(f"{self.where} has no {name}", f"It must be {kind}")
        return default if value is None else value

    def _bad(self, name: str, value: Any, kind: str) -> StartupError:
        return StartupError(f"{name} in {self.where} must be {kind}, got {shown(value)}")

    def size(self, name: str, default: Any = MISSING, most: int = MAX_SIZE, least: int = 1) -> Any:
        """An integer, positive unless `least` says otherwise."""
        kind = f"an integer from {least} to {most}"
        value = self._get(name, default, kind)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._bad(name, value, kind)
        return value

    def number(self, name: str, default: Any = MISSING) -> Any:
        """A number above 0, up to MAX_NUMBER."""
        kind = f"a number above 0, up to {MAX_NUMBER:g}"
        value = self._get(name, default, kind)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_NUMBER:
            raise self._bad(name, value, kind)
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers above 0, up to MAX_NUMBER."""
        kind = f"a list of 1 to {MAX_NUMBERS} numbers above 0, up to {MAX_NUMBER:g}"
        found = self._get(name, MISSING, kind)
        if not isinstance(found, list) or not 1 <= len(found) <= MAX_NUMBERS:
            raise self._bad(name, found, kind)
        if not all(type(value) in (int, float) and 0 < value <= MAX_NUMBER for value in found):
            raise self._bad(name, found, kind)
        return tuple(map(float, found))

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default, "true or false")
        if not isinstance(value, bool):
            raise self._bad(name, value, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default, "a string")
        if not isinstance(value, str):
            raise self._bad(name, value, "a string")
        return value

    def section(self, name: str) -> dict[str, Any]:
        """An object; an empty one where it is absent."""
        value = self._get(name, {}, "an object")
        if not isinstance(value, dict):
            raise self._bad(name, value, "an object")
        return value

    def ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self._get(name, (), "")
        items = [value] if isinstance(value, int) else value
        if not isinstance(items, list | tuple):
            raise self._bad(name, value, "a token id or a list of them")
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int) or item < 0:
                raise self._bad(name, value, "a token id or a list of them")
        return tuple(items)

    def refuse(self, name: str, allowed: Any) -> None:
        """An option that quire implements for one value only, which is also the one meant when it is absent."""
        value = self.config.get(name)
        if value is not None and value != allowed:
            raise StartupError(f"{name}={shown(value)} in {self.where} is not supported", f"Only {allowed!r} is")
