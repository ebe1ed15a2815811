"""Check the TLS certificate before anything slow happens. uvicorn loads it again."""

from __future__ import annotations

import ssl

from quire.errors import StartupError


def check_certificate(key: str | None, certificate: str | None) -> None:
    """Raise StartupError unless both files are given, readable and belong together, or neither is given."""
    if key is None and certificate is None:
        return
    if key is None or certificate is None:
        given, other = ("--ssl-certfile", "--ssl-keyfile") if key is None else ("--ssl-keyfile", "--ssl-certfile")
        raise StartupError(f"{given} is given without {other}", "Give both, or none")
    for flag, path in (("--ssl-keyfile", key), ("--ssl-certfile", certificate)):
        try:
            with open(path, "rb"):
                pass
        except (OSError, ValueError) as error:
            raise StartupError(f"{flag} {path[:200]!r} can't be read", "Give a file in PEM format") from error

    def password() -> str:
        raise StartupError(f"--ssl-keyfile {key[:200]!r} is encrypted", "Give a key without a password")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password)
    except (ssl.SSLError, OSError) as error:
        cause = f"--ssl-certfile {certificate[:200]!r} and --ssl-keyfile {key[:200]!r} can't be used together"
        raise StartupError(f"{cause}: {str(error)[:200]}", "Give a certificate and its key in PEM format") from error
