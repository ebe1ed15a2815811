"""The flags of all commands: settings of the engine, sampling parameters, and options of serving.

The flags of the engine are made from the fields of EngineConfig and Experiment: a flag that is not given is not passed
on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

from quire.cli.parser import Advanced, HelpAll
from quire.cli.vllm_flags import add_vllm_flags, no_effect_notices, vllm_settings
from quire.config import RESERVED_MEMORIES, EngineConfig, Experiment, Setting
from quire.errors import InputError
from quire.protocol.device_params import Param
from quire.protocol.sampling_params import MAX_LOGPROBS, PARAMS

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")  # trace would log the contents of requests


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object on the command line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not JSON") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no JSON object")
    return value


KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": bool}
"""What parses a flag, by the first type in its field's annotation; others are JSON."""
EXPERIMENTS = (
    "Settings that only experiments change. --memory has more values for them: uniform (pages in which every layer "
    f"keeps every token), and baselines that reserve memory ({', '.join(RESERVED_MEMORIES)})."
)
BEAMS = {"length_penalty", "early_stopping"}
EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}


def _help(param: Param, kind: type) -> str:
    return param.doc + (f" ({param.low:g} to {param.high:g})" if kind is float else "")


SAMPLING_FLAGS = {one.name: (one.kind, _help(one.param, one.kind)) for one in PARAMS if one.param.flag}


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --help-all, and a flag for every field of EngineConfig and of its Experiment."""
    parser.add_argument("model", nargs="?", default="", metavar="MODEL",
                        help="a folder or hub id, in the Hugging Face format, or a GGUF file (default: the bundled "
                        "model)")  # fmt: skip
    parser.usage = f"{parser.prog} [MODEL] [FLAGS]"  # argparse's default lists every flag
    parser.add_argument("--help-all", action=HelpAll, nargs=0, dest="help", default=argparse.SUPPRESS,
                        help="show the options for tuning and experiments too, and exit")  # fmt: skip
    group = parser.add_argument_group("engine")
    experiments = parser.add_argument_group("experiments", Advanced(EXPERIMENTS))
    for field in fields(EngineConfig):
        if field.metadata:
            _add_setting(group, field)
    group.add_argument("--no-generation-config", dest="generation_config", action="store_const", const="vllm",
                       default=argparse.SUPPRESS, help=Advanced("--generation-config vllm"))  # fmt: skip
    for field in fields(Experiment):
        _add_setting(experiments, field)
    add_vllm_flags(parser)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of sampling. Defaults come from the model."""
    group = parser.add_argument_group("sampling")
    for name, (kind, help) in SAMPLING_FLAGS.items():
        _add(group, name, kind, Setting(help))
    _add(group, "early_stopping", str, Setting("when beam search ends", tuple(EARLY_STOPPING)))
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
                       help=Advanced("most open connections (default: as many as the limit of open files "
                                     "allows)"))  # fmt: skip
    group.add_argument("--engine-process", choices=("on", "off"), default="on",
                       help=Advanced("run the engine in its own process, or in a thread (default: "
                                     "%(default)s)"))  # fmt: skip
    group.add_argument("--on-engine-death", choices=("exit", "restart"), default="exit",
                       help=Advanced("if the engine's process dies: exit, or restart it (default: "
                                     "%(default)s)"))  # fmt: skip
    group.add_argument("--fronts", "--api-server-count", type=int, default=1, metavar="N",
                       help=Advanced("processes that serve HTTP, if one is too slow (default: "
                                     "%(default)s)"))  # fmt: skip
    group.add_argument("--shutdown-timeout", type=float, default=30.0, metavar="S",
                       help=Advanced("seconds for requests to end after SIGTERM (default: %(default)s)"))  # fmt: skip
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
                       help=Advanced("most log-probabilities that a request may ask for (default: "
                                     "%(default)s)"))  # fmt: skip
    group.add_argument("--strict", action="store_true", help=Advanced("refuse requests that have unknown fields"))
    group.add_argument("--store-responses", type=int, default=0, metavar="N",
                       help=Advanced("keep the last N responses of /v1/responses in memory, for previous_response_id "
                       "(default: %(default)s)"))  # fmt: skip
    group.add_argument("--prefixes", metavar="FILE", help=Advanced("prefixes to register at start, as JSON: "
                       '{"NAME": {"text": "..."} or {"token_ids": [...]}}; see --prefix-tokens'))  # fmt: skip


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
    group.add_argument("--enable-log-requests", dest="log_requests", action="store_true",
                       help="log every request that is queued: its sizes and parameters, not its text")  # fmt: skip
    group.add_argument("--uvicorn-log-level", choices=LOG_LEVELS, default="warning",
                       help=Advanced("log level of the HTTP library (default: %(default)s)"))  # fmt: skip
    group.add_argument("--metrics-prefix", choices=("quire", "vllm"), default="quire",
                       help=Advanced("prefix of metrics: quire_..., or vllm:... for vLLM's dashboards"))  # fmt: skip
    group.add_argument("--enable-server-info", dest="server_info", action="store_true",
                       help="enable GET /server_info: the settings and the memory plan, for admins")  # fmt: skip
    group.add_argument("--enable-tokenizer-info-endpoint", dest="tokenizer_info", action="store_true",
                       help=Advanced("enable GET /tokenizer_info: the tokenizer's settings and the chat "
                                     "template"))  # fmt: skip
    group.add_argument("--no-console", dest="console", action="store_false", help=Advanced("no page at /console"))


def _add_setting(group: Any, field: Field[Any]) -> None:
    """Add the flag of a field of EngineConfig or Experiment."""
    kind = KINDS.get(str(field.type).split()[0], json_object)
    _add(group, field.name, kind, field.metadata["setting"], field.default)


def _add(group: Any, name: str, kind: Callable[[str], Any], setting: Setting, default: object = None) -> None:
    """Add --name, which sets nothing unless given. If `kind` is bool it takes no value; if True is the default, there
    is --no-name too."""
    help = setting.help if default in (None, "", False, True) else f"{setting.help} (default: {default})"
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    options["help"] = Advanced(help) if setting.advanced else help
    if kind is bool:
        options["action"] = argparse.BooleanOptionalAction if default is True else "store_true"
    else:
        metavar = setting.metavar or ("N" if kind is int else "X" if kind is float else None)
        options |= {"type": kind, "metavar": metavar, "choices": setting.choices or None}
    group.add_argument(f"--{name.replace('_', '-')}", *setting.aliases, **options)


def config_from(args: argparse.Namespace) -> EngineConfig:
    """Return the EngineConfig of the flags. Raise StartupError for a value out of range."""
    names = [field.name for field in (*fields(EngineConfig), *fields(Experiment))]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    no_effect_notices(args)
    return EngineConfig.of(**given | vllm_settings(args))


def sampling_from(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling parameters that were given. --seed is both the engine's and the request's."""
    names = (*SAMPLING_FLAGS, "early_stopping", "stop", "seed")
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    if "early_stopping" in given:
        given["early_stopping"] = EARLY_STOPPING[given["early_stopping"]]
    if "beam_width" not in given:
        for name in BEAMS & given.keys():
            raise InputError(f"--{name.replace('_', '-')} needs --beam-width", name)
    return given
