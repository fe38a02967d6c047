"""Files of handed-over prompts: what is read, and every way in which a file can be damaged."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runahead_vllm.prompt_file import PromptFile, file_name
from tests.connector.written import KEY, SALT, numbers, write

IDS = [7, 8, 9, 300]


def read_all(path: Path) -> list[torch.Tensor]:
    with PromptFile(path) as file:
        file.require(num_tokens=len(IDS), num_layers=3, model=KEY)
        buffer = torch.empty(max(layer.num_bytes for layer in file.layers), dtype=torch.uint8)
        return [file.read(number, buffer).clone() for number in range(len(file.layers))]


def test_the_name_is_a_hash_of_model_salt_and_tokens() -> None:
    text = b"runahead handover 1\0" + KEY.encode() + b"\0" + SALT.encode() + b"\0" + struct.pack("<4q", *IDS)
    assert file_name(KEY, SALT, IDS) == hashlib.sha256(text).hexdigest() + ".safetensors"


@pytest.mark.parametrize("salt", ["", SALT, "é"])
@pytest.mark.parametrize("ids", [[], IDS, [2**31, 0, 5]])
def test_the_name_is_that_of_the_server(ids: list[int], salt: str) -> None:
    from runahead.reuse.handover import file_name as servers_name
    from runahead.reuse.tiers.folder import SUFFIX

    assert file_name(KEY, salt, ids) == servers_name(KEY, salt, ids) + SUFFIX


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_layers_are_read_as_they_were_written(tmp_path: Path, dtype: torch.dtype) -> None:
    written = [layer.to(dtype) for layer in numbers(IDS)]
    found = read_all(write(tmp_path, IDS, written))
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(found, written, strict=True))


def test_the_end_of_a_window_layer_says_its_first_token(tmp_path: Path) -> None:
    layers = numbers(IDS)
    layers[1] = layers[1][3:]
    with PromptFile(write(tmp_path, IDS, layers, first=[0, 3, 0])) as file:
        assert [layer.first for layer in file.layers] == [0, 3, 0]


def header(change: Callable[[dict], object]) -> Callable[[bytes], bytes]:
    """Bytes of a file with another header."""

    def damaged(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + length])
        change(found)
        text = json.dumps(found).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return damaged


def without(name: str) -> Callable[[bytes], bytes]:
    return header(lambda found: found.pop(name))


def about(**more: str) -> Callable[[bytes], bytes]:
    return header(lambda found: found["__metadata__"].update(more))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"", "cut off in its header"),
        (lambda data: data[:5], "cut off in its header"),
        (lambda data: data[:60], "cut off in its header"),
        (lambda data: data[:-1], "bytes, and its header says"),
        (lambda data: data + b"x", "bytes, and its header says"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum of layer 2 differs"),
        (lambda data: struct.pack("<Q", 1 << 60) + data[8:], "its header says that it has"),
        (lambda data: struct.pack("<Q", 9) + b"[" * 9 + data[17:], "not one of a handed-over prompt"),
        (without("__metadata__"), "not one of a handed-over prompt"),
        (without("layer.0"), "not one of a handed-over prompt"),
        (without("layer.2"), "not one of a handed-over prompt"),
        (about(crc32="[1, 2]"), "not one of a handed-over prompt"),
        (about(crc32="[" * 100_000), "not one of a handed-over prompt"),
        (about(tokens="5"), "not one of a handed-over prompt"),
        (about(first="[0, 1, 0]"), "not one of a handed-over prompt"),
        (about(format="runahead segment 0"), "its format is 'runahead segment 0'"),
        (about(key="f" * 64), "made under another name"),
        (about(model="another"), "the server did not have when vLLM was started"),
        (header(lambda found: found["layer.1"].update(dtype="F64")), "not one of a handed-over prompt"),
        (header(lambda found: found["layer.1"].update(shape=[4, 2, 7])), "not one of a handed-over prompt"),
        (header(lambda found: found["layer.1"].update(found["layer.0"])), "layer 1 is not behind"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    path = write(tmp_path, IDS, numbers(IDS))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=words):
        read_all(path)


def test_a_file_of_other_tokens_or_layers_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, IDS, numbers(IDS))
    with PromptFile(path) as file, pytest.raises(ValueError, match="it has 4 tokens of 3 layers, wanted are 5 of 3"):
        file.require(num_tokens=5, num_layers=3, model=KEY)


def test_a_file_that_is_cut_off_while_it_is_read_ends_in_words(tmp_path: Path) -> None:
    """A mapped one would end the process."""
    path = write(tmp_path, IDS, numbers(IDS))
    with PromptFile(path) as file:
        path.open("r+b").truncate(path.stat().st_size - 10)
        buffer = torch.empty(file.layers[2].num_bytes, dtype=torch.uint8)
        with pytest.raises(ValueError, match="cut off in layer 2"):
            file.read(2, buffer)


def test_an_open_file_that_is_removed_stays_readable(tmp_path: Path) -> None:
    path = write(tmp_path, IDS, numbers(IDS))
    with PromptFile(path) as file:
        path.unlink()
        buffer = torch.empty(file.layers[0].num_bytes, dtype=torch.uint8)
        assert torch.equal(file.read(0, buffer), numbers(IDS)[0])
    with pytest.raises(FileNotFoundError):
        PromptFile(path)
