"""Read checkpoint files from any source into a dict of tensors, without running code from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


def read_state_dict(
    path: str | Path, *, state_dict: str | None = None, import_foreign: bool = False
) -> dict[str, Tensor]:
    """Read a file of weights; the tensors are on the CPU.

    Reads `.safetensors` files, and files of `torch.save` (zip or legacy) with a state dict or with a dict that contains
    one. The names are those of the file; `weft.load_checkpoint` finds the prefix that a wrapper added (`module.` ...).

    Args:
        path: the file.
        state_dict: key of the state dict in the file, such as 'model_ema'; None for the first of 'model', 'state_dict'
            and so on.
        import_foreign: accept a pickle that names unknown classes; they become inert placeholders.

    Raises:
        CheckpointError: the file is missing, damaged or refused, or has no weights.
    """
    return read_contents(path, state_dict=state_dict, import_foreign=import_foreign)[0]


def read_contents(
    path: str | Path, *, state_dict: str | None = None, import_foreign: bool = False
) -> tuple[dict[str, Tensor], str, list[str]]:
    """Read a file like `read_state_dict`, and return the place of the state dict in the file.

    Returns:
        The state dict; its top-level key in the file, '' if the file is a state dict itself; and the top-level keys of
        other state dicts in the file, for example of averaged weights.
    """
    path = Path(path)
    if _is_safetensors(path):
        if state_dict is not None:
            raise CheckpointError(
                f"A .safetensors file holds one state dict; got state_dict={state_dict!r} for {path}. Leave it out."
            )
        try:
            return load_file(path), "", []
        except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError, MemoryError) as error:
            raise CheckpointError(
                f"{path} must be a complete safetensors file; it is damaged ({reason_of(error)}). Download it again."
            ) from None
    with open_pickle(path, import_foreign=import_foreign) as loaded:
        return _find_state(loaded, path, state_dict)


def _is_safetensors(path: Path) -> bool:
    """Return whether a file is safetensors (True) or of torch.save (False), by its bytes; refuse all others."""
    if not path.exists():
        raise CheckpointError(f"Weights must be a file; there is no {path}. Check the path.")
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir() if file.suffix in _SUFFIXES.split(", "))
        hint = f"Name the file in it: {path / inside[0]}" if inside else f"No file in it ends in {_SUFFIXES}"
        raise CheckpointError(f"Weights must be a file; {path} is a directory. {hint}.")
    if not path.is_file():
        raise CheckpointError(f"Weights must be a regular file; {path} is a device or pipe. Copy it to a file first.")
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise CheckpointError(f"{path} must be readable; {error.strerror or error}. Check its permissions.") from None
    again = "Download or copy it again"
    if not start:
        raise CheckpointError(f"{path} must hold weights; it is empty (zero bytes). {again}.")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{path} must hold weights; it is a Git LFS pointer, not the file itself. Run `git lfs pull`."
        )
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


def _find_state(loaded: Any, path: Path, state_dict: str | None) -> tuple[dict[str, Tensor], str, list[str]]:
    """Return the state dict in the object that a file contains, as `read_contents` does."""
    must = f"{path} must hold a state dict, names and tensors"
    if not isinstance(loaded, Mapping) or (isinstance(loaded, Placeholder) and not loaded):
        raise CheckpointError(f"{must}; it holds a {_kind(loaded)}. Save model.state_dict() instead.")
    parts = {key: value for key, value in loaded.items() if isinstance(key, str) and _is_state(value)}
    known = [key for key in (*_PARTS, *_EMA_PARTS) if key in parts]
    if state_dict is not None and state_dict not in parts:
        available = ", ".join(parts) or "none, since the file is a state dict itself"
        raise CheckpointError(
            f"state_dict must name a state dict in {path}; got {state_dict!r}. Available: {available}."
        )
    if state_dict is None and _is_state(loaded):
        return _read(loaded, path), "", []
    if state_dict is None and not known and len(parts) > 1:
        raise CheckpointError(
            f"{path} holds several state dicts: {', '.join(parts)}. Choose one with state_dict=KEY (--state-dict KEY)."
        )
    if not parts:
        kinds = ", ".join(f"{key} ({_kind(value)})" for key, value in list(loaded.items())[:5]) or "nothing"
        raise CheckpointError(f"{must} only; it holds {kinds}. Save model.state_dict() instead.")
    chosen = state_dict if state_dict is not None else [*known, *parts][0]
    return _read(parts[chosen], path), chosen, [key for key in parts if key != chosen and key in known]


def _is_state(value: Any) -> bool:
    """Return whether an object is a state dict: at least one tensor, and nothing but names and tensors."""
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) and isinstance(tensor, StoredTensor) for name, tensor in value.items())
    )


def _kind(value: Any) -> str:
    if isinstance(value, StoredTensor):
        return "Tensor"
    return value.name if isinstance(value, Placeholder) else type(value).__name__


def _read(state: Mapping[str, StoredTensor], path: Path) -> dict[str, Tensor]:
    claimed, file_size = sum(tensor.num_bytes for tensor in state.values()), path.stat().st_size
    if claimed > 4 * file_size + (64 << 20):  # overlapping or expanded tensors, which loading would copy
        raise CheckpointError(
            f"{path} must hold complete tensors; they claim {claimed:,} bytes in a file of {file_size:,}."
        )
    return {name: tensor.read() for name, tensor in state.items()}
