"""The fields that clients of OpenAI and vLLM know and this server does not serve, and what to do instead.

Such a field may be sent at a value that asks for nothing (`suffix: ""`), as clients send all they know; any
other value is a 400 that names the field and the way out.
"""

from collections.abc import Mapping

# Field -> the values that change nothing. None, "not given", is one everywhere.
NEUTRAL_FIELDS: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "ec_transfer_params": ({},),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True, False),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "max_repetition_pattern_size": (0,),
    "media_io_kwargs": ({},),
    "min_repetition_pattern_size": (0,),
    # Of prompts that are not text.
    "mm_payload": ("tensors", "none"),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_embeds": (),
    "reasoning_effort": ("none",),
    "repetition_detection": (
        False,
        {},
        {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0},
    ),
    "repetition_min_count": (0,),
    "return_mm_kwargs": (True, False),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "session_id": (),
    # Tokens are joined as the model's own tokenizer.json says, which knows no spaces between special ones.
    "spaces_between_special_tokens": (True, False),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}

# What to do instead, where there is something to do.
REFUSALS: Mapping[str, str] = {
    "best_of": "it belongs to /v1/completions; use n",
    "echo": "it belongs to /v1/completions",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "guided_choice": "use structured_outputs={'choice': ...}",
    "guided_decoding_backend": "use structured_outputs",
    "guided_grammar": "use structured_outputs={'grammar': ...}",
    "guided_json": "use structured_outputs={'json': ...}",
    "guided_regex": "use structured_outputs={'regex': ...}",
    "guided_whitespace_pattern": "use structured_outputs",
    "length_penalty": "there is no beam search here; use n or best_of",
    "logprob_token_ids": "use logprobs, in chats with top_logprobs",
    **dict.fromkeys(
        (
            "max_repetition_pattern_size",
            "min_repetition_pattern_size",
            "repetition_detection",
            "repetition_min_count",
        ),
        "use repetition_penalty or frequency_penalty",
    ),
    **dict.fromkeys(
        ("media_io_kwargs", "mm_payload", "mm_processor_kwargs"), "prompts are text; send messages of text"
    ),
    "max_completion_tokens": "it belongs to /v1/chat/completions; use max_tokens",
    "max_new_tokens": "use max_tokens",
    "max_output_tokens": "it belongs to /v1/responses; use max_tokens",
    "messages": "it belongs to /v1/chat/completions; use prompt",
    "parallel_tool_calls": "it belongs to /v1/chat/completions",
    "prompt": "it belongs to /v1/completions; use messages",
    "prompt_cache_options": "prefixes are cached without being asked; cache_salt keeps them apart",
    "prompt_embeds": "send the prompt as text or token ids",
    "reasoning_effort": "it belongs to /v1/chat/completions, whose templates read it",
    "return_prompt_text": "ask with return_token_ids, and send prompt_token_ids to /detokenize",
    "session_id": "name the request by the header X-Request-Id",
    "suffix": "put the text after the gap into the prompt, as the model was trained to read it",
    "thinking_token_budget": "use max_tokens",
    "tool_choice": "it belongs to /v1/chat/completions",
    "tools": "it belongs to /v1/chat/completions",
    "top_logprobs": "it belongs to /v1/chat/completions; use logprobs=N",
    "use_beam_search": "use n or best_of",
}
