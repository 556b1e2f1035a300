"""Tables as people have them: columns, encodings, separators and paths are recognised, named in a note, or refused."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest

from tests.data.pictures import jpeg
from weft.cli import main
from weft.data import inspect, open_data
from weft.errors import DataError, UsageError
from weft.inference.arguments import InferenceOptions
from weft.inference.inputs import open_labelled
from weft.recipes import load_recipe
from weft.train.plan import open_splits

NUMBER = 12


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Images `a00.jpg` to `a11.jpg` in the folder `train`."""
    (tmp_path / "train").mkdir()
    for i in range(NUMBER):
        (tmp_path / "train" / f"a{i:02}.jpg").write_bytes(jpeg(i))
    return tmp_path


def write(root: Path, header: str, row: str, name: str = "table.csv", encoding: str = "utf-8") -> Path:
    """Write a table with a row per image: `{i}` its number, `{pet}` its class, `{cat}` and `{dog}` 0 or 1."""
    rows = [row.format(i=i, pet=("cat", "dog")[i % 2], cat=1 - i % 2, dog=i % 2, fold=i % 5) for i in range(NUMBER)]
    (root / name).write_bytes("\n".join([header, *rows, ""]).encode(encoding))
    return root / name


RECOGNISED = {
    "image,label": "train/a{i:02}.jpg,{pet}",
    "id,breed": "a{i:02},{pet}",
    "image_id,label": "a{i:02}.jpg,{pet}",
    "Filename,Label_Name": "train/a{i:02}.jpg,{pet}",
    "photo,category": "train/a{i:02}.jpg,{pet}",
    "id,photo,label": "{i},train/a{i:02}.jpg,{pet}",
    "label,image": "{pet}, train\\a{i:02}.jpg",
    "image;label": "train/a{i:02}.jpg;{pet}",
    "image\tlabel\tnote": "train/a{i:02}.jpg\t{pet}\ta,b,c",
    "image|label": "train/a{i:02}.jpg|{pet}",
    "sep=;\nimage;label": "train/a{i:02}.jpg;{pet}",
    "image,label,fold": "train/a{i:02}.jpg,{pet},{fold}",
    "image,cat,dog": "a{i:02},{cat},{dog}.0",
    "image,patient,cat,dog": "a{i:02},p{i},{cat},{dog}",
}


@pytest.mark.parametrize("header", RECOGNISED)
def test_columns_are_recognised_and_guesses_named(header: str, root: Path) -> None:
    splits = open_data(write(root, header, RECOGNISED[header]))
    assert splits.classes == ["cat", "dog"]
    assert not splits.is_given
    pairs = [(source.keys[i], source.labels[i]) for source in (splits.train, splits.val) for i in range(len(source))]
    assert sorted(pairs) == [(f"train/a{i:02}.jpg", i % 2) for i in range(NUMBER)] or "\\" in RECOGNISED[header]
    assert [splits.train.read(0).data] == [(root / "train" / splits.train.keys[0][-7:]).read_bytes()]
    notes = " ".join(splits.notes)
    columns = header.partition("\n")[2] or header
    if "image" not in columns.replace("image_id", ""):
        assert "Read images from column '" in notes
    if "abel" not in columns:
        assert "classes from " in notes
    if "fold" in header:
        assert "Column 'fold' is not used, because its values are not names of splits: 0, 1, 2, 3, 4." in notes
    assert ("are searched below the folder of the table" in notes) == ("train/" not in RECOGNISED[header])


REFUSED = [
    (
        "id,name",
        "a{i:02},number {i}",
        r"Column 'name' has 12 values in 12 rows, such as 'number 0', which are no classes",
    ),
    ("id,size,colour", "a{i:02},{i},{pet}", r"has id, size, colour\. Choose the column of classes: --set data\.label="),
    ("image,cat,dog", "a{i:02},1,{dog}", r"columns cat, dog of .* have 0 and 1, and row 3 has 2 ones"),
    ("image,cat,dog", "a{i:02},0,{dog}", r"columns cat, dog of .* have 0 and 1, and row 2 has 0 ones"),
    ("train/a00.jpg,cat", "train/a{i:02}.jpg,{pet}", r"names an image: train/a00\.jpg, cat\. Add the line image,label"),
    ("image,label", "b{i:02}.jpg,{pet}", r"no row leads to a file, such as 'b00\.jpg'\. Choose another column"),
    ("image,label,split", "train/a{i:02}.jpg,{pet},{fold}", r"must be train, val or test; row 2 of .* has '0'"),
    ("image,label", "./train/a0{dog}.jpg,{pet}", r"list every image once; row 4 of .* lists './train/a00\.jpg' again"),
]


@pytest.mark.parametrize(("header", "row", "message"), REFUSED)
def test_wrong_guesses_are_refused_with_what_was_seen(header: str, row: str, message: str, root: Path) -> None:
    table = write(root, header, row)
    with pytest.raises(DataError, match=message):
        open_data(table)


def test_settings_choose_the_columns(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = write(root, "label,key,image,kind", "{i},a{i:02},b{i}.jpg,{pet}")
    chosen = {"image": "key", "label": "kind"}
    splits = open_data(table, **chosen)
    assert splits.classes == ["cat", "dog"]
    assert not any(note.startswith("Read ") for note in splits.notes)
    assert len(inspect(table, **chosen).good) == NUMBER
    with pytest.raises(
        UsageError, match=r"Unknown column for data\.label 'kinds'\. Nearest: kind, .* All names: label, key"
    ):
        open_data(table, label="kinds")
    arguments = ["data", "check", str(table), "--set", "data.image=key", "--set", "data.label=kind"]
    assert main(arguments) == 0
    assert f"weft train {table} --set data.image=key --set data.label=kind" in capsys.readouterr().out
    assert main([*arguments, "--set", "epochs=3"]) == 2
    assert "--set takes data.image and data.label here; got 'epochs'" in capsys.readouterr().err


def test_training_and_evaluation_read_the_columns_of_the_recipe(root: Path) -> None:
    table = write(root, "label,key,image,kind", "{i},a{i:02},b{i}.jpg,{pet}")
    chosen = [("data.source", str(table)), ("data.image", "key"), ("data.label", "kind")]
    recipe = load_recipe(None, chosen)
    splits = open_splits(recipe)
    assert splits.classes == ["cat", "dog"]
    assert open_labelled(table, splits.classes, 2, InferenceOptions(), recipe).val.keys == splits.val.keys


def test_a_column_of_splits_is_found_by_its_values(root: Path) -> None:
    table = write(root, "image,label,Usage", "train/a{i:02}.jpg,{pet},Training")
    table.write_text(
        table.read_text().replace("dog,Training", "dog,PublicTest", 2).replace("cat,Training", "cat,Test", 1)
    )
    splits = open_data(table)
    assert (len(splits.train), len(splits.val)) == (9, 3)
    assert any("the split from column 'Usage'" in note for note in splits.notes)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("is_valid", ("False", "True")),
        ("is_training_image", ("1", "0")),
        ("test", ("0", "1")),
        ("Partition", ("0", "1", "2")),
        ("set", ("TRAIN", "TEST", "")),
        ("anything", ("train", "val", "unlabeled")),
    ],
)
def test_a_column_that_looks_like_a_split_is_read_or_refused(column: str, values: tuple[str, ...], root: Path) -> None:
    rows = [f"train/a{i:02}.jpg,{('cat', 'dog')[i % 2]},{values[i // 2 % len(values)]}" for i in range(NUMBER)]
    (root / "table.csv").write_text("\n".join([f"image,label,{column}", *rows]))
    with pytest.raises(DataError, match=f"A column of splits must .* '{column}' of .* has .*{values[0]}"):
        open_data(root / "table.csv")


@pytest.mark.parametrize(
    ("header", "values"),
    [
        ("image,bus,train", ("1,0", "0,1")),  # one-hot
        ("image,test_result", ("0", "1")),
        ("image,label,test_result", ("cat,0", "dog,1")),
        ("image,label,vehicle", ("cat,train", "dog,bus")),
        ("image,label,Usage", ("cat,Training", "dog,Training")),
    ],
)
def test_other_columns_with_such_words_are_no_split(header: str, values: tuple[str, ...], root: Path) -> None:
    rows = [f"train/a{i:02}.jpg,{values[i % 2]}" for i in range(NUMBER)]
    (root / "table.csv").write_text("\n".join([header, *rows]))
    splits = open_data(root / "table.csv")
    assert not splits.is_given
    assert len(splits.train) + len(splits.val) == NUMBER


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('train/a03.jpg,cat,"a quote', "Quotes of a table must come in pairs"),
        ('train/a03.jpg,cat,"a quote" and more', "Quotes of a table must come in pairs"),
        ("train/a03.jpg,cat, small,x", "must have a value per column; row 5 .* has 4 for 3 columns"),
    ],
)
def test_no_row_is_swallowed_or_shifted(line: str, message: str, root: Path) -> None:
    table = write(root, "image,label,note", "train/a{i:02}.jpg,{pet},x")
    assert len(open_data(table).notes) == 1
    table.write_text(table.read_text().replace("train/a03.jpg,dog,x", line).replace("a09.jpg,dog,x", 'a09.jpg,dog,"x"'))
    with pytest.raises(DataError, match=message):
        open_data(table)


def test_columns_of_one_name_are_refused(root: Path) -> None:
    with pytest.raises(DataError, match=r"must have different names; .* has label more than once"):
        open_data(write(root, "image,label,label", "train/a{i:02}.jpg,{pet},{fold}"))


def test_one_path_leads_to_one_file(root: Path) -> None:
    (root / "test").mkdir()
    for i in range(3):
        (root / "test" / f"a{i:02}.jpg").write_bytes(jpeg(100 + i))
    table = write(root, "id,label", "a{i:02},{pet}")
    keys = [key for source in (open_data(table).train, open_data(table).val) for key in source.keys]
    assert sorted(keys) == [f"train/a{i:02}.jpg" for i in range(NUMBER)], "only train/ has all"
    for i in range(NUMBER):
        (root / "test" / f"a{i:02}.jpg").write_bytes(jpeg(100 + i))
    with pytest.raises(DataError, match=r"'a00' of .* can be test/a00\.jpg or train/a00\.jpg\. Write paths"):
        open_data(table)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252", "utf-32"])
def test_class_names_are_decoded(encoding: str, root: Path) -> None:
    table = write(root, "image,label", "train/a{i:02}.jpg,Kätzchen {pet}", encoding=encoding)
    splits = open_data(table)
    assert splits.classes == ["Kätzchen cat", "Kätzchen dog"]
    noted = [note for note in splits.notes if "read as Windows-1252, for example 'Kätzchen cat'" in note]
    assert len(noted) == (encoding == "cp1252")


@pytest.mark.parametrize(
    ("label", "encoding"),
    [("кот", "cp1251"), ("고양이", "cp949"), ("猫です", "shift-jis"), ("小狗", "gbk"), ("x", "utf-16-le")],
)
def test_other_encodings_are_refused(label: str, encoding: str, root: Path) -> None:
    table = write(root, "image,label", f"train/a{{i:02}}.jpg,{label} {{pet}}", encoding=encoding)
    with pytest.raises(DataError, match=r"must be (UTF-8 )?text; .* Save it as CSV UTF-8"):
        open_data(table)


def test_messages_cut_what_they_print(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values of the user's data: long, of bytes, or with control characters."""
    long = "\x1b[31m" + "x" * 1_000_000
    for header, row in (
        ("image,label", f"{long}{{i}},{{pet}}"),
        ("image,label", f"train/a{{i:02}}.jpg,{long}{{pet}}"),
        (f"image,{long},other", "train/a{i:02}.jpg,{pet},{i}"),
        (f"image,{long}", "train/a{i:02}.jpg,{pet}"),
        ("image,label,split", f"train/a{{i:02}}.jpg,{{pet}},{long}"),
    ):
        table = write(root, header, row)
        main(["data", "check", str(table)])
        out, err = capsys.readouterr()
        assert len(out) + len(err) < 10_000
        assert "\x1b" not in out + err
        for use in (open_data, lambda table: open_data(table, label="none")):
            try:
                notes = use(table).notes
            except (DataError, UsageError) as error:
                notes = [str(error)]
            assert all(len(note) < 3_000 and "\x1b" not in note for note in notes)


def parquet(root: Path, columns: dict[str, object], features: object = None, name: str = "p.parquet") -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    table = pyarrow.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    files.write_table(table, root / name)
    return root / name


@pytest.mark.filterwarnings("ignore")  # of other libraries
def test_images_in_parquet_are_read_and_never_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    images = [jpeg(i) for i in range(NUMBER)]
    labels = [i % 2 for i in range(NUMBER)]
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    for column in ([{"bytes": data, "path": None} for data in images], images):
        table = parquet(tmp_path, {"label": labels, "img": column, "more": [[1]] * NUMBER}, features)
        splits = open_data(table)
        pairs = [(source.read(i).label, source.read(i).data) for source in (splits.train, splits.val)
                 for i in range(len(source))]  # fmt: skip
        assert sorted(pairs) == sorted(zip(labels, images, strict=True))
        assert splits.classes == ["cat", "dog"]
        assert splits.train.keys[0].startswith("p.parquet/0/")
        assert main(["data", "check", str(table)]) == 0
        images.reverse()
        column.reverse()
    broken = parquet(tmp_path, {"label": labels, "image": [b"\xff\x00no image" * 1000] * NUMBER}, features, "b.parquet")
    capsys.readouterr()
    assert main(["data", "check", str(broken)]) == 3
    out, err = capsys.readouterr()
    assert len(out) + len(err) < 3_000
    assert "no image" not in out + err


@pytest.mark.filterwarnings("ignore")
def test_parquet_files_of_a_folder_belong_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    images = [{"bytes": jpeg(i), "path": None} for i in range(4)]
    parquet(data, {"image": images, "label": ["cat", "dog"] * 2}, name="train-00000-of-00001.parquet")
    other = parquet(data, {"image": images, "label": ["cat", "dog"] * 2}, name="more.parquet")
    with pytest.raises(DataError, match=r"must all say the split, .* 'more\.parquet' does not"):
        open_data(data)
    other.unlink()
    parquet(data, {"image": images, "class": ["cat", "dog"] * 2}, name="test-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"must have the same columns; .*train-00000-of-00001\.parquet' has image,"):
        open_data(data)


def test_a_byte_order_mark_is_no_part_of_a_column(root: Path) -> None:
    table = write(root, "image,label", "train/a{i:02}.jpg,{pet}", name="t.tsv", encoding="utf-8-sig")
    assert table.read_bytes().startswith(codecs.BOM_UTF8)
    assert not any(note.startswith("Read ") for note in open_data(table).notes)


@pytest.mark.filterwarnings("ignore")
def test_parquet_rows_without_an_image_are_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    images: list[object] = [{"bytes": jpeg(i), "path": None} for i in range(20)]
    images[3] = None
    images[4] = {"bytes": None, "path": None}
    digests = [b"%d" % i for i in range(20)]
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    labels = [float(i % 2) for i in range(20)]  # as pandas writes integers that may be missing
    table = parquet(tmp_path, {"md5": digests, "image": images, "label": labels}, features)
    splits = open_data(table, max_bad=0.1)
    assert splits.classes == ["cat", "dog"]
    assert [(file.key[-2:], file.reason) for file in splits.bad] == [("03", "missing"), ("04", "missing")]
    assert len(splits.train) + len(splits.val) == 18
    with pytest.raises(DataError, match=r"must have one class; column 'label' of .* has '\[0\]' in row 2"):
        open_data(parquet(tmp_path, {"image": images, "label": [[i % 2] for i in range(20)]}))


@pytest.mark.filterwarnings("ignore")
def test_parquet_files_with_other_class_names_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    columns = {"image": [jpeg(i) for i in range(6)], "label": [0, 1] * 3}
    for name, classes in (("train-0.parquet", ["cat", "dog"]), ("test-0.parquet", ["dog", "cat"])):
        parquet(data, columns, {"label": {"names": classes, "_type": "ClassLabel"}}, name)
    with pytest.raises(DataError, match=r"must define the same class names; 'train-0\.parquet' and"):
        open_data(data)
    parquet(data, columns, {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}, "test-0.parquet")
    (data / "._test-0.parquet").write_bytes(b"of macOS")
    (data / "loose.jpg").write_bytes(jpeg(9))
    splits = open_data(data)
    assert splits.classes == ["cat", "dog"]
    assert any("Skipped: 1 beside" in note for note in splits.notes)


def test_columns_without_a_name_are_kept_apart(root: Path) -> None:
    table = write(root, ",image,label,,", "{i},train/a{i:02}.jpg,{pet},x{i},y{i}")
    assert open_data(table).classes == ["cat", "dog"]
    second = write(root, "image,,", "train/a{i:02}.jpg,{pet},id{i}")
    with pytest.raises(DataError, match="must have a column 'label'"):
        open_data(second)


def test_parquet_columns_without_a_name(root: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    paths = [f"train/a{i:02}.jpg" for i in range(NUMBER)]
    columns = [pyarrow.array(column) for column in (paths, ["cat", "dog"] * 6, range(NUMBER), ["x"] * NUMBER)]
    parquet.write_table(pyarrow.Table.from_arrays(columns, ["image", "label", "", ""]), root / "table.parquet")
    assert open_data(root / "table.parquet").classes == ["cat", "dog"]


def test_the_first_of_columns_with_nearly_one_name_decides(root: Path) -> None:
    """`fold` has numbers: a second column `Fold` is no split for that."""
    table = write(root, "image,label,fold,Fold", "train/a{i:02}.jpg,{pet},{fold},train")
    assert not open_data(table).is_given
