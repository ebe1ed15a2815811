"""One table of flags for every command: EngineConfig's fields, then those of sampling and of serving.

Defaults are EngineConfig's own: a flag that isn't given isn't passed on.
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
    VISION_CACHES,
    EngineConfig,
)
from quire.errors import InputError
from quire.protocol.sampling_params import MAX_LOGPROBS

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")  # trace would log what requests say


class Flag(NamedTuple):
    """A setting on the command line. `kind` bool gives --name and --no-name; `short` ones only --name."""

    name: str
    kind: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    metavar: str | None = None


def json_object(text: str) -> dict[str, Any]:
    """A JSON object on the command line."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not JSON") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no JSON object")
    return found


BEAMS = {"length_penalty", "early_stopping"}
EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}

ENGINE_FLAGS = (
    Flag("kv_gib", float, "size of the KV memory in GiB (default: fitted to the device)", metavar="GIB"),
    Flag("kv_tokens", int, "size of the KV memory in tokens", metavar="N"),
    Flag("page_size", int, "tokens of a page", aliases=("--block-size",), metavar="N"),
    Flag("memory", str, "how the KV memory is managed: in pages, in pages that are alike for all layers, in pages "
         "mapped under contiguous addresses, or as earlier systems did", MEMORIES),
    Flag("virtual_page_kib", int, "KiB of a page that --memory virtual maps (default: 2048 on a GPU, from 64 on a CPU)",
         metavar="N"),
    Flag("virtual_layout", str, "buffers of --memory virtual: layer (one a layer), sliced (one for all), or sliced:N",
         metavar="HOW"),
    Flag("map_ahead", str, "when --memory virtual maps what the next step needs: while one computes, the same in a "
         "thread, or in its way", MAP_AHEAD_MODES),
    Flag("table_scope", str, "one page table for all layers, or one a layer", TABLE_SCOPES),
    Flag("page_sizes", str, "pages of layers of unlike kinds: parts of large pages, of one size with padding, of one "
         "size for fewer layers, or in a share of the memory for each size", PAGE_SIZES),
    Flag("association", str, "whose pages lie together in a large page: one sequence's, one's as far as they fill it, "
         "or anyone's", ASSOCIATIONS),
    Flag("attention", str, "the attention backend", ATTENTIONS),
    Flag("dtype", str, "number format of weights and KV", (*DTYPES, *DTYPE_ALIASES)),
    Flag("state_dtype", str, "number format of running states (Mamba); auto: float32", STATE_DTYPES),
    Flag("quantization", str, "round the weights of linear layers to this format while loading", QUANTIZATIONS,
         ("-q",)),
    Flag("kv_cache_dtype", str, "number format of KV; auto: as the model computes; int8: on a CPU, with a scale "
         "for each token's heads", KV_DTYPES),
    Flag("device", str, "where to compute", DEVICES),
    Flag("revision", str, "branch, tag or commit of a hub's model", metavar="REV"),
    Flag("threads", int, "CPU threads (default: one a core, no more than a container may use at once)", metavar="N"),
    Flag("model_config", str, "a named shape instead of a model, with --dummy-weights", metavar="NAME"),
    Flag("dummy_weights", bool, "random weights: for measuring"),
    Flag("max_model_len", int, "longest sequence, in tokens", metavar="N"),
    Flag("max_num_seqs", int, "most sequences in memory at once (default: 256; on a GPU 1024)", metavar="N"),
    Flag("max_num_batched_tokens", int, "most tokens computed in one step (default: 2048; on a GPU 8192)", metavar="N"),
    Flag("max_num_queued_reqs", int, "most requests waiting; others are refused", metavar="N"),
    Flag("max_images", int, "most pictures of a request, where the model sees", metavar="N"),
    Flag("vision_cache", str, "where embeddings of pictures lie until they are used: in pages of their own, where they "
         "stay for others; in those of keys and values to come; or nowhere: each chunk encodes again", VISION_CACHES),
    Flag("max_image_pixels", int, "most pixels of a picture, width times height", metavar="N"),
    Flag("max_image_bytes", int, "most bytes of a request's pictures, as files", metavar="N"),
    Flag("gpu_memory_utilization", float, "share of the GPU's memory to use", metavar="X"),
    Flag("enable_prefix_caching", bool, "reuse the KV of common prefixes"),
    Flag("prefix_tokens", int, "tokens of the KV memory kept for registered prefixes", metavar="N"),
    Flag("state_tokens", int, "tokens after each of which a running state can be found again (Mamba)", metavar="N"),
    Flag("retention", str, "what stays cached of what left a window, and of running states: all of it, the last, or "
         "also those where a prompt ends or prompts part", RETENTIONS),
    Flag("preemption", str, "what happens to a request when memory is short; auto: what costs less", PREEMPTIONS),
    Flag("swap_gib", float, "host memory for swapped requests, in GiB", aliases=("--swap-space",), metavar="GIB"),
    Flag("calibration", str, "what preemption costs here: a file of `quire bench preemption`", metavar="FILE"),
    Flag("seed", int, "seed of requests that bring none", metavar="N"),
    Flag("tokenizer", str, "folder or hub id of another tokenizer", metavar="PATH"),
    Flag("skip_tokenizer_init", bool, "work with token ids only"),
    Flag("generation_config", str, "where sampling defaults come from: auto (the model's generation_config.json), vllm "
         "(nowhere) or a folder with such a file", metavar="VALUE"),
    Flag("override_generation_config", json_object, "sampling defaults that win over these, as JSON", metavar="JSON"),
    Flag("depth", int, "steps in flight at once", metavar="N"),
    Flag("deterministic", bool, "tokens don't depend on what else is in a batch; on a CPU, of dense models"),
    Flag("cuda_graphs", bool, "replay steps: up to 1,024 tokens as CUDA graphs; on a CPU one token a row, as tapes"),
    Flag("warm_up", bool, "on a GPU, compile kernels and capture graphs at start, not when they are first needed"),
    Flag("tp", int, "ranks that divide each layer of the model, each a process", metavar="N",
         aliases=("-tp", "--tensor-parallel-size")),
    Flag("pp", int, "stages of layers, of --tp ranks each", metavar="N", aliases=("-pp", "--pipeline-parallel-size")),
    Flag("executor", str, "where the model is: with the engine, or in a process for each rank; auto: with one rank "
         "the former; ray: Ray places the processes", EXECUTORS),
    Flag("ray_address", str, "the Ray cluster for --executor ray; without it that of RAY_ADDRESS, if it is your own on "
         "this host, or one that is started for the ranks alone", metavar="HOST:PORT"),
    Flag("rank_timeout", float, "seconds that a rank may take for a step; five times as many to start",
         metavar="S"),
    Flag("on_rank_failure", str, "what follows when a rank fails: the engine's end, or ranks that are started anew "
         "and compute all requests again", ON_RANK_FAILURE),
    Flag("pooling", str, "what embeddings are made of: hidden states of all tokens of a text, or of the last; auto: as "
         "the checkpoint says, else the last", POOLINGS),
    Flag("log_plans", str, "write every step's plan and result to a file, for `quire replay`", metavar="FILE"),
    Flag("debug", bool, "check everything, and show tracebacks"),
)  # fmt: skip

SAMPLING_FLAGS = (
    Flag("max_tokens", int, "tokens to generate", metavar="N"),
    Flag("temperature", float, "0 is greedy", metavar="X"),
    Flag("top_p", float, "keep the most likely tokens up to this probability", metavar="X"),
    Flag("top_k", int, "keep this many tokens", metavar="N"),
    Flag("min_p", float, "drop tokens below this share of the best one's probability", metavar="X"),
    Flag("presence_penalty", float, "from -2 to 2", metavar="X"),
    Flag("frequency_penalty", float, "from -2 to 2", metavar="X"),
    Flag("repetition_penalty", float, "above 1 discourages repetition", metavar="X"),
    Flag("n", int, "continuations of each prompt", metavar="N"),
    Flag("best_of", int, "generate so many, and return the n most likely", metavar="N"),
    Flag("beam_width", int, "beam search with so many beams; the best n are returned", metavar="N"),
    Flag("length_penalty", float, "of beams: above 0 favours long ones, below 0 short ones", metavar="X"),
    Flag("early_stopping", str, "when beam search ends", tuple(EARLY_STOPPING)),
    Flag("ignore_eos", bool, "go on after end tokens"),
)


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL and every field of EngineConfig."""
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
    """How to choose tokens; what isn't given comes from the model."""
    group = parser.add_argument_group("sampling")
    for flag in SAMPLING_FLAGS:
        _add(group, flag, None)
    group.add_argument("--stop", action="append", metavar="TEXT", default=argparse.SUPPRESS,
                       help="stop before this text; may be given repeatedly")  # fmt: skip


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Where and how to serve."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="port to listen on (default: %(default)s)")
    group.add_argument("--root-path", default="", metavar="PATH",
                       help="path prefix of a proxy in front, which may strip it or leave it there")  # fmt: skip
    group.add_argument("--max-connections", type=int, metavar="N",
                       help="most connections at once (default: what descriptors allow)")  # fmt: skip
    group.add_argument("--engine-process", choices=("on", "off"), default="on",
                       help="the engine has a process of its own, or a thread (default: %(default)s)")  # fmt: skip
    group.add_argument("--on-engine-death", choices=("exit", "restart"), default="exit",
                       help="what to do when its process dies; restart does once (default: %(default)s)")  # fmt: skip
    group.add_argument("--fronts", "--api-server-count", type=int, default=1, metavar="N",
                       help="processes that speak HTTP, for loads that one can't (default: %(default)s)")  # fmt: skip
    group.add_argument("--shutdown-timeout", type=float, default=30.0, metavar="S",
                       help="seconds that requests have to end after SIGTERM (default: %(default)s)")  # fmt: skip
    group.add_argument("--ssl-keyfile", metavar="FILE", help="speak TLS: the private key, in PEM format")
    group.add_argument("--ssl-certfile", metavar="FILE", help="and its certificate, with those up to the root")
    _add_request_flags(parser.add_argument_group("requests"))
    _add_log_flags(parser.add_argument_group("logs and metrics"))


def _add_request_flags(group: Any) -> None:
    group.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME", help="names to answer to")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja chat template in place of the model's")
    group.add_argument("--tool-call-parser", metavar="NAME", help="how the model writes calls of tools: hermes, json, "
                       "llama3_json, mistral or pythonic (default: as its chat template says)")  # fmt: skip
    group.add_argument("--reasoning-parser", metavar="NAME", help="how the model writes its thoughts: think, "
                       "deepseek_r1, granite, mistral, seed_oss or off (default: as its template says)")  # fmt: skip
    group.add_argument("--api-key-file", metavar="FILE", help="keys that clients must present, one a line "
                       "(or one in the environment: QUIRE_API_KEY)")  # fmt: skip
    group.add_argument("--admin-key-file", metavar="FILE", help="keys for the admin routes, one a line "
                       "(or one in the environment: QUIRE_ADMIN_KEY; without any these routes are shut)")  # fmt: skip
    group.add_argument("--allowed-origins", nargs="+", default=(), metavar="ORIGIN", help="web pages that may ask from "
                       "a browser, as https://HOST or *; several, or a JSON list (default: none)")  # fmt: skip
    group.add_argument("--max-logprobs", type=int, default=MAX_LOGPROBS, metavar="N",
                       help="most log-probabilities that requests may ask for (default: %(default)s)")  # fmt: skip
    group.add_argument("--strict", action="store_true", help="refuse requests that have unknown fields")
    group.add_argument("--store-responses", type=int, default=0, metavar="N",
                       help="keep the last N responses of /v1/responses in memory, for previous_response_id "
                       "(default: %(default)s)")  # fmt: skip
    group.add_argument("--prefixes", metavar="FILE", help="prefixes to register at start, as JSON: "
                       '{"NAME": {"text": "..."} or {"token_ids": [...]}}; see --prefix-tokens')  # fmt: skip


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Which file to answer, and how."""
    group = parser.add_argument_group("batch")
    group.add_argument("-i", "--input-file", required=True, metavar="FILE",
                       help="requests, one a line: custom_id, method, url and body")  # fmt: skip
    group.add_argument("-o", "--output-file", required=True, metavar="FILE", help="where their answers go")
    group.add_argument("--resume", action="store_true", help="keep what a run that was cut short answered")
    group.add_argument("--max-in-flight", type=int, default=256, metavar="N",
                       help="most lines answered at once (default: %(default)s)")  # fmt: skip
    group.add_argument("--served-model-name", nargs="+", default=(), metavar="NAME", help="names that bodies may give")
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja chat template in place of the model's")


def _add_log_flags(group: Any) -> None:
    group.add_argument("--access-log", action="store_true", help="log every HTTP request")
    group.add_argument("--enable-log-requests", action="store_true",
                       help="log every request that is queued: its sizes and parameters, not its text")  # fmt: skip
    group.add_argument("--uvicorn-log-level", choices=LOG_LEVELS, default="warning",
                       help="what the HTTP library logs (default: %(default)s)")  # fmt: skip
    group.add_argument("--metrics-prefix", choices=("quire", "vllm"), default="quire",
                       help="names of metrics: quire_... or vllm:..., for dashboards of vLLM")  # fmt: skip
    group.add_argument("--enable-server-info", action="store_true",
                       help="have GET /server_info tell admins the settings and the memory plan")  # fmt: skip
    group.add_argument("--enable-tokenizer-info-endpoint", action="store_true",
                       help="have GET /tokenizer_info tell the tokenizer's settings and the chat template")  # fmt: skip
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
    """The EngineConfig that the flags describe. StartupError for values out of range."""
    given = {flag.name: getattr(args, flag.name) for flag in ENGINE_FLAGS if hasattr(args, flag.name)}
    no_effect_notices(args)
    return EngineConfig(**{"model": args.model, **given, **vllm_settings(args)})


def sampling_from(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given. --seed is both the engine's and the request's."""
    names = (*(flag.name for flag in SAMPLING_FLAGS), "stop", "seed")
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if "early_stopping" in given:
        given["early_stopping"] = EARLY_STOPPING[given["early_stopping"]]
    if "beam_width" not in given:
        for name in BEAMS & given.keys():
            raise InputError(f"--{name.replace('_', '-')} needs --beam-width", name)
    return given
