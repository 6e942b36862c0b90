# SPDX-License-Identifier: Apache-2.0
"""What the evaluations share: JSON lines, output folders that are taken up again, processes."""

import argparse
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

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
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: bad byte at offset {error.start}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        record = parse_object(line, where)
        for field, kind in fields.items():
            if field not in record:
                raise ValueError(f"{where}: no field {field!r}")
            if not isinstance(value := record[field], kind):
                raise ValueError(f"{where}: {field!r} is {repr(value)[:40]}, not a {kind.__name__}")
        if record["id"] in ids:
            raise ValueError(f"{where}: id {record['id'][:40]!r} comes twice")
        ids.add(record["id"])
        records.append(record)
    return records


def parse_object(line: str, where: str) -> dict:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no JSON: {one_line(error)}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where}: no JSON object, but {one_line(line)[:40]}")
    return record


class RunFolder:
    """A run's output: `settings.json`, and a line of JSON for each piece of work that is done.

    A run that was killed is taken up by opening its folder again; `read_lines` gives what is done.
    Processes that share a folder write a file each, `records.jsonl` and `records.1.jsonl` and so on
    by `rank`.

    Raises ValueError for a folder that holds results of other settings, which are not mixed, or in
    which another process of the same rank is at work.
    """

    def __init__(self, path: Path, settings: dict, rank: int = 0):
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.file = path / (f"records.{rank}.jsonl" if rank else "records.jsonl")
        self.stream = self.file.open("ab")
        try:
            fcntl.flock(self.stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{path}: another run writes there; wait for it or stop it") from None
        try:
            self.check(settings)
        except ValueError:
            self.stream.close()
            raise
        drop_torn_line(self.file)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error) -> None:
        """Let the next run write here."""
        self.stream.close()

    def check(self, settings: dict) -> None:
        """Compare with the settings of the folder's results, or write them if it has none."""
        file = self.path / "settings.json"
        text = json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
        results = [found for found in self.path.glob("*.jsonl") if found.stat().st_size]
        if not results or not file.exists():
            scratch = file.with_suffix(f".{os.getpid()}")
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(file)  # never half a file, whoever comes first
        try:
            found = parse_object(file.read_text(encoding="utf-8"), str(file))
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
        self.stream.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self.stream.flush()
        os.fsync(self.stream.fileno())


def read_lines(folder: Path, name: str) -> list[dict]:
    """What all processes have written to `name`.jsonl so far, without a half-written last line."""
    records = []
    for file in [folder / f"{name}.jsonl", *sorted(folder.glob(f"{name}.*.jsonl"))]:
        content = file.read_bytes() if file.exists() else b""
        *lines, _ = content[: content.rfind(b"\n") + 1].decode(errors="replace").split("\n")
        for number, line in enumerate(lines, start=1):
            records.append(parse_object(line, f"{file}, line {number}"))
    return records


def drop_torn_line(file: Path) -> None:
    """Cut off a last line that has no end: a process was killed while it wrote."""
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(file, whole)


def process_rank() -> tuple[int, int]:
    """This process's number and how many share the work, as torchrun tells them."""
    given = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    rank, world = (int(text) if text.isdecimal() else -1 for text in given)
    if not 0 <= rank < world:
        raise ValueError(f"RANK {given[0]!r} is not a number below WORLD_SIZE {given[1]!r}")
    return rank, world


def wait_for_others(is_complete: Callable[[], bool]) -> None:
    """Return once the other processes have done their share too."""
    told = False
    while not is_complete():
        if not told:
            advice = "if one has died, stop, and run alone to do what is missing"
            print(f"waiting for the other processes ({advice})", file=sys.stderr)
            told = True
        time.sleep(POLL_SECONDS)


def check_output(file: Path, suffix: str) -> None:
    """Raises ValueError, before there is any work to lose, for a file that cannot be written."""
    if not file.parent.is_dir():
        raise ValueError(f"no such folder: {file.parent}")
    if file.is_dir() or file.suffix != suffix:
        raise ValueError(f"output must be a {suffix} file, got {file}")


@contextmanager
def told_in_one_line(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Errors of users and of the machine end the program with a line, Ctrl-C without a word."""
    sys.stdout.reconfigure(errors="replace")  # a terminal without a character still shows the rest
    try:
        yield
    except (OSError, ValueError, torch.OutOfMemoryError) as error:
        parser.error(one_line(error))
    except KeyboardInterrupt:
        sys.exit(130)
