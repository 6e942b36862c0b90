"""A Hugging Face hub on this machine, for tests."""

import hashlib
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as a download needs. `files`: repo id -> path -> bytes."""

    def do_GET(self):
        self.respond(body=True)

    def do_HEAD(self):
        self.respond(body=False)

    def respond(self, body):
        path = self.path.partition("?")[0].strip("/")
        api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        repo = "/".join(parts[:2])
        files = self.server.files.get(repo)
        if files is None:
            return self.send(404, b"no such repo", {"X-Error-Code": "RepoNotFound"}, body)
        if api and parts[2:3] == ["tree"]:
            tree = [
                dict(type="file", path=name, size=len(data), oid=hashlib.sha1(data).hexdigest())
                for name, data in files.items()
            ]
            return self.send(200, json.dumps(tree).encode(), {}, body)
        if api:
            siblings = [{"rfilename": name} for name in files]
            info = dict(id=repo, modelId=repo, sha=REVISION, siblings=siblings)
            info |= dict(private=False, tags=[], downloads=0, likes=0)
            return self.send(200, json.dumps(info).encode(), {}, body)
        name = "/".join(parts[4:])
        if name not in files:
            return self.send(404, b"no such file", {"X-Error-Code": "EntryNotFound"}, body)
        if body:
            self.server.sent.append((repo, name))
        data = files[name]
        headers = {"X-Repo-Commit": REVISION, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        cut = body and repo == "org/cut" and name == "model.safetensors"
        self.send(200, data, headers, body, part=self.server.next_part(len(data)) if cut else None)

    def send(self, status, data, headers, body, part=None):
        """Announce `data`; send it whole, or only its first `part` bytes and hang up."""
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data[:part])
        self.close_connection = part is not None

    def log_message(self, *args):
        pass


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Hub)
        self.files = files
        self.sent = []
        self.parts = 0

    def next_part(self, size):
        """Half of a file at the first request, then nothing."""
        self.parts += 1
        return size // 2 if self.parts == 1 else 0


def client_environment(endpoint: str, home: Path) -> dict[str, str]:
    """Environment in which the hub client asks `endpoint` and keeps its files under `home`."""
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    for key in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN"):
        environment.pop(key, None)
    return environment
