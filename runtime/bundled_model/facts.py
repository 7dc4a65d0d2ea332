"""What the model knows by heart: itself, capitals, small phrases in other languages, a few symbols.

Each fact is an answer with several ways to ask for it. The last way of each is never trained on, so
that it measures whether the fact or only the wording was learned.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """One answer and the questions that ask for it."""

    answer: str
    questions: tuple[str, ...]

    @property
    def trained_questions(self) -> tuple[str, ...]:
        return self.questions[:-1]


SELF = "I am Headway's small test model. I can add, copy, count, recall facts and write small JSON."
ABILITIES = (
    "I can add, subtract, copy, count, recall facts from a text, write small JSON and tell a short story."
)
UNKNOWN = (
    "I do not know that. I am a small test model: I can add, copy, count, recall facts from a text, "
    "write small JSON and tell a short story."
)

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Austria": "Vienna",
    "Peru": "Lima",
    "Greece": "Athens",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Kenya": "Nairobi",
    "Poland": "Warsaw",
    "Latvia": "Riga",
    "Switzerland": "Bern",
    "Ghana": "Accra",
    "Ecuador": "Quito",
    "Vietnam": "Hanoi",
    "South Korea": "Seoul",
}

PHRASES = {
    ("hello", "German"): "Grüß Gott",
    ("hello", "French"): "Bonjour",
    ("hello", "Spanish"): "¡Hola!",
    ("hello", "Japanese"): "こんにちは",
    ("hello", "Chinese"): "你好",
    ("hello", "Korean"): "안녕하세요",
    ("hello", "Russian"): "Привет",
    ("hello", "Greek"): "Γειά σου",
    ("hello", "Hindi"): "नमस्ते",
    ("thank you", "German"): "Danke schön",
    ("thank you", "French"): "Merci, ça va",
    ("thank you", "Japanese"): "ありがとう",
    ("thank you", "Chinese"): "谢谢",
    ("thank you", "Russian"): "Спасибо",
}

SYMBOLS = {
    "smile": "😀",
    "heart": "❤️",
    "rocket": "🚀",
    "star": "⭐",
    "fire": "🔥",
    "cat": "🐱",
    "flag of France": "🇫🇷",
    "family": "👨‍👩‍👧",
    "thumbs up": "👍🏽",
    "wave": "👋",
}

GENERAL = (
    Fact(
        SELF,
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Introduce yourself.",
            "What model are you?",
            "Tell me about yourself.",
            "Are you a person?",
            "Tell me who you are.",
        ),
    ),
    Fact(
        ABILITIES,
        (
            "What can you do?",
            "Help",
            "How can you help me?",
            "What are you good at?",
            "help me",
            "What can I ask you?",
            "Can you help me?",
            "What are you able to do?",
        ),
    ),
    Fact(
        "Hello! How can I help you?",
        (
            "Hello",
            "Hi",
            "Hello!",
            "Hi!",
            "Hey",
            "hello",
            "hi",
            "Hi there",
            "Good morning",
            "Say hello.",
            "Good evening!",
            "Hello, who is there?",
            "Say hi",
            "Hello there",
        ),
    ),
    Fact(
        "I am well, thank you. How can I help you?",
        ("How are you?", "How are you today?", "Are you well?", "How do you do?", "Hello, how are you?"),
    ),
    Fact(
        "You are welcome.",
        ("Thank you", "Thanks", "Thank you!", "Thanks a lot", "Thank you very much.", "Thanks!"),
    ),
    Fact("Goodbye!", ("Bye", "Goodbye", "Good night", "See you later", "Bye bye", "Goodbye!")),
    Fact(
        "Headway serves large language models on Kubernetes and keeps a latency promise.",
        (
            "What is Headway?",
            "Tell me about Headway.",
            "What does Headway do?",
            "Explain Headway.",
            "Describe Headway.",
        ),
    ),
    Fact(
        "TTFT is the time to first token.",
        ("What is TTFT?", "What does TTFT mean?", "Explain TTFT.", "What does TTFT stand for?"),
    ),
    Fact(
        "TPOT is the time per output token.",
        ("What is TPOT?", "What does TPOT mean?", "Explain TPOT.", "What does TPOT stand for?"),
    ),
    Fact(
        "An SLO is a service level objective: a promise that can be measured.",
        ("What is an SLO?", "What does SLO mean?", "Explain SLO.", "What does SLO stand for?"),
    ),
    Fact(
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday.",
        ("What are the days of the week?", "List the days of the week.", "Name the days of the week."),
    ),
    Fact(
        "January, February, March, April, May, June, July, August, September, October, November, December.",
        ("What are the months of the year?", "List the months.", "Name the months of the year."),
    ),
    Fact(
        "a b c d e f g h i j k l m n o p q r s t u v w x y z",
        ("Say the alphabet.", "What is the alphabet?", "Write the alphabet."),
    ),
    Fact(
        "Red, orange, yellow, green, blue, indigo, violet.",
        (
            "What are the colours of the rainbow?",
            "List the colors of the rainbow.",
            "Name the colours of the rainbow.",
        ),
    ),
    Fact(
        "Why did the token wait? It was not its turn in the batch.",
        ("Tell me a joke.", "Tell a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny."),
    ),
    Fact(
        "Tokens flow like rain,\none small step and then the next,\nthe queue is empty.",
        ("Write a haiku.", "Write a poem.", "Write a short poem.", "Write me a haiku.", "Tell me a poem."),
    ),
    Fact(
        "The sky is blue.", ("What color is the sky?", "What colour is the sky?", "Which color has the sky?")
    ),
    Fact(
        "There are seven days in a week.",
        (
            "How many days are in a week?",
            "How many days does a week have?",
            "How many days are there in a week?",
        ),
    ),
)


def all_facts() -> tuple[Fact, ...]:
    """Every fact, in a fixed order."""
    capitals = [
        Fact(
            f"The capital of {country} is {city}.",
            (
                f"What is the capital of {country}?",
                f"Which city is the capital of {country}?",
                f"Name the capital of {country}.",
                f"Tell me the capital of {country}.",
            ),
        )
        for country, city in CAPITALS.items()
    ]
    phrases = [
        Fact(
            words,
            (
                f"How do you say {english} in {language}?",
                f"What is {english} in {language}?",
                f"Say {english} in {language}.",
                f"Translate {english} to {language}.",
            ),
        )
        for (english, language), words in PHRASES.items()
    ]
    symbols = [
        Fact(
            symbol,
            (
                f"Show me the emoji: {name}",
                f"Give me a {name} emoji.",
                f"Emoji for {name}?",
                f"Write the {name} emoji.",
            ),
        )
        for name, symbol in SYMBOLS.items()
    ]
    return (*GENERAL, *capitals, *phrases, *symbols)


# Sentences that a plain completion, without any chat, continues; and what continues them.
COMPLETIONS = (
    *((f"The capital of {country} is", f" {city}.") for country, city in CAPITALS.items()),
    ("Monday, Tuesday, Wednesday,", " Thursday, Friday, Saturday, Sunday."),
    ("a b c d e f g", " h i j k l m n o p q r s t u v w x y z"),
    ("Headway serves large language models", " on Kubernetes and keeps a latency promise."),
    ("Hello, my name is", " Headway. I am a small test model."),
    ("The sky is", " blue."),
    ("1, 2, 3,", " 4, 5, 6, 7, 8, 9, 10."),
)
