"""JSON lines and the folders of runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from records import ROOT, RunFolder, read_records

FIELDS = {"id": str, "problem": str}
GOOD = '{"id": "a", "problem": "1 + 1"}'


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_records_in_order(tmp_path):
    """Blank lines do not count, more fields do not hurt, U+2028 does not end a line."""
    path = write(tmp_path / "f.jsonl", GOOD, "", '{"problem": "a\u2028b", "id": "b", "level": 3}')
    assert read_records(path, FIELDS) == [
        {"id": "a", "problem": "1 + 1"},
        {"id": "b", "problem": "a\u2028b", "level": 3},
    ]


@pytest.mark.parametrize(
    "line, words",
    [
        ("{", "line 3: no JSON: "),
        ("[1, 2]", r"line 3: no JSON object, but \[1, 2\]"),
        ('{"id": "b"}', "line 3: no field 'problem'"),
        ('{"id": "b", "problem": 5}', "line 3: 'problem' is 5, not a str"),
        ('{"id": "b", "problem": null}', "line 3: 'problem' is None, not a str"),
        (GOOD, "line 3: id 'a' comes twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    path = write(tmp_path / "f.jsonl", GOOD, "", line)
    with pytest.raises(ValueError, match=words) as error:
        read_records(path, FIELDS)
    assert "\n" not in str(error.value)


def test_a_file_of_other_bytes(tmp_path):
    (tmp_path / "f.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="f.jsonl is not UTF-8: bad byte at offset 0"):
        read_records(tmp_path / "f.jsonl", FIELDS)


def test_a_folder_is_taken_up_again(tmp_path):
    settings = {"budget": [128, 256], "prompt": "é"}
    first = RunFolder(tmp_path / "run", settings)
    first.append({"n": 1})
    first.append({"n": "é"})
    again = RunFolder(tmp_path / "run", settings)
    assert again.records == first.records == [{"n": 1}, {"n": "é"}]
    again.append({"n": 3})
    assert (tmp_path / "run/records.jsonl").read_text(encoding="utf-8") == (
        '{"n": 1}\n{"n": "é"}\n{"n": 3}\n'
    )


def test_a_line_cut_short_is_written_anew(tmp_path):
    """A kill in the middle of a write, here of a character, loses that line alone."""
    RunFolder(tmp_path, {}).append({"n": "é"})
    file = tmp_path / "records.jsonl"
    whole = file.read_bytes()
    for end in range(len(whole)):
        file.write_bytes(whole + whole[:end])
        folder = RunFolder(tmp_path, {})
        assert folder.records == [{"n": "é"}]
        folder.append({"n": 2})
        assert file.read_bytes() == whole + b'{"n": 2}\n'


@pytest.mark.parametrize("other", [{"seed": 1, "budget": 8}, {"seed": 0}, {"seed": 0, "new": 1}])
def test_other_settings_are_refused(tmp_path, other):
    """And the folder stays what it was."""
    RunFolder(tmp_path / "run", {"seed": 0, "budget": 8}).append({"n": 1})
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match="run holds a run with .*; name another output folder"):
        RunFolder(tmp_path / "run", other)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_damaged_settings(tmp_path):
    (tmp_path / "settings.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="settings.json is damaged; name another"):
        RunFolder(tmp_path, {})


def test_processes_share_a_folder(tmp_path):
    """Each writes its own file, none disturbs another's, and the next run reads them all."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r})\n"
        "from pathlib import Path; from records import RunFolder\n"
        "rank = int(sys.argv[1]); folder = RunFolder(Path(sys.argv[2]), {'seed': 0}, rank)\n"
        "for n in range(50): folder.append({'rank': rank, 'n': n})\n"
    )
    command = [sys.executable, "-c", program]
    running = [subprocess.Popen([*command, str(rank), str(tmp_path / "run")]) for rank in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    records = RunFolder(tmp_path / "run", {"seed": 0}).records
    wanted = [{"rank": rank, "n": n} for rank in (1, 2, 0) for n in range(50)]
    assert sorted(map(json.dumps, records)) == sorted(map(json.dumps, wanted))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "settings.json",
        "records.jsonl",
        "records.1.jsonl",
        "records.2.jsonl",
    }
