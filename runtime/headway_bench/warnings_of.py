"""What a reader of a point should not overlook; each warning says what to do."""

from headway_bench.summary import Summary

MOST_LAG_MILLISECONDS = 10.0
MOST_LAG_SHARE_OF_TTFT = 0.1
MOST_CPU_SHARE = 0.85


def warnings_of(summary: Summary) -> list[str]:
    """Sentences, most serious first; none when all is well."""
    return [
        *_of_the_client(summary),
        *_of_the_answers(summary),
    ]


def _of_the_client(summary: Summary) -> list[str]:
    found = []
    lag, ttft = summary.client.lag_milliseconds, summary.latency_milliseconds["ttft"]
    if lag is not None:
        late = lag.percentiles[99].value
        allowed = MOST_LAG_MILLISECONDS
        if ttft is not None:
            allowed = max(allowed, MOST_LAG_SHARE_OF_TTFT * ttft.percentiles[50].value)
        if late > allowed:
            found.append(
                f"this client sent late (P99 {late:.1f} ms): it, not the server alone, is what was measured; "
                "lower the rate, or run it on a machine of its own"
            )
    share = summary.client.cpu_share_of_one_core
    if share > MOST_CPU_SHARE:
        found.append(
            f"this client used {100 * share:.0f}% of a core: its times may hold its own work; "
            "split the load over several processes"
        )
    return found


def _of_the_answers(summary: Summary) -> list[str]:
    found = []
    tokens = summary.tokens
    if tokens is not None:
        if tokens.input_as_wanted is not None and tokens.input_as_wanted.value < 1:
            found.append(
                f"{100 * (1 - tokens.input_as_wanted.value):.0f}% of the prompts were not as long as asked, "
                "by the server's count; give the model's own --tokenizer"
            )
        if tokens.output_as_wanted.value < 1:
            found.append(
                f"{100 * (1 - tokens.output_as_wanted.value):.0f}% of the answers were not as long as asked; "
                "--ignore-eos keeps them from ending early"
            )
        confirmed = tokens.one_token_an_event
        if confirmed is not None and confirmed.value < 1:
            found.append(
                "events held several tokens or none, and did not tell how many: ITL is between events; "
                "--tokenizer counts them"
            )
    if summary.num_without_content:
        found.append(f"{summary.num_without_content} answers had no content; --ignore-eos forbids that")
    return found
