"""Requests to the hub within limits on bytes, seconds and redirects, whatever the server does.

huggingface_hub provides the session, the proxy and the token; the session drops the token when a request is redirected
to another host. Bodies of redirects and errors are never read.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol

from aprfmt.errors import StorageError, UnsupportedError, UsageError
from aprfmt.io import remote_file
from aprfmt.limits import MAX_HUB_ANSWER_BYTES, MAX_HUB_REDIRECTS, MIN_HUB_PIECE_BYTES, MIN_HUB_RATE

RATE_VARIABLE = "APR_HUB_MIN_RATE"
"""Environment variable: bytes per second below which a download is aborted."""

_HEADER_TIMEOUTS = 3  # status and headers of a response, all redirects included, in multiples of the library's timeout
_ANSWER_TIMEOUTS = 6  # a complete API response
_FREE_PIECES = 256
_LOOK_S = 0.5
_MOST_PROCESSOR_S = 5.0  # to read the status and headers of one response
_KINDS = {
    "GatedRepo": "GatedRepoError",
    "RepoNotFound": "RepositoryNotFoundError",
    "RevisionNotFound": "RevisionNotFoundError",
    "EntryNotFound": "RemoteEntryNotFoundError",
}


class HubUrl(Protocol):
    """A URL of the HTTP client."""

    scheme: str


class HubRequest(Protocol):
    """A request of the HTTP client."""

    url: HubUrl


class HubResponse(Protocol):
    """What is used of a response of the HTTP client (httpx); `next_request` follows a redirect."""

    status_code: int
    headers: Mapping[str, str]
    url: HubUrl
    request: HubRequest
    next_request: HubRequest | None

    def iter_raw(self) -> Iterator[bytes]:
        """The body in chunks, as sent."""

    def close(self) -> None:
        """Closes the connection."""


class AnswerError(Exception):
    """A response with an error status.

    Attributes:
        response: status and headers; the body was not read.
        kind: the name of huggingface_hub's exception for it, "" for none.
    """

    def __init__(self, response: HubResponse) -> None:
        super().__init__(f"the hub returned {response.status_code}")
        self.response = response
        self.kind = _KINDS.get(response.headers.get("X-Error-Code", ""), "")
        # The hub returns 401 for a missing or private repository, unless it rejects the token itself.
        is_rejected = response.headers.get("X-Error-Message", "").startswith("Invalid credentials")
        if not self.kind and response.status_code == 401 and response.url.scheme == "https" and not is_rejected:
            self.kind = "RepositoryNotFoundError"


def timeout() -> float:
    """Seconds to wait for the next bytes of a response: HF_HUB_DOWNLOAD_TIMEOUT."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


def ask(url: str) -> bytes:
    """The body of an API response.

    Raises AnswerError, StorageError, UnsupportedError, and what the HTTP client raises.
    """
    until = time.monotonic() + _ANSWER_TIMEOUTS * timeout()
    body = bytearray()
    with open_answer(url, {}) as (response, _):
        for data in response.iter_raw():
            body += data
            if len(body) > MAX_HUB_ANSWER_BYTES:
                raise StorageError(
                    f"the hub's response has more than {MAX_HUB_ANSWER_BYTES} bytes", hint="check HF_ENDPOINT"
                )
            if time.monotonic() > until:
                raise StorageError("the hub timed out during its response", hint="try again later")
    return bytes(body)


@contextmanager
def open_answer(
    url: str, headers: Mapping[str, str], *, with_token: bool = True
) -> Iterator[tuple[HubResponse, list[HubResponse]]]:
    """The response to a GET with its body unread, and the redirects that led to it; other servers get no token.

    Raises AnswerError, StorageError, UnsupportedError, and what the HTTP client raises.
    """
    from huggingface_hub.utils import get_session

    client, until = get_session(), time.monotonic() + _HEADER_TIMEOUTS * timeout()
    sent = {**_own_headers(with_token=with_token), **headers, "Accept-Encoding": "identity"}
    request = client.build_request("GET", url, headers=sent, timeout=timeout())
    redirects: list[HubResponse] = []
    while True:
        send = partial(client.send, request, stream=True, follow_redirects=False)
        response = _within(until - time.monotonic(), send)
        try:
            if response.next_request is None:
                _check(response)
                yield response, redirects
                return
        finally:
            response.close()
        redirects.append(response)
        _check_redirect(response, response.next_request, len(redirects))
        request = response.next_request


def _own_headers(*, with_token: bool) -> dict[str, str]:
    """User agent and token. huggingface_hub's function for them makes an unlimited request of its own."""
    from huggingface_hub import __version__, constants, get_token

    import aprfmt

    token = get_token() if with_token and not constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else None
    agent = {"User-Agent": f"aprfmt/{aprfmt.__version__}; hf_hub/{__version__}"}
    return agent | ({"Authorization": f"Bearer {token}"} if token else {})


def _check(response: HubResponse) -> None:
    if response.status_code >= 400 and response.status_code != 416:
        raise AnswerError(response)
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        raise UnsupportedError(
            f"the hub sent a response compressed with {encoding[:40]!r}, which was not requested",
            hint="a proxy may do this: check HTTPS_PROXY and HF_ENDPOINT",
        )


def _check_redirect(response: HubResponse, following: HubRequest, n_redirects: int) -> None:
    if n_redirects > MAX_HUB_REDIRECTS:
        raise StorageError(
            f"the hub redirected the request more than {MAX_HUB_REDIRECTS} times", hint="check HF_ENDPOINT"
        )
    if response.request.url.scheme == "https" and following.url.scheme != "https":
        raise StorageError(
            "the hub redirected the request from https to an unencrypted address", hint="check HF_ENDPOINT"
        )


def _within(seconds: float, send: Callable[[], HubResponse]) -> HubResponse:
    """Calls `send` in a thread. Raises StorageError, and stops the thread, if it takes longer than `seconds`.

    The client's own timeout applies to each read; a server could send a byte before each expires, or endless
    informational responses, which cost processor time.
    """
    found: list[HubResponse] = []
    errors: list[BaseException] = []
    is_over, lock = threading.Event(), threading.Lock()

    def work() -> None:
        try:
            response = send()
        except BaseException as error:
            errors.append(error)
        else:
            with lock:
                if not is_over.is_set():
                    found.append(response)
            if not found:
                with suppress(Exception):
                    response.close()
        is_over.set()

    thread = threading.Thread(target=work, name="apr-request", daemon=True)
    thread.start()
    until = time.monotonic() + seconds
    while not is_over.wait(min(_LOOK_S, max(until - time.monotonic(), 0.0))):
        if time.monotonic() >= until or _processor_seconds(thread) > _MOST_PROCESSOR_S:
            break
    with lock:
        is_over.set()
    if errors:
        raise errors[0]
    if not found:
        _end(thread)
        raise StorageError("the hub timed out", hint="try again later; HF_HUB_DOWNLOAD_TIMEOUT=60 waits longer")
    return found[0]


def _processor_seconds(thread: threading.Thread) -> float:
    clock = getattr(time, "pthread_getcpuclockid", None)
    if clock is None or thread.ident is None or not thread.is_alive():
        return 0.0
    return time.clock_gettime(clock(thread.ident))


def _end(thread: threading.Thread) -> None:
    """Raises SystemExit in the thread at its next bytecode: at the latest when its read times out."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def body(response: HubResponse) -> Iterator[bytes]:
    """The body of a response in chunks. Raises StorageError if the server sends it too slowly."""
    rate, free = _least_rate(), _HEADER_TIMEOUTS * timeout()
    waited, n_bytes, n_pieces = 0.0, 0, 0
    pieces = response.iter_raw()
    while True:
        before = time.monotonic()
        data = next(pieces, None)
        waited += time.monotonic() - before  # excludes the caller's time
        if data is None:
            return
        n_bytes, n_pieces = n_bytes + len(data), n_pieces + 1
        if (waited - free) * rate > n_bytes or n_pieces - _FREE_PIECES > n_bytes // MIN_HUB_PIECE_BYTES:
            raise StorageError(
                f"the hub sends too slowly: {n_bytes} bytes in {waited:.0f} s",
                hint=f"run it again: downloads resume; {RATE_VARIABLE}=BYTES sets the minimum bytes/s ({rate})",
            )
        yield data


def range_of_body(response: HubResponse, n_bytes: int) -> Iterator[bytes]:
    """The first `n_bytes` of the body of a response, counted in the traffic. Raises as `body`."""
    for data in body(response):
        remote_file.traffic.count_bytes(len(data))
        yield data[:n_bytes]
        n_bytes -= len(data)
        if n_bytes <= 0:
            return


def _least_rate() -> int:
    text = os.environ.get(RATE_VARIABLE) or str(MIN_HUB_RATE)
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{RATE_VARIABLE} must be an integer, not {text!r:.40}", hint=f"{RATE_VARIABLE}=1000")
    return int(text)
