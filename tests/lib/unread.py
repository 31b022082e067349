"""A client that asks and does not read, and what a daemon keeps for it. Standard library only."""
import os
import socket


class Unread:
    """A request of whose body `sent` bytes are sent (all), and whose answer is left in the socket."""

    def __init__(self, d, path, body=b"", sent=None):
        self.s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.s.settimeout(60)
        self.s.connect(str(d.socket))
        verb = f"POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}" if body else f"GET {path} HTTP/1.1"
        self.s.sendall(f"{verb}\r\nHost: localhost\r\n\r\n".encode() + body[:sent])

    def read(self):
        """(status, head, body), all of it."""
        self.s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.more()
        head, body = data.split(b"\r\n\r\n", 1)
        size = int(next(x for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")).split(b":")[1])
        parts, got = [body], len(body)
        while got < size:
            parts.append(self.more())
            got += len(parts[-1])
        return int(head.split()[1]), head.decode(), b"".join(parts)

    def more(self):
        got = self.s.recv(1 << 20)
        assert got, "the answer is cut"
        return got

    def close(self):
        self.s.close()


def memfds(d):
    """Bytes of the memfds that the daemon holds open: answers, and nothing else here."""
    total = 0
    for fd in os.listdir(f"/proc/{d.proc.pid}/fd"):
        try:
            if os.readlink(f"/proc/{d.proc.pid}/fd/{fd}").startswith("/memfd:"):
                total += os.stat(f"/proc/{d.proc.pid}/fd/{fd}").st_size
        except OSError:
            pass
    return total
