"""Run the application in a cluster of Ray, one that exists or one started for it, until a signal arrives."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from typing import Any

from quire.config import EngineConfig
from quire.deploy.serve_config import (
    APPLICATION,
    DeployOptions,
    application_args,
    check_deployment,
    deployment_options,
    http_settings,
    replica_resources,
)
from quire.distributed.ray_address import resolve_ray_address
from quire.distributed.ray_driver import (
    QUIET,
    describe_nodes,
    import_ray,
    set_cluster_environment,
    start_cluster,
)
from quire.errors import StartupError, first_line
from quire.server.api_server import server_url
from quire.server.options import KEY_VARIABLE, ServeOptions

MIN_SERVE_VERSION = (2, 60)  # older versions lack calls of Serve that the application makes
PLACEMENT_SECONDS = 30.0  # seconds for room in the cluster
POLL_SECONDS = 0.5
STATUS_SECONDS = 5.0  # between two looks at the application
OBJECT_STORE_BYTES = 256 << 20  # of a cluster started here: bodies of requests of more than 100 kB pass through it
INSTALL = "pip install 'quire[ray-serve]'"


def run(config: EngineConfig, serving: ServeOptions, options: DeployOptions, print_line: Callable[[str], None]) -> int:
    """Run the application until SIGTERM or Ctrl-C. Return the exit status. Raise StartupError if it can't start."""
    start, stop = time.perf_counter(), threading.Event()
    check_deployment(config, options)
    address = resolve_ray_address(config.ray_address)
    if not address:
        set_cluster_environment()
    serve = import_serve()
    with ExitStack() as undo:
        ray = connect(address, undo)
        if config.device == "auto" and not ray.cluster_resources().get("GPU"):
            config = replace(config, device="cpu")
            print_line("the cluster has no GPUs: the replicas compute on CPUs")
        check_room(ray, config, options)
        for number in (signal.SIGTERM, signal.SIGINT):
            undo.callback(signal.signal, number, signal.signal(number, lambda *_: stop.set()))
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        http = http_settings(options)
        serve.start(**http)
        undo.callback(serve.delete, APPLICATION)
        args = application_args(config, serving, options)
        app = import_module("quire.deploy.ray_serve").bind(args, deployment_options(config, serving, options))
        try:
            serve.run(app, name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            deployments = serve.status().applications[APPLICATION].deployments.values()
            cause = last_cause("\n".join([str(error), *(one.message for one in deployments)]))
            raise StartupError(f"the application can't start: {cause}", "Ray's logs say more") from error
        if http["proxy_location"] != "HeadOnly" and serving.api_key_file is None and KEY_VARIABLE not in os.environ:
            print_line(f"anyone who reaches {options.http_host} can use this server: set {KEY_VARIABLE} on all nodes")
        url = server_url(options.http_host, options.http_port)
        print_line(f"quire serves at {url} (ready in {time.perf_counter() - start:.1f} s)")
        while not stop.wait(STATUS_SECONDS):
            try:
                serve.status()
            except Exception as error:
                undo.pop_all()  # the cluster is gone
                raise StartupError(f"the cluster is gone: {first_line(error)}") from error
    return 0


def import_serve() -> Any:
    """Return the module ray.serve. Raise StartupError if it is not installed, or too old."""
    try:
        serve = import_module("ray.serve")
    except ImportError as error:
        raise StartupError(f"quire deploy ray needs Ray Serve: {error}", INSTALL) from error
    version = import_module("ray").__version__
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < MIN_SERVE_VERSION:
        raise StartupError(f"Ray is {version}, and quire deploy ray needs 2.60", INSTALL)
    return serve


def connect(address: str, undo: ExitStack) -> Any:
    """Connect to the cluster at `address`, or start one, and return the module ray. `undo` leaves or ends it. Raise
    StartupError if that fails."""
    if not address:
        folder = tempfile.mkdtemp(prefix="quire-ray-")
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        ray = start_cluster(folder, None, None, OBJECT_STORE_BYTES)
        undo.callback(ray.shutdown)
        return ray
    ray = import_ray()
    try:
        ray.init(address=address, **QUIET)
    except Exception as error:
        raise StartupError(
            f"the cluster at {address} can't be used: {first_line(error)}",
            "With token authentication, set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the cluster's token",
        ) from error
    undo.callback(ray.shutdown)
    undo.callback(end_serve)
    return ray


def end_serve() -> None:
    """End Serve, unless it has other applications."""
    serve = import_module("ray.serve")
    if not serve.status().applications:
        serve.shutdown()


def check_room(ray: Any, config: EngineConfig, options: DeployOptions) -> None:
    """Raise StartupError if Ray has no room for the fewest replicas within PLACEMENT_SECONDS."""
    needs = replica_resources(config)
    each = {name: amount for name, amount in (("CPU", needs["num_cpus"]), ("GPU", needs["num_gpus"])) if amount}
    count = options.min_replicas + options.prefill_replicas
    flags = "--min-replicas or --prefill-replicas" if options.prefill_replicas else "--min-replicas"
    group = ray.util.placement_group([each] * count, strategy="PACK")
    end = time.monotonic() + PLACEMENT_SECONDS - 2 * POLL_SECONDS
    try:
        while not group.wait(POLL_SECONDS):
            if time.monotonic() >= end:
                wanted = " and ".join(f"{amount:g} {name}s" for name, amount in each.items())
                free = " and ".join(f"{ray.available_resources().get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
                raise StartupError(
                    f"Ray has no room for {count} replicas of {wanted} each within "
                    f"{PLACEMENT_SECONDS:g} s: there are {describe_nodes(ray)}; free are {free}",
                    f"Add nodes, or use fewer replicas ({flags}), --threads or --tp",
                )
    finally:
        with suppress(Exception):
            ray.util.remove_placement_group(group)


def last_cause(text: str) -> str:
    """Return the message of the last exception in a text of Serve, which may hold tracebacks of replicas: that of a
    StartupError, if there is one."""
    for kind in ("StartupError", r"\w*(?:Error|Exception)"):
        if found := re.findall(rf"^\s*(?:\w+\.)*{kind}: (.+)$", text, re.MULTILINE):
            return str(found[-1])[:300].rstrip(".")
    return first_line(RuntimeError(text))
