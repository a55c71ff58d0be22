"""What a server is told when it starts: where it listens, who may use it, and the bound of everything that can grow.

| what grows                       | bound                  | beyond it                                       |
|----------------------------------|------------------------|-------------------------------------------------|
| bytes of a body                  | `max_body_bytes`       | 413; read to its end and forgotten, up to a cap |
| seconds a body takes to arrive   | `body_seconds`         | 408                                             |
| seconds a connection says nothing| `idle_seconds`         | closed                                          |
| tokens of a prompt               | the engine's capacity  | 400                                             |
| completions of one body          | the engine's sequences | 400                                             |
| completions under way or waiting | `max_open`             | 503                                             |
| seconds a request takes          | `request_seconds`      | 503                                             |
| connections                      | `max_connections`      | 503                                             |
"""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass
from typing import final

__all__ = ["Settings"]


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """Where to listen (port 0: any that is free), the key that clients must send, and the bounds.

    Raises `ValueError` for an address that others can reach without a key, unless `insecure`, and for bounds below 1.
    grace_seconds: how long requests under way may go on after the server was told to stop.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    insecure: bool = False
    max_body_bytes: int = 8 * 2**20
    max_open: int = 256
    max_connections: int = 1024
    body_seconds: float = 30.0
    idle_seconds: float = 30.0
    request_seconds: float = 600.0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
            raise ValueError(
                "the API key is empty, or has spaces around it or characters that are no printable ASCII; expected a "
                "text that fits into an HTTP header"
            )
        if self.api_key is None and not self.is_loopback and not self.insecure:
            raise ValueError(
                f"host is {self.host}: others could use this server without a key; give --api-key, or listen on "
                f"127.0.0.1, or say --insecure"
            )
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port is {self.port}; expected 0 (any) to 65535")
        for name in (
            "max_body_bytes",
            "max_open",
            "max_connections",
            "body_seconds",
            "idle_seconds",
            "request_seconds",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected more than 0")
        if not self.grace_seconds >= 0:
            raise ValueError(f"grace_seconds is {self.grace_seconds}; expected at least 0")
        for name in ("idle_seconds", "grace_seconds"):
            if math.isinf(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number of seconds that ends")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_local(self.host)


def is_local(host: str) -> bool:
    """Whether a name or address means this machine: `localhost`, `127.0.0.0/8`, `::1`.

    >>> is_local("127.0.0.1"), is_local("[::1]"), is_local("0.0.0.0"), is_local("example.org")
    (True, True, False, False)
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
