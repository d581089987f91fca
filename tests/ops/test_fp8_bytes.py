"""Exact bytes at every SIMD level of the CPU kernels: FP8 both ways, the rotation, scales computed on the fly, merging.

Each level runs in a process of its own (this file as a script) that saves what the ops gave for fixed inputs; the tests
hold that against the definition of the formats, torch's casts after clamping, and the other levels.
"""

import os
import subprocess
import sys

import pytest
import torch

import pagedkern
from pagedkern import reference

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCALES = {"none": None, "1": 1.0, "0.5": 0.5, "2^-9": 2.0**-9, "0.37": 0.37, "3.3e-3": 3.3e-3, "771.3": 771.3}
HEAD_DIM = 40  # no multiple of 16 lanes: the tails are part of the test


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 values of a 16-bit type; of float32 every rounding edge with its neighbours, and random bits."""
    if dtype != torch.float32:
        return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    edges = []
    for fmt in FORMATS.values():
        values = reference.decode_table(fmt)[:128]
        values = values[values.isfinite()]
        edges += [values.float(), ((values[1:] + values[:-1]) / 2).float()]
    edges = torch.cat(edges)
    edges = torch.cat([edges, edges.nextafter(torch.tensor(0.0)), edges.nextafter(torch.tensor(float("inf")))])
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (1 << 17,), generator=generator).to(torch.int32).view(torch.float32)
    special = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 464.0, 465.0, 61440.0, 61441.0, 1e-45])
    return torch.cat([edges, -edges, bits, special])


def as_rows(values: torch.Tensor) -> torch.Tensor:
    padding = values.new_zeros(-values.numel() % HEAD_DIM)
    return torch.cat([values, padding]).reshape(-1, 1, HEAD_DIM)


def empty_cache(num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    itemsize = torch.empty(0, dtype=dtype).element_size()
    return torch.full((num_tokens, 1, heads, head_dim * itemsize), 0xA5, dtype=torch.uint8).view(dtype)


def rotation_inputs(name: str):
    dtype = DTYPES[name]
    generator = torch.Generator().manual_seed(5)
    query, key = (torch.randn(9, heads, 80, generator=generator).to(dtype) for heads in (6, 3))
    table = torch.randn(11, 70, generator=generator)
    positions = torch.randint(0, 11, (9,), generator=generator)
    return query, key, table, positions


def dynamic_rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(40, 3, HEAD_DIM, generator=generator) * torch.logspace(-30, 30, 120).reshape(40, 3, 1)
    rows[1, 1] = 0.0
    rows[2, 0, 5], rows[2, 1, 6], rows[2, 2, 7] = float("inf"), float("nan"), float("-inf")
    rows[3] = float("nan")
    return rows


def merge_inputs():
    generator = torch.Generator().manual_seed(9)
    partials = [torch.randn(17, 5, HEAD_DIM, generator=generator) for _ in range(2)]
    lses = [torch.randn(17, 5, generator=generator) * 9 for _ in range(2)]
    return partials, lses


def run_this_level() -> dict[str, torch.Tensor]:
    """Bytes by name, from the ops as they run in this process."""
    ops = torch.ops.pagedkern
    results = {}
    for dtype_name, dtype in DTYPES.items():
        rows = as_rows(every_value(dtype))
        for fmt_name, fmt in FORMATS.items():
            for scale_name, scale in SCALES.items():
                caches = [empty_cache(len(rows), 1, HEAD_DIM, fmt) for _ in range(2)]
                scales = [None if scale is None else torch.tensor([scale])] * 2
                ops.reshape_and_cache(rows, rows, *caches, torch.arange(len(rows)), *scales)
                for side, cache in zip(("key", "value"), caches, strict=True):
                    results[f"encode {dtype_name} {fmt_name} {scale_name} {side}"] = cache
    for fmt_name, fmt in FORMATS.items():
        codes = torch.arange(256, dtype=torch.uint8).repeat(2)[: HEAD_DIM * 11].reshape(1, 11, 1, HEAD_DIM).view(fmt)
        for dtype_name, dtype in DTYPES.items():
            for scale_name, scale in SCALES.items():
                outs = [torch.empty(11, 1, HEAD_DIM, dtype=dtype) for _ in range(2)]
                scales = [None if scale is None else torch.tensor([scale])] * 2
                table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([11], dtype=torch.int32)
                ops.gather_cache(*outs, codes, codes, table, lens, torch.tensor([0, 11]).int(), *scales)
                results[f"decode {fmt_name} {dtype_name} {scale_name}"] = outs[0]
                results[f"decode {fmt_name} {dtype_name} {scale_name} value"] = outs[1]
        rows = dynamic_rows()
        caches = [empty_cache(40, 3, HEAD_DIM, fmt) for _ in range(2)]
        scales = [torch.full((40, 1, 3), -1.0) for _ in range(2)]
        ops.reshape_and_cache_dynamic(rows, rows, *caches, *scales, torch.arange(40))
        results[f"dynamic {fmt_name}"], results[f"dynamic scales {fmt_name}"] = caches[1], scales[1]
    for dtype_name, dtype in DTYPES.items():
        for interleaved in (False, True):
            query, key, table, positions = rotation_inputs(dtype_name)
            caches = [empty_cache(9, 3, 80, dtype) for _ in range(2)]
            ops.rope_reshape_and_cache(query, key, key.clone(), *caches, positions, table, torch.arange(9), interleaved)
            results[f"rope query {dtype_name} {interleaved}"] = query
            results[f"rope key {dtype_name} {interleaved}"] = key
            results[f"rope cache {dtype_name} {interleaved}"] = caches[0]
        partials, lses = merge_inputs()
        out, lse = torch.empty(17, 5, HEAD_DIM, dtype=dtype), torch.empty(17, 5)
        ops.merge_attention_states(out, lse, partials[0], lses[0], partials[1].to(dtype), lses[1])
        results[f"merge {dtype_name}"], results[f"merge lse {dtype_name}"] = out, lse
    return results


@pytest.fixture(scope="module", params=pagedkern.build_info()["cpu_simd_levels"])
def results(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "results.pt"
    environment = {**os.environ, "PAGEDKERN_CPU_SIMD": request.param}
    process = subprocess.run([sys.executable, __file__, path], env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    saved = torch.load(path)
    if saved.pop("level") != request.param:
        pytest.skip(f"this CPU lacks {request.param}")
    return saved


@pytest.fixture(scope="module")
def results_here():
    return run_this_level()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def quotient(x: torch.Tensor, scale: float | None) -> torch.Tensor:
    return x.float() / torch.tensor(1.0 if scale is None else scale)


def encode_by_torch(x: torch.Tensor, fmt: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(fmt).max
    codes = x.clamp(-limit, limit).to(fmt).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, codes)


@pytest.mark.parametrize("fmt_name", FORMATS)
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_encode(results, dtype_name, fmt_name):
    fmt, rows = FORMATS[fmt_name], as_rows(every_value(DTYPES[dtype_name]))
    for scale_name, scale in SCALES.items():
        x = quotient(rows, scale)
        by_definition = as_bytes(reference.encode(x, fmt))
        assert torch.equal(by_definition, as_bytes(encode_by_torch(x, fmt)))
        for side in ("key", "value"):
            stored = as_bytes(results[f"encode {dtype_name} {fmt_name} {scale_name} {side}"])
            wrong = (stored != by_definition).nonzero().flatten()
            assert wrong.numel() == 0, f"scale {scale}: {x.flatten()[wrong[:4]]} gave {stored[wrong[:4]]}"


@pytest.mark.parametrize("dtype_name", DTYPES)
@pytest.mark.parametrize("fmt_name", FORMATS)
def test_decode(results, fmt_name, dtype_name):
    values = reference.decode_table(FORMATS[fmt_name]).repeat(2)[: HEAD_DIM * 11].float()
    for scale_name, scale in SCALES.items():
        expected = (values * torch.tensor(1.0 if scale is None else scale)).to(DTYPES[dtype_name])
        got = results[f"decode {fmt_name} {dtype_name} {scale_name}"].flatten()
        assert torch.equal(got.isnan(), expected.isnan())
        live = ~expected.isnan()
        assert torch.equal(as_bytes(got[live]), as_bytes(expected[live])), f"scale {scale}"


@pytest.mark.parametrize("fmt_name", FORMATS)
def test_dynamic(results, fmt_name):
    rows, fmt = dynamic_rows(), FORMATS[fmt_name]
    amax = torch.where(rows.isfinite(), rows.abs(), 0.0).amax(-1)
    scales = amax.clamp(min=1e-10) / torch.finfo(fmt).max
    assert torch.equal(results[f"dynamic scales {fmt_name}"].reshape(40, 3), scales)
    expected = reference.encode(rows / scales[..., None], fmt)
    assert torch.equal(as_bytes(results[f"dynamic {fmt_name}"]), as_bytes(expected))


def rotated(x: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x' = x cos - y sin, y' = y cos + x sin, every product and sum rounded to float32, then rounded to x's dtype."""
    rotary_dim = table.size(1)
    half = rotary_dim // 2
    cosine, sine = table[positions][:, None, :half], table[positions][:, None, half:]
    first, second = (
        (slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)) if interleaved else (slice(0, half), slice(half, rotary_dim))
    )
    a, b = x[..., first].float(), x[..., second].float()
    result = x.clone()
    result[..., first] = (a * cosine - b * sine).to(x.dtype)
    result[..., second] = (b * cosine + a * sine).to(x.dtype)
    return result


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype_name", DTYPES)
def test_rotation(results, dtype_name, interleaved):
    query, key, table, positions = rotation_inputs(dtype_name)
    for name, before in (("query", query), ("key", key), ("cache", key)):
        got = results[f"rope {name} {dtype_name} {interleaved}"]
        expected = rotated(before, table, positions, interleaved)
        assert torch.equal(as_bytes(got), as_bytes(expected)), name


def test_levels_agree_on_every_byte(results, results_here):
    differing = [
        name for name in results_here if not torch.equal(as_bytes(results[name]), as_bytes(results_here[name]))
    ]
    assert results.keys() == results_here.keys()
    assert differing == []


if __name__ == "__main__":
    torch.save(run_this_level() | {"level": pagedkern.build_info()["cpu_simd"]}, sys.argv[1])
