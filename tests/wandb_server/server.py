"""A stand-in for W&B's server on loopback, for the real client: enough of its protocol, and faults to inject."""

import gzip
import json
import re
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from tests.wandb_server.graphql import UnknownFieldError, execute, parse
from tests.wandb_server.store import Run, Store

DROP = "drop"
"""A fault: the connection is closed without an answer."""


@dataclass(frozen=True)
class Request:
    """What a fault may look at: ``GET``, the path, and the GraphQL operation if it is one."""

    method: str
    path: str
    operation: str


class WandbServer:
    """Serves until it is closed; what it did not understand is in :attr:`unknown`.

    ``fault`` may be set at any time: a function of a :class:`Request` that gives an HTTP status, :data:`DROP` or None;
    ``delay_s`` slows every answer down.
    """

    def __init__(self):
        self.unknown: list[str] = []
        self.requests: list[Request] = []
        self.bodies: list[bytes] = []
        self.fault = lambda request: None
        self.delay_s = 0.0
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self.store = Store(self.url)
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self):
        """Stop; from now on connections are refused."""
        self._http.shutdown()
        self._http.server_close()

    @property
    def run(self) -> Run:
        """The one run that was sent."""
        (run,) = self.store.runs.values()
        return run

    def answer(self, request, body, client=""):
        """Status, body and headers of a request; ``client`` tells the writers of a shared run apart."""
        with self._lock:
            self.requests.append(request)
            self.bodies.append(body)
            try:
                return self._answer(request, body, client)
            except UnknownFieldError as error:
                self.unknown.append(f"GraphQL field {error}")
            except Exception as error:  # a mistake in here must not look like a flaky network
                self.unknown.append(f"{request.method} {request.path} {request.operation}: {error!r}")
            return 400, b'{"errors": [{"message": "not known to the stand-in server"}]}', {}

    def _answer(self, request, body, client):
        path = urlsplit(request.path).path
        if path == "/graphql":
            call = json.loads(body)
            document = parse(call["query"])
            data = execute(document, self.store.root(), call.get("variables") or {})
            return 200, json.dumps({"data": data}).encode(), {}
        if stream := re.fullmatch(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream", path):
            run = self.store.runs[tuple(map(unquote, stream.groups()))]
            _append(run, json.loads(body or b"{}"), client)
            return 200, b"{}", {}
        if blob := re.fullmatch(r"/blob/(run|artifact|manifest)/([^/]+)/(.+)", path):
            return self._blob(request.method, blob[1], blob[2], unquote(blob[3]), body)
        if path in ("/healthz", "/ready") or path.startswith("/sdk/otel/"):  # telemetry
            return 200, b"ok", {}
        self.unknown.append(f"{request.method} {path}")
        return 404, b"{}", {}

    def _blob(self, method, kind, owner, name, body):
        if kind == "run":
            files = next(run for run in self.store.runs.values() if str(run.number) == owner).files
        elif kind == "artifact":
            files = self.store.artifacts[owner].files
        elif method == "PUT":
            self.store.artifacts[owner].manifest = body
            return 200, b"", {}
        else:
            return 200, self.store.artifacts[owner].manifest, {}
        if method == "PUT":
            files[name] = body
            return 200, b"", {}
        return (200, files[name], {}) if name in files else (404, b"", {})


def _append(run, data, client):
    for name, chunk in (data.get("files") or {}).items():
        lines, offset = chunk["content"], chunk["offset"]
        if name == "wandb-history.jsonl":
            run.streams.setdefault(client, [])[offset : offset + len(lines)] = lines
        elif name == "wandb-events.jsonl":
            run.events[offset : offset + len(lines)] = lines
        elif name == "wandb-summary.json":
            run.summary = json.loads(lines[-1])
    if data.get("preempting"):
        run.preempting = True
    if data.get("complete"):
        run.exit_code = data.get("exitcode", 0)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: WandbServer

    def _serve(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        operation = ""
        if self.path.startswith("/graphql"):
            found = re.search(r"\b(?:query|mutation)\s+(\w+)", json.loads(body).get("query", ""))
            operation = found[1] if found else ""
        request = Request(self.command, self.path, operation)
        client = self.headers.get("X-Wandb-Async-Client-Id", "")
        time.sleep(self.owner.delay_s)
        fault = self.owner.fault(request)
        if fault == DROP:
            self.close_connection = True
            self.connection.close()
            return
        status, content, headers = (fault, b"{}", {}) if fault else self.owner.answer(request, body, client)
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": len(content), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = _serve

    def log_message(self, format, *arguments):
        pass
