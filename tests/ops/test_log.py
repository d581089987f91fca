"""PAGEDKERN_LOG: what each attention call runs with, once per shape."""

import os
import subprocess
import sys

CODE = """
import sys
sys.path.insert(0, "tests/ops")
import torch
from op_args import MAKERS
import pagedkern
from pagedkern import log
for tokens in (3, 3, 2):
    args = MAKERS["paged_attention"]()
    if tokens == 2:
        args |= {"out": args["out"][:2], "query": args["query"][:2], "lse": args["lse"][:2], "cu_seqlens_q": None,
                 "seq_lens": args["seq_lens"][:2], "block_table": args["block_table"][:2]}
    torch.ops.pagedkern.paged_attention(**args)
    log.config("example", tile=64)
"""


def lines(value):
    environment = os.environ | {"PAGEDKERN_LOG": value}
    run = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    return [line for line in run.stderr.splitlines() if line.startswith("pagedkern:")]


def test_once_per_shape():
    logged = lines("1")
    attention = [line for line in logged if "paged_attention" in line]
    assert len(attention) == 2
    assert "num_tokens 3, num_seqs 3, heads 4/2, head_dim 16, block_size 4" in attention[0]
    assert "num_tokens 2, num_seqs 2" in attention[1]
    assert [line for line in logged if "example" in line] == ["pagedkern: example: tile 64"]


def test_silent_when_off():
    assert lines("0") == []
