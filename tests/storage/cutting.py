"""A proxy that breaks connections in the middle of what they carry."""

import contextlib
import socket
import struct
import threading

_BLOCK_BYTES = 1 << 16


class CuttingProxy:
    """
    Passes bytes on to a port of this machine. The next `num_cuts` connections that carry more
    than `cut_after_bytes` one way are reset there.
    """

    def __init__(self, port, *, cut_after_bytes):
        self._target = ("127.0.0.1", port)
        self._cut_after_bytes = cut_after_bytes
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_cuts = 0

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BLOCK_BYTES)  # little is lost with a reset
                far = socket.create_connection(self._target, timeout=30)
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=pair, daemon=True).start()

    def _pass(self, source, target):
        carried = 0
        with contextlib.suppress(OSError):
            while block := source.recv(_BLOCK_BYTES):
                target.sendall(block)
                carried += len(block)
                if carried > self._cut_after_bytes and self._take_cut():
                    break
        for end in (source, target):
            _reset(end)

    def _take_cut(self):
        with self._lock:
            left, self.num_cuts = self.num_cuts, max(0, self.num_cuts - 1)
            return left > 0


def _reset(end):
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RDWR)
        end.close()
