# SPDX-License-Identifier: Apache-2.0
"""JSON lines with errors that name the line, and output folders from which a run goes on."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from model import one_line  # noqa: E402

POLL_SECONDS = 5


def read_records(path: Path, fields: dict[str, type]) -> list[dict]:
    """The objects of a JSON-lines file that all hold `fields` and an `id` of their own.

    fields: names and types; `id` among them. Blank lines are skipped. Raises ValueError, in one
    line with the number of the line, for one that is not such an object, and OSError.
    """
    records, ids = [], set()
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: bad byte at offset {error.start}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: no JSON: {one_line(error)}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{where}: no JSON object, but {one_line(line)[:40]}")
        for field, kind in fields.items():
            if field not in record:
                raise ValueError(f"{where}: no field {field!r}")
            if not isinstance(record[field], kind):
                raise ValueError(f"{where}: {field!r} is {record[field]!r}, not a {kind.__name__}")
        if record["id"] in ids:
            raise ValueError(f"{where}: id {record['id']!r} comes twice")
        ids.add(record["id"])
        records.append(record)
    return records


class RunFolder:
    """A run's output: `settings.json`, and a line of JSON for each piece of work that is done.

    A run that was killed is taken up by opening its folder again: `records` then holds what is
    done. Processes that share a folder write a file each, `records.jsonl` and `records.1.jsonl`
    and so on by `rank`; all are read.

    Raises ValueError for a folder of other settings, which are not mixed.
    """

    def __init__(self, path: Path, settings: dict, rank: int = 0):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.check(settings)
        self.file = path / (f"records.{rank}.jsonl" if rank else "records.jsonl")
        if self.file.exists():
            drop_torn_line(self.file)
        self.records = read_lines(path, "records")

    def check(self, settings: dict) -> None:
        """Compare with the folder's settings, or write them if it has none."""
        file = self.path / "settings.json"
        text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
        if not file.exists():
            scratch = file.with_suffix(f".{os.getpid()}")
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(file)  # never half a file, whoever comes first
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            raise ValueError(f"{file} is damaged; name another output folder") from None
        wanted = json.loads(text)
        for name in sorted({*found, *wanted}):
            if found.get(name) != wanted.get(name):
                raise ValueError(
                    f"{self.path} holds a run with {name} {found.get(name)!r}, not"
                    f" {wanted.get(name)!r}; name another output folder"
                )

    def append(self, record: dict) -> None:
        """Add a record, in the file when this returns."""
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)


def read_lines(folder: Path, name: str) -> list[dict]:
    """What all processes have written to `name`.jsonl so far, without a half-written last line."""
    records = []
    for file in sorted(folder.glob(f"{name}*.jsonl")):
        *lines, _ = file.read_text(encoding="utf-8").split("\n")
        records += map(json.loads, lines)
    return records


def drop_torn_line(file: Path) -> None:
    """Cut off a last line that has no end: a process was killed while it wrote."""
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(file, whole)


def process_rank() -> tuple[int, int]:
    """This process's number and how many share the work, as torchrun tells them."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def wait_for_others(is_complete: Callable[[], bool]) -> None:
    """Return once the other processes have done their share too."""
    told = False
    while not is_complete():
        if not told:
            print("waiting for the other processes", file=sys.stderr)
            told = True
        time.sleep(POLL_SECONDS)
