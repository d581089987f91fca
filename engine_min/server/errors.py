"""What is answered to a request that cannot be served, and the first of the reasons: it is no JSON object."""

from __future__ import annotations

import json

from engine_min.request import SamplingParams


class RequestError(Exception):
    """Answered with OpenAI's error body."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict:
        kinds = {401: "authentication_error", 429: "rate_limit_error", 404: "not_found_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refusal(error: ValueError) -> RequestError:
    """The engine's messages about a parameter begin with its name."""
    name = str(error).split(" ", 1)[0]
    return RequestError(str(error), name if name in SamplingParams.__dataclass_fields__ else None)


def parse_json(raw: bytes) -> dict:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise RequestError("the body is not valid JSON") from None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    if b"\\u" in raw:
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError("the body holds half of a surrogate pair, which is no character") from None
    return body
