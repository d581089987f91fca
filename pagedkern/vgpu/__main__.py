"""Runs a kernel of a PTX file on arrays from files, and lists what the virtual GPU executes.

    python -m pagedkern.vgpu run saxpy.ptx --grid 8 --block 128 \\
        --arg x.npy --arg weights.safetensors:y --arg empty:f32:1000 --arg f32:2.0 --arg i32:1000 --save 2=out.npy
    python -m pagedkern.vgpu kernels saxpy.ptx
    python -m pagedkern.vgpu forms ld.global

An argument is one of
    FILE.npy                   an array, by address
    FILE.safetensors:NAME      a tensor of that file, by address
    zeros:TYPE:4x128           a new tensor of zeros
    empty:TYPE:4x128           a new tensor whose bytes count as unwritten
    TYPE:VALUE                 a scalar: i8 i16 i32 i64 u8 u16 u32 u64 f16 f32 f64 bool
    bytes:00ff..               a struct by value, in hexadecimal
"""

import argparse
import json
import pathlib
import struct
import sys

import numpy as np
import torch

from pagedkern import vgpu
from pagedkern.vgpu.session import CHECKS

TYPES = {
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
    "u16": torch.uint16,
    "u32": torch.uint32,
    "u64": torch.uint64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "bool": torch.bool,
}
# In a checkout: which test executes each form.
TESTED = pathlib.Path(__file__).resolve().parents[2] / "tests" / "vgpu" / "forms.txt"
_SCALARS = {
    **{f"i{8 * n}": code for n, code in ((1, "<b"), (2, "<h"), (4, "<i"), (8, "<q"))},
    **{f"u{8 * n}": code for n, code in ((1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q"))},
    **{"f16": "<e", "f32": "<f", "f64": "<d", "bool": "<?"},
}


class UsageError(Exception):
    """What the command line asks for cannot be done; the text says why."""


def dimensions(text: str) -> tuple[int, ...]:
    """'8', '8,2' or '8x2x1'."""
    try:
        values = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        values = ()
    if not 1 <= len(values) <= 3 or min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one to three positive numbers, as in 8,2,1")
    return values


def _file(text: str) -> tuple[pathlib.Path, str | None]:
    """The path, and the name inside a safetensors file."""
    path, colon, name = text.partition(".safetensors:")
    if colon:
        return pathlib.Path(path + ".safetensors"), name
    return pathlib.Path(text), None


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy where torch allocates, on a 64-byte boundary: numpy's and a mapped file's lie on any 16 bytes, and sectors
    would be counted that no allocation of a device has."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _load(text: str) -> torch.Tensor:
    path, name = _file(text)
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    if path.suffix == ".npy":
        try:
            array = np.load(path, allow_pickle=False)
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from error
        return _aligned(torch.from_numpy(np.ascontiguousarray(array)))
    if path.suffix != ".safetensors":
        raise UsageError(f"{path}: neither .npy nor .safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            names = sorted(file.keys())
            if name is None or name not in names:
                raise UsageError(f"{path}: name one of its tensors, {path}:NAME; it has {', '.join(names)}")
            return _aligned(file.get_tensor(name))
    except SafetensorError as error:
        raise UsageError(f"{path}: {error}") from error


def _new(kind: str, type_name: str, shape: str):
    if type_name not in TYPES:
        raise UsageError(f"{type_name}: unknown type, expected one of {' '.join(TYPES)}")
    try:
        sizes = [int(n) for n in shape.split("x")]
    except ValueError:
        raise UsageError(f"{shape}: expected a shape as in 4x128") from None
    tensor = torch.zeros(sizes, dtype=TYPES[type_name])
    return vgpu.Uninitialized(tensor) if kind == "empty" else tensor


def _scalar(type_name: str, text: str) -> bytes:
    try:
        value = float(text) if type_name[0] == "f" else int(text, 0)
        return struct.pack(_SCALARS[type_name], value)
    except (ValueError, OverflowError, struct.error) as error:
        raise UsageError(f"{type_name}:{text}: {error}") from error


def argument(text: str):
    """The value of one --arg."""
    head, *rest = text.split(":")
    if head in ("zeros", "empty") and len(rest) == 2:
        return _new(head, *rest)
    if head == "bytes" and len(rest) == 1:
        try:
            return bytes.fromhex(rest[0])
        except ValueError as error:
            raise UsageError(f"{text}: {error}") from error
    if head in _SCALARS and len(rest) == 1:
        return _scalar(head, rest[0])
    if head in TYPES and len(rest) == 1:
        raise UsageError(f"{text}: {head} is no type of a scalar")
    return _load(text)


def _check_saves(saves: list[str], arguments: list) -> dict[int, str]:
    """{argument: file}, all of it checked before the kernel runs."""
    out = {}
    for text in saves:
        index, equals, target = text.partition("=")
        if not equals or not index.isdecimal():
            raise UsageError(f"--save {text}: expected ARGUMENT=FILE, as in 2=out.npy")
        if int(index) >= len(arguments) or isinstance(arguments[int(index)], bytes):
            raise UsageError(f"--save {text}: argument {index} is no array")
        path, name = _file(target)
        value = arguments[int(index)]
        value = value.tensor if isinstance(value, vgpu.Uninitialized) else value
        if path.suffix == ".npy":
            if value.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
                raise UsageError(f"--save {text}: .npy has no {value.dtype}; save it to FILE.safetensors:NAME")
        elif name is None:
            raise UsageError(f"--save {text}: expected FILE.npy or FILE.safetensors:NAME")
        out[int(index)] = target
    return out


def _save(saves: dict[int, str], arguments: list) -> None:
    files: dict[pathlib.Path, dict] = {}
    for index, target in saves.items():
        value = arguments[index]
        value = value.tensor if isinstance(value, vgpu.Uninitialized) else value
        path, name = _file(target)
        if name is None:
            np.save(path, value.numpy())
        else:
            files.setdefault(path, {})[name] = value
    for path, tensors in files.items():
        from safetensors.torch import save_file

        save_file(tensors, path)


def _module(path: pathlib.Path) -> vgpu.Module:
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    try:
        return vgpu.Module(path.read_text(errors="replace"))
    except vgpu.ParseError as error:
        raise UsageError(f"{path}: {error}") from error


def run(options) -> None:
    """The `run` command."""
    module = _module(options.ptx)
    name = options.kernel
    if name is None and len(module.kernels) == 1:
        name = module.kernels[0]
    if name not in module.kernels:
        raise UsageError(f"--kernel: {options.ptx} has {', '.join(module.kernels) or 'no kernels'}")
    arguments = [argument(text) for text in options.arg]
    saves = _check_saves(options.save, arguments)
    checks = options.checks if options.checks in ("all", "none") else tuple(options.checks.split(","))
    try:
        settings = vgpu.session(
            seed=options.seed,
            async_completion=options.completion,
            checks=checks,
            max_warp_instructions=options.max_warp_instructions,
            threads=options.threads,
        )
        with settings:
            report = module.launch(name, options.grid, options.block, arguments, options.shared_bytes, options.cluster)
    except (vgpu.LaunchError, ValueError) as error:
        raise UsageError(str(error)) from error
    _save(saves, arguments)
    print(json.dumps(report) if options.json else report)


def kernels(options) -> None:
    """The `kernels` command."""
    module = _module(options.ptx)
    for name in module.kernels:
        info = module.info(name)
        print(
            f"{name}: {info['instructions']} instructions, {info['static_shared_bytes']} bytes of static shared memory"
        )
        for parameter, size in module.parameters(name):
            print(f"    {parameter}: {size} bytes")


def _tests() -> dict[str, str]:
    """{form: the test that executes it}, in a checkout."""
    out, test = {}, ""
    for line in TESTED.read_text().splitlines() if TESTED.is_file() else ():
        if line.startswith("  "):
            out[line.strip()] = test
        else:
            test = line
    return out


def forms(options) -> None:
    """The `forms` command."""
    table = sorted((name, cls) for name, cls in vgpu.instruction_forms() if name.startswith(options.prefix))
    if not table:
        raise UsageError(f"no form begins with {options.prefix!r}")
    tests = _tests()
    width = max(len(name) for name, _ in table)
    for name, cls in table:
        print(f"{name:<{width}}  {cls:<16}  {tests.get(name, '')}".rstrip())
    print(f"{len(table)} forms")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    out = argparse.ArgumentParser(
        prog="python -m pagedkern.vgpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = out.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser("run", help="run a kernel and print its report")
    add.set_defaults(run=run)
    add.add_argument("ptx", type=pathlib.Path)
    add.add_argument("--kernel", help="its name; may be left out where the file has one")
    add.add_argument("--grid", type=dimensions, required=True)
    add.add_argument("--block", type=dimensions, required=True)
    add.add_argument("--cluster", type=dimensions, default=(1, 1, 1))
    add.add_argument("--arg", action="append", default=[], help="one per parameter, in order (see above)")
    add.add_argument("--save", action="append", default=[], help="ARGUMENT=FILE: write that argument after the run")
    add.add_argument("--shared-bytes", type=int, default=0, help="dynamic shared memory")
    add.add_argument("--seed", type=int, default=0, help="order of warps and blocks")
    add.add_argument("--async", dest="completion", choices=("late", "early", "random"), default="late")
    add.add_argument("--checks", default="all", help=f"all, none, or some of {','.join(CHECKS)}")
    add.add_argument("--max-warp-instructions", type=int, default=0, help="a longer run is a fault")
    add.add_argument("--threads", type=int, default=0, help="host threads; 0 for all cores")
    add.add_argument("--json", action="store_true", help="the report as JSON")
    add = commands.add_parser("kernels", help="list the kernels of a PTX file and their parameters")
    add.set_defaults(run=kernels)
    add.add_argument("ptx", type=pathlib.Path)
    add = commands.add_parser("forms", help="list the instruction forms that are executed")
    add.set_defaults(run=forms)
    add.add_argument("prefix", nargs="?", default="", help="only those that begin with it")
    return out


def main(arguments=None) -> int:
    """0; 1 for a kernel that does wrong; 2 for what cannot be run."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except vgpu.KernelFault as fault:
        print(f"fault: {fault}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
