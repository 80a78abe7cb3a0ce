"""An HTTP server that answers OpenAI completions as a test decides. It has no model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    request_queue_size = (
        128  # a client's connections come at once; 5, the default, resets some of them
    )


class ScriptedServer:
    """Answers ``/v1/completions`` with ``answer(prompt)``, with status 500 where that is None."""

    def __init__(self, answer: Callable[[str], str | None]) -> None:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def send(self, data, status=200):
                body = json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self):
                self.send({"data": [{"id": "scripted"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(body)
                text = answer(body["prompt"])
                if text is None:
                    self.send({"error": "out of memory"}, 500)
                else:
                    self.send({"choices": [{"text": text}]})

        self.requests: list[dict[str, Any]] = []
        self.http = _Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()
