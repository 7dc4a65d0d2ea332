"""Grammars through the whole engine on the bundled model: what comes out matches, whatever else goes on."""

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs
import pytest

from headway_runtime.config import Envelope, Limits
from headway_runtime.request import FinishReason, Grammar
from headway_runtime.sources import BUNDLED_FOLDER
from headway_runtime.tokenizer import Tokenizer

FOLDER = BUNDLED_FOLDER / "headway-tiny"
# The library's counting of multiples of such a number takes minutes.
ENDLESS = Grammar("json_schema", '{"type": "integer", "multipleOf": 100000007}', "response_format")


class GrammarDriver:
    """An engine over the bundled model, driven by texts."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.engine = driver.engine
        self.tokenizer = Tokenizer(FOLDER)

    def add(self, request_id: str, grammar: Grammar | None, **sampling: Any) -> None:
        stops = self.tokenizer.eos_token_ids
        params: dict[str, Any] = {"temperature": 1.5, "max_tokens": 900, "stop_token_ids": stops}
        prompt = self.tokenizer.encode("Hello", add_special_tokens=False)
        self.driver.add(request_id, prompt, grammar=grammar, **(params | sampling))

    def run(self) -> None:
        deadline = time.monotonic() + 120
        while self.engine.has_work:
            assert time.monotonic() < deadline, "not finished in time"
            self.driver.step()

    def text(self, request_id: str) -> str:
        return self.tokenizer.decode(self.driver.tokens(request_id))

    def end(self, request_id: str) -> Any:
        """The last output."""
        return self.driver.outputs[request_id][-1]

    def is_done(self, request_id: str) -> bool:
        outputs = self.driver.outputs[request_id]
        return bool(outputs) and outputs[-1].finish_reason is not None

    def reason(self, request_id: str) -> FinishReason | None:
        reason: FinishReason | None = self.end(request_id).finish_reason
        return reason


def make_driver(start_engine: Any, **changes: Any) -> GrammarDriver:
    return GrammarDriver(start_engine(FOLDER, **({"max_model_len": 1024} | changes)))


@pytest.fixture
def start(start_engine: Any) -> Iterator[Callable[..., GrammarDriver]]:
    """start(**changes of the config)"""
    made = []

    def make(**changes: Any) -> GrammarDriver:
        made.append(make_driver(start_engine, **changes))
        return made[-1]

    yield make
    for driver in made:
        driver.engine.close()


@pytest.fixture(scope="module")
def shared(start_engine: Any) -> Iterator[GrammarDriver]:
    """One engine for tests that leave nothing in it but what it keeps of grammars."""
    driver = make_driver(start_engine)
    yield driver
    driver.engine.close()


def random_schema(chance: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema that only short texts match."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const", "anyOf"]
    kind = chance.choice(kinds + ["object", "object", "array"] * (depth < 2))
    match kind:
        case "integer":
            low = chance.randint(-500, 500)
            return {"type": "integer", "minimum": low, "maximum": low + chance.randint(0, 3000)}
        case "number":
            return {"type": "number", "minimum": 0, "exclusiveMaximum": chance.choice([0.5, 1, 1000])}
        case "string":
            limits = {"minLength": chance.randint(0, 3), "maxLength": chance.randint(3, 12)}
            options: list[dict[str, Any]] = [limits, {"pattern": "^[a-z]{1,5}-[0-9]{2}$"}, {"format": "date"}]
            return {"type": "string", **chance.choice(options)}
        case "enum":
            return {"enum": chance.sample(["red", "green", 3, 4.5, True, None, 'né\n"e'], 3)}
        case "const":
            return {"const": chance.choice(["x", 17, {"a": [1]}])}
        case "anyOf":
            return {"anyOf": [random_schema(chance, depth + 1) for _ in range(2)]}
        case "array":
            fewest = chance.randint(0, 2)
            items = random_schema(chance, depth + 1)
            return {"type": "array", "items": items, "minItems": fewest, "maxItems": fewest + 2}
        case "object":
            names = chance.sample(["name", "age", "tags", "größe", "x y"], chance.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: random_schema(chance, depth + 1) for name in names},
                "required": chance.sample(names, chance.randint(0, len(names))),
                "additionalProperties": False,
            }
        case _:
            return {"type": kind}


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_valid_by_their_schema(seed: int, shared: GrammarDriver) -> None:
    chance = random.Random(seed)
    schemas = [random_schema(chance) for _ in range(12)]
    for index, schema in enumerate(schemas):
        shared.add(f"{seed}-{index}", Grammar("json_schema", json.dumps(schema)), seed=seed * 100 + index)
    shared.run()
    for index, schema in enumerate(schemas):
        name = f"{seed}-{index}"
        assert shared.reason(name) is FinishReason.STOP, (schema, shared.text(name))
        jsonschema_rs.validate(schema, json.loads(shared.text(name)))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5])
def test_json_object_gives_objects_alone(temperature: float, shared: GrammarDriver) -> None:
    names = [f"object-{temperature}-{seed}" for seed in range(8)]
    for seed, name in enumerate(names):
        shared.add(name, Grammar("json_object"), temperature=temperature, seed=seed)
    shared.run()
    ends = [shared.reason(name) for name in names]
    for name, reason in zip(names, ends, strict=True):
        if reason is FinishReason.STOP:
            assert isinstance(json.loads(shared.text(name)), dict)
        else:
            assert reason is FinishReason.LENGTH
            assert shared.text(name).startswith("{")


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-c]{3}-[0-9]+",
        r"(foo|ba[rz]){2,4}",
        r"\d{4}-\d{2}-\d{2}",
        r"[A-Z][a-z]{2,8}( [A-Z][a-z]{2,8}){1,2}",
        "é{2}ü?",
    ],
)
def test_answers_match_their_regular_expression(pattern: str, shared: GrammarDriver) -> None:
    names = [f"{pattern}-{seed}" for seed in range(5)]
    for seed, name in enumerate(names):
        shared.add(name, Grammar("regex", pattern), seed=seed, max_tokens=300)
    shared.run()
    for name in names:
        assert shared.reason(name) is FinishReason.STOP
        assert re.fullmatch(pattern, shared.text(name))


def test_answers_are_among_the_choices(shared: GrammarDriver) -> None:
    choices = ["yes", "no", "yes, but", "a/b.c*[d]", 'two\nlines "quoted"', "größe", "  blank", "-~#&$^"]
    names = [f"choice-{seed}" for seed in range(40)]
    for seed, name in enumerate(names):
        shared.add(name, Grammar("choice", json.dumps(choices)), seed=seed, temperature=2.0)
    shared.run()
    assert {shared.reason(name) for name in names} == {FinishReason.STOP}
    answers = {shared.text(name) for name in names}
    assert answers <= set(choices)
    assert len(answers) >= 4


@pytest.mark.parametrize("choice", ["two\nlines", 'a"b', "tab\there", "{x}|(y)?", "é👍", "\\d+", " "])
def test_any_text_can_be_a_choice(choice: str, shared: GrammarDriver) -> None:
    name = f"only-{choice}"
    shared.add(name, Grammar("choice", json.dumps([choice])))
    shared.run()
    assert shared.text(name) == choice


GBNF = """
root ::= term (op term){1,6}   # a sum
op ::= " + " | " - "
term ::= [1-9] [0-9]? | "(" root ")"
"""
LARK = """
start: term (OP term)~1..6
OP: " + " | " - "
term: /[1-9][0-9]?/ | "(" start ")"
"""
# As most of Lark's own examples begin.
SHAPED = LARK.replace("start: ", "?start: ", 1)


@pytest.mark.parametrize(
    ("kind", "source"), [("ebnf", GBNF), ("ebnf", LARK), ("ebnf", SHAPED), ("lark", LARK)]
)
def test_answers_follow_a_grammar(kind: Any, source: str, shared: GrammarDriver) -> None:
    names = [f"{kind}-{len(source)}-{seed}" for seed in range(8)]
    for seed, name in enumerate(names):
        shared.add(name, Grammar(kind, source), seed=seed, temperature=1.0)
    shared.run()
    finished = [shared.text(name) for name in names if shared.reason(name) is FinishReason.STOP]
    assert len(finished) >= 3
    for text in finished:
        assert re.fullmatch(r"[0-9()+ -]+", text)
        assert isinstance(eval(text, {"__builtins__": {}}), int)


def test_length_ends_an_answer_in_its_middle(shared: GrammarDriver) -> None:
    shared.add("short", Grammar("regex", "[a-z]{300}"), max_tokens=5)
    shared.run()
    assert shared.reason("short") is FinishReason.LENGTH
    assert len(shared.driver.tokens("short")) == 5


def test_min_tokens_keeps_an_answer_going_as_far_as_its_grammar_does(shared: GrammarDriver) -> None:
    shared.add("long", Grammar("regex", "a(b|c)*"), min_tokens=40, max_tokens=60, seed=3)
    shared.add("ends", Grammar("regex", "abc"), min_tokens=40)
    shared.add("tight", Grammar("choice", '["a"]'), min_tokens=40, max_tokens=60)
    shared.run()
    assert len(shared.driver.tokens("long")) >= 40
    assert re.fullmatch("a[bc]*", shared.text("long"))
    assert (shared.text("ends"), shared.reason("ends")) == ("abc", FinishReason.STOP)
    assert (shared.text("tight"), shared.reason("tight")) == ("a", FinishReason.STOP)


def test_ignored_end_of_sequence_lets_the_grammar_decide(shared: GrammarDriver) -> None:
    nothing: frozenset[int] = frozenset()
    shared.add("open", Grammar("regex", "(x|y)*"), stop_token_ids=nothing, max_tokens=30, temperature=2.0)
    shared.add("closed", Grammar("regex", "[xy]{2}"), stop_token_ids=nothing, max_tokens=30)
    shared.add("empty", Grammar("choice", '[""]'), stop_token_ids=nothing, max_tokens=30)
    shared.run()
    assert shared.reason("open") is FinishReason.LENGTH
    assert re.fullmatch("[xy]{30,}", shared.text("open"))
    assert shared.reason("closed") is FinishReason.STOP
    assert len(shared.text("closed")) == 2
    assert shared.reason("empty") is FinishReason.STOP
    assert shared.text("empty") == ""


def test_grammar_and_allowed_tokens_both_hold(shared: GrammarDriver) -> None:
    (seven,) = shared.tokenizer.encode("7", add_special_tokens=False)
    (nine,) = shared.tokenizer.encode("9", add_special_tokens=False)
    allowed = frozenset({seven, nine}) | shared.tokenizer.eos_token_ids
    shared.add("both", Grammar("regex", "[0-9]{6}"), allowed_token_ids=allowed)
    shared.add("neither", Grammar("regex", "[a-z]+", "structured_outputs.regex"), allowed_token_ids=allowed)
    shared.run()
    assert re.fullmatch("[79]{6}", shared.text("both"))
    end = shared.end("neither")
    assert (end.finish_reason, end.error_param) == (FinishReason.ERROR, "allowed_token_ids")
    assert end.token_ids == ()
    assert "leave no token" in end.error


def test_equal_seeds_give_equal_answers_alone_and_among_all_kinds_of_others(start: Any) -> None:
    schema = Grammar("json_schema", json.dumps(random_schema(random.Random(3))))
    alone: GrammarDriver = start(enable_prefix_caching=False)
    alone.add("a", schema, seed=5)
    alone.run()
    crowd: GrammarDriver = start(enable_prefix_caching=False)
    crowd.add("plain", None, temperature=0.0, max_tokens=50)
    crowd.add("a", schema, seed=5)
    crowd.add("b", Grammar("regex", "[0-9 ]{40}"), seed=5)
    crowd.add("penalized", None, frequency_penalty=1.0, seed=6, max_tokens=40)
    crowd.add("again", schema, seed=5)
    crowd.add("biased", None, logit_bias=((70, 5.0),), top_p=0.9, max_tokens=60)
    crowd.run()
    assert alone.text("a") == crowd.text("a") == crowd.text("again")


def test_preempted_answers_go_on_where_they_were(start: Any) -> None:
    # Blocks for one sequence of 256 tokens and little more: keys and values of 2 heads of 64 in 4 layers.
    block_bytes = 16 * 2 * 2 * 64 * 4 * 2
    limits = {"envelope": Envelope(8, 64), "limits": Limits(8, 64)}
    scarce: GrammarDriver = start(max_model_len=256, kv_cache_memory_bytes=18 * block_bytes, **limits)
    names = [str(index) for index in range(6)]
    for index, name in enumerate(names):
        scarce.add(name, Grammar("regex", "[0-9]{60}"), seed=index)
    scarce.run()
    assert scarce.driver.counter("preemptions") >= 1
    for name in names:
        assert re.fullmatch("[0-9]{60}", scarce.text(name))


def test_unusable_grammar_is_refused_and_counts_as_invalid(start: Any) -> None:
    driver: GrammarDriver = start()
    driver.add("bad", Grammar("regex", "(", "structured_outputs.regex"))
    driver.add("good", Grammar("regex", "[a-z]{3}"))
    driver.run()
    (end,) = driver.driver.outputs["bad"]
    assert (end.finish_reason, end.token_ids) == (FinishReason.ERROR, ())
    assert end.error_param == "structured_outputs.regex"
    assert "unclosed group" in end.error
    assert driver.reason("good") is FinishReason.STOP
    assert driver.driver.metrics.snapshot().rejected["invalid"] == 1
    assert driver.driver.counter("errors") == 0


def test_endless_compilation_is_stopped_and_delays_nobody(start: Any) -> None:
    driver: GrammarDriver = start(structured_output_timeout_seconds=3.0)
    # The process for trials is up before the clock is looked at.
    driver.add("first", Grammar("regex", "[a-z]{3}"))
    driver.run()
    driver.add("endless", ENDLESS)
    driver.add("plain", None, max_tokens=20, temperature=0.0)
    driver.add("other", Grammar("regex", "[0-9]{8}"))
    assert driver.engine.num_waiting == 3
    while not (driver.is_done("plain") and driver.is_done("other")):
        driver.driver.step()
    assert driver.driver.outputs["endless"] == []
    assert (driver.engine.num_waiting, driver.engine.num_running) == (1, 0)
    assert driver.engine.oldest_waiting_seconds(time.monotonic()) > 0
    driver.run()
    (end,) = driver.driver.outputs["endless"]
    assert end.error_param == "response_format"
    assert "not compiled within 3 s" in end.error
    assert not driver.engine.has_work


def test_request_can_be_aborted_while_its_grammar_is_compiled(start: Any) -> None:
    driver: GrammarDriver = start()
    driver.add("endless", ENDLESS)
    driver.add("same", ENDLESS)
    with pytest.raises(Exception, match="live already"):
        driver.add("same", ENDLESS)
    driver.driver.step()
    assert driver.engine.num_waiting == 2
    assert driver.engine.abort("same", time.monotonic()) is True
    assert driver.engine.abort("endless", time.monotonic()) is True
    assert driver.engine.abort("endless", time.monotonic()) is False
    assert not driver.engine.has_work
    assert driver.driver.step() == []
    counters = driver.driver.metrics.snapshot().counters
    # The one that was live already was refused.
    assert (counters["received"], counters["aborted"]) == (3, 2)


def test_waiting_for_a_grammar_counts_against_the_queue(start: Any) -> None:
    driver: GrammarDriver = start(max_waiting=2)
    driver.add("a", ENDLESS)
    driver.add("b", ENDLESS)
    with pytest.raises(Exception, match="2 requests wait already"):
        driver.add("c", None)
