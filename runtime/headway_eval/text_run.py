"""Scores both models on the same text, side by side: each chunk by one, then by the other, then compared.

Both are in memory at once; no logits are kept, which for one long text would be gigabytes.
"""

from collections.abc import Sequence

import torch

from headway_eval.divergence import PositionScores, compare
from headway_eval.errors import ComparisonError, InputFileError
from headway_eval.options import EvalOptions, TextOptions
from headway_eval.progress import Step, progress
from headway_eval.side import Side
from headway_eval.text_summary import TextSummary, summarize
from headway_eval.texts import Text
from headway_eval.windows import Window, windows
from headway_runtime.engine_config import resolve_engine_config
from headway_runtime.errors import InvalidRequestError
from headway_runtime.prompt_encoding import PromptEncoder, TemplateArguments
from headway_runtime.teacher_forcing import TeacherForcing


def encode_texts(side: Side, texts: Sequence[Text]) -> list[tuple[int, ...]]:
    """Token ids of each. InputFileError for what this model cannot read, or is too short to be scored."""
    encoder = PromptEncoder(side.folder, side.model.vocab_size)
    encoded = []
    for text in texts:
        try:
            if isinstance(text.content, str):
                token_ids = encoder.encode(text.content).token_ids
            else:
                token_ids = encoder.encode_chat(
                    text.content, TemplateArguments(add_generation_prompt=False)
                ).token_ids
        except InvalidRequestError as error:
            raise InputFileError(f"{text.place}: {error}") from error
        if len(token_ids) < 2:
            raise InputFileError(
                f"{text.place}: is {len(token_ids)} token, which nothing precedes; give longer text"
            )
        encoded.append(token_ids)
    return encoded


def score(options: EvalOptions, text: TextOptions, encoded: Sequence[Sequence[int]]) -> TextSummary:
    """Load both models and score all texts. ComparisonError if the baseline's logits are not finite."""
    model, baseline = (
        TeacherForcing(resolve_engine_config(side.options), text.chunk_tokens)
        for side in (options.model, options.baseline)
    )
    total = sum(len(token_ids) - 1 for token_ids in encoded)
    found = []
    with progress("text", total, "tokens") as step:
        for token_ids in encoded:
            for window in windows(len(token_ids), text.window_tokens, text.stride_tokens):
                found += _score_window(model, baseline, token_ids, window, step)
    for one in (model, baseline):
        one.close()
    summary = summarize(
        len(encoded),
        *(
            [value for one in found for value in getattr(one, name)]
            for name in ("model_loss", "baseline_loss", "divergence", "same_choice")
        ),
    )
    if not summary.baseline_perplexity < float("inf"):
        raise ComparisonError(
            f"--against={options.baseline.source!r}: its perplexity is {summary.baseline_perplexity!r}, so "
            "nothing can be held against it; check its weights, or give it another --baseline-dtype"
        )
    return summary


@torch.inference_mode()
def _score_window(
    model: TeacherForcing, baseline: TeacherForcing, token_ids: Sequence[int], window: Window, step: Step
) -> list[PositionScores]:
    own = token_ids[window.start : window.end]
    # Logits at a position are about the token after it.
    first, last = window.scored_from - 1 - window.start, len(own) - 1
    found = []
    start = 0
    for of_model, of_baseline in zip(model.logits(own), baseline.logits(own), strict=True):
        end = start + len(of_model)
        low, high = max(first, start), min(last, end)
        if low < high:
            rows = slice(low - start, high - start)
            following = torch.tensor(own[low + 1 : high + 1], device=of_model.device)
            found.append(compare(of_model[rows], of_baseline[rows].to(of_model.device), following))
            step(high - low)
        start = end
    return found
