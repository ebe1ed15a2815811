"""Llama 3.2 Vision from transformers' checkpoints: what the engine says of tokens is what transformers' logits say to
1e-4, whatever the chunks, pages, hits, preemptions, forks and beams, beside neighbours without pictures; and beams
are those of transformers' `generate`."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from mllama_models import PROMPTS, SIDE, VOCAB, Saved, run, shown, text, tokens_of
from PIL import Image
from safetensors.torch import load_file, save_file
from test_unlike_logits import assert_said, check_branches, engine_of, serving

from quire import SamplingParams
from quire.config import EngineConfig
from quire.errors import InputError, StartupError
from quire.models import read_spec
from quire.models.mllama import Mllama
from quire.startup.checkpoint import read_checkpoint, read_image_loader
from quire.text.input_processor import InputProcessor
from quire.text.tokenizer import Tokenizer
from quire.weights.checkpoint_files import read_config
from quire.weights.loader import load_weights

NEW = 9
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("mllama"))


def check(model: Saved, preemption: str | None = None, **settings: Any) -> None:
    """Prompts and pictures are found in memory."""
    with serving(model, preemption, enable_prefix_caching=True, **settings) as engine:
        check_branches(engine, model, PROMPTS, run=run)
        assert preemption is not None or engine.scheduler.memory.account().sharing.hits > 0


@pytest.mark.share(8)
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 7), (4, 1), (16, 3), (16, 64)])
def test_logits_of_branches(model: Saved, page_size: int, chunk: int, preemption: str | None) -> None:
    check(model, preemption, page_size=page_size, max_num_batched_tokens=chunk)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("settings", [{"pp": 2}, {"pp": 3, "preemption": "swap"}, {"pp": 2, "tp": 2}], ids=str)
def test_logits_of_stages(model: Saved, settings: dict[str, Any]) -> None:
    """Each has eyes, for its own layers that attend to pictures; the third of three has none of these."""
    check(model, **{"page_size": 4, "max_num_batched_tokens": 16, **settings})


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "settings", [{"max_num_batched_tokens": 7}, {"preemption": "swap"}, {"preemption": "recompute"}], ids=str
)
def test_logits_of_ranks(model: Saved, settings: dict[str, Any], ranks: int) -> None:
    check(model, tp=ranks, **{"page_size": 4, "max_num_batched_tokens": 16, **settings})


@pytest.mark.parametrize(
    "settings",
    [{"memory": "uniform"}, {"page_sizes": "max"}, {"table_scope": "layer"}, {"enable_prefix_caching": False},
     {"attention": "reference"}, {"kv_tokens": 288}],
    ids=str,
)  # fmt: skip
def test_logits_in_other_memories(model: Saved, settings: dict[str, Any]) -> None:
    engine = engine_of(model, max_num_batched_tokens=20, **settings)
    for prompt, tokens, tops in run(engine, PROMPTS, GREEDY):
        assert_said(tops, model.following(prompt, tokens))
    engine.close()


def test_a_picture_hits_whatever_stands_before_it(model: Saved) -> None:
    engine = engine_of(model, max_num_batched_tokens=64, page_size=4)
    gallery = engine.scheduler.memory.encoder_cache
    for before in (3, 8, 17):
        for prompt, tokens, tops in run(engine, [[*text(before, before), "3", *text(5, 1)]], GREEDY):
            assert_said(tops, model.following(prompt, tokens))
    assert (gallery.runs, gallery.hits) == (1, 2)
    engine.close()


def test_text_alone_holds_no_page_of_pictures_and_runs_no_layer_for_them(
    model: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, max_num_batched_tokens=16, page_size=4)
    memory = engine.scheduler.memory
    g = [group.kind for group in memory.kv_config.groups].index("cross")
    for layer in (1, 3):
        monkeypatch.setattr(engine.runner.model.layers[layer], "forward", pytest.fail)
    for prompt, tokens, tops in run(engine, [text(33, 2), text(5, 1)], GREEDY):
        assert_said(tops, model.following(prompt, tokens))
        assert memory.page_pool.used[g] == 0
    assert memory.encoder_cache.runs == 0
    engine.close()


@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
def test_beams(model: Saved, preemption: str | None) -> None:
    """Those of transformers, which decodes one token by one: keys and values of pictures are kept."""
    params = SamplingParams(n=3, beam_width=3, max_tokens=NEW, ignore_eos=True)
    settings = {"max_num_batched_tokens": 24, "page_size": 4, "max_num_seqs": 16}
    with serving(model, preemption, {6, 9, 13}, **settings) as engine:
        answers = list(run(engine, PROMPTS, params))
    for prompt in PROMPTS:
        found = [tokens for one, tokens, _ in answers if one is prompt]
        assert found == model.generate(prompt, NEW, num_beams=3, num_return_sequences=3)


def test_what_penalties_count_of_pictures_is_nothing(model: Saved) -> None:
    engine = engine_of(model)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, repetition_penalty=1.3)
    for prompt, tokens, _ in run(engine, PROMPTS, params):
        for i, token in enumerate(tokens):
            row = model.logits(prompt, tokens)[len(prompt) - 1 + i].clone()
            for seen in {one for one in (*tokens_of(prompt), *tokens[:i]) if one < VOCAB}:
                row[seen] = row[seen] / 1.3 if row[seen] > 0 else row[seen] * 1.3
            assert int(row.argmax()) == token
    engine.close()


def test_tokens_that_stand_for_pictures_are_not_scored(model: Saved) -> None:
    engine = engine_of(model)
    media, pixels = shown(PROMPTS[0])
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with pytest.raises(InputError, match="token 89, which stands for an image"):
        engine.add("0", tokens_of(PROMPTS[0]), params, images=media, pixels=pixels)
    with pytest.raises(InputError, match="prompt token 5 is 89"):
        engine.add("0", tokens_of(PROMPTS[0]), params)
    assert not engine.has_unfinished_requests
    engine.close()


def test_published_names(model: Saved, tmp_path: Path) -> None:
    """Those of the first checkpoints, and those of transformers 5: the same weights."""
    tensors, config = load_file(model.folder / "model.safetensors"), read_config(model.folder)
    loaded = [Mllama(config, torch.float32, torch.device("cpu")) for _ in range(2)]
    for i, (language, rest) in enumerate((("language_model.model.", ""), ("model.language_model.", "model."))):
        named = {}
        for name, tensor in tensors.items():
            bare = name.removeprefix(next((x for x in loaded[0].weight_prefixes if name.startswith(x)), ""))
            head = "language_model." if not i else ""
            inner = rest if "vision_model" in name or "projector" in name else language
            inner += "vision_model." * ("vision_model" in name)
            named[(head if bare.startswith("lm_head") else inner) + bare] = tensor
        (tmp_path / str(i)).mkdir()
        save_file(named, tmp_path / str(i) / "model.safetensors")
    for i, one in enumerate(loaded):
        load_weights(one, tmp_path / str(i))
    for one, other in zip(*(each.parameters() for each in loaded), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": None}, "config.json has no text_config"),
        ({"cross_attention_layers": [1, 4]}, r"cross_attention_layers in text_config.* is \[1, 4\]"),
        ({"cross_attention_layers": [3, 1]}, "in order"),
        ({"cross_attention_layers": []}, "some of the layers 0 to 3"),
        ({"cross_attention_layers": [True]}, "cross_attention_layers"),
        ({"cross_attention_layers": "all"}, "'all'"),
        ({"head_dim": 16}, "head_dim other than"),
        ({"tie_word_embeddings": True}, "tied embeddings"),
        ({"sliding_window": 4, "layer_types": ["sliding_attention"] * 5}, "don't attend to all"),
        ({"vocab_size": 81}, "image token is 89, and there are 89 tokens, extra ones included"),
        ({"vision_config": {}}, "has no vision_config"),
    ],
    ids=str,
)
def test_configs_that_are_none(model: Saved, change: dict[str, Any], message: str) -> None:
    config = read_config(model.folder)
    for name, value in change.items():
        (config if name in config else config["text_config"])[name] = value
    with pytest.raises(StartupError, match=message):
        read_spec(config)


def test_prompts_of_users(model: Saved) -> None:
    """From pictures and a text to tokens: what is between two pictures parts them, and what isn't makes them one."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)} | {"<|image|>": VOCAB})
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<|image|>"])
    config = EngineConfig(model=str(model.folder))
    words = Tokenizer(backend, {})
    sight = read_image_loader(config, read_checkpoint(config), words)
    assert sight is not None
    engine = engine_of(model)
    prompts = InputProcessor(words, None, engine.limits, {}, sight)
    images = [Image.frombytes("RGB", (SIDE * 2, SIDE), bytes([i * 40] * SIDE * SIDE * 6)) for i in range(3)]
    prompt = prompts.process_prompt(
        {"prompt": "w1 <|image|><|image|> w2 <|image|> w3", "multi_modal_data": {"image": images}}
    )
    assert prompt.ids == [1, VOCAB, VOCAB, 2, VOCAB, 3]
    assert [(one.start, one.num_tokens, one.num_embeds, one.num_parts) for one in prompt.images] == [
        (1, 2, 68, 2),
        (4, 1, 34, 1),
    ]
    assert [one.key for one in prompt.pixels] == [one.key for one in prompt.images]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    engine.add("0", prompt.ids, params, images=prompt.images, pixels=prompt.pixels)
    tokens = []
    while engine.has_unfinished_requests:
        tokens += [token for output in engine.step() for token in output.tokens]
    assert len(tokens) == 3
    assert engine.scheduler.memory.encoder_cache.runs == 2
    with pytest.raises(InputError, match="2 image placeholders"):
        prompts.process_prompt({"prompt": "<|image|> w1 <|image|>", "multi_modal_data": {"image": images[0]}})
    engine.close()


def test_nothing_holds_the_pages_of_a_closed_engine(tmp_path: Path) -> None:
    """Another engine may need their memory, though somebody still has the first one."""
    engine = engine_of(Saved(tmp_path))
    list(run(engine, PROMPTS[:2], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)))
    pages = weakref.ref(engine.runner.store.buffer)
    engine.close()
    gc.collect()
    assert pages() is None
