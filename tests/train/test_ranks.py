"""Our rank and world size, whichever launcher started us."""

from __future__ import annotations

import pytest

from stoker.core.errors import UserError
from stoker.train.ranks import Ranks, ranks_from_environment

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}
SLURM = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, None),
        (TORCHRUN, Ranks(3, 1, 4)),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, Ranks(3, 1, 4, 2)),
        (SLURM | {"SLURM_STEP_ID": "0"}, Ranks(3, 1, 4)),
        (SLURM, None),  # inside sbatch, but not started by srun
        (TORCHRUN | SLURM | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, Ranks(3, 1, 4)),  # torchrun under srun
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "x", "NODE_RANK": "1"}, None),  # WORLD_SIZE as the number of nodes
    ],
)
def test_the_launcher_says_which_rank_this_is(environment: dict[str, str], ranks: Ranks | None) -> None:
    assert ranks_from_environment(environment) == ranks


@pytest.mark.parametrize("wrong", [{"RANK": "four"}, {"RANK": "4"}, {"RANK": "-1"}])
def test_an_impossible_rank_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(UserError) as caught:
        ranks_from_environment(TORCHRUN | wrong)
    assert caught.value.name == "bad-rank"
