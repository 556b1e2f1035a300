"""SLURM's variables become those of torch.distributed; two tasks with nothing else compute one run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import forked
from tests.helpers import free_port
from tests.train import tiny
from weft.errors import UsageError
from weft.slurm import DEFAULT_PORT, first_host, join_slurm

TASK = {"SLURM_PROCID": "9", "SLURM_NTASKS": "32", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "gpu[03-06]"}


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-06]", "gpu03"),
        ("gpu[7,9-11],login1", "gpu7"),
        ("rack[2-3]node[001-004]", "rack2node001"),
        ("n-1.cluster.org,n-2.cluster.org", "n-1.cluster.org"),
        ("c[1-2]-ib0", "c1-ib0"),
    ],
)
def test_the_first_host(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


@pytest.mark.parametrize("nodelist", ["", ",", "gpu[", "a b;rm", "[]"])
def test_not_a_node_list(nodelist: str) -> None:
    with pytest.raises(UsageError, match="A SLURM node list looks like"):
        first_host(nodelist)


def test_the_variables_of_torch() -> None:
    environment = {**TASK, "SLURM_JOB_ID": "1234567"}
    assert join_slurm(environment)
    assert {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")} == {
        "RANK": "9",
        "WORLD_SIZE": "32",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(15_000 + 1234567 % 20_000),
    }


def test_a_task_that_sees_one_gpu_uses_it() -> None:
    environment = dict(TASK)
    assert join_slurm(environment, num_gpus=1)
    assert environment["LOCAL_RANK"] == "0"
    assert environment["MASTER_PORT"] == str(DEFAULT_PORT)


def test_what_the_user_has_set_stays() -> None:
    environment = {**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    assert join_slurm(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("10.0.0.1", "1234")


@pytest.mark.parametrize(
    "more",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},  # torchrun inside a SLURM job
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"ENVIRONMENT": "BATCH"},  # the batch script, which has no step
    ],
)
def test_where_nothing_is_to_be_joined(more: dict[str, str]) -> None:
    environment = {**TASK, **more}
    before = dict(environment)
    assert not join_slurm(environment)
    assert environment == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS must be a whole number, as srun sets it; got 'many'."),
        ({"SLURM_PROCID": "32"}, "SLURM_PROCID must be less than SLURM_NTASKS; got 32 and 32."),
        ({"SLURM_JOB_NODELIST": ""}, "must name the hosts of a SLURM job with several tasks; none is set"),
    ],
)
def test_variables_that_do_not_fit(changed: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        join_slurm({**TASK, **changed})


def test_two_tasks_compute_one_run(tmp_path: Path) -> None:
    """With SLURM's variables alone: one run directory, and steps divided by two."""
    photos = tiny.paint(tmp_path / "noise")
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost"}
    environment |= {"SLURM_JOB_ID": str(20_000 + port - 15_000), "PYTHONUNBUFFERED": "1"}
    tasks = [
        forked.Popen(
            tiny.command(photos, tmp_path / "run", accumulate=1),
            env={**environment, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    output = [task.communicate(timeout=300) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], output
    assert "x 2 devices" in output[0][1]
    assert "images per step" not in output[1][1]  # the second task is silent
    (recipe,) = (tmp_path / "run").glob("recipe.yaml")
    assert "processes: 2" in recipe.read_text()
