"""An HTTP server on this machine, which answers in threads until it is closed."""

from __future__ import annotations

import http.server
import threading


class LocalServer(http.server.ThreadingHTTPServer):
    """Answers by `handler`; `host` is its address."""

    daemon_threads = True

    def __init__(self, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.host = f"127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_: object) -> None:
        """Clients go away."""

    def close(self) -> None:
        """Ends it."""
        self.shutdown()
        self.server_close()
