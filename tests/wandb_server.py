"""
As much of wandb's server as its client needs to make a run, to resume it and to sync one: GraphQL, and files that are written
in lines from an offset on. What it was sent is in `runs`: {id: {"config": {...}, "files": {name: [line, ...]}, "uploads":
[name, ...]}}.
"""

import contextlib
import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROJECT = {"id": "project", "name": "project", "entity": {"id": "entity", "name": "someone"}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle_one_request(self):
        if self.server.dead:  # nobody is answered any more
            self.close_connection = True
        else:
            super().handle_one_request()

    def body(self):
        data = b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def reply(self, answer):
        data = json.dumps(answer).encode()
        with contextlib.suppress(OSError):  # who asked may have been killed
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def do_GET(self):
        self.reply({})
        self.server.dead |= self.path == "/die"

    def do_PUT(self):
        self.body()
        _, run, name = self.path.removeprefix("/").split("/", 2)
        self.server.runs[run]["uploads"].append(name)
        self.reply({})

    def do_POST(self):
        data = self.body()
        if self.path == "/graphql":
            asked = json.loads(data)
            name = asked.get("operationName") or re.search(r"(?:query|mutation)\s+(\w+)", asked["query"])[1]
            self.reply({"data": getattr(self, name, lambda **_: {})(**(asked.get("variables") or {}))})
        elif self.path.endswith("/file_stream"):
            run = self.server.runs[self.path.split("/")[-2]]
            for name, part in (json.loads(data).get("files") or {}).items():
                lines = run["files"].setdefault(name, [])
                lines[part["offset"]:part["offset"] + len(part["content"])] = part["content"]
            self.reply({"limits": {}})
        else:
            self.reply({})

    # -- GraphQL, by the names of wandb's own queries

    def Viewer(self, **_):
        return {"viewer": {"id": "user", "entity": "someone", "username": "someone", "flags": "{}", "teams": {"edges": []}}}

    def RunResumeStatus(self, name, **_):
        run = self.server.runs.get(name)
        lines = {key: run["files"].get(file, []) for key, file in (("history", "wandb-history.jsonl"), (
            "events", "wandb-events.jsonl"), ("log", "output.log"))} if run else {}
        bucket = run and {
            "id": name, "name": name, "displayName": name, "tags": [], "notes": "", "config": json.dumps(run["config"]),
            "summaryMetrics": (run["files"].get("wandb-summary.json") or ["{}"])[-1], "wandbConfig": json.dumps({"t": {}}),
            **{f"{key}LineCount": len(own) for key, own in lines.items()},
            **{f"{key}Tail": json.dumps(lines[key][-1:]) for key in ("history", "events")}}
        return {"model": {**PROJECT, "bucket": bucket}}

    def UpsertBucket(self, name, config=None, **_):
        run = self.server.runs.setdefault(name, {"config": {}, "files": {}, "uploads": []})
        run["config"] = json.loads(config) if config else run["config"]
        return {"upsertBucket": {"inserted": True, "bucket": {
            "id": name, "projectId": 1, "name": name, "displayName": name, "sweepName": None, "historyLineCount": 0,
            "project": PROJECT, "config": json.dumps(run["config"])}}}

    def CreateRunFiles(self, files, run, **_):
        host = f"http://127.0.0.1:{self.server.server_port}"
        return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": [
            {"name": name, "uploadUrl": f"{host}/upload/{run}/{name}"} for name in files]}}


@contextlib.contextmanager
def serve():
    """The server at work, with .url and .runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # a client that was killed
    server.url, server.runs = f"http://127.0.0.1:{server.server_port}", {}
    server.dead = False
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def steps(run):
    """_step of every line of the history of a run, in order."""
    return [json.loads(line)["_step"] for line in run["files"].get("wandb-history.jsonl", [])]
