"""The ops that write, move and read the cache, one token or block at a time."""

import torch

from pagedkern.reference import fp8


def scale_at(scale: torch.Tensor | None, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """float32, broadcastable to [n, num_kv_heads]: the scale of the n slots (blocks, offsets)."""
    if scale is None:
        return torch.ones(1, 1)
    if scale.dim() == 3:
        return scale[blocks, offsets]
    return scale.reshape(1, -1)


def check_scales(cache: torch.Tensor, **scales: torch.Tensor | None) -> None:
    """Scales belong to FP8 caches alone; those that apply to every slot must be finite and positive."""
    for name, scale in scales.items():
        if scale is not None and scale.dim() < 3 and not (scale.isfinite() & (scale > 0)).all():
            raise RuntimeError(f"{name}: {scale.tolist()}, expected finite and positive")
        if scale is not None and cache.dtype not in fp8.FP8_DTYPES:
            raise RuntimeError(f"{name}: given with a cache of {cache.dtype}, expected only with an FP8 cache")


def dequantise(cache: torch.Tensor, scale: torch.Tensor | None, blocks: torch.Tensor, offsets: torch.Tensor):
    """float64 [n, num_kv_heads, head_dim]: what is stored in the n slots, times its scale."""
    rows = cache.view(torch.uint8)[blocks, offsets].view(cache.dtype) if is_fp8(cache) else cache[blocks, offsets]
    if not is_fp8(cache):
        return rows.double()
    return fp8.decode(rows) * scale_at(scale, blocks, offsets).double().unsqueeze(-1).to(rows.device)


def is_fp8(cache: torch.Tensor) -> bool:
    return cache.dtype in fp8.FP8_DTYPES


def live_slots(name: str, cache: torch.Tensor, slot_mapping: torch.Tensor) -> list[tuple[int, int, int]]:
    """(row, block, offset) of every row that is stored; raises before anything is written."""
    num_blocks, block_size = cache.shape[:2]
    slots = slot_mapping.tolist()
    for row, slot in enumerate(slots):
        if slot >= num_blocks * block_size:
            raise RuntimeError(f"{name}: slot_mapping[{row}] is {slot}, expected below {num_blocks * block_size}")
    return [(row, slot // block_size, slot % block_size) for row, slot in enumerate(slots) if slot >= 0]


def store(cache: torch.Tensor, block: int, offset: int, row: torch.Tensor, scale: torch.Tensor) -> None:
    """Writes one token: row [num_kv_heads, head_dim], scale float32 broadcastable to [num_kv_heads]."""
    if is_fp8(cache):
        quotient = row.float() / scale.to(row.device).reshape(-1, 1)
        cache.view(torch.uint8)[block, offset] = fp8.encode(quotient, cache.dtype).view(torch.uint8)
    else:
        cache[block, offset] = row


def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale=None, v_scale=None) -> None:
    check_scales(key_cache, k_scale=k_scale, v_scale=v_scale)
    for row, block, offset in live_slots("reshape_and_cache", key_cache, slot_mapping):
        store(key_cache, block, offset, key[row], scale_at(k_scale, [block], [offset]))
        store(value_cache, block, offset, value[row], scale_at(v_scale, [block], [offset]))


def dynamic_scale(row: torch.Tensor, cache_dtype: torch.dtype) -> torch.Tensor:
    """float32 [num_kv_heads] of row [num_kv_heads, head_dim]: max(amax of the finite elements, 1e-10) / fp8_max."""
    row = row.float()
    amax = torch.where(row.isfinite(), row.abs(), 0.0).amax(-1)
    return amax.clamp(min=torch.tensor(1e-10).item()) / torch.tensor(fp8.fp8_max(cache_dtype))


def reshape_and_cache_dynamic(key, value, key_cache, value_cache, k_scale, v_scale, slot_mapping) -> None:
    for row, block, offset in live_slots("reshape_and_cache_dynamic", key_cache, slot_mapping):
        for source, cache, scales in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            scales[block, offset] = dynamic_scale(source[row], cache.dtype)
            store(cache, block, offset, source[row], scales[block, offset])


def rotate(row: torch.Tensor, position: int, cos_sin_cache: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """row [heads, head_dim] turned to its position, in float64, then rounded to its own dtype."""
    rotary_dim = cos_sin_cache.size(1)
    half = rotary_dim // 2
    cos, sin = cos_sin_cache[position].double().split(half)
    turned = row.double()
    first = slice(0, rotary_dim, 2) if interleaved else slice(0, half)
    second = slice(1, rotary_dim, 2) if interleaved else slice(half, rotary_dim)
    x, y = turned[:, first].clone(), turned[:, second].clone()
    result = row.clone()
    result[:, first] = (x * cos - y * sin).to(row.dtype)
    result[:, second] = (y * cos + x * sin).to(row.dtype)
    return result


def rope_reshape_and_cache(
    query, key, value, key_cache, value_cache, positions, cos_sin_cache, slot_mapping,
    interleaved=False, k_scale=None, v_scale=None,
) -> None:  # fmt: skip
    check_scales(key_cache, k_scale=k_scale, v_scale=v_scale)
    live_slots("rope_reshape_and_cache", key_cache, slot_mapping)
    for row in range(slot_mapping.numel()):
        position = int(positions[row])
        if not 0 <= position < cos_sin_cache.size(0):
            raise RuntimeError(
                f"rope_reshape_and_cache: positions[{row}] is {position}, expected in [0, {cos_sin_cache.size(0)})"
            )
    for row in range(slot_mapping.numel()):
        query[row] = rotate(query[row], int(positions[row]), cos_sin_cache, interleaved)
        key[row] = rotate(key[row], int(positions[row]), cos_sin_cache, interleaved)
    reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


def gather_cache(key, value, key_cache, value_cache, block_table, seq_lens, cu_seqlens, k_scale=None, v_scale=None):
    """key and value [total, num_kv_heads, head_dim]: stored * scale in float32, rounded once to their dtype."""
    check_scales(key_cache, k_scale=k_scale, v_scale=v_scale)
    block_size = key_cache.size(1)
    for seq, (length, start) in enumerate(zip(seq_lens.tolist(), cu_seqlens.tolist(), strict=False)):
        position = torch.arange(length, device=block_table.device)
        blocks, offsets = block_table[seq].long()[position // block_size], position % block_size
        for out, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            if is_fp8(cache):
                out[start : start + length] = dequantise(cache, scale, blocks, offsets).float().to(out.dtype)
            else:
                out[start : start + length] = cache[blocks, offsets]


def copy_blocks(key_caches, value_caches, block_mapping) -> None:
    pairs = block_mapping.tolist()
    if not key_caches:
        return
    num_blocks = min(cache.size(0) for cache in [*key_caches, *value_caches])
    check_pairs("copy_blocks", pairs, num_blocks, num_blocks)
    sources = {source for source, _ in pairs}
    destinations = [destination for _, destination in pairs]
    if len(set(destinations)) < len(destinations) or sources & set(destinations):
        raise RuntimeError("copy_blocks: block_mapping: destinations must be distinct and none a source")
    for cache in [*key_caches, *value_caches]:
        for source, destination in pairs:
            as_bytes(cache)[destination] = as_bytes(cache)[source]


def swap_blocks(src, dst, block_mapping) -> None:
    if block_mapping.device.type != "cpu":
        raise RuntimeError(f"swap_blocks: block_mapping is on {block_mapping.device}, expected on the CPU")
    pairs = block_mapping.tolist()
    check_pairs("swap_blocks", pairs, src.size(0), dst.size(0))
    for source, destination in pairs:
        as_bytes(dst)[destination] = as_bytes(src)[source].to(dst.device)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """FP8 tensors seen as bytes: torch lacks copies of FP8 in some releases."""
    return cache.view(torch.uint8) if is_fp8(cache) else cache


def check_pairs(op: str, pairs: list[list[int]], num_sources: int, num_destinations: int) -> None:
    for index, (source, destination) in enumerate(pairs):
        if not 0 <= source < num_sources or not 0 <= destination < num_destinations:
            raise RuntimeError(
                f"{op}: block_mapping[{index}] is ({source}, {destination}), "
                f"expected in [0, {num_sources}) and [0, {num_destinations})"
            )
