"""Greedy answers through transformers, and the agreement of a draft with its target.

transformers runs the exported bfloat16 weights, so that what is judged is what is committed, by code
that is not ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bundled_model.corpus import Task, is_right

NUM_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Judged:
    """A model directory as transformers loads it."""

    model: Any
    tokenizer: Any


@dataclass(frozen=True, slots=True)
class Answer:
    """The token ids of a prompt and of the greedy answer, end token included where there was one."""

    prompt_ids: list[int]
    answer_ids: list[int]
    text: str


def load_judged(directory: Path) -> Judged:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    return Judged(model.eval(), tokenizer)


def prompt_of(judged: Judged, task: Task) -> str:
    """The text that the model continues."""
    if task.prompt_text is not None:
        return task.prompt_text
    text = judged.tokenizer.apply_chat_template(
        task.prompt_messages, tokenize=False, add_generation_prompt=True
    )
    return str(text)


def greedy_answers(judged: Judged, tasks: Sequence[Task], max_new_tokens: int | None = None) -> list[Answer]:
    """One greedy answer per task; by default as long as the right one and a little more."""
    answers: list[Answer] = []
    for first in range(0, len(tasks), NUM_TOGETHER):
        group = tasks[first : first + NUM_TOGETHER]
        prompts = [prompt_of(judged, task) for task in group]
        inputs = judged.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        limit = max_new_tokens or 8 + max(len(judged.tokenizer(task.answer).input_ids) for task in group)
        with torch.inference_mode():
            outputs = judged.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=limit,
                do_sample=False,
            )
        width = inputs["input_ids"].shape[1]
        for row in range(len(group)):
            prompt_ids = inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist()
            answer_ids = up_to_end(outputs[row, width:].tolist(), judged.model.generation_config.eos_token_id)
            text = judged.tokenizer.decode(answer_ids, skip_special_tokens=True)
            answers.append(Answer(prompt_ids, answer_ids, text))
    return answers


def up_to_end(token_ids: list[int], end_ids: list[int]) -> list[int]:
    """The ids up to and with the first end token."""
    ends = [position for position, token_id in enumerate(token_ids) if token_id in end_ids]
    return token_ids[: ends[0] + 1] if ends else token_ids


def accuracy(tasks: Sequence[Task], answers: Sequence[Answer]) -> float:
    right = [is_right(task, answer.text) for task, answer in zip(tasks, answers, strict=True)]
    return sum(right) / len(right)


def agreement(draft: Judged, answers: Sequence[Answer]) -> tuple[int, int]:
    """(same, all): how many of the target's answer tokens the draft would have chosen at the same place."""
    num_same = num_tokens = 0
    for answer in answers:
        token_ids = torch.tensor([answer.prompt_ids + answer.answer_ids])
        with torch.inference_mode():
            choices = draft.model(token_ids).logits[0].argmax(-1)
        start = len(answer.prompt_ids)
        same = choices[start - 1 : -1] == token_ids[0, start:]
        num_same += int(same.sum())
        num_tokens += same.numel()
    return num_same, num_tokens
