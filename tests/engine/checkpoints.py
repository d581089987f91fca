"""Small random checkpoints in Hugging Face form, made on the spot."""

import json

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # 256 characters, one per byte value
BOS, EOS = 256, 257


def byte_tokenizer() -> Tokenizer:
    """One token per byte, then <s> and </s>."""
    vocab = {char: i for i, char in enumerate(BYTES)} | {"<s>": BOS, "</s>": EOS}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return backend


def token_ids_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text).ids


def write_checkpoint(path, family="Llama", shard_size="10GB", chat_template=None, **overrides):
    """Writes a random checkpoint of a family and returns the transformers model."""
    import transformers

    settings = dict(
        vocab_size=288, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=EOS, bos_token_id=BOS,
    )  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**(settings | overrides))
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for parameter in model.parameters():  # as initialised, logits would hardly differ between tokens
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
    model.save_pretrained(path, max_shard_size=shard_size)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    if chat_template is not None:
        names = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": chat_template}
        (path / "tokenizer_config.json").write_text(json.dumps(names))
    return model
