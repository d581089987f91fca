"""swap_blocks: blocks between two caches, across devices too; adjacent pairs are one transfer on the current stream."""

from .common import as_stored


def runs(pairs: list[list[int]]) -> list[tuple[int, int, int]]:
    """(source, destination, blocks) with the pairs merged that continue the one before."""
    merged: list[tuple[int, int, int]] = []
    for source, destination in pairs:
        if merged:
            first_source, first_destination, count = merged[-1]
            if (source, destination) == (first_source + count, first_destination + count):
                merged[-1] = (first_source, first_destination, count + 1)
                continue
        merged.append((source, destination, 1))
    return merged


def swap_blocks(src, dst, block_mapping) -> None:
    source_blocks, destination_blocks = as_stored(src), as_stored(dst)
    for source, destination, count in runs(block_mapping.tolist()):
        destination_blocks[destination : destination + count].copy_(
            source_blocks[source : source + count], non_blocking=True
        )
