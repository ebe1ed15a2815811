"""Frames between processes of several hosts, over TLS 1.3: an engine's and the agents of other nodes, or two replicas.
The one that listens makes a certificate for each start, which the others trust alone, and a token, which they show. Ray
brings both to them."""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from math import inf
from typing import Any

from quire.errors import StartupError
from quire.ipc.channel import READ_SIZE
from quire.ipc.frames import Frame, FrameCodec, read_field, read_json, read_uint32
from quire.protocol.columns import MAX_FRAME_BYTES, WireError

LINK_SECONDS = 15  # without an acknowledgement from the other host, a connection is lost
GREETING_SECONDS = 10.0  # for the handshake and the first frame of a connection
MAX_GREETING_BYTES = 1 << 14  # of the first frame, before the token was checked
MAX_GREETINGS = 16  # connections that may be in their handshake at the same time, besides the agents'
MAX_RECEIVED_BYTES = 1 << 22  # of one `receive`, so that a reader also does other things while much arrives
CERTIFICATE_DAYS = 2  # for agents, which connect within minutes; hosts' clocks may differ
POLL_SECONDS = 0.05


class ChannelLost(OSError):
    """The connection has ended."""


class SecureChannel:
    """One end of a connection, some of whose frames `incoming` may have decoded already. Only one thread may use it;
    only `send` blocks."""

    def __init__(self, connection: ssl.SSLSocket, kinds: range, incoming: FrameCodec | None = None) -> None:
        connection.setblocking(False)
        set_link_timeout(connection)
        self.connection, self._incoming, self._outgoing = connection, incoming or FrameCodec(kinds), FrameCodec(kinds)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self.connection.fileno()

    def receive(self) -> list[Frame]:
        """Return frames that have arrived; there may be more after MAX_RECEIVED_BYTES. Raise ChannelLost at the end of
        the connection, WireError for what is no frame."""
        frames: list[Frame] = []
        size = 0
        while size < MAX_RECEIVED_BYTES:  # whole records are read, so what is left is seen by polling
            try:
                data = self.connection.recv(READ_SIZE)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return frames
            except OSError as error:
                data, reason = b"", describe_os_error(error)
            else:
                reason = "it was closed"
            if not data:
                if frames:
                    return frames  # the next call reports the end
                raise ChannelLost(reason)
            size += len(data)
            frames += self._incoming.decode(data)
        return frames

    def send(
        self, kind: int, body: bytes, seconds: float = inf, while_waiting: Callable[[], None] = lambda: None
    ) -> None:
        """Send a frame. `while_waiting` is called repeatedly while the other end does not read. Raise ChannelLost if
        the connection has ended; TimeoutError if the other end has not read after `seconds`: the frame was sent in part
        then, and the connection is of no more use."""
        data, end = memoryview(self._outgoing.encode(kind, body)), time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        while data:
            try:
                data = data[self.connection.send(data) :]
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                poll.poll(POLL_SECONDS * 1000)
                while_waiting()
                if time.monotonic() >= end:
                    raise TimeoutError("the other host does not read") from None
            except OSError as error:
                raise ChannelLost(describe_os_error(error)) from error

    def interrupt(self) -> None:
        """End the connection, from another thread than the one that uses it, and closes it."""
        with suppress(OSError):
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def set_link_timeout(connection: socket.socket) -> None:
    """Have the system end a TCP connection to a host that is silent for LINK_SECONDS. A process that is stopped is not
    silent: its system acknowledges for it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LINK_SECONDS // 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LINK_SECONDS // 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LINK_SECONDS)


def connect(address: str, port: int, certificate: str, kinds: range, max_bytes: int = MAX_FRAME_BYTES) -> SecureChannel:
    """Connect to a TokenListener that has this certificate (PEM), and sends frames of at most `max_bytes`. Raise
    OSError if that fails."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is known
    context.load_verify_locations(cadata=certificate)
    connection = context.wrap_socket(socket.create_connection((address, port), GREETING_SECONDS))
    return SecureChannel(connection, kinds, FrameCodec(kinds, max_bytes))


class TokenListener:
    """Accepts connections that first send a frame of kind `hello` with the token. Others are closed. `backlog`
    connections that are expected may be in their handshake at the same time."""

    def __init__(
        self, address: str, kinds: range, hello: int, backlog: int, days: int = CERTIFICATE_DAYS,
        max_bytes: int = MAX_FRAME_BYTES,
    ) -> None:  # fmt: skip
        """Listen on a free port of `address`, with a certificate for some days, for frames of at most `max_bytes`.
        Raise StartupError if that is impossible."""
        self.token = secrets.token_hex(32)
        self._kinds, self._hello, self._max_bytes = kinds, hello, max_bytes
        self._greetings, self._closed = threading.Semaphore(backlog + MAX_GREETINGS), False
        self.certificate, key = make_certificate(days)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version, self._context.num_tickets = ssl.TLSVersion.TLSv1_3, 0
        descriptor = os.memfd_create("quire-certificate", os.MFD_CLOEXEC)  # keeps the key off the disk
        with os.fdopen(descriptor, "wb") as file:
            file.write(key + self.certificate.encode())
            file.flush()
            self._context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._socket = socket.create_server((address, 0), family=family, backlog=backlog + MAX_GREETINGS)
        except OSError as error:
            raise StartupError(f"no port of {address} can be opened: {describe_os_error(error)}") from error
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept_loop, name="quire-listener", daemon=True).start()

    def _on_hello(self, channel: SecureChannel, body: dict[str, Any]) -> bool:
        """Take a connection that has sent the token, and `body` with it. Return False, or raise WireError, to have it
        closed. Called on a thread of its own."""
        raise NotImplementedError

    def _accept_loop(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed, or for example no descriptor is left
                if self._closed or self._socket.fileno() < 0:
                    return
                time.sleep(POLL_SECONDS)
                continue
            if not self._greetings.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection,), name="quire-greeting", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(GREETING_SECONDS)
            with suppress(OSError, WireError):
                tls = self._context.wrap_socket(connection, server_side=True)
                if not self._admit(tls):
                    tls.close()
                return
            connection.close()
        finally:
            self._greetings.release()

    def _admit(self, tls: ssl.SSLSocket) -> bool:
        """Read the first frame, and keep the connection if it has the token."""
        try:
            size, end, codec = 0, time.monotonic() + GREETING_SECONDS, FrameCodec(self._kinds, self._max_bytes)
            frames: list[Frame] = []
            while not frames:
                tls.settimeout(max(end - time.monotonic(), 0.01))
                data = tls.recv(MAX_GREETING_BYTES)
                size += len(data)
                if not data or size > MAX_GREETING_BYTES:
                    return False
                frames += codec.decode(data)
            body = read_json(frames[0].body)
            token = read_field(body, "token", str)
            if len(frames) > 1 or frames[0].kind != self._hello:
                return False
            if not hmac.compare_digest(token.encode(errors="surrogatepass"), self.token.encode()):
                return False
            return self._on_hello(SecureChannel(tls, self._kinds, codec), body)
        except (OSError, WireError):
            return False

    def close(self) -> None:
        """Close the port."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
        self._socket.close()


class ChannelListener(TokenListener):
    """Accepts the connections of `count` agents, whose hello has a number below `count`. It is closed after the last
    agent's."""

    def __init__(self, address: str, count: int, kinds: range, hello: int) -> None:
        self.accepted: dict[int, tuple[SecureChannel, dict[str, Any]]] = {}  # by number, with the hello's body
        self._count, self._lock = count, threading.Lock()
        super().__init__(address, kinds, hello, count)

    def _on_hello(self, channel: SecureChannel, body: dict[str, Any]) -> bool:
        number = read_uint32(body, "number")
        with self._lock:
            if self._closed or number >= self._count or number in self.accepted:
                return False
            self.accepted[number] = channel, body
            if len(self.accepted) == self._count:
                super().close()
            return True

    def close(self) -> None:
        """Close the port, and the connections that were not taken from `accepted`."""
        with self._lock:
            super().close()
            for channel, _ in self.accepted.values():
                channel.close()
            self.accepted.clear()


def make_certificate(days: int = CERTIFICATE_DAYS) -> tuple[str, bytes]:
    """Return a new self-signed certificate for some days, which others know and thus needs no address, and its private
    key, both as PEM. Raise StartupError if the library is missing."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise StartupError("Ray is used, and cryptography isn't installed", "pip install 'quire[ray]'") from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "quire")])
    now, some_days = datetime.now(UTC), timedelta(days=days)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - some_days)
        .not_valid_after(now + some_days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), private


def describe_os_error(error: OSError) -> str:
    """Return an error's text."""
    return error.strerror or str(error) or type(error).__name__
