"""vLLM's flags: other names of quire's settings, flags without effect, and the reasons why other flags are not
supported."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from quire.cli.parser import Advanced, json_object
from quire.config import parse_speculative_config
from quire.errors import StartupError

BACKEND_NAMES = {
    "auto": "auto", "native": "native", "reference": "reference", "sdpa": "sdpa", "torch_sdpa": "sdpa",
    "triton": "triton", "triton_attn": "triton",
}  # fmt: skip
# Flags whose values have other names in quire: (the flag in argparse, quire's setting, quire's values by vLLM's).
RENAMED_VALUES = (
    ("attention_backend", "attention", BACKEND_NAMES),
    ("distributed_executor_backend", "executor", {"mp": "process", "uni": "inline", "ray": "ray"}),
)
LOAD_FORMATS = ("auto", "safetensors", "dummy")
SIZE_PATTERN = re.compile(r"(\d{1,18}(?:\.\d{1,9})?)([kKmMgGtT]?)")
SIZE_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

# Flags without effect, and the behavior that quire always has.
NO_EFFECT_FLAGS = {
    "--async-scheduling": "--depth is the number of steps in flight, 2 on a GPU",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--disable-frontend-multiprocessing": "--engine-process off gives one process",
    "--disable-log-requests": "requests are logged only with --enable-log-requests",
    "--no-enable-log-requests": "requests are logged only with --enable-log-requests",
    "--disable-log-stats": "a status line is written only while something happens, and /metrics costs a step nothing",
    "--disable-uvicorn-access-log": "HTTP requests are logged only with --access-log",
    "--enable-sleep-mode": "an engine can always sleep: POST /sleep",
    "--enable-auto-tool-choice": "tool calls are always parsed",
    "--enable-prompt-tokens-details": "usage always has them",
    "--enable-request-id-headers": "every response has an X-Request-Id",
    "--enable-server-load-tracking": "/load always answers",
    "--no-trust-remote-code": "no code of a model's folder ever runs",
}
# Flags without effect that take any value, and quire's flags for the same purpose.
NO_EFFECT_SETTINGS = dict.fromkeys(
    ("-O", "--optimization-level", "-cc", "--compilation-config"), "see --cuda-graphs and --warm-up"
)
# Flags of which only these values are accepted, without effect; other values are refused for a reason below.
SINGLE_VALUE_FLAGS = {
    "--data-parallel-size": ("1",), "--scheduling-policy": ("fcfs",),
    "--tokenizer-mode": ("auto", "hf"), "--config-format": ("auto", "hf"), "--runner": ("auto", "generate"),
}  # fmt: skip
# Prefixes of flags, and why quire does not have such flags.
UNSUPPORTED_FLAGS = (
    ("distributed-", "ranks need no settings of torch.distributed; see --executor"),
    ("data-parallel nnodes node-rank master-addr master-port ray- worker- disable-custom-all-reduce "
     "decode-context-parallel prefill-context-parallel enable-eplb eplb- enable-dbo headless",
     "--tp divides a model among ranks of one host; start several servers behind a load balancer"),
    ("enable-lora lora- max-lora max-cpu-lora fully-sharded-lora default-mm-lora", "merge adapters into the weights"),
    ("cpu-offload kv-offloading", "all is on the device; see --dtype, --quantization and --kv-cache-dtype"),
    ("calculate-kv-scales kv-cache-dtype-skip", "every head and token has a scale of its own, in all layers"),
    ("speculative- num-lookahead spec- ngram-", "see --speculative-config and --speculative-model"),
    ("tool-parser-plugin tool-server", "no code is loaded by name; see --tool-call-parser"),
    ("exclude-tools", "a request leaves out the tools that its prompt shouldn't have"),
    ("reasoning-parser-plugin", "no code is loaded by name; see --reasoning-parser"),
    ("enable-reasoning enable-in-reasoning reasoning-config", "reasoning is detected from the chat template; see "
     "--reasoning-parser"),
    ("guided-decoding structured-outputs", "llguidance makes all grammars; see docs/serving.md"),
    ("limit-mm", "see --max-images, --max-image-pixels and --max-image-bytes"),
    ("allowed-local-media allowed-media media-io", "images come within requests: nothing is fetched"),
    ("mm- interleave-mm skip-mm disable-mm enable-mm video- language-model-only",
     "images are prepared as their model's folder says, and there are no other media"),
    ("trust-remote-code code-revision", "no code of a model's folder ever runs"),
    ("middleware logits-processors worker-extension logits-processor", "no code is loaded by name"),
    ("api-key", "keys never come from the command line: --api-key-file FILE, or QUIRE_API_KEY"),
    ("download-dir", "set HF_HOME in the environment"),
    ("hf-token use-auth", "set HF_TOKEN in the environment"),
    ("tokenizer-mode config-format model-impl hf-config-path", "there is one way to read a model"),
    ("hf-overrides rope- override-neuron model-overrides", "a model is as its config.json says"),
    ("no-async-scheduling", "--depth 1 plans a step after the last one has ended"),
    ("cudagraph compile- max-seq-len-to-capture", "see --cuda-graphs and --warm-up"),
    ("num-gpu-blocks-override", "--kv-tokens is the size of the KV memory in tokens"),
    ("kv-transfer ec-transfer", "KV memory isn't shared between processes"),
    ("max-num-partial max-long-partial long-prefill", "--max-num-batched-tokens is the one budget of a step"),
    ("scheduling-policy", "requests are served first come, first served"),
    ("task runner convert pooler override-pooler", "it runs models that generate text"),
    ("chat-template-content-format trust-request-chat-template", "the template decides; text parts are joined"),
    ("ssl-", "TLS has a key and a certificate; anything more is a proxy's work"),
    ("uds", "it listens on TCP: --host, --port"),
    ("allowed-methods allowed-headers allow-credentials", "--allowed-origins is enough: keys come in a header"),
    ("max-log-len enable-log-outputs enable-log-deltas", "texts of requests are never logged"),
    ("tokens-only return-tokens-as-token-ids enable-force-include-usage", "requests ask for that themselves"),
    ("h11-", "headers have fixed limits"),
    ("no-enable-chunked-prefill", "prompts are always computed in chunks"),
)  # fmt: skip
SHORT_FLAGS = {"-dp": "--data-parallel-size"}
SPECULATIVE_SETTINGS = (
    "speculative_model", "speculative_method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max",
)  # fmt: skip
"""The settings that --speculative-config sets."""


def parse_size(text: str) -> int:
    """Return a number of bytes or tokens: 1k is a thousand, 1K is 1,024."""
    match = SIZE_PATTERN.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no size: 2147483648, 2G (of 1024) or 2g (of 1000)")
    return int(float(match[1]) * SIZE_FACTORS[match[2]]) if "." in match[1] else int(match[1]) * SIZE_FACTORS[match[2]]


def parse_length(text: str) -> int | None:
    """Return a number of tokens, or None, the default, for auto."""
    return None if text == "auto" else parse_size(text)


SETTING_PARSERS: dict[str, Callable[[str], int | None]] = {
    "max_model_len": parse_length,
    "max_num_batched_tokens": parse_size,
}
"""Parsers of the settings whose values may be written as in vLLM."""


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags with an effect, and those without one, which not even --help-all shows."""
    group = parser.add_argument_group("vLLM's names for settings of the engine")
    suppress = argparse.SUPPRESS
    group.add_argument("--model", dest="vllm_model", metavar="MODEL", help=Advanced("the argument MODEL"),
                       default=suppress)  # fmt: skip
    group.add_argument("--kv-cache-memory-bytes", type=parse_size, metavar="N",
                       help=Advanced("--kv-gib in bytes; 2G: 2 GiB"), default=suppress)  # fmt: skip
    group.add_argument("--attention-backend", metavar="NAME", help=Advanced("--attention, or TRITON_ATTN, TORCH_SDPA"),
                       default=suppress)  # fmt: skip
    group.add_argument("--distributed-executor-backend", metavar="NAME",
                       help=Advanced("--executor; mp: process, uni: inline, ray: ray"), default=suppress)  # fmt: skip
    group.add_argument("--load-format", choices=LOAD_FORMATS, help=Advanced("dummy: --dummy-weights"), default=suppress)
    group.add_argument("--enforce-eager", action="store_true", help=Advanced("--no-cuda-graphs"), default=suppress)
    group.add_argument("--speculative-config", "-sc", type=json_object, metavar="JSON", default=suppress,
                       help=Advanced("method, model and num_speculative_tokens for speculation"))  # fmt: skip
    for flag in NO_EFFECT_FLAGS:
        parser.add_argument(flag, dest="needless", action="append_const", const=flag, help=suppress, default=suppress)
    for flag in NO_EFFECT_SETTINGS:
        parser.add_argument(flag, dest=f"any{flag}", help=suppress, metavar="VALUE", default=suppress)
    for flag, values in SINGLE_VALUE_FLAGS.items():
        parser.add_argument(flag, dest=f"only{flag}", help=suppress, metavar="/".join(values), default=suppress)


def vllm_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of EngineConfig that vLLM's names set. Raise StartupError if quire's flags set something
    else."""
    given, settings = vars(args), dict[str, Any]()
    if "vllm_model" in given:
        settings["model"] = given["vllm_model"]
        if args.model not in ("", args.vllm_model):
            cause = f"--model is {args.vllm_model[:80]!r}, and MODEL is {args.model[:80]!r}"
            raise StartupError(cause, "Name the model once")
    if "kv_cache_memory_bytes" in given:
        if args.kv_cache_memory_bytes < 1:
            raise StartupError(f"--kv-cache-memory-bytes is {args.kv_cache_memory_bytes}", "It must be above 0")
        _check_conflict(given, "kv_cache_memory_bytes", "kv_gib", "kv_tokens")
        settings["kv_gib"] = args.kv_cache_memory_bytes / 2**30
    for name, setting, values in RENAMED_VALUES:
        if name in given:
            _check_conflict(given, name, setting)
            settings[setting] = values.get(given[name].lower())
            if settings[setting] is None:
                cause = f"--{name.replace('_', '-')} {given[name][:80]!r} is not in quire"
                raise StartupError(cause, f"Choose one of: {', '.join(values)}")
    if "load_format" in given:
        if given.get("dummy_weights") and args.load_format != "dummy":
            raise StartupError(
                f"--load-format is {args.load_format}, and --dummy-weights is given", "Choose one of them"
            )
        settings["dummy_weights"] = args.load_format == "dummy"
    if "enforce_eager" in given:
        if given.get("cuda_graphs"):
            raise StartupError("--enforce-eager and --cuda-graphs contradict each other", "Choose one of them")
        settings["cuda_graphs"] = False
    if "speculative_config" in given:
        _check_conflict(given, "speculative_config", *SPECULATIVE_SETTINGS)
        settings |= parse_speculative_config(args.speculative_config, given.get("tp", 1))
    return settings


def _check_conflict(given: dict[str, Any], name: str, *others: str) -> None:
    for other in others:
        if other in given:
            flags = [f"--{one.replace('_', '-')}" for one in (name, other)]
            raise StartupError(f"{flags[0]} and {flags[1]} are both given", "They set the same: give one of them")


def no_effect_notices(args: argparse.Namespace) -> list[str]:
    """Return notices about flags without effect. Raise StartupError for an unsupported value of a flag with one
    value."""
    lines = [
        f"{flag} changes nothing: {NO_EFFECT_FLAGS[flag]}" for flag in dict.fromkeys(getattr(args, "needless", ()))
    ]
    for flag, why in NO_EFFECT_SETTINGS.items():
        if (given := getattr(args, f"any{flag}", None)) is not None:
            lines.append(f"{flag} {given[:80]} changes nothing: {why}")
    for flag, values in SINGLE_VALUE_FLAGS.items():
        given = getattr(args, f"only{flag}", None)
        if given is not None and given.lower() not in values:
            why = unsupported_reason(flag) or ""
            cause = f"{flag} is {given[:80]!r}, and quire has only {values[0]}"
            raise StartupError(cause, why[:1].upper() + why[1:])
        if given is not None:
            lines.append(f"{flag} {given} changes nothing: it is never anything else")
    return lines


def unsupported_reason(flag: str) -> str | None:
    """Return why quire does not have the flag, or None if it is not a known flag of vLLM."""
    if not flag.startswith("-"):
        return None
    name = SHORT_FLAGS.get(flag, flag).lstrip("-")
    return next((why for starts, why in UNSUPPORTED_FLAGS if name.startswith(tuple(starts.split()))), None)
