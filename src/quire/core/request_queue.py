"""The queue of requests to admit: a fair share for each client, then for each batch of a client, and first come first
served within a batch. A batch is a set of requests that came at once, such as the prompts of one HTTP request.

Both levels use start-time fair queueing (Goyal, Vin and Cheng, 1996): the one that was served least is next. A new
client or batch starts at the service of the current one. So no share is saved up, and no request waits for another
client's whole queue.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import count
from operator import attrgetter

from quire.core.request import Request

ORDER_STEP = 1 << 20  # distance of the orders of two arrivals; overtaking requests get orders between


class FairShare:
    """The tokens that a client or a batch was served. With equal service the older one is next."""

    __slots__ = ("age", "served_tokens")

    def __init__(self, served_tokens: float, age: int) -> None:
        self.served_tokens, self.age = served_tokens, age

    def __lt__(self, other: FairShare) -> bool:
        return (self.served_tokens, self.age) < (other.served_tokens, other.age)


class BatchQueue(FairShare):
    """The waiting requests of a batch, in order."""

    __slots__ = ("key", "requests")

    def __init__(self, key: int, served_tokens: float, age: int) -> None:
        super().__init__(served_tokens, age)
        self.key, self.requests = key, deque[Request]()


class ClientQueue(FairShare):
    """The waiting batches of a client. `virtual_time`: the service of its batch that was served last."""

    __slots__ = ("batches", "heap", "key", "virtual_time")

    def __init__(self, key: str, served_tokens: float, age: int) -> None:
        super().__init__(served_tokens, age)
        self.key, self.virtual_time = key, 0.0
        self.batches: dict[int, BatchQueue] = {}
        self.heap: list[BatchQueue] = []


class RequestQueue:
    """New requests in the order of their shares, and before them `preempted` requests by their `order`."""

    def __init__(self) -> None:
        self.preempted: list[Request] = []
        self._clients: dict[str, ClientQueue] = {}
        self._heap: list[ClientQueue] = []
        self._virtual_time, self._ages, self._added = 0.0, count(), 0
        self._last_batch: tuple[str, int] | None = None  # client and batch of the last new request
        self.is_contended = False  # there were several clients, or a batch with several requests
        self._by_arrival = deque[Request]()  # new requests by arrival, and some that wait no more
        self._in_by_arrival: set[Request] = set()  # the requests in `_by_arrival`
        self._waiting_new: set[Request] = set()  # the new requests
        self._counts = Counter[tuple[str, int]]()  # waiting requests of each batch
        # New requests that were popped since the last `put_back`.
        self._taken_from: dict[Request, tuple[ClientQueue, BatchQueue]] = {}
        self._overtaken, self._overtakers = 0, 0  # the last order that was overtaken, and by how many requests

    def __len__(self) -> int:
        return len(self.preempted) + len(self._waiting_new)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the preempted requests, then the new ones by arrival."""
        yield from self.preempted
        yield from (request for request in self._by_arrival if request in self._waiting_new)

    @property
    def num_batches(self) -> int:
        """The number of batches with a waiting request."""
        return len(self._counts)

    def add(self, request: Request) -> None:
        """Queue a new request and set its `order`."""
        self._added += 1
        request.order = self._added * ORDER_STEP
        if self._last_batch is not None:
            self.is_contended |= request.client != self._last_batch[0] or request.batch_id == self._last_batch[1]
        self._last_batch = request.client, request.batch_id
        self._by_arrival.append(request)
        self._in_by_arrival.add(request)
        self._batch_of(request).requests.append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Put back new requests that were popped since the last call: they keep their places and were not served. The
        other popped requests can't be put back any more."""
        for request in reversed(requests):
            client, batch = self._taken_from[request]
            client.served_tokens -= _cost(request)
            batch.served_tokens -= _cost(request)
            if self._clients.setdefault(client.key, client) is client and client not in self._heap:
                self._heap.append(client)
            if client.batches.setdefault(batch.key, batch) is batch and batch not in client.heap:
                client.heap.append(batch)
            self._count_in(request, batch)
            batch.requests.appendleft(request)
            if request not in self._in_by_arrival:
                self._by_arrival.appendleft(request)
                self._in_by_arrival.add(request)
            heapq.heapify(client.heap)
        if requests:
            heapq.heapify(self._heap)
        self._taken_from.clear()

    def requeue(self, request: Request) -> None:
        """Queue a request before all new ones: one that was preempted, or that has no batch."""
        self._counts[request.client, request.batch_id] += 1
        insort(self.preempted, request, key=attrgetter("order"))

    def peek_new(self) -> Request | None:
        """Return the next new request, or None."""
        while self._heap:
            client = self._heap[0]
            while client.heap and not client.heap[0].requests:
                del client.batches[heapq.heappop(client.heap).key]
            if client.heap:
                return client.heap[0].requests[0]
            del self._clients[heapq.heappop(self._heap).key]
        return None

    def pop(self, request: Request) -> None:
        """Remove `request`, which is the first of `preempted` or `peek_new()`, and count its service. A new request
        that overtakes earlier ones gets an order before theirs."""
        if request not in self._waiting_new:
            self.remove(request)
            return
        client = self._clients[request.client]
        batch = client.batches[request.batch_id]
        self._taken_from[request] = client, batch
        self._virtual_time, client.virtual_time = client.served_tokens, batch.served_tokens
        client.served_tokens += _cost(request)
        batch.served_tokens += _cost(request)
        heapq.heapreplace(client.heap, batch)
        heapq.heapreplace(self._heap, client)
        batch.requests.popleft()
        self._count_out(request)
        while self._by_arrival and self._by_arrival[0] not in self._waiting_new:
            self._in_by_arrival.discard(self._by_arrival.popleft())
        if self._by_arrival and (overtaken := self._by_arrival[0].order) < request.order:
            self._overtakers = self._overtakers + 1 if overtaken == self._overtaken else 1
            self._overtaken = overtaken
            request.order = overtaken - ORDER_STEP + min(self._overtakers, ORDER_STEP - 1)

    def remove(self, request: Request) -> None:
        """Remove a request that has ended."""
        if request in self._waiting_new:
            self._clients[request.client].batches[request.batch_id].requests.remove(request)
            self._count_out(request)
        else:
            self.preempted.remove(request)
            self._uncount(request)

    def _batch_of(self, request: Request) -> BatchQueue:
        """Count a new request. Return its batch, which is created if needed."""
        client = self._clients.get(request.client)
        if client is None:
            client = self._clients[request.client] = ClientQueue(request.client, self._virtual_time, next(self._ages))
            heapq.heappush(self._heap, client)
        batch = client.batches.get(request.batch_id)
        if batch is None:
            batch = client.batches[request.batch_id] = BatchQueue(
                request.batch_id, client.virtual_time, next(self._ages)
            )
            heapq.heappush(client.heap, batch)
        self._count_in(request, batch)
        return batch

    def _count_in(self, request: Request, batch: BatchQueue) -> None:
        self._waiting_new.add(request)
        self._counts[request.client, batch.key] += 1

    def _count_out(self, request: Request) -> None:
        self._waiting_new.remove(request)
        self._uncount(request)

    def _uncount(self, request: Request) -> None:
        key = request.client, request.batch_id
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]


def _cost(request: Request) -> int:
    """Return the service of a request in tokens: its prompt, and one for each branch, as output lengths are unknown."""
    return request.prompt_len + request.max_slots
