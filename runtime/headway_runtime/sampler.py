"""The next token of each sequence, chosen from its logits.

Greedy is the plain argmax of the logits. Everything else is Gumbel-max: the token with the largest
logit / temperature + noise, where the noise of a token is a pure function of (seed, position, token). So one
seed gives the same tokens whatever else is in the batch, and after a preemption too.

- top-k keeps the k best tokens and every equal of the last of them; top-p then keeps, of what is left, the
  smallest set of best tokens whose probabilities sum to at least p, again with equals. Both are thresholds on
  the logit, so that ties do not hang on a sort's order.
- min_tokens forbids the stop tokens; log-probabilities are of the model's own distribution, before all that.
- A row whose logits are not finite gives no token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway_runtime.batch import Sample
from headway_runtime.request import SamplingParams, TokenLogprobs

# A filtered row is first looked at in so many best tokens, then in so many times more until they are enough.
NUM_CANDIDATES = 32
CANDIDATES_GROWTH = 16
# Noise for more tokens at once than this no longer fits a processor's cache.
CPU_TOKENS_AT_ONCE = 1 << 18
MASK_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler must know of one row. position: index of the token to be chosen in its sequence."""

    sampling: SamplingParams
    position: int
    num_generated: int

    @property
    def forbids_stop(self) -> bool:
        return self.num_generated < self.sampling.min_tokens and bool(self.sampling.stop_token_ids)


class Sampler:
    """Holds what only depends on the vocabulary."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._token_hashes = _mix(torch.arange(vocab_size, dtype=torch.int32, device=device).mul_(0x1E3779B1))
        self._rows_at_once = max(1, CPU_TOKENS_AT_ONCE // vocab_size) if device.type == "cpu" else None

    def __call__(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[Sample]:
        """logits: [rows, vocab_size] in the model's dtype."""
        with_logprobs = [index for index, row in enumerate(rows) if row.sampling.num_logprobs is not None]
        original = logits
        forbidding = [index for index, row in enumerate(rows) if row.forbids_stop]
        if forbidding:
            logits = logits.clone()
            for index in forbidding:
                stops = rows[index].sampling.stop_token_ids
                logits[index, [token for token in stops if token < self._vocab_size]] = -math.inf
        best, tokens = logits.max(dim=-1)
        drawn = [index for index, row in enumerate(rows) if row.sampling.temperature > 0]
        if drawn:
            tokens = tokens.clone()
            tokens[drawn] = self._draw(logits[drawn].float(), [rows[index] for index in drawn])
        token_ids = tokens.tolist()
        finite = [math.isfinite(one) for one in best.tolist()]
        logprobs: dict[int, TokenLogprobs] = {}
        if with_logprobs:
            top = [rows[index].sampling.num_logprobs or 0 for index in with_logprobs]
            found = _logprobs(original[with_logprobs], [token_ids[index] for index in with_logprobs], top)
            logprobs = dict(zip(with_logprobs, found, strict=True))
        return [
            Sample(token_id, logprobs.get(index)) if is_finite else Sample(None)
            for index, (token_id, is_finite) in enumerate(zip(token_ids, finite, strict=True))
        ]

    def _draw(self, logits: Tensor, rows: list[SamplingRow]) -> Tensor:
        """logits: float32 [rows, vocab_size], a copy. Returns token ids [rows]."""
        temperatures = torch.tensor([row.sampling.temperature for row in rows], device=self._device)
        scores = logits.div_(temperatures.unsqueeze(1))
        keys = torch.tensor(
            [_row_key(row.sampling.seed, row.position) for row in rows],
            dtype=torch.int32,
            device=self._device,
        ).unsqueeze(1)
        filtered = [i for i, row in enumerate(rows) if row.sampling.top_k > 0 or row.sampling.top_p < 1.0]
        if not filtered:
            return self._draw_from_all(scores, keys)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        params = [rows[index].sampling for index in filtered]
        tokens[filtered] = self._draw_filtered(scores[filtered], keys[filtered], params, NUM_CANDIDATES)
        plain = sorted(set(range(len(rows))).difference(filtered))
        if plain:
            tokens[plain] = self._draw_from_all(scores[plain], keys[plain])
        return tokens

    def _draw_from_all(self, scores: Tensor, keys: Tensor) -> Tensor:
        size = self._rows_at_once or len(keys)
        parts = [
            part.sub_(_log_exponentials(self._token_hashes ^ part_keys)).argmax(dim=-1)
            for part, part_keys in zip(torch.split(scores, size), torch.split(keys, size), strict=True)
        ]
        return torch.cat(parts)

    def _draw_filtered(
        self, scores: Tensor, keys: Tensor, params: list[SamplingParams], num_candidates: int
    ) -> Tensor:
        """Draw among the best tokens; rows that may want more than these draw again among more of them.

        What is drawn does not hang on num_candidates: a row is certain if all that it keeps is among them.
        """
        largest_k = max((one.top_k for one in params if one.top_k < self._vocab_size), default=0)
        count = min(max(num_candidates, largest_k + 1), self._vocab_size)
        best, candidates = scores.topk(count)
        thresholds, is_certain = _find_thresholds(scores, best, params)
        hashes = self._token_hashes.index_select(0, candidates.flatten()).view_as(candidates)
        noise = _log_exponentials(hashes ^ keys)
        chosen = best.masked_fill(best < thresholds, -math.inf).sub_(noise).argmax(dim=-1, keepdim=True)
        tokens = candidates.gather(1, chosen).squeeze(1)
        again = [index for index, certain in enumerate(is_certain.tolist()) if not certain]
        if again:
            wanting = [params[index] for index in again]
            more = count * CANDIDATES_GROWTH
            tokens[again] = self._draw_filtered(scores[again], keys[again], wanting, more)
        return tokens


def _find_thresholds(scores: Tensor, best: Tensor, params: list[SamplingParams]) -> tuple[Tensor, Tensor]:
    """The least score that each row keeps [rows, 1], and whether all that it keeps is surely among `best`.

    scores: [rows, vocab_size]; best: their best ones [rows, count], in descending order.
    """
    vocab_size, count = scores.shape[1], best.shape[1]
    top_k = [min(one.top_k, vocab_size) if one.top_k > 0 else vocab_size for one in params]
    last = torch.tensor(top_k, device=scores.device).clamp_(max=count).sub_(1).unsqueeze(1)
    by_rank = best.gather(1, last)
    # Mass is relative to what top-k leaves; without top-k that is everything.
    mass = (best - best[:, :1]).double().exp_().masked_fill_(best < by_rank, 0.0).cumsum(dim=-1)
    everything = (scores.logsumexp(dim=-1, keepdim=True) - best[:, :1]).double().exp_()
    is_unlimited = torch.tensor([one == vocab_size for one in top_k], device=scores.device).unsqueeze(1)
    top_p = torch.tensor([one.top_p for one in params], dtype=torch.float64, device=scores.device).unsqueeze(
        1
    )
    wanted = top_p * torch.where(is_unlimited, everything, mass[:, -1:])
    # The first place where the mass is reached; rounding may leave the very last one short.
    place = (mass < wanted).sum(dim=-1, keepdim=True).clamp_(max=count - 1)
    thresholds = torch.where(top_p >= 1.0, by_rank, torch.maximum(best.gather(1, place), by_rank))
    if count == vocab_size:
        return thresholds, torch.ones(len(params), dtype=torch.bool, device=scores.device)
    # Below the last candidate there may be equals of it; above it everything is seen.
    is_certain = (thresholds > best[:, -1:]) & (~is_unlimited | (mass[:, -1:] >= wanted))
    return thresholds, is_certain.squeeze(1)


def _log_exponentials(hashes: Tensor) -> Tensor:
    """Logarithms of exponentially distributed numbers, from 32-bit integers, which are overwritten.

    Minus them is Gumbel noise. Small uniform numbers, which become large noise, are the finely spaced ones.
    """
    uniform = (_mix(hashes) & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_()


def _logprobs(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1)).flatten().tolist()
    values, tokens = logprobs.topk(max(num_top), dim=-1)
    rows = zip(chosen, num_top, values.tolist(), tokens.tolist(), strict=True)
    return [
        TokenLogprobs(own, tuple(zip(row_tokens[:num], row_values[:num], strict=True)))
        for own, num, row_values, row_tokens in rows
    ]


def _row_key(seed: int, position: int) -> int:
    """32 well-mixed bits, as a signed integer, of a seed and a position (SplitMix64's finaliser)."""
    mixed = _split_mix((_split_mix(seed & MASK_64) + position) & MASK_64)
    return (mixed >> 32) - (1 << 31)


def _split_mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def _mix(values: Tensor) -> Tensor:
    """A 32-bit mixer of two multiplications, in place (the constants of Chris Wellons' lowbias32).

    Shifts of int32 copy the sign, so that the copied bits are masked away.
    """
    values ^= (values >> 16) & 0xFFFF
    values *= 0x7FEB352D
    values ^= (values >> 15) & 0x1FFFF
    values *= 0x846CA68B - (1 << 32)
    values ^= (values >> 16) & 0xFFFF
    return values
