"""The router: which replica serves a request.

It is pure, as the scheduler is: no I/O, no clock. Its caller tells it what happens (requests, their tokens and ends,
keys of pages that replicas store and drop), so a server and a simulation can run the same code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

POLICIES = ("prefix", "least-loaded", "round-robin")
FIRST_MEAN_OUTPUT = 128.0  # tokens, before any request has ended
MEAN_WEIGHT = 1 / 64  # of the latest request in the mean output
MISSING_WEIGHT = 2.0  # of missing tokens: their pages take the place of others, which must be computed again


class WorkCosts(NamedTuple):
    """Seconds of a replica's work that a token costs: of a prompt, and of an output, with its share of the fixed cost
    of the step that it is in."""

    prompt_token: float
    output_token: float


class RoutedRequest:
    """A request that was sent to a replica, and the work that it has left."""

    __slots__ = ("expected", "keys", "prompt_tokens", "replica", "tokens")

    def __init__(self, replica: int, keys: Sequence[bytes], prompt_tokens: int, expected: float) -> None:
        self.replica, self.keys = replica, keys
        self.prompt_tokens = prompt_tokens  # that the replica has to compute; 0 after the first output
        self.expected = expected  # output tokens, at most
        self.tokens = 0  # of its output so far


class Replica:
    """What is known of a replica: the keys of the pages that it has, those that its requests are computing, and the
    seconds of work that it has left."""

    def __init__(self) -> None:
        self.stored: set[bytes] = set()
        self.computing: Counter[bytes] = Counter()
        self.prompt_tokens = 0
        self.output_tokens = 0.0
        self.is_draining = False

    def seconds_left(self, costs: WorkCosts) -> float:
        """Return the seconds of work of its requests."""
        return self.prompt_tokens * costs.prompt_token + self.output_tokens * costs.output_token

    def count_found(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys, from the first on, it has or is computing."""
        return sum(1 for _ in takewhile(lambda key: key in self.stored or key in self.computing, keys))


class Router:
    """Chooses among `count` replicas, whose keys are of `key_tokens` tokens each.

    With the policy "prefix" a request goes where the work that is left takes the fewest seconds, together with
    MISSING_WEIGHT times the part of its prompt whose keys are missing there. With "least-loaded" only the work that is
    left counts; "round-robin" takes replicas in turn. Of equal ones the one that was chosen longest ago is taken."""

    def __init__(self, count: int, policy: str, costs: WorkCosts, key_tokens: float) -> None:
        assert policy in POLICIES, f"{policy} is no policy"
        self.policy, self.costs, self.key_tokens = policy, costs, key_tokens
        self.replicas = [Replica() for _ in range(count)]
        self.requests: dict[Hashable, RoutedRequest] = {}
        self.mean_output = FIRST_MEAN_OUTPUT
        self.num_chosen = 0
        self.chosen_at = [0] * count  # of each replica: `num_chosen` when it was last chosen

    def missing_tokens(self, replica: int, keys: Sequence[bytes], prompt_len: int) -> int:
        """Return how many tokens of a prompt with these keys a replica neither has nor is computing."""
        return self._missing(self.replicas[replica], keys, prompt_len)

    def choose(self, keys: Sequence[bytes], prompt_len: int, refused: Container[int] = ()) -> int | None:
        """Return the replica for a prompt of `prompt_len` tokens, whose whole pages have these keys. None if all are
        draining or in `refused`."""
        open_replicas = [i for i, replica in enumerate(self.replicas) if not replica.is_draining and i not in refused]
        return min(open_replicas, key=lambda i: (self._seconds(i, keys, prompt_len), self.chosen_at[i]), default=None)

    def _seconds(self, i: int, keys: Sequence[bytes], prompt_len: int) -> float:
        replica = self.replicas[i]
        if self.policy == "round-robin":
            return 0.0
        seconds = replica.seconds_left(self.costs)
        if self.policy == "prefix":
            seconds += MISSING_WEIGHT * self._missing(replica, keys, prompt_len) * self.costs.prompt_token
        return seconds

    def _missing(self, replica: Replica, keys: Sequence[bytes], prompt_len: int) -> int:
        return prompt_len - int(replica.count_found(keys) * self.key_tokens)

    # What happens

    def add(self, name: Hashable, replica: int, keys: Sequence[bytes], prompt_len: int, max_tokens: int) -> None:
        """Record that a request was sent to a replica."""
        at = self.replicas[replica]
        missing = self._missing(at, keys, prompt_len)
        request = RoutedRequest(replica, keys, missing, min(max_tokens, self.mean_output))
        self.requests[name] = request
        at.computing.update(keys)
        at.prompt_tokens += missing
        at.output_tokens += request.expected
        self.num_chosen += 1
        self.chosen_at[replica] = self.num_chosen

    def record_tokens(self, name: Hashable, count: int) -> None:
        """Record new output tokens of a request: its prompt has been computed."""
        request = self.requests[name]
        replica = self.replicas[request.replica]
        self._forget_prompt(request, replica)
        left = max(request.expected - request.tokens, 0.0)
        request.tokens += count
        replica.output_tokens -= left - max(request.expected - request.tokens, 0.0)

    def finish(self, name: Hashable) -> None:
        """Record the end of a request."""
        tokens = self.requests[name].tokens
        self.remove(name)
        self.mean_output += MEAN_WEIGHT * (tokens - self.mean_output)

    def remove(self, name: Hashable) -> None:
        """Record that a replica has refused a request."""
        request = self.requests.pop(name)
        replica = self.replicas[request.replica]
        self._forget_prompt(request, replica)
        replica.output_tokens -= max(request.expected - request.tokens, 0.0)

    def _forget_prompt(self, request: RoutedRequest, replica: Replica) -> None:
        for key in request.keys:
            replica.computing[key] -= 1
            if not replica.computing[key]:
                del replica.computing[key]
        request.keys = ()
        replica.prompt_tokens -= request.prompt_tokens
        request.prompt_tokens = 0

    def update_keys(self, replica: int, stored: Iterable[bytes], dropped: Iterable[bytes]) -> None:
        """Record which pages a replica has dropped, and which it has stored since."""
        keys = self.replicas[replica].stored
        keys.difference_update(dropped)
        keys.update(stored)

    def leave_out(self, replica: int) -> None:
        """Record that a replica has ended, with its pages and its requests. None is sent to it until `take_in`."""
        for name in [name for name, request in self.requests.items() if request.replica == replica]:
            del self.requests[name]
        self.take_in(replica)
        self.replicas[replica].is_draining = True

    def drain(self, replica: int) -> None:
        """Send a replica no more requests. It still has its pages and its requests."""
        self.replicas[replica].is_draining = True

    def add_replica(self) -> None:
        """Add a replica, the last one."""
        self.replicas.append(Replica())
        self.chosen_at.append(0)

    def take_in(self, replica: int) -> None:
        """Record that a replica was started: it has no pages, and no requests."""
        self.replicas[replica] = Replica()
