"""Tokenizers made on the spot, and real `headway serve` processes to talk to."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import httpx2 as httpx
import jwt
import openai
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog; and then it does so again, slowly.",
    "What is 12 + 30? The answer is 42. Ünïcödé, 日本語, emoji 👩‍👩‍👧 and 🏳️‍🌈 too.",
    '{"name": "headway", "values": [1, 2, 3], "stop": "###"}',
] * 4
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("added token", special=False)])
    tokenizer.add_special_tokens(["<|python_tag|>"])
    return tokenizer


def make_byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2 has it: spaces as U+2581, unknown characters as byte tokens."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for text in ("▁", "a", "b", "c", "▁the", "▁a", "é", "日", "<0x", "<0xZZ>", "🏳"):
        vocabulary[text] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    return make_byte_level_tokenizer()


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> Tokenizer:
    return make_byte_fallback_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, byte_level_tokenizer: Tokenizer) -> Path:
    """A folder with everything but weights: a tiny Llama's config, a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    byte_level_tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "chat_template": CHAT_TEMPLATE},
    )
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": byte_level_tokenizer.get_vocab_size(),
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    )
    return folder


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


AUDIENCE = "default/demo"
START_TIMEOUT_SECONDS = 60.0


@dataclass(slots=True)
class RunningServer:
    """A `headway serve` process that is ready."""

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path
    operator_key: Ed25519PrivateKey
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def access_entry(self, request_id: str) -> Any:
        """The access line of a request; it may be written a moment after the answer has arrived."""
        deadline = time.monotonic() + 15
        while True:
            for line in self.log.splitlines():
                _, found, text = line.partition("headway.access ")
                if found and text.endswith("}") and (entry := json.loads(text))["request_id"] == request_id:
                    return entry
            assert time.monotonic() < deadline, self.log
            time.sleep(0.01)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def admin_token(self, key: Ed25519PrivateKey | None = None, **changes: Any) -> str:
        """A token as the operator signs it, with some claims changed (None: left out)."""
        now = int(time.time())
        claims = {"iss": "headway-operator", "aud": AUDIENCE, "iat": now, "exp": now + 60, **changes}
        claims = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(claims, key or self.operator_key, algorithm="EdDSA")

    def admin(self, method: str, path: str, body: object = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.admin_token()}"}
        return httpx.request(method, f"{self.url}/admin/{path}", headers=headers, json=body, timeout=15)

    def sample(self) -> Any:
        response = self.admin("GET", "sample")
        assert response.status_code == 200, response.text
        return response.json()

    def sample_until(self, accept: Callable[[Any], bool]) -> Any:
        """The first sample that `accept` likes; fails when none comes in time."""
        deadline = time.monotonic() + 15
        while not accept(sample := self.sample()):
            assert time.monotonic() < deadline, sample
            time.sleep(0.01)
        return sample

    def wait(self, timeout_seconds: float = 20.0) -> int:
        return self.process.wait(timeout_seconds)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


class StartServer(Protocol):
    def __call__(
        self,
        *arguments: str,
        fake: bool = True,
        environment: Mapping[str, str] = ...,
        ready: bool = True,
        with_admin: bool = True,
    ) -> RunningServer: ...


def public_pem(*keys: Ed25519PrivateKey) -> bytes:
    return b"".join(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo) for key in keys
    )


def _answers(server: RunningServer, port_file: Path, path: str) -> None:
    """Returns once the server, whose port this finds, answers `path` with 200."""
    process, log_path = server.process, server.log_path
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        log = log_path.read_text(encoding="utf-8")
        assert process.poll() is None, f"it ended with {process.poll()}:\n{log}"
        assert time.monotonic() < deadline, f"it did not get ready:\n{log}"
        if port_file.exists():
            server.port = int(port_file.read_text())
            try:
                if httpx.get(server.url + path, timeout=5, verify=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
        time.sleep(0.02)


def _server_starter(folder: Path, model: Path) -> Iterator[StartServer]:
    started: list[RunningServer] = []
    lifeline_read, lifeline_write = os.pipe()

    def start(
        *arguments: str,
        fake: bool = True,
        environment: Mapping[str, str] = MappingProxyType({}),
        ready: bool = True,
        with_admin: bool = True,
    ) -> RunningServer:
        number = len(started)
        key, log_path, port_file = (
            Ed25519PrivateKey.generate(),
            folder / f"server-{number}.log",
            folder / f"port-{number}",
        )
        key_path = folder / f"public-{number}.pem"
        key_path.write_bytes(public_pem(key))
        script = [str(Path(__file__).with_name("fake_server.py"))] if fake else ["-m", "headway", "serve"]
        weights = [] if fake else ["--load-format", "dummy", "--device", "cpu"]
        common = ["--port=0", f"--port-file={port_file}", "--served-model-name=tiny", *weights]
        if with_admin:
            common += [f"--admin-public-key-file={key_path}", f"--admin-audience={AUDIENCE}"]
        common += [f"--lifeline-fd={lifeline_read}"]
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *script, str(model), *common, *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                pass_fds=(lifeline_read,),
            )
        is_tls = any(argument.startswith("--ssl-certfile") for argument in arguments)
        server = RunningServer(process, 0, log_path, key, "https" if is_tls else "http")
        started.append(server)
        _answers(server, port_file, "/ready" if ready else "/health")
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.terminate()
    for server in started:
        try:
            server.wait()
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.wait()
    os.close(lifeline_write)
    os.close(lifeline_read)


@pytest.fixture
def start_server(tmp_path: Path, model_folder: Path) -> Iterator[StartServer]:
    """Starts servers of a test's own; they end with it."""
    yield from _server_starter(tmp_path, model_folder)


@pytest.fixture(scope="module")
def start_shared_server(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path
) -> Iterator[StartServer]:
    """The same for servers that all tests of a module share."""
    yield from _server_starter(tmp_path_factory.mktemp("shared"), model_folder)


@pytest.fixture(scope="session")
def fake_server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[RunningServer]:
    """One server with the engine that repeats the prompt, shared by all who leave it as it was."""
    for start in _server_starter(tmp_path_factory.mktemp("fake"), model_folder):
        yield start()


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[RunningServer]:
    """One server with the real engine and random weights."""
    for start in _server_starter(tmp_path_factory.mktemp("real"), model_folder):
        yield start("--max-num-seqs=8", "--num-threads=1", fake=False)


def connect(server: RunningServer, api_key: str = "none") -> openai.OpenAI:
    """The official client, which tries nothing twice."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0, timeout=60)


@pytest.fixture(scope="session")
def openai_client(real_server: RunningServer) -> Iterator[openai.OpenAI]:
    """The official client at the real engine with random weights."""
    with connect(real_server) as client:
        yield client


@pytest.fixture(scope="session")
def repeating_client(fake_server: RunningServer) -> Iterator[openai.OpenAI]:
    """The official client at the engine that repeats the prompt."""
    with connect(fake_server) as client:
        yield client
