"""Reads W&B's offline files (``run-ID.wandb``) without W&B, whose own reader is gone since 0.30.

The format: a header of 7 bytes, then LevelDB's log framing (blocks of 32 KiB; pieces of checksum, length and type; the
checksum is zlib's CRC-32 over type and data), whose payloads are messages of ``wandb_internal.Record`` in Protocol
Buffers' wire format. Only the fields that a record of ours needs are read. What follows a damaged piece is left out,
as after a kill.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK_BYTES = 32 * 1024
HEADER = b":W&B" + struct.pack("<H", 0xBEE1)
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# Field numbers of wandb_internal.proto.
_HISTORY, _SUMMARY, _CONFIG, _ARTIFACT, _ALERT, _RUN, _EXIT, _PREEMPTING = 2, 3, 5, 8, 10, 17, 18, 23
_ITEM_KEY, _ITEM_NESTED_KEY, _ITEM_VALUE_JSON = 1, 2, 16
_ITEM_NONE, _ITEM_BOOLEAN, _ITEM_INTEGER, _ITEM_NUMBER, _ITEM_TEXT, _ITEM_JSON = 3, 4, 5, 6, 7, 8
_RUN_TEXTS = {1: "id", 2: "entity", 3: "project", 6: "group", 7: "job_type", 8: "name", 13: "host"}
_RUN_CONFIG, _RUN_TAGS, _RUN_START = 4, 10, 17

Fields = dict[int, list[Any]]


@dataclass
class OfflineRun:
    """What one offline file holds.

    Args:
        path: the file.
        id, entity, project, group, job_type, name, host, tags: of the run.
        started_s: seconds since 1970; None where it is not noted.
        config: nested.
        history: one mapping per logged row, in order; nested keys are joined by dots.
        summary: as logged; nested keys are joined by dots.
        artifacts: names of the artifacts that were logged.
        alerts: titles.
        exit_code: None if the run did not end.
        preempting: whether it said that it was about to be interrupted.
        whole: whether the file ends where a record ends.
    """

    path: Path
    id: str = ""
    entity: str = ""
    project: str = ""
    group: str = ""
    job_type: str = ""
    name: str = ""
    host: str = ""
    tags: list[str] = field(default_factory=list)
    started_s: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    exit_code: int | None = None
    preempting: bool = False
    whole: bool = True


def read_offline_run(path: Path) -> OfflineRun:
    """The content of an offline file, as far as it is undamaged.

    Args:
        path: the file, or the ``offline-run-*`` folder that holds it.

    Raises:
        ValueError: if it is none, or says nothing about its run.
    """
    if path.is_dir():
        found = sorted(path.glob("run-*.wandb"))
        if not found:
            raise ValueError(f"no run-*.wandb in {path}")
        path = found[0]
    data = path.read_bytes()
    if data[:6] != HEADER:
        raise ValueError(f"{path} is no offline file of W&B")
    run = OfflineRun(path)
    try:
        for message in _messages(data, run):
            _take(run, _fields(message))
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    if not run.id:
        raise ValueError(f"{path} does not say whose it is: it was cut off before its first record")
    return run


def _messages(data: bytes, run: OfflineRun) -> Iterator[bytes]:
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < 7:  # no piece starts that late in a block
            at += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + 7 : at + 7 + length]
        if kind == 0 and length == 0 and checksum == 0:  # the rest of the block is padding
            at += left
            continue
        if len(piece) < length or zlib.crc32(bytes([kind]) + piece) != checksum:
            run.whole = False
            return
        at += 7 + length
        parts = piece if kind in (_FULL, _FIRST) else parts + piece
        if kind in (_FULL, _LAST):
            yield parts
    run.whole = at >= len(data)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _fields(message: bytes) -> Fields:
    found: Fields = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        value: Any
        if wire == _VARINT:
            value, at = _varint(message, at)
        elif wire == _FIXED64:
            value, at = struct.unpack_from("<d", message, at)[0], at + 8
        elif wire == _FIXED32:
            value, at = message[at : at + 4], at + 4
        elif wire == _BYTES:
            length, at = _varint(message, at)
            value, at = message[at : at + length], at + length
        else:
            raise IndexError(f"wire type {wire}")
        found.setdefault(number, []).append(value)
    return found


def _take(run: OfflineRun, record: Fields) -> None:
    if _RUN in record:
        _take_run(run, _fields(record[_RUN][0]))
    for message in record.get(_CONFIG, ()):
        for keys, value in _items(message, 1):
            _put(run.config, keys, value)
    for message in record.get(_HISTORY, ()):
        run.history.append({".".join(keys): value for keys, value in _items(message, 1)})
    for message in record.get(_SUMMARY, ()):
        run.summary |= {".".join(keys): value for keys, value in _items(message, 1)}
    for message in record.get(_ARTIFACT, ()):
        run.artifacts += [name.decode() for name in _fields(message).get(5, ())]
    for message in record.get(_ALERT, ()):
        run.alerts += [title.decode() for title in _fields(message).get(1, ())]
    if _PREEMPTING in record:
        run.preempting = True
    for message in record.get(_EXIT, ()):
        run.exit_code = _fields(message).get(1, [0])[0]


def _take_run(run: OfflineRun, fields: Fields) -> None:
    for number, name in _RUN_TEXTS.items():
        if number in fields:
            setattr(run, name, fields[number][0].decode())
    run.tags = [tag.decode() for tag in fields.get(_RUN_TAGS, ())] or run.tags
    if _RUN_START in fields:
        start = _fields(fields[_RUN_START][0])
        run.started_s = start.get(1, [0])[0] + 1e-9 * start.get(2, [0])[0]
    for message in fields.get(_RUN_CONFIG, ()):
        for keys, value in _items(message, 1):
            _put(run.config, keys, value)


def _items(message: bytes, number: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Keys and values of the items in a history, summary or config record."""
    for item in map(_fields, _fields(message).get(number, ())):
        found: list[bytes] = item.get(_ITEM_NESTED_KEY) or item.get(_ITEM_KEY) or []
        keys = tuple(key.decode() for key in found)
        if keys:
            yield keys, _value(item)


def _value(item: Fields) -> Any:
    """JSON, or one of the typed forms that are to follow it."""
    if texts := item.get(_ITEM_VALUE_JSON) or item.get(_ITEM_JSON):
        return json.loads(texts[0])
    if _ITEM_BOOLEAN in item:
        return bool(item[_ITEM_BOOLEAN][0])
    if _ITEM_INTEGER in item:  # zigzag
        return (item[_ITEM_INTEGER][0] >> 1) ^ -(item[_ITEM_INTEGER][0] & 1)
    if _ITEM_NUMBER in item:
        return item[_ITEM_NUMBER][0]
    return item[_ITEM_TEXT][0].decode() if _ITEM_TEXT in item else None


def _put(config: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    *folders, last = keys
    for key in folders:
        inner = config.get(key)
        config = config.setdefault(key, {}) if isinstance(inner, Mapping) or inner is None else config
    config[last] = value
