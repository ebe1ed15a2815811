"""Attention through plain torch over keys and values that are contiguous in addresses (vAttention §5.2): a sequence's
are a view, nothing is gathered. It reads nothing behind a sequence's end, where there may be no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.data.kernels.batch import Batch, LayerCache, to_device
from quire.data.kernels.limits import MAX_SCORES, TILE
from quire.data.kernels.reference import write_pages
from quire.vocabulary.specs import Layout


@dataclass(slots=True)
class Span:
    """Queries that see keys [first, end): [queries, queries + count) of the step in `slot`; or one each of `rows`
    sequences of one length in as many slots from that one on, and `queries` is the first one's place in their order.
    `seen` [group * count, end - first] is true where one may look, for each of the query heads that share a key head
    (None: everywhere)."""

    slot: int
    queries: int
    count: int
    first: int
    end: int
    seen: Tensor | None
    rows: int = 1


@dataclass(slots=True)
class Spans:
    """A step's spans, and where its tokens' keys and values go: slots and positions [T]. `alone` are those of rows of
    one query, in the `order` [R] of their slots (None: the step has no others, and they are in order)."""

    spans: list[Span]
    alone: list[Span]
    order: Tensor | None
    slots: Tensor
    positions: Tensor


class ContiguousBackend:
    """See the head of the file."""

    needs = Layout.CONTIGUOUS
    views = True
    rotates = False

    def check(self, cache: LayerCache) -> None:
        """StartupError for a cache that it can't read: there is none."""

    def plan(self, batch: Batch, cache: LayerCache, asked: Batch | None = None) -> Spans:
        """Once a step and kind of layers, on the host: keys and values of `batch`, queries of `asked` if given."""
        of, batch = (asked or batch).inside(cache), batch.inside(cache)
        rows = list(zip(of.slots.tolist(), of.offsets.tolist(), of.starts.tolist(), of.lengths.tolist()))
        both_ways = [row for row, whole in zip(rows, of.both_ways) if whole]
        rows = [row for row, whole in zip(rows, of.both_ways) if not whole]
        singles = sorted(row for row in rows if row[3] == 1)
        spans = [span for row in rows if row[3] > 1 for span in _spans(*row, cache)]
        spans += [span for row in both_ways for span in _whole(*row, cache)]
        places = [offset for _, offset, _, _ in singles]
        order = None
        if spans or places != list(range(len(places))):
            order = to_device(np.array(places, dtype=np.int64), batch.device)
        return Spans(spans, _alone(singles, cache), order, batch.token_slots, batch.positions)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: LayerCache, plan: Spans) -> Tensor:
        """Write k and v [T, kv_heads, dim] to their places, then attend: q [Q, heads, dim] -> [Q, heads, dim]."""
        if cache.writes:
            write_pages(cache.keys, cache.values, k, v, plan.slots, plan.positions)
        count, heads, dim = q.shape
        kv, shared = cache.kv_heads, heads // cache.kv_heads
        # A key head serves its group of query heads as one operand.
        queries, out = q.view(count, kv, shared, dim), torch.empty_like(q)
        found = out.view(count, kv, shared, dim)
        for span in plan.spans:
            part = slice(span.queries, span.queries + span.count)
            query = queries[part].permute(1, 2, 0, 3).reshape(1, kv, shared * span.count, dim)
            answers = _attend(query, span, cache)
            found[part] = answers.view(kv, shared, span.count, dim).permute(2, 0, 1, 3)
        if plan.alone:
            ordered = queries if plan.order is None else queries.index_select(0, plan.order)
            answers = found if plan.order is None else torch.empty_like(ordered)
            for span in plan.alone:
                part = slice(span.queries, span.queries + span.rows)
                answers[part] = _attend(ordered[part], span, cache)
            if plan.order is not None:
                found.index_copy_(0, plan.order, answers)
        return out


def _seen(x: Tensor, span: Span) -> Tensor:
    """The span's keys or values [rows, kv_heads, K, dim], of all slots' [slots, kv_heads, tokens, dim]."""
    slot, head, token, one = x.stride()
    shape = span.rows, x.shape[1], span.end - span.first, x.shape[3]
    return x.as_strided(shape, (slot, head, token, one), x.storage_offset() + span.slot * slot + span.first * token)


def _most(end: int, cache: LayerCache) -> int:
    """Queries at once of a context that ends here, so that their scores stay within MAX_SCORES: a power of two."""
    return 1 << min(max(MAX_SCORES // (cache.heads * end), 1), TILE).bit_length() - 1


def _spans(slot: int, offset: int, start: int, length: int, cache: LayerCache) -> Iterator[Span]:
    """A row of several queries."""
    most = _most(start + length, cache)
    for cut in range(0, length, most):
        count, position = min(most, length - cut), start + cut
        end, first = position + count, _first(position, cache)
        keys = torch.arange(first, end, device=cache.device)
        at = torch.arange(position, end, device=cache.device)[:, None]
        seen = keys <= at
        if cache.bounded:
            seen &= keys >= cache.oldest(at)
        yield Span(slot, offset + cut, count, first, end, seen.repeat(cache.heads // cache.kv_heads, 1))


def _whole(slot: int, offset: int, start: int, length: int, cache: LayerCache) -> Iterator[Span]:
    """A row of queries that see all of it, and all before it."""
    end = start + length
    most = _most(end, cache)
    for cut in range(0, length, most):
        yield Span(slot, offset + cut, min(most, length - cut), 0, end, None)


def _alone(singles: list[tuple[int, int, int, int]], cache: LayerCache) -> list[Span]:
    """Rows of one query, by their slots. Those of one length in slots that follow one another are one view."""
    spans: list[Span] = []
    for i, (slot, _, position, _) in enumerate(singles):
        last = spans[-1] if spans else None
        if last is not None and slot == last.slot + last.rows and position + 1 == last.end:
            last.rows += 1
        else:
            spans.append(Span(slot, i, 1, _first(position, cache), position + 1, None))
    return spans


def _first(position: int, cache: LayerCache) -> int:
    """The first key that a query at this position sees."""
    return max(cache.oldest(position), 0) if cache.bounded else 0


def _attend(query: Tensor, span: Span, cache: LayerCache) -> Tensor:
    """query [rows, kv_heads, Q, dim] -> [rows, kv_heads, Q, dim], over what the span sees: by torch's fused kernel,
    which takes strides as they are and knows no caps."""
    keys, values = _seen(cache.keys, span), _seen(cache.values, span)
    if cache.softcap is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=span.seen, scale=cache.scale)
    scores = (query * cache.scale) @ keys.transpose(2, 3)
    scores.div_(cache.softcap).tanh_().mul_(cache.softcap)
    if span.seen is not None:
        scores.masked_fill_(~span.seen, -torch.inf)
    return torch.softmax(scores, -1) @ values
