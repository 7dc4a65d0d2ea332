"""What a model's generation_config.json says of sampling: the defaults of requests that leave a field out.

As vLLM does by default: `temperature`, `top_p`, `top_k`, `min_p`, `repetition_penalty` and `max_new_tokens`
are taken, and nothing else; `do_sample`, which makes transformers greedy, is passed over as it is there.
Knows no request, and not the ends of an answer, which `model_config` reads.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from headway_runtime.errors import ConfigError, InvalidRequestError
from headway_runtime.model_config_fields import read_object
from headway_runtime.sampling_params import INTEGERS, NUMBERS, SamplingParams, check_integer, check_number

FILE_NAME = "generation_config.json"
# Both of those but "auto" say that the file is not to be used; "vllm" is vLLM's word for it.
CHOICES = ("auto", "none", "vllm")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Of a request that leaves a field out. max_new_tokens: None is as many as fit.

    Whatever has a default of its own, as an answer's length has on /v1/completions, keeps that.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None

    def sampling_params(self) -> SamplingParams:
        """Parameters of prompts that come without any."""
        usual = SamplingParams()
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_tokens=usual.max_tokens if self.max_new_tokens is None else self.max_new_tokens,
        )

    @property
    def unusual(self) -> dict[str, object]:
        """Those that are others than without a file."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(NO_DEFAULTS, name)}


NO_DEFAULTS = GenerationDefaults()


def generation_defaults(folder: Path, choice: str) -> GenerationDefaults:
    """What `--generation-config=choice` makes of the model in `folder`. ConfigError for a value of no use."""
    path = folder / FILE_NAME
    if choice != "auto" or not path.is_file():
        return NO_DEFAULTS
    said = read_object(path)
    # A null counts as absent, as it does for transformers.
    taken = {one.name: said[one.name] for one in fields(GenerationDefaults) if said.get(one.name) is not None}
    try:
        for name, value in taken.items():
            if name in NUMBERS:
                check_number(name, value, *NUMBERS[name])
            else:
                check_integer(name, value, *INTEGERS["max_tokens" if name == "max_new_tokens" else name])
    except InvalidRequestError as error:
        raise ConfigError(
            f"{path}: {error}; correct the file, or do without it by --generation-config none"
        ) from error
    return GenerationDefaults(**taken)  # type: ignore[arg-type]  # just checked
