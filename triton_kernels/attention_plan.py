"""What paged_attention decides on the host: tiles, splits and memory, all pure functions of the shape."""

from typing import NamedTuple

from .common import cdiv, padded_head_dim

SMALL_ROWS = 16  # query rows (tokens x heads of one KV head) of a tile of a short query
LARGE_ROWS = 64  # and of a longer one
SPLIT_TOKENS = 16  # longer queries fill the machine without splitting their keys
MIN_SPLIT_BLOCKS = 4  # key blocks of a split where num_splits is 0
MAX_SCHEDULED = 4096  # sequences; more of them fill any machine, and every program would look at all of them
BUCKETS_PER_PROCESSOR = 2  # programs per processor that the automatic schedule aims at


class Config(NamedTuple):
    block_n: int  # keys of a step of a small tile, and what splits are made of
    large_n: int  # of a large tile, divides block_n
    num_warps: int
    num_stages: int


# (padded head_dim, bytes of a stored element) -> config. bench/tune_triton.py measures the candidates on a GPU.
CONFIGS = {
    (64, 2): Config(128, 128, 4, 3), (128, 2): Config(128, 64, 4, 3), (256, 2): Config(64, 32, 4, 3),
    (64, 1): Config(128, 128, 4, 3), (128, 1): Config(128, 64, 4, 3), (256, 1): Config(64, 64, 8, 3),
}  # fmt: skip


def small_bytes(config: Config, head_dim: int, itemsize: int) -> int:
    """Shared memory of a small tile at most. Page ids are loaded a stage before the keys and values they name."""
    block_d, ahead = padded_head_dim(head_dim), max(config.num_stages - 2, 1)
    return SMALL_ROWS * (2 * block_d + config.block_n) * 2 + ahead * 2 * config.block_n * block_d * itemsize


def large_bytes(config: Config, head_dim: int, itemsize: int) -> int:
    """Of a large tile, which keeps 16-bit keys and values a step longer and has FP8 ones as float16 too, in turn."""
    block_d, steps = padded_head_dim(head_dim), max(config.num_stages - 1, 2)
    tiles = 2 * steps if itemsize == 2 else steps
    return LARGE_ROWS * (block_d + config.large_n) * 2 + tiles * config.large_n * block_d * 2


def shared_bytes(config: Config, head_dim: int, itemsize: int) -> int:
    return max(small_bytes(config, head_dim, itemsize), large_bytes(config, head_dim, itemsize))


def config_of(head_dim: int, itemsize: int, shared_limit: int) -> Config:
    """The tuned config, with fewer keys a step where the device has less shared memory."""
    config = CONFIGS[padded_head_dim(head_dim), itemsize]
    while small_bytes(config, head_dim, itemsize) > shared_limit and config.block_n > 16:
        config = config._replace(block_n=config.block_n // 2)
    config = config._replace(large_n=min(config.large_n, config.block_n))
    while large_bytes(config, head_dim, itemsize) > shared_limit and config.large_n > 16:
        config = config._replace(large_n=config.large_n // 2)
    return config if shared_bytes(config, head_dim, itemsize) <= shared_limit else config._replace(num_stages=1)


class Plan(NamedTuple):
    """Sizes of one call. The schedule itself is made on the device, from the lengths it finds there."""

    has_large: bool  # some query may be longer than a small tile
    num_splits: int  # 0: the device decides
    target: int  # key blocks of the whole batch are shared among about this many programs of each KV head
    items: int  # upper bound of (sequence, tile, split) triples
    split_tokens: int  # upper bound of a split query's tokens
    partial_rows: int  # upper bound of rows of partial results, of each KV head; 0: nothing is split

    @property
    def direct(self) -> bool:
        """Every sequence is one item: no program has to look at the lengths of all."""
        return self.num_splits == 1 and not self.has_large


def plan(
    num_tokens: int, num_heads: int, num_kv_heads: int, num_seqs: int, max_seqlen_q: int, max_seqlen_k: int,
    num_splits: int, processors: int, block_n: int = 64,
) -> Plan:  # fmt: skip
    group = num_heads // num_kv_heads
    rows = min(max_seqlen_q, num_tokens) * group
    has_large = rows > SMALL_ROWS
    tiles = num_seqs
    if has_large:
        tiles = min(num_seqs * cdiv(rows, LARGE_ROWS), num_seqs + cdiv(num_tokens * group, LARGE_ROWS))
    split_tokens = max(1, min(max_seqlen_q, SPLIT_TOKENS))
    target = max(1, processors * BUCKETS_PER_PROCESSOR // num_kv_heads)
    if num_splits == 0 and (max_seqlen_k <= MIN_SPLIT_BLOCKS * block_n or num_seqs > MAX_SCHEDULED):
        num_splits = 1
    num_splits = min(num_splits, max(1, cdiv(max_seqlen_k, block_n)))  # a split has a block of keys at least
    if num_splits == 1:
        return Plan(has_large, 1, target, tiles, split_tokens, 0)
    if num_splits > 1:
        split_tiles = num_seqs * cdiv(split_tokens * group, LARGE_ROWS)
        tokens = min(num_tokens, num_seqs * split_tokens)
        return Plan(
            has_large, num_splits, target, tiles + split_tiles * (num_splits - 1), split_tokens,
            tokens * group * num_splits,
        )  # fmt: skip
    # A split query has s >= 2 splits of at most `chunk` blocks, and chunk * target covers all: sum of s <= 2 * target.
    return Plan(has_large, 0, target, tiles + target, split_tokens, 2 * target * split_tokens * group)


def partial_bytes(partial_rows: int, num_kv_heads: int, head_dim: int) -> int:
    """Rows of head_dim float32, then two float32 each: maximum and sum."""
    return partial_rows * num_kv_heads * (head_dim + 2) * 4


def fit(plan: Plan, available: int, num_kv_heads: int, head_dim: int, group: int) -> Plan | None:
    """The plan for a workspace of so many bytes: an automatic schedule takes fewer splits, a pinned one cannot."""
    if partial_bytes(plan.partial_rows, num_kv_heads, head_dim) <= available:
        return plan
    if plan.num_splits > 0:
        return None
    rows = available // (num_kv_heads * (head_dim + 2) * 4)
    target = rows // (2 * plan.split_tokens * group)
    if target == 0:
        return plan._replace(num_splits=1, partial_rows=0)
    return plan._replace(target=target, partial_rows=2 * target * plan.split_tokens * group)
