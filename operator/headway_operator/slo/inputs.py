"""The numbers that a decision was taken from, as decisions are kept and shown with them."""

from headway_operator.slo.replicas import Recommendation
from headway_operator.slo.situation import Situation
from headway_operator.slo.sizing import Sizing


def inputs(situation: Situation, recommendation: Recommendation) -> dict[str, float]:
    """By name, rounded to what anybody reads."""
    load, counted, found = situation.load, situation.supply, situation.sizing
    numbers = {} if found is None else _learnt(situation, found)
    return {
        **numbers,
        "recommended_replicas": recommendation.replicas,
        "requests_per_second": round(situation.forecast.now, 3),
        "expected_per_second": round(situation.forecast.ahead, 3),
        "rate_persistence": round(situation.forecast.persistence, 3),
        "index_of_dispersion": round(situation.forecast.idc, 2),
        "index_of_groups": round(situation.memory.course.groups.index, 2),
        "lead_seconds": round(situation.lead_seconds, 1),
        "ready": counted.ready,
        "pending": counted.pending,
        "unsampled": counted.unsampled,
        "running": load.running,
        "waiting": load.waiting,
        "late": load.late,
        "oldest_waiting_seconds": round(load.oldest_waiting_seconds, 3),
        "kv_use": round(load.kv_use, 4),
        "queue_milliseconds": round(load.queue_milliseconds, 1),
        "prefill_milliseconds": round(load.prefill_milliseconds, 1),
    }


def _learnt(situation: Situation, found: Sizing) -> dict[str, float]:
    """The step model, a replica's capacity, and the corrections of both."""
    model, work, memory = found.replica.model, found.replica.workload, situation.memory
    return {
        "step_base_milliseconds": round(model.base, 4),
        "step_prefill_token_milliseconds": round(model.prefill, 6),
        "step_sequence_milliseconds": round(model.sequence, 6),
        "step_kv_token_milliseconds": round(model.kv, 9),
        "step_pace": round(found.pace.times, 3),
        "step_residual": round(memory.fit.residual, 4),
        "prompt_cost_per_request": round(work.prompt, 1),
        "generated_tokens_per_request": round(work.answer, 1),
        **({} if found.drift is None else {"usual_work": round(1.0 + found.drift, 3)}),
        "capacity_per_second": round(found.capacity.per_second, 4),
        "trusted_per_second": round(found.per_second, 4),
        "kappa": round(memory.kappa, 4),
        **({} if memory.patience <= 1.0 else {"regretted_rise": round(memory.regretted_rise, 3)}),
        "ttft_factor": round(memory.factors.ttft, 4),
        "tpot_factor": round(memory.factors.tpot, 4),
        "best_max_num_seqs": found.capacity.limits.max_num_seqs,
        "full_max_num_seqs": found.capacity.full_num_seqs,
        "best_max_num_batched_tokens": found.capacity.limits.max_num_batched_tokens,
    }
