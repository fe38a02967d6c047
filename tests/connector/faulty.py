"""A proxy before our server that does to a prompt, its answer and its file what a drill wants."""

from __future__ import annotations

import http.client
import json
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from safetensors import safe_open
from safetensors.torch import save_file

from tests.connector.fake_server import Answer

FAULTS = (
    "none",
    "late",
    "hangs",
    "busy",
    "full",
    "lost",
    "closed",
    "no json",
    "cut off",
    "damaged",
    "damaged later",
    "cut off later",
    "gone",
    "gone later",
    "foreign",
    "other prompt",
    "shorter prompt",
    "aborted",
)
KILLS = ("our server killed", "vLLM killed")
"""Faults of whole processes: of ours while it computes, of vLLM while it loads."""

SOON_S = 0.01
"""Seconds within which something happens to a file that is being loaded."""
PREFILL_S = 0.15
"""Seconds within which a rank is killed. A prefill takes about as long."""


class Faulty:
    """The answers to POST /v1/prefill, by prompt.

    Args:
        folder: of our server's files.
        url: says where our server is now.
        kill: kills a process of a kind of `KILLS`.

    Attributes:
        fault: by the prompt's tokens.
        chance: of times and places; of each round its own.
    """

    def __init__(self, folder: Path, url: Callable[[], str], kill: Callable[[str], object]) -> None:
        self._folder, self._url, self._kill = folder, url, kill
        self.fault: dict[tuple[int, ...], str] = {}
        self.chance = random.Random(0)

    def __call__(self, ids: list[int], closed: Callable[[float], bool]) -> Answer:
        fault = self.fault[tuple(ids)]
        match fault:
            case "busy":
                return 429, {"error": {"message": "the queue is full"}}
            case "full":
                return 507, {"error": {"message": "no space left"}}
            case "lost":
                return 503, {"error": {"message": "a rank is lost"}}
            case "closed":
                return 0, None
            case "no json":
                return 200, b"<html>"
            case "hangs":
                closed(30)
                return 0, None
            case "late" | "aborted":
                closed(self.chance.random() * 0.3)
            case "shorter prompt":
                return self._asked(ids[:-1], closed)
            case "other prompt":
                return self._asked([ids[0] ^ 1, *ids[1:]], closed)
            case "our server killed":
                threading.Timer(self.chance.random() * PREFILL_S, self._kill, (fault,)).start()
        answer = self._asked(ids, closed)
        if answer[0] != 200:
            return answer
        path = self._folder / answer[1]["file"]
        later = {"cut off later": self._cut, "damaged later": self._damage, "gone later": _remove}
        now = {"cut off": self._cut, "damaged": self._damage, "gone": _remove, "foreign": _of_another_model}
        if fault in now:
            now[fault](path)
        elif fault in later:
            threading.Timer(self.chance.random() * SOON_S, later[fault], (path,)).start()
        elif fault == "vLLM killed":
            threading.Timer(self.chance.random() * SOON_S, self._kill, (fault,)).start()
        return answer

    def _asked(self, ids: list[int], closed: Callable[[float], bool]) -> Answer:
        """The answer of our server, as it is; where the client goes, so do we."""
        connection = http.client.HTTPConnection(urlsplit(self._url()).netloc, timeout=60)
        found: list[Answer] = []

        def ask() -> None:
            with suppress(OSError, http.client.HTTPException, ValueError):
                connection.request(
                    "POST", "/v1/prefill", json.dumps({"prompt": ids}), {"Content-Type": "application/json"}
                )
                response = connection.getresponse()
                found.append((response.status, json.loads(response.read())))

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        while asking.is_alive():
            asking.join(0.005)
            if asking.is_alive() and closed(0.0):
                break
        connection.close()
        return found[0] if found else (0, None)

    def _cut(self, path: Path) -> None:
        with path.open("r+b") as file:
            file.truncate(self.chance.randrange(path.stat().st_size))

    def _damage(self, path: Path) -> None:
        """One byte of keys and values; in place, as a failing memory would."""
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(self.chance.randrange(size // 2, size))
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 255]))


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def _of_another_model(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        about = dict(file.metadata()) | {"model": "another"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, part := path.with_suffix(".part"), metadata=about)
    part.rename(path)
