"""The geometry of a memory as JSON, for a log's header and for ranks: said, and read again."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from quire.config import VISION_CACHES
from quire.vocabulary.specs import Geometry, Group, Layout

MOST_CELLS = 2**27  # of all page tables together, and tokens of host memory


def write_geometry(geometry: Geometry) -> dict[str, Any]:
    """A geometry as JSON: a range is its two ends."""
    found = asdict(geometry)
    found["layout"] = geometry.layout.value
    for group in found["groups"]:
        for name, value in group.items():
            if isinstance(value, range):
                group[name] = [value.start, value.stop]
    return found


def read_geometry(said: dict[str, Any]) -> Geometry:
    """The geometry that was said. ValueError, KeyError or TypeError if none was."""
    values = {field.name: said[field.name] for field in fields(Geometry)}
    groups = tuple(_group(group) for group in values.pop("groups"))
    layout, sight, both_ways = Layout(values.pop("layout")), values.pop("sight"), values.pop("both_ways")
    if sight not in ("", *VISION_CACHES) or type(both_ways) is not bool:
        raise ValueError(f"it sees {str(sight)[:40]!r}, both ways {str(both_ways)[:40]!r}")
    numbers = {name: number(value) for name, value in values.items()}
    geometry = Geometry(layout=layout, groups=groups, sight=sight, both_ways=both_ways, **numbers)
    if not groups or set(said) != {field.name for field in fields(Geometry)}:
        raise ValueError("it has no groups, or what is unknown here")
    if geometry.large_bytes and any(geometry.large_bytes % group.page_bytes for group in groups):
        raise ValueError("its pages aren't parts of its large pages")
    return geometry


def check_size(geometry: Geometry) -> None:
    """ValueError for more than a file, which anybody may have written, has tables of here."""
    if sum(geometry.slots * group.table_width for group in geometry.groups) > MOST_CELLS:
        raise ValueError(f"its page tables have more than {MOST_CELLS} cells")
    if any(group.host_ids.stop * group.run_tokens > MOST_CELLS for group in geometry.groups):
        raise ValueError(f"its host memory holds more than {MOST_CELLS} tokens")


def _group(said: dict[str, Any]) -> Group:
    if set(said) != {field.name for field in fields(Group)}:
        raise ValueError("a group has other fields than it has here")
    values = dict(said)
    for name in ("ids", "host_ids"):
        start, stop = map(number, values[name])
        values[name] = range(start, stop)
    values["layers"] = tuple(map(number, values["layers"]))
    if not isinstance(values["kind"], str):
        raise TypeError("a group's kind is no string")
    lengths = ("window", "chunk", "budget")
    for name in ("page_bytes", "token_bytes", "table_width", "run_tokens", "run_pages", *lengths):
        if (name not in lengths or values[name] is not None) and not number(values[name]):
            raise ValueError(f"a group's {name} is 0")
    return Group(**values)


def number(value: Any) -> int:
    """A count, as a geometry has them. ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:40]!r} is no number of a geometry")
    return value
