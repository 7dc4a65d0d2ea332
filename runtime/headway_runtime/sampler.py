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

# Thresholds are first looked for among so many best tokens, and in a full sort only where these do not reach.
NUM_CANDIDATES = 1024
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
        if any(row.sampling.top_k > 0 or row.sampling.top_p < 1.0 for row in rows):
            thresholds = self._thresholds(scores, [row.sampling for row in rows])
            scores.masked_fill_(scores < thresholds.unsqueeze(1), -math.inf)
        keys = [_row_key(row.sampling.seed, row.position) for row in rows]
        return scores.sub_(self._log_exponentials(keys)).argmax(dim=-1)

    def _thresholds(self, scores: Tensor, params: list[SamplingParams]) -> Tensor:
        """The least score that each row keeps, [rows]."""
        top_k = torch.tensor(
            [min(one.top_k, self._vocab_size) if one.top_k > 0 else self._vocab_size for one in params],
            device=self._device,
        )
        top_p = torch.tensor([one.top_p for one in params], dtype=torch.float64, device=self._device)
        count = min(NUM_CANDIDATES, self._vocab_size)
        thresholds, found = _find_thresholds(scores, scores.topk(count).values, top_k, top_p)
        missing = (~found).nonzero().flatten()
        if len(missing) > 0:
            ordered = scores[missing].sort(dim=-1, descending=True).values
            thresholds[missing], _ = _find_thresholds(
                scores[missing], ordered, top_k[missing], top_p[missing]
            )
        return thresholds

    def _log_exponentials(self, keys: list[int]) -> Tensor:
        """Logarithms of exponentially distributed numbers, [rows, vocab_size]; minus them is Gumbel noise."""
        hashes = _mix(
            self._token_hashes ^ torch.tensor(keys, dtype=torch.int32, device=self._device).unsqueeze(1)
        )
        uniform = (hashes & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
        # Small numbers, which become large noise, are the finely spaced ones; 1 itself must not be reached.
        return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_().log_()


def _find_thresholds(scores: Tensor, ordered: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Thresholds [rows], and which rows' are certain, from each row's best scores in descending order."""
    count = ordered.shape[1]
    is_whole = count == scores.shape[1]
    by_rank = ordered.gather(1, (top_k.clamp(max=count) - 1).unsqueeze(1))
    # Mass relative to what top-k leaves; without top-k that is everything.
    weights = (ordered - ordered[:, :1]).double().exp_()
    kept = weights.masked_fill(ordered < by_rank, 0.0)
    unlimited = top_k >= scores.shape[1]
    everything = (scores - ordered[:, :1]).double().exp_().sum(dim=-1)
    total = torch.where(unlimited, everything, kept.sum(dim=-1))
    mass = kept.cumsum(dim=-1)
    wanted = (top_p * total).unsqueeze(1)
    # The first place where the mass is reached; rounding may leave the last one short.
    place = (mass < wanted).sum(dim=-1).clamp_(max=count - 1)
    by_mass = ordered.gather(1, place.unsqueeze(1))
    keeps_all = top_p >= 1.0
    threshold = torch.where(keeps_all, by_rank.squeeze(1), torch.maximum(by_mass, by_rank).squeeze(1))
    threshold = torch.where(keeps_all & unlimited, -math.inf, threshold)
    if is_whole:
        return threshold, torch.ones_like(unlimited)
    # Certain are ranks inside the list whose equals all are inside, and masses reached inside it.
    rank_inside = (top_k < count) & (by_rank.squeeze(1) > ordered[:, -1])
    mass_inside = unlimited & (mass[:, -1] >= wanted.squeeze(1))
    return threshold, (unlimited & keeps_all) | rank_inside | mass_inside


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
