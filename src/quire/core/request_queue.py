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

from quire.core.request import Request

ORDER_STEP = 1 << 20  # orders between two arrivals: those of requests that overtake lie there


class FairShare:
    """What a client or a batch was served, in tokens. Of two that were served the same the older one is next."""

    __slots__ = ("age", "served_tokens")

    def __init__(self, served_tokens: float, age: int) -> None:
        self.served_tokens, self.age = served_tokens, age

    def __lt__(self, other: FairShare) -> bool:
        return (self.served_tokens, self.age) < (other.served_tokens, other.age)


class BatchQueue(FairShare):
    """Requests that came at once, in order."""

    __slots__ = ("key", "requests")

    def __init__(self, key: int, served_tokens: float, age: int) -> None:
        super().__init__(served_tokens, age)
        self.key, self.requests = key, deque[Request]()


class ClientQueue(FairShare):
    """A client's batches that wait; `virtual_time` is how far the one is that was served last."""

    __slots__ = ("batches", "heap", "key", "virtual_time")

    def __init__(self, key: str, served_tokens: float, age: int) -> None:
        super().__init__(served_tokens, age)
        self.key, self.virtual_time = key, 0.0
        self.batches: dict[int, BatchQueue] = {}
        self.heap: list[BatchQueue] = []


class RequestQueue:
    """Newcomers by their shares, and before them those that were preempted, by their order."""

    def __init__(self) -> None:
        self.preempted: list[Request] = []
        self._clients: dict[str, ClientQueue] = {}
        self._heap: list[ClientQueue] = []
        self._virtual_time, self._ages, self._added = 0.0, count(), 0
        self._last_batch: tuple[str, int] | None = None  # the client and the batch of the last newcomer
        self.is_contended = False  # there were several clients, or a batch of several requests
        self._by_arrival = deque[Request]()  # newcomers by arrival, and some that wait no more
        self._in_by_arrival: set[Request] = set()  # those of `_arrived`
        self._waiting_new: set[Request] = set()  # newcomers
        self._counts = Counter[tuple[str, int]]()  # requests of each batch
        self._taken_from: dict[
            Request, tuple[ClientQueue, BatchQueue]
        ] = {}  # newcomers that were taken, until they can't be put back
        self._overtaken, self._overtakers = 0, 0  # the order that was overtaken last, and how often

    def __len__(self) -> int:
        return len(self.preempted) + len(self._waiting_new)

    def __iter__(self) -> Iterator[Request]:
        """Those that were preempted, then newcomers by arrival."""
        yield from self.preempted
        yield from (request for request in self._by_arrival if request in self._waiting_new)

    @property
    def num_batches(self) -> int:
        """The number of batches with a waiting request."""
        return len(self._counts)

    def add(self, request: Request) -> None:
        """A newcomer; it gets its order."""
        self._added += 1
        request.order = self._added * ORDER_STEP
        if self._last_batch is not None:
            self.is_contended |= request.client != self._last_batch[0] or request.batch_id == self._last_batch[1]
        self._last_batch = request.client, request.batch_id
        self._by_arrival.append(request)
        self._in_by_arrival.add(request)
        self._batch_of(request).requests.append(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Of the newcomers that were taken since the last call, those that have to wait a little longer: they keep
        their places, and nothing was served."""
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
        """One that was admitted and is preempted, or that has no batch: it comes before all newcomers."""
        self._counts[request.client, request.batch_id] += 1
        insort(self.preempted, request, key=_order)

    def peek_new(self) -> Request | None:
        """The newcomer that is next."""
        while self._heap:
            client = self._heap[0]
            while client.heap and not client.heap[0].requests:
                del client.batches[heapq.heappop(client.heap).key]
            if client.heap:
                return client.heap[0].requests[0]
            del self._clients[heapq.heappop(self._heap).key]
        return None

    def pop(self, request: Request) -> None:
        """Take out `request`, the first of `preempted` or the `peek_new`. One that overtakes earlier newcomers gets an
        order before theirs."""
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
        """A request that has ended."""
        if request in self._waiting_new:
            self._clients[request.client].batches[request.batch_id].requests.remove(request)
            self._count_out(request)
        else:
            self.preempted.remove(request)
            self._uncount(request)

    def _batch_of(self, request: Request) -> BatchQueue:
        """The batch of a newcomer, which is counted."""
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


def _order(request: Request) -> int:
    return request.order


def _cost(request: Request) -> int:
    """What a request is served: the tokens of its prompt, and one of each branch, as nobody knows how many come."""
    return request.prompt_len + request.max_slots
