"""The compiled part, wherever the build put it."""

import importlib.util
import os


def _load():
    alone = os.environ.get("PAGEDKERN_VGPU_EXTENSION")  # an extension built by itself, for work on the virtual GPU
    if alone:
        spec = importlib.util.spec_from_file_location("_vgpu", alone)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    from pagedkern import _C

    return _C.vgpu


core = _load()
KernelFault = core.KernelFault
ParseError = core.ParseError
LaunchError = core.LaunchError


def instruction_forms() -> list[tuple[str, str]]:
    """Every instruction form the virtual GPU executes, with its class."""
    return core.forms()


def find_form(opcode: str) -> str | None:
    """The form that executes an opcode as PTX text writes it, or None."""
    return core.find_form(opcode)


def executed_forms() -> dict[str, int]:
    """Warp instructions executed by this process so far, by form."""
    return core.executed_forms()
