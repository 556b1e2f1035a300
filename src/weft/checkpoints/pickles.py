"""Files that `torch.save` wrote, opened without running anything that they name.

Such a file is a pickle: a little program that may call any function by its name. Three locks, each enough against
code in the file: torch's own restricted reader (`weights_only`); a fixed list of names, shorter than torch's, checked
before it starts; and stand-ins that only hold what they are given for every other name that is let in.
"""

from __future__ import annotations

import io
import pickletools
import re
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch._utils import IMPORT_MAPPING, NAME_MAPPING

from weft.errors import CheckpointError

_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")

# What a state dict is made of. Shorter than torch's list: a `bytearray`, a storage or a tensor class could be called
# with a size, and take all memory.
TENSORS = frozenset(
    [
        "collections.OrderedDict",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_parameter",
        "torch.nn.parameter.Parameter",
        "torch.Size",
        "torch.device",
        *(f"torch.{kind}Storage" for kind in _STORAGES),
        *(f"torch.{dtype}" for dtype in _DTYPES),
        "_codecs.encode",  # how Python 3 writes bytes for protocol 2
        "collections.Counter",  # milestones of a learning-rate schedule
        "builtins.set",
    ]
)

# What honest training scripts leave beside the tensors. Never built: a stand-in is put in its place.
BYSTANDERS = frozenset(
    [
        "argparse.Namespace",
        "collections.defaultdict",
        "copyreg._reconstructor",
        *(f"builtins.{kind}" for kind in ("object", "list", "dict", "int", "float", "str")),
        "numpy.dtype",
        "numpy.ndarray",
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
        *(f"pathlib.{kind}Path" for kind in ("", "Posix", "Windows", "PurePosix", "PureWindows")),
        *(f"pathlib._local.{kind}Path" for kind in ("Posix", "Windows", "PurePosix", "PureWindows")),
    ]
)

# Classes that are filled item by item, like a dict; their stand-in is one.
_DICT_LIKE = frozenset(["collections.defaultdict", "easydict.EasyDict", "addict.addict.Dict", "yacs.config.CfgNode"])

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PICKLES = 5  # magic number, version, system, the object, names of storages
_MAX_PICKLE_BYTES = 200_000_000  # a state dict's own is below 1 MB: tensors are stored outside it


class Inert:
    """Stands for any class or function of a pickle; takes whatever it is given and does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _InertDict:
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict()


def load_pickle(path: Path, *, import_foreign: bool = False) -> Any:
    """The object in a file of `torch.save`, zip or legacy, on the CPU; nothing that it names is imported or called.

    Args:
        path: the file.
        import_foreign: put stand-ins in the place of every unknown name; False: refuse the file.

    Raises:
        CheckpointError: an unknown name, a damaged file, or another kind of file.
    """
    found = _names_in(path)
    foreign = sorted(found - TENSORS - BYSTANDERS)
    if foreign and not import_foreign:
        raise CheckpointError(refusal(path, foreign))
    stand_ins: list[Any] = [(_InertDict if name in _DICT_LIKE else Inert, name) for name in sorted(found - TENSORS)]
    try:
        with warnings.catch_warnings(), torch.serialization.safe_globals(stand_ins):
            warnings.simplefilter("ignore")  # about pickle protocols and storages; what matters is an error
            return torch.load(path, map_location="cpu", weights_only=True)
    except MemoryError:
        raise CheckpointError(f"{path} asks for more memory than there is. It is damaged or made to do so.") from None
    except RuntimeError:
        raise CheckpointError(
            f"{path} must hold whole tensors; one does not fit the data that is there. Download or copy it again."
        ) from None
    except Exception as error:  # a hostile pickle can end in any exception; torch's text advises to open the gates
        raise CheckpointError(
            f"{path} must hold tensors that weft can read; its pickle does not ({_cause(error)}). "
            "Download or copy it again, or have its author save it as .safetensors."
        ) from None


def refusal(path: Path, names: list[str]) -> str:
    """Why a file with these names is not opened."""
    names = [re.sub(r"^commands\.", "subprocess.", name) for name in names]  # as Python 2 called it
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{path} must hold tensors and plain values only; its pickle names {shown}. Nothing was loaded or run. Ask its "
        "author for a .safetensors file, or pass import_foreign=True (--import-foreign): such names become empty "
        "stand-ins, tensors are kept."
    )


def _cause(error: Exception) -> str:
    """The first words of an error, without what follows them: advice, and lines of other libraries."""
    first = str(error).partition("\n")[0].partition(". ")[0]
    safe = "blocked" in first or "Unsupported operand" in first
    return first if safe else type(error).__name__


def _names_in(path: Path) -> set[str]:
    """Every name that the pickles of a file mention, as `module.name`, and as torch's reader will look it up."""
    with path.open("rb") as file:
        if file.read(4) == b"PK\x03\x04":  # by its first bytes, as torch decides: a zip may hide behind a pickle
            return _scan(io.BytesIO(_zip_pickle(path)), path, 1)
        file.seek(0)
        return _scan(file, path, _LEGACY_PICKLES)


def _zip_pickle(path: Path) -> bytes:
    """The pickle inside a zip file of `torch.save`, after a look at all of the archive."""
    damaged = f"{path} is damaged: %s. Download or copy it again."
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            _check_kind(path, names)
            if len(set(names)) < len(names):
                raise CheckpointError(damaged % "two parts have one name")
            if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
                raise CheckpointError(damaged % "a part is compressed or encrypted, which torch.save never does")
            if sum(entry.file_size for entry in entries) > path.stat().st_size:
                raise CheckpointError(damaged % "its parts claim to be larger than the file")
            if (broken := archive.testzip()) is not None:
                raise CheckpointError(damaged % f"the checksum of {broken!r} is wrong")
            pickles = [entry for entry in entries if entry.filename.count("/") == 1 and "/data.pkl" in entry.filename]
            if pickles[0].file_size > _MAX_PICKLE_BYTES:
                raise CheckpointError(damaged % "its pickle is too large for a state dict")
            return archive.read(pickles[0])
    except CheckpointError:  # a ValueError, too
        raise
    # zipfile's own kinds, and what a hostile directory of parts makes of the lines above
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, OSError, IndexError) as error:
        raise CheckpointError(damaged % f"it is no readable zip archive ({type(error).__name__})") from None


def _check_kind(path: Path, names: list[str]) -> None:
    inside = {name.partition("/")[2] for name in names}
    programs = ("constants.pkl", "archive_format", "serialized_exported_program.json")
    if any(part in programs or part.startswith(("code/", "models/")) for part in inside) or path.suffix == ".pt2":
        raise CheckpointError(
            f"{path} must hold weights; it holds a program (TorchScript or torch.export), and weft runs no programs. "
            "Save the model's state_dict() instead."
        )
    if "data.pkl" not in inside:
        raise CheckpointError(
            f"{path} must be a file of torch.save; it is some other zip archive. If the weights are inside, unpack it."
        )


def _modern_name(module: str, name: str) -> str:
    """Protocol 2 writes names as Python 2 had them; torch's reader turns some of them back."""
    module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
    return f"{module}.{name}"


def _scan(file: BinaryIO, path: Path, pickles: int) -> set[str]:
    found: set[str] = set()
    is_torch = True
    try:
        for number in range(pickles):
            strings: list[str] = []
            for opcode, argument, _ in pickletools.genops(file):
                if opcode.name in ("GLOBAL", "INST"):
                    found.add(_modern_name(*str(argument).split(" ", 1)))
                elif opcode.name == "STACK_GLOBAL":
                    found.add(".".join(strings[-2:]))
                elif opcode.name.startswith("EXT"):
                    found.add(f"copyreg extension {argument}")
                elif isinstance(argument, str):
                    strings.append(argument)
                elif pickles > 1 and number == 0 and isinstance(argument, int) and opcode.name == "LONG1":
                    is_torch = argument == _LEGACY_MAGIC
            if pickles > 1 and number == 0 and (not is_torch or found):
                break
    except Exception as error:  # pickletools raises what it likes on bytes that are no pickle
        if not found - TENSORS - BYSTANDERS:  # a name that it was stopped at is the better complaint
            raise CheckpointError(
                f"{path} must be a whole file of torch.save; its pickle cannot be read to the end "
                f"({type(error).__name__}). Download or copy it again."
            ) from None
    return found
