"""The cache ops' kernels on the virtual GPU: what they move over what must move, counted.

python -m bench.bench_cache_gates
"""

from pagedkern.testing import cache_gates


def main():
    print(cache_gates.HEADING)
    print("|---" * 7 + "|")
    calls = [
        *cache_gates.write_calls(8192),
        *cache_gates.write_calls(64)[::2],
        *cache_gates.read_calls(4096),
        *cache_gates.copy_calls(64, layers=4),
        *cache_gates.copy_calls(2, layers=4),
    ]
    for call in calls:
        print(cache_gates.measure(call).row(), flush=True)


if __name__ == "__main__":
    main()
