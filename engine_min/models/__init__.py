"""Which class builds which architecture."""

from engine_min.models.llama import LlamaModel

MODELS = {"LlamaForCausalLM": LlamaModel}


def model_class(architecture: str):
    if architecture not in MODELS:
        raise ValueError(f"architecture {architecture!r} is not supported, expected one of {', '.join(MODELS)}")
    return MODELS[architecture]
