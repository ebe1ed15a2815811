"""Makes docs/reference.md, and the tables of other pages that say what the code says.

python tools/doc_tables.py           # rewrites them
python tools/doc_tables.py --check   # says whether they are stale

In other pages a table stands between `<!-- table NAME -->` and `<!-- end of table -->`. The reference is made of what
the code declares: the parser of `quire serve`, the constants that bound requests, the models of request bodies, and the
routes and metrics of an application with the bundled model. Only the meanings of request fields are written down, in
doc_fields.toml.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute

from quire.async_llm import AsyncLLM
from quire.cli import build_parsers
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.files import MAX_BYTES_BY_FILE
from quire.ipc import pixel_store
from quire.memory.page_layout import MemorySize
from quire.memory.paged import PagedMemory
from quire.models import FAMILIES, read_spec
from quire.models.named_configs import CONFIGS, named_config
from quire.protocol import columns, image_tiling, sampling_params
from quire.protocol.device_params import MAX_TOKENS
from quire.protocol.parallel_layout import Shard
from quire.protocol.sampling_params import PARAMS, SamplingParams
from quire.server import (
    answer_size,
    api_server,
    connections,
    console,
    guards,
    options,
    request_models,
    request_params,
)
from quire.server.adapter import SharedChatFields
from quire.server.anthropic import input as messages_input
from quire.server.app import create_app
from quire.server.errors import ANTHROPIC_TYPES, OPENAI_TYPES
from quire.server.metrics import LABELS, Metrics
from quire.server.options import ServeOptions
from quire.server.request_models import MAX_INPUTS, MAX_PROMPTS, ChatRequest, CompletionRequest, RequestFields
from quire.server.responses import input as responses_input
from quire.server.responses import routes as responses_routes
from quire.startup.memory_plan import GIB, plan_memory, tokens_per_gib, uniform_tokens_per_gib
from quire.text import chat_messages, input_processor, tokenizers_guard
from quire.text.images import headers, loader
from quire.weights import gguf_config

DOCS = Path(__file__).parents[1] / "docs"
REFERENCE = DOCS / "reference.md"
PAGES = (DOCS / "parallel.md", DOCS / "memories.md", DOCS / "models.md")
"""Pages with tables in them."""
MARKED = re.compile(r"<!-- table (\w+) -->\n(.*?)<!-- end of table -->\n", re.DOTALL)
FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
         "model.safetensors.index.json", "chat template", "keys", "prefixes", "calibration")  # fmt: skip
LAYOUTS = (
    ("llama3-8b", 23.6, (1, 2)), ("llama3-70b", 79, (2, 4, 8)),
    ("llama3-70b", 139.8, (1, 2, 4)), ("opt-175b", 79, (8,)),
)  # fmt: skip
"""Model, GiB of a GPU, and how many of them."""
UNLIKE_LAYERS = ("gemma-3-12b", "gemma-4-31b", "gpt-oss-20b", "ministral-8b", "qwen3-next-80b-a3b", "jamba-52b")
UNLIKE_LENGTHS = (8192, 32768, 131072)
"""Models with layers of several types, and lengths of sequences in tokens."""

KV_BESIDE_VLLM, SHORT, LONG = DOCS / "measurements" / "kv_beside_vllm.json", (12, 1000), (8192, 32768)
"""The results of tools/compare_kv.py, and the lengths whose memory is shown in MiB and in tokens of a GiB."""

FILLED_PARAMS = ("bad_word_ids", "stop_automaton", "grammar")
"""Parameters that quire fills from others."""
MEANINGS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("doc_fields.toml").read_text(encoding="utf-8")
)
SAMPLING, GENERATION, RESPONSES, MESSAGES = (
    MEANINGS[name] for name in ("sampling", "generation", "responses", "messages")
)
OTHERS: dict[str, type[RequestFields]] = {
    "/v1/embeddings": request_models.EmbeddingRequest, "/pooling": request_models.PoolingRequest,
    "/score": request_models.ScoreRequest, "/rerank": request_models.RerankRequest,
    "/generative_scoring": request_models.GenerativeScoringRequest, "/tokenize": request_models.TokenizeRequest,
    "/detokenize": request_models.DetokenizeRequest, "/v1/prefixes": request_models.PrefixRequest,
}  # fmt: skip
"""Bodies that generate nothing."""
PLURALS = {"string": "texts", "integer": "integers", "object": "objects"}


def bytes_of(number: int) -> str:
    """As people write it."""
    return f"{number >> 20} MiB" if number % (1 << 20) == 0 else f"{number >> 10} KiB"


def table(columns: str, rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """A table with these columns."""
    names = columns.split(", ")
    yield f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"
    for row in rows:
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |\n"


def quoted(names: Iterable[str]) -> str:
    """Names as code."""
    return ", ".join(f"`{name}`" for name in names)


def flag_groups(command: str) -> Iterator[tuple[str, str, list[argparse.Action]]]:
    """The titles, descriptions and flags of a command's groups."""
    for group in build_parsers()[1][command]._action_groups:
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        actions = [action for action in actions if action.option_strings and action.dest != "help"]
        if actions:
            yield group.title or "", group.description or "", actions


def flags(actions: Iterable[argparse.Action]) -> Iterator[str]:
    """The names, values and meanings of flags."""
    yield from table("flag, values, meaning", map(flag_row, actions))


def flag_row(action: argparse.Action) -> Iterator[str]:
    """Names, value and help of a flag."""
    yield quoted(action.option_strings)
    if isinstance(action.metavar, str):
        yield action.metavar.strip("{}").replace(",", ", ")
    elif action.choices:
        yield ", ".join(map(str, action.choices))
    else:
        yield "" if action.nargs == 0 else action.dest.upper()
    yield str(action.help or "").replace("%(default)s", str(action.default))


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
        ("bytes of all answers that wait for their clients, and of streams in the background",
         f"{answer_size.MAX_HELD_BYTES:,}", "503", ""),
        ("responses kept for previous_response_id", f"none, or N of --store-responses, in "
         f"{bytes_of(responses_routes.MAX_STORED_BYTES)}; the conversation of one: "
         f"{bytes_of(responses_routes.MAX_CONVERSATION)}", "the oldest go; 400", "`--store-responses`"),
        ("responses in the background, and the items that they answer", "N of --store-responses, "
         f"{bytes_of(responses_routes.MAX_STORED_BYTES)}", "503", "`--store-responses`"),
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
        ("connections", f"the descriptors that are left less {options.RESERVED_DESCRIPTORS}, at most "
         f"{options.MAX_CONNECTIONS:,}", "503 at once", "`--max-connections`"),
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


def value_of(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, as people write it."""
    options = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    *kinds, last = dict.fromkeys(kind for one in options for kind in kinds_of(one))
    bounds = {name: value for one in (*options, schema) for name, value in one.items()}
    text = f"{', '.join(kinds)} or {last}" if kinds else last
    low, high = bounds.get("minimum"), bounds.get("maximum")
    if low == -(2**63):
        text += " of 64 bits"
    elif low is not None:
        text += f" from {low:g}" if high in (None, MAX_TOKENS) else f" from {low:g} to {high:g}"
    if "maxLength" in bounds:
        text += f" of {bounds['minLength']} to {bounds['maxLength']} characters"
    if "maxItems" in bounds:
        text += f", at most {bounds['maxItems']:,}"
    return text


def kinds_of(schema: Mapping[str, Any]) -> Iterator[str]:
    """The types, or the values, of one alternative of a schema."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else ())
    for value in values:
        if value is not None:
            yield value if isinstance(value, str) else json.dumps(value)
    if not values and schema.get("type") == "array":
        item = schema["items"]
        yield PLURALS.get(item.get("type", "object")) or f"lists of {PLURALS[item['items']['type']]}"
    elif not values:
        kind = schema.get("type", "object")
        yield {"string": "text", "boolean": "true or false"}.get(kind, kind)


def body_fields(model: type[RequestFields]) -> dict[str, str]:
    """The fields of a body with their values, without those that are refused."""
    schema = model.model_json_schema()
    return {
        name: value_of(one) + (", required" if name in schema.get("required", ()) else "")
        for name, one in schema["properties"].items()
        if one.get("type") != "null"
    }


def apis_of(name: str) -> str:
    """The APIs that have a field of chats or completions."""
    if name in SharedChatFields.model_fields:
        return "all"
    in_chat, in_completions = name in body_fields(ChatRequest), name in body_fields(CompletionRequest)
    return ", ".join(["chat"] * in_chat + ["completions"] * in_completions) or "Python"


def explained(values: Mapping[str, str], meanings: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Names, values and meanings of fields. Raises ValueError unless exactly these fields have meanings."""
    if values.keys() != meanings.keys():
        raise ValueError(
            f"tools/doc_fields.toml explains other fields than there are: {values.keys() ^ meanings.keys()}"
        )
    return ((name, values[name], meaning) for name, meaning in meanings.items())


def sampling() -> Iterator[str]:
    """The parameters of SamplingParams."""
    fields_of = body_fields(ChatRequest) | body_fields(CompletionRequest)
    defaults = {one.name: one.default for one in fields(SamplingParams) if one.name not in FILLED_PARAMS}
    shown = {name: "" if one in (None, ()) else json.dumps(one) for name, one in defaults.items()}
    declared = {one.name: one.param.doc for one in PARAMS} | SAMPLING
    rows = explained({name: fields_of.get(name, "") for name in defaults}, {name: declared[name] for name in defaults})
    yield from table(
        "parameter, default, values, APIs, meaning",
        ((f"`{name}`", shown[name], value, apis_of(name), meaning) for name, value, meaning in rows),
    )


def generation() -> Iterator[str]:
    """The other fields of completions and chats."""
    fields_of = body_fields(ChatRequest) | body_fields(CompletionRequest)
    rows = explained(
        {name: value for name, value in fields_of.items() if name not in SamplingParams.__dataclass_fields__},
        GENERATION,
    )
    yield from table(
        "field, values, APIs, meaning",
        ((f"`{name}`", value, apis_of(name), meaning) for name, value, meaning in rows),
    )


def own_fields(model: type[RequestFields], meanings: Mapping[str, str]) -> Iterator[str]:
    """The fields of a body that not all APIs have."""
    values = {name: one for name, one in body_fields(model).items() if name not in SharedChatFields.model_fields}
    rows = explained(values, meanings)
    yield from table("field, values, meaning", ((f"`{name}`", value, meaning) for name, value, meaning in rows))


def other_fields() -> Iterator[str]:
    """The fields of bodies that generate nothing."""
    rows = []
    for path, model in OTHERS.items():
        values, meanings = body_fields(model), MEANINGS[path]
        chat_names = [name for name in values if name not in meanings and name in GENERATION]
        own = {name: value for name, value in values.items() if name not in chat_names}
        rows += [(path, f"`{name}`", value, meaning) for name, value, meaning in explained(own, meanings)]
        if chat_names:
            rows.append((path, quoted(chat_names), "", "as in chats"))
    yield from table("route, field, values, meaning", rows)


def refusals() -> Iterator[str]:
    """The fields without effect, and those that are refused."""
    rows = list[tuple[str, str, str]]()
    bodies: dict[str, tuple[type[RequestFields], Iterable[str]]] = {
        "completions": (CompletionRequest, request_models.REFUSED_FIELDS),
        "chat": (ChatRequest, request_models.REFUSED_FIELDS),
        "responses": (responses_input.ResponseRequest, responses_input.UNSUPPORTED_FIELDS),
        "messages": (messages_input.MessageRequest, messages_input.UNSUPPORTED_FIELDS),
    }
    for api, (model, refused) in bodies.items():
        null = model.model_fields.keys() - body_fields(model)
        more = ", and what completions or chats have and this API has not" if api in ("responses", "messages") else ""
        ignored = request_models.IGNORED_FIELDS - model.model_fields.keys()
        rows.append((api, quoted(sorted(ignored)), quoted(sorted({*refused, *null})) + more))
    yield from table("API, no effect, refused", rows)


def errors() -> Iterator[str]:
    """The types of errors by status."""
    default = {False: "invalid_request_error", True: "api_error"}
    rows = ((str(code), kind, ANTHROPIC_TYPES.get(code, default[code >= 500])) for code, kind in OPENAI_TYPES.items())
    yield from table("status, type, type below /v1/messages", ((code, f"`{a}`", f"`{b}`") for code, a, b in rows))


def routes(llm: AsyncLLM) -> Iterator[str]:
    """The routes of a server. Those with one function and one key are a row."""
    app = create_app(llm, ["tiny"], ServeOptions(server_info=True, tokenizer_info=True))
    rows: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
    for route in app.routes:
        if isinstance(route, APIRoute) and not route.path.startswith("/console/"):
            path = re.sub(r"{name(:path)?}", "NAME", route.path)
            no_key = path in (*guards.OPEN_PATHS, *console.OPEN_PATHS)
            key = "admin" if route.dependencies else "none" if no_key else "API"
            paths, methods = rows.setdefault((key, route.endpoint.__doc__ or ""), ([], []))
            methods += sorted({*(route.methods or ())} - {*methods})
            paths += [] if path in paths else [path]
    yield from table(
        "route, methods, key, what it does",
        (
            (quoted(paths), ", ".join(methods), key, doc.partition("\n\n")[0].partition(". ")[0].rstrip(".") + ".")
            for (key, doc), (paths, methods) in rows.items()
        ),
    )


def metrics(llm: AsyncLLM) -> Iterator[str]:
    """The metrics, without the labels that all have."""
    yield from table(
        "metric, type, labels, meaning",
        (
            (f"`{one.name}{'_total' * (one.type == 'counter')}`", one.type,
             quoted(vars(one)["_labelnames"][len(LABELS) :]), one.documentation)
            for one in Metrics(llm, "tiny", config=EngineConfig())._all_families(())
        ),
    )  # fmt: skip


def named_shapes() -> Iterator[str]:
    """The named configs: architecture, sizes and layers by kinds."""
    rows = []
    for name in CONFIGS:
        config = named_config(name)
        spec = read_spec(config)
        counts = Counter((one.kind, one.window or one.chunk) for one in spec.layers)
        layers = (f"{count} {kind}" + (f" of {length:,}" if length else "") for (kind, length), count in counts.items())
        size = f"{spec.parameters / 1e9:.3g} B"
        token = f"{spec.token_bytes(2):,}"
        rows.append((f"`{name}`", f"`{config['architectures'][0]}`", size, ", ".join(layers), token))
    yield from table("name, architecture, parameters, layers, bytes of a token", rows)


def reference(llm: AsyncLLM) -> Iterator[str]:
    """The parts of the reference."""
    yield "# Reference\n\nThis page lists the flags, shapes, limits, routes, fields and metrics of a server. "
    yield "`tools/doc_tables.py` makes it;\n[serving.md](serving.md) explains them.\n\n## Flags of `quire serve`\n\n"
    yield "`generate`, `chat`, `plan` and `run-batch` take the flags of the engine too.\n"
    for title, description, actions in flag_groups("serve"):
        yield f"\n### {'General' if title == 'options' else title[:1].upper() + title[1:]}\n\n"
        yield f"{description}\n\n" if description else ""
        yield from flags(actions)
    batch_flags = (actions for title, _, actions in flag_groups("run-batch") if title == "batch")
    deploy_flags = (actions for title, _, actions in flag_groups("deploy") if title == "application")
    for heading, text, rows in (
        ("Flags of `quire deploy ray`", "Beside those of the engine, and of requests, logs and metrics.",
         flags(next(deploy_flags))),
        ("Flags of `quire run-batch`", "", flags(next(batch_flags))),
        ("Named shapes", "Values of `--model-config`. Layers are by what they keep: all tokens (full), a window, a "
         "part of the prompt\n(budget), images (cross) or a running state. Bytes are of keys and values in 16 bits. "
         "Encoders of images are left out.", named_shapes()),
        ("Limits", "", limits()),
        ("Routes", "An admin key opens the routes of an API key too.", routes(llm)),
        ("Sampling parameters", "Defaults are of requests and of `SamplingParams`; the model may have others. "
         "*All*: completions, chat,\nresponses and messages.", sampling()),
        ("Fields of completions and chats", "", generation()),
        ("Fields of responses", "Beside the fields of all APIs.",
         own_fields(responses_input.ResponseRequest, RESPONSES)),
        ("Fields of messages", "Beside the fields of all APIs.", own_fields(messages_input.MessageRequest, MESSAGES)),
        ("Fields of other routes", "", other_fields()),
        ("Refused fields", "A field is refused unless it is null, false, 0 or empty.", refusals()),
        ("Errors", "", errors()),
        ("Metrics", f"All series have the labels {quoted(LABELS)} too.", metrics(llm)),
    ):  # fmt: skip
        yield f"\n## {heading}\n\n" + (f"{text}\n\n" if text else "")
        yield from rows


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


def tokens_in_a_gib() -> Iterator[str]:
    """The tokens in a GiB of large pages, and of uniform pages, with 40 GiB of KV in 16 bits."""
    yield "| model | pages |" + "".join(f" {length:,} tokens |" for length in UNLIKE_LENGTHS)
    yield f"\n|---|---|{'--:|' * len(UNLIKE_LENGTHS)}\n"
    for name in UNLIKE_LAYERS:
        config, spec = EngineConfig(kv_gib=40).with_device_defaults("cuda"), read_spec(named_config(name))
        plan = plan_memory(config, spec, name, "bfloat16", 2, "cuda", device_bytes=400 * GIB)
        memory = PagedMemory.build(config, spec, MemorySize(plan.kv_tokens, plan.max_len, 2, plan.kv_bytes))
        large = [tokens_per_gib(memory, length) for length in UNLIKE_LENGTHS]
        uniform = [uniform_tokens_per_gib(config, spec, 2, length) for length in UNLIKE_LENGTHS]
        ratios = (f"{ours:,.0f} ({ours / theirs:.1f} x)" for ours, theirs in zip(large, uniform))
        yield f"| {name} | large | {' | '.join(ratios)} |\n"
        yield f"| | uniform | {' | '.join(f'{tokens:,.0f}' for tokens in uniform)} |\n"


def kv_beside_vllm() -> Iterator[str]:
    """The results of tools/compare_kv.py: memory of sequences, and tokens found in the prefix cache."""
    results = json.loads(KV_BESIDE_VLLM.read_text(encoding="utf-8"))["results"]
    head = [
        "model", "engine", *(f"MiB, {n:,} tokens" for n in SHORT), *(f"tokens/GiB, {n:,}" for n in LONG),
        *(f"found of {at['prefix']:,}" for at in results[0]["prefixes"]), "found of turns", "articles found",
    ]  # fmt: skip
    yield f"| {' | '.join(head)} |\n|---|---|{'--:|' * (len(head) - 2)}\n"
    for before, one in zip([None, *results], results):
        sizes = {size["tokens"]: size for size in one["sizes"]}
        articles = [at["articles"] for at in one["questions"]["found"] if at["share"] > 0.9]
        cells = [
            "" if before and before["model"] == one["model"] else one["model"], one["name"],
            *(f"{sizes[n]['bytes_each'] / 2**20:,.1f}" for n in SHORT),
            *(f"{sizes[n]['tokens_per_gib']:,.0f}" for n in LONG),
            *(f"{at['hits'][1]:,}" for at in one["prefixes"]), f"{sum(one['conversation']['hits']):,}",
            str(max(articles, default=0)),
        ]  # fmt: skip
        yield f"| {' | '.join(cells)} |\n".replace("|  |", "| |")


def model_families() -> Iterator[str]:
    """The families that quire computes itself, and those that transformers computes."""
    in_gguf = {one.hf_architecture for one in gguf_config.ARCHITECTURES.values()}
    in_gguf |= {"MistralForCausalLM", "MixtralForCausalLM"}  # in files whose architecture is llama
    rows = [
        (quoted(family.architectures), family.layers, "native",
         family.checkpoints + ", GGUF" * (not in_gguf.isdisjoint(family.architectures)), family.tested)
        for family in FAMILIES
    ]  # fmt: skip
    others = ("others, [below](#models-of-transformers)", "full, or windows", "transformers", "none", "transformers")
    yield from table(
        "architecture in config.json, layers, path, quantized checkpoints, tested against", [*rows, others]
    )


TABLES = {
    "layouts": layouts, "tokens_in_a_gib": tokens_in_a_gib, "kv_beside_vllm": kv_beside_vllm,
    "model_families": model_families,
}  # fmt: skip


def written(text: str) -> str:
    """The page with every table as the code says."""

    def made(found: re.Match[str]) -> str:
        return f"<!-- table {found[1]} -->\n{''.join(TABLES[found[1]]())}<!-- end of table -->\n"

    return MARKED.sub(made, text)


def made_pages() -> Iterator[tuple[Path, str]]:
    """Each page with its text as the code says."""
    llm = AsyncLLM(device="cpu", kv_tokens=1024, warm_up=False)
    try:
        yield REFERENCE, "".join(reference(llm))
    finally:
        llm.close()
    for page in PAGES:
        yield page, written(page.read_text(encoding="utf-8"))


def main() -> int:
    """0, or with --check 1 if a page is stale."""
    parser = argparse.ArgumentParser(description="make docs/reference.md and the tables of other pages")
    parser.add_argument("--check", action="store_true")
    check, stale = parser.parse_args().check, 0
    for page, text in made_pages():
        if not check:
            page.write_text(text, encoding="utf-8")
        elif not page.is_file() or page.read_text(encoding="utf-8") != text:
            print(f"docs/{page.name} is stale: run tools/doc_tables.py", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
