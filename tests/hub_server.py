"""A server with the endpoints that huggingface_hub calls to upload a folder; it keeps what it receives.

    with HubServer() as hub:
        ...                       # huggingface_hub talks to hub.url
        hub.files["org/name"]     # path -> content of the last commit

Small text files travel inside the commit, and large or binary ones are uploaded before it, as on the real hub.
"""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

TOKEN = "hf_the-token-of-this-test"
BINARY = (".safetensors", ".gguf")


class HubServer:
    """The server and what it has received; `failing` is a part of paths whose requests are rejected."""

    def __init__(self):
        self.files = {}
        self.private = {}
        self.failing = None
        self.uploaded = {}  # oid -> content
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                owner.answer(self)

            do_POST = do_PUT = do_GET

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))  # seconds between polls

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def answer(self, request):
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = urlparse(request.path).path
        status, content = self.reply(path, body, request.headers.get("Authorization"))
        data = json.dumps(content).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        if status == 404:
            request.send_header("X-Error-Code", "RepoNotFound")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def reply(self, path, body, authorization):
        if self.failing and self.failing in path:
            return 400, {"error": "the disk of the hub is full"}
        if path.startswith("/upload/"):
            self.uploaded[path.removeprefix("/upload/")] = body
            return 200, {}
        if authorization != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/whoami-v2":
            return 200, {"name": "someone", "type": "user"}
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            modes = [
                {"path": file["path"], "uploadMode": "lfs" if file["path"].endswith(BINARY) else "regular"}
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": [{**mode, "shouldIgnore": False, "oid": None} for mode in modes]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{"upload": {"href": f"{self.url}/upload/{item['oid']}"}} for item in objects]
            return 200, {"objects": [item | {"actions": action} for item, action in zip(objects, actions, strict=True)]}
        if "/commit/" in path:
            return self.commit(path, body)
        if (name := path.removeprefix("/api/models/")) in self.files:
            return 200, {"id": name, "private": self.private[name]}
        return 404, {"error": path}

    def create(self, wanted):
        name = f"{wanted.get('organization') or 'someone'}/{wanted['name']}"
        if name in self.files:  # keeps its visibility
            return 409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"}
        self.files[name] = {}
        self.private[name] = wanted.get("visibility") == "private"
        return 200, {"url": f"{self.url}/{name}"}

    def commit(self, path, body):
        name = path.removeprefix("/api/models/").partition("/commit/")[0]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[name][value["path"]] = self.uploaded[value["oid"]]
        url = f"{self.url}/{name}/commit/{'1' * 40}"
        return 200, {"commitUrl": url, "commitOid": "1" * 40, "hookOutput": ""}
