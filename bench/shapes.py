"""Named attention shapes: the batches that figures are quoted for."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """One layer's call: each sequence's query tokens and keys, and the heads."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def num_pages(self) -> int:
        return sum(-(-length // self.block_size) for length in self.seq_lens)

    def kv_bytes(self, bytes_per_element: int) -> int:
        """Every key and value once: what decode must read."""
        return 2 * sum(self.seq_lens) * self.num_kv_heads * self.head_dim * bytes_per_element

    @property
    def causal_flops(self) -> int:
        """Multiplications and additions of the live (query, key) pairs, both products."""
        pairs = sum(q * s - q * (q - 1) // 2 for q, s in zip(self.query_lens, self.seq_lens, strict=True))
        return 4 * pairs * self.num_heads * self.head_dim


def decode(num_seqs: int, seq_len: int, **heads: int) -> AttentionShape:
    return AttentionShape((1,) * num_seqs, (seq_len,) * num_seqs, **heads)


SMALL_MODEL = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}

SHAPES = {
    "decode 8 x 4096": decode(8, 4096),
    "decode 1 x 16384": decode(1, 16384),
    "decode 8 x 1024, 32/32 heads": decode(8, 1024, num_kv_heads=32),
    "decode 1 x 16384 + 31 x 512": AttentionShape((1,) * 32, (16384,) + (512,) * 31),
    "decode 16 x 600, small model": decode(16, 600, **SMALL_MODEL),
    "verify 8 x (4 of 4096)": AttentionShape((4,) * 8, (4096,) * 8),
    "prefill 1024": AttentionShape((1024,), (1024,)),
    "prefill 900, small model": AttentionShape((900,), (900,), **SMALL_MODEL),
    "chunk 256 of 4096": AttentionShape((256,), (4096,)),
    "mixed 7 x decode 4096 + prefill 512": AttentionShape((1,) * 7 + (512,), (4096,) * 7 + (512,)),
}
