"""Text to tokens: trains the byte-level BPE tokenizer, encodes documents on all cores, counts n-grams."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tiny_story import TRAIN, Split
from tiny_text import BEGIN, SPECIAL_TOKENS, draw_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SHARD = 2_000_000  # characters drawn from one seed


class Tokens(NamedTuple):
    """A stream of token ids and the places where its documents begin."""

    ids: NDArray[np.uint16]
    starts: NDArray[np.int64]


class Shard(NamedTuple):
    seed: int
    characters: int
    split: Split
    without: frozenset[str]
    tokenizer: str


def train_tokenizer(vocab: int, characters: int, without: frozenset[str]) -> Tokenizer:
    """Byte-level BPE: all 256 bytes are tokens, so any text survives a round trip; `<|begin|>` opens every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_texts(characters, without), trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


def _plain_texts(characters: int, without: frozenset[str]) -> Iterator[str]:
    for document in draw_documents(0, characters, without=without):
        for token in SPECIAL_TOKENS:
            document = document.replace(token, "\n")
        yield document


def encode_shard(shard: Shard) -> Tokens:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a core already
    tokenizer = Tokenizer.from_str(shard.tokenizer)
    documents = draw_documents(shard.seed, shard.characters, shard.split, shard.without)
    encoded = tokenizer.encode_batch_fast(list(documents), add_special_tokens=False)
    rows = [np.array(one.ids, dtype=np.uint16) for one in encoded]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    return Tokens(np.concatenate(rows), np.concatenate(([0], lengths.cumsum()[:-1])))


def encode_corpus(
    tokenizer: Tokenizer, characters: int, seed: int, without: frozenset[str], split: Split = TRAIN, cores: int = 1
) -> Tokens:
    """About so many characters of documents as one stream; the same for any number of cores."""
    shards = [
        Shard(seed + index, min(SHARD, characters), split, without, tokenizer.to_str())
        for index in range(max(1, characters // SHARD))
    ]
    if cores > 1 and len(shards) > 1:
        with multiprocessing.get_context("fork").Pool(cores) as pool:
            parts = list(pool.imap(encode_shard, shards))
    else:
        parts = [encode_shard(shard) for shard in shards]
    offsets = np.concatenate(([0], np.cumsum([len(part.ids) for part in parts])[:-1]))
    starts = np.concatenate([part.starts + offset for part, offset in zip(parts, offsets)])
    return Tokens(np.concatenate([part.ids for part in parts]), starts)


class NGrams:
    """Bigram and trigram with interpolated Witten-Bell smoothing: no free parameter, every event has a probability."""

    def __init__(self, ids: NDArray[np.uint16], vocab: int) -> None:
        a = ids.astype(np.int64)
        self.vocab = vocab
        self.unigram = (np.bincount(a, minlength=vocab) + 1.0) / (len(a) + vocab)
        self.pairs = np.bincount(a[:-1] * vocab + a[1:], minlength=vocab * vocab).reshape(vocab, vocab)
        self.triples, self.triple_counts = np.unique((a[:-2] * vocab + a[1:-1]) * vocab + a[2:], return_counts=True)
        self.contexts, first = np.unique(self.triples // vocab, return_index=True)
        self.context_counts = np.add.reduceat(self.triple_counts, first)
        self.context_kinds = np.diff(np.append(first, len(self.triples)))

    def losses(self, ids: NDArray[np.uint16]) -> dict[str, float]:
        """Mean nats a token of the `bigram` and the `trigram`, over the tokens that have two before them."""
        a = ids.astype(np.int64)
        x, y, z = a[:-2], a[1:-1], a[2:]
        kinds = (self.pairs > 0).sum(1)
        bigram = (self.pairs[y, z] + kinds[y] * self.unigram[z]) / np.maximum(self.pairs.sum(1) + kinds, 1)[y]
        bigram = np.where(kinds[y] > 0, bigram, self.unigram[z])
        context = x * self.vocab + y
        count = _look_up(self.triples, self.triple_counts, context * self.vocab + z)
        total = _look_up(self.contexts, self.context_counts, context)
        kinds = _look_up(self.contexts, self.context_kinds, context)
        trigram = np.where(total > 0, (count + kinds * bigram) / np.maximum(total + kinds, 1), bigram)
        return {"bigram": round(float(-np.log(bigram).mean()), 4), "trigram": round(float(-np.log(trigram).mean()), 4)}


def _look_up(keys: NDArray[np.int64], values: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """The value of each wanted key, 0 where it is not among the sorted keys."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
