"""transformers in a process of its own environment: `generate` on a padded batch, and continuous batching.

    python transformers_peer.py generate|continuous MODEL_FOLDER

Reads one job per line, {"prompts": [[ids], ...], "max_tokens": n}, and answers each with one line of
{"seconds": s, "ttft_seconds": [s, ...], "num_tokens": n}; the time to the first token is known for a batch of
one only. Imports nothing of this repository.
"""

import json
import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

# Seconds in all, seconds to first tokens, number of new tokens.
Timed = tuple[float, list[float], int]


class FirstToken:
    """A streamer that only notes when the first new token comes."""

    def __init__(self) -> None:
        self.calls = 0
        self.first_at = 0.0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call brings the prompt
            self.first_at = time.perf_counter()

    def end(self) -> None:
        """Nothing is held back."""


def generate(model: Any, prompts: list[list[int]], max_tokens: int) -> Timed:
    """Greedy, all prompts as one batch; a streamer works for a batch of one only."""
    streamer = FirstToken() if len(prompts) == 1 else None
    ids = torch.tensor(prompts)
    started_at = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=streamer,
        )
    seconds = time.perf_counter() - started_at
    first = [streamer.first_at - started_at] if streamer else []
    return seconds, first, output.numel() - ids.numel()


def continuous(model: Any, prompts: list[list[int]], max_tokens: int) -> Timed:
    """Greedy through the continuous batching manager; no end token, so that every answer is as long."""
    config: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    started_at = time.perf_counter()
    answers = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
    seconds = time.perf_counter() - started_at
    return seconds, [], sum(len(answer.generated_tokens) for answer in answers.values())


def main() -> None:
    mode, folder = sys.argv[1:]
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    model.eval()
    run = {"generate": generate, "continuous": continuous}[mode]
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        seconds, first, num_tokens = run(model, job["prompts"], job["max_tokens"])
        print(json.dumps({"seconds": seconds, "ttft_seconds": first, "num_tokens": num_tokens}), flush=True)


if __name__ == "__main__":
    main()
