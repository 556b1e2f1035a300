"""Read files written by `torch.save` with an interpreter of pickles that runs no code.

Such a file is a pickle, a little program that may call any function by its name, and the bytes of tensors beside it.
weft interprets the program itself (`Machine`): it knows how to make dicts, lists, numbers, texts and tensors, and every
other name becomes a stand-in that takes what it is given and does nothing. Nothing is imported, no function of another
module is called, and work and memory are bounded by the size of the file. The tensors are read when they are asked for.
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

# What honest training scripts leave beside the tensors; becomes a stand-in, as everything that is not in `_CALLS`.
BYSTANDERS = frozenset(
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
_MAX_PICKLE_BYTES = 200_000_000  # a state dict's own is below 1 MB: tensors are stored outside it
_MAX_OPERATIONS = 2_000_000  # of a pickle; a model with an optimizer has 100,000
_MAX_INT_BITS = 2048
_MAX_KEY = 1 << 60  # integers beyond have the hash of a smaller one: a dict of such keys would be slow


class Malformed(Exception):
    """A pickle that does what none of torch does; the text says what."""


UNREADABLE = "its pickle cannot be read to the end"
NO_DATA = "a tensor without its data"
BEYOND = "a tensor beyond its storage"


class StandIn(dict):
    """What a pickle gets in the place of a class or function, and of what it makes with one.

    A dict, since configurations often are some; whatever else a pickle does with it has no effect.
    """

    def __init__(self, name: str = "object") -> None:
        super().__init__()
        self.name = name

    __hash__ = object.__hash__  # type: ignore[assignment]


class Storage:
    """The numbers of one or several tensors, in a file.

    Args:
        dtype: of the numbers.
        numel: how many there are.
        read: gives that many bytes, in an array of its own.
    """

    def __init__(self, dtype: torch.dtype, numel: int, read: Callable[[int], np.ndarray]) -> None:
        self.dtype, self.numel, self._read = dtype, numel, read

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @cached_property
    def values(self) -> Tensor:
        """All numbers, in one dimension."""
        if self.numel == 0:
            return torch.empty(0, dtype=self.dtype)
        return torch.from_numpy(self._read(self.num_bytes)).view(self.dtype)


class StoredTensor(NamedTuple):
    """A tensor that was not read yet: size and stride over a storage, from an offset on."""

    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the tensor on its own; several may share a storage."""
        return math.prod(self.size) * self.storage.dtype.itemsize

    def check(self) -> None:
        """Checks that it lies within its storage.

        Raises:
            Malformed: it does not.
        """
        is_whole = (
            isinstance(self.size, tuple) and isinstance(self.stride, tuple) and len(self.size) == len(self.stride)
        )
        if not is_whole or not isinstance(self.storage, Storage) or len(self.size) > 64:
            raise Malformed(BEYOND)
        reach = [
            _count(self.offset),
            *(max(_count(n) - 1, 0) * _count(by) for n, by in zip(self.size, self.stride, strict=True)),
        ]
        if 0 not in self.size and sum(reach) >= self.storage.numel:
            raise Malformed(BEYOND)

    def read(self) -> Tensor:
        """The tensor, on the CPU.

        Raises:
            Malformed: as `check`, or the file has not the bytes.
        """
        self.check()
        return torch.as_strided(self.storage.values, self.size, self.stride, self.offset)


@contextlib.contextmanager
def open_pickle(path: Path, *, import_foreign: bool = False) -> Iterator[Any]:
    """The object in a file of `torch.save`, zip or legacy; its tensors are `StoredTensor`, to be read inside.

    Args:
        path: the file.
        import_foreign: open a file that names what is neither of torch nor a usual bystander.

    Raises:
        CheckpointError: an unknown name, a damaged file, or another kind of file; from inside as well.
    """
    again = "Download or copy it again"
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(path.open("rb"))
            machine = Machine()
            try:
                if file.read(4) == b"PK\x03\x04":  # by its first bytes: a zip may hide behind a pickle
                    content = _zip_content(stack.enter_context(_archive(path)), machine)
                else:
                    content = _legacy_content(file, machine)
            finally:
                if machine.foreign and not import_foreign:  # also where it was stopped at one: the better complaint
                    raise CheckpointError(refusal(path, sorted(machine.foreign)))
            yield content
    except CheckpointError:
        raise
    except Malformed as error:
        if str(error) in (NO_DATA, BEYOND):
            text = f"{path} must hold whole tensors; one does not fit the data that is there."
        elif str(error).startswith(UNREADABLE):
            text = f"{path} must be a whole file of torch.save; {error}."
        else:
            text = f"{path} must hold tensors that weft can read; its pickle does not ({error})."
        raise CheckpointError(f"{text} {again}, or have its author save it as .safetensors.") from None
    except MemoryError:
        raise CheckpointError(f"{path} needs more memory than there is. Use a machine with more.") from None
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is damaged ({reason}). {again}.") from None


def refusal(path: Path, names: Sequence[str]) -> str:
    """Why a file with these names is not opened."""
    names = [re.sub(r"^commands\.", "subprocess.", name) for name in names]  # as Python 2 called it
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{path} must hold tensors and plain values only; its pickle names {shown}. Nothing was loaded or run. Ask its "
        "author for a .safetensors file, or pass import_foreign=True (--import-foreign): such names become empty "
        "stand-ins, tensors are kept."
    )


def _archive(path: Path) -> zipfile.ZipFile:
    """The zip file, after a look at its table of contents."""
    damaged = f"{path} is damaged: %s. Download or copy it again."
    try:
        archive = zipfile.ZipFile(path)
    # zipfile's own kinds, and what a hostile table of contents makes of its code
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, OSError, IndexError) as error:
        raise CheckpointError(damaged % f"it is no readable zip archive ({type(error).__name__})") from None
    try:
        entries = archive.infolist()
        names = [entry.filename for entry in entries]
        _check_kind(path, names)
        if len({name.casefold() for name in names}) < len(names):
            raise CheckpointError(damaged % "two parts have one name")
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
    """The folder in which torch.save puts all parts."""
    return names[0].partition("/")[0]


def _zip_content(archive: zipfile.ZipFile, machine: Machine) -> Any:
    """The object of a file of PyTorch 1.6 or later."""
    prefix = _prefix(archive.namelist())
    parts = {entry.filename: entry for entry in archive.infolist()}
    if f"{prefix}/byteorder" in parts and archive.read(f"{prefix}/byteorder") != b"little":
        raise Malformed("its numbers are those of another kind of machine")
    storages: dict[str, Storage] = {}

    def read(entry: zipfile.ZipInfo, num_bytes: int) -> np.ndarray:
        with archive.open(entry) as part:
            values = _bytes_of(part, num_bytes)
            while part.read(1 << 20):  # to the end, where zipfile compares the checksum
                pass
        return values

    def storage(reference: Any) -> Storage:
        match reference:
            case ("storage", StandIn(), str(key), _, int(numel)):
                entry = parts.get(f"{prefix}/data/{key}")
                if key not in storages and entry is not None:
                    found = Storage(_dtype(reference[1]), _count(numel), lambda count: read(entry, count))
                    if found.num_bytes <= entry.file_size:
                        storages[key] = found
                if key in storages:
                    return storages[key]
        raise Malformed(NO_DATA)

    return machine.run(io.BytesIO(archive.read(f"{prefix}/data.pkl")), storage)


def _legacy_content(file: BinaryIO, machine: Machine) -> Any:
    """The object of a file before PyTorch 1.6: five pickles, then the storages one after the other."""
    file.seek(0)
    storages: dict[str, Storage] = {}
    places: dict[str, int] = {}  # where in the file the numbers of a storage begin

    def read(key: str, num_bytes: int) -> np.ndarray:
        if key not in places:
            raise Malformed(NO_DATA)
        file.seek(places[key])
        return _bytes_of(file, num_bytes)

    def storage(reference: Any) -> Any:
        match reference:
            case ("storage", StandIn(), str(key), _, int(numel), view):
                if key not in storages:
                    storages[key] = Storage(_dtype(reference[1]), _count(numel), lambda count: read(key, count))
                return storages[key] if view is None else _view(storages[key], view)
            case ("module", StandIn(), *_):  # a class, with its source code
                return reference[1]
        raise Malformed(NO_DATA)

    if machine.run(file, storage) != _LEGACY_MAGIC:
        raise Malformed(f"{UNREADABLE} (it is none of torch.save)")
    version, system = machine.run(file, storage), machine.run(file, storage)
    if version != _LEGACY_VERSION or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise Malformed("its numbers are those of another kind of machine")
    content, keys = machine.run(file, storage), machine.run(file, storage)
    place = file.tell()
    for key in keys if isinstance(keys, list) else []:
        if not isinstance(key, str) or key not in storages or key in places:
            raise Malformed(NO_DATA)
        places[key] = place + 8  # after how many numbers there are
        place = places[key] + storages[key].num_bytes
    return content


def _view(root: Storage, view: Any) -> Storage:
    """A part of a storage: `view` has a name, where it begins, and how many numbers it has."""
    if not isinstance(view, tuple) or len(view) != 3 or _count(view[1]) + _count(view[2]) > root.numel:
        raise Malformed(BEYOND)
    begin = view[1] * root.dtype.itemsize
    return Storage(root.dtype, view[2], lambda count: root.values.view(torch.uint8).numpy()[begin : begin + count])


def _bytes_of(file: Any, count: int) -> np.ndarray:
    values = np.empty(count, np.uint8)
    view, done = memoryview(values.data), 0
    while done < count:
        got = file.readinto(view[done : done + (1 << 24)])
        if not got:
            raise Malformed(NO_DATA)
        done += got
    return values


def _dtype(kind: StandIn) -> torch.dtype:
    if kind.name not in _STORAGES:
        raise Malformed(NO_DATA)
    return _STORAGES[kind.name]


def _count(number: Any) -> int:
    """Checks that this is a number that can be a size."""
    if type(number) is not int or not 0 <= number < 1 << 48:
        raise Malformed(BEYOND)
    return number


def _ordered_dict(items: Any = ()) -> dict[Any, Any]:
    """From nothing, or as Python 2 wrote it, from a list of pairs."""
    made: dict[Any, Any] = {}
    for key, value in items:
        made[_key(key)] = value
    return made


def _tensor(*words: Any) -> StoredTensor:
    return StoredTensor(*words[:4])  # then, unused: whether it had a gradient, hooks, metadata


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered_dict,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch.nn.parameter.Parameter": lambda data, *_: data,
}


class _Bounded:
    """A file for pickletools, which would allocate whatever length a pickle claims."""

    def __init__(self, file: BinaryIO) -> None:
        place = file.tell()
        self.file, self.left = file, min(file.seek(0, io.SEEK_END) - place, _MAX_PICKLE_BYTES)
        file.seek(place)

    def read(self, count: int) -> bytes:
        return self._counted(self.file.read(max(min(count, self.left), 0)))

    def readline(self) -> bytes:
        return self._counted(self.file.readline(self.left))

    def tell(self) -> int:
        return self.file.tell()

    def _counted(self, data: bytes) -> bytes:
        self.left -= len(data)
        return data


class Machine:
    """Interprets pickles of protocol 0 to 5.

    Attributes:
        foreign: names that were met and are neither of torch nor usual bystanders.
    """

    def __init__(self) -> None:
        self.foreign: set[str] = set()
        self._left = _MAX_OPERATIONS
        self._stack: list[Any] = []
        self._marks: list[int] = []

    def run(self, file: BinaryIO, storage: Callable[[Any], Any]) -> Any:
        """The object of one pickle, which ends where the file goes on.

        Args:
            file: stands at the beginning of the pickle.
            storage: makes the storage of a persistent id.

        Raises:
            Malformed: it is no whole pickle, takes too many operations, or does what none of torch does.
        """
        self._stack, self._marks, memo = [], [], {}
        stack: list[Any] = self._stack
        try:
            for opcode, argument, _ in pickletools.genops(cast("BinaryIO", _Bounded(file))):
                self._spend(1)
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
                        self._operate(name, argument)
                    case _:
                        if isinstance(argument, int) and argument.bit_length() > _MAX_INT_BITS:
                            raise Malformed("a number of more than 2,048 bits")
                        stack.append(argument)
        except (Malformed, MemoryError):
            raise
        except Exception as error:  # pickletools raises what it likes on bytes that are no pickle
            raise Malformed(f"{UNREADABLE} ({type(error).__name__})") from None
        raise Malformed(UNREADABLE)

    def _operate(self, name: str, argument: Any) -> None:
        """One operation that makes something of what is on the stack."""
        stack = self._stack
        match name:
            case "MARK":
                self._marks.append(len(stack))
            case "POP":
                stack.pop()
            case "POP_MARK" | "ADDITEMS":
                self._taken()
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
                stack.append(StandIn("set"))
            case "FROZENSET":
                self._taken()
                stack.append(StandIn("frozenset"))
            case "LIST":
                stack.append(self._taken())
            case "TUPLE":
                stack.append(tuple(self._taken()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                made = tuple(stack[-count:])
                del stack[-count:]
                stack.append(made)
            case "DICT":
                items = self._taken()
                stack.append({})
                self._set(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                self._set([key, value])
            case "SETITEMS":
                self._set(self._taken())
            case "APPEND":
                self._extend([stack.pop()])
            case "APPENDS":
                self._extend(self._taken())
            case "BUILD":
                stack.pop()
            case "GLOBAL":
                stack.append(self._named(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(self._named(module, attribute))
            case "INST":
                stack.append(self._called(self._named(*argument.split(" ", 1)), self._taken()))
            case "OBJ":
                function, *words = self._taken()
                stack.append(self._called(function, words))
            case "REDUCE" | "NEWOBJ":
                words, function = stack.pop(), stack.pop()
                stack.append(self._called(function, words))
            case "NEWOBJ_EX":
                _, words, function = stack.pop(), stack.pop(), stack.pop()
                stack.append(self._called(function, words))
            case _ if name.startswith("EXT"):
                self.foreign.add(f"copyreg extension {argument}")
                stack.append(StandIn())
            case _:
                raise Malformed(f"the operation {name}")

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise Malformed(f"it takes more than {_MAX_OPERATIONS:,} operations")

    def _taken(self) -> list[Any]:
        """What lies above the last mark, taken from the stack."""
        place = self._marks.pop()
        items = self._stack[place:]
        del self._stack[place:]
        return items

    def _set(self, items: list[Any]) -> None:
        """Fills the dict on top of the stack with keys and values in turn."""
        target = self._stack[-1]
        if not isinstance(target, dict):
            raise Malformed("an item of no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif not isinstance(target, StandIn):
            raise Malformed("an item of no list")

    def _named(self, module: Any, attribute: Any) -> StandIn:
        """Protocol 2 writes names as Python 2 had them."""
        module, attribute = NAME_MAPPING.get((module, attribute), (IMPORT_MAPPING.get(module, module), attribute))
        name = f"{module}.{attribute}"
        if name not in _CALLS and name not in _STORAGES and name not in BYSTANDERS:
            self.foreign.add(name)
        return StandIn(name)

    def _called(self, function: Any, words: Any) -> Any:
        if not isinstance(function, StandIn) or function.name not in _CALLS:
            return StandIn(function.name if isinstance(function, StandIn) else "object")
        if words and isinstance(words[0], list):
            self._spend(len(words[0]))
        return _CALLS[function.name](*words)


def _key(key: Any) -> Any:
    """A key that is quick to hash; nested tuples can take hours, and numbers can be made to have one hash."""
    if isinstance(key, (str, bytes, bool)) or key is None or (type(key) is int and abs(key) < _MAX_KEY):
        return key
    return StandIn("key")
