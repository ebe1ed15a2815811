"""Random delays wherever threads and processes meet, so that races show: with this folder on PYTHONPATH Python imports
it at its start, in child processes too, and QUIRE_DELAYS sets a scale. `make delays` runs the tests that have any.

At scale 1 a call of a socket waits up to 50 ms in 3 of 100 cases, the start of a thread in every second, a set Event in
one of 10, a callback of asyncio's loop in one of 500."""

import os

SCALE = float(os.environ.get("QUIRE_DELAYS", "0"))

if SCALE:
    import asyncio.events
    import concurrent.futures
    import functools
    import random
    import socket
    import threading
    import time
    from typing import Any

    rng, sleep = random.Random(os.urandom(8)), time.sleep

    def delayed(owner: Any, name: str, share: float, most: float) -> None:
        """Of its calls so many wait before they begin, for up to `most` seconds."""
        call = getattr(owner, name)

        @functools.wraps(call)
        def later(*args: Any, **kwargs: Any) -> Any:
            if rng.random() < share:
                sleep(rng.random() * most * SCALE)
            return call(*args, **kwargs)

        setattr(owner, name, later)

    for method in ("send", "sendall", "sendmsg", "recv", "recv_into", "recvmsg", "connect", "close"):
        delayed(socket.socket, method, 0.03, 0.05)
    delayed(threading.Thread, "run", 0.5, 0.05)
    delayed(threading.Event, "set", 0.1, 0.05)
    delayed(threading.Condition, "notify", 0.02, 0.02)
    delayed(concurrent.futures.ThreadPoolExecutor, "submit", 0.2, 0.05)
    delayed(asyncio.events.Handle, "_run", 0.002, 0.05)
    delayed(time, "sleep", 0.05, 0.03)
