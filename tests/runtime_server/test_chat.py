"""Chat templates: where they are found, what they may do, and how they refuse."""

from pathlib import Path

import pytest

from headway_runtime.chat import ChatTemplate, load_chat_template
from headway_runtime.errors import ConfigError, InvalidRequestError
from headway_runtime.tokenizer import Tokenizer

USER = [{"role": "user", "content": 'say "hi" <b>'}]


def test_the_prompt_ends_where_the_assistant_begins(model_folder: Path) -> None:
    tokenizer = Tokenizer(model_folder)
    template = load_chat_template(model_folder, tokenizer.config, tokenizer.special_tokens)
    assert template is not None
    assert template.render(USER) == '<|bos|><|user|>say "hi" <b><|eos|><|assistant|>'
    assert tokenizer.eos_token_ids == {1}


def test_special_tokens_of_a_prompt_are_encoded_once(model_folder: Path) -> None:
    tokenizer = Tokenizer(model_folder)
    assert tokenizer.encode("<|bos|>", add_special_tokens=False) == [0]


def test_the_template_file_goes_before_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    template = load_chat_template(tmp_path, {"chat_template": "from the configuration"}, {})
    assert template is not None
    assert template.render(USER) == "from the file"


@pytest.mark.parametrize("own", [{}, {"chat_template": None}], ids=["no field", "null"])
def test_an_old_processors_file_is_the_last_place(tmp_path: Path, own: dict[str, None]) -> None:
    path = tmp_path / "chat_template.json"
    path.write_text('{"chat_template": "from the processor"}')
    template = load_chat_template(tmp_path, own, {})
    assert template is not None
    assert template.render(USER) == "from the processor"
    template = load_chat_template(tmp_path, {"chat_template": "from the configuration"}, {})
    assert template is not None
    assert template.render(USER) == "from the configuration"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"chat_template.json: cannot be read"):
        load_chat_template(tmp_path, own, {})


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    template = load_chat_template(tmp_path, {"chat_template": named}, {})
    assert template is not None
    assert template.render(USER) == "plain"
    assert load_chat_template(tmp_path, {}, {}) is None


def test_chats_with_tools_have_a_template_of_their_own_if_the_model_has(tmp_path: Path) -> None:
    named = [
        {"name": "tool_use", "template": "{{ tools[0].type }}"},
        {"name": "default", "template": "plain"},
    ]
    template = load_chat_template(tmp_path, {"chat_template": named}, {})
    assert template is not None
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{"type": "function"}]) == "function"
    assert template.source_with_tools == "{{ tools[0].type }}"


def test_a_template_that_is_given_comes_before_the_models_own(tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_text("given {{ mood }}")
    template = load_chat_template(tmp_path, {"chat_template": "own"}, {}, given)
    assert template is not None
    assert template.render(USER, variables={"mood": "calm"}) == "given calm"
    with pytest.raises(ConfigError, match="missing"):
        load_chat_template(tmp_path, {"chat_template": "own"}, {}, tmp_path / "missing.jinja")


def test_variables_do_not_replace_what_the_server_gives() -> None:
    template = ChatTemplate("{{ messages[0].role }} {{ bos_token }}", {"bos_token": "<s>"})
    assert template.render(USER, variables={"messages": [], "bos_token": "x"}) == "user x"


def test_json_is_not_escaped_for_html() -> None:
    assert ChatTemplate("{{ messages[0].content | tojson }}", {}).render(USER) == '"say \\"hi\\" <b>"'


def test_generation_marks_are_their_body() -> None:
    assert ChatTemplate("{% generation %}{{ 1 + 1 }}{% endgeneration %}", {}).render(USER) == "2"


def test_loop_controls_and_the_date_are_there() -> None:
    source = "{% for m in messages %}{{ strftime_now('%Y') | length }}{% break %}{% endfor %}"
    assert ChatTemplate(source, {}).render(USER * 2) == "4"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content.roles_must_alternate.x }}",
        "{{ messages.append('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
    ],
)
def test_a_template_that_refuses_or_reaches_out_is_the_clients_400(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="messages") as caught:
        ChatTemplate(source, {}).render(USER)
    assert caught.value.param == "messages"


def test_a_broken_template_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="Jinja"):
        ChatTemplate("{% for %}", {})


def test_the_fewest_tokens_of_a_text_are_a_bound_on_its_tokens(model_folder: Path) -> None:
    tokenizer = Tokenizer(model_folder)
    for text in (
        "",
        "a" * 1000,
        "The quick brown fox " * 50,
        "added token" * 40,
        "👩‍👩‍👧" * 30,
    ):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=True))
    assert tokenizer.fewest_tokens("a" * 10_000) > 100, "and not an empty one"
