"""Who is next among those that wait: shares of clients and of batches, whatever comes and ends in between."""

from __future__ import annotations

import random
from collections import Counter

from quire.core.request import Request
from quire.core.request_queue import RequestQueue
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence

PARAMS = SamplingParams(max_tokens=4)


def request(client: str, batch: int, tokens: int = 9) -> Request:
    made = Request(f"{client}{batch}", Sequence(0, [1] * tokens), PARAMS, arrival_time=0.0, max_tokens=4)
    made.client, made.batch_id = client, batch
    return made


def filled(*batches: tuple[str, int, int]) -> RequestQueue:
    """A queue of (client, batch, requests), each of 10 tokens."""
    queue = RequestQueue()
    for client, batch, count in batches:
        for _ in range(count):
            queue.add(request(client, batch))
    return queue


def first(queue: RequestQueue) -> Request | None:
    return queue.preempted[0] if queue.preempted else queue.peek_new()


def taken(queue: RequestQueue, count: int) -> list[Request]:
    found = []
    for _ in range(count):
        found.append(first(queue))
        queue.pop(found[-1])
    return found


def names(requests: list[Request]) -> str:
    return " ".join(one.id for one in requests)


def test_one_batch_is_first_come_first_served() -> None:
    queue = filled(("a", 1, 5))
    there = list(queue)
    assert taken(queue, 5) == there
    assert (len(queue), queue.num_batches, first(queue)) == (0, 0, None)


def test_clients_share_and_batches_share_a_client_s_part() -> None:
    queue = filled(("a", 1, 8), ("a", 2, 8), ("b", 3, 4))
    assert names(taken(queue, 12)) == "a1 b3 a2 b3 a1 b3 a2 b3 a1 a2 a1 a2"


def test_who_comes_later_waits_for_nobody_s_line() -> None:
    queue = filled(("", 1, 100))
    taken(queue, 30)
    queue.add(request("", 2))
    queue.add(request("", 3))
    assert names(taken(queue, 4)) == "2 3 1 1"


def test_who_overtakes_comes_before_those_that_were_there() -> None:
    queue = filled(("", 1, 6))
    first = taken(queue, 2)
    queue.add(request("", 2))
    later = taken(queue, 5)
    orders = [one.order for one in (*first, *later)]
    assert orders == sorted(orders)
    assert len(set(orders)) == 7


def test_long_prompts_cost_more() -> None:
    queue = filled(("a", 1, 3))
    for _ in range(30):
        queue.add(request("b", 2, tokens=1))
    served = Counter(one.client for one in taken(queue, 12))
    assert served == {"a": 2, "b": 10}


def test_who_was_preempted_is_first_and_who_was_put_back_keeps_its_place() -> None:
    queue = filled(("a", 1, 4), ("b", 2, 2))
    first, second, third = taken(queue, 3)
    queue.put_back([second, third])
    queue.requeue(first)
    assert (len(queue), queue.num_batches) == (6, 2)
    assert taken(queue, 3) == [first, second, third]


def test_any_calls_leave_nobody_behind() -> None:
    """Beside a plain list."""
    for seed in range(60):
        chance = random.Random(seed)
        queue, there, away = RequestQueue(), list[Request](), list[Request]()
        for step in range(200):
            action = chance.random()
            if action < 0.45 or not there:
                there.append(request(chance.choice("abc"), chance.randrange(6), chance.randrange(1, 20)))
                queue.add(there[-1])
            elif action < 0.75:
                one = first(queue)
                assert one in there, step
                new = one is queue.peek_new()
                queue.pop(one)
                if new and chance.random() < 0.3:
                    queue.peek_new()
                    queue.put_back([one])
                    continue
                there.remove(one)
                away.append(one)
            elif action < 0.85:
                one = chance.choice(there)
                queue.remove(one)
                there.remove(one)
            elif away:
                one = away.pop()
                queue.requeue(one)
                there.append(one)
            assert (len(queue), set(queue)) == (len(there), set(there))
            assert queue.num_batches == len({(one.client, one.batch_id) for one in there})
            assert (first(queue) is None) == (not there)


def test_shares_are_equal_whoever_is_put_back() -> None:
    """Of two clients with requests in line none is served two requests more, however large these are."""
    for seed in range(40):
        chance = random.Random(seed)
        queue, served = RequestQueue(), Counter[str]()
        for _ in range(200):
            queue.add(request(chance.choice("ab"), chance.randrange(4), chance.randrange(1, 20)))
        for _ in range(80):
            one = queue.peek_new()
            queue.pop(one)
            if chance.random() < 0.5:
                queue.peek_new()
                queue.put_back([one])
            else:
                served[one.client] += one.prompt_len + one.max_slots
        assert abs(served["a"] - served["b"]) <= 2 * 20
