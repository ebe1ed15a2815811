"""`quire serve`: bind the address, load the model and serve until a signal arrives or the engine dies. The web
libraries are imported late."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from quire.config import EngineConfig
from quire.errors import APIServerDead, EngineDead, StartupError
from quire.ipc.child_process import ENGINE_PROGRAM, ChildProcess, InterruptGuard
from quire.ipc.garbage_collection import freeze_loaded_objects
from quire.ipc.thread_stacks import format_thread_stacks
from quire.server.options import (
    ADMIN_KEY_VARIABLE,
    ServeOptions,
    check_options,
    check_prefill_replicas,
    read_chat_template,
    read_keys,
    set_chat_template,
)
from quire.server.prefixes import Prefix, read_prefixes, register_prefixes

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.server.frontend_manager import FrontendManager
    from quire.server.traces import RequestTracer

DEATH_NOTICE_SECONDS = 1.0  # after the engine's death the server still answers, so that clients get the reason
SHUTDOWN_MARGIN_SECONDS = 20.0  # limit of a shutdown, in addition to draining; then the process is ended
log = logging.getLogger("quire.server")


def serve(config: EngineConfig, options: ServeOptions, print_line: Callable[[str], None]) -> int:
    """Serve until SIGTERM or Ctrl-C. Return the exit status: 0 after a clean shutdown, 1 if the engine died or hangs.
    Raise StartupError if the server cannot start."""
    start = time.perf_counter()
    check_options(options)
    check_prefill_replicas(config, options)
    keys, template = read_keys(options.api_key_file), read_chat_template(options.chat_template)
    admin_keys = read_keys(options.admin_key_file, "--admin-key-file", ADMIN_KEY_VARIABLE)
    prefixes = read_prefixes(options.prefixes)
    listener = bind(options.host, options.port)
    from quire.server.frontend_manager import FrontendManager, worker_settings

    settings = worker_settings(config, options, keys, admin_keys, template.source if template is not None else None)
    frontends = FrontendManager(options.fronts, listener, settings, options.max_connections)
    with InterruptGuard() as interrupts:
        llm, name = _load_model(config, options, frontends)
    from quire.server.app import create_app

    tracer = None
    try:
        interrupts.raise_if_interrupted()
        if template is not None:
            set_chat_template(llm.prompts, template)
        for line in [*llm.engine_client.ready.lines, *llm.engine_client.ready.notices]:
            print_line(line)
        if not keys and options.host not in ("127.0.0.1", "localhost", "::1"):
            print_line(f"anyone who reaches {options.host} can use this server: set QUIRE_API_KEY to require a key")
        model_names = options.served_model_name or (name,)
        tracer = make_tracer(options, model_names[0])
        app = create_app(
            llm, model_names, options, keys=keys, admin_keys=admin_keys, config=config, server_group=frontends,
            tracer=tracer,
        )  # fmt: skip
        url = server_url(options.host, listener.getsockname()[1], tls=options.ssl_certfile is not None)

        def ready() -> None:
            print_line(f"quire serves {model_names[0]} at {url} (ready in {time.perf_counter() - start:.1f} s)")
            chat, text = llm.prompts.chat_template is not None, llm.prompts.tokenizer is not None
            print_line(curl_line(url + options.root_path, chat=chat, text=text, key=bool(keys)))

        status = run_loop(_serve(app, listener, llm, options, frontends, prefixes, ready, print_line))
    finally:
        if tracer is not None:
            tracer.close()
        ended = close_engine(llm)
        frontends.close()
        listener.close()
    return status if ended else 1


def _load_model(config: EngineConfig, options: ServeOptions, frontends: FrontendManager) -> tuple[AsyncLLM, str]:
    """Return the loaded model and its name. The web libraries are imported meanwhile: both wait for files, and torch's
    import releases the interpreter lock. A single engine's process is started first, and imports its own."""
    child = None
    if options.engine_process == "on" and options.replicas == 1:
        child = ChildProcess(options.fronts, ENGINE_PROGRAM)
    from quire.async_llm import AsyncLLM

    libraries = threading.Thread(target=import_libraries, name="quire-imports")
    libraries.start()
    progress = sys.stderr.isatty()
    try:
        if options.engine_process == "on":
            from quire.startup.engine_process import launch_engine_process, launch_replicas

            after, restart = options.stall_after, options.on_engine_death == "restart"
            if options.replicas > 1:
                replicas, prompts, checkpoint = launch_replicas(
                    config, options.replicas, options.router, progress, after, restart,
                    num_prefill=options.prefill_replicas,
                )  # fmt: skip
                return AsyncLLM.over(replicas, prompts), checkpoint.name
            engine_client, prompts, checkpoint = launch_engine_process(
                config, progress, after, start_other_clients=frontends.start_workers, child=child
            )
            llm = AsyncLLM.over(engine_client, prompts)
            frontends.wait_ready(llm)
            return llm, checkpoint.name
        from quire.startup.build import build

        built = build(config, progress)
        return AsyncLLM.of(built, stall_after=options.stall_after), built.name
    except BaseException:
        frontends.close()
        raise
    finally:
        libraries.join()
        freeze_loaded_objects()


def make_tracer(options: ServeOptions, model_name: str) -> RequestTracer | None:
    """Return the exporter of traces, or None if the options name no collector."""
    if options.otlp_traces_endpoint is None:
        return None
    from quire.server.traces import RequestTracer

    return RequestTracer(options.otlp_traces_endpoint, model_name)


def run_loop(serving: Coroutine[Any, Any, int]) -> int:
    """Run `serving` with asyncio.run. A SystemExit or KeyboardInterrupt from any task is logged, and 1 is returned."""
    try:
        return asyncio.run(serving)
    except (SystemExit, KeyboardInterrupt) as error:
        log.error("%s ended the server", type(error).__name__, exc_info=error)
        return 1


def close_engine(llm: AsyncLLM) -> bool:
    """Close the engine. Return False, and log all stacks, if its thread hangs; the process ends nevertheless."""
    from quire.server.shutdown import LAST_RESPONSES_SECONDS, arm_exit_timer, cancel_exit_timer

    ended = llm.close()
    if ended:
        cancel_exit_timer()
    else:
        log.error(
            "the engine's thread hangs, and the process ends without it; all threads:\n%s", format_thread_stacks()
        )
        arm_exit_timer(LAST_RESPONSES_SECONDS)
    return ended


def import_libraries() -> None:
    """Import the web libraries."""
    for name in ("fastapi", "uvicorn", "uvicorn.protocols.http.h11_impl", "prometheus_client"):
        import_module(name)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to the address. This comes before anything slow, so that a bad address fails at once. Raise
    StartupError if the address cannot be bound."""
    if not 0 <= port <= 65535:
        raise StartupError(f"--port is {port}", "It must be between 0 and 65535")
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"--host {host} is not an address of this machine", "Try --host 127.0.0.1") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(target)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise StartupError(f"can't listen on {host}:{port}: {reason}", "Choose another --port or --host") from error
    return listener


def server_url(host: str, port: int, *, tls: bool = False) -> str:
    """Return the server's URL for clients on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if tls else 'http'}://{name}:{port}"


def curl_line(url: str, *, chat: bool, text: bool, key: bool) -> str:
    """Return an example request for a shell: a chat, else a prompt of text, else of token ids. With TLS, curl does not
    check the certificate: few certificates are made for the machine's own address."""
    path, body = "/v1/completions", '{"prompt": "Once upon a time", "max_tokens": 40}'
    if not text:
        body = '{"prompt": [5, 6, 7], "max_tokens": 40, "return_token_ids": true}'
    elif chat:
        path, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "Hello!"}]}'
    secret = ' -H "Authorization: Bearer $QUIRE_API_KEY"' if key else ""
    curl = "curl --insecure" if url.startswith("https") else "curl"
    return f"{curl} {url}{path} -H 'Content-Type: application/json'{secret} -d '{body}'"


async def _serve(
    app: Any,
    listener: socket.socket,
    llm: AsyncLLM,
    options: ServeOptions,
    frontends: FrontendManager,
    prefixes: dict[str, Prefix],
    on_ready: Callable[[], None],
    print_line: Callable[[str], None],
) -> int:
    """Serve `app` until a signal arrives or the engine dies. Return the exit status."""
    from quire.server.shutdown import LoopErrorLogger, arm_exit_timer, log_stalls, log_status
    from quire.server.web_server import WebServer

    loop = asyncio.get_running_loop()
    LoopErrorLogger(loop)
    stop, died = asyncio.Event(), asyncio.Event()
    llm.set_death_callback(lambda: loop.call_soon_threadsafe(died.set))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_first_signal, loop, stop)
    llm.engine_client.attach_event_loop()
    await frontends.connect()
    waits = [asyncio.ensure_future(event.wait()) for event in (stop, died)]
    background = [asyncio.ensure_future(log_stalls(llm)), asyncio.ensure_future(log_status(llm))]
    try:
        if prefixes and not await _register_prefixes(llm, prefixes, waits, print_line):
            return await _shut_down(llm, options, stop, frontends)
        await frontends.start_accepting()
        server = WebServer(app, options, on_ready, died.set, accept_slots=frontends.accept_slots)
        serving = asyncio.ensure_future(server.serve(sockets=[listener]))
        await asyncio.wait([serving, *waits], return_when=asyncio.FIRST_COMPLETED)
        if llm.error is not None and options.on_engine_death == "restart" and await _restart_engine(llm, stop):
            died.clear()
            if llm.error is not None:  # it died again meanwhile
                died.set()
            waits[1] = asyncio.ensure_future(died.wait())
            await asyncio.wait([serving, *waits], return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()  # raises the reason why it could not start
        status = await _shut_down(llm, options, stop, frontends)
        server.should_exit = True
        await serving
        return status
    finally:
        for task in [*waits, *background]:
            task.cancel()
        arm_exit_timer(SHUTDOWN_MARGIN_SECONDS)


async def _restart_engine(llm: AsyncLLM, stop: asyncio.Event) -> bool:
    """Restart a dead engine. Return False if the restart failed or a signal arrived first."""
    log.error("the engine stopped: %s; it is started again, once", llm.heartbeat().why)
    restarting, stopping = asyncio.ensure_future(llm.restart()), asyncio.ensure_future(stop.wait())
    await asyncio.wait([restarting, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not restarting.done():
        restarting.cancel()
        return False
    if (error := restarting.exception()) is not None:
        log.error("the engine can't be restarted: %s", error)
        return False
    log.warning("the engine was restarted")
    return True


async def _register_prefixes(
    llm: AsyncLLM,
    prefixes: dict[str, Prefix],
    end_events: list[asyncio.Task[Literal[True]]],
    print_line: Callable[[str], None],
) -> bool:
    """Register the prefixes. Return False if one of `end_events`, a signal or the engine's death, came first."""
    registering = asyncio.ensure_future(register_prefixes(llm, prefixes))
    await asyncio.wait([registering, *end_events], return_when=asyncio.FIRST_COMPLETED)
    if not registering.done() or isinstance(registering.exception(), EngineDead):
        registering.cancel()
        return False
    print_line(f"{len(prefixes)} prefixes registered, {registering.result()} tokens")
    return True


async def _shut_down(llm: AsyncLLM, options: ServeOptions, stop: asyncio.Event, frontends: FrontendManager) -> int:
    """Drain the requests after a signal, or log why the engine or the server stopped. The process ends within a limit
    from here on. Return the exit status."""
    from quire.server.shutdown import arm_exit_timer

    if stop.is_set() and llm.error is None:
        arm_exit_timer(options.shutdown_timeout + SHUTDOWN_MARGIN_SECONDS)
        llm.stop_accepting()
        end = time.monotonic() + options.shutdown_timeout
        frontends.request_drain(options.shutdown_timeout)
        log.info("shutting down: %d requests have %g s to end", await frontends.load(), options.shutdown_timeout)
        if not await llm.drain(options.shutdown_timeout):
            log.warning("requests that had not ended were aborted")
        if llm.error is None:
            return 0 if await frontends.wait_ended(max(end - time.monotonic(), 0)) else 1
    arm_exit_timer(DEATH_NOTICE_SECONDS + SHUTDOWN_MARGIN_SECONDS)
    if llm.error is not None and not isinstance(llm.error, APIServerDead):  # the latter was logged before
        log.error("the engine stopped: %s", llm.heartbeat().why, exc_info=llm.error)
    await asyncio.sleep(DEATH_NOTICE_SECONDS)
    return 1


def _on_first_signal(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Start to drain. The next signal ends the process at once."""
    stop.set()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
