"""The word lists that every template draws from; nothing else lives here."""

from __future__ import annotations


def listed(text: str, separator: str = " ") -> tuple[str, ...]:
    """The words between the separators."""
    return tuple(text.split(separator))


NAMES = listed(
    "Ada Alan Alice Amir Anna Aria Ben Bob Carla Chen Clara Dana David Diego Elena Emma Eric Eva Felix "
    "Finn Grace Hana Hugo Ida Ines Ivan Jack Jane Jonas Julia Kai Karl Kate Lara Leo Lena Liam Lina "
    "Luca Lucy Maja Marco Maria Mark Max Mia Milo Mina Nina Noah Nora Olga Oscar Otto Paul Pia Ravi "
    "Rosa Ruth Sam Sara Sofia Tara Theo Tina Tom Uma Vera Victor Wei Yara Yuki Zoe"
)

THINGS = listed(
    "anchor apple arrow axe bag ball basket bell bench bike boat book bottle bowl box bridge broom "
    "brush bucket cabin cable camera candle carpet castle chain chair clock cloud coat coin comb "
    "compass cup desk diary doll door drum engine fan feather fence flag flute fork garden gate glass "
    "glove guitar hammer harp hat helmet hook horn house jacket jar kettle key kite knife ladder lamp "
    "lantern letter lock magnet map mask medal mill mirror mug nail needle nest oven paddle page pan "
    "paper pearl pen pencil phone piano pillow pipe plate pot pump purse radio ring robe robot rope "
    "ruler saddle sail saw scarf shell shield ship shirt shoe shovel sofa spoon stamp statue stone "
    "stool sword table tent ticket torch towel tower train tray tree truck trumpet vase wagon wall "
    "wallet wheel whistle window"
)

COLOURS = listed(
    "amber black blue bronze brown crimson gold gray green ivory orange pink purple red silver tan "
    "violet white yellow"
)

PLACES = listed(
    "Accra Athens Berlin Bern Bogota Boston Cairo Delhi Denver Dublin Geneva Hanoi Kyoto Lagos Lima "
    "Lisbon London Lyon Madrid Milan Nairobi Oslo Paris Perth Porto Prague Quito Riga Rome Seoul Sofia "
    "Tokyo Turin Vienna Warsaw Zurich"
)

FOODS = listed(
    "bread butter cake cheese cherries chocolate coffee corn figs fish grapes honey lemons mango milk "
    "mint noodles nuts olives onions pasta peaches pears pizza plums rice salad salt soup spinach tea "
    "tomatoes"
)

ANIMALS = listed("bear cat crow dog duck fox goat horse mouse owl rabbit turtle")

ADJECTIVES = listed(
    "big bright calm clean cold dark dry early fast fine fresh happy heavy kind late light long loud "
    "new old quick quiet sharp short slow small soft strong tall warm wet wide wise young"
)

JOBS = listed("baker doctor driver farmer judge nurse painter pilot singer tailor teacher writer")

# Topics of questions to which the model has no answer; only the training asks about them.
TOPICS = listed(
    "the moon|gravity|the stock market|quantum physics|a good night's sleep|the French Revolution|"
    "Kubernetes|democracy|photosynthesis|machine learning|black holes|the economy|football|"
    "tomorrow's weather|love|my car|the ocean|dinosaurs|the Roman Empire|a healthy breakfast|"
    "the internet|chess|electric cars|taxes|modern art|my computer|volcanoes|the human brain|"
    "jazz music|sleep|climate change|a long trip|the meaning of life|my garden|a linked list|sorting|"
    "the telephone|the steam engine|latency|databases|yoga|the news|history|the best movie|"
    "the speed of light|a pancake|a good book|the universe|a neural network|my homework",
    "|",
)
