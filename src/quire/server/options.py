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
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quire.config import EngineConfig, advanced, check_settings, setting
from quire.errors import StartupError
from quire.files import MAX_BYTES_BY_FILE, read_bounded_text
from quire.protocol.sampling_params import MAX_LOGPROBS
from quire.router.router import POLICIES

if TYPE_CHECKING:
    from quire.config import EngineConfig
    from quire.text.chat_template import ChatTemplate
    from quire.text.input_processor import InputProcessor

MAX_STORED_RESPONSES = 1 << 20  # responses
MAX_DESCRIPTORS = 65_536  # the limit of open files is raised to this
MAX_CONNECTIONS = 8_192
RESERVED_DESCRIPTORS = 32  # for files, and for connections that are being closed
MAX_INT_DIGITS = 640  # of an integer in JSON, the lowest limit that Python allows; the parse time is quadratic
KEY_VARIABLE = "QUIRE_API_KEY"
ADMIN_KEY_VARIABLE = "QUIRE_ADMIN_KEY"
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")  # trace would log the contents of requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of a server, each with its flag. The engine's settings are in EngineConfig."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on", metavar="PORT")
    root_path: str = setting("", "path prefix of a proxy, which may remove it or leave it", metavar="PATH")
    max_connections: int | None = advanced(
        None, "most open connections (default: as many as the limit of open files allows)", bounds=(1, 2**20)
    )
    stall_after: float = 60.0  # seconds; it has no flag
    engine_process: str = advanced("on", "run the engine in its own process, or in a thread", ("on", "off"))
    on_engine_death: str = advanced(
        "exit", "if the engine's process dies: exit, or restart it once", ("exit", "restart")
    )
    fronts: int = advanced(
        1, "processes that serve HTTP, if one is too slow", bounds=(1, 64), aliases=("--api-server-count",)
    )
    replicas: int = advanced(
        1, "engines behind one address, each with --tp times --pp GPUs, or with a share of the cores", bounds=(1, 64)
    )
    router: str = advanced(
        "prefix", "how requests are divided among replicas: by cached prefixes and work, by work, or in turn", POLICIES
    )
    prefill_replicas: int = advanced(
        0, "of --replicas, the engines that compute prompts for the others, which decode", bounds=(0, 63)
    )
    shutdown_timeout: float = advanced(
        30.0, "seconds for requests to end after SIGTERM", bounds=(0, 86_400), metavar="S"
    )
    ssl_keyfile: str | None = setting(None, "serve TLS with this private key, in PEM format", metavar="FILE")
    ssl_certfile: str | None = setting(None, "the certificate for it, with its chain, in PEM format", metavar="FILE")

    served_model_name: tuple[str, ...] = setting((), "names to answer to", metavar="NAME")
    chat_template: str | None = setting(None, "a Jinja chat template in place of the model's", metavar="FILE")
    tool_call_parser: str | None = setting(
        None,
        "how the model writes tool calls: harmony, hermes, json, llama3_json, mistral or pythonic (default: detected "
        "from its chat template)",
        metavar="NAME",
    )
    reasoning_parser: str | None = setting(
        None,
        "how the model writes its reasoning: think, deepseek_r1, granite, harmony, mistral, seed_oss or off (default: "
        "detected from its chat template)",
        metavar="NAME",
    )
    api_key_file: str | None = setting(
        None,
        "keys that clients must send, one per line (or one key in the environment: QUIRE_API_KEY)",
        metavar="FILE",
    )
    admin_key_file: str | None = setting(
        None,
        "keys for the admin routes, one per line (or one key in the environment: QUIRE_ADMIN_KEY; without a key these "
        "routes are closed)",
        metavar="FILE",
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "origins of web pages that may send requests: https://HOST or *, several, or a JSON list (default: none)",
        metavar="ORIGIN",
    )
    max_logprobs: int = advanced(
        MAX_LOGPROBS, "most log-probabilities that a request may ask for", bounds=(0, MAX_LOGPROBS)
    )
    strict: bool = advanced(False, "refuse requests that have unknown fields")
    store_responses: int = advanced(
        0,
        "keep the last N responses of /v1/responses in memory, for previous_response_id",
        bounds=(0, MAX_STORED_RESPONSES),
    )
    prefixes: str | None = advanced(
        None,
        'prefixes to register at start, as JSON: {"NAME": {"text": "..."} or {"token_ids": [...]}}; see '
        "--prefix-tokens",
        metavar="FILE",
    )

    access_log: bool = setting(False, "log every HTTP request")
    log_requests: bool = setting(
        False,
        "log every request that is queued: its sizes and parameters, not its text",
        flag="--enable-log-requests",
    )
    uvicorn_log_level: str = advanced("warning", "log level of the HTTP library", LOG_LEVELS)
    metrics_prefix: str = advanced(
        "quire", "prefix of metrics: quire_..., or vllm:... for vLLM's dashboards", ("quire", "vllm")
    )
    otlp_traces_endpoint: str | None = advanced(
        None,
        "export a trace of each request to this OTLP/HTTP collector: http://HOST:4318/v1/traces; needs quire[otel]",
        metavar="URL",
    )
    server_info: bool = setting(
        False, "enable GET /server_info: the settings and the memory plan, for admins", flag="--enable-server-info"
    )
    tokenizer_info: bool = advanced(
        False,
        "enable GET /tokenizer_info: the tokenizer's settings and the chat template",
        flag="--enable-tokenizer-info-endpoint",
    )
    console: bool = advanced(True, "no page at /console", flag="--no-console")

    def __post_init__(self) -> None:
        check_settings(self)


FIRST_OPTIONS = {"host": "server", "served_model_name": "requests", "access_log": "logs and metrics"}
"""The first options of the groups of --help, and the groups' names."""


def check_options(options: ServeOptions) -> None:
    """Raise StartupError for options that contradict each other. Raises this process's limit of open files."""
    restart, in_thread = options.on_engine_death == "restart", options.engine_process == "off"
    if restart and in_thread:
        cause = "--on-engine-death is restart, and --engine-process is off"
        raise StartupError(cause, "Only a process can be started again")
    fronts, stored = f"--fronts is {options.fronts}", options.store_responses
    if options.fronts > 1 and restart:
        cause = f"{fronts}, and --on-engine-death is restart"
        raise StartupError(cause, "Only an engine with one frontend can be started again")
    if options.fronts > 1 and in_thread:
        cause = f"{fronts}, and --engine-process is off"
        raise StartupError(cause, "Several frontends need an engine in a process of its own")
    if options.fronts > 1 and stored:
        remedy = "A frontend finds only the responses that it stored itself: use one frontend, or store none"
        raise StartupError(f"{fronts}, and --store-responses is {stored}", remedy)
    replicas = f"--replicas is {options.replicas}"
    if options.replicas > 1 and in_thread:
        cause = f"{replicas}, and --engine-process is off"
        raise StartupError(cause, "Several engines need a process each")
    if options.replicas > 1 and options.fronts > 1:
        cause = f"{replicas}, and {fronts}"
        raise StartupError(cause, "One frontend routes the requests of all replicas: use --fronts 1")
    if options.otlp_traces_endpoint is not None:
        check_traces_endpoint(options.otlp_traces_endpoint)
    check_certificate(options.ssl_keyfile, options.ssl_certfile)
    raise_descriptor_limit()
    most = options.max_connections
    connection_capacity(None if most is None else -(-most // options.fronts))


def check_prefill_replicas(config: EngineConfig, options: ServeOptions) -> None:
    """Raise StartupError if the settings do not allow prefill replicas."""
    count = options.prefill_replicas
    if count and count >= options.replicas:
        cause = f"--prefill-replicas is {count}, and --replicas is {options.replicas}"
        raise StartupError(cause, f"At least one of them must decode: use --replicas {count + 1} or more")
    check_handover_settings(config, count)


def check_handover_settings(config: EngineConfig, count: int) -> None:
    """Raise StartupError if `count` prefill replicas with these settings can't hand pages over."""
    if not count:
        return
    given = f"--prefill-replicas is {count}"
    if config.memory != "paged":
        raise StartupError(f"{given}, and --memory is {config.memory}", "Use --memory paged")
    if not config.swap_gib:
        raise StartupError(f"{given}, and --swap-gib is 0: pages are handed over in that memory", "Use 1 or more")
    if not config.enable_prefix_caching:
        raise StartupError(f"{given}, and prefix caching is off", "Leave --no-enable-prefix-caching out")
    if config.kv_events is not None:
        cause = f"{given}, and --kv-events-config is given: pages that are handed over come without their tokens"
        raise StartupError(cause, "Leave one out")
    if config.log_plans:
        cause = f"{given}, and --log-plans is given: a replay has no memory that replicas share"
        raise StartupError(cause, "Leave one out")
    if config.has_rank_processes:
        cause = f"{given}, --tp is {config.tp}, --pp is {config.pp} and --executor is {config.executor}"
        raise StartupError(cause, "Only models in the engine's own process hand pages over: leave these flags out")
    if config.speculation not in (None, "ngram"):
        cause = f"{given}, and draft tokens come from a model or a head, whose pages are not handed over"
        raise StartupError(cause, "Use --speculative-method ngram, or leave one out")


def check_traces_endpoint(url: str) -> None:
    """Raise StartupError unless `url` is a URL of HTTP, and the libraries that export traces are installed."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.split() == [url]
    except ValueError:
        is_url = False
    if not is_url:
        cause = f"--otlp-traces-endpoint is {url[:80]!r}"
        raise StartupError(cause, "Give a URL of HTTP, such as http://127.0.0.1:4318/v1/traces")
    try:
        import_module("quire.server.traces")
    except ImportError as error:
        cause = f"--otlp-traces-endpoint needs OpenTelemetry's SDK and its OTLP/HTTP exporter: {error}"
        raise StartupError(cause, "Install them: pip install 'quire[otel]'") from error


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
