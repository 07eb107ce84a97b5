"""Server that answers every request with the same bytes."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def saying(answer: bytes) -> Iterator[str]:
    """Yield its URL; it answers one connection after another."""
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=_answer, args=(listener, answer), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10.0)


def _answer(listener: socket.socket, answer: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the listener is closed
            return
        with connection:
            connection.settimeout(10.0)
            connection.recv(65536)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):  # closing with unread input would discard the answer
                pass
