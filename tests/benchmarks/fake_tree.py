"""Source trees whose server only answers, and a client whose figures are what that server says."""

from pathlib import Path

SERVER = """
import argparse
from http.server import BaseHTTPRequestHandler, HTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--rate", default="{rate}")
args, _ = parser.parse_known_args()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(args.rate.encode())

    def log_message(self, *args):
        pass


HTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
"""
# The first figure is what the server says plus the seed's thousands; `failed` too where it says a negative rate.
CLIENT = """
import argparse, json, urllib.request
parser = argparse.ArgumentParser()
for name in ("--url", "--json", "--seed"):
    parser.add_argument(name, default="0")
args, _ = parser.parse_known_args()
rate = float(urllib.request.urlopen(args.url + "/health").read()) + int(args.seed) // 1000
p = {"p50": 2.0, "p99": 4.0}
classes = {"c1": {"good": 7}}
summary = {"requests": 8, "ok": 8, "failed": int(rate < 0), "rejected": 0, "short": 0, "out_tok_s": rate,
           "ttft_ms": p, "tpot_ms": p, "itl_ms": p, "errors": {},
           "slo": {"adherence": rate / 100, "goodput_req_s": rate, "classes": classes}}
json.dump({"summary": summary}, open(args.json, "w"))
"""


def write_tree(folder: Path, rate: float) -> Path:
    package = folder / "roseinfer" / "cli"
    package.mkdir(parents=True)
    for name in (folder / "roseinfer" / "__init__.py", package / "__init__.py"):
        name.touch()
    (package / "__main__.py").write_text(SERVER.format(rate=rate))
    return folder


def write_client(folder: Path) -> Path:
    file = folder / "client.py"
    file.write_text(CLIENT)
    return file
