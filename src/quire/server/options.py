"""The options of `quire serve` in addition to the engine's config, and what they name: keys, a certificate, a chat
template, limits of files and connections, logs."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import ssl
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.errors import StartupError
from quire.files import MAX_BYTES_BY_FILE, read_bounded_text
from quire.protocol.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from quire.text.chat_template import ChatTemplate
    from quire.text.input_processor import InputProcessor

MAX_SHUTDOWN_TIMEOUT = 86_400  # seconds of --shutdown-timeout
MAX_FRONTENDS = 64
MAX_STORED_RESPONSES = 1 << 20  # responses
MAX_DESCRIPTORS = 65_536  # the limit of open files is raised to this
MAX_CONNECTIONS = 8_192
RESERVED_DESCRIPTORS = 32  # for files, and for connections that are being closed
MAX_INT_DIGITS = 640  # of an integer in JSON, the lowest limit that Python allows; the parse time is quadratic
KEY_VARIABLE = "QUIRE_API_KEY"
ADMIN_KEY_VARIABLE = "QUIRE_ADMIN_KEY"


class ServeOptions(NamedTuple):
    """Options of a server. The model's own settings are in EngineConfig."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str | None = None
    admin_key_file: str | None = None
    prefixes: str | None = None  # a file
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    tool_call_parser: str | None = None  # None: detected from the chat template
    reasoning_parser: str | None = None  # None: detected from the chat template
    root_path: str = ""
    shutdown_timeout: float = 30.0
    access_log: bool = False
    allowed_origins: tuple[str, ...] = ()  # of web pages that may send requests from a browser
    metrics_prefix: str = "quire"
    console: bool = True
    store_responses: int = 0  # the most responses of /v1/responses that are stored
    server_info: bool = False
    tokenizer_info: bool = False
    strict: bool = False  # refuse unknown fields of requests
    max_logprobs: int = MAX_LOGPROBS
    log_requests: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    max_connections: int | None = None  # None: as many as the limit of open files allows
    stall_after: float = 60.0  # seconds
    engine_process: str = "on"  # or "off": the engine runs in a thread
    on_engine_death: str = "exit"  # or "restart", once
    fronts: int = 1  # frontends: processes that serve HTTP
    uvicorn_log_level: str = "warning"


def check_options(options: ServeOptions) -> None:
    """Raise StartupError for invalid options. Raises this process's limit of open files."""
    if not 0 <= options.shutdown_timeout <= MAX_SHUTDOWN_TIMEOUT:
        cause = f"--shutdown-timeout is {options.shutdown_timeout:g}"
        raise StartupError(cause, f"It is in seconds, from 0 to {MAX_SHUTDOWN_TIMEOUT:,}")
    if options.on_engine_death == "restart" and options.engine_process == "off":
        raise StartupError(
            "--on-engine-death is restart, and --engine-process is off", "Only a process can be started again"
        )
    if not 1 <= options.fronts <= MAX_FRONTENDS:
        raise StartupError(f"--fronts is {options.fronts}", f"It must be between 1 and {MAX_FRONTENDS}")
    if options.fronts > 1 and options.on_engine_death == "restart":
        cause = f"--fronts is {options.fronts}, and --on-engine-death is restart"
        raise StartupError(cause, "Only an engine with one frontend can be started again")
    if options.fronts > 1 and options.engine_process == "off":
        cause = f"--fronts is {options.fronts}, and --engine-process is off"
        raise StartupError(cause, "Several frontends need an engine in a process of its own")
    if not 0 <= options.store_responses <= MAX_STORED_RESPONSES:
        cause = f"--store-responses is {options.store_responses}"
        raise StartupError(cause, f"It must be between 0, for none, and {MAX_STORED_RESPONSES}")
    if options.fronts > 1 and options.store_responses:
        cause = f"--fronts is {options.fronts}, and --store-responses is {options.store_responses}"
        raise StartupError(
            cause, "A frontend finds only the responses that it stored itself: use one frontend, or store none"
        )
    check_certificate(options.ssl_keyfile, options.ssl_certfile)
    raise_descriptor_limit()
    most = options.max_connections
    connection_capacity(None if most is None else -(-most // options.fronts))


def read_chat_template(file: str | None) -> ChatTemplate | None:
    """Return the chat template in `file`, or None without a file."""
    if file is None:
        return None
    from quire.text.chat_template import ChatTemplate

    return ChatTemplate.find(Path(file).parent, file)


def set_chat_template(input_processor: InputProcessor, template: ChatTemplate) -> None:
    """Use `template` for conversations, with the model's special tokens. Raise StartupError if there is no
    tokenizer."""
    if input_processor.tokenizer is None:
        raise StartupError("--chat-template needs a tokenizer, and this model has none", "Give one: --tokenizer")
    input_processor.replace_chat_template(template.with_special_tokens(input_processor.tokenizer.special_tokens))


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


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit, but to at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # the system has a lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connection_capacity(requested: int | None = None) -> int:
    """Return how many connections can be opened: `requested`, or else as many as the limit of open files allows, at
    most 8,192. Raise StartupError if `requested`, or even one, exceeds that limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/dev/fd")) + RESERVED_DESCRIPTORS
    room = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft - taken, MAX_CONNECTIONS)
    if requested is not None and requested < 1:
        raise StartupError(f"--max-connections is {requested}", "It is 1 or more")
    if room < (requested or 1):
        cause = f"{requested or 1} connections don't fit: {soft} files may be open and {taken} are needed otherwise"
        raise StartupError(cause, f"Raise the limit (ulimit -n); the most connections are {MAX_CONNECTIONS}")
    return requested or room


def configure_logging(options: ServeOptions, name: str = "") -> None:
    """Log to stderr. Each line has the `name` of the frontend, if given."""
    format = f"%(asctime)s {name}: %(message)s" if name else "%(asctime)s %(message)s"
    logging.basicConfig(stream=sys.stderr, format=format, datefmt="%H:%M:%S")
    logging.getLogger("quire").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(options.uvicorn_log_level.upper())
    if options.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)


def read_keys(file: str | None, flag: str = "--api-key-file", variable: str = KEY_VARIABLE) -> tuple[str, ...]:
    """Return the keys in `file`, one per line, else the key in the environment's `variable`, else none. `flag` is the
    flag that named the file.

    The variable is removed, so that child processes and readers of this process's environment do not see the key.
    """
    key = os.environ.get(variable, "").strip()
    if variable in os.environ:
        _erase_variable(variable)
        del os.environ[variable]
    if file is None:
        return (key,) if key else ()
    remedy = "Give a text file with one key a line"
    lines = read_bounded_text(file, MAX_BYTES_BY_FILE["keys"], f"{flag} {file}", remedy).split()
    if not lines:
        raise StartupError(f"{flag} {file} holds no key", remedy)
    return tuple(lines)


def _erase_variable(variable: str) -> None:
    """Overwrite a variable in the process's initial environment, which /proc shows even after it is unset."""
    with suppress(AttributeError, OSError):  # without a C library the variable is only unset
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_void_p
        if at := getenv(os.fsencode(variable)):
            ctypes.memset(at, 0, len(ctypes.string_at(at)))
