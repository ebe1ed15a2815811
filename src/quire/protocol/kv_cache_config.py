"""How pages hold keys, values and states, layer by layer; and the same as JSON, for plan logs and ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import Enum
from fractions import Fraction
from typing import Any

from quire.config import VISION_CACHES

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


class KVCacheLayout(Enum):
    """Where a memory puts a sequence's tokens: `PAGED`, wherever page tables say, or `CONTIGUOUS`, one after another in
    addresses, so that position p is p strides behind the first one. A kernel that needs the latter is refused over the
    former; one that reads page tables works over both."""

    PAGED = "paged"
    CONTIGUOUS = "contiguous"


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share page tables: how large their pages are, how many tokens fill them, which pages are theirs.

    A page of `page_bytes` holds a run of tokens of all the layers, one layer after another. `run_tokens` tokens fill
    `run_pages` pages: 16 and 1, say, or 256 and 15 where a page is so many bytes that its tokens aren't whole; then a
    token's `token_bytes` may lie in two pages. Page `id` is at byte id * page_bytes of the memory; `ids` may be given
    to this group, or to another one with the same `ids`, and so may `host_ids` in host memory, whose page `id` is at
    byte (id - 1) * page_bytes. `layers` are those that keep keys and values: one that shares another's is in none.
    `table_width` is how many pages a sequence has at most. `kind` says what is kept (see
    quire.memory.policies): "full", "window", "chunked", "budget" (`budget` tokens of a prompt), "uniform" (all,
    where layers have budgets, the least of which is `budget`), "state" (a page is the running state after the latest of
    the tokens of its run, of `token_bytes` however many these are), and two whose runs are of the rows that a
    sequence's pictures are encoded to, each picture in pages of its own: "cross" (keys and values of them) and "vision"
    (the rows themselves; of no layer). Where a sequence's tokens are contiguous in addresses, a page is `parts` equal
    pages of the device, one in each buffer of the group's keys and values.
    """

    layers: tuple[int, ...]
    page_bytes: int
    token_bytes: int
    table_width: int
    ids: range
    host_ids: range = range(0)
    run_tokens: int = 16
    run_pages: int = 1
    window: int | None = None
    kind: str = "full"
    parts: int = 1
    chunk: int | None = None
    budget: int | None = None

    def first_visible(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        if self.chunk is not None:
            return position - position % self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)

    def num_pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens, the last one perhaps in part."""
        return -(-tokens * self.run_pages // self.run_tokens)

    def num_full_pages(self, tokens: int) -> int:
        """Pages that `tokens` tokens fill."""
        return tokens * self.run_pages // self.run_tokens

    def tokens_in_pages(self, pages: int) -> int:
        """Tokens that lie in the first `num_pages` pages, whole ones only."""
        return pages * self.run_tokens // self.run_pages

    @property
    def payload_bytes(self) -> int:
        """Bytes of what fills a page: of one that isn't padded, all."""
        return self.token_bytes if self.kind == "state" else self.run_tokens * self.token_bytes // self.run_pages

    def payload_of_page(self, page: int, tokens: int) -> int:
        """Bytes of the first `tokens` tokens of a sequence that lie in its page `page`."""
        if self.kind == "state":
            return self.token_bytes if self.num_pages(tokens) > page else 0
        return min(max(tokens * self.token_bytes - page * self.payload_bytes, 0), self.payload_bytes)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, where they are whole."""
        assert self.run_pages == 1, f"{self.run_tokens} tokens fill {self.run_pages} pages: a page has no whole tokens"
        return self.run_tokens


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """What the runner must allocate: one buffer of `bytes`, `host_bytes` of host memory where swapped sequences wait,
    and for each group a table of `slots` x `table_width` page ids. Slot 0 and every group's page 0 are scratch: padding
    resolves to them and no sequence owns them.

    With `large_bytes` the groups' pages are parts of large pages of so many bytes (Jenga §4), and all groups have all
    of the memory in common: page `id` of a group is in large page id * page_bytes // large_bytes, and large page 0 is
    scratch. With 0 each size of pages has a run of ids, and a part of the memory, of its own.

    Of a prompt of more than `budget` tokens some layer keeps a part (0: of none), which its last `queries` tokens
    choose: one step computes all of these, and nothing behind them.

    `sight` says where the rows lie that take the places of a picture's tokens ("pages", "inside" or "off": see
    plan.Encode); "" if none do. They have `row_bytes` bytes; `part_tokens`, `part_rows` and `most_rows` say how many
    parts of pictures a step encodes (see `max_parts_per_step`). With `both_ways` one step computes all of a prompt that
    isn't there yet, and what follows it another.
    """

    layout: KVCacheLayout
    bytes: int
    slots: int
    groups: tuple[KVCacheGroup, ...]
    itemsize: int
    host_bytes: int = 0
    large_bytes: int = 0
    budget: int = 0
    queries: int = 0
    sight: str = ""
    row_bytes: int = 0
    part_tokens: int = 0
    part_rows: int = 0
    most_rows: int = 0
    both_ways: bool = False

    @property
    def has_images(self) -> bool:
        """There are pictures among the prompts."""
        return bool(self.sight) or any(group.kind == "cross" and group.layers for group in self.groups)

    @property
    def image_embed_group(self) -> int:
        """The group in whose pages rows lie that take tokens' places, where `sight` is "inside": a page has room for as
        many of them as of tokens."""
        hosts = (g for g, one in enumerate(self.groups) if one.kind == "full" and one.run_pages == 1)
        return next(g for g in hosts if self.groups[g].page_bytes >= self.row_bytes * self.groups[g].run_tokens)

    def clip_chunk(self, prompt_len: int, planned: int, count: int) -> int:
        """How many of a sequence's next `count` tokens one step may compute, behind the `planned` first ones;
        `prompt_len` is the length of its prompt."""
        rest = prompt_len - planned
        if self.both_ways:
            return count if rest <= 0 else rest if count >= rest else 0
        if not 0 < self.budget < prompt_len or rest <= 0:
            return count
        return rest if count >= rest else max(min(count, rest - self.queries), 0)

    def tokens_in_large_pages(self, on_host: bool = False) -> int:
        """Tokens that every group of tokens holds at once in large pages, on the device or on the host."""
        groups = [group for group in self.groups if group.kind not in ("cross", "vision")]
        ratios = [self.large_bytes // group.page_bytes for group in groups]
        count = len(groups[0].host_ids if on_host else groups[0].ids) // ratios[0]
        runs = sum(Fraction(group.run_pages, group.run_tokens * ratio) for group, ratio in zip(groups, ratios))
        tokens = int(count / runs)
        while sum(-(-group.num_pages(tokens) // ratio) for group, ratio in zip(groups, ratios)) > count:
            tokens -= 1
        return tokens
