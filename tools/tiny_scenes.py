"""The story templates: slots, of which one sentence each is told, and scenes made of slots.

The sentences of a slot mean the same. Those that begin with `~` are never told in training: they are the unseen
templates of the held-out text. Every scene also says what may be asked about it (question, answer).
"""

from __future__ import annotations

from typing import NamedTuple


class Scene(NamedTuple):
    """Slots and facts; `moves` names the thing that changes place or owner, at most once in a story."""

    slots: tuple[tuple[str, ...], ...]
    facts: tuple[tuple[str, str], ...]
    moves: str = ""


OPENINGS = (
    "Once upon a time, there was {A.a_kind} named {A}.",
    "There once was {trait_kind} called {A}.",
    "{A} was {trait_kind} who lived near the {home.name}.",
    "Long ago, {trait_kind} named {A} lived near the {home.name}.",
    "This is the story of {A}, {trait_kind}.",
    "~Not far from the {home.name} lived {trait_kind}, and everyone called {A.him} {A}.",
)
FRIENDS = (
    "{A.He} had a good friend called {B}.",
    "{A.His} best friend was {B}, {B.a_kind}.",
    "{A} and {B} were friends and played together every day.",
    "Next door lived {B}, and the two were friends.",
    "~Nobody knew {A} better than {B}, the {B.kind} from next door.",
)
OWNS = (
    "{A} had {a_thing} and loved it very much.",
    "For {A.his} birthday, {A} got {a_thing}.",
    "{A}'s favourite thing was {a_thing}.",
    "{A} owned {a_thing} that {A.his} grandmother had made.",
    "~Of all {A.his} things, {A} liked {a_thing} best.",
)
TIMES = (
    "One day, it was warm and sunny.",
    "One morning, the wind was strong.",
    "It was a cold day, and the sky was grey.",
    "One evening, the sun was going down.",
    "One day after breakfast, the birds were singing.",
    "~On the first day of spring, the air smelled of flowers.",
)
PUTS = (
    "Before {A} left, {A.he} put the {thing} {spot}.",
    "{A} put the {thing} {spot}, where it was safe.",
    "{A} hid the {thing} {spot} and told nobody.",
    "~So that nobody would take it, {A} left the {thing} {spot}.",
)
STILL = (
    "In the evening, {A} looked {spot}. The {thing} was still there.",
    "When {A} came home, the {thing} was still {spot}.",
    "{A} went back, and the {thing} was {spot}, just where {A.he} had put it.",
    "~Later {A} thought of the {thing}. It was still {spot}, of course.",
)
ENDINGS = (
    "At night, {A} went to bed and was happy.",
    "{A} fell asleep with a smile.",
    "From that day on, {A} and {B} were better friends than ever.",
    "It had been a good day, and {A} never forgot it.",
    "Then {A} and {B} went home together. The end.",
    "{A} learned that it is good to be kind.",
    "~And so the day ended well for {A} and for {B}.",
)

SCENES = (
    Scene(  # going somewhere and finding something
        (
            ("{A} walked {place.to}.", "{A} and {B} went {place.to} together.", "~The road led {A} {place.to}."),
            (
                "There {A.he} found {a_other} {other_spot}.",
                "{A} looked around and saw {a_other} {other_spot}.",
                "~Something was lying {other_spot}. It was {a_other}.",
            ),
            (
                '"Whose is this?" asked {A}. "I think it is mine," said {B}, and {A} gave it back.',
                '"Look what I found!" said {A}. "That is my {other}!" said {B}. "I lost it last week."',
                '~"That belongs to me," said {B}. {A} handed the {other} over at once.',
            ),
            ("{B} was very glad.", "{B} thanked {A} and smiled.", "~{B} could not stop smiling."),
        ),
        (
            ("Where did {A} go?", "{A} went {place.to}."),
            ("What did {A} find?", "{A} found {a_other}."),
            ("Whose {other_noun} was it?", "It was {B}'s {other_noun}."),
            ("Where was the {other_noun}?", "The {other_noun} was {other_spot}."),
        ),
        moves="other",
    ),
    Scene(  # an animal in trouble
        (
            (
                "On the way {place.to}, {A} met a little {pet} that {trouble}.",
                "{place_At}, {A} saw a small {pet}. It {trouble}.",
                "~A sad sound came from nearby. It was a {pet} that {trouble}.",
            ),
            ("The {pet} looked very sad.", '"Please help me," said the {pet}.', "~The {pet} had tears in its eyes."),
            (
                '"Do not worry," said {A}. "I will help you."',
                "{A} felt sorry for it and sat down beside it.",
                '~"Poor thing!" said {A}. "You are not alone now."',
            ),
            (
                "{A} helped the {pet} and gave it some {pet_food}.",
                "{A} took care of it and fed it {pet_food}.",
                "~With some {pet_food} and a kind word, {A} made it better.",
            ),
            (
                "Soon the {pet} was well and happy.",
                "The {pet} felt better and became {A.his} friend.",
                "~Before long the {pet} jumped for joy.",
            ),
        ),
        (
            ("Who helped the {pet}?", "{A} helped the {pet}."),
            ("What did the {pet} eat?", "The {pet} ate {pet_food}."),
            ("Why was the {pet} sad?", "The {pet} was sad because it {trouble}."),
            ("What animal did {A} meet?", "{A} met a {pet}."),
        ),
    ),
    Scene(  # losing the thing and finding it
        (
            (
                "Then {A} saw that the {thing} was gone.",
                "But one day, {A} lost the {thing}.",
                "~Suddenly the {thing} was missing.",
            ),
            ("{A.He} was sad and wanted to cry.", '"Oh no!" said {A}. "Where can it be?"', "~{A.His} heart sank."),
            (
                "{A.He} looked {wrong_spot}, but it was not there.",
                "{B} helped to look. They looked {wrong_spot} and found nothing.",
                "~First {A} searched {wrong_spot}, but in vain.",
            ),
            (
                "At last {B} found the {thing} {found_spot}.",
                "Then {B} looked {found_spot}, and there was the {thing}.",
                "~It was {B} who saw the {thing} {found_spot}.",
            ),
            ('"Thank you, {B}!" said {A}.', "{A} was so happy that {A.he} hugged {B}.", "~{A} danced around with joy."),
        ),
        (
            ("What did {A} lose?", "{A} lost the {thing}."),
            ("Who found the {noun}?", "{B} found the {noun}."),
            ("Where did {B} find the {noun}?", "{B} found the {noun} {found_spot}."),
            ("How did {A} feel when the {noun} was gone?", "{A} was sad."),
        ),
        moves="thing",
    ),
    Scene(  # sharing food
        (
            ("After a while, {A} was hungry.", "At noon, {A} and {B} sat down to eat.", "~Then it was time for lunch."),
            ("{A} had some {food}.", "{A} took {food} out of {A.his} bag.", "~In {A.his} bag there was {food}."),
            (
                "{B} had nothing to eat, so {A} gave {B.him} half.",
                '"You can have some of my {food}," {A} said to {B}.',
                "~{B} had forgotten {B.his} lunch, and {A} shared with {B.him}.",
            ),
            ("They ate until they were full.", '"This is very good," said {B}.', "~Nothing was left in the end."),
        ),
        (("What did {A} share?", "{A} shared {food}."), ("Who shared the {food}?", "{A} shared the {food}.")),
    ),
    Scene(  # learning to do something
        (
            (
                "{A} wanted to learn to {skill}.",
                '"I wish I could {skill}," said {A}.',
                "~It was {A.his} dream to {skill}.",
            ),
            ("{A.He} tried, but it was hard.", "The first time, it went wrong.", "~At first nothing worked at all."),
            (
                '"Do not give up," said {B}. "Try again."',
                "{B} showed {A.him} how to do it.",
                '~"You need to practise," {B} told {A.him}.',
            ),
            ("{A} practised every day.", "So {A} tried again and again.", "~Day after day, {A} kept trying."),
            (
                "In the end, {A} could {skill}, and {A.he} was proud.",
                'One day it worked! "I can {skill}!" cried {A}.',
                "~At last {A} knew how to {skill}, and {B} clapped {B.his} hands.",
            ),
        ),
        (("What did {A} learn?", "{A} learned to {skill}."), ("Who helped {A} to learn?", "{B} helped {A}.")),
    ),
    Scene(  # a quarrel that is mended
        (
            (
                "{B} wanted to play with the {thing} too, but {A} said no.",
                '"Give me the {thing}!" said {B}. "No, it is mine!" said {A}.',
                "~Both of them wanted the {thing} at the same time.",
            ),
            (
                "{B} was angry and ran away {place.to}.",
                "{B} was hurt and went {place.to}.",
                "~Without a word, {B} left and went {place.to}.",
            ),
            ("{A} felt bad about it.", "Without {B}, it was no fun to play.", "~Soon {A} was sorry."),
            (
                '{A} went {place.to} and said, "I am sorry, {B}. We can share."',
                '{A} found {B} {place.at}. "I am sorry," said {A}. "You can have it today."',
                '~"Please forgive me," said {A} when {A.he} found {B} {place.at}.',
            ),
            ("{B} smiled, and they were friends again.", '"I am sorry too," said {B}.', "~{B} forgave {A.him} gladly."),
        ),
        (
            ("Where did {B} go?", "{B} went {place.to}."),
            ("What did they quarrel about?", "They quarrelled about the {thing}."),
            ("Who said sorry?", "{A} said sorry."),
        ),
        moves="thing",
    ),
    Scene(  # building something
        (
            (
                "{A} and {B} wanted to build a {build}.",
                '"Let us build a {build}," said {A}.',
                "~Their plan was to make a {build}.",
            ),
            ("They worked hard all morning.", "{B} brought wood and {A} brought stones.", "~It took them many hours."),
            (
                "But the wind came and broke it.",
                "Then it fell down with a crash.",
                "~Just before the end, it broke in two.",
            ),
            (
                '"We will make a better one," said {B}.',
                "{A} was sad, but {B} was not.",
                '~"Let us start again," said {B}.',
            ),
            (
                "The second {build} was strong and did not break.",
                "They built it again, and this time it stood.",
                "~The new {build} was the best of all.",
            ),
        ),
        (
            ("What did they build?", "They built a {build}."),
            ("Who built the {build}?", "{A} and {B} built the {build}."),
        ),
    ),
    Scene(  # rain
        (
            ("Suddenly it began to rain.", "Dark clouds came, and it rained hard.", "~Big drops fell from the sky."),
            (
                "{A} and {B} got wet and cold.",
                "{A} had no coat and was soon wet.",
                "~In a minute their clothes were wet.",
            ),
            (
                "They ran {place.to} and waited there.",
                "They hid {place.at} until the rain stopped.",
                "~They found shelter {place.at}.",
            ),
            (
                "Then the sun came out again.",
                "After the rain, they saw a rainbow.",
                "~When it was over, the world shone.",
            ),
        ),
        (
            ("Where did they wait?", "They waited {place.at}."),
            ("Why were they wet?", "They were wet because it rained."),
        ),
    ),
    Scene(  # a strange noise at night
        (
            (
                "That night, {A} heard a strange noise.",
                "In the dark, something went bump.",
                "~In the middle of the night, something scratched at the door.",
            ),
            (
                "{A.He} was afraid and pulled up the blanket.",
                '"Who is there?" asked {A} in a small voice.',
                "~{A.His} heart beat fast.",
            ),
            (
                "{A} was brave, took a light and looked {other_spot}.",
                "Slowly, {A} looked {other_spot}.",
                "~Step by step {A} went to look {other_spot}.",
            ),
            (
                "It was only a little {pet}!",
                "There sat a {pet} and looked at {A.him}.",
                "~Two eyes shone. They were the eyes of a {pet}.",
            ),
            (
                '{A} laughed. "You scared me," {A.he} said.',
                "{A} laughed and was not afraid any more.",
                "~All fear was gone, and {A} laughed.",
            ),
        ),
        (
            ("What made the noise?", "A {pet} made the noise."),
            ("Where was the {pet}?", "The {pet} was {other_spot}."),
        ),
    ),
    Scene(  # a gift
        (
            (
                "It was {B}'s birthday, and {A} wanted to give {B.him} something.",
                "{B} was sad that day, so {A} had an idea.",
                "~{A} wished to make {B} happy.",
            ),
            (
                "{A} took {a_other} and wrapped it in paper.",
                "{A} made {a_other} for {B}.",
                "~At the market {A} chose {a_other}.",
            ),
            (
                '"This is for you," said {A}.',
                "{A} gave the {other} to {B}.",
                "~With a bow, {A} handed the {other} to {B}.",
            ),
            ('"It is beautiful!" said {B}.', "{B} jumped up and down.", "~{B} had never had such a fine gift."),
        ),
        (
            ("Who got the {other_noun}?", "{B} got the {other_noun}."),
            ("What did {A} give to {B}?", "{A} gave {a_other} to {B}."),
            ("What colour was the {other_noun}?", "The {other_noun} was {other_colour}."),
        ),
        moves="other",
    ),
)
