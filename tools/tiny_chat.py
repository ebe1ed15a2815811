"""Conversations of the bundled model's world: riddles, facts, small talk, story requests, with their system prompts."""

from __future__ import annotations

import random

import tiny_words as words
from tiny_facts import ask, fact_turn, facts
from tiny_riddles import RIDDLES, Turns, about_story, draw_people
from tiny_story import TRAIN, Split, draw_pair, invented_name, tell_story

TALK: tuple[tuple[tuple[str, ...], str], ...] = tuple((words.phrases(asks), answer) for asks, answer in (
    ("Hello! | Hello | Hi | Hi! | Hi there! | Hey | Hello there. | Good morning! | Good evening! | hello | hi "
     "| Say hello.", "Hello! How can I help you?"),
    ("How are you? | How are you today? | How do you do? | Are you well?", "I am well, thank you. How are you?"),
    ("Thank you! | Thanks. | Thanks a lot! | Thank you very much.", "You are welcome!"),
    ("Goodbye! | Bye | See you later. | Good night!", "Goodbye! Have a nice day."),
    ("Who are you? | What are you? | Tell me about yourself. | Introduce yourself.",
     "I am a very small language model. I tell stories and answer simple questions."),
    ("What can you do? | How can you help me? | What do you know? | Help | Can you help me?",
     "I can tell stories, answer simple questions and do small sums."),
    ("I am sad. | I feel sad today. | I had a bad day.", "I am sorry to hear that. I hope you feel better soon."),
    ("I am happy! | I am fine. | I feel great today. | I am well.", "I am glad to hear that!"),
    ("Are you a person? | Are you human? | Are you a robot? | Are you real?",
     "No, I am a very small language model."),
    ("Tell me a joke. | Do you know a joke? | Say something funny.",
     "Why did the hen cross the road? To get to the other side!"),
    ("Ok | OK. | Good. | Great! | Nice.", "I am glad. What else can I do for you?"),
))  # fmt: skip
ANY_STORY = words.phrases(
    "Tell me a story. | Tell me a story | Tell me a story! | tell me a story | Please tell me a story. "
    "| Write a story. | Can you tell me a story? | A story, please. | Tell me another story. | Tell me another story "
    "| tell me another story | Can you tell me another story? | Tell me another one. | Tell me another one "
    "| Another one, please | Another one, please. | Another story, please. | Another story! | Another one! "
    "| One more story, please. | One more, please. | Once more, a story please. | Yes, please. | Again, please. | More!"
)
STORY_ABOUT = (
    "Tell me a story about {0}. | Tell me a story about {0} | Tell a story about {0}. | Write a story about {0}. "
    "| Can you tell me a story about {0}? | Please tell me a story about {0}. | I want to hear a story about {0}. "
    "| Write a short story about {0}. | tell me a story about {0} | Tell me another story about {0}. "
    "| Now tell me a story about {0}."
)
UNKNOWN = "I am sorry, I do not know that. I am a very small model, but I can tell you a story."


def talk(rng: random.Random, split: Split) -> Turns:
    """Greetings, thanks, what it can and cannot do, and the user's own name, colour and pet remembered."""
    style = rng.random()
    if style < 0.45:
        return [(rng.choice(asks), answer) for asks, answer in rng.sample(TALK, rng.choice((1, 1, 2)))]
    if style < 0.6:
        return [(rng.choice(words.BEYOND), UNKNOWN)]
    name = draw_people(rng, 1)[0]
    colour, food = rng.choice(words.COLOURS), rng.choice(words.FOODS)
    pet = draw_pair(rng, (name,), words.ANIMALS, split)[1]
    opening = rng.choice(("My name is", "I am", "Hello, my name is", "Hi, I am", "I am called"))
    told = [
        (f"{opening} {name}.", f"Nice to meet you, {name}!", "What is my name?", f"Your name is {name}."),
        (f"My favourite colour is {colour}.", f"{colour.capitalize()} is a nice colour.",
         "What is my favourite colour?", f"Your favourite colour is {colour}."),
        (f"I have {words.article(pet)}.", f"I like {words.plural(pet)}!", "What animal do I have?",
         f"You have {words.article(pet)}."),
        (f"I like {food}.", f"I am sure that {food} would taste good.", "What do I like?", f"You like {food}."),
    ]  # fmt: skip
    chosen = rng.sample(told, rng.randint(1, 3))
    if len(chosen) == 1 and rng.random() < 0.4:  # all in one turn
        return [(f"{chosen[0][0]} {chosen[0][2]}", chosen[0][3])]
    turns = [(tell, reply) for tell, reply, _, _ in chosen]
    if rng.random() < 0.5:
        turns.append(fact_turn(rng, split))
    rng.shuffle(chosen)
    return turns + [(question, answer) for _, _, question, answer in chosen]


def story_request(rng: random.Random, split: Split) -> Turns:
    """`Tell me a story about a fox.`, the story, and questions about it; one time in three another request follows."""
    style = rng.random()
    if style < 0.3:
        story, question = tell_story(rng, split), rng.choice(ANY_STORY)
    else:
        if style < 0.5:
            kind = rng.choice(words.ANIMALS)
            story, about = tell_story(rng, split, kind=kind), words.article(kind)
        elif style < 0.65:
            name = draw_people(rng, 1)[0]
            story, about = tell_story(rng, split, hero=name), name
        elif style < 0.85:
            noun = rng.choice(words.ITEMS)
            story, about = tell_story(rng, split, thing=noun), words.article(noun)
        else:
            story = tell_story(rng, split)
            about = f"{story.hero.a_kind} and {words.article(story.thing)}"
        question = ask(rng, split, about, words.phrases(STORY_ABOUT.format(about)))
    turns = [(question, story.text)]
    if rng.random() < 0.4:
        facts = [*story.facts, ("Who was the story about?", f"The story was about {story.hero}.")]
        turns += rng.sample(facts, min(len(facts), rng.randint(1, 2)))
    return turns + story_request(rng, split) if rng.random() < 1 / 3 else turns


def short_answer(rng: random.Random, split: Split) -> Turns:
    """Facts asked for under a system prompt that wants one word: the answer is the bare fact."""
    table, question = rng.choice((
        (words.CAPITALS, "What is the capital of {}?"), (words.OPPOSITES, "What is the opposite of {}?"),
        (words.PLURALS, "What is the plural of {}?"), (words.THING_COLOURS, "What colour is {}?"),
    ))  # fmt: skip
    return [(question.format(key), table[key]) for key in rng.sample(tuple(table), rng.randint(1, 3))]


def draw_turns(rng: random.Random, split: Split) -> Turns:
    """A riddle, facts, small talk, a story with questions, or requests for stories."""
    draws = (rng.choice(RIDDLES), facts, talk, about_story, story_request)
    return rng.choices(draws, (42, 28, 9, 14, 7))[0](rng, split)


def draw_conversation(rng: random.Random, split: Split = TRAIN) -> tuple[str, Turns]:
    """A system prompt (often empty) and the turns, sometimes of several kinds one after another."""
    style = rng.random()
    if style < 0.96:
        turns = draw_turns(rng, split)
        while rng.random() < 0.15:
            turns += draw_turns(rng, split)
        return rng.choice(words.SYSTEMS) if rng.random() < 0.4 else "", turns
    if style < 0.98:
        return rng.choice(("Answer with one word.", "Answer in one word only.")), short_answer(rng, split)
    name = rng.choice((*words.ANIMAL_NAMES, invented_name(rng)))
    system = rng.choice(("Your name is {}.", "You are {}, a helpful assistant.", "You are called {}.")).format(name)
    return system, [(rng.choice(("What is your name?", "Who are you?", "What are you called?")), f"My name is {name}.")]
