import pytest

from weft import errors


def test_nearest_name_comes_first():
    names = ["levit_128", "levit_128s", "levit_192", "cvt_13"]
    assert errors.nearest("levit_128z", names) == ["levit_128", "levit_128s", "levit_192"]


def test_unknown_says_kind_name_neighbours_and_where_all_are():
    error = errors.unknown("model", "levit_128z", ["levit_128", "levit_128s", "levit_192", "cvt_13"], "weft models")
    assert str(error) == (
        "Unknown model 'levit_128z'. Nearest: levit_128, levit_128s, levit_192. All names: weft models."
    )
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, 2),
        (errors.DataError, 3),
        (errors.CheckpointError, 4),
        (errors.DivergedError, 5),
        (errors.StorageError, 6),
        (errors.VerificationError, 7),
    ],
)
def test_exit_codes(kind, code):
    assert kind("x").exit_code == code
