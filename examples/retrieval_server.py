"""A small retrieval server with Search-R1's protocol: BM25 over a Parquet file with `id`, `title` and `text`.

    RETRIEVAL_KEY=... python examples/retrieval_server.py documents.parquet --port 8000

For a real corpus (Wikipedia with dense vectors), run Search-R1's own server: the protocol is the same.
"""

from __future__ import annotations

import argparse
import hmac
import json
import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from agentrl.extras.search.search import Index, open_index

MAX_BODY_BYTES = 2**20
MAX_QUERIES = 256
MAX_DOCUMENTS = 50
WHOLE = 10**9
"""Characters of a document: all of them."""


def answer(index: Index, body: object) -> dict[str, object]:
    """Return the reply to {"queries": [...], "topk": 3, "return_scores": true}.

    Raises:
        ValueError: the body has another form.
    """
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    queries, top_k = body.get("queries"), body.get("topk", 3)
    if (
        not isinstance(queries, list)
        or not all(isinstance(q, str) for q in queries)
        or len(queries) > MAX_QUERIES
    ):
        raise ValueError(f"queries must be a list of at most {MAX_QUERIES} texts")
    if not isinstance(top_k, int) or not 1 <= top_k <= MAX_DOCUMENTS:
        raise ValueError(f"topk must be a number from 1 to {MAX_DOCUMENTS}")
    results = []
    for query in queries:
        found = index.search(query, top_k=top_k, max_chars=WHOLE)
        documents = [{"id": f.id, "contents": f'"{f.title}"\n{f.snippet}'} for f in found]
        scores = [f.score for f in found]
        results.append(
            [{"document": d, "score": s} for d, s in zip(documents, scores, strict=True)]
            if body.get("return_scores")
            else documents
        )
    return {"result": results}


def make_server(index: Index, *, key: str, port: int) -> ThreadingHTTPServer:
    """Return a server on the loopback interface that answers POST /retrieve to those who know `key`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            length = self.headers.get("Content-Length", "0")
            size = int(length) if length.isdecimal() and len(length) < 16 else MAX_BODY_BYTES + 1
            body = self.rfile.read(size) if size <= MAX_BODY_BYTES else b""
            self.close_connection |= size > MAX_BODY_BYTES  # what was not read is no request
            given = self.headers.get("Authorization", "").encode()
            if not hmac.compare_digest(given, f"Bearer {key}".encode()):
                return self.reply(401, {"error": "the key is missing or wrong"})
            if self.path != "/retrieve" or size > MAX_BODY_BYTES:
                return self.reply(
                    404 if size <= MAX_BODY_BYTES else 413, {"error": "POST a short body to /retrieve"}
                )
            try:
                self.reply(200, answer(index, json.loads(body)))
            except (ValueError, RecursionError) as error:
                self.reply(400, {"error": str(error)})

        def reply(self, status: int, content: dict[str, object]) -> None:
            encoded = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        def log_message(self, *_: object) -> None:
            return

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", help="Parquet file with the columns id, title, text")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    key = os.environ.get("RETRIEVAL_KEY")
    if not key:
        parser.error("set the environment variable RETRIEVAL_KEY to a secret text, also for the training")
    with make_server(open_index(args.corpus, "english"), key=key, port=args.port) as server:
        print(f"http://127.0.0.1:{server.server_port}/retrieve", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
