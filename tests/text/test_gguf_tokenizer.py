"""Tokenizers that a GGUF file's metadata describe, beside those that they were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from test_tokenizer import TEXTS
from tokenizers import Regex, normalizers, pre_tokenizers, processors

from quire.errors import StartupError
from quire.text.gguf_tokenizer import PRE_TOKENIZERS, template_of, tokenizer_of
from quire.text.tokenizer import Tokenizer

ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def metadata(folder: Path) -> dict[str, Any]:
    """What a file would say of a folder's tokenizer, as `read` takes it."""
    state = json.loads((folder / "tokenizer.json").read_text())
    added = {token["content"]: token["special"] for token in state["added_tokens"]}
    vocab: dict[str, int] = state["model"]["vocab"] | {token["content"]: token["id"] for token in state["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [3 if added.get(token) else 4 if token in added else 1 for token in tokens]
    return {
        "tokens": tokens, "token_type": np.array(types, np.int32), "pre": "gpt-2",
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "bos_token_id": vocab["<s>"], "eos_token_id": vocab["</s>"],
    }  # fmt: skip


def named(said: dict[str, Any]) -> dict[str, Any]:
    """By the names that files have; None stands for what one doesn't say."""
    return {f"tokenizer.ggml.{name}": value for name, value in said.items() if value is not None}


def read(said: dict[str, Any], **more: Any) -> Tokenizer:
    return tokenizer_of(named({"model": "gpt2", **said, **more}), "model.gguf")


def test_byte_level(folders: dict[str, Path]) -> None:
    theirs = Tokenizer.load(folders["byte_level"])
    ours = read(metadata(folders["byte_level"]), add_bos_token=False)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert [ours.token_bytes(id) for id in ids] == [theirs.token_bytes(id) for id in ids]
    assert (ours.vocab_size, ours.bos_id, ours.special_ids) == (theirs.vocab_size, theirs.bos_id, theirs.special_ids)
    assert ours.eos_ids == theirs.eos_ids
    assert not ours.has_chat_template


def test_sentence_piece(folders: dict[str, Path]) -> None:
    """Its merges are not in the file: they follow from the scores, which are those of the order of merging."""
    said = metadata(folders["sentencepiece"])
    merged = ["".join(merge.split(" ")) for merge in said["merges"]]
    tokens = said["tokens"]
    scores = np.array([-float(merged.index(token)) if token in merged else -1e6 for token in tokens], np.float32)
    types = [2 if token == "<unk>" else 6 if token.startswith("<0x") else kind
             for token, kind in zip(tokens, said["token_type"])]  # fmt: skip
    said |= {"model": "llama", "pre": None, "merges": None, "scores": scores, "token_type": np.array(types, np.int32)}
    theirs, ours = Tokenizer.load(folders["sentencepiece"]), read(said)
    for text in TEXTS:
        if text and "<s>" not in text:  # Metaspace adds no space behind a special token, nor where there is one
            assert ours.encode(text) == theirs.encode(" " + text), text
            assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(" " + text))
    bare = read(said, add_space_prefix=False, add_bos_token=False)
    assert bare.encode(" page") == ours.encode("page")[1:] != bare.encode("page")
    assert bare.decode(bare.encode(" page")) == " page"
    for bad in (None, scores[1:], np.full(len(tokens), np.nan)):
        with pytest.raises(StartupError, match="scores"):
            read(said, scores=bad)


def test_sentence_piece_with_merges(folders: dict[str, Path]) -> None:
    """Gemma-4's: the merges are in the file, and no space is added before a text."""
    said = metadata(folders["sentencepiece"])
    types = [2 if token == "<unk>" else 6 if token.startswith("<0x") else kind
             for token, kind in zip(said["tokens"], said["token_type"])]  # fmt: skip
    said |= {"model": "gemma4", "pre": None, "token_type": np.array(types, np.int32)}
    state = tokenizers.Tokenizer.from_file(str(folders["sentencepiece"] / "tokenizer.json"))
    state.normalizer = normalizers.Replace(" ", "▁")
    state.pre_tokenizer, state.post_processor = pre_tokenizers.Sequence([]), processors.Sequence([])
    ours = read(said)
    for text in TEXTS:
        ids = state.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == [ours.bos_id, *ids], text
        assert ours.decode(ids) == text.replace("<s>", "").replace("</s>", ""), text
    with pytest.raises(StartupError, match="has no merges for its tokens"):
        read(said, merges=None)


CUT = {
    "gpt-2": ["I", "'ll", " 1234", "²", "\n\n ", " don", "'t", " I", "'", "LL"],
    "smollm": ["I", "'ll", " ", "1", "2", "3", "4", "²", "\n\n ", " don", "'t", " I", "'", "LL"],
    "default": ["I", "'", "ll", " ", "123", "4", "²", "\n\n ", " don", "'", "t", " I", "'", "LL"],
    "llama-bpe": ["I", "'ll", " ", "123", "4²", "\n\n", " ", " don", "'t", " I", "'LL"],
    "qwen2": ["I", "'ll", " ", "1", "2", "3", "4", "²", "\n\n", " ", " don", "'t", " I", "'LL"],
    "tekken": ["I", "'ll", " ", "1", "2", "3", "4", "²", "\n\n", " ", " don", "'t", " I", "'", "LL"],
}


@pytest.mark.parametrize("pre", CUT)
def test_words(pre: str) -> None:
    """Where every word is one token, the tokens are what text is cut into."""
    text = "I'll 1234²\n\n  don't I'LL"
    assert "".join(CUT[pre]) == text
    level = pre_tokenizers.ByteLevel(False, use_regex=False)
    words = {level.pre_tokenize_str(word)[0][0] for word in [*CUT[pre], "\n\n  don"]}
    merges, vocab = [], dict.fromkeys(ALPHABET)
    for word in sorted(words, key=len):
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = None
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    tokenizer = read({"tokens": list(vocab), "merges": merges, "pre": pre})
    found = [tokenizer.token_bytes(id).decode() for id in tokenizer.encode(text)]
    assert found == CUT[pre]


def test_words_of_gpt_4o() -> None:
    """Endings belong to their words, and a word begins where the case changes."""
    [pattern] = PRE_TOKENIZERS["gpt-4o"].patterns
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    found = [word for word, _ in split.pre_tokenize_str("I'll 1234²\n\n  don't I'LL aBc/\n")]
    assert found == ["I'll", " ", "123", "4²", "\n\n", " ", " don't", " I'LL", " a", "Bc", "/\n"]


def test_the_beginning_and_the_end(folders: dict[str, Path]) -> None:
    def framed(pre: str, **more: Any) -> tuple[bool, bool]:
        tokenizer = read(metadata(folders["byte_level"]), pre=pre, **more)
        ids = tokenizer.encode("a")
        return ids[0] == tokenizer.bos_id, ids[-1] in tokenizer.eos_ids

    assert framed("gpt-2") == (False, False)
    assert framed("llama-bpe") == (True, False)
    assert framed("llama-bpe", add_bos_token=False, add_eos_token=True) == (False, True)
    assert framed("gpt-2", add_bos_token=True, add_eos_token=True) == (True, True)
    assert framed("gpt-2", add_bos_token=True, bos_token_id=10**6) == (False, False)


def test_what_ends_a_turn(folders: dict[str, Path]) -> None:
    said = metadata(folders["byte_level"])
    tokens = [*said["tokens"], "<|im_end|>", "<|end|>"]
    said |= {"tokens": tokens, "token_type": np.array([*said["token_type"], 3, 1])}
    end = tokens.index("</s>")
    assert read(said).eos_ids == (end, len(tokens) - 2)
    assert read(said, eot_token_id=9).eos_ids == (end, 9, len(tokens) - 2)
    said |= {"tokens": [*tokens, "<|return|>", "<|call|>"], "token_type": np.array([*said["token_type"], 3, 3])}
    said["token_type"][len(tokens) - 1] = 3
    count = len(tokens)
    assert read(said).eos_ids == (end, count + 1, count - 2, count), "in harmony <|end|> ends a message alone"


def test_whole_words_and_composed_characters() -> None:
    said = {"tokens": [*sorted(ALPHABET), "abc"], "merges": []}
    for text, pre, counts in (("abc", "llama-bpe", [1, 3]), ("e\u0301", "qwen2", [2, 3])):
        assert [len(read(said, pre=kind).encode(text)) for kind in (pre, "gpt-2")] == counts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "t5"}, "kind 't5'; gpt2, llama and gemma4"),
        ({"model": None}, "no kind of tokenizer"),
        ({"model": np.array([1, 2])}, "no kind of tokenizer"),
        ({"tokens": None}, "has no tokenizer.*--tokenizer"),
        ({"tokens": "abc"}, "has no tokenizer"),
        ({"tokens": ["a", "a"], "token_type": None}, "a token twice"),
        ({"token_type": np.array([1])}, "not one number for each"),
        ({"token_type": 1}, "not one number for each"),
        ({"tokens": [str(id) for id in range(65_537)], "token_type": np.full(65_537, 3)}, "65,537 .* at most 65,536"),
        ({"merges": None}, "no merges"),
        ({"merges": ["a b"] * 10_000}, "no merges for its tokens, or too many"),
        ({"merges": ["ab"]}, "merge 'ab', which is not two"),
        ({"merges": ["zzzz yyyy"]}, "not a readable tokenizer"),
        ({"pre": "unheard-of"}, "cuts text as 'unheard-of'; known are default, gpt-2"),
    ],
)
def test_metadata_of_strangers(folders: dict[str, Path], change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message) as caught:
        read(metadata(folders["byte_level"]), **change)
    assert "model.gguf" in str(caught.value)


@pytest.mark.parametrize("tokens", [["a" * 600_000], ["a" * n for n in range(2000)]])
def test_pieces_that_would_be_cut_for_minutes(tokens: list[str]) -> None:
    """Each is cut in two wherever that can be: what is long costs its length twice over."""
    count = len(tokens)
    scores, types = np.zeros(count, np.float32), np.ones(count, np.int32)
    with pytest.raises(StartupError, match=r"model\.gguf have too many characters"):
        read({"model": "llama", "tokens": tokens, "scores": scores, "token_type": types})


def test_templates(folders: dict[str, Path]) -> None:
    assert template_of({"tokenizer.chat_template": "{{ x }}"}) == "{{ x }}"
    assert template_of({"tokenizer.chat_template": 7}) is template_of({}) is None
    said = named({"model": "gpt2", **metadata(folders["byte_level"])})
    assert tokenizer_of(said | {"tokenizer.chat_template": "{{ x }}"}, "a.gguf").has_chat_template
    assert set(CUT) < set(PRE_TOKENIZERS)
