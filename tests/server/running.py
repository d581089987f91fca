"""A server of a small random model in this process, and the real `openai` client."""

import http.client
import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))
from checkpoints import EOS, token_ids_of
from scripted import one_hot, script_logits

from engine_min.server.app import Server
from engine_min.server.main import DrainingServer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if messages[0].role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}answer: "
)


class RunningServer:
    def __init__(self, llm, **limits):
        from openai import OpenAI

        self.llm = llm
        self._unscripted = llm.runner.step, llm.runner.model.logits
        self.server = Server(llm, "tiny", **limits)
        self.uvicorn = DrainingServer(self.server, "127.0.0.1", 0, drain_seconds=5)
        self._thread = threading.Thread(target=self.uvicorn.run)
        self._thread.start()
        while not self.uvicorn.started:
            assert self._thread.is_alive()
            time.sleep(0.01)
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=30)

    def close(self):
        self.client.close()
        self.uvicorn.should_exit = True
        self._thread.join()

    def say(self, text):
        """Makes the model answer with the text and then its end token, whatever it is asked."""
        tokens = [*token_ids_of(text), EOS] if isinstance(text, str) else text
        self.script(lambda position, request: one_hot(tokens[min(request.num_generated, len(tokens) - 1)]))

    def script(self, row):
        self.unscript()
        script_logits(self.llm, row)

    def unscript(self):
        self.llm.runner.step, self.llm.runner.model.logits = self._unscripted

    def wait_idle(self):
        deadline = time.monotonic() + 10
        while self.llm.has_unfinished() or self.llm.stats().blocks_used:
            assert time.monotonic() < deadline, f"still busy: {self.llm.stats()}"
            time.sleep(0.01)


def request(server, method, path, body=None):
    """(status, body) of one plain HTTP request; a body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
