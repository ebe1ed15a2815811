"""The layout of the KV cache: which pages hold the keys, values and states of which layers. And its JSON form, for plan
logs and ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from enum import Enum
from fractions import Fraction
from typing import Any

VISION_CACHES = ("pages", "inside", "off")
MAX_TABLE_ENTRIES = 2**27  # of all page tables of a log; also the most tokens of its host memory


def kv_cache_config_to_json(kv_config: KVCacheConfig) -> dict[str, Any]:
    """Return a config as JSON values; a range becomes [start, stop]."""
    data = asdict(kv_config)
    data["layout"] = kv_config.layout.value
    for group in data["groups"]:
        for name, value in group.items():
            if isinstance(value, range):
                group[name] = [value.start, value.stop]
    return data


def kv_cache_config_from_json(data: dict[str, Any]) -> KVCacheConfig:
    """Return the config of JSON values. Raise ValueError, KeyError or TypeError if they are invalid."""
    data = {"whole_images": False, **data}  # logs of earlier revisions don't have it
    values = {field.name: data[field.name] for field in fields(KVCacheConfig)}
    groups = tuple(_group_from_json(group) for group in values.pop("groups"))
    layout, sight = KVCacheLayout(values.pop("layout")), values.pop("sight")
    both_ways, whole_images = values.pop("both_ways"), values.pop("whole_images")
    if sight not in ("", *VISION_CACHES) or type(both_ways) is not bool or type(whole_images) is not bool:
        flags = str(both_ways)[:40], str(whole_images)[:40]
        raise ValueError(f"it sees {str(sight)[:40]!r}, both ways {flags[0]!r}, images whole {flags[1]!r}")
    numbers = {name: parse_count(value) for name, value in values.items()}
    kv_config = KVCacheConfig(
        layout=layout, groups=groups, sight=sight, both_ways=both_ways, whole_images=whole_images, **numbers
    )
    if not groups or set(data) != {field.name for field in fields(KVCacheConfig)}:
        raise ValueError("it has no groups, or what is unknown here")
    if kv_config.large_bytes and any(kv_config.large_bytes % group.page_bytes for group in groups):
        raise ValueError("its pages aren't parts of its large pages")
    return kv_config


def check_replay_size(kv_config: KVCacheConfig) -> None:
    """Raise ValueError if a plan log, which may be forged, would need too large tables to be replayed."""
    if sum(kv_config.slots * group.table_width for group in kv_config.groups) > MAX_TABLE_ENTRIES:
        raise ValueError(f"its page tables have more than {MAX_TABLE_ENTRIES} cells")
    if any(group.host_ids.stop * group.run_tokens > MAX_TABLE_ENTRIES for group in kv_config.groups):
        raise ValueError(f"its host memory holds more than {MAX_TABLE_ENTRIES} tokens")


def _group_from_json(data: dict[str, Any]) -> KVCacheGroup:
    values = {"is_draft": False, "reads_hidden_states": False, **data}  # logs of earlier revisions have no draft model
    if set(values) != {field.name for field in fields(KVCacheGroup)}:
        raise ValueError("a group has other fields than it has here")
    for name in ("ids", "host_ids"):
        start, stop = map(parse_count, values[name])
        values[name] = range(start, stop)
    values["layers"] = tuple(map(parse_count, values["layers"]))
    flags = values["is_draft"], values["reads_hidden_states"]
    if not isinstance(values["kind"], str) or not all(isinstance(flag, bool) for flag in flags):
        raise TypeError("a group's kind is no string, or is_draft or reads_hidden_states no bool")
    lengths = ("window", "chunk", "budget")
    for name in ("page_bytes", "token_bytes", "table_width", "run_tokens", "run_pages", *lengths):
        if (name not in lengths or values[name] is not None) and not parse_count(values[name]):
            raise ValueError(f"a group's {name} is 0")
    return KVCacheGroup(**values)


def parse_count(value: Any) -> int:
    """Return a JSON value that is a count. Raise ValueError otherwise."""
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{str(value)[:40]!r} is no number of a geometry")
    return value


class KVCacheLayout(Enum):
    """Where a memory puts a sequence's tokens: `PAGED`, in the pages of page tables, or `CONTIGUOUS`, in consecutive
    addresses, so that position p is p strides after the first. A kernel that needs contiguous tokens is rejected for
    PAGED; one that reads page tables works with both."""

    PAGED = "paged"
    CONTIGUOUS = "contiguous"


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share page tables: the size of their pages, the tokens of a page, and the page ids.

    A page of `page_bytes` holds a run of tokens of all layers, one layer after another. `run_tokens` tokens fill
    `run_pages` pages: 16 and 1, for example, or 256 and 15 if the page size is not a multiple of a token's size; then a
    token's `token_bytes` may be split over two pages. Page `id` is at byte id * page_bytes of the memory. The pages
    `ids` may be allocated to this group or to another one with the same `ids`. So may the pages `host_ids` of host
    memory, where page `id` is at byte (id - 1) * page_bytes. `layers` are those that keep keys and values; a layer that
    reads another layer's is in no group. `table_width` is the most pages of a sequence.

    `kind` says what is kept (see quire.memory.policies): "full", "window", "chunked", "budget" (`budget` tokens of a
    prompt), "uniform" (everything, although layers have budgets, the least of which is `budget`), or "state" (a page is
    the running state after the last token of its run, of `token_bytes` in all). The runs of two kinds are of image
    embeddings, each image in pages of its own: "cross" (their keys and values) and "vision" (the embeddings themselves;
    of no layer). With contiguous tokens a page consists of `parts` equal pages of the device, one in each buffer of the
    group's keys and values. With `is_draft` the layers are those of a draft model, which only sequences that it drafts
    for have. With `reads_hidden_states`, too, they are those of a speculation head: it cannot compute a prefix later,
    so such a sequence reuses only what is cached of both.
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
    is_draft: bool = False
    reads_hidden_states: bool = False

    def first_visible(self, position: int) -> int:
        """Return the first position that the token at `position` attends to."""
        if self.chunk is not None:
            return position - position % self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)

    def num_pages(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens need."""
        return -(-tokens * self.run_pages // self.run_tokens)

    def num_full_pages(self, tokens: int) -> int:
        """Return how many pages `tokens` tokens fill completely."""
        return tokens * self.run_pages // self.run_tokens

    def tokens_in_pages(self, pages: int) -> int:
        """Return how many whole tokens the first `pages` pages hold."""
        return pages * self.run_tokens // self.run_pages

    @property
    def payload_bytes(self) -> int:
        """The bytes of a page without padding."""
        return self.token_bytes if self.kind == "state" else self.run_tokens * self.token_bytes // self.run_pages

    def payload_of_page(self, page: int, tokens: int) -> int:
        """Return the bytes that the first `tokens` tokens of a sequence use in its page `page`."""
        if self.kind == "state":
            return self.token_bytes if self.num_pages(tokens) > page else 0
        return min(max(tokens * self.token_bytes - page * self.payload_bytes, 0), self.payload_bytes)

    @property
    def page_tokens(self) -> int:
        """The tokens of a page, if no token is split over pages."""
        assert self.run_pages == 1, f"{self.run_tokens} tokens fill {self.run_pages} pages: a page has no whole tokens"
        return self.run_tokens


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """What the runner allocates: one buffer of `bytes`, `host_bytes` of host memory for swapped sequences, and for each
    group a table of `slots` x `table_width` page ids. Slot 0 and page 0 of every group are scratch: padding uses them
    and no sequence has them.

    With `large_bytes` the groups' pages are parts of large pages of that size (Jenga §4), and all groups share the
    whole memory: page `id` of a group is in large page id * page_bytes // large_bytes, and large page 0 is scratch.
    With 0 each page size has its own range of ids and part of the memory.

    Some layers keep only a part of a prompt of more than `budget` tokens (0: no layer does). The last `queries` tokens
    of the prompt choose that part: one step computes all of them, and no token after them.

    `sight` says where the embeddings are stored that replace image tokens ("pages", "inside" or "off": see
    step_plan.ImageEncoding); "" if no embeddings do. An embedding has `row_bytes` bytes. `part_tokens`, `part_rows` and
    `most_rows` limit the image parts that a step encodes (see `max_parts_per_step`). With `both_ways` one step computes
    all tokens of a prompt that are not computed yet, and no token after them; with `whole_images` one step computes all
    tokens of an image that are not.
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
    whole_images: bool = False

    @property
    def has_images(self) -> bool:
        """True if prompts may have images."""
        return bool(self.sight) or any(group.kind == "cross" and group.layers for group in self.groups)

    @property
    def image_embed_group(self) -> int:
        """With `sight` "inside": the group in whose pages image embeddings are stored. Its pages have room for as many
        embeddings as tokens."""
        candidates = (
            g
            for g, group in enumerate(self.groups)
            if group.kind == "full" and group.run_pages == 1 and not group.is_draft
        )
        return next(g for g in candidates if self.groups[g].page_bytes >= self.row_bytes * self.groups[g].run_tokens)

    def clip_chunk(self, prompt_len: int, planned: int, count: int) -> int:
        """Return how many of a sequence's next `count` tokens, after the first `planned` ones, one step may compute.
        `prompt_len` is the length of its prompt."""
        rest = prompt_len - planned
        if self.both_ways:
            return count if rest <= 0 else rest if count >= rest else 0
        if not 0 < self.budget < prompt_len or rest <= 0:
            return count
        return rest if count >= rest else max(min(count, rest - self.queries), 0)

    def tokens_in_large_pages(self, on_host: bool = False) -> int:
        """Return how many tokens fit into the large pages, in all groups of tokens at once."""
        groups = [group for group in self.groups if group.kind not in ("cross", "vision")]
        ratios = [self.large_bytes // group.page_bytes for group in groups]
        count = len(groups[0].host_ids if on_host else groups[0].ids) // ratios[0]
        runs = sum(Fraction(group.run_pages, group.run_tokens * ratio) for group, ratio in zip(groups, ratios))
        tokens = int(count / runs)
        while sum(-(-group.num_pages(tokens) // ratio) for group, ratio in zip(groups, ratios)) > count:
            tokens -= 1
        return tokens
