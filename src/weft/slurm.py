"""SLURM: set the variables that PyTorch reads from those that `srun` sets."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping

from weft.errors import UsageError

DEFAULT_PORT = 29500  # torch.distributed's
_PORTS = (15_000, 20_000)  # first port, and number of ports, for jobs that share a node
_NAMES = r"(?:[\w.-]|\[\w+(?:[,-]\w+)*\])+"  # a host name with any number of bracketed ranges
_NODELISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


def join_slurm(environment: MutableMapping[str, str] = os.environ, num_gpus: int = 0) -> bool:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for a task of an `srun` with several tasks.

    Nothing is set where torchrun or the user has set RANK or WORLD_SIZE, where there is a single task, or in the batch
    script itself, which SLURM also gives a SLURM_PROCID.

    Args:
        environment: variables of the process; changed in place.
        num_gpus: GPUs that this process sees. With one GPU bound to each task, every task uses its number 0.

    Returns:
        Whether the variables were set.

    Raises:
        UsageError: the variables of SLURM are missing or contradict each other.
    """
    is_script = environment.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environment
    if "RANK" in environment or "WORLD_SIZE" in environment or "SLURM_PROCID" not in environment or is_script:
        return False
    rank, world, local = (_number(environment, f"SLURM_{name}") for name in ("PROCID", "NTASKS", "LOCALID"))
    if world == 1:
        return False
    if not rank < world:
        raise UsageError(f"SLURM_PROCID must be less than SLURM_NTASKS; got {rank} and {world}.")
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local % num_gpus if num_gpus else local),
        "MASTER_ADDR": environment.get("MASTER_ADDR") or _first_host_of(environment),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_port_of(environment)),
    }
    environment.update(variables)
    return True


def first_host(nodelist: str) -> str:
    """Return the first host of a SLURM node list, e.g. `gpu07` of `gpu[07-09,12],login1`.

    Raises:
        UsageError: the text is not a node list.
    """
    entry = re.match(rf"({_NAMES})(?:,{_NAMES})*$", nodelist.strip())
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", entry[1]) if entry else ""  # the first number of each bracket
    if not re.fullmatch(r"[\w.-]+", host):
        raise UsageError(f"A SLURM node list looks like 'node[01-04],gpu1'; got {nodelist[:200]!r}.")
    return host


def _first_host_of(environment: MutableMapping[str, str]) -> str:
    nodelist = next((environment[name] for name in _NODELISTS if environment.get(name)), None)
    if nodelist is None:
        raise UsageError(
            f"One of {', '.join(_NODELISTS)} must name the hosts of a SLURM job with several tasks; none is set."
            " Start weft with srun, or set MASTER_ADDR to the first host."
        )
    return first_host(nodelist)


def _port_of(environment: MutableMapping[str, str]) -> int:
    if not environment.get("SLURM_JOB_ID"):
        return DEFAULT_PORT
    first, count = _PORTS
    return first + _number(environment, "SLURM_JOB_ID") % count


def _number(environment: MutableMapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{name} must be a whole number, as srun sets it; got {text[:50]!r}.")
    return int(text)
