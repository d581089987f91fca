"""How launches run: order, completion of asynchronous operations, checks."""

import contextlib
import dataclasses
import numbers
import threading

from pagedkern.vgpu._core import core
from pagedkern.vgpu.report import Report

CHECKS = ("uninitialized", "races", "global_races", "barriers", "async")
_COMPLETION = {"early": 0, "late": 1, "random": 2}
_BITS = {"seed": 64, "max_warp_instructions": 64, "threads": 31}
_state = threading.local()


@dataclasses.dataclass(eq=False)  # two with the same settings are still two
class Session:
    """The settings of the launches made while it is open, and their reports.

    seed: order of warps and blocks; 0 is the natural one.
    async_completion: "early" (at once), "late" (at the last legal moment, destinations poisoned until then), "random".
    checks: "all", "none" or names out of CHECKS. Bounds and alignment are always checked.
    max_warp_instructions: a launch that runs longer is a fault; 0 for no limit.
    """

    seed: int = 0
    async_completion: str = "late"
    checks: str | tuple[str, ...] = "all"
    counters: bool = True
    max_warp_instructions: int = 0
    threads: int = 0
    _reports: list[Report] = dataclasses.field(default_factory=list, repr=False)

    def __post_init__(self):
        if self.async_completion not in _COMPLETION:
            raise ValueError(f"async_completion: got {self.async_completion!r}, expected one of {sorted(_COMPLETION)}")
        chosen = CHECKS if self.checks == "all" else () if self.checks == "none" else tuple(self.checks)
        unknown = [c for c in chosen if c not in CHECKS]
        if isinstance(self.checks, str) and self.checks not in ("all", "none") or unknown:
            raise ValueError(f"checks: got {self.checks!r}, expected 'all', 'none' or names out of {CHECKS}")
        self.chosen_checks = chosen
        for name, bits in _BITS.items():
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or not 0 <= value < 2**bits:
                raise ValueError(f"{name}: got {value!r}, expected a whole number in [0, 2^{bits})")

    @property
    def reports(self) -> list[Report]:
        """One per launch so far, of modules and of compiled host code (torch.ops.pagedkern_vgpu.*) alike."""
        self._collect()
        return self._reports

    def _collect(self) -> None:
        if current() is self:
            self._reports += map(Report, core.take_reports())

    def options(self) -> dict:
        """The settings as the executor takes them."""
        return {
            "seed": self.seed,
            "async_completion": _COMPLETION[self.async_completion],
            "counters": self.counters,
            "max_warp_instructions": self.max_warp_instructions,
            "threads": self.threads,
            **{name: name in self.chosen_checks for name in CHECKS},
        }


def current() -> Session:
    """The innermost open session of this thread, or one with the defaults."""
    stack = getattr(_state, "stack", None)
    return stack[-1] if stack else Session()


def _enter(opened: Session | None) -> None:
    """Makes it the one that governs launches of compiled host code in this thread; None: no session is open."""
    core.set_options(opened.options() if opened else None)


@contextlib.contextmanager
def session(**settings):
    """Opens a Session for the launches of this thread inside the `with`."""
    opened = Session(**settings)
    if not hasattr(_state, "stack"):
        _state.stack = []
    if _state.stack:
        _state.stack[-1]._collect()  # what ran before this one opened is the outer session's
    _state.stack.append(opened)
    _enter(opened)
    try:
        yield opened
    finally:
        opened._collect()
        _state.stack.remove(opened)
        _enter(_state.stack[-1] if _state.stack else None)
