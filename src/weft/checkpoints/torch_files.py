"""Read files of `torch.save`, zip archives and those of PyTorch before 1.6, without running code from them.

`torch.load` is not used: with `weights_only` it refuses protocol 4 and stops at the first foreign name; without it, a
hostile file reaches TorchScript, a reader of tar files, and a comparison of sources that writes files.
Tensors are read only when they are needed.
"""

from __future__ import annotations

import contextlib
import io
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from weft.checkpoints.pickles import (
    INCOMPLETE,
    MAX_PICKLE_BYTES,
    UNREADABLE,
    MalformedPickle,
    Unpickler,
)
from weft.errors import CheckpointError
from weft.text import first_few, reason_of

_MAGIC = 0x1950A86A20F9469CFC6C  # first pickle of a file of PyTorch before 1.6
_VERSION = 1001


@contextlib.contextmanager
def open_pickle(path: Path, *, import_foreign: bool = False) -> Iterator[Any]:
    """Yield the object in a file of `torch.save` (zip or legacy); read its tensors, `StoredTensor`, in the block.

    Raises:
        CheckpointError: an unknown name, a damaged file, or another file format; also for errors in the block.
    """
    foreign: set[str] = set()
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"  # the first bytes decide: a zip archive may follow a pickle
            file.seek(0)
            try:
                content = _zip_content(path, file, foreign) if is_zip else _legacy_content(file, foreign)
            finally:
                if foreign and not import_foreign:  # this message explains more than that of another error
                    names = [re.sub(r"^commands\.", "subprocess.", name) for name in sorted(foreign)]  # as in Python 3
                    raise CheckpointError(
                        f"{path} must hold tensors and plain values only; its pickle names {first_few(names)}. Nothing"
                        " was loaded or run. Ask its author for a .safetensors file, or pass import_foreign=True"
                        " (--import-foreign): such names become inert placeholders, tensors are kept."
                    )
            yield content
    except CheckpointError:
        raise
    except MemoryError:
        raise CheckpointError(f"{path} needs more memory than is available. Use a machine with more memory.") from None
    # MalformedPickle, and what zipfile raises for damaged and malicious tables of contents
    except (MalformedPickle, zipfile.BadZipFile, OSError, EOFError, ValueError, IndexError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} must be a complete file of torch.save with tensors and plain values; {reason_of(error)}. Download"
            " or copy it again, or have its author save it as .safetensors."
        ) from None


def _zip_content(path: Path, file: BinaryIO, foreign: set[str]) -> Any:
    """Return the object in a file of PyTorch 1.6 or later."""
    archive = zipfile.ZipFile(file)
    parts = {entry.filename: entry for entry in archive.infolist()}
    folder = _checked_folder(path, archive.infolist())
    if f"{folder}/byteorder" in parts and archive.read(f"{folder}/byteorder") != b"little":
        raise MalformedPickle("its numbers are not little-endian")
    unpickler = Unpickler(io.BytesIO(archive.read(f"{folder}/data.pkl")), foreign)
    content = unpickler.load()
    for key, storage in unpickler.storages.items():
        entry = parts.get(f"{folder}/data/{key}")
        if entry is None or storage.num_bytes > entry.file_size:
            raise MalformedPickle(INCOMPLETE)
        storage.open, storage.rest = partial(archive.open, entry), entry.file_size - storage.num_bytes
    return content


def _checked_folder(path: Path, entries: Sequence[zipfile.ZipInfo]) -> str:
    """Return the folder that contains all parts of a zip archive, after checks of its table of contents."""
    names = [entry.filename for entry in entries]
    parts = {name.partition("/")[2] for name in names}
    programs = ("constants.pkl", "archive_format", "serialized_exported_program.json")
    if any(part in programs or part.startswith(("code/", "models/")) for part in parts) or path.suffix == ".pt2":
        raise CheckpointError(
            f"{path} must hold weights; it holds a program (TorchScript or torch.export), and weft runs no programs. "
            "Save the model's state_dict() instead."
        )
    if len({name.partition("/")[0] for name in names}) != 1 or "data.pkl" not in parts:
        raise CheckpointError(
            f"{path} must be a file of torch.save; it is some other zip archive. If the weights are inside, unpack it."
        )
    folder = names[0].partition("/")[0]
    counts = Counter(name.casefold() for name in names)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise MalformedPickle(f"two parts have the same name, {twice!r}")
    if packed := [e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED or e.flag_bits & 1]:
        raise MalformedPickle(f"{packed[0]!r} in it is compressed or encrypted, which torch.save never does")
    claimed, num_bytes = sum(entry.file_size for entry in entries), path.stat().st_size
    if claimed > num_bytes:
        raise MalformedPickle(f"its parts claim {claimed:,} bytes, and the file has {num_bytes:,}")
    num_bytes = entries[names.index(f"{folder}/data.pkl")].file_size
    if num_bytes > MAX_PICKLE_BYTES:
        raise MalformedPickle(f"its pickle has {num_bytes:,} bytes, too many for a state dict")
    return folder


def _legacy_content(file: BinaryIO, foreign: set[str]) -> Any:
    """Return the object in a file of PyTorch before 1.6: five pickles, followed by the storages."""
    unpickler = Unpickler(file, foreign)
    if unpickler.load() != _MAGIC:
        raise MalformedPickle(f"{UNREADABLE} (it was not written by torch.save)")
    version, system, content, keys = (unpickler.load() for _ in range(4))
    if version != _VERSION or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise MalformedPickle("its numbers are not little-endian")
    is_list_of_text = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not is_list_of_text or sorted(keys) != sorted(unpickler.storages):
        raise MalformedPickle(INCOMPLETE)

    position = file.tell()
    for key in keys:
        storage = unpickler.storages[key]
        count = int.from_bytes(_at(file, position).read(8), "little")
        if count != storage.numel:
            raise MalformedPickle(f"a storage must have {storage.numel:,} values, and has {count:,}")
        storage.open = partial(_at, file, position + 8)
        position += 8 + storage.num_bytes
    if position > file.seek(0, io.SEEK_END):
        raise MalformedPickle(INCOMPLETE)
    return content


def _at(file: BinaryIO, position: int) -> BinaryIO:
    file.seek(position)
    return file
