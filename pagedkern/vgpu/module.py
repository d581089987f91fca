"""PTX modules and their launches."""

import dataclasses
import struct

from pagedkern.vgpu import session as _session
from pagedkern.vgpu._core import LaunchError, core
from pagedkern.vgpu.report import Report


@dataclasses.dataclass
class TensorMap:
    """A 128-byte tensor map, passed by value; `tensor` is the memory it describes."""

    data: bytes
    tensor: object = None


@dataclasses.dataclass
class Uninitialized:
    """A tensor or array whose bytes count as unwritten: reading one before the kernel wrote it is a fault."""

    tensor: object


@dataclasses.dataclass
class Freed:
    """A tensor or array whose memory counts as freed: a kernel that touches it is at fault."""

    tensor: object


_WRAPPERS = (Uninitialized, Freed)


def _span(value):
    """(address, bytes) of the memory a torch tensor or numpy array may touch, or None for other values."""
    if hasattr(value, "data_ptr"):
        if value.device.type != "cpu":
            raise LaunchError(f"a tensor on {value.device}; the virtual GPU takes CPU tensors")
        if value.numel() == 0:
            return value.data_ptr(), 0
        last = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
        return value.data_ptr(), (last + 1) * value.element_size()
    interface = getattr(value, "__array_interface__", None)
    if interface is None:
        return None
    address = interface["data"][0]
    if value.size == 0:
        return address, 0
    low = sum((n - 1) * s for n, s in zip(value.shape, value.strides, strict=True) if s < 0)
    high = sum((n - 1) * s for n, s in zip(value.shape, value.strides, strict=True) if s > 0)
    return address + low, high - low + value.itemsize


def _pointer(value) -> int:
    """The address of a tensor's or array's first element, which is not the lowest one where strides are negative."""
    return value.data_ptr() if hasattr(value, "data_ptr") else value.__array_interface__["data"][0]


def _scalar(value, size: int, name: str) -> bytes:
    if isinstance(value, bool):
        value = int(value)
    if isinstance(value, int):
        if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
            raise LaunchError(f"parameter {name}: {value} does not fit {size} bytes")
        return (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")
    if isinstance(value, float):
        formats = {2: "<e", 4: "<f", 8: "<d"}
        if size not in formats:
            raise LaunchError(f"parameter {name}: a float cannot fill {size} bytes")
        return struct.pack(formats[size], value)
    raise LaunchError(
        f"parameter {name}: got {type(value).__name__}, expected a tensor, array, int, float, bytes or TensorMap"
    )


def _dim(value) -> tuple[int, int, int]:
    value = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(value) <= 3 or any(not 0 < v < 1 << 32 for v in value):
        raise LaunchError(f"dimensions: got {value}, expected one to three positive numbers")
    return value + (1,) * (3 - len(value))


class Module:
    """Parsed PTX. Anything that cannot be executed exactly is a ParseError naming all of it."""

    def __init__(self, ptx: str):
        self._program = core.Program(ptx)

    @property
    def kernels(self) -> list[str]:
        """The kernels' names."""
        return self._program.kernels

    def info(self, kernel: str) -> dict:
        """Sizes of a kernel: instructions, registers, static shared memory, parameters."""
        return self._program.info(kernel)

    def parameters(self, kernel: str) -> list[tuple[str, int]]:
        """Name and size in bytes of a kernel's parameters."""
        return [(name, size) for name, _, size, _ in self._program.params(kernel)]

    def forms(self, kernel: str) -> set[str]:
        """The instruction forms a kernel uses."""
        return self._program.forms(kernel)

    def variables(self) -> dict[str, tuple[int, int]]:
        """Address and size of the module's .global and .const variables."""
        return self._program.variables()

    def launch(
        self, kernel, grid, block, args=(), shared_bytes=0, cluster=(1, 1, 1), memory=(), names=None
    ) -> Report | None:
        """Runs a kernel to its end and returns the report. Inside a `capture` it is kept, and there is none.

        args: one per parameter: torch CPU tensors and numpy arrays (by address), int, float, bytes (a by-value
            struct), TensorMap. `Uninitialized` and `Freed` say what the bytes of a tensor or array count as.
        memory: more tensors or arrays the kernel reaches through pointers inside structs.
        """
        slots = self._program.params(kernel)
        if len(args) != len(slots):
            raise LaunchError(f"kernel {kernel}: got {len(args)} arguments, expected {len(slots)}")
        ranges, params = [], bytearray()
        for k, (value, (name, offset, size, _)) in enumerate(zip(args, slots, strict=True)):
            label = names[k] if names else f"argument {k}"
            params.extend(bytes(offset - len(params)))
            params.extend(self._argument(value, size, name, label, ranges))
        for k, value in enumerate(memory):
            self._register(value, f"memory {k}", ranges)
        shape = _dim(grid), _dim(block), _dim(cluster), shared_bytes
        kept = args, memory  # as long as they are pointed at

        def run() -> Report:
            current = _session.current()
            program, _ = self._program, kept
            report = Report(core.launch(program, kernel, *shape, bytes(params), ranges, current.options()))
            current.reports.append(report)
            return report

        if core.is_capturing():
            return core.capture_call(run)
        return run()

    @staticmethod
    def _register(value, label, ranges):
        inner = value.tensor if isinstance(value, _WRAPPERS) else value
        span = _span(inner)
        if span is None:
            raise LaunchError(f"{label}: got {type(inner).__name__}, expected a tensor or an array")
        if span[1]:
            ranges.append((*span, label, not isinstance(value, Uninitialized), isinstance(value, Freed)))
        return _pointer(inner)

    def _argument(self, value, size, name, label, ranges) -> bytes:
        if isinstance(value, TensorMap):
            if value.tensor is not None:
                self._register(value.tensor, label, ranges)
            value = value.data
        if isinstance(value, (bytes, bytearray)):
            if len(value) != size:
                raise LaunchError(f"parameter {name}: got {len(value)} bytes, expected {size}")
            return bytes(value)
        inner = value.tensor if isinstance(value, _WRAPPERS) else value
        if hasattr(inner, "data_ptr") or (hasattr(inner, "__array_interface__") and getattr(inner, "shape", ()) != ()):
            if size != 8:
                raise LaunchError(f"parameter {name}: a pointer needs 8 bytes, the parameter has {size}")
            return self._register(value, label, ranges).to_bytes(8, "little")
        if hasattr(inner, "item"):
            inner = inner.item()
        return _scalar(inner, size, name)
