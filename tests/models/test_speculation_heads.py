"""Speculation heads, tiny and random, in fp32: their hidden states and logits are those of transformers' modules, put
together here; checkpoints as they are published; and which ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_context import DenseContext
from published_heads import DRAFTED, HEAD, TARGET, VOCAB, PublishedEagle3, mimo, qwen, randomized, saved
from safetensors.torch import load_file, save_file
from test_against_transformers import built
from thread_ranks import Meeting, ThreadExchange
from torch import Tensor

from quire.errors import StartupError
from quire.layers.prepare import connect_ranks
from quire.models import read_model_config, read_spec, resolve_model_class
from quire.models.head_config import eagle3_config, mtp_config
from quire.models.hidden_states import HiddenStates
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard
from quire.weights.checkpoint_files import read_config, tensor_names
from quire.weights.loader import load_draft_ids, load_weights

CPU = torch.device("cpu")
LENGTH = 20
OTHER_LAYERS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4], "use_aux_hidden_state": True}}
TOKENS = torch.randint(0, VOCAB, (LENGTH + 3,), generator=torch.Generator().manual_seed(4))


def target_spec(folder: Path) -> ModelSpec:
    saved("llama", TARGET, folder)
    return read_spec(read_config(folder))


def head_of(folder: Path, config: dict[str, Any], part: Shard = UNSHARDED) -> Any:
    """A head with its weights, not prepared."""
    head = resolve_model_class(config)(config, torch.float32, CPU, part)
    for parameter in head.parameters():
        parameter.fill_(torch.nan)
    load_weights(head, folder)
    if head.config.has_draft_ids:
        head.set_draft_ids(load_draft_ids(folder, head.config.draft_vocab, head.config.vocab_size))
    return head


def kept_by(head: Any, count: int = 64) -> HiddenStates:
    return HiddenStates(head.config.captured_layers, count, head.config.target_hidden, torch.float32, CPU)


def drafted(target: Any, head: Any, spec: Any, head_spec: Any) -> list[tuple[Tensor, Tensor]]:
    """Hidden states and logits of a first pass over TOKENS, in two steps of the target, and of two more passes of one
    row each, over the next tokens."""
    kept, context, own = kept_by(head), DenseContext(spec), DenseContext(head_spec)
    head.allocate(LENGTH)
    context.hidden_states, hidden = kept, []
    for start, end in ((0, 13), (13, LENGTH)):
        positions = torch.arange(start, end)
        one = torch.zeros_like(positions)
        target.forward(TOKENS[start:end], context.step(positions, one))
        assert torch.equal(kept.select(torch.tensor([2, 0])), kept.rows(3)[[2, 0]])
        head.start_pass(kept.rows(end - start))
        hidden.append(head(TOKENS[start + 1 : end + 1], own.step(positions, one)).clone())
    head.keep_rows(torch.tensor([end - start - 1]))
    passes = [torch.cat(hidden)]
    for at in (LENGTH, LENGTH + 1):
        passes.append(head(TOKENS[at + 1 : at + 2], own.step(torch.tensor([at]), torch.tensor([0]))).clone())
    return [(x.clone(), head.logits(x)) for x in passes]


@torch.no_grad()
def expected(embed: Callable[[Tensor], Tensor], states: Tensor, head: Any) -> list[Tensor]:
    """The hidden states of these passes, all rows anew for each."""
    found = []
    for passes in range(3):
        out = head(embed(TOKENS[1 : LENGTH + 1 + passes]), states)
        found.append(out[LENGTH + passes - 1 :] if passes else out)
        states = torch.cat((states, out[-1:]))
    return found


CASES: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3, another architecture name": {"architectures": ["Eagle3LlamaForCausalLM"]},
    "eagle3, a plain architecture name": {"architectures": ["LlamaForCausalLM"]},
    "eagle3, other layers": OTHER_LAYERS,
    "eagle3, layers counted from the embedding": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
    "eagle3, norm before residual": {"norm_before_residual": True},
    "eagle3, own embedding": {"embeds": True},
    "eagle3, wider than its target": {"embeds": True, "hidden_size": 40, "target_hidden_size": 32},
    "eagle3, all tokens": {"draft_vocab_size": VOCAB},
}


@pytest.mark.parametrize("case", CASES)
def test_an_eagle3_head_as_it_is_published(case: str, tmp_path: Path) -> None:
    config = {**HEAD, **CASES[case]}
    embeds = bool(config.pop("embeds", False))
    theirs = saved("llama", TARGET, tmp_path / "target")
    published = randomized(PublishedEagle3(config, embeds))
    speculators = "counted" in case
    published.save(tmp_path / "head", config, (lambda s: s.replace("midlayer", "layers.0")) if speculators else str)
    spec = read_spec(read_config(tmp_path / "target"))
    full = eagle3_config(read_config(tmp_path / "head"), spec, tensor_names(tmp_path / "head"))
    head, target = head_of(tmp_path / "head", full), built(tmp_path / "target")
    head.prepare()
    head.attach(target)
    with torch.no_grad():
        states = theirs(TOKENS[None], output_hidden_states=True).hidden_states
        layers = (1, 3, 5) if "layers" in case else (2, 3, 3)
        combined = published.fc(torch.cat([states[layer][0, :LENGTH] for layer in layers], dim=-1))
        table = published.embed_tokens or theirs.get_input_embeddings()
        wanted = expected(table, combined, published)
        logits = [published.logits(x) for x in wanted]
    for got, want, want_logits in zip(drafted(target, head, spec, read_spec(full)), wanted, logits, strict=True):
        torch.testing.assert_close(got[0], want, atol=1e-4, rtol=0)
        torch.testing.assert_close(got[1], want_logits, atol=1e-4, rtol=0)
        assert want_logits[0].isfinite().sum() == config["draft_vocab_size"]
    count = sum(parameter.numel() for parameter in published.parameters())
    assert read_spec(full).parameters == count == sum(parameter.numel() for parameter in head_of(
        tmp_path / "head", full).parameters())  # fmt: skip


ATTENTION = {"layer_types": ["full_attention"] * 3}
MTP: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "mimo": (mimo, {}),
    "mimo, tied": (mimo, {"tie_word_embeddings": True}),
    "qwen3_next": (qwen, ATTENTION),
    "qwen3_next, no experts": (qwen, {**ATTENTION, "decoder_sparse_step": 2, "attention_bias": True}),
    "qwen3_5": (qwen, {**ATTENTION, "kind": "qwen3_5_text", "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", MTP)
def test_the_mtp_layer_as_it_is_published(case: str, tmp_path: Path) -> None:
    make, settings = MTP[case]
    theirs, layer = make(tmp_path, **settings)
    config, target = read_config(tmp_path), built(tmp_path)
    spec, full = read_spec(config), mtp_config(config, read_spec(config))
    head = head_of(tmp_path, full)
    assert read_spec(full).parameters == sum(parameter.numel() for parameter in layer.parameters())
    head.prepare()
    head.attach(target)
    with torch.no_grad():
        states = theirs.model(TOKENS[None]).last_hidden_state[0, :LENGTH]
        wanted = expected(theirs.get_input_embeddings(), states, layer)
        logits = [theirs.lm_head(x) for x in wanted]
    for got, want, want_logits in zip(drafted(target, head, spec, read_spec(full)), wanted, logits, strict=True):
        torch.testing.assert_close(got[0], want, atol=1e-4, rtol=0)
        torch.testing.assert_close(got[1], want_logits, atol=1e-4, rtol=0)


def test_mimo_without_its_mtp_layers(tmp_path: Path) -> None:
    theirs, _ = mimo(tmp_path)
    model, spec = built(tmp_path), read_spec(read_config(tmp_path))
    with torch.no_grad():
        want = theirs(TOKENS[None]).logits[0]
    positions = torch.arange(len(TOKENS))
    hidden = model.forward(TOKENS, DenseContext(spec).step(positions, torch.zeros_like(positions)))
    torch.testing.assert_close(model.logits(hidden), want, atol=1e-4, rtol=0)
    assert spec.parameters == sum(parameter.numel() for parameter in theirs.parameters())


def test_mtp_layers_that_a_checkpoint_lacks_are_named(tmp_path: Path) -> None:
    mimo(tmp_path)
    config, tensors = read_config(tmp_path), load_file(tmp_path / "model.safetensors")
    del tensors["model.mtp_layers.0.input_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=r"lacks mtp_layers\.0\.input_proj\.weight"):
        head_of(tmp_path, mtp_config(config, read_spec(config)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers in config.json is 0: the model has no MTP layer"),
        ({"mtp_num_hidden_layers": None}, "mtp_num_hidden_layers in config.json is None"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
        ({"attn_output_gate": False}, "attn_output_gate=False"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_other_mtp_layers_of_qwen3_5_are_refused(
    nested: bool, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    qwen(tmp_path, "qwen3_5_text")
    config = read_config(tmp_path)
    spec = read_spec(config)
    if nested:
        config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": {**config, **settings}}
    with pytest.raises(StartupError, match=words):
        read_spec(mtp_config({**config, **settings}, spec))


@pytest.mark.parametrize("kind", ["eagle3", "mtp", "mtp of qwen3_next"])
def test_ranks_share_out_a_head(kind: str, tmp_path: Path) -> None:
    wide = {**TARGET, "hidden_size": 64, "num_attention_heads": 8}
    if kind == "mtp":
        mimo(tmp_path / "target", **{**wide, "vocab_size": 256})
    elif kind != "eagle3":
        qwen(tmp_path / "target", **{**wide, **ATTENTION, "num_hidden_layers": 3, "vocab_size": 256})
    else:
        saved("llama", {**wide, "vocab_size": 256}, tmp_path / "target")
    where, config = tmp_path / "target", read_config(tmp_path / "target")
    if kind != "eagle3":
        full = mtp_config(config, read_spec(config))
    else:
        settings = {**HEAD, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 256, "draft_vocab_size": 130}
        where = tmp_path / "head"
        randomized(PublishedEagle3(settings, embeds=True)).save(where, settings)
        full = eagle3_config(read_config(where), read_spec(config), tensor_names(where))

    def work(exchange: ThreadExchange) -> list[tuple[Tensor, Tensor]]:
        part = exchange.shard
        target = resolve_model_class(config)(config, torch.float32, CPU, part)
        load_weights(target, tmp_path / "target")
        head = head_of(where, full, part)
        for model in (target, head):
            model.prepare()
            connect_ranks(model, exchange)
        head.attach(target)
        found = drafted(target, head, read_spec(config, part), read_spec(full, part))
        local = head.logits(found[1][0].clone(), local=True)
        mine = part.vocab_range(256)
        assert local.shape == (1, part.padded_vocab_rows(256))
        assert torch.equal(local[:, : len(mine)], found[1][1][:, mine.start : mine.stop])
        return found

    target, head = built(tmp_path / "target"), head_of(where, full)
    head.prepare()
    head.attach(target)
    whole = drafted(target, head, read_spec(config), read_spec(full))
    layouts = (False, True) if read_spec(full).experts else (False,)
    for ranks in chain.from_iterable(Meeting(2, expert_parallel).run(work) for expert_parallel in layouts):
        for got, want in zip(ranks, whole, strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"architectures": ["EagleLlamaForCausalLM"]}, "'EagleLlamaForCausalLM', and that is no EAGLE-3 head"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "no EAGLE-3 head"),
        ({"num_hidden_layers": 2}, "num_hidden_layers in config.json is 2"),
        ({"norm_before_fc": True}, "norm_before_fc=True in config.json is not supported"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm=False in eagle_config"),
        ({"vocab_size": 96}, "made for 96 tokens, and the model has 97"),
        ({"draft_vocab_size": 98}, "draft_vocab_size in config.json is 98, more than the 97 tokens"),
        ({"hidden_size": 40}, "hidden states of 40 numbers, and has 40 itself; the model's have 32"),
        ({"hidden_size": 40, "target_hidden_size": 32}, "hidden states of 32 numbers, and has 40 itself"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, r"layers \[1, 2, 5\], and the model has 6"),
        ({"eagle_aux_hidden_state_layer_ids": "all"}, "layers 'all', and the model has 6"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide it"),
    ],
)  # fmt: skip
def test_other_heads_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=words) as error:
        read_spec(eagle3_config({**HEAD, **settings}, target_spec(tmp_path), None))
    assert error.value.remedy


def test_the_format_of_speculators_means_the_same(tmp_path: Path) -> None:
    theirs = target_spec(tmp_path)
    outer = {"draft_vocab_size": DRAFTED, "eagle_aux_hidden_state_layer_ids": [1, 3, 5], "norm_before_residual": False}
    layer = {name: value for name, value in HEAD.items() if name not in outer}
    nested = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "target_hidden_size": None,
        "transformer_layer_config": layer, **outer,
    }  # fmt: skip
    tensors = {"layers.0.mlp.up_proj.weight", "lm_head.weight", "d2t", "embed_tokens.weight"}
    read = [read_model_config(eagle3_config(config, theirs, tensors)) for config in (nested, {**HEAD, **outer})]
    assert read[0] == read[1]
    del nested["norm_before_residual"]
    assert read_model_config(eagle3_config(nested, theirs, tensors)) == replace(read[0], norm_before_residual=True)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"midlayer.mlp.up_proj.weight", "lm_head.weight"}, "it has no d2t, which says which of the 97 tokens"),
        ({"midlayer.mlp.up_proj.weight", "d2t"}, "no lm_head.weight, and a vocabulary of its own"),
        ({"model.layers.3.mlp.up_proj.weight"}, "no tensors of a layer"),
    ],
)
def test_incomplete_heads_are_refused(tensors: set[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=words):
        read_spec(eagle3_config(HEAD, target_spec(tmp_path), tensors))


def test_a_head_is_no_model_of_its_own() -> None:
    speculators = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    for settings in ({}, {"architectures": ["LlamaForCausalLM"]}, speculators):
        with pytest.raises(StartupError, match="a speculation head") as error:
            read_spec({**HEAD, **settings})
        assert '"method": "eagle3"' in error.value.remedy


@pytest.mark.parametrize(
    ("d2t", "words"),
    [
        (torch.zeros(DRAFTED), "has dtype float32"),
        (torch.zeros(DRAFTED - 1, dtype=torch.int64), r"has shape \[39\]"),
        (torch.full((DRAFTED,), 58), "names the token 97, and there are 97"),
        (torch.full((DRAFTED,), -1), "names the token -1"),
        (torch.arange(DRAFTED, 0, -1), "names a token twice"),
    ],
)
def test_damaged_draft_ids_are_refused(d2t: Tensor, words: str, tmp_path: Path) -> None:
    save_file({"d2t": d2t}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=words):
        load_draft_ids(tmp_path, DRAFTED, VOCAB)
