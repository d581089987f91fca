"""Which class builds which architecture."""

from engine_min.models.llama import LlamaModel

# The families differ in biases, norms and windows, which their configs say.
MODELS = dict.fromkeys(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"), LlamaModel)


def model_class(architecture: str):
    if architecture not in MODELS:
        raise ValueError(f"architecture {architecture!r} is not supported, expected one of {', '.join(MODELS)}")
    return MODELS[architecture]
