"""Examples come out of every kind of file, and what cannot be read is named by file and line."""

from __future__ import annotations

import csv
import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.errors import DataError
from lohan.train.data import files
from lohan.train.data.files import open_reader

RECORDS = [{"text": "one"}, {"text": "zwei\nü"}, {"text": ""}]


def read(path):
    return [record for _, record in open_reader(path)]


def refusal(path) -> str:
    with pytest.raises(DataError) as caught:
        read(path)
    return str(caught.value)


def test_lines_lists_and_tables_give_the_same_examples(tmp_path):
    lines = "\n\n".join(json.dumps(record) for record in RECORDS)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.json").write_text(json.dumps(RECORDS, indent=1))
    (tmp_path / "c.json").write_text("  " + lines)  # lines under the name of a list
    (tmp_path / "d.jsonl").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    (tmp_path / "e.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(RECORDS).encode())
    with open(tmp_path / "f.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["text"])
        writer.writeheader()
        writer.writerows(RECORDS)
    for path in sorted(tmp_path.iterdir()):
        assert read(path) == RECORDS, path


def test_examples_know_the_line_they_begin_in(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "b.json").write_text('[\n {"a":\n 1},\n\n {"a": 2}\n]')
    (tmp_path / "c.csv").write_text('a,b\n1,"x\ny"\n2,z\n')
    assert [number for number, _ in open_reader(tmp_path / "a.jsonl")] == [1, 3]
    assert [number for number, _ in open_reader(tmp_path / "b.json")] == [2, 5]
    assert [number for number, _ in open_reader(tmp_path / "c.csv")] == [2, 4]


@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=20) | st.integers(), max_size=3), max_size=8))
@settings(deadline=None, max_examples=50)
def test_a_list_is_read_piece_by_piece_as_it_is_read_whole(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(json.dumps(records, indent=1, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")
    before, files._CHUNK_BYTES = files._CHUNK_BYTES, 3
    try:
        try:
            expected = json.loads(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            assert "this is not UTF-8" in refusal(path)
            return
        assert read(path) == expected
    finally:
        files._CHUNK_BYTES = before


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": 2\n', "a.jsonl, line 2: this is not JSON: Expecting ',' delimiter at character"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "a.jsonl, line 2: an example must be an object, like {\"text\": \"...\"}, an"),
        ("a.jsonl", b'{"a": 1}\n\n"x"\n', "a.jsonl, line 3: an example must be an object"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xff"}\n', "a.jsonl, line 2: byte 8 of the line is not UTF-8. Save the file a"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: this"),
        ("a.jsonl", b"\x00\x01\x02", "a.jsonl, line 1: this is not JSON"),
        ("a.json", b'[{"a": 1},\n{"a": 2}', "a.json, line 2: the file ends inside the list. A comma or ] was expecte"),
        ("a.json", b'[{"a": 1}\n{"a": 2}]', "a.json, line 2: '{' stands between two examples."),
        ("a.json", b'[{"a": 1},\n\n{"a" 2}]', "a.json, line 3: this is not JSON: Expecting ':' delimiter."),
        ("a.json", b'[{"a": 1}, 3]', "a.json, line 1: an example must be an object"),
        ("a.json", b'[{"a": 1}]\n{}', "a.json, line 2: something follows the list."),
        ("a.json", b'"text"', "a.json, line 1: a list of objects was expected"),
        ("a.json", b"", "a.json, line 1: a list of objects was expected"),
        ("a.json", b'[\n{"a": "\xff"}]', "a.json, line 2: this is not UTF-8."),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", "a.csv, line 3: 3 values and 2 columns."),
        ("a.csv", b"a,a\n1,2\n", "a.csv, line 1: the names of the columns must be there, each once"),
        ("a.csv", b'a,b\n1,"x\n', "a.csv, line 2: this is not CSV: unexpected end of data."),
        ("a.csv", b"a\n\xff\n", "a.csv, line 2: byte 1 of the line is not UTF-8."),
        ("a.txt", b"x", "a.txt has an unknown ending. Files of examples end in .jsonl"),
        ("a.jsnol", b"x", "a.jsnol has an unknown ending. Did you mean .json"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_by_file_and_line(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_bytes(content)
    message = refusal(path)
    assert message.removeprefix(f"{tmp_path}/").startswith(expected)


def test_a_missing_file_and_a_strange_folder_are_named(tmp_path):
    assert refusal(tmp_path / "no.jsonl") == f"{tmp_path}/no.jsonl does not exist. Check train_file and eval_file."
    assert "a folder that datasets' save_to_disk did not write" in refusal(tmp_path)


def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "state.json").write_text("{}")
    assert "needs the package pyarrow, which is not installed. Install it: pip install pyarrow" in refusal(
        tmp_path / "a.parquet"
    )
    assert "needs the package datasets, which is not installed." in refusal(tmp_path)


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    records = [{"messages": [{"role": "user", "content": f"ü {n}"}], "n": n} for n in range(1000)]
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet", row_group_size=300)
    reader = open_reader(tmp_path / "a.parquet")
    assert list(reader) == list(enumerate(records, 1))
    assert reader.done_bytes == (tmp_path / "a.parquet").stat().st_size
    assert reader.place(7) == f"{tmp_path}/a.parquet, row 7"
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-100])
    assert "b.parquet cannot be read as Parquet after row 0" in refusal(tmp_path / "b.parquet")


def test_a_datasets_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    records = [{"prompt": f"p{n}", "completion": "c"} for n in range(600)]
    datasets.Dataset.from_list(records).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(records)}).save_to_disk(tmp_path / "many")
    assert read(tmp_path / "one") == records
    assert read(tmp_path / "many" / "train") == records
    assert (
        refusal(tmp_path / "many") == f"{tmp_path}/many holds several splits. Give one of them: {tmp_path}/many/train."
    )
