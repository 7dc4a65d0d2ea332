"""What a replica's context makes of a load: requests that its server refuses, answers that it cuts short.

As the server has it: prompt and answer share the context. A prompt that leaves no room for a token of an
answer is answered 400; an answer gets what room there is. The refused never reach an engine, so they are
taken out of the load before it is simulated, and put into the run afterwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway_simulator.errors import OptionsError
from headway_simulator.records import Flight, Run
from headway_simulator.trace import Arrival, Trace


@dataclass(frozen=True, slots=True)
class Fitted:
    """trace: what engines get. refused: requests whose prompts are too long. num_cut: answers cut short.

    max_model_len: of the context; None where nothing says it, and everything fits.
    """

    trace: Trace
    max_model_len: int | None
    refused: tuple[Arrival, ...] = ()
    num_cut: int = 0

    def __str__(self) -> str:
        """One line on what does not fit; "" where all of it does."""
        told = []
        if self.refused:
            told.append(
                f"{len(self.refused)} requests rejected, and missed: their prompts leave no room for answers"
            )
        if self.num_cut:
            told.append(f"{self.num_cut} answers cut short")
        return f"context of {self.max_model_len} tokens: {'; '.join(told)}" if told else ""


def fitted(trace: Trace, max_model_len: int | None) -> Fitted:
    """The load as a context of so many tokens lets it in. Raises OptionsError where nothing is left of it."""
    if max_model_len is None:
        return Fitted(trace, None)
    refused, served, num_cut = [], [], 0
    for one in trace.arrivals:
        room = max_model_len - one.prompt_tokens
        if room < 1:
            refused.append(one)
            continue
        num_cut += one.output_tokens > room
        served.append(replace(one, output_tokens=min(one.output_tokens, room)))
    if not served:
        least = 1 + min(one.prompt_tokens for one in refused)
        raise OptionsError(
            f"a context of {max_model_len} tokens has room for none of the {len(refused)} prompts; raise "
            f"model.maxModelLen, or --max-model-len, to {least} or more"
        )
    return Fitted(replace(trace, arrivals=tuple(served)), max_model_len, tuple(refused), num_cut)


def with_refused(run: Run, refused: Sequence[Arrival]) -> Run:
    """The run with those that were answered 400, which are misses as any rejected ones are."""
    flights = [Flight(one, run.starts_at + one.at_seconds, fate="rejected") for one in refused]
    return replace(run, flights=sorted([*run.flights, *flights], key=lambda one: one.arrived_at))
