"""Unpickle what `torch.save` writes without running code from the file.

A pickle is a program that may call any function by its name. Python's own unpickler runs it here, with `find_class`
replaced, its only way to a name: four names of torch give tensors, `OrderedDict` gives a dict, and every other name
becomes an inert placeholder. Nothing is imported. The operations that hash, allocate or set attributes as the file says
are also replaced, so that the memory stays in proportion to the size of the file; the time does not.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

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

# names that training scripts often save with the tensors; accepted, and turned into placeholders
ACCEPTED = frozenset(
    [
        "_codecs.encode",  # how Python 3 writes bytes for protocol 2
        "argparse.Namespace",
        "collections.Counter",  # milestones of a learning-rate schedule
        "collections.defaultdict",
        "copyreg._reconstructor",
        "torch.Size",
        "torch.device",
        *_STORAGES,
        *map(str, _STORAGES.values()),
        *(f"builtins.{kind}" for kind in ("object", "list", "dict", "set", "int", "float", "str")),
        "numpy.dtype",
        "numpy.ndarray",
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("scalar", "_reconstruct")),
        *(f"pathlib.{kind}Path" for kind in ("", "Posix", "Windows", "PurePosix", "PureWindows")),
        *(f"pathlib._local.{kind}Path" for kind in ("Posix", "Windows", "PurePosix", "PureWindows")),
    ]
)

_Unpickler: Any = pickle._Unpickler  # in Python: that in C allocates a memo as large as an index in the file says
MAX_PICKLE_BYTES = 200_000_000  # the pickle of a state dict has less than 1 MB; tensors are stored separately
_PIECE = 1 << 24  # bytes of a tensor that are read in one call
_MAX_OPERATIONS = 2_000_000  # per file; a model with an optimizer has 100,000

UNREADABLE = "its pickle cannot be read to the end"
INCOMPLETE = "a tensor needs more data than the file has"


class MalformedPickle(Exception):
    """A file is damaged, or does something that files of torch.save never do; the message says what."""


class Placeholder(dict):
    """Inert object in the place of a class or function, and of every object that a pickle makes with one.

    It is a dict, because configurations are often subclasses of dict. All other operations on it have no effect.
    """

    __slots__ = ("name",)
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, name: str = "object") -> None:
        super().__init__()
        self.name = name

    def __call__(self, *arguments: Any) -> Placeholder:
        """Return the placeholder of a new object."""
        return Placeholder(self.name)

    def add(self, item: Any) -> None:
        """Ignore an item, as of a list or a set."""

    append = extend = add


class Storage:
    """Data of one or several tensors in a file.

    Attributes:
        open: function that returns the file at this data; set by the reader of the file.
        rest: number of bytes behind it in its part of a zip archive.
    """

    open: Callable[[], Any]
    rest = 0

    def __init__(self, kind: Placeholder, numel: int) -> None:
        if kind.name not in _STORAGES:
            raise MalformedPickle(f"a storage is of the unknown type {kind.name}")
        self.dtype, self.numel = _STORAGES[kind.name], _count(numel)

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def values(self) -> Tensor:
        """All values, in one dimension."""
        values = torch.empty(self.numel, dtype=self.dtype)
        file, memory = self.open(), memoryview(values.view(torch.uint8).numpy().data)
        for start in range(0, self.num_bytes, _PIECE):
            piece = memory[start : start + _PIECE]
            if file.readinto(piece) < len(piece):
                raise MalformedPickle(INCOMPLETE)
        file.read(self.rest)  # zipfile verifies the checksum at the end of a part
        return values


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

    def read(self) -> Tensor:
        """Read the tensor to the CPU."""
        return torch.as_strided(self.storage.values, self.size, self.stride, self.offset)


def _count(number: Any) -> int:
    """Return a number after a check that it can be a size."""
    if type(number) is not int or not 0 <= number < 1 << 48:
        raise MalformedPickle(INCOMPLETE)
    return number


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> StoredTensor:
    """Return a tensor that lies within its storage; not used: requires_grad, hooks, metadata."""
    is_valid = isinstance(storage, Storage) and isinstance(size, tuple) and isinstance(stride, tuple)
    if not is_valid or len(size) != len(stride) or len(size) > 64:
        raise MalformedPickle(INCOMPLETE)
    last = _count(offset) + sum(max(_count(n) - 1, 0) * _count(by) for n, by in zip(size, stride, strict=True))
    if 0 not in size and last >= storage.numel:
        raise MalformedPickle(INCOMPLETE)
    return StoredTensor(storage, offset, size, stride)


_CALLS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch.nn.parameter.Parameter": lambda data, *_: data,
}


class _Reader:
    """File of pickles with bounds on the bytes of a read and on the number of operations; each reads one byte first."""

    def __init__(self, file: BinaryIO) -> None:
        start = file.tell()
        self.file, self.operations, self.left = file, 0, min(file.seek(0, io.SEEK_END) - start, MAX_PICKLE_BYTES)
        file.seek(start)

    def read(self, count: int) -> bytes:
        if count == 1:
            self.count_operations(1)
        data = self.file.read(min(count, self.left))
        self.left -= len(data)
        return data

    def readline(self) -> bytes:
        data = self.file.readline(self.left)
        self.left -= len(data)
        return data

    def count_operations(self, count: int) -> None:
        self.operations += count
        if self.operations > _MAX_OPERATIONS:
            raise MalformedPickle(f"it takes more than {_MAX_OPERATIONS:,} operations")


class Unpickler(_Unpickler):
    """Unpickler that makes dicts, lists, numbers, text, tensors and placeholders, and calls nothing else.

    It collects the `storages` of tensors by key. Names that are neither of torch nor in ACCEPTED go to `foreign`.
    """

    def __init__(self, file: BinaryIO, foreign: set[str]) -> None:
        self._reader = _Reader(file)
        super().__init__(self._reader, encoding="latin1")  # text of Python 2
        self.storages: dict[str, Storage] = {}
        self._foreign = foreign

    def load(self) -> Any:
        """Return the object of the next pickle of the file, which is then at its end."""
        self.memo = {}
        try:
            return super().load()
        except (MalformedPickle, MemoryError):
            raise
        except Exception as error:  # invalid bytes raise many types of exceptions
            raise MalformedPickle(f"{UNREADABLE} ({type(error).__name__})") from None

    def find_class(self, module: str, name: str) -> Any:
        """Return the function or a placeholder for a name. Protocol 2 has the names of Python 2."""
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f"{module}.{name}"
        if full == "collections.OrderedDict":
            return self._ordered_dict
        if full not in _CALLS and full not in ACCEPTED:
            self._foreign.add(full)
        return _CALLS.get(full) or Placeholder(full)

    def persistent_load(self, reference: Any) -> Any:
        """Return the storage, or the class with its source code, that a persistent ID names."""
        match reference:
            case (
                ("storage", Placeholder() as kind, str(key), _, int(numel))
                | ("storage", Placeholder() as kind, str(key), _, int(numel), None)  # before PyTorch 1.6
            ):
                return self.storages.setdefault(key, Storage(kind, numel))
            case ("module", Placeholder() as kind, *_):
                return kind
        raise MalformedPickle(INCOMPLETE)

    def get_extension(self, code: int) -> None:
        """Push a placeholder for a name that copyreg has under a number."""
        self._foreign.add(f"copyreg extension {code}")
        self.append(Placeholder())

    def _ordered_dict(self, items: Sequence[Any] = ()) -> dict[Any, Any]:
        """Return a new dict; from a list of pairs, as Python 2 pickled it, or empty."""
        self._reader.count_operations(len(items))
        return {_safe_key(key): value for key, value in items}

    def _set(self, items: Sequence[Any]) -> None:
        """Add items (key, value, key, value, ...) to the dict on top of the stack."""
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise MalformedPickle("an item is set on an object that is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_safe_key(key)] = value

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        self._set(self.pop_mark())

    def load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set(items)

    def load_empty_set(self) -> None:
        self.append(Placeholder("set"))

    def load_frozenset(self) -> None:
        self.pop_mark()
        self.append(Placeholder("frozenset"))

    def load_build(self) -> None:
        self.stack.pop()  # the attributes of an object

    def load_newobj(self) -> None:
        self.load_reduce()

    def load_newobj_ex(self) -> None:
        self.stack.pop()  # keyword arguments
        self.load_reduce()

    def load_bytearray8(self) -> None:
        self.append(self.read(*struct.unpack("<Q", self.read(8))))

    def load_frame(self) -> None:
        self.read(8)  # frames are for speed; their operations are read without them


# the base class calls its own functions by code; here those of the same names
Unpickler.dispatch = {code: getattr(Unpickler, function.__name__) for code, function in _Unpickler.dispatch.items()}


def _safe_key(key: Any) -> Any:
    """Return a key that is safe to hash: a deeply nested tuple ends the process, and many integers can share a hash."""
    is_safe = key is None or type(key) in (str, bytes, bool, float) or (type(key) is int and abs(key) < 1 << 60)
    return key if is_safe else Placeholder("key")
