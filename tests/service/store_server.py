"""An object store on a loopback address: the part of S3 that AttnCache uses, and plain HTTP with ranges.

Bucket names are ignored: /BUCKET/NAME is an S3 object, and plain HTTP reads the same paths.
"""

import hashlib
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Store:
    """The objects, and what was asked for."""

    def __init__(self):
        self.objects, self.uploads, self.lock = {}, {}, threading.Lock()
        self.requests, self.authorizations = [], []  # (method, path with query), and a header
        self.has_etags = self.has_ranges = self.has_conditions = True
        self.is_empty = False  # whether ranges have no bytes
        self.is_cut = False  # whether the connection ends in the middle of an answer
        self.quote = '"'  # around the ETags of a list; Azure has none there
        self.weak = ""  # "W/" for weak ETags, which match no condition
        self.pause = 0.0  # seconds before each kilobyte of an answer
        self.fail = lambda *_: None  # takes method and path; returns a status to answer instead

    @property
    def s3(self):
        return f"s3://bucket/%s?endpoint=http://127.0.0.1:{self.port}&skip_signature=true&region=here"

    @property
    def http(self):
        return f"http://127.0.0.1:{self.port}/bucket/%s"


def etag(content):
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def handle_request(self):
        store, parts = self.server.store, urlsplit(self.path)
        path, query = unquote(parts.path), parse_qs(parts.query, keep_blank_values=True)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with store.lock:
            store.requests.append((self.command, self.path))
            store.authorizations.append(self.headers.get("Authorization"))
            status = store.fail(self.command, path)
            if status is not None:
                return self.answer(status)
            return getattr(self, f"of_{self.command.lower()}")(store, path, query, body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request

    def of_get(self, store, path, query, _body):
        if "list-type" in query:
            return self.listed(store, path, query.get("prefix", [""])[0])
        content = store.objects.get(path)
        if content is None:
            return self.answer(404)
        condition = self.headers.get("If-Match") if store.has_conditions else None
        if condition and (store.weak or condition.strip('"') != etag(content).strip('"')):
            return self.answer(412)
        headers = {"Last-Modified": "Thu, 26 Nov 2026 00:00:00 GMT"}
        if store.has_etags:
            headers["ETag"] = store.weak + etag(content)
        if store.has_ranges and (found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))):
            first, last = int(found[1]), min(int(found[2]), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            return self.answer(206, b"" if store.is_empty else content[first : last + 1], headers)
        return self.answer(200, content, headers)

    of_head = of_get

    def of_put(self, store, path, query, body):
        if "partNumber" in query:
            store.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            return self.answer(200, headers={"ETag": etag(body)})
        now = store.objects.get(path)
        if self.headers.get("If-None-Match") == "*" and now is not None:
            return self.answer(412)
        if "If-Match" in self.headers and (now is None or self.headers["If-Match"] != etag(now)):
            return self.answer(412)
        store.objects[path] = body
        return self.answer(200, headers={"ETag": etag(body)})

    def of_post(self, store, path, query, body):
        if "uploads" in query:
            number = str(len(store.uploads))
            store.uploads[number] = {}
            return self.answer(
                200,
                f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId>"
                "</InitiateMultipartUploadResult>".encode(),
            )
        if "delete" in query:
            for name in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                store.objects.pop(f"{path.rstrip('/')}/{name}", None)
            deleted = re.sub(rb".*?(<Key>.*</Key>).*", rb"<Deleted>\1</Deleted>", body, flags=re.DOTALL)
            return self.answer(200, b"<DeleteResult>%s</DeleteResult>" % deleted)
        parts = store.uploads.pop(query["uploadId"][0])
        content = store.objects[path] = b"".join(part for _, part in sorted(parts.items()))
        return self.answer(
            200,
            f"<CompleteMultipartUploadResult><ETag>{escape(etag(content))}</ETag>"
            "</CompleteMultipartUploadResult>".encode(),
        )

    def of_delete(self, store, path, query, _body):
        store.uploads.pop(query.get("uploadId", [None])[0], None)
        store.objects.pop(path, None)
        return self.answer(204)

    def listed(self, store, path, prefix):
        def listed_etag(content):
            return escape(etag(content).replace('"', store.quote))

        base = f"{path.rstrip('/')}/"
        rows = "".join(
            f"<Contents><Key>{escape(name.removeprefix(base))}</Key><Size>{len(content)}</Size>"
            f"<LastModified>2026-11-26T00:00:00Z</LastModified><ETag>{listed_etag(content)}</ETag></Contents>"
            for name, content in sorted(store.objects.items())
            if name.startswith(base + prefix)
        )
        return self.answer(200, f"<ListBucketResult>{rows}</ListBucketResult>".encode())

    def answer(self, status, content=b"", headers=()):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.server.store.is_cut:
            content, self.close_connection = content[: len(content) // 2], True
        for first in range(0, len(content) if self.command != "HEAD" else 0, 1024):
            time.sleep(self.server.store.pause)
            self.wfile.write(content[first : first + 1024])

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128


@contextmanager
def object_store():
    """Yield a Store that serves."""
    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.store = Store()
    server.store.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server.store
    finally:
        server.shutdown()
        server.server_close()
