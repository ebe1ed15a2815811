"""The loads of oracle.py, as data: engines, what they are asked, and what must have occurred."""

from __future__ import annotations

import base64
import itertools
import json
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


class Serve(NamedTuple):
    """Requests to `quire serve`, sent one after another: (method, path, body, headers). "$LAST" is the last answer's
    id; the method "AT ONCE" sends a list of bodies at the same time."""

    requests: Sequence[tuple[Any, ...]]


CLI = "the command line"


class Load(NamedTuple):
    """`engines` are settings, each of which makes an engine that gets all `calls`: methods of an LLM with their
    arguments, or Serve, or CLI. `expect`: what must have occurred in each engine, and how often at least; "a|b" is
    either name. Without `plans` the plan log depends on timing and is not kept. With `errors` calls may
    fail, and engines may not start."""

    name: str
    about: str
    engines: Sequence[dict[str, Any]]
    calls: Any
    expect: dict[str, int]
    plans: bool = True
    errors: bool = False
    slow: bool = False


SERVE = ("--device", "cpu", "--dtype", "float32", "--threads", "1", "--seed", "7", "--port", "0")
KEY = "an-admin-key-of-the-oracle"
OPEN = {"Authorization": f"Bearer {KEY}"}
OUT, IN, COPY, TABLE, ENCODE = "Out|SwapOut", "In|SwapIn", "Copy|PageCopy", "Table|TableWrite", "Encode|ImageEncoding"
NEW_SLOTS = r"\n(?:births|new slots|new_slots) +(\d[\d,]*), (\d[\d,]*)"
"""Words of `quire replay` for page operations and new slots, before and after they are renamed."""


def each(**choices: Any) -> list[dict[str, Any]]:
    """Settings with every combination of those that are lists."""
    lists = [value if isinstance(value, list) else [value] for value in choices.values()]
    return [dict(zip(choices, chosen)) for chosen in itertools.product(*lists)]


def ids(length: int, seed: int, vocab: int = 97) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(length)]


def png(seed: int, side: int = 60, wide: int = 0) -> bytes:
    """A picture of coloured squares, the same for a seed."""
    rng, wide = random.Random(seed), wide or side
    squares = {(y, x): bytes(rng.randrange(256) for _ in "rgb") for y in range(9) for x in range(9)}
    rows = [b"\0" + b"".join(squares[y // 12 % 9, x // 12 % 9] for x in range(wide)) for y in range(side)]
    head = struct.pack(">IIBBBBB", wide, side, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )


def uri(seed: int, **size: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(seed, **size)).decode()}"


# fmt: off
# Models that the loads need beside the bundled ones: random weights of transformers', saved as checkpoints.
TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}
WINDOW = {**TEXT, "sliding_window": 9}
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
STATE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "bos_token_id": None,
         "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
SEEN = {**TEXT, "vocab_size": 3080, "num_hidden_layers": 2, "max_position_embeddings": 2048, "bos_token_id": 0,
        "eos_token_id": 5, "pad_token_id": 6}
TOWER = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
         "image_size": 28, "patch_size": 7}
MLLAMA = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "attention_heads": 4,
          "num_global_layers": 1, "image_size": 31, "patch_size": 7, "max_num_tiles": 4,
          "intermediate_layers_indices": [0], "vision_output_dim": 64}
ROPE3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64}
GEMMA = {**WINDOW, "query_pre_attn_scalar": 5}
# Each: the family, its options, what config.json says beside, what preprocessor_config.json says, and special tokens.
MODELS: dict[str, tuple[Any, ...]] = {
    "llama": ("llama", TEXT), "mistral": ("mistral", WINDOW), "qwen2": ("qwen2", TEXT), "qwen3": ("qwen3", TEXT),
    "phi3": ("phi3", {**TEXT, "num_key_value_heads": 4}),
    "ministral": ("ministral", {**WINDOW, "layer_types": MIXED}), "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", {**GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "opt": ("opt", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "gpt2": ("gpt2", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512,
                      "bos_token_id": None, "eos_token_id": None}),
    "chunked": ("llama", TEXT, {"layer_types": ["chunked_attention", "full_attention"] * 2, "attention_chunk_size": 16,
                                "kv_sharing": [None, None, 0, 1]}),
    "pyramid": ("llama", TEXT, {"pyramid_kv": {"budgets": [40, 24, None, 9], "queries": 8, "pool": 5}}),
    "jamba": ("jamba", {**TEXT, "num_hidden_layers": 5, "num_experts": 4, "attn_layer_period": 3,
                        "attn_layer_offset": 1, "mamba_d_state": 8}),
    "mamba": ("mamba", {**STATE, "use_bias": True}), "falcon-mamba": ("falcon_mamba", {**STATE, "conv_kernel": 3}),
    "mllama": ("mllama", {"text_config": {**SEEN, "model_type": "mllama_text_model", "num_hidden_layers": 5,
                                          "vocab_size": 3072, "cross_attention_layers": [1, 3],
                                          "rope_parameters": ROPE3},
                          "vision_config": MLLAMA, "image_token_index": 3072}, {}, {}, {"<image>": "<|image|>"}),
    "internvl": ("internvl", {"text_config": {**SEEN, "model_type": "qwen2"}, "image_token_id": 3072,
                              "vision_config": {**TOWER, "image_size": [28, 28], "patch_size": [7, 7]}}, {},
                 {"size": {"height": 28, "width": 28}, "max_patches": 3},
                 {"<image>": "<IMG_CONTEXT>", "<|system|>": "<img>", "<|user|>": "</img>"}),
    "paligemma": ("paligemma", {"text_config": {**GEMMA, **SEEN, "model_type": "gemma2"}, "projection_dim": 32,
                                "vision_config": {**TOWER, "model_type": "siglip_vision_model",
                                                  "vision_use_head": False}, "image_token_index": 3072}, {},
                  {"size": {"height": 28, "width": 28}}, {"<|begin|>": "<bos>"}),
}
# fmt: on


def make_models(folder: Path) -> None:
    """Write all MODELS, each to a folder of its name."""
    import torch
    import transformers

    import quire

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # of transformers
    assets = Path(quire.__file__).parent / "assets" / "tiny-vision"
    making = folder.with_name(folder.name + ".part")
    for name, (family, options, *more) in MODELS.items():
        said, prepared, renamed = [*more, {}, {}, {}][:3]
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **options)
        kind: Any = transformers.AutoModelForImageTextToText if renamed else transformers.AutoModelForCausalLM
        model = kind.from_config(config, attn_implementation="eager").float()
        for path, weights in model.named_parameters():
            if "A_log" not in path and not path.endswith(".D"):
                weights.data.normal_(1.0 * ("norm" in path), 0.1 if weights.dim() == 1 else 0.3)
            if "gate" in path and family == "mllama":
                weights.data.add_(0.7)
        model.save_pretrained(making / name)
        path = making / name / "config.json"
        written = {**json.loads(path.read_text()), **said}
        if family == "mllama":  # transformers counts layers' outputs, the model's authors their inputs
            written["vision_config"]["intermediate_layers_indices"] = [1]
        path.write_text(json.dumps(written))
        if renamed:
            (making / name / "preprocessor_config.json").write_text(json.dumps(prepared))
            for file in ("tokenizer.json", "tokenizer_config.json"):
                text = (assets / file).read_text()
                for old, new in renamed.items():
                    text = text.replace(f'"{old}"', f'"{new}"')
                (making / name / file).write_text(text)
    making.rename(folder)


def session(llm: Any, prompt: Any) -> Any:
    """Two branches of a prompt that go on with the two likeliest tokens, and what is likeliest then."""
    said = []
    with llm.session(prompt, width=3, max_tokens=12, top=6) as node:
        for _ in range(4):
            top = node.next(5)
            other = node.fork()
            node.append(top.ids[0])
            other.append(top.ids[1])
            said += [top, node.next(3), other.next(3), node.tokens, other.tokens]
            other.free()
    return said


SESSION = session

# Parameters

GREEDY = {"temperature": 0, "max_tokens": 16}
DRAWN = {"temperature": 1.0, "seed": 3, "max_tokens": 16}
STORIES = ["Once upon a time", "The little dog was", "What is the colour of the sky?", "Tom and Mia went to the park",
           "One day, it was", "A"]  # fmt: skip
LONG = "Once upon a time, there was a little dog. The dog was happy and played with a ball every day in the park. " * 3
TOPS = {"logprobs": 3, "prompt_logprobs": 2}
SEARCH = {"beam_width": 4, "n": 3, "max_tokens": 12, "logprobs": 1}
# fmt: off
SAMPLING: list[dict[str, Any]] = [
    {}, GREEDY, {"temperature": 1.7}, {"temperature": 0.3}, {"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3}, {"presence_penalty": 1.5},
    {"frequency_penalty": -1.2}, {"repetition_penalty": 1.4}, {"repetition_penalty": 0.8, "presence_penalty": -0.5},
    {"logit_bias": {300: 8.0, 12: -100}}, {"bad_words": ["the", "little dog"]},
    {"allowed_token_ids": [300, 301, 302, 400, 5]}, {"stop": ["dog", ". "]},
    {"stop": ["and"], "include_stop_str_in_output": True}, {"stop_token_ids": [16, 262, 300]},
    {"min_tokens": 12, "stop": ["a"]}, {"ignore_eos": True, "max_tokens": 60}, {"logprobs": 0}, {"logprobs": 20},
    {"prompt_logprobs": 3}, {"logprob_token_ids": [5, 300, 301]}, {"n": 4}, {"n": 2, "best_of": 5},
    {"n": 3, "temperature": 0, "logprobs": 2}, {"skip_special_tokens": False, "max_tokens": 40},
    {"detokenize": False}, {"seed": -5}, {"seed": 2**40, "n": 2}, {"max_tokens": 1}, {"beam_width": 3},
    {"beam_width": 4, "n": 4, "length_penalty": -1.0}, {"beam_width": 3, "early_stopping": True},
    {"beam_width": 3, "early_stopping": "never", "length_penalty": 2.0}, {"beam_width": 2, "min_tokens": 9},
    {"beam_width": 2, "stop_token_ids": [16], "logit_bias": {300: 2.0}, "repetition_penalty": 1.2},
    {"beam_width": 1, "early_stopping": True},
]
SAMPLING = [{**DRAWN, **each} for each in SAMPLING]
SEVERAL = [GREEDY, DRAWN, {**DRAWN, "n": 3}, SEARCH, {**DRAWN, "n": 1, "best_of": 3}, {**GREEDY, **TOPS}]
TOKENS: list[list[int]] = [ids(n, n) for n in (5, 23, 37, 60, 61, 90)]
SCORED = {**GREEDY, "logprobs": 5, "ignore_eos": True, "detokenize": False}
FREE = {**DRAWN, "logprobs": 2, "ignore_eos": True, "detokenize": False}
OWN = {"skip_tokenizer_init": True, "page_size": 4}
TWICE = [
    ("generate", TOKENS, [SCORED] * 3 + [FREE] * 3), ("generate", TOKENS, [FREE] * 3 + [SCORED] * 3),
    ("generate", TOKENS[2:4], {**FREE, "n": 3}), ("generate", TOKENS[2:4], {**SCORED, "beam_width": 3, "n": 2}),
]
SCORES = ("generate", TOKENS[:3], {**SCORED, "prompt_logprobs": 2})
FULL = [("generate", [ids(n, n) for n in (40, 33, 52, 21, 47, 60)], [{**SCORED, "max_tokens": 40}] * 3
         + [{**FREE, "max_tokens": 40}] * 3)]
FULLER = [*FULL, ("generate", [ids(n, n) for n in (30, 41, 26)],
                  [{**FREE, "n": 3, "max_tokens": 24}, {**SCORED, "beam_width": 3, "n": 2},
                   {**FREE, "max_tokens": 40}])]
FEW = [*FULL, ("generate", [ids(n, n) for n in (14, 17, 12, 9)],
                        [{**FREE, "n": 2, "max_tokens": 14}, {**SCORED, "beam_width": 2, "n": 2}] * 2)]
SHORTER = {"kv_tokens": 104, "max_model_len": 100, "swap_gib": 0.05}
SHORT = {"kv_tokens": 200, "max_model_len": 160, "swap_gib": 0.05}
PICTURED = [{"prompt": f"Look: {mark}", "multi_modal_data": {"image": [png(i) for i in range(mark.count("<"))]}}
            for mark in ("<image>", "<image> and <image>", "<image>")]


def pictured(mark: str) -> list[tuple[Any, ...]]:
    """Prompts with one, two neighbouring and three pictures, twice, so that they are found again."""
    texts = (f"Look: {mark} What is it", f"First {mark}{mark} then", f"{mark} one {mark} two {mark} three", "None")
    counts, first = (1, 2, 3, 0), [0, 1, 0, 0]
    asked: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": [png(start + i, wide=60 + 40 * i) for i in range(count)]}}
        if count else text for text, count, start in zip(texts, counts, first)
    ]
    how = {"temperature": 0, "max_tokens": 8, "logprobs": 4, "ignore_eos": True}
    return [("generate", asked, how), ("generate", asked[::-1], {**how, "n": 2, "seed": 4, "temperature": 1.0}),
            ("generate", asked[:2], {**how, "beam_width": 2, "n": 2})]


def user(text: str, *pictures: int) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": uri(seed)}} for seed in pictures]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts] if parts else text}


OFFLINE = [
    Load("memories", "every memory: samples, beams, scores, the same again",
         each(memory=["paged", "uniform", "orca-oracle", "orca-pow2", "orca-max", "ft", "virtual"], max_model_len=512,
              model="tiny"),
         [("generate", STORIES, SEVERAL), ("generate", STORIES, SEVERAL), ("generate", LONG, GREEDY)],
         {COPY: 1, "generated": 190}),
    Load("virtual", "layouts, page sizes and mapping of virtual memory",
         [*each(memory="virtual", virtual_layout=["layer", "sliced", "sliced:2"], virtual_page_kib=[64, 128],
                max_model_len=512), *each(memory="virtual", map_ahead="off", max_model_len=512)],
         [("generate", [LONG * 4, *STORIES], {**DRAWN, "n": 2}), ("generate", [LONG * 4, LONG * 4 + "End"], GREEDY)],
         {"cached": 32, COPY: 1}),
    Load("prefixes", "cached and registered prefixes",
         [*each(memory=["paged", "uniform", "virtual"], prefix_tokens=64, max_num_batched_tokens=[24, 512],
                max_model_len=512), {"prefix_tokens": 64, "table_scope": "layer"}],
         [("generate", [LONG] * 3, DRAWN), ("generate", [LONG + text for text in STORIES], SEVERAL),
          ("register_prefix", "rules", "Once upon a time, there was a little dog."),
          ("generate", ["Once upon a time, there was a little dog. It was red", LONG[:60]], DRAWN),
          ("reset_prefix_cache",), ("generate", [LONG, LONG], GREEDY), ("release_prefix", "rules"),
          ("release_prefix", "rules"), ("generate", [LONG[9:], LONG[9:] + "End"], GREEDY)], {"cached": 40}),
    Load("no-prefixes", "without prefix caching", [{"enable_prefix_caching": False}],
         [("generate", [LONG] * 3, DRAWN), ("generate", [LONG + text for text in STORIES], SEVERAL)], {TABLE: 9}),
    Load("recompute", "preemption by recomputation",
         each(model="llama", memory=["paged", "uniform", "virtual"], preemption="recompute", **OWN, depth=[None, 1, 3],
              **SHORT, enable_prefix_caching=False), FULL, {"recomputed": 20, "admitted again": 2}),
    Load("recompute-groups", "the same with samples and beams, and with prefixes",
         each(model="llama", memory=["paged", "virtual"], preemption="recompute", **OWN, **SHORT), FULLER,
         {"admitted again": 3}),
    Load("swap", "preemption by swapping",
         each(model="llama", memory=["paged", "uniform", "virtual"], preemption="swap", **OWN, **SHORT,
              enable_prefix_caching=[True, False], depth=[None, 1]), FULLER, {OUT: 3, IN: 3}),
    Load("swap-little", "swapping with too little host memory, and what costs less",
         [{"model": "llama", **OWN, **SHORT, "preemption": "swap", "swap_gib": 0.00004},
          {"model": "llama", **OWN, **SHORT, "preemption": "auto"}], FULLER, {OUT: 1}),
    Load("sampling", "every parameter of sampling", [{}, {"depth": 1}, {"deterministic": True}],
         [("generate", ["Once upon a time, there was"] * len(SAMPLING), SAMPLING),
          ("generate", [STORIES[3]] * 12, SAMPLING[4:16])], {"generated": 900}),
    Load("decoding", "beam search, streams, sessions, chats", [{}, {"page_size": 4, "memory": "virtual"}],
         [("beam_search", STORIES[:3], {"beam_width": 4, "max_tokens": 14}),
          ("beam_search", STORIES[:2], {"beam_width": 3, "max_tokens": 9, "length_penalty": 0.2, "ignore_eos": True}),
          ("stream", STORIES[0], {**DRAWN, "n": 2, "stop": ["was"]}), ("session", STORIES[1]),
          ("chat", [user("Hello!")], GREEDY), ("chat", [[user("Who are you?")], [user("What is the sky?")]], DRAWN),
          ("chat", [user("Hi"), {"role": "assistant", "content": "I am"}], GREEDY, {"add_generation_prompt": False})],
         {COPY: 1}),
    Load("chunks", "prompts in chunks, pages of several sizes",
         [*each(model="llama", skip_tokenizer_init=True, page_size=[1, 4, 32], max_num_batched_tokens=[7, 40]),
          *each(model="llama", **OWN, max_num_seqs=3, depth=[1, 2])], [*TWICE, SCORES], {"steps": 40}),
    Load("families", "models of every family that has one kind of layer",
         each(model=["llama", "mistral", "qwen2", "qwen3", "phi3", "opt", "gpt2"], **OWN), [*TWICE, SCORES],
         {"cached": 8}),
    Load("windows", "models with windows, chunks and shared layers",
         each(model=["ministral", "gemma2", "gemma3", "chunked"], **OWN, memory=["paged", "uniform"]),
         [*TWICE, SCORES, *FULL], {"cached": 8}),
    Load("windows-virtual", "windows in virtual memory",
         each(model=["ministral", "gemma2"], **OWN, memory="virtual", max_model_len=256,
              virtual_layout=[None, "layer"]),
         [*TWICE, SCORES, *FULL], {"generated": 500}),
    Load("unlike", "pages of unlike layers: sizes, association, retention; preemption by swapping",
         [*each(model="ministral", **OWN, page_sizes=["lcm", "max", "gcd", "own"], preemption="swap", **SHORTER),
          *each(model="gemma2", **OWN, association=["paper", "bulk", "none"], retention=["paper", "slack"],
                preemption="swap", **SHORTER),
          {"model": "ministral", **OWN, "preemption": "swap", **SHORTER, "memory": "uniform"}],
         FEW, {OUT: 1}),
    Load("states", "models with running states",
         [*each(model=["jamba", "mamba", "falcon-mamba"], **OWN, state_tokens=16, retention=["paper", "boundary"]),
          *each(model="jamba", **OWN, state_tokens=16, page_sizes=["max", "own"])],
         [*TWICE, SCORES], {"cached": 16}),
    Load("states-short", "the same in short memory",
         [*each(model=["jamba", "mamba"], **OWN, state_tokens=16, preemption="swap", kv_tokens=112, max_num_seqs=6,
                max_model_len=110, swap_gib=0.05)], FEW, {OUT: 1, IN: 1}),
    Load("states-uniform", "states apart from the pages", [{"model": "jamba", **OWN, "memory": "uniform"}], TWICE,
         {"generated": 200}),
    Load("pyramid", "layers that keep a part of each prompt",
         [*each(model="pyramid", **OWN, memory=["paged", "uniform"], max_num_batched_tokens=[24, 512])],
         [*TWICE, *FULL], {"generated": 200}),
    Load("pyramid-short", "the same in short memory",
         each(model="pyramid", **OWN, preemption=["swap", "recompute"], **SHORT), FULL, {OUT + "|admitted again": 1}),
    Load("cross", "cross attention to pictures",
         [*each(model="mllama", page_size=4, max_model_len=256, max_num_batched_tokens=[20, 512]),
          {"model": "mllama", "memory": "uniform", "max_model_len": 256, "page_size": 4}],
         pictured("<|image|>"), {ENCODE: 3, "cached": 1}),
    Load("vision", "pictures in the places of tokens",
         [*each(model="internvl", max_model_len=512, max_num_batched_tokens=[40, 512],
                vision_cache=["pages", "inside", "off"]),
          {"model": "internvl", "memory": "uniform", "max_model_len": 512}], pictured("<IMG_CONTEXT>"),
         {ENCODE: 3, "cached": 1}),
    Load("both-ways", "prompts that attend both ways", each(model="paligemma", max_model_len=512), pictured("<image>"),
         {ENCODE: 3}),
    Load("tiny-vision", "the bundled model that sees, in long and in short memory",
         [{"model": "tiny-vision"}, {"model": "tiny-vision", "vision_cache": "inside", "max_num_batched_tokens": 64},
          {"model": "tiny-vision", "kv_tokens": 640, "preemption": "recompute", "max_num_batched_tokens": 96}],
         [("chat", [[user("What colour and shape is this?", i)] for i in range(5)], {**GREEDY, "logprobs": 2}),
          ("chat", [[user("Compare.", 0, 1)], [user("Describe the picture.", 2)], [user("Again.", 0, 3)]], GREEDY)],
         {ENCODE: 5}),
    Load("ranks", "two ranks, two stages, and a rank of its own",
         [{"tp": 2, "model": "llama", **OWN}, {"pp": 2, "model": "llama", **OWN},
          {"executor": "process", "model": "llama", **OWN, **SHORT, "preemption": "swap"}],
         [*TWICE, *FULL], {"generated": 400}, slow=True),
    Load("ranks-unlike", "two ranks or stages of models with windows and states, in short memory",
         [{"tp": 2, "model": "ministral", **OWN, **SHORTER, "preemption": "swap"},
          {"pp": 2, "model": "jamba", **OWN, "state_tokens": 16},
          {"tp": 2, "model": "llama", **OWN, "memory": "virtual"}],
         FEW, {"generated": 300}, slow=True),
    Load("pool", "two models over one memory",
         [{"pool": [{"model": "llama", **OWN}, {"model": "ministral", **OWN}], "kv_gib": 0.0002}], [*TWICE, *FULL],
         {"generated": 900}),
    Load("sleep", "sleep and wake, with a registered prefix",
         [*each(memory=["paged", "virtual", "orca-max"], max_model_len=512), {"prefix_tokens": 64}],
         [("register_prefix", "dog", LONG[:50]), ("generate", STORIES, SEVERAL), ("sleep", 1),
          ("generate", STORIES[:1], GREEDY), ("wake_up",), ("generate", STORIES, SEVERAL), ("sleep", 2),
          ("wake_up", ["weights"]), ("wake_up", ["kv_cache"]), ("generate", STORIES, SEVERAL), ("sleep", 3)],
         {"generated": 250}, errors=True),
    Load("embeddings", "embeddings", [{}, {"pooling": "mean"}, {"max_num_batched_tokens": 9}],
         [("embed", STORIES), ("embed", [LONG, "A"]), ("embed", ids(30, 1)), ("generate", STORIES, GREEDY)],
         {"generated": 50}),
    Load("numbers", "formats of weights, keys and values; backends of attention",
         [*each(quantization=["fp8", "int8", "int4"]), {"kv_cache_dtype": "int8"}, {"dtype": "bfloat16"},
          *each(attention=["reference", "sdpa", "native"]), {"cuda_graphs": False}, {"debug": True},
          {"memory": "virtual", "attention": "contiguous", "max_model_len": 512}, {"model": "tiny-draft"},
          {"model": "llama", "dummy_weights": True, "skip_tokenizer_init": True}],
         [("generate", [[17, 4, 56], ids(30, 2), ids(60, 3)], {**GREEDY, "logprobs": 5, "detokenize": False}),
          ("generate", [ids(60, 3), ids(30, 2)], {**DRAWN, "n": 2, "detokenize": False})], {"generated": 60}),
    Load("bad-calls", "bad prompts and parameters in Python", [{"max_model_len": 64, "prefix_tokens": 16}],
         [*(("generate", prompt, GREEDY) for prompt in list[Any]([
             "", [], [""], [5000], [-1], ["a", 5], [[]], {"x": 1}, None, LONG, "\ud800",
             {"prompt": "a", "multi_modal_data": 1}])),
          *(("generate", "a", bad) for bad in list[dict[str, Any]]([
              {"n": 0}, {"n": "1"}, {"temperature": -1}, {"top_p": 0}, {"top_k": -2}, {"min_p": 2}, {"seed": 2**70},
              {"stop": [""]}, {"stop": "x" * 300}, {"logprobs": 21}, {"best_of": 1, "n": 2}, {"beam_width": 99},
              {"beam_width": 2, "stop": "a"}, {"allowed_token_ids": []}, {"logit_bias": {9999: 1.0}},
              {"bad_words": [" "]}, {"max_tokens": 0}, {"min_tokens": 9, "max_tokens": 3}, {"stop_token_ids": "a"},
              {"presence_penalty": 3}, {"repetition_penalty": 0}, {"unknown": 1}, {"n": 200}, {"n": 20}])),
          ("generate", ["a", "b"], [GREEDY]), ("chat", [{"role": "king", "content": "a"}], GREEDY),
          ("embed", "a"), ("embed", ""), ("register_prefix", "!", "a"), ("register_prefix", "a", LONG),
          ("wake_up", ["x"]), ("sleep", 9), ("generate", "a", GREEDY)], {"generated": 4}, errors=True),
    Load("bad-settings", "settings with which no engine starts",
         [{"memory": "heap"}, {"kv_tokens": 1, "kv_gib": 1}, {"kv_gib": 0}, {"page_size": 0}, {"page_size": True},
          {"tp": 7, "model": "llama"}, {"tp": 64}, {"tp": 2, "executor": "inline"}, {"pp": 9, "model": "llama"},
          {"model": "no/such/folder"}, {"model": "mamba", "memory": "virtual"},
          {"model": "pyramid", "prefix_tokens": 4}, {"model": "gpt2", "page_sizes": "gcd", "memory": "virtual"},
          {"table_scope": "layer", "memory": "uniform"},
          {"memory": "ft", "prefix_tokens": 9}, {"kv_tokens": 8}, {"memory": "orca-max", "kv_tokens": 512},
          {"model_config": "opt-1.3b"}, {"model_config": "nothing"}, {"override_generation_config": {"x": 1}},
          {"state_tokens": 3, "model": "jamba"}, {"attention": "triton"}, {"device": "cuda"}, {"max_model_len": 10**8},
          {"model": "internvl", "memory": "virtual"}, {"rank_timeout": 0}, {"unknown": 1}],
         [], {}, errors=True, plans=False),
]


def every(ask: Callable[..., tuple[Any, ...]], *bodies: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return a request of each body."""
    return [ask(**body) for body in bodies]


def complete(**body: Any) -> tuple[Any, ...]:
    return "POST", "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 12, **body}


def chat(text: str = "Hello!", **body: Any) -> tuple[Any, ...]:
    """A chat of one message, or of `messages`."""
    return "POST", "/v1/chat/completions", {"messages": [user(text)], "max_tokens": 16, **body}


SAMPLED = [{key: value for key, value in asked.items() if key != "detokenize"} for asked in SAMPLING]
STOPPED = [asked for asked in SAMPLED if "stop" in asked]  # over HTTP a stop reaches the engine one or two steps later
SAMPLED = [asked for asked in SAMPLED if asked not in STOPPED]
SCHEMA = {"type": "object", "required": ["name", "age"], "additionalProperties": False, "properties": {
    "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99}}}
TOOL: dict[str, Any] = {"type": "function", "function": {
    "name": "weather", "description": "The weather of a place.", "parameters": {
        "type": "object", "required": ["place"], "properties": {"place": {"type": "string", "maxLength": 9}}}}}
CALLED = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": {
    "name": "weather", "arguments": '{"place": "Rome"}'}}]}
TOLD = {"role": "tool", "tool_call_id": "call_1", "content": "It is sunny."}
FORMS = [{"json": SCHEMA}, {"regex": "[A-Z]{2}-[0-9]{4}"}, {"choice": ["red", "green", "dark blue"]},
         {"grammar": 'start: "a" WORD "!"\nWORD: /[b-f]{3,8}/'}, {"json_object": True},
         {"json": SCHEMA, "disable_any_whitespace": True}]
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
WEATHER = {"name": "weather", "description": "The weather of a place.",
           "input_schema": TOOL["function"]["parameters"]}
FLAT = {"type": "function", **TOOL["function"]}


def answer(path: str, **body: Any) -> tuple[Any, ...]:
    """A request to /v1/responses or /v1/messages."""
    return "POST", path, body


def said(text: str, **more: Any) -> tuple[Any, ...]:
    return answer("/v1/messages", **{"max_tokens": 16, "messages": [user(text)], **more})


PEERS = [
    ("GET", "/health", None), ("GET", "/ping", None), ("POST", "/ping", None), ("HEAD", "/health", None),
    ("GET", "/version", None), ("GET", "/load", None), ("GET", "/v1/models", None), ("GET", "/v1/models/tiny", None),
    ("GET", "/v1/models/none", None), ("GET", "/nowhere", None), ("PUT", "/v1/completions", {}), ("GET", "/", None),
    ("GET", "/console/", None), ("GET", "/tokenizer_info", None),
    ("POST", "/tokenize", {"prompt": "Once upon a time", "return_token_strs": True}),
    ("POST", "/tokenize", {"messages": [user("Hi")], "add_generation_prompt": False}),
    ("POST", "/detokenize", {"tokens": [300, 301, 302]}),
]
BAD = [
    *every(complete,
        {"prompt": ""}, {"prompt": []}, {"prompt": [""]}, {"prompt": ["a", 1]}, {"prompt": [5000]}, {"prompt": [-1]},
        {"prompt": [[1], [9999]]}, {"prompt": [1] * 300}, {"prompt": ["a"] * 257}, {"prompt": None}, {"n": 0},
        {"n": "x"}, {"n": 200}, {"temperature": -1}, {"temperature": "hot"}, {"top_p": 0}, {"top_k": -5}, {"min_p": 2},
        {"presence_penalty": 9}, {"seed": 2**70}, {"max_tokens": -1}, {"max_tokens": 0}, {"logprobs": 21},
        {"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}, {"beam_width": 65}, {"beam_width": 2, "stop": "a"},
        {"length_penalty": 2}, {"early_stopping": True}, {"use_beam_search": 1}, {"stop": ["a"] * 17}, {"stop": [1]},
        {"logit_bias": {"x": 1}}, {"logit_bias": {"9999": 1}}, {"bad_words": [" "]}, {"cache_salt": ""},
        {"stream": "yes"}, {"stream_options": {"include_usage": True}}, {"model": "other"}, {"suffix": "b"},
        {"allowed_token_ids": []}, {"guided_regex": "("}, {"guided_json": {"not": {}}}, {"guided_choice": []},
        {"guided_grammar": "a: b"}, {"guided_regex": "a", "min_tokens": 2}, {"truncate_prompt_tokens": 0},
        {"multi_modal_data": {"image": "data:image/png;base64,"}}, {"request_id": ""}, {"priority": 1},
        {"structured_outputs": {"json": {}, "regex": "a"}}, {"response_format": {"type": "xml"}}),
    *every(chat,
        {"messages": []}, {"messages": "hi"}, {"messages": [{"role": "user"}]}, {"top_logprobs": 2}, {"tools": [{}]},
        {"messages": [{"role": "king", "content": "a"}]}, {"messages": [user("a", 1)]}, {"tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "none"}}}, {"messages": [TOLD]},
        {"tools": [TOOL, TOOL]}, {"chat_template_kwargs": {"messages": []}}, {"functions": [1]}, {"modalities": ["x"]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}, {"thinking_token_budget": 5},
        {"messages": [user("a" * 3000)]}, {"continue_final_message": True, "add_generation_prompt": True}),
    *every(partial(answer, "/v1/responses"),
        {}, {"input": []}, {"input": "a", "previous_response_id": "x"}, {"input": "a", "background": True},
        {"input": "a", "tools": [{"type": "web_search"}]}, {"input": "a", "max_tokens": 4}, {"input": [{}]}),
    *every(partial(answer, "/v1/messages"),
        {}, {"max_tokens": 4}, {"max_tokens": 0, "messages": [user("a")]}, {"max_tokens": 4, "messages": []},
        {"max_tokens": 4, "messages": [user("a")], "stop": ["x"]},
        {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "document"}]}]}),
    ("POST", "/v1/completions", "{"), ("POST", "/v1/completions", "[1]"), ("POST", "/v1/completions", b"\xff\xfe"),
    ("POST", "/v1/completions", '{"prompt": "a", "n": NaN}'), ("POST", "/v1/completions", "[" * 9999),
    ("POST", "/v1/completions", "a=b", {"Content-Type": "application/x-www-form-urlencoded"}),
    ("POST", "/v1/embeddings", {}), ("POST", "/v1/embeddings", {"input": ""}), ("POST", "/tokenize", {}),
    ("POST", "/v1/embeddings", {"input": "a", "dimensions": 9999}), ("POST", "/detokenize", {"tokens": "a"}),
    ("POST", "/score", {"text_1": "a"}), ("POST", "/rerank", {"query": "a"}), ("POST", "/sleep?level=9", None),
    ("POST", "/v1/prefixes", {"name": "!", "text": "a"}), ("DELETE", "/v1/prefixes/none", None),
    ("POST", "/wake_up?tags=x", None), ("POST", "/reset_prefix_cache?x=1", None), ("GET", "/v1/responses/none", None),
    ("POST", "/v1/completions", {"prompt": "a"}, {"Authorization": "Bearer wrong"}),
    ("POST", "/v1/prefixes", {"name": "a", "text": "a"}, {"Authorization": "Bearer key"}), complete(),
]
KEYS: dict[str, Any] = {"files": {"keys": "key\n", "admin": f"{KEY}\n"}, "api_key_file": "keys",
                        "admin_key_file": "admin"}
THINKS = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}<think>\n{# </think> #}"
MANY = [{"prompt": f"{text} {i}", "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream": i % 2 == 0}
        for i in range(4) for text in STORIES[:4]]
CROWD = {"prompt": [[17 + i, *ids(40, i, 3000)] for i in range(10)], "max_tokens": 50, "ignore_eos": True, "seed": 5}
SERVED = [
    Load("completions", "completions: every parameter, whole and streamed", [{"kv_tokens": 8192}],
         Serve([*(complete(**asked) for asked in SAMPLED),
                *(complete(**asked, **STREAM) for asked in SAMPLED if asked.get("best_of") is None),
                complete(), complete(prompt=[300, 301]), complete(prompt=STORIES, n=2, seed=1),
                complete(prompt=STORIES, **STREAM, seed=1), complete(prompt=LONG), complete(prompt=LONG, mirostat=1),
                complete(echo=True, logprobs=2), complete(echo=True, max_tokens=0, logprobs=1), complete(user="me"),
                complete(prompt=LONG, truncate_prompt_tokens=9), complete(return_token_ids=True, seed=2),
                complete(prompt=LONG, truncate_prompt_tokens=9, truncation_side="right", cache_salt="s"),
                complete(return_tokens_as_token_ids=True, logprobs=1), complete(use_beam_search=True, n=3),
                complete(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}),
                complete(add_special_tokens=False, prompt_logprobs=1)]),
         {"quire_prefix_cache_hits_total": 50, "generated": 900}),
    Load("stops", "stop strings: answers alone", [{}],
         Serve([request for more in ({}, STREAM) for request in (
             *(complete(**asked, **more) for asked in STOPPED), complete(prompt=STORIES, stop=["a"], seed=2, **more),
             said("Hello!", stop_sequences=["How"], **{key: value for key, value in more.items() if key == "stream"}),
             chat(stop="help", n=2, seed=3, **more))]), {"generated": 100}, plans=False),
    Load("chats", "chats, tools, forms and thoughts, whole and streamed", [{"kv_tokens": 8192}],
         Serve([request for more in ({}, STREAM) for request in (
             chat(**more), chat("What is the colour of the sky?", n=2, seed=4, temperature=1.0, **more),
             chat(logprobs=True, top_logprobs=3, **more), chat(max_completion_tokens=3, return_token_ids=True, **more),
             chat(messages=[user("Say"), {"role": "assistant", "content": "The dog"}], continue_final_message=True,
                  add_generation_prompt=False, echo=True, **more),
             *(chat(structured_outputs=form, max_tokens=60, seed=3, temperature=1.0, **more) for form in FORMS),
             chat(response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}},
                  max_tokens=60, n=2, seed=5, temperature=1.0, **more),
             chat(tools=[TOOL], tool_choice="required", max_tokens=60, seed=2, temperature=1.0, **more),
             chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}, **more),
             chat(tools=[TOOL], tool_choice="none", mirostat=2, **more),
             chat(messages=[user("Rome?"), CALLED, TOLD], tools=[TOOL], **more),
             chat(tools=[TOOL], max_tokens=60, structured_outputs={
                 "regex": r'\{"name": "weather", "arguments": \{"place": "[a-f]{2,4}"\}\}'}, **more))]),
         {"generated": 400}),
    Load("thoughts", "a model that thinks, calls of tools in tags",
         [{"files": {"thinks": THINKS}, "chat_template": "thinks", "reasoning_parser": "granite",
           "tool_call_parser": "hermes"}],
         Serve([request for more in ({}, STREAM) for request in (
             chat(**more), chat(include_reasoning=False, **more), chat(n=2, seed=1, temperature=1.0, **more),
             chat(max_tokens=70, structured_outputs={
                 "regex": "Here is my thought process: [ab]{3,9} Here is my response: [cd]{3}"}, **more),
             chat(max_tokens=70, tools=[TOOL], structured_outputs={
                 "regex": r'<tool_call>\{"name": "weather", "arguments": \{"place": "[a-f]{2,4}"\}\}</tool_call>'},
                  **more))]), {"generated": 100}),
    Load("responses", "responses and messages", [{"store_responses": 20}],
         Serve([request for more in ({}, {"stream": True}) for request in (
             answer("/v1/responses", input="Hello!", max_output_tokens=9, **more),
             answer("/v1/responses", input=[user("Who?")], instructions="Be brief.", text={
                 "format": {"type": "json_schema", "name": "p", "schema": SCHEMA}}, max_output_tokens=50, **more),
             answer("/v1/responses", input="Rome?", tools=[FLAT], tool_choice="required", max_output_tokens=50, **more),
             said("Hello!", **more), said("Hello!", system="Be brief.", top_k=4, **more),
             said("Rome?", tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=50, **more),
             said("Who?", output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, user="me", **more))]
             + [answer("/v1/messages/count_tokens", messages=[user("Hello!")]),
                answer("/v1/responses", input="Hello!", metadata={"a": "b"}), ("GET", "/v1/responses/$LAST", None),
                answer("/v1/responses", input="And who are you?", previous_response_id="$LAST"),
                ("DELETE", "/v1/responses/$LAST", None), ("GET", "/v1/responses/$LAST", None)]),
         {"generated": 150}),
    Load("routes", "embeddings, scores, and all that answers without the engine",
         [{"enable_tokenizer_info_endpoint": True, "pooling": "mean"}],
         Serve([*PEERS, *(("POST", path, body) for path, body in (
             ("/v1/embeddings", {"input": STORIES[:2]}), ("/v1/embeddings", {"input": [300, 301], "dimensions": 16}),
             ("/v1/embeddings", {"input": "A dog", "encoding_format": "base64", "dimensions": 8}),
             ("/score", {"text_1": "A dog", "text_2": STORIES}), ("/rerank", {"query": "dog", "documents": STORIES}),
             ("/v1/rerank", {"query": "dog", "documents": STORIES, "top_n": 2})))]), {"generated": 0}),
    Load("bad-requests", "requests that are refused", [{"max_model_len": 256, **KEYS}], Serve(BAD), {"generated": 12}),
    Load("strict", "unknown fields refused, other names",
         [{"strict": True, "served_model_name": "one", "max_logprobs": 2, "metrics_prefix": "vllm",
           "engine_process": "off", "no_generation_config": True, "no_console": True, "root_path": "/x"}],
         Serve([complete(mirostat=1), complete(model="one", seed=1), complete(logprobs=3), chat(seed=2), *PEERS[:12],
                ("POST", "/x/v1/completions", {"prompt": "A", "max_tokens": 3, "seed": 1}),
                chat(messages=[{**user("a"), "mood": 1}])]), {"generated": 0}),
    Load("care", "prefixes, sleep and resets, by the operator",
         [{"prefix_tokens": 256, **KEYS, "files": {**KEYS["files"], "p.json": '{"ids": {"token_ids": [17, 4, 256]}}'},
           "prefixes": "p.json", "enable_server_info": True}],
         Serve([("GET", "/v1/prefixes", None), ("POST", "/v1/prefixes", {"name": "dog", "text": LONG[:80]}),
                ("POST", "/v1/prefixes", {"name": "dog", "text": "a"}), ("GET", "/v1/prefixes", None),
                ("POST", "/v1/prefixes", {"name": "long", "token_ids": ids(300, 1)}), complete(prompt=LONG, seed=1),
                ("POST", "/reset_prefix_cache", None), complete(prompt=LONG, seed=1), complete(prompt=LONG, seed=1),
                ("POST", "/sleep?level=1", None), ("GET", "/is_sleeping", None), complete(), ("GET", "/health", None),
                ("POST", "/wake_up?tags=weights", None), ("GET", "/is_sleeping", None), ("POST", "/wake_up", None),
                complete(prompt=LONG, seed=1), ("POST", "/sleep?level=2&mode=wait", None), ("POST", "/wake_up", None),
                complete(prompt=LONG, seed=1), ("DELETE", "/v1/prefixes/dog", None), ("GET", "/v1/prefixes", None)]),
         {"quire_prefix_cache_hits_total": 20}),
    Load("pictures", "pictures over HTTP", [{"model": "tiny-vision"}],
         Serve([*(chat(messages=[user("What colour and shape is this?", *seeds)], temperature=0, **more)
                  for seeds in ((1,), (1,), (2, 3), (3, 1), ()) for more in ({}, STREAM)),
                complete(prompt="Look <image>", multi_modal_data={"image": uri(1)}, temperature=0),
                complete(prompt="Look", multi_modal_data={"image": uri(1)}), complete(prompt="Look <image>"),
                complete(prompt="<image>", multi_modal_data={"image": "http://a/b.png"}),
                complete(prompt="<image>", multi_modal_data={"image": uri(1)[:200]}),
                complete(prompt="<image> " * 9, multi_modal_data={"image": [uri(1)] * 9}),
                said("", messages=[{"role": "user", "content": [{"type": "image", "source": {
                    "type": "base64", "media_type": "image/png", "data": uri(4).partition(",")[2]}}]}]),
                answer("/v1/responses", input=[{"role": "user", "content": [
                    {"type": "input_text", "text": "What?"}, {"type": "input_image", "image_url": uri(4)}]}])]),
         {"quire_picture_hits_total": 2, "quire_encoder_runs_total": 4}),
    Load("pressure-swap", "a batch in short memory, swapped",
         each(kv_tokens=512, preemption="swap", max_model_len=256, memory=["paged", "virtual"]),
         Serve([complete(**CROWD), complete(**{**CROWD, "n": 2, "seed": 6})]),
         {"quire_preemptions_total{way=swap}": 1, "quire_swapped_in_bytes_total": 1}),
    Load("pressure-recompute", "the same, recomputed",
         each(kv_tokens=512, preemption="recompute", max_model_len=256, memory=["paged", "virtual"]),
         Serve([complete(**CROWD), complete(**{**CROWD, "n": 2, "seed": 6})]),
         {"quire_preemptions_total{way=recompute}": 1}),
    Load("at-once", "clients at the same time, in short memory: answers alone",
         each(kv_tokens=512, max_model_len=256), Serve([("AT ONCE", "/v1/completions", MANY)] * 2),
         {"quire_num_preemptions_total": 1}, plans=False),
]
BATCH = "\n".join(json.dumps({"custom_id": str(i), "method": "POST", "url": path, "body": body})
                  for i, (_, path, body) in enumerate([complete(seed=1), complete(n=2), chat(seed=2), complete(n=0)]))
TINY = ("--device", "cpu", "--dtype", "float32", "--kv-tokens", "4096", "--threads", "1", "--seed", "7")
COMMANDS = ("generate", "chat", "serve", "run-batch", "plan", "replay", "simulate", "bench", "reproduce")
SHAPES = ("llama3-8b", "opt-13b", "gpt3-175b", "qwen3-8b", "ministral-8b", "gemma-2-9b", "gemma-3-4b", "characterai-8b",
          "pyramidkv-8b", "jamba-52b", "mamba-2.8b", "llama3.2-vision-11b", "paligemma2-10b", "phi-3-vision-4b",
          "internvl2-8b", "llava-onevision-7b")
JSON = ("--out", "result.json")
SIMULATED = [
    ("--calibration", "a100-13b", "--model-config", "opt-13b", "--kv-gib", "3", "--workload", "sharegpt@60",
     "--rate", "4", "--memory", memory) for memory in ("paged", "orca-pow2", "orca-max", "ft", "virtual")
] + [
    ("--calibration", "h200-ministral-8b", "--model-config", "ministral-8b", "--workload", "docqa:5:60000@20",
     "--rate", "2", "--kv-gib", "20", "--max-num-batched-tokens", "8192", *more)
    for more in (
        (), ("--retention", "paper"), ("--retention", "slack"), ("--page-sizes", "max"), ("--page-sizes", "own"),
        ("--page-sizes", "gcd"), ("--association", "paper"), ("--association", "none"), ("--memory", "uniform"))
] + [
    ("--calibration", "h200-llama3-8b", "--rate", "3", "--kv-gib", "8", "--model-config", name, "--workload", load)
    for name, load in (("jamba-52b", "shared:6000:900:200@40"), ("llama3.2-vision-11b", "mmmu-pro@30"),
                       ("internvl2-8b", "mmmu-pro@30"), ("gemma-2-9b", "sharegpt@80"), ("pyramidkv-8b", "sharegpt@80"))
]
FLAGS, NUMBERS, NOTHING = r"^ {2,8}(-[\w-]+(?:, -[\w-]+)*)", r"\d[\d.,]*", r"\Z."
LINES = [
    Load("help", "help of every command", [{"quire": [*name.split(), "--help"], "keeps": FLAGS} for name in COMMANDS]
         + [{"quire": line, "keeps": FLAGS} for line in (["--help"], ["bench", "list"], ["reproduce", "--list"])],
         CLI, {"characters": 100}, plans=False),
    Load("plans", "memory plans of well-known models",
         [{"quire": ["plan", "--model-config", name, "--dummy-weights", "--device-gib", "800"], "keeps": NUMBERS}
          for name in SHAPES], CLI, {"characters": 100}, plans=False),
    Load("simulations", "simulated serving over several memories",
         [{"quire": ["simulate", *line, "--dummy-weights", *JSON], "results": ["result.json"], "keeps": NUMBERS}
          for line in SIMULATED], CLI, {"characters": 100}, plans=False, slow=True),
    Load("commands", "generate, chat, run-batch",
         [{"quire": ["generate", *TINY, "--json", "--n", "3", "--prompt", STORIES[0], "--prompt", LONG], "log": True,
           "stdin": ""},
          {"quire": ["generate", *TINY, "--beam-width", "3", "--max-tokens", "9"], "stdin": STORIES[1], "log": True},
          {"quire": ["chat", *TINY], "stdin": "Hello!\nWho are you?\n/reset\nHello!\n//a\n/quit\n", "log": True}],
         CLI, {"characters": 20}),
    Load("run-batch", "a file of requests",
         [{"quire": ["run-batch", *TINY, "-i", "in.jsonl", "-o", "out.jsonl"], "files": {"in.jsonl": BATCH},
           "reads": ["out.jsonl"], "keeps": NOTHING, "stdin": ""}], CLI, {"status": 1}, plans=False),
    Load("bad-commands", "command lines that fail",
         [{"quire": line, "keeps": NOTHING} for line in (
             ["nothing"], ["serve", "--prot", "1"], ["serve", "--enable-lora"], ["serve", "--memory", "heap"],
             ["serve", "--port", "x"], ["generate", "--max-tokens", "-1", "--prompt", "a"], ["replay", "none.log"],
             ["serve", "--kv-gib", "1", "--kv-tokens", "9"], ["plan", "--model-config", "none"], ["bench", "none"],
             ["reproduce", "none"], ["simulate"], ["generate", "--length-penalty", "2", "--prompt", "a"])],
         CLI, {"status": 1}, plans=False),
]
# fmt: on
LOADS = [*OFFLINE, *SERVED, *LINES]
