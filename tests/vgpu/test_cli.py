"""python -m pagedkern.vgpu: kernels on arrays from files, and the worked example of the documentation."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedkern import vgpu
from pagedkern.vgpu.__main__ import main

README = pathlib.Path(__file__).parents[2] / "csrc" / "vgpu" / "README.md"
SCALE = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 y, .param .f32 factor, .param .u32 n)
{
  .reg .pred %p<2>;
  .reg .b32 %r<8>;
  .reg .f32 %f<4>;
  .reg .b64 %d<8>;
  ld.param.u64 %d0, [x];
  ld.param.u64 %d1, [y];
  ld.param.f32 %f0, [factor];
  ld.param.u32 %r0, [n];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.u32 %r4, %r1, %r2, %r3;
  setp.ge.u32 %p1, %r4, %r0;
  @%p1 bra END;
  mul.wide.u32 %d2, %r4, 4;
  add.s64 %d3, %d0, %d2;
  add.s64 %d4, %d1, %d2;
  ld.global.f32 %f1, [%d3];
  mul.f32 %f2, %f1, %f0;
  st.global.f32 [%d4], %f2;
END:
  ret;
}
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scale.ptx").write_text(SCALE)
    np.save("x.npy", np.arange(100, dtype=np.float32))
    return tmp_path


RUN = ["run", "scale.ptx", "--grid", "4", "--block", "32"]
ARGS = ["--arg", "x.npy", "--arg", "empty:f32:100", "--arg", "f32:2.5", "--arg", "i32:100"]


@pytest.mark.parametrize("seed", ["0", "1", "2"])
@pytest.mark.parametrize("mode", ["late", "early", "random"])
def test_run_on_npy(place, capsys, mode, seed):
    assert main([*RUN, *ARGS, "--save", "1=y.npy", "--seed", seed, "--async", mode]) == 0
    np.testing.assert_array_equal(np.load("y.npy"), np.arange(100, dtype=np.float32) * 2.5)
    text = capsys.readouterr().out
    assert re.search(r"^kernel +scale$", text, re.M)
    assert re.search(r"^global_load_bytes +400$", text, re.M)


def test_run_on_safetensors(place, capsys):
    save_file({"a": torch.arange(100.0), "b": torch.zeros(4)}, "in.safetensors")
    arguments = ["--arg", "in.safetensors:a", "--arg", "zeros:f32:10x10", "--arg", "f32:-1", "--arg", "u32:0x64"]
    saves = ["--save", "1=out.safetensors:y", "--save", "0=out.safetensors:x"]
    assert main([*RUN, "--kernel", "scale", *arguments, *saves, "--json"]) == 0
    out = load_file("out.safetensors")
    assert torch.equal(out["y"], -torch.arange(100.0).view(10, 10))
    assert torch.equal(out["x"], torch.arange(100.0))
    report = json.loads(capsys.readouterr().out)
    assert (report["kernel"], report["grid"], report["global_store_bytes"]) == ("scale", [4, 1, 1], 400)


def test_bytes_and_types_without_numpy(place):
    """A scalar by its bytes, and a bfloat16 tensor, which only safetensors can hold."""
    arguments = ["--arg", "x.npy", "--arg", "empty:bf16:200", "--arg", "bytes:0000803f", "--arg", "i32:100"]
    assert main([*RUN, *arguments, "--save", "1=out.safetensors:y"]) == 0
    assert torch.equal(load_file("out.safetensors")["y"].view(torch.float32), torch.arange(100.0))


def test_fault(place, capsys):
    arguments = [*ARGS[:-1], "i32:101"]
    assert main([*RUN, *arguments, "--save", "1=y.npy"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("fault: out_of_bounds: read of 4 bytes")
    assert "kernel scale, block (3,0,0), thread (4,0,0)" in error
    assert not pathlib.Path("y.npy").exists()


def test_checks_may_be_chosen(place, capsys):
    arguments = ["--arg", "empty:f32:100", *ARGS[2:]]
    assert main([*RUN, *arguments]) == 1
    assert "that nothing wrote" in capsys.readouterr().err
    assert main([*RUN, *arguments, "--checks", "races,async"]) == 0
    assert main([*RUN, *arguments, "--checks", "none"]) == 0


def test_shared_bytes_cluster_and_budget(place, capsys):
    assert main([*RUN, *ARGS, "--shared-bytes", "1024", "--cluster", "2"]) == 0
    assert main([*RUN, *ARGS, "--cluster", "3"]) == 2
    assert "does not divide" in capsys.readouterr().err
    assert main([*RUN, *ARGS, "--max-warp-instructions", "5", "--threads", "1"]) == 1
    assert "budget" in capsys.readouterr().err


WRONG = {
    "no such kernel": ([*RUN, "--kernel", "other", *ARGS], "scale.ptx has scale"),
    "no such file": (["run", "none.ptx", "--grid", "1", "--block", "1"], "none.ptx: no such file"),
    "no such array": ([*RUN, "--arg", "z.npy"], "z.npy: no such file"),
    "other kind of file": ([*RUN, "--arg", "scale.ptx"], "neither .npy nor .safetensors"),
    "broken array": ([*RUN, "--arg", "broken.npy"], "broken.npy: "),
    "broken tensors": ([*RUN, "--arg", "broken.safetensors:a"], "broken.safetensors: "),
    "too few arguments": ([*RUN, *ARGS[:4]], "got 2 arguments, expected 4"),
    "type of a parameter": ([*RUN, *ARGS[:4], "--arg", "f64:1", "--arg", "i32:1"], "got 8 bytes, expected 4"),
    "array for a scalar": ([*RUN, *ARGS[:6], "--arg", "x.npy"], "parameter n: a pointer needs 8 bytes"),
    "scalar out of range": ([*RUN, "--arg", "i8:200"], "i8:200: "),
    "scalar that is none": ([*RUN, "--arg", "i32:many"], "i32:many: "),
    "scalar of a tensor type": ([*RUN, "--arg", "bf16:1"], "bf16 is no type of a scalar"),
    "unknown type": ([*RUN, "--arg", "zeros:f31:4"], "f31: unknown type"),
    "shape": ([*RUN, "--arg", "zeros:f32:4y"], "4y: expected a shape"),
    "tensor without a name": ([*RUN, "--arg", "in.safetensors"], "it has a, b"),
    "tensor of another name": ([*RUN, "--arg", "in.safetensors:c"], "it has a, b"),
    "save of a scalar": ([*RUN, *ARGS, "--save", "2=y.npy"], "argument 2 is no array"),
    "save without a file": ([*RUN, *ARGS, "--save", "y.npy"], "expected ARGUMENT=FILE"),
    "save of bfloat16": ([*RUN, "--arg", "zeros:bf16:4", "--save", "0=y.npy"], ".npy has no torch.bfloat16"),
    "save to a file without names": ([*RUN, *ARGS, "--save", "1=y.safetensors"], "FILE.safetensors:NAME"),
    "unknown check": ([*RUN, *ARGS, "--checks", "races,typos"], "typos"),
    "unknown instruction": (["run", "bad.ptx", "--grid", "1", "--block", "1"], "frob.u32"),
    "no such form": (["forms", "frob"], "no form begins with 'frob'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_clear_errors(place, capsys, name):
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, "in.safetensors")
    for broken in ("broken.npy", "broken.safetensors"):
        pathlib.Path(broken).write_bytes(b"nothing")
    pathlib.Path("bad.ptx").write_text(SCALE.replace("mul.f32", "frob.u32"))
    command, message = WRONG[name]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


@pytest.mark.parametrize("grid", ["0", "1,2,3,4", "a", ""])
def test_dimensions_are_checked(place, capsys, grid):
    with pytest.raises(SystemExit) as caught:
        main(["run", "scale.ptx", "--grid", grid, "--block", "32"])
    assert caught.value.code == 2
    assert "one to three positive numbers" in capsys.readouterr().err


def test_kernels(place, capsys):
    assert main(["kernels", "scale.ptx"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("scale: 18 instructions")
    assert "factor: 4 bytes" in text


def test_forms(capsys):
    assert main(["forms", "bar."]) == 0
    lines = capsys.readouterr().out.splitlines()
    expected = {name for name, _ in vgpu.instruction_forms() if name.startswith("bar.")}
    assert {line.split()[0] for line in lines[:-1]} == expected
    assert all(line.split()[1] == "barrier" for line in lines[:-1])
    assert lines[-1] == f"{len(expected)} forms"


# ---- the documentation


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```$", README.read_text(), re.M | re.S)


def without_spaces(text):
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def test_worked_example(tmp_path):
    """Source, commands and output of the documentation are what one gets."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not pathlib.Path(nvcc).exists():
        pytest.skip("nvcc is not installed")
    (source,), (commands,), (fault, report) = blocks("cuda"), blocks("sh"), blocks("text")
    root = str(pathlib.Path(vgpu.__file__).parents[2])
    python_path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    path = os.pathsep.join([str(pathlib.Path(nvcc).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "PYTHONPATH": python_path}
    commands = commands.replace("python ", f"{sys.executable} ")

    def run():
        return subprocess.run(commands, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)

    (tmp_path / "turn.cu").write_text(source)
    wrong = run()
    assert wrong.returncode == 1
    assert without_spaces(wrong.stderr.replace(str(tmp_path), "...")) == without_spaces(fault)

    mended = source.replace("x[threadIdx.x];\n", "x[threadIdx.x];\n  __syncthreads();\n")
    assert mended != source
    (tmp_path / "turn.cu").write_text(mended)
    right = run()
    assert right.returncode == 0, right.stderr
    printed = [line for line in without_spaces(right.stdout) if not line.startswith("seconds")]
    assert printed == without_spaces(report)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), np.arange(128)[::-1])
