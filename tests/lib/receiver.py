"""A receiver of webhooks on loopback that answers as a test says, and keeps what came."""
import http.server
import json
import threading


class Receiver:
    """answers: what to answer, one a request and path: a status, or a function of the handler; then `status`."""

    def __init__(self, status=200, answers=()):
        self.status, self.answers, self.got, self.seen = status, list(answers), [], threading.Condition()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with outer.seen:
                    outer.got.append((self.path, dict(self.headers), body))
                    answer = outer.answers.pop(0) if outer.answers else outer.status
                    outer.seen.notify_all()
                if callable(answer):
                    answer(self)
                    return
                self.send_response(answer)
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

        self.server = Server(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}/hook"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def wait(self, n, seconds=60):
        """The first n requests, once there are so many: (path, headers, body) each."""
        with self.seen:
            assert self.seen.wait_for(lambda: len(self.got) >= n, seconds), f"{len(self.got)} requests, not {n}"
            return list(self.got)

    def events(self, n):
        return [json.loads(body) for _, _, body in self.wait(n)]

    def close(self):
        self.server.shutdown()
        self.server.server_close()
