"""The gates of decode attention that need no GPU: each figure beside its limit.

    python -m bench.bench_gates            # fails when a gate is missed
    python -m bench.bench_gates --seqs 8   # more sequences of 4,096 tokens for the figures of a run

Instructions are those of the sm_90a object; traffic and bank conflicts are counted on the virtual GPU.
"""

import argparse
import sys

from pagedkern.testing import decode_gates as gates

TOKENS = 4096
NAMES = {gates.BF16: "bf16", gates.E4M3: "e4m3"}


class Table:
    def __init__(self):
        self.missed = 0

    def row(self, heads, dtype, what, value, limit, least=False, form="{:.3f}"):
        good = value >= limit if least else value <= limit
        self.missed += not good
        sign = ">=" if least else "<="
        verdict = "" if good else "MISSED"
        print(
            f"{heads!s:<11} {NAMES[dtype]}  {what:<40} {form.format(value):>9} {sign} {form.format(limit):<9} {verdict}"
        )


def static_rows(table, heads, dtype):
    found, limits = gates.static(heads, dtype), gates.LIMITS[dtype]
    table.row(heads, dtype, "instructions of a turn per KiB", found.instructions_per_kib, limits.instructions)
    table.row(heads, dtype, "conversions per element", found.conversions_per_element, limits.conversions)
    table.row(heads, dtype, "bytes in flight, KiB", found.bytes_in_flight / 1024, limits.bytes_in_flight / 1024, True)
    table.row(heads, dtype, "stack, spills, bytes", found.local_bytes, 0)
    table.row(
        heads, dtype, f"blocks that {found.registers} registers allow", found.blocks_by_registers, found.blocks, True
    )
    print(f"{heads!s:<11} {NAMES[dtype]}  copies: {', '.join(found.copies)}; other global loads: {found.narrow_loads}")


def dynamic_rows(table, heads, dtype, num_seqs):
    limits = gates.LIMITS[dtype]
    for block_size in (16, 64):
        found = gates.dynamic(heads, dtype, block_size, (TOKENS,) * num_seqs)
        page = f", pages of {block_size}"
        table.row(heads, dtype, "KV bytes requested over KV bytes" + page, found.kv_bytes, limits.kv_bytes)
        table.row(heads, dtype, "all bytes over the least" + page, found.all_bytes, limits.all_bytes)
        table.row(heads, dtype, "shared wavefronts over the fewest" + page, found.wavefronts, limits.wavefronts)
        table.row(heads, dtype, "partial results over KV bytes" + page, found.partials, limits.partials)
        print(
            f"{heads!s:<11} {NAMES[dtype]}  {found.launches} launch, {found.blocks} busy blocks, "
            f"{found.instructions_per_kib:.1f} PTX instructions per KiB in all"
        )


def schedule_rows(table, heads, dtype):
    limits = gates.LIMITS[dtype]
    for mix in gates.MIXES:
        table.row(heads, dtype, f"busiest block over the mean, {mix}", gates.balance(heads, dtype, mix), limits.balance)
        table.row(
            heads, dtype, f"partial results over KV bytes, {mix}", gates.partials(heads, dtype, mix), limits.partials
        )


def many_rows(table):
    for dtype in (gates.BF16, gates.E4M3):
        for case in gates.READ_ONCE:
            for kernel, value in gates.kv_bytes_by_kernel(case, dtype).items():
                name = "paged_prefill" if "paged_prefill" in kernel else "paged_decode"
                table.row(case, dtype, f"KV bytes requested, {name}", value, gates.MANY_ROWS_KV_BYTES)
        for case in gates.SHARED_OUT:
            found = gates.shared_out(case, dtype)
            table.row(case, dtype, "busiest block over the mean", found.balance, gates.LIMITS[dtype].balance)
            print(
                f"{case!s:<11} {NAMES[dtype]}  {found.blocks} busy blocks, the longest {found.speedup:.1f} times "
                f"shorter than a tile of rows, partial results {found.partials:.3f} of KV bytes"
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seqs", type=int, default=1, help="sequences of the run that is counted")
    args = parser.parse_args()
    table = Table()
    for heads in gates.HEADS:
        for dtype in (gates.BF16, gates.E4M3):
            static_rows(table, heads, dtype)
            dynamic_rows(table, heads, dtype, args.seqs)
            schedule_rows(table, heads, dtype)
    many_rows(table)
    print(f"{table.missed} gates missed")
    return 1 if table.missed else 0


if __name__ == "__main__":
    sys.exit(main())
