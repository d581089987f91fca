"""The built sm_90a code as disassembled: kernels, their resources, and the instructions of a turn of the main loop."""

import functools
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pagedkern

LIBRARY = Path(pagedkern.__file__).with_name("libpagedkern_ops.so")
WORK = re.compile(r"\b(HMMA|LDGSTS)\b")  # what a turn is for; the rest is overhead

Instruction = tuple[int, str]  # address, text


@functools.cache
def cuobjdump(*options: str, path: Path = LIBRARY) -> str:
    # Triton's wheel, which every CUDA build of torch brings, ships cuobjdump and nvdisasm.
    tool = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, *options, path], capture_output=True, text=True, check=True).stdout


@functools.cache
def kernels(path: Path = LIBRARY) -> dict[str, str]:
    """Kernel name (mangled) -> its SASS."""
    parts = re.split(r"\n\s*Function : (\S+)\n", cuobjdump("-sass", path=path))
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@functools.cache
def usage(path: Path = LIBRARY) -> dict[str, dict[str, int]]:
    """Kernel name (mangled) -> {REG, STACK, LOCAL, ...}."""
    rows = re.findall(r"Function (\S+?):\s*\n\s*(REG:.*)", cuobjdump("-res-usage", path=path))
    return {name: {k: int(v) for k, v in re.findall(r"(\w+(?:\[\d\])?):(\d+)", row)} for name, row in rows}


def instructions(sass: str) -> list[Instruction]:
    return [(int(a, 16), text.strip()) for a, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(.*?);", sass)]


def _target(text: str) -> int | None:
    found = re.search(r"\bBRA(?:\.\w+)*\s.*?(0x[0-9a-f]+)", text)
    return int(found[1], 16) if found else None


def _followers(code: list[Instruction], index: dict[int, int], i: int) -> list[int]:
    text = code[i][1]
    target = _target(text)
    if target is not None:
        always = re.match(r"BRA 0x", text) is not None
        return [index[target]] if always else [i + 1, index[target]]
    return [] if re.match(r"(EXIT|RET)\b", text) else [i + 1]


def main_loop(code: list[Instruction]) -> tuple[int, int]:
    """First and last index of the shortest loop that holds both the matrix products and the copies."""
    index = {address: i for i, (address, _) in enumerate(code)}
    loops = []
    for i, (address, text) in enumerate(code):
        target = _target(text)
        if target is None or target > address or not text.startswith("@"):
            continue
        names = {m[1] for _, line in code[index[target] : i + 1] if (m := WORK.search(line))}
        if len(names) == 2:
            loops.append((i - index[target], index[target], i))
    _, first, last = min(loops)
    return first, last


def main_turn(code: list[Instruction]) -> list[str]:
    """The instructions of one turn of the main loop with all its work and nothing that is rare: of the ways from its
    first instruction to its last, those with the most products and copies, and of these the shortest."""
    first, last = main_loop(code)
    index = {address: i for i, (address, _) in enumerate(code)}
    order, seen, stack = [], {first}, [(first, iter(_followers(code, index, first)))]
    while stack:
        node, rest = stack[-1]
        follower = next((f for f in rest if f not in seen and f != first), None) if node != last else None
        if follower is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(follower)
            stack.append((follower, iter(_followers(code, index, follower))))
    order.reverse()
    place = {node: i for i, node in enumerate(order)}
    works = [WORK.search(text) is not None for _, text in code]
    best = {first: (int(works[first]), -1)}
    came_from = {}
    for node in order:
        if node not in best or node == last:
            continue
        for follower in _followers(code, index, node):
            if place.get(follower, -1) <= place[node]:
                continue  # back to the start of an inner loop
            value = (best[node][0] + works[follower], best[node][1] - 1)
            if value > best.get(follower, (-1, 0)):
                best[follower], came_from[follower] = value, node
    path = [last]
    while path[-1] != first:
        path.append(came_from[path[-1]])
    return [code[i][1] for i in reversed(path)]


def count(lines: list[str], pattern: str) -> int:
    return sum(re.search(pattern, line) is not None for line in lines)
