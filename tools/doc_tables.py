"""Makes the tables of docs/ that say what the code says: flags, limits, lists of fields, and what models take.

python tools/doc_tables.py           # rewrites them
python tools/doc_tables.py --check   # says whether they are stale

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from quire.cli import build_parsers
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.files import MAX_BYTES_BY_FILE
from quire.ipc import pixel_store
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.protocol import columns, image_tiling, sampling_params
from quire.protocol.parallel_layout import Shard
from quire.server import answer_size, api_server, connections, guards, request_params
from quire.server import options as serve_options
from quire.server.request_models import IGNORED_FIELDS, MAX_INPUTS, MAX_PROMPTS, REFUSED_FIELDS
from quire.server.responses import routes
from quire.startup.memory_plan import GIB, plan_memory
from quire.text import chat_messages, input_processor, tokenizers_guard
from quire.text.images import headers, loader

DOCUMENTS = [Path(__file__).parents[1] / "docs" / name for name in ("serving.md", "parallel.md")]
MARKED = re.compile(r"<!-- table (\w+) -->\n(.*?)<!-- end of table -->\n", re.DOTALL)
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
         "model.safetensors.index.json", "chat template", "keys", "prefixes", "calibration")  # fmt: skip

LAYOUTS = (
    ("llama3-8b", 23.6, (1, 2)), ("yi-34b", 79, (1, 2)), ("llama3-70b", 79, (2, 4, 8)),
    ("llama3-70b", 139.8, (1, 2, 4)), ("opt-66b", 79, (2, 4)), ("opt-175b", 79, (8,)), ("opt-175b", 139.8, (4, 8)),
)  # fmt: skip
"""Model, GiB of a GPU, and how many of them."""


def bytes_of(number: int) -> str:
    """As people write it."""
    return f"{number >> 20} MiB" if number % (1 << 20) == 0 else f"{number >> 10} KiB"


def flags(experiments: bool = False) -> Iterator[str]:
    """The flags of `quire serve`, by their groups: those of a server, or those of experiments."""
    _, named = build_parsers()
    yield "| flag | what |\n|---|---|\n"
    for group in named["serve"]._action_groups:
        options = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        options = [action for action in options if action.option_strings and action.dest != "help"]
        if not options or experiments != (group.title == "experiments"):
            continue
        if group.title not in ("options", "experiments"):
            yield f"| **{group.title}** | |\n"
        for action in options:
            names = ", ".join(f"`{name}`" for name in action.option_strings)
            if isinstance(action.metavar, str):
                names += f" {action.metavar}"
            elif action.choices:
                names += " " + " \\| ".join(map(str, action.choices))
            elif action.nargs != 0:
                names += f" {action.dest.upper()}"
            shown = (action.help or "").replace("%(default)s", str(action.default)).replace("|", "\\|")
            yield f"| {names} | {shown} |\n"


def limits() -> Iterator[str]:
    """What is bounded, and what happens beyond."""
    bounds, config = connections.ConnectionLimits(), EngineConfig()
    yield "| what | how much | beyond | flag |\n|---|---|---|---|\n"
    for row in (
        ("prompt and output", "the model's length, or the KV memory if that is smaller", "400",
         "`--max-model-len`, `--kv-tokens`, `--kv-gib`"),
        ("characters of a prompt", f"{input_processor.CHARS_PER_TOKEN} for each token that fits", "400", ""),
        ("prompts of a request", f"{MAX_PROMPTS}", "400", ""),
        ("texts embedded at once, their numbers", f"{MAX_INPUTS}, {answer_size.MAX_EMBEDDING_NUMBERS:,}", "400", ""),
        ("messages, parts of one", f"{chat_messages.MAX_MESSAGES:,}, {chat_messages.MAX_PARTS:,}", "400", ""),
        ("images of a request, where the model sees", f"{config.max_images}", "400", "`--max-images`"),
        ("pixels of an image; of a side", f"{config.max_image_pixels:,}; {image_tiling.MAX_IMAGE_SIDE:,}", "400",
         "`--max-image-pixels`"),
        ("files of a request's images; the same prepared", f"{bytes_of(config.max_image_bytes)}; "
         f"{bytes_of(columns.MAX_PIXEL_BYTES)}", "400", "`--max-image-bytes`"),
        ("scans of a JPEG; chunks of a PNG or WebP; blocks of a GIF", f"{headers.MAX_SCANS}; "
         f"{headers.MAX_BLOCKS:,}; {headers.MAX_GIF_BLOCKS:,}", "400", ""),
        ("requests whose images wait to be decoded", f"{loader.MAX_WAITING}", "503", ""),
        ("images of all requests under way, prepared", bytes_of(pixel_store.MAX_PIXEL_BYTES), "503", ""),
        ("`n`, `best_of`; beams", f"{sampling_params.MAX_N}; {sampling_params.MAX_BEAM_WIDTH}", "400",
        "`--max-num-seqs`"),
        ("`logprobs`, `top_logprobs`, `prompt_logprobs`", f"{sampling_params.MAX_LOGPROBS}", "400", "`--max-logprobs`"),
        ("`logprob_token_ids`", f"{sampling_params.MAX_LOGPROB_IDS}", "400", ""),
        ("stop strings, their length", f"{sampling_params.MAX_STOPS}, {sampling_params.MAX_STOP_CHARS} characters",
        "400", ""),
        ("bad words, tokens in all of them", f"{sampling_params.MAX_BAD_WORDS}, {sampling_params.MAX_BAD_WORD_IDS:,}",
        "400", ""),
        ("`allowed_token_ids`", f"{request_params.MAX_ALLOWED_TOKEN_IDS:,}", "400", ""),
        ("`logit_bias`, `stop_token_ids`", f"{sampling_params.MAX_BIASES:,}, {sampling_params.MAX_STOP_IDS:,} tokens",
        "400", ""),
        ("log-probabilities in an answer", f"{answer_size.MAX_LOGPROBS:,}: n x tokens x (logprobs + 1), and those of "
         "the prompt in each choice that shows them", "400; unset `max_tokens` are what this leaves", ""),
        ("tokens in an answer", f"{answer_size.MAX_TOKENS:,}: n x prompts x tokens", "as above", ""),
        ("bytes of an answer that isn't streamed", f"{answer_size.MAX_BYTES:,}", "400", ""),
        ("bytes of all answers that wait for their clients", f"{answer_size.MAX_HELD_BYTES:,}", "503", ""),
        ("responses kept for previous_response_id", f"none, or N of --store-responses, in "
         f"{bytes_of(routes.MAX_STORED_BYTES)}; the conversation of one: "
         f"{bytes_of(routes.MAX_CONVERSATION)}", "the oldest go; 400", "`--store-responses`"),
        ("conversations that wait for the chat template", f"{input_processor.MAX_WAITING}", "503", ""),
        ("log-probabilities in all answers under way", f"{answer_size.MAX_HELD_LOGPROBS:,}", "503", ""),
        ("a request's body", f"{bytes_of(guards.MAX_BODY)}, and what images may take in base64, "
         f"within {guards.BODY_SECONDS:g} s", "413, 408", ""),
        ("values of a body: commas; colons and opening brackets; backslashes", f"{guards.MAX_COMMAS:,}; "
         f"{guards.MAX_COLONS_AND_BRACKETS:,}; {guards.MAX_BACKSLASHES:,}; more for a model of more tokens", "413", ""),
        ("bodies of all requests under way", bytes_of(guards.MAX_BODIES), "503", ""),
        ("request line and headers", f"{bytes_of(connections.MAX_HEAD_BYTES)}, {connections.MAX_HEADERS} headers, a "
        f"path of "
         f"{bytes_of(connections.MAX_TARGET_BYTES)}", "431, 414", ""),
        ("time for complete headers", f"{bounds.head:g} s", "408", ""),
        ("an idle connection", f"{bounds.idle:g} s", "closed", ""),
        ("a client that reads nothing", f"{bounds.write:g} s", "closed", ""),
        ("connections", f"the descriptors that are left less {serve_options.RESERVED_DESCRIPTORS}, at most "
         f"{serve_options.MAX_CONNECTIONS:,}", "503 at once", "`--max-connections`"),
        ("HTTP requests waiting; their prompts: 16 times as many", f"{config.max_num_queued_reqs:,}", "503",
         "`--max-num-queued-reqs`"),
        ("a chat template's run", "1 s, on Linux 224 MiB more than its process starts with; a prompt of 1 MiB", "400",
         ""),
        ("a tokenizer's word at start", f"{tokenizers_guard.TEST_SECONDS:g} s", "refused", ""),
        *((f"the file of {name}" if "." not in name and name != "chat template" else f"`{name}`" if "." in name
           else "a chat template", bytes_of(MAX_BYTES_BY_FILE[name]), "refused", "") for name in FILES),
        ("an end", f"`--shutdown-timeout`, and {api_server.SHUTDOWN_MARGIN_SECONDS:g} s at the most", "status 1, "
        "with all "
        "stacks in the log",
         "`--shutdown-timeout`"),
    ):  # fmt: skip
        yield "| " + " | ".join(row) + " |\n"


def fields(names: frozenset[str]) -> Iterator[str]:
    """Names, a line of at most 120 characters each."""
    line = ""
    for name in sorted(names):
        item = f"`{name}`, "
        if len(line) + len(item) > 120:
            yield line.rstrip() + "\n"
            line = ""
        line += item
    yield line.rstrip(", ") + ".\n"


def sampling() -> Iterator[str]:
    """The sampling parameters that all APIs take as they are declared."""
    yield "| parameter | default | range | meaning |\n|---|---|---|---|\n"
    for name, kind, _, default, param in sampling_params.PARAMS:
        if param.shared:
            ends = [f"{bound:g}" if abs(bound) < 1000 else "" for bound in (param.low, param.high) if bound is not None]
            span = " to ".join(ends) if all(ends) else f"from {ends[0]}" if ends[0] else "a 64-bit integer"
            shown = "none" if default is None else str(default).lower() if kind is bool else f"{default:g}"
            yield f"| `{name}` | {shown} | {span} | {param.doc} |\n"


def layouts() -> Iterator[str]:
    """What models take on so many GPUs, in 16 bits, planned with the settings that are the default."""
    yield "| model | GPUs | weights of a rank | KV of a rank | tokens in memory |\n|---|---|---|---|---|\n"
    for name, gib, counts in LAYOUTS:
        for ranks in counts:
            config, spec = EngineConfig(tp=ranks), read_spec(named_config(name), Shard(0, ranks))
            row = (name, f"{ranks} of {gib:g} GiB", f"{spec.weight_bytes(2) / GIB:.1f} GiB")
            try:
                plan = plan_memory(config, spec, name, "bfloat16", 2, "cuda", device_bytes=int(gib * GIB))
            except StartupError:
                yield f"| {' | '.join(row)} | - | doesn't fit |\n"
                continue
            yield f"| {' | '.join(row)} | {plan.kv_bytes / GIB:.1f} GiB | {plan.kv_tokens:,} |\n"


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "flags": flags, "experiments": partial(flags, experiments=True), "limits": limits, "layouts": layouts,
    "sampling": sampling, "ignored": partial(fields, IGNORED_FIELDS), "refused": partial(fields, REFUSED_FIELDS),
}  # fmt: skip


def written(text: str) -> str:
    """The document with every table as the code says."""

    def table(found: re.Match[str]) -> str:
        return f"<!-- table {found[1]} -->\n{''.join(TABLES[found[1]]())}<!-- end of table -->\n"

    return MARKED.sub(table, text)


def main() -> int:
    """0, or with --check 1 if a document is stale."""
    parser = argparse.ArgumentParser(description="make the tables of docs/")
    parser.add_argument("--check", action="store_true")
    check, stale = parser.parse_args().check, 0
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        fresh = written(text)
        if not check:
            document.write_text(fresh, encoding="utf-8")
        elif fresh != text:
            print(f"docs/{document.name} is stale: run tools/doc_tables.py", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
