"""Prompts as users of the in-process engine give them, to token ids: texts, token ids, chats.

Refuses by name what is none of these and what this model cannot read. Knows no sampling and no engine.
"""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from headway_runtime.answer_assembly import Prompt
from headway_runtime.chat import load_chat_template
from headway_runtime.errors import InvalidRequestError
from headway_runtime.sampling_params import is_text, wrong
from headway_runtime.tokenizer import Tokenizer

# The dict is vLLM's: {"prompt": text} or {"prompt_token_ids": token ids}.
PromptInput: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Messages: TypeAlias = Sequence[Mapping[str, Any]]


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
        self, messages: Messages | Sequence[Messages], *, add_generation_prompt: bool
    ) -> list[Prompt]:
        """One conversation, or a list of them."""
        _check_list(messages)
        is_one = not messages or isinstance(messages[0], Mapping)
        chats: Any = [messages] if is_one else messages
        return [self.encode_chat(one, add_generation_prompt=add_generation_prompt) for one in chats]

    def encode_chat(self, messages: Messages, *, add_generation_prompt: bool) -> Prompt:
        if self._chat_template is None:
            raise InvalidRequestError(
                "messages: this model has no chat template; use generate", param="messages"
            )
        _check_list(messages)
        if not messages:
            raise wrong("messages", messages, "is empty; give at least one message")
        text = self._chat_template.render(
            [_for_template(one) for one in messages], add_generation_prompt=add_generation_prompt
        )
        _check_text("messages", text)
        # The template writes the special tokens itself.
        token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        return self._checked(Prompt(uuid.uuid4().hex, text, token_ids))

    def _checked(self, prompt: Prompt) -> Prompt:
        token_ids = prompt.token_ids
        if not token_ids:
            raise InvalidRequestError("prompt is empty; give at least one token", param="prompt")
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise InvalidRequestError(
                f"prompt holds a token id outside [0, {self._vocab_size - 1}]; use this model's tokenizer",
                param="prompt",
            )
        return prompt


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
