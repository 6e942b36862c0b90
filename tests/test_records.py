"""JSON lines and the folders of runs."""

import dataclasses
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from records import ROOT, RunFolder, check_output, process_rank, read_lines, read_records

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


def test_a_byte_order_mark_is_no_matter(tmp_path):
    (tmp_path / "f.jsonl").write_text("\ufeff" + GOOD, encoding="utf-8")
    assert read_records(tmp_path / "f.jsonl", FIELDS)[0]["id"] == "a"


def test_long_values_are_told_in_short(tmp_path):
    path = write(tmp_path / "f.jsonl", json.dumps({"id": "a", "problem": [1] * 9999}))
    with pytest.raises(ValueError, match=r"line 1: 'problem' is \[1, 1, ") as error:
        read_records(path, FIELDS)
    assert len(str(error.value)) < 300
    path = write(tmp_path / "f.jsonl", "[" * 100_000)
    with pytest.raises(ValueError, match="line 1: no JSON: "):
        read_records(path, FIELDS)


def open_folder(path, settings, *records, rank=0):
    """Add records to a folder and close it, as a process does that ends."""
    folder = RunFolder(path, settings, rank)
    for record in records:
        folder.append(record)
    folder.stream.close()


def test_a_folder_is_taken_up_again(tmp_path):
    settings = {"budget": [128, 256], "prompt": "é"}
    open_folder(tmp_path / "run", settings, {"n": 1}, {"n": "é"})
    assert read_lines(tmp_path / "run", "records") == [{"n": 1}, {"n": "é"}]
    open_folder(tmp_path / "run", settings, {"n": 3})
    assert (tmp_path / "run/records.jsonl").read_text(encoding="utf-8") == (
        '{"n": 1}\n{"n": "é"}\n{"n": 3}\n'
    )


def test_a_line_cut_short_is_written_anew(tmp_path):
    """A kill in the middle of a write, here of a character, loses that line alone.

    Others do not see it: they read while it is being written.
    """
    open_folder(tmp_path, {}, {"n": "é"})
    file = tmp_path / "records.jsonl"
    whole = file.read_bytes()
    for end in range(len(whole)):
        file.write_bytes(whole + whole[:end])
        assert read_lines(tmp_path, "records") == [{"n": "é"}]
        open_folder(tmp_path, {}, {"n": 2})
        assert file.read_bytes() == whole + b'{"n": 2}\n'


def test_files_of_one_name(tmp_path):
    """Of the processes, and no copies."""
    for rank in (0, 1, 12):
        open_folder(tmp_path, {}, {"rank": rank}, rank=rank)
    (tmp_path / "records-old.jsonl").write_text('{"rank": 0}\n')
    assert [record["rank"] for record in read_lines(tmp_path, "records")] == [0, 1, 12]


def test_a_damaged_line_is_named(tmp_path):
    open_folder(tmp_path, {}, {"n": 1})
    (tmp_path / "records.1.jsonl").write_text('{"n": 2}\nno\n')
    with pytest.raises(ValueError, match=r"records\.1\.jsonl, line 2: no JSON: "):
        read_lines(tmp_path, "records")


@pytest.mark.parametrize("other", [{"seed": 1, "budget": 8}, {"seed": 0}, {"seed": 0, "new": 1}])
def test_other_settings_are_refused(tmp_path, other):
    """And the folder stays what it was."""
    open_folder(tmp_path / "run", {"seed": 0, "budget": 8}, {"n": 1})
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ValueError, match="run holds a run with .*; name another output folder"):
        RunFolder(tmp_path / "run", other)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_settings_of_a_run_at_work_stay(tmp_path):
    """Though it has no results yet: another is refused before it writes its own."""
    folder = RunFolder(tmp_path, {"seed": 0})
    with pytest.raises(ValueError, match="another run writes there"):
        RunFolder(tmp_path, {"seed": 1})
    folder.append({"n": 1})
    folder.stream.close()
    open_folder(tmp_path, {"seed": 0})


def test_other_files_do_not_matter(tmp_path):
    (tmp_path / "settings.123").write_text("left over")
    (tmp_path / "log.txt").write_text("of a shell")
    open_folder(tmp_path, {"seed": 0}, {"n": 1})
    open_folder(tmp_path, {"seed": 0})


def test_a_folder_without_results_takes_other_settings(tmp_path):
    """A run that failed at its start is no reason to refuse the next."""
    open_folder(tmp_path, {"seed": 0})
    open_folder(tmp_path, {"seed": 1}, {"n": 1})
    with pytest.raises(ValueError, match="holds a run with seed 1, not 0"):
        RunFolder(tmp_path, {"seed": 0})


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_damaged_settings(tmp_path, content):
    open_folder(tmp_path, {}, {"n": 1})
    (tmp_path / "settings.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="settings.json is damaged; name another"):
        RunFolder(tmp_path, {})


def test_one_process_a_file(tmp_path):
    """A second one, which would do the same work again, is refused."""
    folder = RunFolder(tmp_path, {})
    with pytest.raises(ValueError, match="another run writes there; wait for it or stop it"):
        RunFolder(tmp_path, {})
    RunFolder(tmp_path, {}, rank=1).stream.close()
    folder.stream.close()
    open_folder(tmp_path, {})


@pytest.mark.parametrize(
    "rank, world, found",
    [
        (None, None, (0, 1)),
        ("1", "2", (1, 2)),
        ("2", "2", None),
        ("x", "2", None),
        ("0", "0", None),
    ],
)
def test_ranks(monkeypatch, rank, world, found):
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    if found is not None:
        assert process_rank() == found
    else:
        with pytest.raises(ValueError, match=f"RANK '{rank}' is not a number below .* '{world}'"):
            process_rank()


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
    records = read_lines(tmp_path / "run", "records")
    wanted = [{"rank": rank, "n": n} for rank in (1, 2, 0) for n in range(50)]
    assert sorted(map(json.dumps, records)) == sorted(map(json.dumps, wanted))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "settings.json",
        "records.jsonl",
        "records.1.jsonl",
        "records.2.jsonl",
    }


@pytest.mark.parametrize(
    "name, suffix, words",
    [
        ("none/a.json", ".json", "no such folder: {folder}/none"),
        ("folder.json", ".json", "output must be a .json file, got {folder}/folder.json"),
        ("a.png", ".json", "output must be a .json file, got {folder}/a.png"),
        ("a", ".md", "output must be a .md file, got {folder}/a"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused(tmp_path, name, suffix, words):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ValueError) as caught:
        check_output(tmp_path / name, suffix)
    assert str(caught.value) == words.format(folder=tmp_path)


@pytest.mark.parametrize(
    "script, options",
    [
        ("calibrate", ("--labels", "none", "--traces", "none.jsonl")),
        ("calibrate", ("--labels", "none", "--traces", "none.jsonl", "--output", "a.json")),
        ("quantization", ("--traces", "none.jsonl")),
        ("variants", ("--traces", "none.jsonl", "--calibration", "c.json")),
        ("check_gpu", ("--tiny",)),
    ],
)
def test_it_is_refused_before_anything_is_read(tmp_path, monkeypatch, capsys, script, options):
    """In a folder that is not there, of which the traces and labels would tell next."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module("variants"), "POLICIES", {})  # which it adds to
    settings = dataclasses.asdict(tiny.calibration(2))
    (tmp_path / "c.json").write_text(json.dumps(settings), encoding="utf-8")
    last = ("--held-out" if "--output" in options else "--output", "nowhere/out.json")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *options, *last])
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(script).main()
    assert exit.value.code == 2
    assert capsys.readouterr().err.endswith("error: no such folder: nowhere\n")
