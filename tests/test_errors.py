import pytest

from weft import errors
from weft.errors import UsageError, install_command, need

NAMES = ["levit_128", "levit_128s", "levit_192", "cvt_13"]


def test_an_unknown_name_gets_the_nearest_first():
    assert errors.nearest("levit_128z", NAMES) == ["levit_128", "levit_128s", "levit_192"]
    error = errors.unknown("model", "levit_128z", NAMES, "weft models")
    assert (
        str(error) == "Unknown model 'levit_128z'. Nearest: levit_128, levit_128s, levit_192. All names: weft models."
    )
    assert isinstance(error, ValueError)


def test_a_missing_package_is_installed_by_its_extra():
    need("deploy", "json")
    with pytest.raises(UsageError, match=r"no_such_thing is needed for this, .* pip install 'weft-vision\[deploy\]'"):
        need("deploy", "json", "no_such_thing")
    assert install_command("serve", "ray") == "pip install 'weft-vision[serve,ray]'"
    assert install_command() == "pip install weft-vision"


def test_without_torch_a_missing_package_is_installed_alone(monkeypatch):
    """The extra would add torch, which such an installation was made without."""
    monkeypatch.setattr(errors, "is_installed", lambda package: package == "json")
    with pytest.raises(UsageError, match=r"Run: pip install onnxruntime$"):
        need("onnx", "json", "onnxruntime")
