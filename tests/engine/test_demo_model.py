"""The demo model against transformers on the same dequantised float32 weights: the very same greedy tokens."""

import pytest
import torch

from engine_min import LLM, SamplingParams

NEW_TOKENS = 64
LENGTHS = (1, 2, 7, 16, 31, 64, 100, 129, 255, 400, 640, 900)
TEXT = (
    "The lighthouse stood at the end of a long pier, and every evening the keeper walked out to light the lamp. "
    "In 1874 a storm took the railing, 12 metres of it, and for a whole winter nobody could cross without a rope. "
    "She wrote down what she saw: ships, weather, birds; the price of oil, the visitors, the letters that came late. "
)


@pytest.fixture(scope="module")
def llm(demo_gguf):
    return LLM(demo_gguf, dtype="float32", max_num_seqs=16, max_num_batched_tokens=512)


@pytest.fixture(scope="module")
def prompts(llm):
    token_ids = llm.tokenizer.encode(TEXT * 12)
    return [token_ids[i * 3 : i * 3 + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(demo_hf, prompts):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_hf, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    tokens = []
    with torch.inference_mode():
        for prompt in prompts:
            generated = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
                max_new_tokens=NEW_TOKENS,
            )  # fmt: skip
            tokens.append(generated[0, len(prompt) :].tolist())
    return tokens


def greedy(llm, prompts):
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    llm.blocks.check_integrity()
    assert llm.blocks.num_used == 0
    return [output.outputs[0].token_ids for output in outputs]


def test_prompts_have_the_lengths_asked_for(prompts):
    assert tuple(map(len, prompts)) == LENGTHS


def test_alone(llm, prompts, expected):
    assert [greedy(llm, [prompt])[0] for prompt in prompts] == expected


def test_batched(llm, prompts, expected):
    """Two thousand tokens at 512 per step: prompts are chunked and share steps with decodes."""
    assert greedy(llm, prompts) == expected


def test_batched_with_preemption(demo_gguf, prompts, expected):
    llm = LLM(demo_gguf, dtype="float32", max_num_seqs=16, max_num_batched_tokens=512, num_blocks=80)
    assert greedy(llm, prompts) == expected
    assert llm.stats().preempted > 0


def test_chat_answers(demo_gguf):
    """In the default dtype, whatever it is here."""
    llm = LLM(demo_gguf)
    token_ids = llm.tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}])
    (output,) = llm.generate([token_ids], SamplingParams(max_tokens=32, temperature=0))
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
