"""Adds a check value to JSON records, so that a change on disk is noticed.

A record without one is accepted: it may have been written by hand or by an earlier version.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any

CHECK_KEY = "crc32"


def with_check(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a record with its check value."""
    return {**record, CHECK_KEY: _check_value(record)}


def without_check(record: Any) -> Any:
    """Returns a record as it was before `with_check`; other JSON values as they are.

    Raises:
        ValueError: the record has changed since.
    """
    if not isinstance(record, dict) or CHECK_KEY not in record:
        return record
    rest = {key: value for key, value in record.items() if key != CHECK_KEY}
    if record[CHECK_KEY] != _check_value(rest):
        raise ValueError(f"its content does not match its check value, {CHECK_KEY}")
    return rest


def _check_value(record: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record).encode()):08x}"
