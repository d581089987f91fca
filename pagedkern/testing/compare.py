"""The one comparison: how far a result is from the float64 reference, and whether that is within the contract."""

from dataclasses import dataclass

import torch

# Norm of the difference over the norm, over the whole output; a single row may have ROW_FACTOR times that.
NORM_TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 3e-6}
ROW_FACTOR = 4
LSE_ABSOLUTE, LSE_ABSOLUTE_FP8, LSE_RELATIVE = 1e-3, 2e-3, 2e-6


@dataclass(frozen=True)
class Difference:
    """abs: greatest absolute error; rel: norm of the error over the norm; row: the worst row's rel."""

    abs: float
    rel: float
    row: float
    worst_row: tuple[int, ...]
    cosine: float

    def __str__(self) -> str:
        return (
            f"abs {self.abs:.3e}, rel {self.rel:.3e}, worst row {self.row:.3e} at {self.worst_row}, "
            f"cosine {self.cosine:.9f}"
        )


def difference(actual: torch.Tensor, expected: torch.Tensor) -> Difference:
    """Rows are the last dimension. Inf and NaN must stand in the same places, and are then left out."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    for name, mask in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = mask(actual) != mask(expected)
        if wrong.any():
            where = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{name} in other places than expected: {int(wrong.sum())} elements, first at {where}: "
                f"{actual[where].item()}, expected {expected[where].item()}"
            )
    finite = expected.isfinite()
    actual, expected = torch.where(finite, actual, 0.0), torch.where(finite, expected, 0.0)
    error = actual - expected
    if error.numel() == 0:
        return Difference(0.0, 0.0, 0.0, (), 1.0)
    rows = _ratio(error.norm(dim=-1), expected.norm(dim=-1))
    worst = int(rows.argmax())
    norms = actual.norm() * expected.norm()
    return Difference(
        abs=error.abs().max().item(),
        rel=_ratio(error.norm(), expected.norm()).item(),
        row=rows.max().item(),
        worst_row=tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), rows.shape)),
        cosine=((actual * expected).sum() / norms).item() if norms > 0 else 1.0,
    )


def _ratio(error: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """error / norm, where nothing over nothing is 0 and something over nothing is infinite."""
    return torch.where(error == 0, 0.0, error / norm)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, what: str = "out") -> Difference:
    """The contract's tolerance for results computed in `dtype`."""
    try:
        found = difference(actual, expected)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None
    tolerance = NORM_TOLERANCE[dtype]
    assert found.rel <= tolerance, f"{what}: {found}; expected rel <= {tolerance}"
    assert found.row <= ROW_FACTOR * tolerance, f"{what}: {found}; expected every row <= {ROW_FACTOR * tolerance}"
    return found


def assert_lse_close(actual: torch.Tensor, expected: torch.Tensor, fp8: bool = False, what: str = "lse") -> None:
    difference(actual, expected)
    finite = expected.isfinite()
    error = (actual.double() - expected)[finite].abs()
    bound = (LSE_ABSOLUTE_FP8 if fp8 else LSE_ABSOLUTE) + LSE_RELATIVE * expected[finite].abs()
    over = error > bound
    assert not over.any(), (
        f"{what}: {int(over.sum())} of {over.numel()} off by up to {error.max():.3e}, bound {bound[over][0]:.3e}"
    )


def assert_same_bytes(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Bit for bit, NaN payloads included."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    wrong = actual.cpu().view(size) != expected.cpu().view(size)
    if wrong.any():
        where = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ, first at {where}: "
            f"{actual[where].item()} ({actual.cpu().view(size)[where].item():#x}), "
            f"expected {expected[where].item()} ({expected.cpu().view(size)[where].item():#x})"
        )
