"""engine_min: a thin continuous-batching engine on pagedkern's ops."""

import os

# A step has some 300 parallel loops. By default a thread of GNU OpenMP that has done its part spins for up to a
# millisecond, and where another program wants its core, the thread it waits for may not run: a step takes ten times
# as long. A short spin and then sleeping costs little on an idle machine. Read when torch is loaded, so set before it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from engine_min.config import EngineConfig  # noqa: E402
from engine_min.engine import LLM, StepError  # noqa: E402
from engine_min.request import RequestOutput, SamplingParams  # noqa: E402

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "StepError"]
