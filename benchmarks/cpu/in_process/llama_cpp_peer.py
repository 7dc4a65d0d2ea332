"""llama.cpp in a process of its own environment, through the C interface that llama-cpp-python carries.

    python llama_cpp_peer.py MODEL_FOLDER GGUF_FILE NUM_THREADS

Writes the GGUF file (bfloat16) first where it is missing. Then reads one job per line,
{"prompts": [[ids], ...], "max_tokens": n}, and answers each with {"seconds": s, "ttft_seconds": [s, ...],
"num_tokens": n}. All prompts of a job are decoded in one batch per step, as llama-server does it with as many
slots. Imports nothing of this repository.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

import gguf  # type: ignore[import-not-found]
import llama_cpp  # type: ignore[import-not-found]
import numpy
from numpy.typing import NDArray

Bytes = NDArray[numpy.uint8]
# A row of a batch: token, position, sequence, and whether its logits are wanted.
Row = tuple[int, int, int, bool]

MAX_SEQUENCES = 64
TOKENS_PER_SEQUENCE = 256
LARGEST_BATCH = 2048
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, target: Path) -> None:
    """The checkpoint as llama.cpp reads it: norms in float32, all else as it is, no tokenizer."""
    config = json.loads((folder / "config.json").read_bytes())
    temporary = target.with_suffix(".part")
    writer = gguf.GGUFWriter(temporary, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    for name, (shape, raw) in read_safetensors(folder / "model.safetensors").items():
        if len(shape) == 1:
            values = (raw.view(numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
            writer.add_tensor(gguf_name(name), values)
            continue
        for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if projection in name:
                # llama.cpp rotates neighbours, Hugging Face's layout rotates halves.
                pairs = raw.view(numpy.uint16).reshape(config[heads], 2, -1, shape[1])
                raw = numpy.ascontiguousarray(pairs.swapaxes(1, 2)).view(numpy.uint8).reshape(-1)
        writer.add_tensor(
            gguf_name(name),
            raw.reshape(shape[0], shape[1] * 2),
            raw_dtype=gguf.GGMLQuantizationType.BF16,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(target)


def read_safetensors(path: Path) -> dict[str, tuple[list[int], Bytes]]:
    """Shape and raw bytes of each tensor; the format is a length, a JSON header and the data."""
    data = numpy.memmap(path, dtype=numpy.uint8, mode="r")
    length = int(data[:8].view(numpy.uint64)[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    header.pop("__metadata__", None)
    start = 8 + length
    return {
        name: (
            one["shape"],
            numpy.array(data[start + one["data_offsets"][0] : start + one["data_offsets"][1]]),
        )
        for name, one in header.items()
    }


def gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in whole:
        return whole[name]
    layer, rest = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{NAMES[rest]}.weight"


class Model:
    """One context with a slot per sequence."""

    def __init__(self, path: Path, num_threads: int) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = MAX_SEQUENCES * TOKENS_PER_SEQUENCE
        params.n_batch = LARGEST_BATCH
        params.n_seq_max = MAX_SEQUENCES
        params.n_threads = params.n_threads_batch = num_threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise SystemExit("llama.cpp made no context")
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.batch = llama_cpp.llama_batch_init(LARGEST_BATCH, 0, 1)

    def decode(self, rows: list[Row]) -> dict[int, int]:
        """The best next token of each sequence with a row that wants logits."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wants) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wants
        status = llama_cpp.llama_decode(self.context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode failed with {status}")
        best = {}
        for index, (_, _, sequence, wants) in enumerate(rows):
            if wants:
                logits = llama_cpp.llama_get_logits_ith(self.context, index)
                address = ctypes.addressof(logits.contents)
                row = numpy.ctypeslib.as_array((ctypes.c_float * self.vocab_size).from_address(address))
                best[sequence] = int(row.argmax())
        return best

    def run(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[float]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        started_at = time.perf_counter()
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        best: dict[int, int] = {}
        first_seconds: list[float] = []
        for start in range(0, len(rows), LARGEST_BATCH):
            new = self.decode(rows[start : start + LARGEST_BATCH])
            best |= new
            first_seconds += [time.perf_counter() - started_at] * len(new)
        for step in range(max_tokens - 1):
            best = self.decode(
                [(best[index], len(prompt) + step, index, True) for index, prompt in enumerate(prompts)]
            )
        return time.perf_counter() - started_at, first_seconds


def main() -> None:
    folder, target, num_threads = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    # The library prints to the same stream as our answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if not target.is_file():
        write_gguf(folder, target)
    model = Model(target, num_threads)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        seconds, first = model.run(job["prompts"], job["max_tokens"])
        num_tokens = len(job["prompts"]) * job["max_tokens"]
        report = {"seconds": seconds, "ttft_seconds": first, "num_tokens": num_tokens}
        print(json.dumps(report), file=answers, flush=True)


if __name__ == "__main__":
    main()
