"""Threads for work of unknown cost, with a bounded number of waiting items. asyncio and threads are imported with the
first item."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from quire.errors import Overloaded

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

T = TypeVar("T")


class BoundedThreads:
    """A pool of `count` threads. At most `max_items` items wait or run; `refusal` is the error for another one, with {}
    for their number."""

    def __init__(self, count: int, name: str, max_items: int, refusal: str) -> None:
        self.count, self.name, self.max_items, self.refusal = count, name, max_items, refusal
        self.items: set[Future[Any]] = set()
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Raise Overloaded if too many items wait. On cancellation, work that has begun
        counts until it ends; work that has not begun is released at once, with its data."""
        import asyncio
        from concurrent.futures import ThreadPoolExecutor

        if len(self.items) >= self.max_items:
            raise Overloaded(f"{self.refusal.format(len(self.items))}; the limit is {self.max_items}")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, thread_name_prefix=self.name)
        todo = [work]  # emptied by the thread, or on cancellation; the pool's queue would keep a reference
        future = self._pool.submit(lambda: todo.pop()())
        self.items.add(future)
        future.add_done_callback(self.items.discard)
        try:
            return await asyncio.wrap_future(future)
        finally:
            todo.clear()
