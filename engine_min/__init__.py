"""engine_min: a thin continuous-batching engine on pagedkern's ops."""

from engine_min.config import EngineConfig
from engine_min.engine import LLM
from engine_min.request import RequestOutput, SamplingParams

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams"]
