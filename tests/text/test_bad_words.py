"""Bad words as token ids: a word is banned in each of its spellings."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.protocol.sampling_params import SamplingParams
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.text_backend import TextBackend
from quire.text.tokenizer import Tokenizer

PIECES = ["a", "k", "o", "s", "t", "y", "T", "(", "Ġ", "Ċ"]


def byte_level() -> Tokenizer:
    """One token for " Tokyo", two for "Tokyo"."""
    merges = [("o", "k"), ("Ġ", "T"), ("y", "o"), ("T", "ok"), ("ĠT", "ok"), ("ĠTok", "yo")]
    vocabulary = {piece: at for at, piece in enumerate([*PIECES, *(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {})


def metaspace() -> Tokenizer:
    """Words begin with a mark: at a text's start too."""
    merges = [("o", "k"), ("▁", "T"), ("▁T", "ok"), ("y", "o"), ("T", "ok"), ("▁Tok", "yo")]
    vocabulary = {piece: at for at, piece in enumerate(["<unk>", *PIECES, "\n", "▁", *(a + b for a, b in merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, {})


def banned(tokenizer: Tokenizer, word: str) -> tuple[tuple[int, ...], ...]:
    text = TextBackend(tokenizer, GrammarCompiler(tokenizer, tokenizer.vocab_size, (0,)))
    return text.resolve(SamplingParams(bad_words=[word])).bad_word_ids


@pytest.mark.parametrize("tokenizer", [byte_level(), metaspace()], ids=["byte level", "metaspace"])
@pytest.mark.parametrize("word", ["Tokyo", " Tokyo"])
@pytest.mark.parametrize("text", ["Tokyo", "a Tokyo", "a\nTokyo", "a  Tokyo"])
def test_every_spelling_is_banned(tokenizer: Tokenizer, word: str, text: str) -> None:
    words, ids = banned(tokenizer, word), tokenizer.encode(text)
    assert any(tuple(ids[at : at + len(word)]) == word for word in words for at in range(len(ids))), (words, ids)


def test_a_spelling_that_ends_in_another_needs_no_ban_of_its_own() -> None:
    tokenizer = byte_level()
    assert banned(tokenizer, "a") == ((tokenizer.token_to_id("a"),),)
