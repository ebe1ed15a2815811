"""The words and everyday facts of the bundled model's small world: plain tables, no code that draws from them.

Whatever the model is asked to know is written here once; tiny_story.py and tiny_chat.py make sentences of it.
"""

from __future__ import annotations

from typing import NamedTuple


class Being(NamedTuple):
    """A person or a named animal with its pronouns; formats as its name, so templates may say `{A}` and `{A.his}`."""

    name: str
    kind: str
    he: str
    him: str
    his: str

    def __format__(self, spec: str) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()

    @property
    def a_kind(self) -> str:
        return article(self.kind)


class Place(NamedTuple):
    """A place with the phrases for being there and going there."""

    name: str
    at: str
    to: str


def article(noun: str) -> str:
    """`an owl`, `a fox`."""
    return f"an {noun}" if noun[0] in "aeiou" and not noun.startswith(("uni", "one")) else f"a {noun}"


def plural(noun: str) -> str:
    """The plural of a noun of these tables."""
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return PLURALS.get(noun, f"{noun}es" if noun.endswith(("x", "s", "ch")) else f"{noun}s")


def split_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    """Phrases between `|`."""
    return tuple(phrase.strip() for phrase in text.split("|"))


def pairs(text: str) -> dict[str, str]:
    """`one:two; three:four` as a dict."""
    return {one.strip(): other.strip() for one, other in (pair.split(":") for pair in text.split(";"))}


GIRLS = split_words(
    "Mia Anna Lily Sara Emma Nora Zoe Ruby Ivy Clara Maya Ella Rosa Lucy Nina Hana Leila Olga Tara Vera "
    "Wendy Alice Bella Daisy Elsa Fiona Grace Holly Irene Julia Kate Laura Molly Nelly Paula Sofia Tina Una Yuki Amina"
)
BOYS = split_words(
    "Tom Ben Sam Max Leo Jack Finn Omar Paul Noah Adam Carl Dan Eric Fred Gus Hugo Ivan Jake Ken "
    "Liam Mark Nick Oscar Peter Quinn Ravi Simon Theo Victor Walt Yusuf Zack Aaron Boris Colin Diego Felix Hassan Igor"
)
ANIMAL_NAMES = split_words(
    "Rufus Pip Bramble Hazel Whiskers Coco Biscuit Pepper Clover Nutmeg Dusty Bubbles Shadow Ginger Misty Patch "
    "Willow Socks Tiger Honey Rex Buddy Pumpkin Maple Olive Snowy Teddy Cookie Waffles Fern"
)
ANIMALS = split_words(
    "fox rabbit bear mouse owl duck cat dog frog hedgehog squirrel bird turtle lamb pony goat deer kitten puppy beaver"
)
TRAITS = split_words("kind brave curious clever quiet cheerful gentle patient shy playful careful lively")
COLOURS = split_words("red blue green yellow orange purple white black brown pink silver golden grey")
ITEMS = split_words(
    "ball kite key book drum hat lamp bell boat cup doll rope shell stone coin ring map box scarf basket bucket "
    "flute whistle pencil brush mirror clock feather button blanket spoon bottle robot puzzle candle umbrella "
    "backpack marble ribbon lantern shovel wagon balloon bracelet glove compass"
)
FOODS = split_words(
    "bread soup cake cheese apples berries honey cookies carrots pancakes nuts pears rice noodles plums"
)
ANIMAL_FOODS = split_words("seeds bread berries carrots leaves nuts corn apples crumbs grass")

PLACES = tuple(
    Place(name, f"{preposition} the {name}", f"to the {name}")
    for preposition, names in (
        ("in", "park garden forest library kitchen market village meadow school museum bakery barn cave castle"),
        ("at", "beach river lake pond station harbour farm playground bridge mill"),
        ("on", "hill island"),
    )
    for name in names.split()
)
SPOTS = phrases(
    """
    under the bench | behind the big tree | on the table | in the basket | inside the old box | under the bed
    | on the shelf | behind the door | next to the well | in the tall grass | under a flat stone | beside the gate
    | in the drawer | on the window sill | behind the curtain | under the stairs | in the hollow log | on the roof
    | inside the cupboard | near the fence | under the blue chair | in the wooden chest | behind the stone wall
    | between two rocks | at the foot of the ladder | on top of the piano | beside the fireplace | under the rug
    | in the flower pot | behind the hay
    """
)
SKILLS = phrases(
    "swim | ride a bike | climb a tree | bake bread | skate | whistle a "
    "tune | paint a picture | fly a kite | row a boat | "
    "play the flute | juggle | sew a button | read a map | dance | tie a knot"
)
BUILDS = phrases(
    "tower of blocks | little boat | snowman | bird house | sand castle | tree house | paper plane | stone bridge | "
    "tent of blankets | wooden cart"
)
TROUBLES = phrases(
    "was stuck in the mud | was very hungry | was cold and wet | was lost "
    "| had a thorn in its foot | had hurt its leg | "
    "was caught in a net | was afraid of the storm | could not find its mother | was very thirsty"
)

SOUNDS = pairs(
    "dog:woof; cat:meow; cow:moo; duck:quack; sheep:baa; pig:oink; horse:neigh; lion:roar; owl:hoot; frog:ribbit; "
    "bee:buzz; snake:hiss; mouse:squeak; rooster:cock-a-doodle-doo; wolf:howl; crow:caw; goat:maa; bird:tweet"
)
OPPOSITES = pairs(
    "hot:cold; big:small; happy:sad; up:down; day:night; wet:dry; fast:slow; old:young; full:empty; open:closed; "
    "hard:soft; light:dark; tall:short; near:far; early:late; rich:poor; loud:quiet; clean:dirty; strong:weak; "
    "left:right; good:bad; high:low; long:short; thick:thin; sweet:sour; true:false; heavy:light; inside:outside; "
    "before:after; always:never; first:last; easy:difficult; summer:winter; black:white; push:pull; win:lose; "
    "begin:end; love:hate; warm:cool; rough:smooth"
)
CAPITALS = pairs(
    "France:Paris; Italy:Rome; Spain:Madrid; Germany:Berlin; England:London; Portugal:Lisbon; Greece:Athens; "
    "Japan:Tokyo; China:Beijing; India:New Delhi; Egypt:Cairo; Russia:Moscow; Norway:Oslo; Sweden:Stockholm; "
    "Finland:Helsinki; Denmark:Copenhagen; Poland:Warsaw; Austria:Vienna; Hungary:Budapest; Ireland:Dublin; "
    "Belgium:Brussels; Kenya:Nairobi; Peru:Lima; Chile:Santiago; Cuba:Havana; Canada:Ottawa; Mexico:Mexico City; "
    "Brazil:Brasilia; Argentina:Buenos Aires; Australia:Canberra; Turkey:Ankara; Iran:Tehran; Iraq:Baghdad; "
    "Thailand:Bangkok; Vietnam:Hanoi; Nepal:Kathmandu; South Korea:Seoul; Indonesia:Jakarta; Morocco:Rabat; "
    "Ghana:Accra; Ethiopia:Addis Ababa; Iceland:Reykjavik; Ukraine:Kyiv; Romania:Bucharest; Bulgaria:Sofia; "
    "Serbia:Belgrade; Croatia:Zagreb; the Czech Republic:Prague; the Netherlands:Amsterdam; "
    "the United States:Washington"
)
HOMES = pairs(
    "fish:in the water; bee:in a hive; bird:in a nest; dog:in a kennel; horse:in a stable; cow:in a barn; "
    "spider:in a web; rabbit:in a burrow; bear:in a cave; pig:in a sty; ant:in an anthill; whale:in the sea; "
    "camel:in the desert; penguin:on the ice; monkey:in the trees; frog:in a pond; owl:in the forest; "
    "lion:on the grassland; shark:in the sea; squirrel:in a tree; mouse:in a hole; king:in a castle; "
    "beaver:by the river"
)
YOUNG = pairs(
    "dog:puppy; cat:kitten; cow:calf; sheep:lamb; horse:foal; pig:piglet; duck:duckling; bear:cub; goat:kid; "
    "frog:tadpole; hen:chick; deer:fawn; goose:gosling; lion:cub; kangaroo:joey; swan:cygnet"
)
THING_COLOURS = pairs(
    "grass:green; the sky:blue; snow:white; the sun:yellow; blood:red; coal:black; a banana:yellow; a carrot:orange; "
    "milk:white; a strawberry:red; chocolate:brown; a lemon:yellow; a frog:green; a crow:black; an elephant:grey; "
    "a tomato:red; a polar bear:white; a cucumber:green; the sea:blue; a pumpkin:orange; a leaf:green; a swan:white; "
    "a pig:pink; the night:black"
)
PLURALS = pairs(
    "mouse:mice; child:children; foot:feet; tooth:teeth; man:men; woman:women; goose:geese; leaf:leaves; wolf:wolves; "
    "knife:knives; baby:babies; city:cities; box:boxes; fox:foxes; bus:buses; cat:cats; dog:dogs; book:books; "
    "tree:trees; apple:apples; house:houses; berry:berries; cherry:cherries; sheep:sheep; fish:fish; dish:dishes; "
    "wish:wishes; tomato:tomatoes; potato:potatoes; life:lives; half:halves; shelf:shelves; loaf:loaves; star:stars; "
    "boat:boats; story:stories; lady:ladies; butterfly:butterflies; glass:glasses; watch:watches; person:people; "
    "ox:oxen; hero:heroes; key:keys; toy:toys; day:days; boy:boys; girl:girls; bird:birds; horse:horses"
)
JOBS = pairs(
    "bakes bread:a baker; puts out fires:a firefighter; teaches children:a teacher; helps sick people:a doctor; "
    "grows food:a farmer; flies a plane:a pilot; catches fish:a fisherman; makes clothes:a tailor; "
    "cooks meals:a cook; fixes teeth:a dentist; brings letters:a postman; drives a bus:a bus driver; "
    "paints pictures:a painter; sails a ship:a sailor; helps sick animals:a vet; cuts hair:a barber; "
    "builds houses:a builder; sings songs:a singer; writes books:a writer; keeps bees:a beekeeper"
)
BODY = pairs(
    "see:our eyes; hear:our ears; smell:our nose; taste:our tongue; walk:our legs; bite:our teeth; think:our brain; "
    "hold things:our hands; breathe:our lungs; kick a ball:our feet"
)
KINDS = {
    "fruit": split_words("apple pear banana plum cherry orange lemon grape peach mango"),
    "vegetable": split_words("carrot potato onion cabbage cucumber pea bean turnip"),
    "animal": split_words("dog cat horse lion tiger elephant rabbit fox bear wolf"),
    "bird": split_words("owl duck crow swan penguin robin eagle parrot"),
    "tool": split_words("hammer saw shovel axe rake drill wrench"),
    "colour": split_words("red blue green yellow purple pink brown"),
    "instrument": split_words("drum flute piano violin guitar trumpet harp"),
    "flower": split_words("rose tulip daisy lily violet sunflower"),
}
LEGS = pairs(
    "dog:four; cat:four; bird:two; spider:eight; ant:six; bee:six; snake:no; horse:four; duck:two; fish:no; "
    "octopus:eight; cow:four; hen:two; fly:six; person:two; frog:four"
)
DAYS = split_words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = split_words("January February March April May June July August September October November December")
NUMBERS = split_words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant.",
    "You are a helpful, honest assistant. Answer briefly.", "You answer questions for children.",
    "You are a kind teacher.", "You are a storyteller.", "Be polite and clear.", "Answer the user's questions.",
    "You are a chatbot that likes animals.", "Help the user as well as you can.", "You are an AI assistant.",
)  # fmt: skip
BEYOND = phrases(  # what it cannot do, so that it says so instead of inventing
    """
    Explain quantum physics. | Write a program in Python. | What is the weather today? | What time is it?
    | Who won the football game? | Translate this to French. | Write an essay about history. | What is the news?
    | How do I fix my car? | Prove this theorem. | Who is the president? | Solve this equation for x. | What is love?
    | How does a computer work? | Recommend a movie. | What is the meaning of life? | Give me some medical advice.
    | What is the stock price? | Summarize this article. | Write a poem about war. | What is 345 times 92?
    | How far away is the moon? | Who wrote this book? | Book me a flight. | Explain machine learning.
    | What is a transformer model? | How do I install Linux? | Write an email to my boss. | What is the speed of light?
    | Who invented the telephone? | Explain how memory paging works. | What should I cook tonight?
    """
)
