"""A server that costs next to nothing, to measure the client of `quire bench serve`: it waits until so many completions
are asked for, then sends each of them a token, so many times a second, a chunk each, and says how fast it was.

    python tools/token_sender.py --port 9102 --streams 500 --rate 160 &
    quire bench serve --url http://127.0.0.1:9102 --workload fixed:20:640@500 --rate inf --clients 1
"""

from __future__ import annotations

import argparse
import json
import socket
import time

CHUNK = {
    "id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1700000000,
    "model": "sender", "usage": None,
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
}  # fmt: skip
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"


def event(said: object) -> bytes:
    """A chunk with one event."""
    line = b"data: %s\n\n" % json.dumps(said).encode()
    return b"%x\r\n%s\r\n" % (len(line), line)


def request(connection: socket.socket) -> tuple[str, bytes]:
    """The path and the body of the next request."""
    came = b""
    while b"\r\n\r\n" not in came:
        came += connection.recv(65_536) or b"\r\n\r\n"
    head, _, body = came.partition(b"\r\n\r\n")
    length = int((head.lower().partition(b"content-length:")[2].split() or [b"0"])[0])
    while len(body) < length and (more := connection.recv(65_536)):
        body += more
    return head.split()[1].decode(), body


def send(streams: list[socket.socket], tokens: int, rate: float) -> None:
    """`tokens` rounds of a token to every stream, `rate` a second, then the usage."""
    token, began = event(CHUNK), time.monotonic()
    for i in range(tokens):
        for stream in streams:
            stream.sendall(token)
        time.sleep(max(0.0, began + (i + 1) / rate - time.monotonic()))
    print(f"sent {len(streams) * tokens / (time.monotonic() - began):,.0f} tokens a second", flush=True)
    for stream in streams:
        stream.sendall(
            event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}}) + b"0\r\n\r\n"
        )
        stream.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=9102)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--rate", type=float, default=40.0, help="tokens a second of each stream")
    args = parser.parse_args()
    listener, streams = socket.create_server(("127.0.0.1", args.port), backlog=4096), list[socket.socket]()
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        path, body = request(connection)
        if path == "/v1/completions":
            connection.sendall(HEAD)
            streams.append(connection)
            if len(streams) == args.streams:
                send(streams, json.loads(body)["max_tokens"], args.rate)
                streams = []
            continue
        said = json.dumps({"data": [{"id": "sender"}]}).encode()
        status = b"200 OK" if path == "/v1/models" else b"404 Not Found"
        connection.sendall(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(said), said))
        connection.close()


if __name__ == "__main__":
    main()
