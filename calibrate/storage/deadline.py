"""A limit in time for a server's answer, by the timeout of its socket and a clock."""

import time
from http.client import HTTPResponse


def read_answer(answer: HTTPResponse, max_bytes: int, ends: float) -> bytes:
    """The body of an answer, up to one byte more than `max_bytes`.

    The clock is read after each piece, for which the server has the timeout of the socket. Neither
    bounds the look-up of a host's name, nor lines of a header or sizes of chunks that come byte by
    byte: http.client reads up to 65,536 bytes of each.

    Raises:
      TimeoutError: time.monotonic() is past `ends`, and more may follow.
    """
    data = bytearray()
    while len(data) <= max_bytes and (piece := answer.read1(max_bytes + 1 - len(data))):
        data += piece
        if time.monotonic() > ends:
            raise TimeoutError("the answer takes too long")
    return bytes(data)
