"""Model architectures by the name that `config.json` gives them."""

from headway_runtime.models.llama import Llama

MODELS = {"LlamaForCausalLM": Llama}
