"""Recorded decode steps, replayed on the CPU: padding, stale buffers, the borders of the buckets."""

import pytest
import torch

from engine_min import SamplingParams
from engine_min.runner import StepGraphs, buckets_for

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def prompts(count, length=5):
    return [[(7 * i + j) % 250 for j in range(length + i % 3)] for i in range(count)]


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture
def path(make_llama):
    return make_llama()[0]


@pytest.mark.parametrize("largest", [1, 2, 3, 5, 8, 9, 12, 16, 50, 64, 250, 256])
def test_buckets(largest):
    sizes = buckets_for(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    graphs = StepGraphs(lambda size: lambda: torch.tensor(size), sizes, torch.device("cpu"))
    for num_seqs in range(1, largest + 1):
        size = graphs.size_for(num_seqs)
        assert num_seqs <= size <= max(2 * num_seqs - 1, num_seqs + 7) and int(graphs.replay(size)) == size
    assert sum(graphs.replays.values()) == largest


@pytest.mark.parametrize("max_num_seqs", [1, 3, 5, 12])
def test_every_batch_size(path, make_llm, max_num_seqs):
    """Field case 29: each up to the limit, and one more, which waits. Tokens as without recording."""
    recorded, eager = (make_llm(path, max_num_seqs=max_num_seqs, enforce_eager=e) for e in (False, True))
    assert eager.runner.graphs is None
    for count in range(1, max_num_seqs + 2):
        assert tokens_of(recorded.generate(prompts(count), GREEDY)) == tokens_of(eager.generate(prompts(count), GREEDY))
    assert all(recorded.runner.graphs.replays.values())  # every bucket was used


def test_no_bucket_is_larger_than_the_buffers(path, make_llm):
    llm = make_llm(path, max_num_seqs=20)
    assert max(llm.runner.graphs.sizes) == 20 == llm.runner._seq_lens.device.size(0)


def test_recording_touches_no_page(path, make_llm):
    """Field case 28: what a GPU runs to warm up and capture has neither keys nor slots."""
    llm = make_llm(path, max_num_seqs=16)
    llm.kv_cache.storage.fill_(float("nan"))
    for size in llm.runner.graphs.sizes:
        assert llm.runner.graphs.replay(size).isfinite().all()
    assert llm.kv_cache.storage.isnan().all()


def test_padding_writes_nowhere(path, make_llm):
    """Field case 27: three requests in a bucket of four, the first of them owner of block 0 and its slot 0."""
    llm = make_llm(path, max_num_seqs=16, block_size=4)
    for i, prompt in enumerate(prompts(3)):
        llm.add_request(str(i), prompt, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    llm.step()
    assert llm._requests["0"][0].row is not None and int(llm.blocks.tables[llm._requests["0"][0].row, 0]) == 0
    unused = [block for block, count in enumerate(llm.blocks.ref_counts) if count == 0]
    llm.kv_cache.storage[:, unused[0]] = float("nan")
    before = llm.kv_cache.storage[:, 0, :, 0].clone()
    llm.runner._slots.host.fill(0)  # what a longer batch might have left behind
    for _ in range(20):
        llm.step()
        assert torch.equal(llm.kv_cache.storage[:, 0, :, 0], before)
    assert llm.runner.graphs.replays == {1: 0, 2: 0, 4: 20, 8: 0, 16: 0}


def test_what_a_recorded_step_reads(path, make_llm):
    """Fixed memory, padding of no keys and no slot, all else as the batch has it."""
    llm = make_llm(path, max_num_seqs=8, block_size=4)
    seen = []
    attention = llm.runner.attention
    begin = attention.begin
    attention.begin = lambda batch: (seen.append(batch), begin(batch))
    llm.generate(prompts(8, 20), GREEDY)  # leaves wide tables, long lengths and slots behind
    seen.clear()
    for i, prompt in enumerate(prompts(3)):
        llm.add_request(str(i), prompt, GREEDY)
    llm.step()
    llm.step()
    mixed, decode = seen
    assert mixed.cu_seqlens_q is not None and mixed.block_table.size(1) == 2 and mixed.max_seqlen_k == 7
    assert decode.cu_seqlens_q is None and decode.seq_lens.tolist() == [6, 7, 8, 0]
    assert decode.slot_mapping.tolist()[3] == -1 and min(decode.slot_mapping.tolist()[:3]) >= 0
    assert decode.max_seqlen_k == llm.max_model_len and decode.block_table.size(1) == llm.blocks.tables.shape[1]
    assert decode.block_table[:3, 2:].any()  # stale columns, which nobody may look at
    llm.step()
    assert seen[2] is decode  # the very same tensors


def test_stale_columns_and_padding_rows_do_not_matter(path, make_llm):
    llm = make_llm(path, max_num_seqs=16, block_size=4)
    expected = tokens_of(llm.generate(prompts(3), GREEDY))
    replay = llm.runner.graphs.replay

    def poisoned(size):
        table, lens = llm.runner._block_table.device[:size], llm.runner._seq_lens.device[:size]
        for row, length in zip(table, lens.tolist(), strict=True):
            row[-(-length // 4) :] = 2**30
        return replay(size)

    llm.runner.graphs.replay = poisoned
    assert tokens_of(llm.generate(prompts(3), GREEDY)) == expected


def test_lengths_grow_and_shrink_under_one_recording(make_llama, make_llm):
    """Field case 30: recorded before anything was long."""
    path, _ = make_llama(max_position_embeddings=4096)
    options = dict(max_model_len=2100, num_blocks=300, block_size=8, max_num_seqs=4)
    recorded, eager = make_llm(path, **options), make_llm(path, enforce_eager=True, **options)
    for length in (16, 1020, 2050, 9):
        prompt = [(3 * i + length) % 250 for i in range(length)]
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        assert tokens_of(recorded.generate(prompt, params)) == tokens_of(eager.generate(prompt, params))


def test_a_chunk_of_one_token_beside_a_decode(path, make_llm):
    """Field case 31: a step of one token for each is a decode step to the kernels, whatever it is to the requests."""
    llm = make_llm(path, max_num_batched_tokens=8, max_num_seqs=4, enable_prefix_caching=False)
    sizes = []
    step = llm.runner.step
    llm.runner.step = lambda batch: (sizes.append([r.num_scheduled for r in batch]), step(batch))[1]
    first, second = [1, 2, 3], [(5 * i) % 250 for i in range(5 + 7 + 1)]
    outputs = llm.generate([first, second], GREEDY)
    assert sizes[:3] == [[3, 5], [1, 7], [1, 1]]
    assert llm.runner.graphs.replays[2] > 0
    eager = make_llm(path, enforce_eager=True)
    assert tokens_of(outputs) == [tokens_of(eager.generate(prompt, GREEDY))[0] for prompt in (first, second)]


def test_padding_alone_is_recorded(path, make_llm):
    """On a GPU a recording runs once, and must not write where the last batch did."""
    llm = make_llm(path)
    llm.generate(prompts(5), GREEDY)
    llm.runner.record()
    assert (llm.runner._slots.host[:16] == -1).all() and not llm.runner._seq_lens.host.any()


def test_buffers_are_filled_after_the_last_upload_and_read_after_the_next(path, make_llm):
    """Also by steps that draw nothing: on a GPU nothing else would wait for the upload."""
    llm = make_llm(path, max_num_batched_tokens=16)
    calls = []

    class Event:
        def synchronize(self):
            calls.append(("wait", llm.runner._positions.host[0].item()))

        def record(self):
            calls.append(("uploaded", llm.runner._positions.host[0].item()))

    llm.runner._uploaded = Event()
    llm.generate([list(range(40))], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    assert [name for name, _ in calls] == ["wait", "uploaded"] * 4
    assert [position for _, position in calls] == [0, 0, 0, 16, 16, 32, 32, 40]
