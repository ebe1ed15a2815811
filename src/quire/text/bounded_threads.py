"""Threads for work of unknown cost, with a bounded number of waiting items. asyncio and threads are imported with the
first item."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, TypeVar

from quire.errors import Overloaded

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

T = TypeVar("T")
BASE_COST = 1000  # added to the cost of each item


class BoundedThreads:
    """A pool of `count` threads. At most `max_items` items wait or run; `refusal` is the error for another one, with
    {} for their number.

    The order is a fair queue. The turn of a new item is the turn of the last item that began, plus the new item's cost
    times the number of waiting items of its client, itself included; the item of the least turn begins next. So cheap
    items overtake costly ones, many items of one client do not hold up another's, and no item waits forever."""

    def __init__(self, count: int, name: str, max_items: int, refusal: str) -> None:
        self.count, self.name, self.max_items, self.refusal = count, name, max_items, refusal
        self.items: set[Future[Any]] = set()
        self._lock, self._numbers, self._turn = threading.Lock(), itertools.count(), 0
        self._waiting: list[tuple[int, int, str, list[Callable[[], Any]], Future[Any]]] = []  # a heap, by turn
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], T], cost: int = 0, client: str = "") -> T:
        """Return the result of `work`. Raise Overloaded if too many items wait. On cancellation, work that has begun
        counts until it ends; work that has not begun is released at once, with its data."""
        import asyncio
        from concurrent.futures import Future, ThreadPoolExecutor

        if len(self.items) >= self.max_items:
            raise Overloaded(f"{self.refusal.format(len(self.items))}; the limit is {self.max_items}")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.count, thread_name_prefix=self.name)
        todo = [work]  # emptied by the thread, or on cancellation; the heap would keep a reference
        future: Future[T] = Future()
        self.items.add(future)
        future.add_done_callback(self.items.discard)
        with self._lock:
            num_waiting = 1 + sum(other == client for _, _, other, _, _ in self._waiting)
            turn = self._turn + (BASE_COST + cost) * num_waiting
            heappush(self._waiting, (turn, next(self._numbers), client, todo, future))
        self._pool.submit(self._run_first)
        try:
            return await asyncio.wrap_future(future)
        finally:
            todo.clear()

    def _run_first(self) -> None:
        """Run the item of the least turn. Called once for each item."""
        with self._lock:
            self._turn, _, _, todo, future = heappop(self._waiting)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(todo.pop()())
        except BaseException as error:  # raised where the result is awaited
            future.set_exception(error)
        finally:
            del future  # an error's traceback refers to this frame: else there is a cycle
