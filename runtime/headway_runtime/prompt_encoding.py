"""Prompts as users of the in-process engine give them, to token ids: texts, token ids, chats.

Refuses by name what is none of these and what this model cannot read. Knows no sampling and no engine.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from headway_runtime.answer_assembly import Prompt
from headway_runtime.chat import RESERVED_NAMES, ChatTemplate, cut_after, load_chat_template
from headway_runtime.errors import ConfigError, InvalidRequestError
from headway_runtime.sampling_params import is_text, wrong
from headway_runtime.tokenizer import Tokenizer

# The dict is vLLM's: {"prompt": text} or {"prompt_token_ids": token ids}.
PromptInput: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Messages: TypeAlias = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TemplateArguments:
    """What becomes of a chat's messages, with vLLM's names. InvalidRequestError for what excludes itself.

    continue_final_message: the answer goes on where the last message, an assistant's, ends.
    tools: as in OpenAI's API. chat_template: Jinja, instead of the model's own. chat_template_kwargs: what
    else the template knows, such as enable_thinking.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise wrong("continue_final_message", True, "excludes add_generation_prompt; give that as False")
        if taken := RESERVED_NAMES & (self.chat_template_kwargs or {}).keys():
            raise wrong(
                "chat_template_kwargs", self.chat_template_kwargs, f"sets {min(taken)!r}; leave it out"
            )
        for tool in self.tools or ():
            function = tool.get("function") if isinstance(tool, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise wrong("tools", tool, "want dicts with type 'function' and a function with a name")


class PromptEncoder:
    """One model's tokenizer and chat template. ConfigError if one of them is not usable."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self.tokenizer = Tokenizer(folder)
        self._chat_template = load_chat_template(folder, self.tokenizer.config, self.tokenizer.special_tokens)
        self._vocab_size = vocab_size

    def encode_all(self, prompts: PromptInput | Sequence[PromptInput]) -> list[Prompt]:
        """One prompt, or a list of them. InvalidRequestError for what is neither."""
        if isinstance(prompts, str | Mapping):
            return [self.encode(prompts)]
        if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
            raise wrong(
                "prompts", prompts, "want a text, a list of token ids, or a list of texts or such lists"
            )
        if prompts and isinstance(prompts[0], int):
            return [self.encode(prompts)]  # type: ignore[arg-type]
        return [self.encode(one) for one in prompts]  # type: ignore[arg-type]

    def encode(self, prompt: PromptInput) -> Prompt:
        text, given = _unwrapped(prompt) if isinstance(prompt, Mapping) else (None, prompt)
        if isinstance(given, str):
            _check_text("prompt", given)
            encoded = self.tokenizer.encode(given, add_special_tokens=True)
            return self._checked(Prompt(uuid.uuid4().hex, given, tuple(encoded)))
        is_list = isinstance(given, Sequence) and not isinstance(given, bytes)
        if not is_list or not all(type(one) is int for one in given):
            raise wrong("prompt", given, "want a text or a list of token ids")
        return self._checked(Prompt(uuid.uuid4().hex, text, tuple(given)))

    def encode_chats(
        self, messages: Messages | Sequence[Messages], arguments: TemplateArguments
    ) -> list[Prompt]:
        """One conversation, or a list of them."""
        _check_list(messages)
        is_one = not messages or isinstance(messages[0], Mapping)
        chats: Any = [messages] if is_one else messages
        return [self.encode_chat(one, arguments) for one in chats]

    def encode_chat(self, messages: Messages, arguments: TemplateArguments) -> Prompt:
        template = self._template(arguments.chat_template)
        _check_list(messages)
        if not messages:
            raise wrong("messages", messages, "is empty; give at least one message")
        shown = [_for_template(one) for one in messages]
        text = template.render(
            shown,
            add_generation_prompt=arguments.add_generation_prompt,
            tools=arguments.tools,
            variables=arguments.chat_template_kwargs or {},
        )
        if arguments.continue_final_message:
            text = cut_after(text, _to_continue(shown[-1]))
        _check_text("messages", text)
        # The template writes the special tokens itself.
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return self._checked(Prompt(uuid.uuid4().hex, text, token_ids))

    def _template(self, given: str | None) -> ChatTemplate:
        if given is not None:
            try:
                return ChatTemplate(given, self.tokenizer.special_tokens)
            except ConfigError as error:
                raise wrong("chat_template", given, str(error)) from error
        if self._chat_template is None:
            raise InvalidRequestError(
                "messages: this model has no chat template; use generate, or give chat_template",
                param="messages",
            )
        return self._chat_template

    def _checked(self, prompt: Prompt) -> Prompt:
        token_ids = prompt.token_ids
        if not token_ids:
            given = [] if prompt.text is None else prompt.text
            raise InvalidRequestError(f"prompt={given!r} is empty; give at least one token", param="prompt")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            wrong_id = next(one for one in token_ids if not 0 <= one < self._vocab_size)
            raise InvalidRequestError(
                f"prompt holds token id {wrong_id}, which is outside [0, {self._vocab_size - 1}]; use this "
                "model's tokenizer",
                param="prompt",
            )
        return prompt


def truncated(prompt: Prompt, limit: int | None, most: int, max_tokens: int | None) -> Prompt:
    """What truncate_prompt_tokens leaves of a prompt: its end. most: tokens of prompt and answer together."""
    if limit is None:
        return prompt
    if limit == -1:
        limit = max(1, most - max(1, max_tokens or 1))
    return replace(prompt, token_ids=prompt.token_ids[-limit:])


def _unwrapped(prompt: Mapping[str, Any]) -> tuple[str | None, Any]:
    """The text of a prompt that says which form it has, if it says one, and what is to be read of it."""
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    odd = next((repr(name) for name in prompt if name not in ("prompt", "prompt_token_ids")), None)
    if odd is not None or text is token_ids is None:
        raise wrong("prompt", prompt, f"holds {odd or 'nothing'}; give 'prompt', 'prompt_token_ids' or both")
    if text is not None and not isinstance(text, str):
        raise wrong("prompt", text, "want a text")
    if isinstance(token_ids, str):
        raise wrong("prompt_token_ids", token_ids, "want a list of token ids")
    # The ids count; the text beside them is for whoever reads the output.
    return text, text if token_ids is None else token_ids


def _check_text(param: str, text: str) -> None:
    if not is_text(text):
        raise wrong(param, text, "holds half a surrogate pair, which is no character; leave it out")


def _check_list(messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise wrong(
            "messages", messages, "want a list of dicts with role and content, or a list of such lists"
        )


def _to_continue(final: Mapping[str, Any]) -> str:
    """What the answer begins with."""
    content: str = final["content"]
    if final["role"] != "assistant" or not content.strip():
        raise wrong(
            "continue_final_message", True, "needs a final message of role 'assistant' with text to continue"
        )
    return content


def _for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates read it: content as one text, and today's word for `system`."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            f"messages: {message!r} has no role; give dicts with role and content", param="messages"
        )
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        for part in content:
            is_text_part = isinstance(part, Mapping) and part.get("type") == "text"
            if not is_text_part or not isinstance(part.get("text"), str):
                raise InvalidRequestError(
                    f"messages: {part!r} is no text part; write {{'type': 'text', 'text': ...}}",
                    param="messages",
                )
        content = "\n".join(part["text"] for part in content)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(
            f"messages: content={content!r} is no text; give a string or a list of text parts",
            param="messages",
        )
    role = "system" if message["role"] == "developer" else message["role"]
    return {**message, "role": role, "content": content or ""}
