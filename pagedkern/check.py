"""Check mode: rule 9 of the op contract, switched at run time."""

from ._library import switch


class check_mode:
    """Turns check mode on or off, at once and for the whole process; as a context manager, until the block ends.

        pagedkern.check_mode(True)           # from here on
        with pagedkern.check_mode(True):     # in this block
            ...

    In check mode every op looks at what its tensors hold before it touches anything: slots, page ids, lengths,
    positions, `cu_seqlens_q`, scales, and NaN in the inputs, live rows only. The call that was wrong raises a
    RuntimeError that names the op, the argument, the index, the value and the bound. It is slow. The environment
    variable PAGEDKERN_CHECK=1 starts the process in check mode.
    """

    def __init__(self, enabled: bool):
        self._former = bool(switch("pagedkern_check_mode", int(bool(enabled))))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        switch("pagedkern_check_mode", int(self._former))


def is_check_mode() -> bool:
    """Whether check mode is on."""
    return bool(switch("pagedkern_check_mode", -1))
