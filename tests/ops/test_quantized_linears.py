"""torch.ops.pagedkern_cpu.quantized_linears against float64 on the same rounded inputs."""

import pytest
import torch

import pagedkern  # noqa: F401 - loads the op library
from pagedkern.quantized import Chain, QuantizedLinear, QuantizedTensor, step

OP = torch.ops.pagedkern_cpu.quantized_linears.default
NONE = torch.empty(0)
BITS = (4, 8)


def make_weight(bits, rows, columns, seed=0):
    """A random QuantizedTensor, and its weights in float64."""
    generator = torch.Generator().manual_seed(seed)
    groups = columns // 32
    scale = (torch.rand(rows, groups, generator=generator) * 0.02 + 0.001).half()
    width = 16 if bits == 4 else 32
    values = torch.randint(0, 256, (rows, groups, width), generator=generator, dtype=torch.uint8)
    if bits == 8:
        weight = values.view(torch.int8).double() * scale.double().unsqueeze(-1)
        return QuantizedTensor(values, scale), weight.flatten(1)
    minimum = (torch.rand(rows, groups, generator=generator) * -0.2).half()
    numbers = torch.cat((values & 15, values >> 4), dim=-1).double()
    weight = numbers * scale.double().unsqueeze(-1) + minimum.double().unsqueeze(-1)
    return QuantizedTensor(values, scale, minimum), weight.flatten(1)


def rounded(x):
    """What the op takes x for, and half a step of each group: 8 bits over the range of 32 values and 0."""
    groups = x.float().unflatten(-1, (-1, 32))
    below, above = groups.amin(-1, keepdim=True).clamp(max=0).neg(), groups.amax(-1, keepdim=True).clamp(min=0)
    span = below + above
    inverse = torch.where(span < 1e-30, torch.zeros_like(span), torch.full_like(span, 255) / span)
    zero = (below * inverse).round()
    values = ((groups * inverse).round() + zero).clamp(0, 255)
    step = (span / torch.full_like(span, 255)).double()
    return ((values - zero).double() * step).flatten(-2), (step / 2).expand_as(groups).flatten(-2)


def normalised(x, norm, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * norm.double()


def check(actual, expected, size, dtype=torch.float32):
    """Sums in float32, a rounding to the output's dtype; `size` is the sum of the magnitudes that were added."""
    allowed = 2e-6 * size + {torch.float32: 0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype] * expected.abs()
    assert ((actual.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", [32, 96, 576])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16, 17, 33, 100])
@pytest.mark.parametrize("outputs", [1, 16, 40, 192])
def test_product(bits, columns, rows, outputs):
    torch.manual_seed(rows * 1000 + outputs)
    stored, weight = make_weight(bits, outputs, columns)
    x = torch.randn(rows, columns)
    x8, _ = rounded(x)
    check(QuantizedLinear(stored)(x), x8 @ weight.T, x8.abs() @ weight.abs().T)


@pytest.mark.parametrize("bits", BITS)
def test_rounding_the_inputs_costs_half_a_percent(bits):
    torch.manual_seed(1)
    stored, weight = make_weight(bits, 256, 1024)
    x = torch.randn(20, 1024)
    y, exact = QuantizedLinear(stored)(x), x.double() @ weight.T
    assert 0.001 < (y - exact).norm() / exact.norm() < 0.006


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [1, 7, 20])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_all_that_a_step_can_do(bits, rows, bias, accumulate, gated):
    torch.manual_seed(rows)
    outputs, columns, eps = 96, 64, 1e-5
    stored, weight = make_weight(bits, outputs, columns)
    norm, b = torch.rand(columns) + 0.5, torch.randn(outputs)
    linear = QuantizedLinear(stored, b if bias else None)
    x = torch.randn(rows, columns) * 3
    out = torch.randn(rows, outputs // 2 if gated else outputs)
    before = out.clone()
    Chain([step(linear, 0, 1, norm, accumulate, gated)], eps)([x, out])
    # A value that lies between two steps may fall to either side, as the norm is summed in another order.
    exact = normalised(x, norm, eps)
    x8, half_step = rounded(exact)
    slack = half_step @ weight.abs().T
    y, low = x8 @ weight.T + b * bias, 1e-4
    if gated:
        gate, up = y.chunk(2, dim=-1)
        gate_slack, up_slack = slack.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
        slack = 1.1 * gate_slack * (up.abs() + up_slack) + gate.abs() * up_slack
    error = (out.double() - y - before * accumulate).abs()
    assert (error <= 0.2 * slack + low).all()
    assert (error > low * (1 + y.abs())).double().mean() < 0.02  # and that is rare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_dtypes_and_strides(dtype, out_dtype, accumulate):
    """Columns of wider tensors; what lies beside them is left alone."""
    torch.manual_seed(2)
    stored, weight = make_weight(4, 40, 64)
    wide_x, wide_out = torch.randn(9, 200).to(dtype), torch.randn(9, 100).to(out_dtype)
    x, out = wide_x[:, 3:67], wide_out[:, 7:47]
    before = wide_out.clone()
    Chain([step(QuantizedLinear(stored), 0, 1, accumulate=accumulate)], 0.0)([x, out])
    x8, _ = rounded(x)
    expected = x8 @ weight.T + before[:, 7:47].double() * accumulate
    check(out, expected, x8.abs() @ weight.abs().T + before[:, 7:47].abs(), out_dtype)
    assert torch.equal(wide_out[:, :7], before[:, :7]) and torch.equal(wide_out[:, 47:], before[:, 47:])


def mlp_chain(seed=0):
    up, down = (QuantizedLinear(make_weight(4, *shape, seed)[0]) for shape in ((192, 64), (64, 96)))
    head = QuantizedLinear(make_weight(8, 300, 64, seed)[0])
    norm = torch.rand(64, generator=torch.Generator().manual_seed(3)) + 0.5
    return [step(up, 0, 1, norm, gated=True), step(down, 1, 0, accumulate=True), step(head, 0, 2, norm)]


def buffers_for(rows):
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(rows, 64, generator=generator), torch.empty(rows, 96).bfloat16(), torch.empty(rows, 300)]


@pytest.mark.parametrize("rows", [1, 16, 17, 70])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_chain_gives_the_bits_of_its_steps(rows, threads):
    steps = mlp_chain()
    one_by_one, chained = buffers_for(rows), buffers_for(rows)
    for one in steps:
        Chain([one], 1e-5)(one_by_one)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for _ in range(5):
            chained = buffers_for(rows)
            Chain(steps, 1e-5)(chained)
            for a, b in zip(one_by_one, chained, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.set_num_threads(before)


def test_a_row_gives_the_same_bits_in_any_company():
    together = buffers_for(70)
    alone = [buffer.clone() for buffer in together]
    Chain(mlp_chain(), 1e-5)(together)
    for row in range(70):
        Chain(mlp_chain(), 1e-5)([buffer[row : row + 1] for buffer in alone])
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("bits", BITS)
def test_what_is_not_finite_stays_visible(bad, bits):
    stored, _ = make_weight(bits, 48, 96)
    x = torch.randn(3, 96)
    x[1, 40] = bad
    y = QuantizedLinear(stored)(x)
    assert not y[1].isfinite().any() and y[0].isfinite().all() and y[2].isfinite().all()
    y = QuantizedLinear(stored)(x, norm=torch.ones(96), eps=1e-5)
    assert not y[1].isfinite().any() and y[0].isfinite().all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-32, 1e-20, 1e30])
def test_sizes_far_from_one(bits, size):
    stored, weight = make_weight(bits, 16, 64)
    x = torch.randn(2, 64) * size
    exact = x.double() @ weight.T
    bound = 0.02 * x.double().abs() @ weight.abs().T + 1e-29
    assert ((QuantizedLinear(stored)(x).double() - exact).abs() <= bound).all()


def test_one_sided_groups_use_all_steps():
    stored, weight = make_weight(4, 16, 64)
    x = torch.rand(4, 64) + 3
    x[:2] *= -1
    x8, _ = rounded(x)
    check(QuantizedLinear(stored)(x), x8 @ weight.T, x8.abs() @ weight.abs().T)


def arguments(**changes):
    stored, _ = make_weight(4, 32, 64)
    call = dict(
        buffers=[torch.zeros(3, 64), torch.zeros(3, 32), torch.zeros(3, 16)], input=[0], output=[1],
        weight=[QuantizedLinear(stored).weight], norm=[NONE], bias=[NONE], flags=[0], eps=1e-5,
    )  # fmt: skip
    return call | changes


def test_the_arguments_of_the_error_cases_are_right_otherwise():
    OP(**arguments())
    OP(**arguments(buffers=[torch.zeros(0, 64), torch.zeros(0, 32)]))
    OP(**arguments(input=[], output=[], weight=[], norm=[], bias=[], flags=[]))


OVERLAP = torch.zeros(3, 96)
WEIGHT = arguments()["weight"][0]
IN_WEIGHT = WEIGHT.view(-1)[: 3 * 128].view(torch.float32).view(3, 32)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(buffers=[]), "buffers must hold the inputs and outputs, got none"),
        (dict(buffers=[torch.zeros(3, 64), torch.zeros(2, 32)]), r"buffers\[1\] must have shape .*, got \[2, 32\]"),
        (dict(buffers=[torch.zeros(3, 64), torch.zeros(3, 32, 1)]), r"buffers\[1\] must have shape"),
        (dict(buffers=[torch.zeros(3, 64, dtype=torch.int32), torch.zeros(3, 32)]), r"buffers\[0\] must be .*int32"),
        (dict(buffers=[torch.zeros(64, 3).T, torch.zeros(3, 32)]), r"buffers\[0\] must .*contiguous"),
        (dict(buffers=[OVERLAP[:, :64], OVERLAP[:, 60:92]]), r"buffers\[1\] must not .*buffers\[0\]"),
        (dict(buffers=[torch.zeros(3, 64), torch.zeros(1, 32).expand(3, 32)]), r"buffers\[1\] must not overlap itself"),
        (dict(input=[3]), r"input\[0\] must be the number of a buffer, 0 to 2, got 3"),
        (dict(output=[-1]), r"output\[0\] must be the number of a buffer, 0 to 2, got -1"),
        (dict(output=[0]), r"output\[0\] must be another buffer than its input, got 0"),
        (dict(input=[0, 0]), "input must have as many entries as weight \\(1\\), got 2"),
        (dict(output=[]), "output must have as many entries as weight"),
        (dict(norm=[]), "norm must have as many entries as weight"),
        (dict(bias=[]), "bias must have as many entries as weight"),
        (dict(flags=[]), "flags must have as many entries as weight"),
        (dict(flags=[4]), r"flags\[0\] must be a sum of 1 \(accumulate\) and 2 \(gated\), got 4"),
        (dict(flags=[-1]), r"flags\[0\] must be a sum"),
        (dict(flags=[2]), r"weight\[0\] must have shape \[panels=4, .*got \[2, 2, 352\]"),
        (dict(flags=[2], buffers=[torch.zeros(3, 64), torch.zeros(3, 24)]), r"buffers\[1\] must have a multiple of 16"),
        (dict(weight=[WEIGHT.view(torch.int8)]), r"weight\[0\] must be uint8"),
        (dict(weight=[WEIGHT[:, :1]]), r"weight\[0\] must have shape"),
        (dict(weight=[WEIGHT[:1]]), r"weight\[0\] must have shape"),
        (dict(weight=[WEIGHT[..., :350].contiguous()]), r"weight\[0\] must have groups of 352 .* or 576 .*got 350"),
        (dict(weight=[WEIGHT.transpose(0, 1)]), r"weight\[0\] must .*contiguous"),
        (dict(buffers=[torch.zeros(3, 60), torch.zeros(3, 32)]), r"weight\[0\] must get an input of a multiple of 32"),
        (dict(norm=[torch.ones(63)]), r"norm\[0\] must have shape \[in_features=64\], got \[63\]"),
        (dict(norm=[torch.ones(64).bfloat16()]), r"norm\[0\] must be float32"),
        (dict(norm=[torch.ones(128)[::2]]), r"norm\[0\] must .*contiguous"),
        (dict(bias=[torch.ones(64)]), r"bias\[0\] must have shape \[out_features=32\], got \[64\]"),
        (dict(eps=-1.0), "eps must be finite and not negative, got -1"),
        (dict(eps=float("nan")), "eps must be finite"),
        (dict(weight=[WEIGHT], buffers=[torch.zeros(3, 64), IN_WEIGHT]), "must not"),
    ],
)  # fmt: skip
def test_errors(changes, message):
    call = arguments(**changes)
    before = [buffer.clone() for buffer in call["buffers"]]
    with pytest.raises(RuntimeError, match=f"quantized_linears: {message}" if message != "must not" else message):
        OP(**call)
    assert all(map(torch.equal, call["buffers"], before))


def test_opcheck():
    steps = mlp_chain()
    call = Chain(steps, 1e-5)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    buffers = buffers_for(3)
    buffers[1].zero_(), buffers[2].zero_()
    torch.library.opcheck(OP, (buffers, *call._arguments), test_utils=utils)
