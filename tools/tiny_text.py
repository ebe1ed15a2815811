"""The bundled model's text: stories, conversations, and long chains of stories with facts recalled at the end.

`python tools/tiny_text.py` prints a few documents. Special tokens stand in them exactly as the chat template puts them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tiny_chat import draw_conversation
from tiny_free import free_sentence
from tiny_riddles import Turns, about
from tiny_story import TRAIN, Split, tell_story

BEGIN, END_OF_TEXT, SYSTEM, USER, ASSISTANT, END, PAD = SPECIAL_TOKENS = (
    "<|begin|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>",
)  # fmt: skip

LONGEST = 15_000  # characters of a chain of stories, about four a token
# Roles other than these are refused; content may be text or OpenAI's list of text parts; outer spaces are dropped.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'developer', 'user', 'assistant'] %}"
    "{{ raise_exception('role must be system, developer, user or assistant') }}"
    "{% endif %}"
    "{{ '<|system|>' if message['role'] in ['system', 'developer'] else '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] | trim }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] | trim }}{% endfor %}{% endif %}"
    "{{ '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def render_chat(system: str, turns: Turns, prompt: bool = False) -> str:
    """What CHAT_TEMPLATE gives; with `prompt`, the last answer is left for the model to write."""
    head = f"{SYSTEM}{system}{END}" if system else ""
    body = "".join(f"{USER}{question}{END}{ASSISTANT}{answer}{END}" for question, answer in turns)
    if prompt:
        body = body[: -len(turns[-1][1] + END)]
    return BEGIN + head + body


def draw_chain(rng: random.Random, split: Split, characters: int) -> tuple[str, Turns]:
    """Stories of different heroes one after another, about so long, and the facts that name their hero or thing."""
    texts: list[str] = []
    facts: Turns = []
    names: set[str] = set()
    length = 0
    while length < characters:
        story = tell_story(rng, split)
        noun = story.thing.split()[1]
        if story.hero.name in names or noun in names:
            continue
        names |= {story.hero.name, noun}
        texts.append(story.text)
        length += len(story.text)
        owner = (f"Who had the {story.thing}?", f"{story.hero} had the {story.thing}.")
        facts += [fact for fact in story.facts if story.hero.name in fact[0]] + [owner]
    return "\n\n".join(texts), facts


def draw_document(rng: random.Random, split: Split = TRAIN) -> str:
    """One document with its special tokens."""
    style = rng.random()
    if style < 0.02 and not split.unseen_templates:
        return f"{BEGIN}{' '.join(free_sentence(rng) for _ in range(rng.randint(3, 30)))}{END_OF_TEXT}"
    if style < 0.12:
        return f"{BEGIN}{tell_story(rng, split).text}{END_OF_TEXT}"
    if style < 0.965:
        return render_chat(*draw_conversation(rng, split))
    text, facts = draw_chain(rng, split, rng.randint(LONGEST // 8, LONGEST))
    if style < 0.975:
        recalled = " ".join(answer for _, answer in rng.sample(facts, min(4, len(facts))))
        return f"{BEGIN}{text}\n\nLet us remember. {recalled}{END_OF_TEXT}"
    turns = about(rng, text, facts)
    return render_chat("", turns + [fact for fact in rng.sample(facts, min(4, len(facts))) if fact not in turns])


def draw_documents(
    seed: int, characters: int, split: Split = TRAIN, without: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Documents from one seed until so many characters are drawn; none holds a conversation in `without`."""
    rng = random.Random(seed)
    drawn = 0
    while drawn < characters:
        document = draw_document(rng, split)
        if any(conversation in document for conversation in without):
            continue
        drawn += len(document)
        yield document


def main() -> None:
    for document in draw_documents(seed=0, characters=8000):
        print(document[:1500], end="\n\n" + "-" * 80 + "\n\n")


if __name__ == "__main__":
    main()
