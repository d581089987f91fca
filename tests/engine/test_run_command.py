"""What `pagedkern-engine run` prints."""

import pytest

from engine_min.cli import StreamPrinter, main


def test_one_stream_is_printed_as_it_comes(capsys):
    printer = StreamPrinter(1)
    for text, finished in (("One", False), (" two\n", False), ("three", True)):
        printer.show(0, text, finished)
    assert capsys.readouterr().out == "One two\nthree\n"


def test_several_streams_are_printed_in_full_lines(capsys):
    printer = StreamPrinter(2)
    shown = []
    for stream, text in ((0, "one two\n"), (1, "A"), (0, "three"), (1, ".\n\nB"), (0, ""), (1, "")):
        printer.show(stream, text, finished=not text)
        shown.append(capsys.readouterr().out)
    assert shown == ["[0] one two\n", "", "", "[1] A.\n", "[0] three\n", "[1] B\n"]


@pytest.mark.parametrize("prompts", [["abc"], ["abc", "d"]])
def test_run(make_llama, capsys, prompts):
    """The options are EngineConfig's and SamplingParams's."""
    options = [option for prompt in prompts for option in ("--prompt", prompt)]
    model = ["--model", str(make_llama()[0]), "--dtype", "float32", "--num-blocks", "32", "--no-enable-prefix-caching"]
    assert main(["run", *model, *options, "--max-tokens", "5", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.endswith("\n")


def test_errors_are_one_line(make_llama, capsys):
    assert main(["run", "--model", str(make_llama()[0]), "--prompt", "a", "--block-size", "0"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "pagedkern-engine: block_size is 0, expected at least 1"
    assert main(["run", "--model", "nowhere", "--prompt", "a"]) == 2
    assert "neither a directory with a config.json nor a .gguf file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command, option, value, expected",
    [
        ("bench", "--requests", "-1", "requests is -1, expected at least 1"),
        ("bench", "--swap-space-gib", "inf", "swap_space_gib is inf, expected at least 0"),
        ("bench", "--longest", "-5", "longest is -5, expected at least 16"),
        ("bench", "--tensor-parallel-size", "-1", "tensor_parallel_size is -1, expected at least 1"),
        ("serve", "--port", "99999", "port is 99999, expected one in [0, 65535]"),
        ("serve", "--max-body-bytes", "-1", "max_body_bytes is -1, expected at least 1"),
        ("serve", "--max-waiting", "-1", "max_waiting is -1, expected at least 0"),
        ("serve", "--drain-seconds", "-1", "drain_seconds is -1, expected at least 0"),
        ("memory", "--memory-gib", "inf", "memory_gib is inf, expected a positive number"),
        ("memory", "--memory-gib", "nan", "memory_gib is nan, expected a positive number"),
    ],
)
def test_numbers_out_of_range_are_one_line(make_llama, capsys, command, option, value, expected):
    assert main([command, "--model", str(make_llama()[0]), option, value]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"pagedkern-engine: {expected}"
