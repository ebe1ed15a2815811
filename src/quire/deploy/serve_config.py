"""The configuration of an application of Ray Serve, as Serve's file format has it. Ray is not needed to write one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quire.config import DEFAULT_BATCH_LIMITS, EngineConfig, advanced, check_settings, setting
from quire.errors import StartupError
from quire.server.options import ServeOptions, check_handover_settings

APPLICATION, ENGINE, PREFILL, API = "quire", "engine", "prefill", "api"  # names of it and of its deployments
IMPORT_PATH = "quire.deploy.ray_serve:build_app"
POLICY = "quire.deploy.autoscaling:RoomPolicy"
MAX_CALLS = 100_000  # of a replica at once: the engine limits its queue itself
MAX_REPLICAS = 1024
LOOK_BACK_SECONDS = 15.0  # of the means that the policy gets; replicas report every 10 seconds
SERVE_OPTIONS = (
    "root_path", "router", "shutdown_timeout", "served_model_name", "chat_template", "tool_call_parser",
    "reasoning_parser", "api_key_file", "admin_key_file", "allowed_origins", "max_logprobs", "strict",
    "store_responses", "log_requests", "metrics_prefix", "otlp_traces_endpoint", "server_info", "tokenizer_info",
    "console",
)  # fmt: skip
"""The options of `quire serve` that an application has too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployOptions:
    """The options of `quire deploy ray`, each with its flag."""

    http_host: str = setting("127.0.0.1", "address on which Serve's proxy listens", metavar="HOST")
    http_port: int = setting(8000, "port on which Serve's proxy listens", bounds=(1, 65_535), metavar="PORT")
    min_replicas: int = setting(1, "fewest engines", bounds=(1, MAX_REPLICAS))
    max_replicas: int | None = setting(None, "most engines (default: --min-replicas)", bounds=(1, MAX_REPLICAS))
    prefill_replicas: int = setting(
        0, "engines, beside these, that only compute prompts for the others, which decode", bounds=(0, MAX_REPLICAS)
    )
    target_waiting: float = setting(
        4.0, "requests that may wait for each engine; if more wait, engines are started", bounds=(0, 1_000_000)
    )
    upscale_delay: float = advanced(
        10.0, "seconds for which too many requests wait before engines are started", bounds=(0, 86_400), metavar="S"
    )
    downscale_delay: float = advanced(
        300.0, "seconds for which fewer engines are enough before some are ended", bounds=(0, 86_400), metavar="S"
    )
    write: str | None = setting(None, "write the configuration of Serve to this file, and run nothing", metavar="FILE")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            cause = f"--min-replicas is {self.min_replicas}, and --max-replicas is {self.max_replicas}"
            raise StartupError(cause, f"Give --max-replicas {self.min_replicas} or more")


def replica_resources(config: EngineConfig) -> dict[str, float]:
    """Return what Ray reserves for a replica. The ranks of an engine are processes of one host, which get the GPUs of
    the replica's actor: those of other bundles of a placement group would be hidden from them."""
    ranks = config.tp * config.pp
    if config.device == "cpu":
        return {"num_cpus": (config.threads or 1) * (ranks if config.threads is None else 1), "num_gpus": 0}
    return {"num_cpus": 1, "num_gpus": ranks}


def deployment_options(config: EngineConfig, serving: ServeOptions, options: DeployOptions) -> dict[str, Any]:
    """Return the options of the deployments, by name. The API server reserves no CPU: after its end an engine that
    waits for room could take it."""
    alike = {
        "max_ongoing_requests": MAX_CALLS,
        "graceful_shutdown_timeout_s": serving.shutdown_timeout + 5.0,
        "graceful_shutdown_wait_loop_s": 1.0,
    }
    seqs = config.max_num_seqs or DEFAULT_BATCH_LIMITS["cpu" if config.device == "cpu" else "cuda"][0]
    deployments = {
        API: {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}, **alike, **without_access_log()},
        ENGINE: {
            "autoscaling_config": {
                "min_replicas": options.min_replicas,
                "max_replicas": options.max_replicas or options.min_replicas,
                "look_back_period_s": LOOK_BACK_SECONDS,
                "upscale_delay_s": options.upscale_delay,
                "downscale_delay_s": options.downscale_delay,
                "policy": {
                    "policy_function": POLICY,
                    "policy_kwargs": {"target_waiting": options.target_waiting, "max_num_seqs": seqs},
                },
            },
            "ray_actor_options": replica_resources(config),
            **alike,
            **without_access_log(),
        },
    }
    if options.prefill_replicas:
        deployments[PREFILL] = {
            "num_replicas": options.prefill_replicas,
            "ray_actor_options": replica_resources(config),
            **alike,
            **without_access_log(),
        }
    return deployments


def without_access_log() -> dict[str, Any]:
    """Return the options that switch off Serve's log of calls. Each deployment has its own, so that YAML has no
    alias."""
    return {"logging_config": {"enable_access_log": False}}


def check_deployment(config: EngineConfig, options: DeployOptions) -> None:
    """Raise StartupError if engines with these settings can't be deployed."""
    if config.executor == "ray":
        raise StartupError("--executor is ray, and Ray places the whole engine", "Leave --executor out")
    check_handover_settings(config, options.prefill_replicas)


def application_args(config: EngineConfig, serving: ServeOptions, options: DeployOptions) -> dict[str, Any]:
    """Return the arguments of `build_app`: the settings that are not the defaults, and whether there are prefill
    replicas."""
    engine, usual = config.flat(), EngineConfig().flat()
    served, usually = asdict(serving), asdict(ServeOptions())
    return {
        "engine": {name: value for name, value in engine.items() if value != usual[name] and name != "ray_address"},
        "serving": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in served.items()
            if name in SERVE_OPTIONS and value != usually[name]
        },
        **({"has_prefill": True} if options.prefill_replicas else {}),
    }


def http_settings(options: DeployOptions) -> dict[str, Any]:
    """Return where Serve's proxies listen: that of the head node alone if the address is its own."""
    is_loopback = options.http_host in ("127.0.0.1", "localhost", "::1")
    return {
        "proxy_location": "HeadOnly" if is_loopback else "EveryNode",
        "http_options": {"host": options.http_host, "port": options.http_port},
    }


def serve_config(config: EngineConfig, serving: ServeOptions, options: DeployOptions) -> dict[str, Any]:
    """Return the configuration, as `serve deploy` and KubeRay's serveConfigV2 take it."""
    check_deployment(config, options)
    deployments = deployment_options(config, serving, options)
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": IMPORT_PATH,
        "args": application_args(config, serving, options),
        "deployments": [{"name": name, **given} for name, given in deployments.items()],
    }
    return {**http_settings(options), "applications": [application]}
