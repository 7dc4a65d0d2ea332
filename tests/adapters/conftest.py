"""Small random checkpoints, adapters for them as PEFT saves them, the same merged, and engines over them."""

import copy
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import jwt
import openai
import peft
import pytest
import torch
import transformers
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from transformers.utils import logging as transformers_logging

from headway_runtime.config import EngineConfig, Envelope, Limits, LoraConfig, LoraModule
from headway_runtime.engine import EngineCore
from headway_runtime.metrics import EngineMetrics
from headway_runtime.request import Request, RequestOutput, SamplingParams
from headway_runtime.sources import BUNDLED_FOLDER

VOCAB_SIZE = 320
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama, biases, untied": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral, windows": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 24, "head_dim": 16, "sliding_window": 24}),
    "gemma3": ("Gemma3Text", {"query_pre_attn_scalar": 24, "head_dim": 16, "sliding_window": 24}),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": False},
    ),
    # Sizes that no vector divides: PyTorch's operators do the work.
    "llama, odd sizes": (
        "Llama",
        {"hidden_size": 60, "head_dim": 10, "intermediate_size": 90, "num_key_value_heads": 1},
    ),
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
# What makes an adapter's answers clearly differ from the model's.
DEVIATION = 0.15


@dataclass
class Checkpoint:
    """A folder in Hugging Face's layout, the model in transformers, and adapters by name."""

    folder: Path
    model: Any
    adapters: dict[str, Path] = field(default_factory=dict)
    merged: dict[str, Any] = field(default_factory=dict)

    def make_adapter(
        self, name: str, folder: Path, *, seed: int = 0, deviation: float = DEVIATION, **fields: Any
    ) -> Path:
        """An adapter with random weights, saved by PEFT; and, for `greedy`, the model merged with it."""
        own: dict[str, Any] = {
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ALL,
            "task_type": "CAUSAL_LM",
        } | fields
        if "Mixtral" in type(self.model).__name__ and own["target_modules"] is ALL:
            own["target_modules"] = ATTENTION
        torch.manual_seed(1000 + seed)
        with warnings.catch_warnings():
            # PEFT asks transformers for what that has renamed.
            warnings.simplefilter("ignore", FutureWarning)
            wrapped: Any = peft.get_peft_model(copy.deepcopy(self.model), peft.LoraConfig(**own))
        with torch.no_grad():
            for key, parameter in wrapped.named_parameters():
                if ".lora_" in key:
                    parameter.normal_(0.0, deviation)
        # Not "auto", which would ask the network for the base model.
        wrapped.save_pretrained(folder / name, save_embedding_layers=False)
        self.adapters[name] = folder / name
        self.merged[name] = wrapped.merge_and_unload().eval()
        return folder / name

    def greedy(self, adapter: str, prompt: list[int], count: int) -> list[int]:
        """The tokens that transformers generates with the merged weights; "" is the model itself."""
        model = self.merged[adapter] if adapter else self.model
        token_ids = torch.tensor([prompt])
        generated = model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = generated[0, len(prompt) :].tolist()
        return tokens


def randomize(model: Any) -> None:
    """Give all that starts as zeros or ones something to tell it by."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif "norm" in name and name.endswith("weight"):
                middle = 0.0 if "Gemma" in type(model).__name__ else 1.0
                parameter.uniform_(middle - 0.5, middle + 0.5)
            elif name.endswith("gate.weight"):
                parameter.normal_(0.0, 0.2)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Checkpoint]:
    """checkpoint(shape): one of SHAPES, in float32, with adapters "one" and "two"; made once per session."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    made: dict[str, Checkpoint] = {}

    def make(shape: str = "llama") -> Checkpoint:
        if shape not in made:
            torch.manual_seed(sorted(SHAPES).index(shape))
            name, own = SHAPES[shape]
            config: Any = getattr(transformers, f"{name}Config")(**(BASE | own))
            model: Any = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
            randomize(model)
            folder = tmp_path_factory.mktemp("checkpoint")
            model.save_pretrained(folder)
            made[shape] = Checkpoint(folder, model)
            adapters = tmp_path_factory.mktemp("adapters")
            made[shape].make_adapter("one", adapters, seed=1)
            made[shape].make_adapter(
                "two",
                adapters,
                seed=2,
                r=5,
                lora_alpha=7,
                use_rslora=True,
                target_modules=["q_proj", "v_proj"],
            )
        return made[shape]

    return make


class EngineDriver:
    """An engine, stepped to the end of its work with all invariants checked after every step."""

    def __init__(self, config: EngineConfig) -> None:
        self.metrics = EngineMetrics()
        self.engine = EngineCore(config, self.metrics)
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.max_adapters_in_a_step = 0

    def add(self, request_id: str, prompt: Iterable[int], adapter: str = "", **sampling: Any) -> None:
        now = time.monotonic()
        own = SamplingParams(**({"temperature": 0.0} | sampling))
        self.engine.add_request(Request(request_id, tuple(prompt), own, now, adapter=adapter), now)
        self.outputs[request_id] = []

    def step(self) -> None:
        outputs = self.engine.step(time.monotonic()).outputs
        self.engine.check_integrity()
        if self.engine.adapters is not None:
            assert all(one.error is None for one in self.engine.adapters.poll())
        self.max_adapters_in_a_step = max(
            self.max_adapters_in_a_step, len(self.engine.adapter_snapshot().running)
        )
        for one in outputs:
            self.outputs[one.request_id].append(one)

    def run(self, max_steps: int = 10000) -> None:
        while self.engine.has_work:
            assert max_steps > 0, "not finished in time"
            max_steps -= 1
            self.step()

    def load(self, name: str, folder: Path, **options: Any) -> None:
        """Load an adapter while the engine steps."""
        assert self.engine.adapters is not None
        self.engine.adapters.begin(LoraModule(name, str(folder), str(folder)), token=name, **options)
        while self.engine.adapters.is_loading:
            self.step()

    def tokens(self, request_id: str) -> list[int]:
        return [token for one in self.outputs[request_id] for token in one.token_ids]

    def counter(self, name: str) -> int:
        return self.metrics.snapshot().counters[name]


StartEngine = Callable[..., EngineDriver]


@pytest.fixture(scope="session")
def start_engine() -> StartEngine:
    """start_engine(folder, adapters by name, lora=changes, **changes of the config): a small engine."""

    def start(
        folder: Path, adapters: Mapping[str, Path] = {}, lora: Mapping[str, Any] | None = {}, **changes: Any
    ) -> EngineDriver:
        modules = tuple(LoraModule(name, str(path), str(path)) for name, path in adapters.items())
        config = EngineConfig(
            model_path=str(folder),
            device="cpu",
            dtype="auto",
            load_format="auto",
            max_model_len=256,
            block_size=16,
            kv_cache_memory_bytes=64 * 2**20,
            envelope=Envelope(16, 256),
            limits=Limits(16, 256),
            max_waiting=100,
            num_threads=1,
            lora=None if lora is None else replace(LoraConfig(8, 8, 64, modules), **lora),
        )
        return EngineDriver(replace(config, **changes))

    return start


@pytest.fixture(scope="session")
def random_prompts() -> Callable[..., list[list[int]]]:
    """random_prompts(seed, lengths): token ids."""

    def make(seed: int, lengths: Iterable[int]) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]

    return make


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """edit_config(folder, **fields): change an adapter's adapter_config.json."""

    def edit(folder: Path, **fields: Any) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test of `any_shape` is run for each of SHAPES."""
    if "any_shape" in metafunc.fixturenames:
        metafunc.parametrize("any_shape", SHAPES)


AUDIENCE = "default/demo"
START_TIMEOUT_SECONDS = 90.0


@dataclass
class Server:
    """A `headway serve` process of the bundled model, which is ready."""

    process: subprocess.Popen[bytes]
    url: str
    operator_key: Ed25519PrivateKey

    @property
    def operator(self) -> dict[str, str]:
        """Headers of the operator's requests."""
        now = int(time.time())
        claims = {"iss": "headway-operator", "aud": AUDIENCE, "iat": now, "exp": now + 60}
        return {"Authorization": f"Bearer {jwt.encode(claims, self.operator_key, algorithm='EdDSA')}"}

    def load(self, name: str, path: object, **more: Any) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(path)} | more
        return httpx.post(f"{self.url}/v1/load_lora_adapter", json=body, headers=self.operator, timeout=60)

    def unload(self, name: str) -> httpx.Response:
        body = {"lora_name": name}
        return httpx.post(f"{self.url}/v1/unload_lora_adapter", json=body, headers=self.operator, timeout=60)

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """With a connection of its own, to whichever process the kernel gives it."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60)

    def metrics(self) -> dict[str, float]:
        """Each line of /metrics by its name and labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines()
        rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}


StartServer = Callable[..., Server]


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """start_server(*arguments, environment=...): the bundled model in float32; ends with the module."""
    folder = tmp_path_factory.mktemp("servers")
    started: list[subprocess.Popen[bytes]] = []
    key = Ed25519PrivateKey.generate()
    public_key = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "public.pem").write_bytes(public_key)

    def start(*arguments: str, environment: Mapping[str, str] = {}) -> Server:
        number = len(started)
        log_path, port_file = folder / f"server-{number}.log", folder / f"port-{number}"
        command = [
            sys.executable,
            "-m",
            "headway",
            "serve",
            "bundled://headway-tiny",
            "--served-model-name=tiny",
        ]
        command += ["--dtype=float32", "--device=cpu", "--num-threads=1", "--max-model-len=512", "--port=0"]
        command += [f"--admin-public-key-file={folder / 'public.pem'}", f"--admin-audience={AUDIENCE}"]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*command, f"--port-file={port_file}", *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
            )
        started.append(process)
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while True:
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, log_path.read_text()
            if port_file.exists() and (port := port_file.read_text()):
                url = f"http://127.0.0.1:{port.strip()}"
                try:
                    if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                        return Server(process, url, key)
                except httpx.TransportError:
                    pass
            time.sleep(0.02)

    yield start
    for process in started:
        process.terminate()
    for process in started:
        process.wait(30)


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The bundled model in float32, with the adapters "one" and "two"."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = BUNDLED_FOLDER / "headway-tiny"
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = Checkpoint(folder, model.eval())
    adapters = tmp_path_factory.mktemp("bundled-adapters")
    found.make_adapter("one", adapters, seed=1, deviation=0.12)
    found.make_adapter("two", adapters, seed=2, r=4, target_modules=["q_proj", "v_proj"], deviation=0.3)
    return found
