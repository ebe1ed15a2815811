"""Requests that wait to be admitted: a fair share for each client, then for each batch of a client, and first come
first served within a batch. A batch is what came at once, such as the prompts of one HTTP request.

Both levels use start-time fair queueing (Goyal, Vin and Cheng, 1996): the one that was served least is next. A new
client or batch starts at the service of the current one. So no share is saved up, and no request waits for another
client's whole line.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import count

from quire.control.request import Request

SPAN = 1 << 20  # orders between two arrivals: those of requests that overtake lie there


class Share:
    """What a client or a batch was served, in tokens. Of two that were served the same the older one is next."""

    __slots__ = ("age", "served")

    def __init__(self, served: float, age: int) -> None:
        self.served, self.age = served, age

    def __lt__(self, other: Share) -> bool:
        return (self.served, self.age) < (other.served, other.age)


class Batch(Share):
    """Requests that came at once, in order."""

    __slots__ = ("key", "line")

    def __init__(self, key: int, served: float, age: int) -> None:
        super().__init__(served, age)
        self.key, self.line = key, deque[Request]()


class Client(Share):
    """A client's batches that wait; `now` is how far the one is that was served last."""

    __slots__ = ("batches", "heap", "key", "now")

    def __init__(self, key: str, served: float, age: int) -> None:
        super().__init__(served, age)
        self.key, self.now = key, 0.0
        self.batches: dict[int, Batch] = {}
        self.heap: list[Batch] = []


class Queue:
    """Newcomers by their shares, and before them those that were preempted, by their order."""

    def __init__(self) -> None:
        self.returned: list[Request] = []
        self._clients: dict[str, Client] = {}
        self._heap: list[Client] = []
        self._now, self._ages, self._added = 0.0, count(), 0
        self._last: tuple[str, int] | None = None  # the client and the batch of the last newcomer
        self.contended = False  # there were several clients, or a batch of several requests
        self._arrived = deque[Request]()  # newcomers by arrival, and some that wait no more
        self._listed: set[Request] = set()  # those of `_arrived`
        self._there: set[Request] = set()  # newcomers
        self._counts = Counter[tuple[str, int]]()  # requests of each batch
        self._from: dict[Request, tuple[Client, Batch]] = {}  # newcomers that were taken, until they can't be put back
        self._overtaken, self._overtakers = 0, 0  # the order that was overtaken last, and how often

    def __len__(self) -> int:
        return len(self.returned) + len(self._there)

    def __iter__(self) -> Iterator[Request]:
        """Those that were preempted, then newcomers by arrival."""
        yield from self.returned
        yield from (request for request in self._arrived if request in self._there)

    @property
    def batches(self) -> int:
        """The number of batches with a waiting request."""
        return len(self._counts)

    def add(self, request: Request) -> None:
        """A newcomer; it gets its order."""
        self._added += 1
        request.order = self._added * SPAN
        if self._last is not None:
            self.contended |= request.client != self._last[0] or request.batch == self._last[1]
        self._last = request.client, request.batch
        self._arrived.append(request)
        self._listed.add(request)
        self._join(request).line.append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Of the newcomers that were taken since the last call, those that have to wait a little longer: they keep
        their places, and nothing was served."""
        for request in reversed(requests):
            client, batch = self._from[request]
            client.served -= _cost(request)
            batch.served -= _cost(request)
            if self._clients.setdefault(client.key, client) is client and client not in self._heap:
                self._heap.append(client)
            if client.batches.setdefault(batch.key, batch) is batch and batch not in client.heap:
                client.heap.append(batch)
            self._enter(request, batch)
            batch.line.appendleft(request)
            if request not in self._listed:
                self._arrived.appendleft(request)
                self._listed.add(request)
            heapq.heapify(client.heap)
        if requests:
            heapq.heapify(self._heap)
        self._from.clear()

    def give_back(self, request: Request) -> None:
        """One that was admitted and is preempted, or that has no batch: it comes before all newcomers."""
        self._counts[request.client, request.batch] += 1
        insort(self.returned, request, key=_order)

    def newcomer(self) -> Request | None:
        """The newcomer that is next."""
        while self._heap:
            client = self._heap[0]
            while client.heap and not client.heap[0].line:
                del client.batches[heapq.heappop(client.heap).key]
            if client.heap:
                return client.heap[0].line[0]
            del self._clients[heapq.heappop(self._heap).key]
        return None

    def take(self, request: Request) -> None:
        """Take out `request`, the first of `returned` or the `newcomer`. One that overtakes earlier newcomers gets an
        order before theirs."""
        if request not in self._there:
            self.remove(request)
            return
        client = self._clients[request.client]
        batch = client.batches[request.batch]
        self._from[request] = client, batch
        self._now, client.now = client.served, batch.served
        client.served += _cost(request)
        batch.served += _cost(request)
        heapq.heapreplace(client.heap, batch)
        heapq.heapreplace(self._heap, client)
        batch.line.popleft()
        self._leave(request)
        while self._arrived and self._arrived[0] not in self._there:
            self._listed.discard(self._arrived.popleft())
        if self._arrived and (overtaken := self._arrived[0].order) < request.order:
            self._overtakers = self._overtakers + 1 if overtaken == self._overtaken else 1
            self._overtaken = overtaken
            request.order = overtaken - SPAN + min(self._overtakers, SPAN - 1)

    def remove(self, request: Request) -> None:
        """A request that has ended."""
        if request in self._there:
            self._clients[request.client].batches[request.batch].line.remove(request)
            self._leave(request)
        else:
            self.returned.remove(request)
            self._uncount(request)

    def _join(self, request: Request) -> Batch:
        """The batch of a newcomer, which is counted."""
        client = self._clients.get(request.client)
        if client is None:
            client = self._clients[request.client] = Client(request.client, self._now, next(self._ages))
            heapq.heappush(self._heap, client)
        batch = client.batches.get(request.batch)
        if batch is None:
            batch = client.batches[request.batch] = Batch(request.batch, client.now, next(self._ages))
            heapq.heappush(client.heap, batch)
        self._enter(request, batch)
        return batch

    def _enter(self, request: Request, batch: Batch) -> None:
        self._there.add(request)
        self._counts[request.client, batch.key] += 1

    def _leave(self, request: Request) -> None:
        self._there.remove(request)
        self._uncount(request)

    def _uncount(self, request: Request) -> None:
        key = request.client, request.batch
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]


def _order(request: Request) -> int:
    return request.order


def _cost(request: Request) -> int:
    """What a request is served: the tokens of its prompt, and one of each branch, as nobody knows how many come."""
    return request.prompt_len + request.width
