"""Read files of `torch.save` with a pickle interpreter that runs no code.

Such a file contains the bytes of tensors and a pickle, which is a program that may call any function by its name. weft
interprets this program itself (`PickleInterpreter`). The interpreter makes dicts, lists, numbers, strings and tensors;
every other name becomes an inert placeholder. It imports nothing, calls no function of another module, and limits time
and memory in proportion to the size of the file. Tensors are read only when they are needed.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickletools
import re
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from weft.errors import CheckpointError
from weft.text import first_few, reason_of

_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}

# names that training scripts often save with the tensors; accepted, and turned into placeholders as all names that are
# not in `_CALLS`
ACCEPTED = frozenset(
    [
        "_codecs.encode",  # how Python 3 writes bytes for protocol 2
        "argparse.Namespace",
        "collections.Counter",  # milestones of a learning-rate schedule
        "collections.defaultdict",
        "copyreg._reconstructor",
        "torch.Size",
        "torch.device",
        *map(str, _STORAGES.values()),
        *(f"builtins.{kind}" for kind in ("object", "list", "dict", "set", "int", "float", "str")),
        "numpy.dtype",
        "numpy.ndarray",
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
        *(f"pathlib.{kind}Path" for kind in ("", "Posix", "Windows", "PurePosix", "PureWindows")),
        *(f"pathlib._local.{kind}Path" for kind in ("Posix", "Windows", "PurePosix", "PureWindows")),
    ]
)

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
_MAX_PICKLE_BYTES = 200_000_000  # the pickle of a state dict has less than 1 MB; tensors are stored separately
_MAX_OPERATIONS = 2_000_000  # per file; a model with an optimizer has 100,000
_MAX_INT_BITS = 2048
_MAX_KEY = 1 << 60  # larger integers can share one hash, which would make a dict of such keys slow


class MalformedPickle(Exception):
    """A pickle is damaged, or does something that pickles of torch.save never do; the message says what."""


UNREADABLE = "its pickle cannot be read to the end"
NO_DATA = "a tensor without its data"
BEYOND = "a tensor beyond its storage"


class Placeholder(dict):
    """Inert object in the place of a class or function, and of every object that a pickle makes with one.

    It is a dict, because configurations are often subclasses of dict. All other operations on it have no effect.
    """

    def __init__(self, name: str = "object") -> None:
        super().__init__()
        self.name = name

    __hash__ = object.__hash__  # type: ignore[assignment]


class Storage:
    """Data of one or several tensors in a file.

    Args:
        dtype: number format.
        numel: number of values.
        read: function that reads a number of bytes into a new array.
    """

    def __init__(self, dtype: torch.dtype, numel: int, read: Callable[[int], np.ndarray]) -> None:
        self.dtype, self.numel, self._read = dtype, numel, read

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def values(self) -> Tensor:
        """All values, in one dimension."""
        if self.numel == 0:
            return torch.empty(0, dtype=self.dtype)
        return torch.from_numpy(self._read(self.num_bytes)).view(self.dtype)


class StoredTensor(NamedTuple):
    """A tensor that has not been read yet: a storage, and an offset, size and stride in it."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Number of bytes of this tensor alone; several tensors may share a storage."""
        return math.prod(self.size) * self.storage.dtype.itemsize

    def check(self) -> None:
        """Check that the tensor lies within its storage.

        Raises:
            MalformedPickle: it does not.
        """
        is_valid = (
            isinstance(self.size, tuple) and isinstance(self.stride, tuple) and len(self.size) == len(self.stride)
        )
        if not is_valid or not isinstance(self.storage, Storage) or len(self.size) > 64:
            raise MalformedPickle(BEYOND)
        reach = [
            _count(self.offset),
            *(max(_count(n) - 1, 0) * _count(by) for n, by in zip(self.size, self.stride, strict=True)),
        ]
        if 0 not in self.size and sum(reach) >= self.storage.numel:
            raise MalformedPickle(BEYOND)

    def read(self) -> Tensor:
        """Read the tensor to the CPU.

        Raises:
            MalformedPickle: the tensor lies beyond its storage, or the file does not have its data.
        """
        self.check()
        return torch.as_strided(self.storage.values, self.size, self.stride, self.offset)


@contextlib.contextmanager
def open_pickle(path: Path, *, import_foreign: bool = False) -> Iterator[Any]:
    """Yield the object in a file of `torch.save` (zip or legacy); read its tensors, `StoredTensor`, in the block.

    Args:
        path: the file.
        import_foreign: accept names that are neither of torch nor in ACCEPTED.

    Raises:
        CheckpointError: an unknown name, a damaged file, or another file format; also for errors in the block.
    """
    again = "Download or copy it again"
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("rb"))
            interpreter = PickleInterpreter()
            try:
                if file.read(4) == b"PK\x03\x04":  # decide by the first bytes: a zip archive may follow a pickle
                    content = _zip_content(stack.enter_context(_archive(path)), interpreter)
                else:
                    content = _legacy_content(file, interpreter)
            finally:
                if interpreter.foreign and not import_foreign:  # this message explains more
                    raise CheckpointError(foreign_names_message(path, sorted(interpreter.foreign)))
            yield content
    except CheckpointError:
        raise
    except MalformedPickle as error:
        if str(error) in (NO_DATA, BEYOND):
            text = f"{path} must hold complete tensors; one needs more data than the file has."
        elif str(error).startswith(UNREADABLE):
            text = f"{path} must be a complete file of torch.save; {reason_of(error)}."
        else:
            reason = reason_of(error)
            text = f"{path} must hold tensors and plain values as torch.save writes them; it does not ({reason})."
        raise CheckpointError(f"{text} {again}, or have its author save it as .safetensors.") from None
    except MemoryError:
        raise CheckpointError(f"{path} needs more memory than is available. Use a machine with more memory.") from None
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is damaged ({reason}). {again}.") from None


def foreign_names_message(path: Path, names: Sequence[str]) -> str:
    """Return the error message for a file whose pickle has foreign names."""
    names = [re.sub(r"^commands\.", "subprocess.", name) for name in names]  # its name in Python 2
    return (
        f"{path} must hold tensors and plain values only; its pickle names {first_few(names)}. Nothing was loaded or"
        " run. Ask its author for a .safetensors file, or pass import_foreign=True (--import-foreign): such names"
        " become inert placeholders, tensors are kept."
    )


def _archive(path: Path) -> zipfile.ZipFile:
    """Open a zip file after checks of its table of contents."""
    damaged = f"{path} is damaged: %s. Download or copy it again."
    try:
        archive = zipfile.ZipFile(path)
    # errors of zipfile, and those that its code raises for a malicious table of contents
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, OSError, IndexError) as error:
        raise CheckpointError(damaged % f"it is not a readable zip archive ({type(error).__name__})") from None
    try:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        _check_kind(path, names)
        if len({name.casefold() for name in names}) < len(names):
            raise CheckpointError(damaged % "two parts have the same name")
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
            raise CheckpointError(damaged % "a part is compressed or encrypted, which torch.save never does")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise CheckpointError(damaged % "its parts claim to be larger than the file")
        if archive.getinfo(f"{_prefix(names)}/data.pkl").file_size > _MAX_PICKLE_BYTES:
            raise CheckpointError(damaged % "its pickle is too large for a state dict")
    except BaseException:
        archive.close()
        raise
    return archive


def _check_kind(path: Path, names: Sequence[str]) -> None:
    inside = {name.partition("/")[2] for name in names}
    programs = ("constants.pkl", "archive_format", "serialized_exported_program.json")
    if any(part in programs or part.startswith(("code/", "models/")) for part in inside) or path.suffix == ".pt2":
        raise CheckpointError(
            f"{path} must hold weights; it holds a program (TorchScript or torch.export), and weft runs no programs. "
            "Save the model's state_dict() instead."
        )
    if len({name.partition("/")[0] for name in names}) != 1 or "data.pkl" not in inside:
        raise CheckpointError(
            f"{path} must be a file of torch.save; it is some other zip archive. If the weights are inside, unpack it."
        )


def _prefix(names: Sequence[str]) -> str:
    """Return the folder in the archive that contains all parts."""
    return names[0].partition("/")[0]


def _zip_content(archive: zipfile.ZipFile, interpreter: PickleInterpreter) -> Any:
    """Return the object in a file of PyTorch 1.6 or later."""
    prefix = _prefix(archive.namelist())
    parts = {entry.filename: entry for entry in archive.infolist()}
    if f"{prefix}/byteorder" in parts and archive.read(f"{prefix}/byteorder") != b"little":
        raise MalformedPickle("its numbers are not little-endian")
    storages: dict[str, Storage] = {}

    def read(entry: zipfile.ZipInfo, num_bytes: int) -> np.ndarray:
        with archive.open(entry) as part:
            values = _bytes_of(part, num_bytes)
            while part.read(1 << 20):  # zipfile verifies the checksum at the end
                pass
        return values

    def storage(reference: Any) -> Storage:
        match reference:
            case ("storage", Placeholder(), str(key), _, int(numel)):
                entry = parts.get(f"{prefix}/data/{key}")
                if key not in storages and entry is not None:
                    candidate = Storage(_dtype(reference[1]), _count(numel), lambda count: read(entry, count))
                    if candidate.num_bytes <= entry.file_size:
                        storages[key] = candidate
                if key in storages:
                    return storages[key]
        raise MalformedPickle(NO_DATA)

    return interpreter.run(io.BytesIO(archive.read(f"{prefix}/data.pkl")), storage)


def _legacy_content(file: BinaryIO, interpreter: PickleInterpreter) -> Any:
    """Return the object in a file of PyTorch before 1.6: five pickles, followed by the storages."""
    file.seek(0)
    storages: dict[str, Storage] = {}
    offsets: dict[str, int] = {}  # where the data of each storage begins in the file

    def read(key: str, num_bytes: int) -> np.ndarray:
        if key not in offsets:
            raise MalformedPickle(NO_DATA)
        file.seek(offsets[key])
        return _bytes_of(file, num_bytes)

    def storage(reference: Any) -> Any:
        match reference:
            case ("storage", Placeholder(), str(key), _, int(numel), view):
                if key not in storages:
                    storages[key] = Storage(_dtype(reference[1]), _count(numel), lambda count: read(key, count))
                return storages[key] if view is None else _view(storages[key], view)
            case ("module", Placeholder(), *_):  # a class, with its source code
                return reference[1]
        raise MalformedPickle(NO_DATA)

    if interpreter.run(file, storage) != _LEGACY_MAGIC:
        raise MalformedPickle(f"{UNREADABLE} (it was not written by torch.save)")
    version, system = interpreter.run(file, storage), interpreter.run(file, storage)
    if version != _LEGACY_VERSION or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise MalformedPickle("its numbers are not little-endian")
    content, keys = interpreter.run(file, storage), interpreter.run(file, storage)
    position = file.tell()
    for key in keys if isinstance(keys, list) else []:
        if not isinstance(key, str) or key not in storages or key in offsets:
            raise MalformedPickle(NO_DATA)
        offsets[key] = position + 8  # after the number of values
        position = offsets[key] + storages[key].num_bytes
    return content


def _view(root: Storage, view: Any) -> Storage:
    """Return a part of a storage; `view` is (name, first value, number of values)."""
    if not isinstance(view, tuple) or len(view) != 3 or _count(view[1]) + _count(view[2]) > root.numel:
        raise MalformedPickle(BEYOND)
    begin = view[1] * root.dtype.itemsize
    return Storage(root.dtype, view[2], lambda count: root.values.view(torch.uint8).numpy()[begin : begin + count])


def _bytes_of(file: Any, count: int) -> np.ndarray:
    values = np.empty(count, np.uint8)
    view, done = memoryview(values.data), 0
    while done < count:
        num_read = file.readinto(view[done : done + (1 << 24)])
        if not num_read:
            raise MalformedPickle(NO_DATA)
        done += num_read
    return values


def _dtype(kind: Placeholder) -> torch.dtype:
    if kind.name not in _STORAGES:
        raise MalformedPickle(NO_DATA)
    return _STORAGES[kind.name]


def _count(number: Any) -> int:
    """Return a number after a check that it can be a size."""
    if type(number) is not int or not 0 <= number < 1 << 48:
        raise MalformedPickle(BEYOND)
    return number


def _ordered_dict(items: Any = ()) -> dict[Any, Any]:
    """Return a new dict; from a list of pairs, as Python 2 pickled it, or empty."""
    result: dict[Any, Any] = {}
    for key, value in items:
        result[_safe_key(key)] = value
    return result


def _tensor(*arguments: Any) -> StoredTensor:
    return StoredTensor(*arguments[:4])  # not used: requires_grad, hooks, metadata


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch.nn.parameter.Parameter": lambda data, *_: data,
}


class _BoundedReader:
    """File that never reads beyond its end; pickletools allocates any length that a pickle claims."""

    def __init__(self, file: BinaryIO) -> None:
        start = file.tell()
        self.file, self.remaining = file, min(file.seek(0, io.SEEK_END) - start, _MAX_PICKLE_BYTES)
        file.seek(start)

    def read(self, count: int) -> bytes:
        return self._count(self.file.read(max(min(count, self.remaining), 0)))

    def readline(self) -> bytes:
        return self._count(self.file.readline(self.remaining))

    def tell(self) -> int:
        return self.file.tell()

    def _count(self, data: bytes) -> bytes:
        self.remaining -= len(data)
        return data


class PickleInterpreter:
    """Interpreter of pickles, protocols 0 to 5.

    Attributes:
        foreign: names in the pickles that are neither of torch nor in ACCEPTED.
    """

    def __init__(self) -> None:
        self.foreign: set[str] = set()
        self._operations_left = _MAX_OPERATIONS
        self._stack: list[Any] = []
        self._marks: list[int] = []

    def run(self, file: BinaryIO, storage: Callable[[Any], Any]) -> Any:
        """Return the object of one pickle; the file is then at the end of the pickle.

        Args:
            file: at the beginning of the pickle.
            storage: function that returns the storage for a persistent ID.

        Raises:
            MalformedPickle: the pickle is incomplete, takes too many operations, or is not of torch.save.
        """
        self._stack, self._marks, memo = [], [], {}
        stack: list[Any] = self._stack
        try:
            for opcode, argument, _ in pickletools.genops(cast("BinaryIO", _BoundedReader(file))):
                self._count_operations(1)
                match opcode.name:
                    case "STOP":
                        return stack.pop()
                    case "PROTO" | "FRAME":
                        pass
                    case "PUT" | "BINPUT" | "LONG_BINPUT":
                        memo[argument] = stack[-1]
                    case "MEMOIZE":
                        memo[len(memo)] = stack[-1]
                    case "GET" | "BINGET" | "LONG_BINGET":
                        stack.append(memo[argument])
                    case "BINPERSID":
                        stack.append(storage(stack.pop()))
                    case name if argument is None or name in ("GLOBAL", "INST", "PERSID") or name.startswith("EXT"):
                        self._execute(name, argument)
                    case _:
                        if isinstance(argument, int) and argument.bit_length() > _MAX_INT_BITS:
                            raise MalformedPickle("a number of more than 2,048 bits")
                        stack.append(argument)
        except (MalformedPickle, MemoryError):
            raise
        except Exception as error:  # pickletools raises many types of exceptions for invalid bytes
            raise MalformedPickle(f"{UNREADABLE} ({type(error).__name__})") from None
        raise MalformedPickle(UNREADABLE)

    def _execute(self, name: str, argument: Any) -> None:
        """Execute one operation on the stack."""
        stack = self._stack
        match name:
            case "MARK":
                self._marks.append(len(stack))
            case "POP":
                stack.pop()
            case "POP_MARK" | "ADDITEMS":
                self._pop_mark()
            case "DUP":
                stack.append(stack[-1])
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(name == "NEWTRUE")
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "EMPTY_SET":
                stack.append(Placeholder("set"))
            case "FROZENSET":
                self._pop_mark()
                stack.append(Placeholder("frozenset"))
            case "LIST":
                stack.append(self._pop_mark())
            case "TUPLE":
                stack.append(tuple(self._pop_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                items = tuple(stack[-count:])
                del stack[-count:]
                stack.append(items)
            case "DICT":
                items = self._pop_mark()
                stack.append({})
                self._set(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._set([key, value])
            case "SETITEMS":
                self._set(self._pop_mark())
            case "APPEND":
                self._extend([stack.pop()])
            case "APPENDS":
                self._extend(self._pop_mark())
            case "BUILD":
                stack.pop()
            case "GLOBAL":
                stack.append(self._lookup(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(self._lookup(module, attribute))
            case "INST":
                stack.append(self._call(self._lookup(*argument.split(" ", 1)), self._pop_mark()))
            case "OBJ":
                function, *arguments = self._pop_mark()
                stack.append(self._call(function, arguments))
            case "REDUCE" | "NEWOBJ":
                arguments, function = stack.pop(), stack.pop()
                stack.append(self._call(function, arguments))
            case "NEWOBJ_EX":
                _, arguments, function = stack.pop(), stack.pop(), stack.pop()
                stack.append(self._call(function, arguments))
            case _ if name.startswith("EXT"):
                self.foreign.add(f"copyreg extension {argument}")
                stack.append(Placeholder())
            case _:
                raise MalformedPickle(f"the operation {name}")

    def _count_operations(self, count: int) -> None:
        self._operations_left -= count
        if self._operations_left < 0:
            raise MalformedPickle(f"it takes more than {_MAX_OPERATIONS:,} operations")

    def _pop_mark(self) -> list[Any]:
        """Remove all items above the last mark from the stack, and return them."""
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _set(self, items: list[Any]) -> None:
        """Add items (key, value, key, value, ...) to the dict on top of the stack."""
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise MalformedPickle("an item is set on an object that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_safe_key(key)] = value

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, Placeholder):
            raise MalformedPickle("an item is appended to an object that is not a list")

    def _lookup(self, module: Any, attribute: Any) -> Placeholder:
        """Return a placeholder for a name, and note foreign names. Protocol 2 has the names of Python 2."""
        module, attribute = NAME_MAPPING.get((module, attribute), (IMPORT_MAPPING.get(module, module), attribute))
        name = f"{module}.{attribute}"
        if name not in _CALLS and name not in _STORAGES and name not in ACCEPTED:
            self.foreign.add(name)
        return Placeholder(name)

    def _call(self, function: Any, arguments: Any) -> Any:
        if not isinstance(function, Placeholder) or function.name not in _CALLS:
            return Placeholder(function.name if isinstance(function, Placeholder) else "object")
        if arguments and isinstance(arguments[0], list):
            self._count_operations(len(arguments[0]))
        return _CALLS[function.name](*arguments)


def _safe_key(key: Any) -> Any:
    """Return a key that is fast to hash. Nested tuples can take hours, and large integers can share one hash."""
    if isinstance(key, (str, bytes, bool)) or key is None or (type(key) is int and abs(key) < _MAX_KEY):
        return key
    return Placeholder("key")
