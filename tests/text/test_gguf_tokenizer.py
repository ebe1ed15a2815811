"""Tokenizers that a GGUF file's metadata describe, beside those that they were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from quire.errors import StartupError
from quire.text.gguf import KINDS, template_of, tokenizer_of
from quire.text.tokenizer import Tokenizer

TEXTS = [
    "", " ", "Hello, world!", "  two spaces\n\nand lines\t", "naïve 日本語 👩‍👩‍👧", "a<s>b</s> <|é|>", "x" * 300,
    "1234567 pages, page's  a", "\x00\x7f", " the  of\r\n the", "I'LL don't 12.5% ² ½",
]  # fmt: skip
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def metadata(folder: Path, pre: str | None = "gpt-2", **more: Any) -> dict[str, Any]:
    """What a file would say of a folder's tokenizer."""
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab: dict[str, int] = state["model"]["vocab"] | {token["content"]: token["id"] for token in state["added_tokens"]}
    added = {token["content"]: token["special"] for token in state["added_tokens"]}
    tokens = sorted(vocab, key=lambda token: vocab[token])
    types = [3 if added.get(token) else 4 if token in added else 1 for token in tokens]
    said = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab["<s>"], "tokenizer.ggml.eos_token_id": vocab["</s>"],
    }  # fmt: skip
    said |= {} if pre is None else {"tokenizer.ggml.pre": pre}
    return said | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def test_byte_level(folders: dict[str, Path]) -> None:
    theirs = Tokenizer.load(folders["byte_level"])
    ours = tokenizer_of(metadata(folders["byte_level"], add_bos_token=False), "a.gguf")
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
    said = metadata(folders["sentencepiece"], None)
    merged = ["".join(merge.split(" ")) for merge in said.pop("tokenizer.ggml.merges")]
    tokens = said["tokenizer.ggml.tokens"]
    said["tokenizer.ggml.scores"] = np.array(
        [-float(merged.index(token)) if token in merged else -1e6 for token in tokens], np.float32
    )
    types = [2 if token == "<unk>" else 6 if token.startswith("<0x") else kind
             for token, kind in zip(tokens, said["tokenizer.ggml.token_type"])]  # fmt: skip
    said |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.token_type": np.array(types, np.int32)}
    theirs, ours = Tokenizer.load(folders["sentencepiece"]), tokenizer_of(said, "a.gguf")
    for text in TEXTS:
        if text and "<s>" not in text:  # Metaspace adds no space behind a special token, nor where there is one
            assert ours.encode(text) == theirs.encode(" " + text), text
            assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(" " + text))
    bare = tokenizer_of(said | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}, "a")
    assert bare.encode(" page") == ours.encode("page")[1:] != bare.encode("page")
    assert bare.decode(bare.encode(" page")) == " page"
    for scores in (None, said["tokenizer.ggml.scores"][1:], np.full(len(tokens), np.nan)):
        with pytest.raises(StartupError, match="scores"):
            tokenizer_of({key: value for key, value in said.items() if "scores" not in key}
                         | ({} if scores is None else {"tokenizer.ggml.scores": scores}), "a.gguf")  # fmt: skip


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
    said = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": list(vocab), "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.pre": pre}  # fmt: skip
    tokenizer = tokenizer_of(said, "a.gguf")
    found = [tokenizer.token_bytes(id).decode() for id in tokenizer.encode(text)]
    assert found == CUT[pre]


def test_the_beginning_and_the_end(folders: dict[str, Path]) -> None:
    def framed(pre: str, **more: Any) -> tuple[bool, bool]:
        tokenizer = tokenizer_of(metadata(folders["byte_level"], pre, **more), "a.gguf")
        ids = tokenizer.encode("a")
        return ids[0] == tokenizer.bos_id, ids[-1] in tokenizer.eos_ids

    assert framed("gpt-2") == (False, False)
    assert framed("llama-bpe") == (True, False)
    assert framed("llama-bpe", add_bos_token=False, add_eos_token=True) == (False, True)
    assert framed("gpt-2", add_bos_token=True, add_eos_token=True) == (True, True)
    assert framed("gpt-2", add_bos_token=True, bos_token_id=10**6) == (False, False)


def test_what_ends_a_turn(folders: dict[str, Path]) -> None:
    said = metadata(folders["byte_level"])
    tokens, types = [*said["tokenizer.ggml.tokens"], "<|im_end|>", "<|end|>"], said["tokenizer.ggml.token_type"]
    said |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array([*types, 3, 1])}
    end = tokens.index("</s>")
    assert tokenizer_of(said, "a.gguf").eos_ids == (end, len(tokens) - 2)
    assert tokenizer_of(said | {"tokenizer.ggml.eot_token_id": 9}, "a.gguf").eos_ids == (end, 9, len(tokens) - 2)


def test_a_whole_word_stays_one_token_where_its_kind_says_so() -> None:
    made = Backend(models.BPE())
    made.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=ALPHABET, show_progress=False))
    tokens = [*sorted(ALPHABET), "abc"]
    said = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": []}
    assert len(tokenizer_of(said | {"tokenizer.ggml.pre": "llama-bpe"}, "a").encode("abc")) == 1
    assert len(tokenizer_of(said | {"tokenizer.ggml.pre": "gpt-2"}, "a").encode("abc")) == 3


def test_composed_characters() -> None:
    said = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": sorted(ALPHABET), "tokenizer.ggml.merges": []}
    lengths = [
        len(tokenizer_of(said | {"tokenizer.ggml.pre": pre}, "a").encode("e\u0301")) for pre in ("qwen2", "gpt-2")
    ]
    assert lengths == [2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "t5"}, "kind 't5'; gpt2 and llama"),
        ({"model": None}, "no kind of tokenizer"),
        ({"model": np.array([1, 2])}, "no kind of tokenizer"),
        ({"tokens": None}, "has no tokenizer.*--tokenizer"),
        ({"tokens": "abc"}, "has no tokenizer"),
        ({"tokens": ["a", "a"], "token_type": None}, "a token twice"),
        ({"token_type": np.array([1])}, "not one number for each"),
        ({"token_type": 1}, "not one number for each"),
        (
            {"tokens": [str(id) for id in range(65_537)], "token_type": np.full(65_537, 3)},
            "65,537 control and added tokens; at most 65,536",
        ),
        ({"merges": None}, "no merges"),
        ({"merges": ["a b"] * 10_000}, "no merges for its tokens, or too many"),
        ({"merges": ["ab"]}, "merge 'ab', which is not two"),
        ({"merges": ["zzzz yyyy"]}, "not a readable tokenizer"),
        ({"pre": "unheard-of"}, "cuts text as 'unheard-of'; known are default, gpt-2"),
    ],
)
def test_metadata_of_strangers(folders: dict[str, Path], change: dict[str, Any], message: str) -> None:
    said = metadata(folders["byte_level"], **change)
    with pytest.raises(StartupError, match=message) as caught:
        tokenizer_of({key: value for key, value in said.items() if value is not None}, "model.gguf")
    assert "model.gguf" in str(caught.value)


@pytest.mark.parametrize("tokens", [["a" * 600_000], ["a" * n for n in range(2000)]])
def test_pieces_that_would_be_cut_for_minutes(tokens: list[str]) -> None:
    """Each is cut in two wherever that can be: what is long costs its length twice over."""
    count = len(tokens)
    said = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(count, np.float32), "tokenizer.ggml.token_type": np.ones(count, np.int32),
    }  # fmt: skip
    with pytest.raises(StartupError, match=r"a\.gguf have too many characters"):
        tokenizer_of(said, "a.gguf")


def test_templates(folders: dict[str, Path]) -> None:
    assert template_of({"tokenizer.chat_template": "{{ x }}"}) == "{{ x }}"
    assert template_of({"tokenizer.chat_template": 7}) is template_of({}) is None
    said = metadata(folders["byte_level"]) | {"tokenizer.chat_template": "{{ x }}"}
    assert tokenizer_of(said, "a.gguf").has_chat_template
    assert set(CUT) < set(KINDS)
