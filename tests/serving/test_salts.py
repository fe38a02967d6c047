"""Who learns from a server's prefixes what others have asked: holders of the same key, and of the same salt."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from launch.server.keys import Keys, secret_in
from tests.families import save_tiny_llama
from tests.serving.fakes import chat_tokenizer
from tests.serving.test_server import Job, job, options

ANNE, BOB = "the-key-of-anne-1234", "the-key-of-bob-56789"
TEXT = "the letters of the captain to his sister, from the ice. " * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), chat_tokenizer())


def keys_file(folder: Path, *keys: str) -> str:
    path = folder / "keys"
    path.write_text("\n".join(keys))
    path.chmod(0o600)
    return f"serve.api_key_file={path}"


def is_found(server: Job, key: str, **more: Any) -> bool:
    """Whether a server reuses all that it can of the text, by what it tells the holder of a key."""
    server.client.headers["authorization"] = f"Bearer {key}"
    usage = server.post({"prompt": TEXT, "max_tokens": 3, **more}).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached in (0, usage["prompt_tokens"] - 1)
    return bool(cached)


def test_a_key_finds_what_it_has_asked_and_nothing_of_others(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    kept = "serve.prefix_cache_bytes=100000000", f"serve.prefix_folder={folder}"
    with job(*options(model, *kept, keys_file(tmp_path, ANNE, BOB))) as server:
        asked = [(ANNE, {}), (BOB, {}), (ANNE, {"cache_salt": "x"}), (BOB, {"cache_salt": "x"})]
        assert [is_found(server, key, **more) for key, more in asked] == [False] * 4
        assert [is_found(server, key, **more) for key, more in asked] == [True] * 4
        assert not is_found(server, ANNE, cache_salt="y")
        server.client.headers["authorization"] = f"Bearer {ANNE}"
        refused = server.post({"prompt": TEXT, "cache_salt": ""}).json()["error"]
        assert (refused["param"], refused["message"]) == (
            "cache_salt",
            "'cache_salt' must be a text of 1 to 1024 characters",
        )
        os.kill(server.ranks[0].pid, signal.SIGTERM)
        assert [rank.wait(60) for rank in server.ranks] == [0, 0]
    said = "".join(path.read_bytes().decode("latin-1") for path in folder.iterdir())
    assert TEXT[:10] not in said and ANNE not in said  # of texts there are numbers
    carla = "the-key-of-carla-000"
    with job(*options(model, *kept, keys_file(tmp_path, carla, BOB, ANNE))) as server:
        assert [is_found(server, key) for key in (ANNE, BOB, carla)] == [True, True, False]


def test_with_prefix_share_a_key_finds_what_others_have_asked(model: str, tmp_path: Path) -> None:
    given = "serve.prefix_cache_bytes=100000000", "serve.prefix_share=true", keys_file(tmp_path, ANNE, BOB)
    with job(*options(model, *given)) as server:
        assert [is_found(server, key) for key in (ANNE, BOB)] == [False, True]
        salted = [is_found(server, key, cache_salt="x") for key in (ANNE, BOB)]
        assert salted == [False, True], "whoever knows the salt"


def test_a_salt_depends_on_the_key_and_not_on_its_place_or_name() -> None:
    secret = bytes(32)
    keys, others = Keys([ANNE, BOB], secret=secret), Keys([f"bob:{BOB}", f"anne:{ANNE}"], secret=secret)

    def salt(keys: Keys, key: str, cache_salt: str | None = None) -> str:
        return keys.salt(keys.admitted(f"Bearer {key}"), cache_salt)

    assert salt(keys, ANNE) == salt(others, ANNE) != salt(keys, BOB)
    assert salt(Keys([ANNE]), ANNE) != salt(Keys([ANNE]), ANNE), "each has a secret of its own"
    assert salt(Keys(secret=secret), ANNE) == salt(Keys([ANNE], share=True), ANNE) == ""
    of_x = salt(Keys(secret=secret), "", "x")
    assert of_x == salt(Keys([ANNE], secret=secret, share=True), ANNE, "x") not in ("", salt(keys, ANNE, "x"))
    assert ANNE not in salt(keys, ANNE, ANNE) and len({salt(keys, ANNE, each) for each in (None, "x", "y")}) == 3


def test_the_secret_of_a_folder_is_kept_there_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "prefixes"
    secret = secret_in(str(folder), "serve.prefix_folder")
    assert len(secret) == 32 and secret_in(str(folder), "serve.prefix_folder") == secret
    assert (folder / "salt").stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    assert secret_in(str(tmp_path / "other"), "serve.prefix_folder") != secret
    (folder / "salt").chmod(0o644)
    with pytest.raises(ValueError, match=r"other users may read salt \(mode 644\); use chmod 600"):
        secret_in(str(folder), "serve.prefix_folder")
    (folder / "salt").chmod(0o600)
    (folder / "salt").write_bytes(b"short")
    with pytest.raises(ValueError, match="salt has 5 bytes, not 32; remove it"):
        secret_in(str(folder), "serve.prefix_folder")
    folder.chmod(0o755)
    with pytest.raises(ValueError, match="use chmod 700"):
        secret_in(str(folder), "serve.prefix_folder")
