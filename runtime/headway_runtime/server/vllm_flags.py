"""Flags of `vllm serve` that are no flags of this server: taken where they ask for what it does anyway, else
refused with what to use instead.

So that a command line written for vLLM either does here what it says, or says at once where it would not.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Anyway:
    """A flag that changes nothing. why: what the server does in any case. values: those that say so; none of
    a switch."""

    why: str
    values: tuple[str, ...] = ()


ANYWAY: Mapping[str, Anyway] = {
    "--convert": Anyway("models answer as they are", ("none", "auto")),
    "--data-parallel-size": Anyway("one process is one replica", ("1",)),
    "--disable-fastapi-docs": Anyway("there are no such pages"),
    "--disable-log-requests": Anyway("the log has no prompts and no parameters"),
    "--disable-log-stats": Anyway("numbers are on /metrics, not in the log"),
    "--enable-chunked-prefill": Anyway("prompts are computed in chunks"),
    "--enable-prompt-tokens-details": Anyway("usage tells cached tokens"),
    "--enable-request-id-headers": Anyway("every answer carries X-Request-Id"),
    "--model-impl": Anyway("there is one implementation of each model", ("auto",)),
    "--no-enable-log-requests": Anyway("the log has no prompts and no parameters"),
    "--no-trust-remote-code": Anyway("no code of a model is ever run"),
    "--pipeline-parallel-size": Anyway("there are no pipelines", ("1",)),
    "--runner": Anyway("the server generates", ("auto", "generate")),
    "--scheduling-policy": Anyway("priorities always count", ("priority",)),
    "--task": Anyway("the server generates", ("auto", "generate")),
    "--tokenizer-mode": Anyway("the model's own tokenizer.json is used", ("auto", "hf")),
}

_REPLICAS = "run one server for each replica, or let the operator do it (spec.replicas)"
_TEXT_ALONE = "this server's models read text; leave it out"
_LOG_LEVEL = "use --log-level"
_REVISION = "use --revision, which holds for all files of the model"
_OFFLOAD = "use --kv-offloading-size, which keeps KV blocks in host memory"
_GRAMMARS = "there is one library of grammars (llguidance); leave it out"
_SPECULATIVE = "use --speculative-config"

# What to use instead. Of a flag that is in both tables, this is about its other values.
REFUSED: Mapping[str, str] = {
    "--attention-backend": "there is one set of kernels for each device; leave it out",
    "--chat-template-content-format": "messages reach templates as text; leave it out",
    "--compilation-config": "use --enforce-eager or --cuda-graph-sizes",
    "--config-format": "models come in Hugging Face's layout; leave it out",
    "--cpu-offload-gb": "weights stay where they are computed with; use --quantization to make them smaller",
    "--cudagraph-capture-sizes": "use --cuda-graph-sizes 1,2,4",
    "--data-parallel-size": _REPLICAS,
    "--disable-custom-all-reduce": "ranks add up in one way alone; leave it out",
    "--disable-frontend-multiprocessing": "use --api-server-count 1, which is the default",
    "--disable-sliding-window": "windows are as the model has them; leave it out",
    "--disable-uvicorn-access-log": "use --log-level warning",
    "--distributed-executor-backend": "ranks are processes of this server; use --tensor-parallel-size",
    "--enable-expert-parallel": "use --tensor-parallel-size",
    "--enable-force-include-usage": "let clients send stream_options.include_usage",
    "--enable-log-requests": "prompts are never logged; leave it out",
    "--enable-sleep-mode": "the operator scales to zero (spec.scaling)",
    "--gpu-memory-utilization": "use --kv-cache-memory-bytes, such as 40G",
    "--guided-decoding-backend": _GRAMMARS,
    "--hf-config-path": "put config.json into the model's folder",
    "--hf-overrides": "change config.json in the model's folder",
    "--hf-token": "set $HF_TOKEN",
    "--kv-transfer-config": _OFFLOAD,
    "--limit-mm-per-prompt": _TEXT_ALONE,
    "--logits-processors": "use logit_bias, allowed_token_ids, bad_words or structured_outputs of requests",
    "--long-prefill-token-threshold": "use --long-prefill-share",
    "--max-cudagraph-capture-size": "use --cuda-graph-sizes 1,2,4",
    "--max-num-queued-reqs": "use --max-waiting",
    "--max-parallel-loading-workers": "weights are read in parallel anyway; leave it out",
    "--max-seq-len-to-capture": "use --cuda-graph-sizes 1,2,4",
    "--mm-processor-kwargs": _TEXT_ALONE,
    "--model": "write the model behind `headway serve`, without a flag",
    "--model-impl": "there is one implementation of each model; leave it out",
    "--no-enable-chunked-prefill": "prompts are computed in chunks; leave it out",
    "--num-gpu-blocks-override": "use --kv-cache-memory-bytes",
    "--optimization-level": "use --enforce-eager or --cuda-graph-sizes",
    "--otlp-headers": "set $OTEL_EXPORTER_OTLP_HEADERS",
    "--override-generation-config": "change generation_config.json in the model's folder",
    "--pipeline-parallel-size": "use --tensor-parallel-size, over several nodes too (--nnodes)",
    "--reasoning-parser": "what a model thinks is part of its content; leave it out",
    "--response-role": "answers are the assistant's; leave it out",
    "--root-path": "let the proxy in front take the prefix off",
    "--rope-scaling": "change config.json in the model's folder",
    "--rope-theta": "change config.json in the model's folder",
    "--runner": "this server generates text, and nothing else",
    "--scheduling-policy": "use --priority-ageing-seconds 0 --late-yield-seconds 0 for the order of arrival",
    "--shutdown-timeout": "use --drain-timeout-seconds",
    "--spec-method": _SPECULATIVE,
    "--spec-model": _SPECULATIVE,
    "--spec-tokens": _SPECULATIVE,
    "--stream-interval": "every token is sent as it is made; leave it out",
    "--structured-outputs-config": _GRAMMARS,
    "--swap-space": _OFFLOAD,
    "--task": "this server generates text, and nothing else",
    "--tokenizer": "put tokenizer.json into the model's folder",
    "--tokenizer-mode": "put tokenizer.json into the model's folder",
    "--tokenizer-revision": _REVISION,
    "--tool-parser-plugin": "use one of --tool-call-parser",
    "--code-revision": "no code of a model is ever run; leave it out",
    "--convert": "this server generates text, and nothing else",
    "--trust-remote-code": "no code of a model is ever run; leave it out",
    "--uvicorn-log-level": _LOG_LEVEL,
}


def add_vllm_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them. What is taken has no value of its own in the namespace."""
    for flag in sorted({*ANYWAY, *REFUSED}):
        parser.add_argument(
            flag,
            action=_Flag,
            nargs=0 if flag in ANYWAY and not ANYWAY[flag].values else "?",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )


class _Flag(argparse.Action):
    """Says of its flag that it changes nothing, or what to use instead."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        flag = self.option_strings[0]
        anyway = ANYWAY.get(flag)
        if anyway is not None and (not anyway.values or values in anyway.values):
            return
        given = flag if anyway is None or values is None else f"{flag}={values!r}"
        parser.error(f"{given} is vLLM's and not served here; {REFUSED[flag]}")
