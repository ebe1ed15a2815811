"""The geometry of a memory as JSON, for a log's header and for ranks: said, and read again."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from quire.config import VISION_CACHES
from quire.protocol.model_spec import KVCacheConfig, KVCacheGroup, KVCacheLayout

MAX_TABLE_ENTRIES = 2**27  # of all page tables together, and tokens of host memory


def kv_cache_config_to_json(kv_config: KVCacheConfig) -> dict[str, Any]:
    """A geometry as JSON: a range is its two ends."""
    found = asdict(kv_config)
    found["layout"] = kv_config.layout.value
    for group in found["groups"]:
        for name, value in group.items():
            if isinstance(value, range):
                group[name] = [value.start, value.stop]
    return found


def kv_cache_config_from_json(data: dict[str, Any]) -> KVCacheConfig:
    """The geometry that was said. ValueError, KeyError or TypeError if none was."""
    values = {field.name: data[field.name] for field in fields(KVCacheConfig)}
    groups = tuple(_group_from_json(group) for group in values.pop("groups"))
    layout, sight, both_ways = KVCacheLayout(values.pop("layout")), values.pop("sight"), values.pop("both_ways")
    if sight not in ("", *VISION_CACHES) or type(both_ways) is not bool:
        raise ValueError(f"it sees {str(sight)[:40]!r}, both ways {str(both_ways)[:40]!r}")
    numbers = {name: parse_count(value) for name, value in values.items()}
    geometry = KVCacheConfig(layout=layout, groups=groups, sight=sight, both_ways=both_ways, **numbers)
    if not groups or set(data) != {field.name for field in fields(KVCacheConfig)}:
        raise ValueError("it has no groups, or what is unknown here")
    if geometry.large_bytes and any(geometry.large_bytes % group.page_bytes for group in groups):
        raise ValueError("its pages aren't parts of its large pages")
    return geometry


def check_replay_size(kv_config: KVCacheConfig) -> None:
    """ValueError for more than a file, which anybody may have written, has tables of here."""
    if sum(kv_config.slots * group.table_width for group in kv_config.groups) > MAX_TABLE_ENTRIES:
        raise ValueError(f"its page tables have more than {MAX_TABLE_ENTRIES} cells")
    if any(group.host_ids.stop * group.run_tokens > MAX_TABLE_ENTRIES for group in kv_config.groups):
        raise ValueError(f"its host memory holds more than {MAX_TABLE_ENTRIES} tokens")


def _group_from_json(data: dict[str, Any]) -> KVCacheGroup:
    if set(data) != {field.name for field in fields(KVCacheGroup)}:
        raise ValueError("a group has other fields than it has here")
    values = dict(data)
    for name in ("ids", "host_ids"):
        start, stop = map(parse_count, values[name])
        values[name] = range(start, stop)
    values["layers"] = tuple(map(parse_count, values["layers"]))
    if not isinstance(values["kind"], str):
        raise TypeError("a group's kind is no string")
    lengths = ("window", "chunk", "budget")
    for name in ("page_bytes", "token_bytes", "table_width", "run_tokens", "run_pages", *lengths):
        if (name not in lengths or values[name] is not None) and not parse_count(values[name]):
            raise ValueError(f"a group's {name} is 0")
    return KVCacheGroup(**values)


def parse_count(value: Any) -> int:
    """A count, as a geometry has them. ValueError for anything else."""
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:40]!r} is no number of a geometry")
    return value
