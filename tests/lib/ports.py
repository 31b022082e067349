"""Ports for servers of tests. They lie below those that the system gives to connections (32768 and more), so that nobody has one of them
by the time that a server takes it."""
import contextlib
import random
import socket


def free_ports(count, above=0):
    """Different ports that are free, as are those that lie `above` them."""
    found = []
    with contextlib.ExitStack() as held:
        while len(found) < count:
            port = random.SystemRandom().randrange(10000, 22000)  # forked tests have one sequence of others
            with contextlib.suppress(OSError):
                for p in {port, port + above}:
                    held.enter_context(socket.socket()).bind(("127.0.0.1", p))
                found.append(port)
    return found


def free_port():
    return free_ports(1)[0]
