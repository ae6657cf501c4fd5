"""An OCI registry on this machine: manifests and blobs in memory, chunked uploads that can be cut and continued."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit

from local_server import LocalServer

USER = "me:secret"
TOKEN = "token-of-this-registry"


@dataclass
class OciRegistry:
    """The server.

    Attributes:
        blobs: by digest.
        manifests: by name and reference.
        uploads: what arrived of each, by number.
        requests: method and path of each, in order.
        cut: the next PATCH is cut after so many bytes of its body, the next GET of a blob after so many of the answer.
        needs_login: answers 401 without the bearer token, which TOKEN's server gives for USER.
        lies: a byte is flipped in each blob that is sent.
    """

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[tuple[str, str], bytes] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    cut: int | None = None
    needs_login: bool = False
    lies: bool = False
    host: str = ""

    def count(self, method: str) -> int:
        """How many requests of a method there were."""
        return sum(m == method for m, _ in self.requests)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: OciRegistry

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, status: int, code: str) -> None:
        self.reply(status, json.dumps({"errors": [{"code": code, "message": code.lower()}]}).encode())

    def body(self) -> bytes:
        length = int(self.headers.get("Content-Length") or 0)
        if self.command == "PATCH" and self.registry.cut is not None:
            return self.rfile.read(min(length, self.registry.cut))
        return self.rfile.read(length)

    def do(self) -> None:
        made, path = self.registry, urlsplit(self.path).path
        made.requests.append((self.command, path))
        if path == "/token":
            return self.token()
        if made.needs_login and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.body()
            realm = f'Bearer realm="http://{made.host}/token",service="here",scope="repository:team/model:pull,push"'
            return self.reply(401, WWW_Authenticate=realm)
        name, _, rest = path.removeprefix("/v2/").partition("/manifests/")
        if rest:
            return self.manifest(name, rest)
        name, _, rest = path.removeprefix("/v2/").partition("/blobs/")
        if rest.startswith("uploads"):
            return self.upload(name, rest.removeprefix("uploads").strip("/"))
        return self.blob(rest)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = do

    def token(self) -> None:
        good = f"Basic {base64.b64encode(USER.encode()).decode()}"
        if self.headers.get("Authorization") != good:
            return self.refuse(401, "UNAUTHORIZED")
        return self.reply(200, json.dumps({"token": TOKEN}).encode())

    def manifest(self, name: str, reference: str) -> None:
        made = self.registry
        if self.command == "PUT":
            data = self.body()
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            value = json.loads(data)
            if {row["digest"] for row in (value["config"], *value["layers"])} - {*made.blobs}:
                return self.refuse(400, "MANIFEST_BLOB_UNKNOWN")
            made.manifests[name, reference] = made.manifests[name, digest] = data
            return self.reply(201, Docker_Content_Digest=digest)
        data = made.manifests.get((name, reference), b"")
        if not data:
            return self.refuse(404, "MANIFEST_UNKNOWN")
        return self.reply(200, data, Docker_Content_Digest=f"sha256:{hashlib.sha256(data).hexdigest()}")

    def blob(self, digest: str) -> None:
        data = self.registry.blobs.get(digest)
        if data is None:
            return self.refuse(404, "BLOB_UNKNOWN")
        if self.registry.lies and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        if self.command == "GET" and self.registry.cut is not None:
            cut, self.registry.cut = self.registry.cut, None
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part[:cut])
            self.close_connection = True
            return None
        return self.reply(206 if "Range" in self.headers else 200, part)

    def upload(self, name: str, number: str) -> None:
        made = self.registry
        if self.command == "POST":
            number = str(len(made.uploads))
            made.uploads[number] = b""
        if number not in made.uploads:
            return self.refuse(404, "BLOB_UPLOAD_UNKNOWN")
        place = f"/v2/{name}/blobs/uploads/{number}"
        if self.command == "PATCH":
            if self.headers["Content-Range"].partition("-")[0] != str(len(made.uploads[number])):
                return self.refuse(416, "RANGE_INVALID")
            made.uploads[number] += self.body()
            if made.cut is not None:
                made.cut, self.close_connection = None, True
                self.connection.close()
                return None
        if self.command == "PUT":
            data = made.uploads.pop(number) + self.body()
            digest = parse_qs(urlsplit(self.path).query)["digest"][0]
            if digest != f"sha256:{hashlib.sha256(data).hexdigest()}":
                return self.refuse(400, "DIGEST_INVALID")
            made.blobs[digest] = data
            return self.reply(201)
        last = max(len(made.uploads[number]) - 1, 0)
        return self.reply(204 if self.command == "GET" else 202, Location=place, Range=f"0-{last}")


@contextmanager
def serve() -> Iterator[OciRegistry]:
    """A registry for the block; `host` is its address."""
    made = OciRegistry()

    class Handler(_Handler):
        registry = made

    with closing(LocalServer(Handler)) as server:
        made.host = server.host
        yield made
