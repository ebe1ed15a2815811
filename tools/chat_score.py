"""Which sampling settings the bundled model answers best with: what its generation_config.json rests on.

python tools/chat_score.py --out docs/measurements/tiny_sampling.json        # about half an hour of one core
python tools/chat_score.py --report docs/measurements/tiny_sampling.json     # the tables of a written measurement

Each setting answers the 50 questions of chat_questions.json, 200 unseen ones (tiny_unseen.py), 40 that are beyond the
model, and 24 requests for stories, with several seeds unless it is greedy.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import tiny_text
import tiny_words as words
from tiny_unseen import BEYOND, unseen_questions
from train_tiny import accepts, prompt_of, read_questions, table

from quire import LLM, SamplingParams
from quire.bench.machine import machine

Json = dict[str, Any]
Ask = list[dict[str, str]]


class Answer(NamedTuple):
    """What was said, and whether it ended by itself."""

    text: str
    ended: bool


GREEDY: Json = {"temperature": 0.0}
GRID: tuple[Json, ...] = (
    GREEDY, *({"temperature": t} for t in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)),
    *({"temperature": 1.0, "top_p": p} for p in (0.9, 0.5)), *({"temperature": 1.0, "top_k": k} for k in (2, 5, 20)),
    *({"temperature": 1.0, "min_p": p} for p in (0.1, 0.3)), {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 0.3, "top_k": 2}, *({"temperature": 0.0, "repetition_penalty": r} for r in (1.05, 1.1, 1.2)),
    *({"temperature": 0.3, "repetition_penalty": r} for r in (1.05, 1.2)),
)  # fmt: skip
SEED = 7  # of the questions; training text is drawn from others
FIRST = ("Hello!", "Who are you?", "What is the colour of the sky?", "What is the colour of grass?",
         "What colour is grass?")  # fmt: skip
STORIES = ("Tell me a story.", *(f"Tell me a story about {words.article(kind)}." for kind in words.ANIMALS[:15]),
           *(f"Write a short story about {words.article(thing)}." for thing in words.ITEMS[:8]))  # fmt: skip
LEXICON = 20_000_000  # characters of training text whose words are the model's vocabulary of words
HONEST = re.compile(r"\bdo not know\b")


def said(question: Json) -> Ask:
    """The question as messages."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(question["turns"])]
    return [{"role": "system", "content": question["system"]}, *turns] if "system" in question else turns


def user(text: str) -> Ask:
    return [{"role": "user", "content": text}]


def answers(llm: LLM, asked: list[Ask], setting: Json, seeds: range, longest: int = 64) -> list[list[Answer]]:
    """The answers to all, once for each seed."""
    params = [SamplingParams(**setting, seed=seed, max_tokens=longest) for seed in seeds for _ in asked]
    results = llm.chat(asked * len(seeds), params, use_tqdm=False)
    given = [Answer(result.outputs[0].text, result.outputs[0].finish_reason == "stop") for result in results]
    return [given[i : i + len(asked)] for i in range(0, len(given), len(asked))]


# -- stories ---------------------------------------------------------------------------------------------------------


def lexicon() -> frozenset[str]:
    """The words of the first part of the training text."""
    known: set[str] = set()
    for document in tiny_text.draw_documents(1000, LEXICON):
        known.update(words_of(document))
    return frozenset(known)


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def repeated_sentences(text: str) -> int:
    """Sentences of four words or more that stood before in the same text."""
    sentences = collections.Counter(
        sentence for part in re.split(r"[.!?\n]+", text) if len(sentence := tuple(words_of(part))) >= 4
    )
    return sum(count - 1 for count in sentences.values())


def judge_stories(told: list[list[Answer]], known: frozenset[str]) -> Json:
    """Of stories by seed and request: how they end, repeat themselves, misspell, and differ between seeds."""
    every = [story for one in told for story in one]
    texts = [text for text, _ in every]
    grams = [list(zip(*(words_of(text)[i:] for i in range(4)))) for text in texts]
    different = {(request, text) for one in told for request, (text, _) in enumerate(one)}
    spelled = [word for text in texts for word in words_of(text)]
    return {
        "ended": round(sum(ended for _, ended in every) / len(every), 4),
        "words": round(len(spelled) / len(texts), 1),
        "distinct_4_grams": round(sum(len(set(one)) for one in grams) / max(1, sum(map(len, grams))), 4),
        "with_a_repeated_sentence": round(sum(repeated_sentences(text) > 0 for text in texts) / len(texts), 4),
        "unknown_words_in_1000": round(1000 * sum(word not in known for word in spelled) / len(spelled), 3),
        "different_a_request": round(len(different) / len(told[0]), 2),
    }


# -- the grid --------------------------------------------------------------------------------------------------------


def score(llm: LLM, setting: Json, sets: dict[str, list[Json]], seeds: int, known: frozenset[str]) -> Json:
    """What came of one setting: right answers in all seeds' mean, lowest and highest."""
    tries = range(1 if setting["temperature"] == 0 else seeds)
    result: Json = {"setting": setting, "seeds": len(tries)}
    for name, questions in sets.items():
        given = answers(llm, [said(question) for question in questions], setting, tries)
        right = [[accepts(question, one.text) for question, one in zip(questions, row)] for row in given]
        counts = [sum(one) for one in right]
        result[name] = {"of": len(questions), "right": round(sum(counts) / len(counts), 2), "by_seed": counts}
        if "kind" in questions[0]:
            kinds = [question["kind"] for question in questions]
            result[name]["kinds"] = {
                kind: round(sum(ok for one in right for ok, its in zip(one, kinds) if its == kind) / len(right), 2)
                for kind in dict.fromkeys(kinds)
            }
    given = answers(llm, list(map(user, BEYOND)), setting, tries)
    honest = sum(HONEST.search(one.text) is not None for row in given for one in row)
    result["beyond"] = {"of": len(BEYOND), "honest": round(honest / len(tries), 2)}
    result["stories"] = judge_stories(answers(llm, list(map(user, STORIES)), setting, tries, longest=700), known)
    first = answers(llm, list(map(user, FIRST)), setting, range(1 if len(tries) == 1 else 20))
    result["first"] = {
        text: dict(collections.Counter(row[i].text for row in first).most_common(4)) for i, text in enumerate(FIRST)
    }
    return result


def wrong(llm: LLM, questions: list[Json], setting: Json) -> list[Json]:
    [given] = answers(llm, [said(question) for question in questions], setting, range(1))
    return [
        {"question": question["turns"][-1], "answer": one.text, "accept": question["accept"]}
        for question, one in zip(questions, given)
        if not accepts(question, one.text)
    ]


def measure(options: argparse.Namespace) -> Json:
    committed = read_questions()
    without = frozenset(prompt_of(question, system=False) for question in committed)
    sets = {"committed": committed, "unseen": unseen_questions(SEED, without, options.cores)}
    known = lexicon()
    report: Json = {"name": "tiny_sampling", "machine": machine(), "dtype": options.dtype, "models": {}}
    report["command"] = "python tools/chat_score.py " + " ".join(options.arguments)
    for name in options.models:
        with LLM(name, dtype=options.dtype, generation_config=False, threads=options.threads) as llm:
            rows = []
            for setting in GRID:
                rows.append(score(llm, setting, sets, options.seeds, known))
                print(name, *cells(rows[-1]), sep=" | ", flush=True)
            report["models"][name] = {
                "grid": rows,
                "wrong_when_greedy": {kind: wrong(llm, questions, GREEDY) for kind, questions in sets.items()},
            }
    report["questions"] = sets["unseen"]
    return report


# -- the report ------------------------------------------------------------------------------------------------------

HEAD = ("setting", "of 50", "of 200", "honest, of 40", "stories that repeat a sentence", "distinct 4-grams",
        "unknown words in 1,000", "stories a request")  # fmt: skip


def cells(row: Json) -> tuple[str, ...]:
    """One row of the table."""
    setting, told = row["setting"], row["stories"]
    shown = ", ".join(f"{key} {value:g}" for key, value in setting.items() if key != "temperature" or value)
    shown = "greedy" + (f", {shown}" if shown else "") if setting["temperature"] == 0 else shown
    return (
        shown, spread(row["committed"]), spread(row["unseen"]), f"{row['beyond']['honest']:.1f}",
        f"{100 * told['with_a_repeated_sentence']:.0f} %", f"{100 * told['distinct_4_grams']:.1f} %",
        f"{told['unknown_words_in_1000']:.2f}", f"{told['different_a_request']:.1f} of {row['seeds']}",
    )  # fmt: skip


def spread(counted: Json) -> str:
    low, high = min(counted["by_seed"]), max(counted["by_seed"])
    return f"{low}" if len(counted["by_seed"]) == 1 else f"{counted['right']:.1f} ({low} to {high})"


def markdown(report: Json) -> str:
    """Return the tables of a report as Markdown."""
    models = report["models"].items()
    return "\n".join(f"{name}:\n\n{table(HEAD, list(map(cells, found['grid'])))}\n" for name, found in models)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Score the bundled models under a grid of sampling settings.")
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--models", nargs="+", default=["tiny", "tiny-draft"])
    parser.add_argument("--seeds", type=int, default=5, help="of each setting that isn't greedy")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--cores", type=int, default=2, help="processes that draw the training text")
    parser.add_argument("--report", help="print the tables of a written measurement and stop")
    options = parser.parse_args(arguments)
    options.arguments = arguments
    if options.report:
        print(markdown(json.loads(Path(options.report).read_text(encoding="utf-8"))))
        return
    report = measure(options)
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(markdown(report))


if __name__ == "__main__":
    main(sys.argv[1:])
