"""The flags of all commands: fields of EngineConfig, sampling parameters, and options of serving.

The defaults are EngineConfig's: a flag that is not given is not passed on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from quire.cli.vllm_flags import add_vllm_flags, no_effect_notices, vllm_settings
from quire.config import (
    ASSOCIATIONS,
    ATTENTIONS,
    DEVICES,
    DTYPE_ALIASES,
    DTYPES,
    EXECUTORS,
    KV_DTYPES,
    MAP_AHEAD_MODES,
    MEMORIES,
    ON_RANK_FAILURE,
    PAGE_SIZES,
    POOLINGS,
    PREEMPTIONS,
    QUANTIZATIONS,
    RETENTIONS,
    STATE_DTYPES,
    TABLE_SCOPES,
    EngineConfig,
)
from quire.errors import InputError
from quire.protocol.device_params import Param
from quire.protocol.kv_cache_config import VISION_CACHES
from quire.protocol.sampling_params import MAX_LOGPROBS, PARAMS

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")  # trace would log the contents of requests


class Flag(NamedTuple):
    """A setting on the command line. `kind` bool makes --name, and also --no-name if the default is True."""

    name: str
    kind: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    metavar: str | None = None


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object on the command line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not JSON") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no JSON object")
    return value


BEAMS = {"length_penalty", "early_stopping"}
EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}

ENGINE_FLAGS = (
    Flag("kv_gib", float, "size of the KV memory in GiB (default: fitted to the device)", metavar="GIB"),
    Flag("kv_tokens", int, "size of the KV memory in tokens", metavar="N"),
    Flag("page_size", int, "tokens of a page", aliases=("--block-size",), metavar="N"),
    Flag("memory", str, "KV memory: paged; uniform: every layer keeps every token; virtual: contiguous addresses with "
         "mapped pages; the others: baselines that reserve memory", MEMORIES),
    Flag("virtual_page_kib", int, "page size of --memory virtual in KiB (default: 2048 on a GPU, from 64 on a CPU)",
         metavar="N"),
    Flag("virtual_layout", str, "buffers of --memory virtual: layer (one per layer), sliced (one for all), or sliced:N",
         metavar="LAYOUT"),
    Flag("map_ahead", str, "when --memory virtual maps the pages of the next step: inline or in a thread while a step "
         "computes, or off: between steps", MAP_AHEAD_MODES),
    Flag("table_scope", str, "one page table for all layers, or one per layer", TABLE_SCOPES),
    Flag("page_sizes", str, "pages of different layer types: lcm: parts of large pages; max: padded to one size; gcd: "
         "one size for fewer layers each; own: a fixed share of the memory for each size", PAGE_SIZES),
    Flag("association", str, "sequences that share a large page: paper: none; bulk: only for what does not fill a "
         "large page; none: any", ASSOCIATIONS),
    Flag("attention", str, "the attention backend", ATTENTIONS),
    Flag("dtype", str, "number format of weights and KV", (*DTYPES, *DTYPE_ALIASES)),
    Flag("state_dtype", str, "number format of recurrent states (Mamba); auto: float32", STATE_DTYPES),
    Flag("quantization", str, "quantize the weights of linear layers to this format while loading", QUANTIZATIONS,
         ("-q",)),
    Flag("kv_cache_dtype", str, "number format of KV; auto: that of the model; int8: on a CPU, with a scale per token "
         "and head", KV_DTYPES),
    Flag("device", str, "device to compute on", DEVICES),
    Flag("revision", str, "branch, tag or commit of a model on the hub", metavar="REV"),
    Flag("threads", int, "CPU threads (default: one per core, within the limit of a container)", metavar="N"),
    Flag("model_config", str, "a built-in configuration instead of a model, with --dummy-weights", metavar="NAME"),
    Flag("dummy_weights", bool, "random weights, for benchmarks"),
    Flag("max_model_len", int, "longest sequence, in tokens", metavar="N"),
    Flag("max_num_seqs", int, "most sequences in memory at once (default: 256; on a GPU 1024)", metavar="N"),
    Flag("max_num_batched_tokens", int, "most tokens computed in one step (default: 2048; on a GPU 8192)", metavar="N"),
    Flag("max_num_queued_reqs", int, "most waiting requests; further ones are refused", metavar="N"),
    Flag("max_images", int, "most images of a request, with a vision model", metavar="N"),
    Flag("vision_cache", str, "image embeddings until they are used: pages: in pages of their own, cached for other "
         "requests; inside: in pages of KV that is not computed yet; off: each chunk of a prompt encodes its images "
         "again", VISION_CACHES),
    Flag("max_image_pixels", int, "most pixels of an image, width times height", metavar="N"),
    Flag("max_image_bytes", int, "most bytes of a request's image files together", metavar="N"),
    Flag("gpu_memory_utilization", float, "share of the GPU's memory to use", metavar="X"),
    Flag("enable_prefix_caching", bool, "reuse the KV of common prefixes"),
    Flag("prefix_tokens", int, "tokens of the KV memory reserved for registered prefixes", metavar="N"),
    Flag("state_tokens", int, "interval in tokens at which recurrent states are cached (Mamba)", metavar="N"),
    Flag("retention", str, "cached pages that left a window, and recurrent states: paper: keep all; slack: the latest; "
         "boundary: also those where a prompt ends or prompts diverge", RETENTIONS),
    Flag("preemption", str, "how to preempt a request when memory is short; auto: the cheaper way", PREEMPTIONS),
    Flag("swap_gib", float, "host memory for swapped requests, in GiB", aliases=("--swap-space",), metavar="GIB"),
    Flag("calibration", str, "measured costs of preemption: a file of `quire bench preemption`", metavar="FILE"),
    Flag("seed", int, "seed of requests that have none", metavar="N"),
    Flag("tokenizer", str, "folder or hub id of another tokenizer", metavar="PATH"),
    Flag("skip_tokenizer_init", bool, "use token ids only, without a tokenizer"),
    Flag("generation_config", str, "source of sampling defaults: auto (the model's generation_config.json), vllm "
         "(none) or a folder with such a file", metavar="VALUE"),
    Flag("override_generation_config", json_object, "sampling defaults that override these, as JSON", metavar="JSON"),
    Flag("depth", int, "steps in flight at once", metavar="N"),
    Flag("deterministic", bool, "outputs don't depend on the other requests of a batch; on a CPU, for dense models"),
    Flag("cuda_graphs", bool, "replay steps of up to 1,024 tokens as CUDA graphs; on a CPU, recorded decode steps"),
    Flag("warm_up", bool, "on a GPU, compile kernels and capture graphs at start, not at first use"),
    Flag("tp", int, "tensor parallelism: ranks that share each layer, each a process", metavar="N",
         aliases=("-tp", "--tensor-parallel-size")),
    Flag("pp", int, "pipeline parallelism: stages of layers, with --tp ranks each", metavar="N",
         aliases=("-pp", "--pipeline-parallel-size")),
    Flag("executor", str, "where the model runs: inline: in the engine's process; process: a process per rank; ray: "
         "processes placed by Ray; auto: inline with one rank, else process", EXECUTORS),
    Flag("ray_address", str, "the Ray cluster for --executor ray (default: that of RAY_ADDRESS, if it is your own on "
         "this host, else a new one for the ranks)", metavar="HOST:PORT"),
    Flag("rank_timeout", float, "seconds that a rank may take for a step; five times as many to start",
         metavar="S"),
    Flag("on_rank_failure", str, "after a rank fails: exit, or restart the ranks and recompute all requests",
         ON_RANK_FAILURE),
    Flag("pooling", str, "embeddings from the hidden states of all tokens of a text (mean), or of the last one; auto: "
         "as in the checkpoint, else last", POOLINGS),
    Flag("log_plans", str, "write every step's plan and result to a file, for `quire replay`", metavar="FILE"),
    Flag("debug", bool, "check invariants, and show tracebacks"),
)  # fmt: skip


def _param_flag(name: str, kind: type, optional: bool, default: Any, param: Param) -> Flag:
    bounds = f" ({param.low:g} to {param.high:g})" if kind is float else ""
    return Flag(name, kind, param.doc + bounds, metavar="X" if kind is float else "N")


SAMPLING_FLAGS = (
    *(_param_flag(*declared) for declared in PARAMS if declared.param.flag),
    Flag("early_stopping", str, "when beam search ends", tuple(EARLY_STOPPING)),
)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL and a flag for every field of EngineConfig."""
    parser.add_argument("model", nargs="?", default="", metavar="MODEL",
                        help="a folder or hub id, in the Hugging Face format, or a GGUF file (default: the bundled "
                        "model)")  # fmt: skip
    group = parser.add_argument_group("engine")
    defaults = {field.name: field.default for field in fields(EngineConfig)}
    for flag in ENGINE_FLAGS:
        _add(group, flag, defaults[flag.name])
    group.add_argument("--no-generation-config", dest="generation_config", action="store_const", const="vllm",
                       default=argparse.SUPPRESS, help="--generation-config vllm")  # fmt: skip
    add_vllm_flags(parser)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of sampling. Defaults come from the model."""
    group = parser.add_argument_group("sampling")
    for flag in SAMPLING_FLAGS:
        _add(group, flag, None)
    group.add_argument("--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS,
                       help="stop before this text; may be repeated")  # fmt: skip


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire serve`."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    group.add_argument("--root-path", default="", metavar="PATH",
                       help="path prefix of a proxy, which may remove it or leave it")  # fmt: skip
    group.add_argument("--max-connections", type=int, metavar="N",
                       help="most open connections (default: as many as the limit of open files allows)")  # fmt: skip
    group.add_argument("--engine-process", choices=("on", "off"), default="on",
                       help="run the engine in its own process, or in a thread (default: %(default)s)")  # fmt: skip
    group.add_argument("--on-engine-death", choices=("exit", "restart"), default="exit",
                       help="if the engine's process dies: exit, or restart it (default: %(default)s)")  # fmt: skip
    group.add_argument("--fronts", "--api-server-count", type=int, default=1, metavar="N",
                       help="processes that serve HTTP, if one is too slow (default: %(default)s)")  # fmt: skip
    group.add_argument("--shutdown-timeout", type=float, default=30.0, metavar="S",
                       help="seconds for requests to end after SIGTERM (default: %(default)s)")  # fmt: skip
    group.add_argument("--ssl-keyfile", metavar="FILE", help="serve TLS with this private key, in PEM format")
    group.add_argument("--ssl-certfile", metavar="FILE", help="the certificate for it, with its chain, in PEM format")
    _add_request_flags(parser.add_argument_group("requests"))
    _add_log_flags(parser.add_argument_group("logs and metrics"))


def _add_request_flags(group: Any) -> None:
    group.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME", help="names to answer to")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja chat template in place of the model's")
    group.add_argument("--tool-call-parser", metavar="NAME", help="how the model writes tool calls: hermes, json, "
                       "llama3_json, mistral or pythonic (default: detected from its chat template)")  # fmt: skip
    group.add_argument("--reasoning-parser", metavar="NAME", help="how the model writes its reasoning: think, "
                       "deepseek_r1, granite, mistral, seed_oss or off (default: detected from its chat "
                       "template)")  # fmt: skip
    group.add_argument("--api-key-file", metavar="FILE", help="keys that clients must send, one per line "
                       "(or one key in the environment: QUIRE_API_KEY)")  # fmt: skip
    group.add_argument("--admin-key-file", metavar="FILE", help="keys for the admin routes, one per line (or one key "
                       "in the environment: QUIRE_ADMIN_KEY; without a key these routes are closed)")  # fmt: skip
    group.add_argument("--allowed-origins", nargs="+", default=(), metavar="ORIGIN", help="origins of web pages that "
                       "may send requests: https://HOST or *, several, or a JSON list (default: none)")  # fmt: skip
    group.add_argument("--max-logprobs", type=int, default=MAX_LOGPROBS, metavar="N",
                       help="most log-probabilities that a request may ask for (default: %(default)s)")  # fmt: skip
    group.add_argument("--strict", action="store_true", help="refuse requests that have unknown fields")
    group.add_argument("--store-responses", type=int, default=0, metavar="N",
                       help="keep the last N responses of /v1/responses in memory, for previous_response_id "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument("--prefixes", metavar="FILE", help="prefixes to register at start, as JSON: "
                       '{"NAME": {"text": "..."} or {"token_ids": [...]}}; see --prefix-tokens')  # fmt: skip


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire run-batch`."""
    group = parser.add_argument_group("batch")
    group.add_argument("-i", "--input-file", required=True, metavar="FILE",
                       help="requests, one per line: custom_id, method, url and body")  # fmt: skip
    group.add_argument("-o", "--output-file", required=True, metavar="FILE", help="file for the answers")
    group.add_argument("--resume", action="store_true", help="continue an interrupted run, and keep its answers")
    group.add_argument("--max-in-flight", type=int, default=256, metavar="N",
                       help="most lines answered at once (default: %(default)s)")  # fmt: skip
    group.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME", help="names that bodies may give")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja chat template in place of the model's")


def _add_log_flags(group: Any) -> None:
    group.add_argument("--access-log", action="store_true", help="log every HTTP request")
    group.add_argument("--enable-log-requests", action="store_true",
                       help="log every request that is queued: its sizes and parameters, not its text")  # fmt: skip
    group.add_argument("--uvicorn-log-level", choices=LOG_LEVELS, default="warning",
                       help="log level of the HTTP library (default: %(default)s)")  # fmt: skip
    group.add_argument("--metrics-prefix", choices=("quire", "vllm"), default="quire",
                       help="prefix of metrics: quire_..., or vllm:... for vLLM's dashboards")  # fmt: skip
    group.add_argument("--enable-server-info", action="store_true",
                       help="enable GET /server_info: the settings and the memory plan, for admins")  # fmt: skip
    group.add_argument("--enable-tokenizer-info-endpoint", action="store_true",
                       help="enable GET /tokenizer_info: the tokenizer's settings and the chat template")  # fmt: skip
    group.add_argument("--no-console", dest="console", action="store_false", help="no page at /console")


def _add(group: Any, flag: Flag, default: object) -> None:
    name = "--" + flag.name.replace("_", "-")
    shown = "" if default in (None, "", False, True) else f" (default: {default})"
    options: dict[str, Any] = {"dest": flag.name, "default": argparse.SUPPRESS, "help": flag.help + shown}
    if flag.kind is bool:
        options["action"] = argparse.BooleanOptionalAction if default is True else "store_true"
    else:
        options |= {"type": flag.kind, "metavar": flag.metavar, "choices": flag.choices or None}
    group.add_argument(name, *flag.aliases, **options)


def config_from(args: argparse.Namespace) -> EngineConfig:
    """Return the EngineConfig of the flags. Raise StartupError for a value out of range."""
    given = {flag.name: getattr(args, flag.name) for flag in ENGINE_FLAGS if hasattr(args, flag.name)}
    no_effect_notices(args)
    return EngineConfig(**{"model": args.model, **given, **vllm_settings(args)})


def sampling_from(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given. --seed is both the engine's and the request's."""
    names = (*(flag.name for flag in SAMPLING_FLAGS), "stop", "seed")
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if "early_stopping" in given:
        given["early_stopping"] = EARLY_STOPPING[given["early_stopping"]]
    if "beam_width" not in given:
        for name in BEAMS & given.keys():
            raise InputError(f"--{name.replace('_', '-')} needs --beam-width", name)
    return given
