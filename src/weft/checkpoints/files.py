"""Read checkpoint files from any source into a dict of tensors, without running code from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from weft.checkpoints.pickles import Placeholder, StoredTensor
from weft.checkpoints.torch_files import open_pickle
from weft.errors import CheckpointError
from weft.text import reason_of

# keys under which training scripts save a state dict, the most frequent first
_PARTS = ("model", "state_dict", "model_state_dict", "net", "network", "weights", "module")
_EMA_PARTS = ("model_ema", "state_dict_ema", "ema", "ema_state_dict", "model_ema_state_dict")

_SUFFIXES = ".safetensors, .pth, .pt, .bin"
_OTHER_FORMATS = (  # first bytes of files that are often mistaken for weights
    (b"version https://git-lfs", "it is a Git LFS pointer, not the file itself. Run `git lfs pull`"),
    (b"\x1f\x8b", "it is a gzip archive. Unpack it first"),
    (b"\xfd7zXZ", "it is an xz archive. Unpack it first"),
    (b"Rar!", "it is a RAR archive. Unpack it first"),
    (b"7z\xbc\xaf", "it is a 7z archive. Unpack it first"),
    (b"\x89HDF", "it is an HDF5 file, as Keras writes. Save the weights with PyTorch"),
    (b"GGUF", "it is a GGUF file, which holds no weights of these networks"),
)


class CheckpointContents(NamedTuple):
    """Contents of a checkpoint file.

    Attributes:
        state: the state dict.
        part: top-level key of the state dict in the file; '' if the file is a state dict itself.
        others: top-level keys of other state dicts in the file, for example of averaged weights.
    """

    state: dict[str, Tensor]
    part: str
    others: list[str]


def read_state_dict(path: str | Path, *, which: str | None = None, import_foreign: bool = False) -> dict[str, Tensor]:
    """Read a file of weights; the tensors are on the CPU.

    Reads `.safetensors` files, and files of `torch.save` (zip or legacy) with a state dict or with a dict that contains
    one. The names are those of the file; `weft.load_checkpoint` finds the prefix that a wrapper added (`module.` ...).

    Args:
        path: the file.
        which: key of the state dict in the file, such as 'model_ema'; None for the first of 'model', 'state_dict' ...
        import_foreign: accept a pickle that names unknown classes; they become inert placeholders.

    Raises:
        CheckpointError: the file is missing, damaged or refused, or has no weights.
    """
    return read_contents(path, which=which, import_foreign=import_foreign).state


def read_contents(path: str | Path, *, which: str | None = None, import_foreign: bool = False) -> CheckpointContents:
    """Read a file like `read_state_dict`; also return the place of the state dict in the file."""
    path = Path(path)
    if _is_safetensors(path):
        if which is not None:
            raise CheckpointError(
                f"A .safetensors file holds one state dict; got which={which!r} for {path}. Leave it out."
            )
        return CheckpointContents(_read_safetensors(path), "", [])
    with open_pickle(path, import_foreign=import_foreign) as loaded:
        return find_state(loaded, path, which)


def _is_safetensors(path: Path) -> bool:
    """Return whether a file is safetensors (True) or of torch.save (False), by its bytes; refuse all others."""
    if not path.exists():
        raise CheckpointError(f"Weights must be a file; there is no {path}. Check the path.")
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir() if file.suffix in (".safetensors", ".pth", ".pt", ".bin"))
        hint = f"Name the file in it: {path / inside[0]}" if inside else f"No file in it ends in {_SUFFIXES}"
        raise CheckpointError(f"Weights must be a file; {path} is a directory. {hint}.")
    if not path.is_file():
        raise CheckpointError(f"Weights must be a regular file; {path} is a device or pipe. Copy it to a file first.")
    try:
        with path.open("rb") as file:
            start = file.read(512)
    except OSError as error:
        raise CheckpointError(f"{path} must be readable; {error.strerror or error}. Check its permissions.") from None
    again = "Download or copy it again"
    if not start:
        raise CheckpointError(f"{path} must hold weights; it is empty (zero bytes). {again}.")
    if not start.strip(b"\0"):
        raise CheckpointError(f"{path} must hold weights; it begins with NUL bytes, a write that was cut off. {again}.")
    for signature, explanation in _OTHER_FORMATS:
        if start.startswith(signature):
            raise CheckpointError(f"{path} must hold weights; {explanation}.")
    if start[257:262] == b"ustar":
        raise CheckpointError(f"{path} must hold weights; it is a tar archive. Unpack it first.")
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 2**56:
        return True
    if start.lstrip()[:1] == b"<":
        raise CheckpointError(f"{path} must hold weights; it is a web page, saved in place of a download. {again}.")
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path} must be in safetensors format, as its name says; it is not. {again}, or rename it if it is a file"
            " of torch.save."
        )
    if not start.startswith((b"PK\x03\x04", b"\x80")):
        raise CheckpointError(f"{path} must hold weights ({_SUFFIXES}); its first bytes are {start[:8]!r}. {again}.")
    return False


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError, MemoryError) as error:
        reason = reason_of(error)
        raise CheckpointError(
            f"{path} must be a complete safetensors file; it is damaged ({reason}). Download it again."
        ) from None


def find_state(loaded: Any, path: Path, which: str | None = None) -> CheckpointContents:
    """Return the state dict in the object that a file contains."""
    if not isinstance(loaded, Mapping) or (isinstance(loaded, Placeholder) and not loaded):
        raise CheckpointError(
            f"{path} must hold a state dict, names and tensors; it holds a {_kind(loaded)}. "
            "Save model.state_dict() instead."
        )
    parts = {key: value for key, value in loaded.items() if isinstance(key, str) and _is_state(value)}
    if which is not None:
        if which not in parts:
            available = ", ".join(parts) or "none, since the file is a state dict itself"
            raise CheckpointError(f"which must name a state dict in {path}; got {which!r}. Available: {available}.")
        chosen = which
    elif _is_state(loaded):
        return CheckpointContents(_read(dict(loaded), path), "", [])
    else:
        known = [key for key in (*_PARTS, *_EMA_PARTS) if key in parts]
        if not known and len(parts) != 1:
            raise CheckpointError(_no_state_message(path, loaded, list(parts)))
        chosen = known[0] if known else next(iter(parts))
    others = [key for key in parts if key != chosen and key in (*_PARTS, *_EMA_PARTS)]
    return CheckpointContents(_read(dict(parts[chosen]), path), chosen, others)


def _is_state(value: Any) -> bool:
    """Return whether an object is a state dict: at least one tensor, and nothing but names and tensors."""
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) and isinstance(tensor, StoredTensor) for name, tensor in value.items())
    )


def _no_state_message(path: Path, loaded: Mapping[Any, Any], parts: list[str]) -> str:
    if parts:
        return f"{path} holds several state dicts: {', '.join(parts)}. Choose one with which=NAME (--which NAME)."
    kinds = ", ".join(f"{key} ({_kind(value)})" for key, value in list(loaded.items())[:5]) or "nothing"
    return f"{path} must hold a state dict, names and tensors only; it holds {kinds}. Save model.state_dict() instead."


def _kind(value: Any) -> str:
    if isinstance(value, StoredTensor):
        return "Tensor"
    return value.name if isinstance(value, Placeholder) else type(value).__name__


def _read(state: dict[str, StoredTensor], path: Path) -> dict[str, Tensor]:
    claimed, file_size = sum(tensor.num_bytes for tensor in state.values()), path.stat().st_size
    if claimed > 4 * file_size + (64 << 20):  # overlapping or expanded tensors, which loading would copy
        raise CheckpointError(
            f"{path} must hold complete tensors; they claim {claimed:,} bytes in a file of {file_size:,}."
        )
    return {name: tensor.read() for name, tensor in state.items()}
