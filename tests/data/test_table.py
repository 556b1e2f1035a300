"""Tables as people have them: columns, encodings, separators and paths are recognised, named in a note, or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.data.pictures import jpeg
from tests.data.test_sources import contents
from weft.cli import main
from weft.data import inspect, open_data
from weft.errors import DataError, UsageError
from weft.inference.arguments import InferenceOptions
from weft.inference.inputs import open_labelled
from weft.recipes import load_recipe
from weft.train.plan import open_splits

pytestmark = pytest.mark.filterwarnings("ignore")  # of pyarrow and datasets

NUMBER = 12
NAMES = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images `a00.jpg` to `a11.jpg` in the folder `train`."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train").mkdir()
    for i in range(NUMBER):
        (tmp_path / "train" / f"a{i:02}.jpg").write_bytes(jpeg(i))
    return tmp_path


def write(root: Path, header: str, row: str, name: str = "table.csv", encoding: str = "utf-8") -> Path:
    """Write a table: a row per image (number `{i}`, class `{pet}`, 0 or 1 `{cat}`, `{dog}`), and an empty one."""
    rows = [row.format(i=i, pet=("cat", "dog")[i % 2], cat=1 - i % 2, dog=i % 2, fold=i % 5) for i in range(NUMBER)]
    (root / name).write_bytes("\n".join([header, *rows, "", ""]).encode(encoding))
    return root / name


def parquet(path: Path, columns: dict[str, list], features: object = None) -> Path:
    pyarrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(columns)
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(exist_ok=True)
    files.write_table(table, path)
    return path


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
    "image,label,fold,Fold": "train/a{i:02}.jpg,{pet},{fold},train",  # the first of nearly one name decides
    "image,cat,dog": "a{i:02},{cat},{dog}.0",
    "image,patient,cat,dog": "a{i:02},p{i},{cat},{dog}",
    ",image,label,,": "{i},train/a{i:02}.jpg,{pet},x{i},y{i}",
}


@pytest.mark.parametrize("header", RECOGNISED)
def test_columns_are_recognised_and_guesses_named(header, root):
    splits = open_data(write(root, header, RECOGNISED[header]))
    assert splits.classes == ["cat", "dog"]
    assert not splits.is_given
    assert contents(splits.train, splits.val) == sorted((("cat", "dog")[i % 2], jpeg(i)) for i in range(NUMBER))
    notes = " ".join(splits.notes)
    columns = header.partition("\n")[2] or header
    if "image" not in columns.replace("image_id", ""):
        assert "Read images from column '" in notes
    if "abel" not in columns:
        assert "classes from " in notes
    if "fold" in header:
        assert "Column 'fold' is not used, because its values are not names of splits: 0, 1, 2, 3, 4." in notes
    assert ("are searched below the folder of the table" in notes) == ("train/" not in RECOGNISED[header])


PATH = "train/a{i:02}.jpg"
REFUSED = [  # header, row, words of the message
    ("id,name", "a{i:02},number {i}", r"Column 'name' has 12 values in 12 rows, such as 'number 0', which are no clas"),
    ("id,size,colour", "a{i:02},{i},{pet}", r"has id, size, colour\. Choose the column of classes: --set data\.label="),
    ("image,cat,dog", "a{i:02},1,{dog}", r"columns cat, dog of .* have 0 and 1, and row 3 has 2 ones"),
    ("image,cat,dog", "a{i:02},0,{dog}", r"columns cat, dog of .* have 0 and 1, and row 2 has 0 ones"),
    ("train/a00.jpg,cat", f"{PATH},{{pet}}", r"names an image: train/a00\.jpg, cat\. Add the line image,label"),
    ("image,label", "b{i:02}.jpg,{pet}", r"no row leads to a file, such as 'b00\.jpg'\. Choose another column"),
    ("image,label,split", f"{PATH},{{pet}},{{fold}}", r"must be train, val or test; row 2 of .* has '0'"),
    ("image,label", "./train/a0{dog}.jpg,{pet}", r"list every image once; row 4 of .* lists './train/a00\.jpg' again"),
    ("image,label,label", f"{PATH},{{pet}},{{fold}}", r"must have different names; .* has label more than once"),
    ("image,,", f"{PATH},{{pet}},id{{i}}", "must have a column 'label'"),
    ("image", PATH, r"must have a column 'label' \(or class, target, category\); .* has image\."),
    ("name,label", "a,{pet}", r"must have a column 'image' .* has name, label\. .*: --set data\.image=COLUMN"),
    ("image,label", PATH, r"must name an image and its class; row 2 of .* does not"),
]


@pytest.mark.parametrize(("header", "row", "message"), REFUSED)
def test_wrong_guesses_are_refused_with_what_was_seen(header, row, message, root):
    with pytest.raises(DataError, match=message):
        open_data(write(root, header, row))


def test_files_that_only_look_like_tables_are_refused(tmp_path):
    for name, content, message in (
        ("table.parquet", b"no parquet", r"that ends in \.parquet must be a Parquet file"),
        ("table.csv", b"", "has none"),
        ("nowhere.csv", None, r"must be readable; .*nowhere\.csv' is not \(No such file"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            open_data(tmp_path / name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('train/a03.jpg,cat,"a quote', "Quotes of a table must come in pairs"),
        ('train/a03.jpg,cat,"a quote" and more', "Quotes of a table must come in pairs"),
        ("train/a03.jpg,cat, small,x", "must have a value per column; row 5 .* has 4 for 3 columns"),
    ],
)
def test_no_row_is_swallowed_or_shifted(line, message, root):
    table = write(root, "image,label,note", "train/a{i:02}.jpg,{pet},x")
    assert len(open_data(table).notes) == 1
    table.write_text(table.read_text().replace("train/a03.jpg,dog,x", line).replace("a09.jpg,dog,x", 'a09.jpg,dog,"x"'))
    with pytest.raises(DataError, match=message):
        open_data(table)


def test_a_row_without_its_file_is_a_bad_image(root):
    table = write(root, "image,label", f"{PATH},{{pet}}")
    (root / "train" / "a04.jpg").unlink()
    splits = open_data(table)
    assert [(bad.key, bad.reason) for bad in splits.bad] == [("train/a04.jpg", "missing")]
    assert len(splits.train) + len(splits.val) == NUMBER - 1


def test_settings_choose_the_columns_in_every_verb(root, capsys):
    table = write(root, "label,key,image,kind", "{i},a{i:02},b{i}.jpg,{pet}")
    chosen = {"image": "key", "label": "kind"}
    splits = open_data(table, **chosen)
    assert splits.classes == ["cat", "dog"]
    assert not any(note.startswith("Read ") for note in splits.notes)
    assert len(inspect(table, **chosen).good) == NUMBER
    with pytest.raises(UsageError, match=r"data\.label 'kinds'\. Nearest: kind, .* All names: label, key"):
        open_data(table, label="kinds")
    recipe = load_recipe(None, [("data.source", str(table)), ("data.image", "key"), ("data.label", "kind")])
    assert open_splits(recipe).val.keys == splits.val.keys
    assert open_labelled(table, splits.classes, 2, InferenceOptions(), recipe).val.keys == splits.val.keys
    arguments = ["data", "check", str(table), "--set", "data.image=key", "--set", "data.label=kind"]
    assert main(arguments) == 0
    assert f"weft train {table} --set data.image=key --set data.label=kind" in capsys.readouterr().out
    assert main([*arguments, "--set", "epochs=3"]) == 2
    assert "--set takes data.image and data.label here; got 'epochs'" in capsys.readouterr().err


def test_a_column_of_splits_is_found_by_its_values(root):
    table = write(root, "image,label,Usage", "train/a{i:02}.jpg,{pet},Training")
    text = table.read_text().replace("dog,Training", "dog,PublicTest", 2).replace("cat,Training", "cat,Test", 1)
    table.write_text(text)
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
def test_a_column_that_looks_like_a_split_is_read_or_refused(column, values, root):
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
def test_other_columns_with_such_words_are_no_split(header, values, root):
    rows = [f"train/a{i:02}.jpg,{values[i % 2]}" for i in range(NUMBER)]
    (root / "table.csv").write_text("\n".join([header, *rows]))
    splits = open_data(root / "table.csv")
    assert not splits.is_given
    assert len(splits.train) + len(splits.val) == NUMBER


def test_a_name_that_leads_to_several_files_is_refused(root):
    (root / "test").mkdir()
    table = write(root, "id,label", "a{i:02},{pet}")
    for i in range(3):
        (root / "test" / f"a{i:02}.jpg").write_bytes(jpeg(100 + i))
    splits = open_data(table)
    keys = [f"train/a{i:02}.jpg" for i in range(NUMBER)]
    assert sorted(splits.train.keys + splits.val.keys) == keys, "only train/ has all"
    for i in range(NUMBER):
        (root / "test" / f"a{i:02}.jpg").write_bytes(jpeg(100 + i))
    with pytest.raises(DataError, match=r"'a00' of .* can be test/a00\.jpg or train/a00\.jpg\. Write paths"):
        open_data(table)


@pytest.mark.parametrize("name", ["table.csv", "table.tsv"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252", "utf-32"])
def test_class_names_are_decoded(encoding, name, root):
    splits = open_data(write(root, "image,label", f"{PATH},Kätzchen {{pet}}", name, encoding))
    assert splits.classes == ["Kätzchen cat", "Kätzchen dog"]
    noted = [note for note in splits.notes if "read as Windows-1252, for example 'Kätzchen cat'" in note]
    assert len(noted) == (encoding == "cp1252")
    assert not any(note.startswith("Read ") for note in splits.notes), "a byte order mark is no part of a column"


@pytest.mark.parametrize(
    ("label", "encoding"),
    [("кот", "cp1251"), ("고양이", "cp949"), ("猫です", "shift-jis"), ("小狗", "gbk"), ("x", "utf-16-le")],
)
def test_other_encodings_are_refused(label, encoding, root):
    with pytest.raises(DataError, match=r"must be (UTF-8 )?text; .* Save it as CSV UTF-8"):
        open_data(write(root, "image,label", f"{PATH},{label} {{pet}}", encoding=encoding))


LONG = "\x1b[31m" + "x" * 1_000_000


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("image,label", f"{LONG}{{i}},{{pet}}"),
        ("image,label", f"{PATH},{LONG}{{pet}}"),
        (f"image,{LONG},other", f"{PATH},{{pet}},{{i}}"),
        (f"image,{LONG}", f"{PATH},{{pet}}"),
        ("image,label,split", f"{PATH},{{pet}},{LONG}"),
    ],
    ids=["path", "class", "column", "only column", "split"],
)
def test_messages_cut_and_escape_the_values_of_a_table(header, row, root, capsys):
    table = write(root, header, row)
    main(["data", "check", str(table)])
    out, err = capsys.readouterr()
    assert len(out) + len(err) < 10_000
    assert "\x1b" not in out + err
    for options in ({}, {"label": "none"}):
        try:
            notes = open_data(table, **options).notes
        except (DataError, UsageError) as error:
            notes = [str(error)]
        assert all(len(note) < 3_000 and "\x1b" not in note for note in notes)


def test_images_in_parquet_are_read_and_never_printed(root, capsys):
    images, labels = [jpeg(i) for i in range(NUMBER)], [i % 2 for i in range(NUMBER)]
    table = parquet(root / "p.parquet", {"label": labels, "img": images, "more": [[1]] * NUMBER}, NAMES)
    splits = open_data(table)
    assert contents(splits.train, splits.val) == sorted((("cat", "dog")[i % 2], jpeg(i)) for i in range(NUMBER))
    assert splits.train.keys[0].startswith("p.parquet/0/")
    assert main(["data", "check", str(table)]) == 0
    capsys.readouterr()
    broken = {"label": labels, "image": [b"\xff\x00no image" * 1000] * NUMBER}
    assert main(["data", "check", str(parquet(root / "b.parquet", broken, NAMES))]) == 3
    out, err = capsys.readouterr()
    assert len(out) + len(err) < 3_000
    assert "no image" not in out + err


def test_parquet_rows_without_an_image_are_bad_files(root):
    images: list[object] = [{"bytes": jpeg(i), "path": None} for i in range(20)]
    images[3:5] = None, {"bytes": None, "path": None}
    labels = [float(i % 2) for i in range(20)]  # as pandas writes integers that may be missing
    columns = {"md5": [b"%d" % i for i in range(20)], "image": images, "label": labels}
    splits = open_data(parquet(root / "a.parquet", columns, NAMES))
    assert splits.classes == ["cat", "dog"]
    assert [(file.key[-2:], file.reason) for file in splits.bad] == [("03", "missing"), ("04", "missing")]
    assert len(splits.train) + len(splits.val) == 18
    with pytest.raises(DataError, match=r"must have one class; column 'label' of .* has '\[0\]' in row 2"):
        open_data(parquet(root / "b.parquet", columns | {"label": [[i % 2] for i in range(20)]}))


def test_parquet_files_of_a_folder_belong_together(root):
    columns = {"image": [jpeg(i) for i in range(6)], "label": [0, 1] * 3}
    data = parquet(root / "data" / "train-00000-of-00001.parquet", columns, NAMES).parent
    other = {"label": {"names": ["dog", "cat"], "_type": "ClassLabel"}}
    renamed = {"image": columns["image"], "class": columns["label"]}
    for name, content, names, message in (
        ("more.parquet", columns, NAMES, r"must all say the split, .* 'more\.parquet' does not"),
        ("test-0.parquet", renamed, NAMES, r"same columns; .*train-00000-of-00001\.parquet' has image,"),
        ("test-0.parquet", columns, other, r"same class names; 'train-00000-of-00001\.parquet' and"),
    ):
        file = parquet(data / name, content, names)
        with pytest.raises(DataError, match=message):
            open_data(data)
        file.unlink()
    parquet(data / "test-0.parquet", columns, NAMES)
    (data / "._test-0.parquet").write_bytes(b"of macOS")
    (data / "loose.jpg").write_bytes(jpeg(9))
    splits = open_data(data)
    assert splits.classes == ["cat", "dog"]
    assert any("Skipped: 1 beside" in note for note in splits.notes)


def test_parquet_columns_without_a_name_are_kept_apart(root):
    pyarrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = [PATH.format(i=i) for i in range(NUMBER)]
    columns = [pyarrow.array(column) for column in (paths, ["cat", "dog"] * 6, range(NUMBER), ["x"] * NUMBER)]
    files.write_table(pyarrow.Table.from_arrays(columns, ["image", "label", "", ""]), root / "table.parquet")
    assert open_data(root / "table.parquet").classes == ["cat", "dog"]
