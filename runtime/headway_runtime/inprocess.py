"""The engine in the user's own process, without a server: `Engine(model).generate(prompts)`.

    with Engine("bundled://headway-tiny", max_model_len=512) as engine:
        for output in engine.generate(["Once", "Twice"], SamplingParams(max_tokens=8)):
            print(output.text)

The core steps on a thread of its own; tokenizing, stop strings and text happen on the caller's. An engine may
be used from any number of threads and event loops at once: their requests share its steps. Imports neither a
web framework nor sockets; the server and this are two users of the same core.
"""

import asyncio
import contextlib
import logging
import queue
import secrets
import time
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from headway_runtime.adapters.inprocess_adapters import InprocessAdapters, LoraRequests
from headway_runtime.adapters.lora_request import LoRARequest
from headway_runtime.answer_assembly import Assembly, Prompt
from headway_runtime.call_arguments import check_call, params_of_each
from headway_runtime.engine_keywords import EngineKeywords
from headway_runtime.engine_options import keyword_options
from headway_runtime.engine_thread import EngineThread, Event
from headway_runtime.errors import ConfigError, ContextLengthError, InvalidRequestError
from headway_runtime.generation_output import GenerationOutput
from headway_runtime.metrics import EngineMetrics, MetricsSnapshot
from headway_runtime.model_config import read_model_config
from headway_runtime.parallel.agreement import agreed_words
from headway_runtime.parallel.started import StartedRanks, start_ranks
from headway_runtime.parallel.watch import RankWatch
from headway_runtime.progress_bar import progress_bar
from headway_runtime.prompt_encoding import (
    Messages,
    PromptEncoder,
    PromptInput,
    TemplateArguments,
    truncated,
)
from headway_runtime.request import Request, engine_priority
from headway_runtime.sampling_params import SamplingParams
from headway_runtime.seeds import choice_seed
from headway_runtime.sources import resolve
from headway_runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Engine:
    """A model, loaded and ready. Close it, or use it as a context manager; else it ends with the process.

    model: bundled://NAME, a folder or file:///FOLDER, or a remote one, which is fetched:
    hf://ORG/NAME[@REVISION], s3://BUCKET/PREFIX, oci://REGISTRY/REPOSITORY[:TAG|@DIGEST]. Raises ConfigError,
    ModelFetchError and ModelLoadError while starting.
    """

    def __init__(self, model: str, **options: Unpack[EngineKeywords]) -> None:
        folder = resolve(model, revision=options.get("revision"), download_dir=options.get("download_dir"))
        engine_options = keyword_options(folder, options)
        if engine_options.parallel.node_rank > 0:
            raise ConfigError(
                f"node_rank={engine_options.parallel.node_rank!r}: an Engine in a process is node 0's; run "
                "`headway serve --node-rank` on the other nodes"
            )
        self._default_params = engine_options.defaults.sampling_params()
        self._vocab_size = read_model_config(folder).vocab_size
        self._max_logprobs = engine_options.max_logprobs
        self._encoder = PromptEncoder(folder, self._vocab_size)
        started: StartedRanks | None = None
        if engine_options.parallel.size > 1:
            words = agreed_words(engine_options)
            started = start_ranks(engine_options.parallel, engine_options.num_threads, words)
        entered_at = time.monotonic()
        # Only now, as torch takes seconds: neither an import nor a mistake in the options waits for it.
        from headway_runtime.engine import EngineCore
        from headway_runtime.engine_config import resolve_engine_config

        metrics = EngineMetrics(engine_options.targets)
        began_at = time.monotonic()
        try:
            core = EngineCore(resolve_engine_config(engine_options), metrics, started=started)
        except BaseException:
            if started is not None:
                started.close()
            raise
        metrics.model_loaded(time.monotonic() - began_at)
        core.start.add("imports", began_at - entered_at)
        metrics.started(core.start.seconds)
        logger.info("%s", core.start.told())
        self._max_tokens_in_all = min(core.max_model_len, core.num_kv_tokens)
        self._thread = EngineThread(core, metrics)
        self._adapters = InprocessAdapters(self._thread, options.get("download_dir"))
        if started is not None:
            _end_with_ranks(self._thread, started.watch)
        # Also when the process ends, before the interpreter takes the thread's ground away.
        self._close = weakref.finalize(self, self._thread.close)

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self._max_tokens_in_all

    @property
    def tokenizer(self) -> Tokenizer:
        return self._encoder.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Those of calls that give none: what the model's generation_config.json says, and the usual ones."""
        return self._default_params

    def metrics(self) -> MetricsSnapshot:
        """Everything counted so far: the numbers of a server's /metrics page."""
        return self._thread.snapshot()

    def load_adapter(self, name: str, source: str, *, in_place: bool = False) -> None:
        """Load a LoRA adapter while requests go on; in_place: one of that name gives way to it."""
        self._adapters.load(name, source, in_place=in_place)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter: requests that have it go on, new ones find it no more."""
        self._adapters.unload(name)

    def list_adapters(self) -> list[str]:
        """Names of the LoRA adapters that are loaded."""
        return [one.name for one in self._adapters.entries()]

    def close(self) -> None:
        """End the engine; what still runs gets EngineDeadError. Again does nothing."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        lora_request: LoraRequests = None,
    ) -> list[GenerationOutput]:
        """Answer all prompts; one output per prompt, in their order.

        prompts: a text, token ids, or a list of either. sampling_params: for all of them, or one each;
        without, the model's own defaults. use_tqdm: show a progress bar. priority: the lower is served first;
        from -100 to 100. cache_salt: prompts share what was computed for the same beginning only with others
        of the same salt. lora_request: the adapter to answer with, for all or one each, which is loaded when
        first asked for (ConfigError, ModelFetchError, ModelLoadError or AdapterRefusedError if it cannot be).
        InvalidRequestError (ContextLengthError) before anything runs if one of them cannot be answered. An
        answer that fails by the engine's fault has the finish reason "error".
        """
        check_call(priority, cache_salt)
        encoded = self._encoder.encode_all(prompts)
        names = self._adapters.names_of(lora_request, len(encoded))
        return self._run(encoded, sampling_params, priority, cache_salt, names, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int = 0,
        cache_salt: str = "",
        lora_request: LoraRequests = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[GenerationOutput]:
        """The same for chats: one conversation, or a list of them.

        The keywords from `add_generation_prompt` on say how the template makes a prompt of it; see
        `prompt_encoding.TemplateArguments`.
        """
        check_call(priority, cache_salt)
        arguments = TemplateArguments(
            add_generation_prompt, continue_final_message, tools, chat_template, chat_template_kwargs
        )
        encoded = self._encoder.encode_chats(messages, arguments)
        names = self._adapters.names_of(lora_request, len(encoded))
        return self._run(encoded, sampling_params, priority, cache_salt, names, use_tqdm=use_tqdm)

    async def generate_async(
        self,
        prompt: PromptInput,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """Answer one prompt, and give what there is each time more has come; the last output is finished.

        Leaving the loop early gives the rest up at once.
        """
        check_call(priority, cache_salt)
        encoded = await asyncio.to_thread(self._encoder.encode, prompt)
        (name,) = await asyncio.to_thread(self._adapters.names_of, lora_request, 1)
        async for output in self._stream(encoded, sampling_params, priority, cache_salt, name):
            yield output

    async def chat_async(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        lora_request: LoRARequest | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[GenerationOutput, None]:
        """The same for one chat."""
        check_call(priority, cache_salt)
        arguments = TemplateArguments(
            add_generation_prompt, continue_final_message, tools, chat_template, chat_template_kwargs
        )
        encoded = await asyncio.to_thread(self._encoder.encode_chat, messages, arguments)
        (name,) = await asyncio.to_thread(self._adapters.names_of, lora_request, 1)
        async for output in self._stream(encoded, sampling_params, priority, cache_salt, name):
            yield output

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int,
        cache_salt: str,
        adapters: list[str],
        *,
        use_tqdm: bool,
    ) -> list[GenerationOutput]:
        events: queue.SimpleQueue[tuple[str, Event]] = queue.SimpleQueue()
        received_at = time.monotonic()
        params = params_of_each(sampling_params, len(prompts), self._default_params)
        assemblies = [
            self._assembly(prompt, one, priority, cache_salt, adapter, received_at)
            for prompt, one, adapter in zip(prompts, params, adapters, strict=True)
        ]
        by_request = {one.request_id: assembly for assembly in assemblies for one in assembly.requests}
        with progress_bar(len(prompts), is_shown=use_tqdm) as progress:
            try:
                for assembly in assemblies:
                    self._thread.submit(assembly.requests, lambda *event: events.put(event))
                remaining = set(assemblies)
                while remaining:
                    request_id, event = events.get()
                    assembly = by_request[request_id]
                    if self._feed(assembly, request_id, event) and assembly in remaining:
                        remaining.remove(assembly)
                        progress.update(1)
            except BaseException:
                # Whatever it was, an interrupt included: nobody waits for the rest.
                self._thread.abort(list(by_request))
                raise
        return [one.output() for one in assemblies]

    async def _stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        priority: int,
        cache_salt: str,
        adapter: str,
    ) -> AsyncGenerator[GenerationOutput, None]:
        (params,) = params_of_each(sampling_params, 1, self._default_params)
        assembly = self._assembly(prompt, params, priority, cache_salt, adapter, time.monotonic())
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[str, Event]] = asyncio.Queue()

        def sink(request_id: str, event: Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is left to hear it
                loop.call_soon_threadsafe(events.put_nowait, (request_id, event))

        try:
            self._thread.submit(assembly.requests, sink)
            while not assembly.finished:
                self._feed(assembly, *await events.get())
                while not events.empty():
                    # What came together is given together.
                    self._feed(assembly, *events.get_nowait())
                yield assembly.output()
        except BaseException:
            # Also when the caller leaves the loop, or its task is cancelled; what has ended stays as it is.
            self._thread.abort([one.request_id for one in assembly.requests])
            raise

    def _feed(self, assembly: Assembly, request_id: str, event: Event) -> bool:
        """Whether its prompt has all its answers now."""
        complete = assembly.feed(request_id, event)
        if complete is not None:
            self._thread.finish(complete)
        return assembly.finished

    def _assembly(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int,
        cache_salt: str,
        adapter: str,
        received_at: float,
    ) -> Assembly:
        most = self._max_tokens_in_all
        prompt = truncated(prompt, params.truncate_prompt_tokens, most, params.max_tokens)
        room = most - len(prompt.token_ids)
        if room < 1:
            raise ContextLengthError(
                f"prompt has {len(prompt.token_ids)} tokens, but prompt and answer together may have "
                f"{self._max_tokens_in_all}; shorten it",
                param="prompt",
            )
        sampling = params.for_engine(
            vocab_size=self._vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            room=room,
            encode=partial(self.tokenizer.encode, add_special_tokens=False),
            max_logprobs=self._max_logprobs,
        )
        if sampling.min_tokens < params.min_tokens:
            raise InvalidRequestError(
                f"min_tokens={params.min_tokens} is more than the answer may have ({room}); lower it",
                param="min_tokens",
            )
        seed = secrets.randbits(62) if params.seed is None else params.seed
        requests = []
        for choice in range(params.n):
            own = replace(sampling, seed=choice_seed(seed, choice))
            if choice:
                # One answer's prompt is like another's.
                own = replace(own, num_prompt_logprobs=None)
            requests.append(
                Request(
                    f"{prompt.request_id}-{choice}",
                    prompt.token_ids,
                    own,
                    received_at,
                    engine_priority(priority),
                    cache_salt,
                    adapter,
                )
            )
        return Assembly(prompt, requests, params, self.tokenizer.vocabulary, received_at)


def _end_with_ranks(thread: EngineThread, watch: RankWatch) -> None:
    """A thread that waits for requests must hear of it, too."""

    def fail(message: str, status: int) -> None:
        thread.fail(message)

    watch.on_failure = fail
    if watch.failure is not None:
        fail(watch.failure, watch.failure_status)
