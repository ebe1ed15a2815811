"""The options of `quire serve`, in addition to the engine's config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quire.errors import StartupError
from quire.protocol.sampling_params import MAX_LOGPROBS
from quire.server.descriptors import connection_capacity, raise_descriptor_limit
from quire.server.tls import check_certificate

if TYPE_CHECKING:
    from quire.text.chat_template import ChatTemplate
    from quire.text.input_processor import InputProcessor

MAX_SHUTDOWN_TIMEOUT = 86_400  # seconds of --shutdown-timeout
MAX_FRONTENDS = 64
MAX_STORED_RESPONSES = 1 << 20  # responses


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
