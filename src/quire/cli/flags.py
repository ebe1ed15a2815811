"""The flags of all commands: settings of the engine, sampling parameters, and options of serving.

The flags of the engine are made from the fields of EngineConfig and Experiment: a flag that is not given is not passed
on.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Any

from quire.cli.parser import Advanced, HelpAll, json_object
from quire.cli.vllm_flags import SETTING_PARSERS, add_vllm_flags, no_effect_notices, vllm_settings
from quire.config import RESERVED_MEMORIES, EngineConfig, Experiment, Setting, flag_of
from quire.deploy.serve_config import SERVE_OPTIONS, DeployOptions
from quire.errors import InputError
from quire.protocol.device_params import Param
from quire.protocol.sampling_params import PARAMS
from quire.server.options import FIRST_OPTIONS, ServeOptions

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
    """Add the flags of `quire serve`, from the fields of ServeOptions."""
    group: Any = None
    for field in fields(ServeOptions):
        if field.name in FIRST_OPTIONS:
            group = parser.add_argument_group(FIRST_OPTIONS[field.name])
        if field.metadata:
            _add_setting(group, field)


def add_deploy_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire deploy`: those of DeployOptions, and those of `quire serve` that it has too."""
    parser.usage = f"{parser.prog} ray [MODEL] [FLAGS]"
    group = parser.add_argument_group("application")
    for field in fields(DeployOptions):
        _add_setting(group, field)
    group = parser.add_argument_group("requests, logs and metrics")
    for option in fields(ServeOptions):
        if option.name in SERVE_OPTIONS:
            _add_setting(group, option)


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `quire run-batch`."""
    group = parser.add_argument_group("batch")
    group.add_argument("-i", "--input-file", required=True, metavar="FILE",
                       help="requests, one per line: custom_id, method, url and body")  # fmt: skip
    group.add_argument("-o", "--output-file", required=True, metavar="FILE", help="file for the answers")
    group.add_argument("--resume", action="store_true", help="continue an interrupted run, and keep its answers")
    group.add_argument("--max-in-flight", type=int, default=256, metavar="N",
                       help="most lines answered at once (default: %(default)s)")  # fmt: skip
    for field in fields(ServeOptions):
        if field.name in ("served_model_name", "chat_template"):
            _add_setting(group, field)


def _add_setting(group: Any, field: Field[Any]) -> None:
    """Add the flag of a field of EngineConfig, Experiment or ServeOptions."""
    name = str(field.type)
    if name.startswith("tuple"):
        setting = field.metadata["setting"]
        group.add_argument(flag_of(field), nargs="+", metavar=setting.metavar, default=argparse.SUPPRESS,
                           help=setting.help)  # fmt: skip
        return
    _add(group, field.name, KINDS.get(name.split()[0], json_object), field.metadata["setting"], field.default)


def _add(group: Any, name: str, kind: Callable[[str], Any], setting: Setting, default: object = None) -> None:
    """Add --name, which sets nothing unless given. If `kind` is bool it takes no value; if True is the default, there
    is --no-name too, or only a `flag` of that form."""
    flag = setting.flag or f"--{name.replace('_', '-')}"
    help = (
        setting.help if default in (None, "") or isinstance(default, bool) else f"{setting.help} (default: {default})"
    )
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
    options["help"] = Advanced(help) if setting.advanced else help
    if kind is bool:
        both = argparse.BooleanOptionalAction if default is True else "store_true"
        options["action"] = "store_false" if flag.startswith("--no-") else both
    else:
        metavar = setting.metavar or ("N" if kind is int else "X" if kind is float else None)
        options |= {"type": SETTING_PARSERS.get(name, kind), "metavar": metavar, "choices": setting.choices or None}
    group.add_argument(flag, *setting.aliases, **options)


def config_from(args: argparse.Namespace) -> EngineConfig:
    """Return the EngineConfig of the flags. Raise StartupError for a value out of range."""
    no_effect_notices(args)
    return EngineConfig.of(**given_fields(args, EngineConfig, Experiment) | vllm_settings(args))


def given_fields(args: argparse.Namespace, *classes: type) -> dict[str, Any]:
    """Return the fields of data classes whose flags were given."""
    names = [field.name for one in classes for field in fields(one)]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


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
