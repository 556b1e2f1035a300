"""Read checkpoint files of any origin into a dict of tensors, without running code from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from weft.checkpoints.pickles import StandIn, StoredTensor, open_pickle
from weft.errors import CheckpointError

# Where a training script keeps its state dict, the usual one first.
_PARTS = ("model", "state_dict", "model_state_dict", "net", "network", "weights", "module")
_EMA_PARTS = ("model_ema", "state_dict_ema", "ema", "ema_state_dict", "model_ema_state_dict")
_WRAPPERS = ("module.", "_orig_mod.", "model.")  # DataParallel and averages; torch.compile; Lightning

T = TypeVar("T")
_SUFFIXES = ".safetensors, .pth, .pt, .bin"
_STRANGERS = (  # first bytes of what is often mistaken for weights
    (b"version https://git-lfs", "it is a Git LFS pointer, not the file itself. Run `git lfs pull`"),
    (b"\x1f\x8b", "it is a gzip archive. Unpack it first"),
    (b"\xfd7zXZ", "it is an xz archive. Unpack it first"),
    (b"Rar!", "it is a RAR archive. Unpack it first"),
    (b"7z\xbc\xaf", "it is a 7z archive. Unpack it first"),
    (b"\x89HDF", "it is an HDF5 file, as Keras writes. Save the weights with PyTorch"),
    (b"GGUF", "it is a GGUF file, which holds no weights of these networks"),
)


class Contents(NamedTuple):
    """What was read.

    Attributes:
        state: names and tensors.
        part: key of the file's top level that they were under; '' for the top itself.
        others: keys of other state dicts in the file, such as an average.
    """

    state: dict[str, Tensor]
    part: str
    others: list[str]


def read_state_dict(path: str | Path, *, which: str | None = None, import_foreign: bool = False) -> dict[str, Tensor]:
    """Reads a file of weights; its tensors are on the CPU.

    Reads `.safetensors`, and what `torch.save` wrote (zip or legacy): a state dict, or a dict that holds one beside
    other things. Prefixes that wrappers put in front of every name (`module.` ...) are taken off.

    Args:
        path: the file.
        which: key of the state dict in the file, such as 'model_ema'; None: the usual one ('model', 'state_dict' ...).
        import_foreign: open a pickle that names unknown classes, with inert stand-ins in their place; False: refuse it.

    Raises:
        CheckpointError: missing, damaged, refused, or no weights in it.
    """
    return read_contents(path, which=which, import_foreign=import_foreign).state


def read_contents(path: str | Path, *, which: str | None = None, import_foreign: bool = False) -> Contents:
    """As `read_state_dict`, and says where in the file the weights were."""
    path = Path(path)
    if _is_safetensors(path):
        if which is not None:
            raise CheckpointError(
                f"A .safetensors file holds one state dict; got which={which!r} for {path}. Leave it out."
            )
        return Contents(unwrap(_read_safetensors(path)), "", [])
    with open_pickle(path, import_foreign=import_foreign) as loaded:
        return pick(loaded, path, which)


def _is_safetensors(path: Path) -> bool:
    """Tells the two formats apart by their bytes, and everything else from both."""
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
    for signature, complaint in _STRANGERS:
        if start.startswith(signature):
            raise CheckpointError(f"{path} must hold weights; {complaint}.")
    if start[257:262] == b"ustar":
        raise CheckpointError(f"{path} must hold weights; it is a tar archive. Unpack it first.")
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 2**56:
        return True
    if start.lstrip()[:1] == b"<":
        raise CheckpointError(f"{path} must hold weights; it is a web page, saved in place of a download. {again}.")
    if path.suffix == ".safetensors":
        raise CheckpointError(
            f"{path} must be what its name says; its bytes are not in safetensors format. {again}, or rename it if it "
            "is a file of torch.save."
        )
    if not start.startswith((b"PK\x03\x04", b"\x80")):
        raise CheckpointError(f"{path} must hold weights ({_SUFFIXES}); its first bytes are {start[:8]!r}. {again}.")
    return False


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, ValueError, KeyError, RuntimeError, OverflowError, MemoryError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{path} must be a whole safetensors file; it is damaged ({reason}). Download it again."
        ) from None


def pick(loaded: Any, path: Path, which: str | None = None) -> Contents:
    """Finds the state dict in what a file holds."""
    if not isinstance(loaded, Mapping) or (isinstance(loaded, StandIn) and not loaded):
        raise CheckpointError(
            f"{path} must hold a state dict, names and tensors; it holds a {_kind(loaded)}. "
            "Save model.state_dict() instead."
        )
    parts = {key: value for key, value in loaded.items() if isinstance(key, str) and _is_state(value)}
    if which is not None:
        if which not in parts:
            offered = ", ".join(parts) or "none: the weights are at its top"
            raise CheckpointError(f"which must name a state dict in {path}; got {which!r}. It has: {offered}.")
        chosen = which
    elif _is_state(loaded):
        return Contents(_read(unwrap(loaded), path), "", [])
    else:
        usual = [key for key in (*_PARTS, *_EMA_PARTS) if key in parts]
        if not usual and len(parts) != 1:
            raise CheckpointError(_no_weights(path, loaded, list(parts)))
        chosen = usual[0] if usual else next(iter(parts))
    others = [key for key in parts if key != chosen and key in (*_PARTS, *_EMA_PARTS)]
    return Contents(_read(unwrap(parts[chosen]), path), chosen, others)


def _is_state(value: Any) -> bool:
    """Whether this is a state dict: names and tensors, at least one, and nothing else."""
    return (
        isinstance(value, Mapping)
        and len(value) > 0
        and all(isinstance(name, str) and isinstance(tensor, StoredTensor) for name, tensor in value.items())
    )


def _no_weights(path: Path, loaded: Mapping[Any, Any], parts: list[str]) -> str:
    if parts:
        return f"{path} holds several state dicts: {', '.join(parts)}. Choose one: which=NAME (--which NAME)."
    kinds = ", ".join(f"{key} ({_kind(value)})" for key, value in list(loaded.items())[:5]) or "nothing"
    return f"{path} must hold a state dict, names and tensors only; it holds {kinds}. Save model.state_dict() instead."


def _kind(value: Any) -> str:
    if isinstance(value, StoredTensor):
        return "Tensor"
    return value.name if isinstance(value, StandIn) else type(value).__name__


def unwrap(state: Mapping[str, T]) -> dict[str, T]:
    """Takes off what wrappers put in front of every name, and the count that an average keeps."""
    unwrapped = {name: tensor for name, tensor in state.items() if name != "n_averaged"}
    while prefix := next((p for p in _WRAPPERS if unwrapped and all(name.startswith(p) for name in unwrapped)), None):
        unwrapped = {name.removeprefix(prefix): tensor for name, tensor in unwrapped.items()}
    return unwrapped


def _read(state: dict[str, StoredTensor], path: Path) -> dict[str, Tensor]:
    for tensor in state.values():
        tensor.check()
    claimed, there = sum(tensor.num_bytes for tensor in state.values()), path.stat().st_size
    if claimed > 4 * there + (64 << 20):  # overlapping or expanded; they will be copied
        raise CheckpointError(f"{path} must hold whole tensors; they claim {claimed:,} bytes in a file of {there:,}.")
    return {name: tensor.read() for name, tensor in state.items()}
