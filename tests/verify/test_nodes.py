"""What `stoker verify` says about ranks: real ones that agree or differ, and judgements of what ranks saw."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.profile.host import Machine
from stoker.verify.nodes import CHECKS, RankFacts, judge_data, judge_speed, judge_versions, why_not_started
from stoker.verify.run_checks import all_checks, run_checks
from tests.end_to_end.test_distributed import free_port
from tests.support.ready_process import ReadyProcess
from tests.support.subjects import HERE, subject_of
from tests.support.tiny_training import write_config

# The checks of other topics are tested elsewhere, and take longer.
OTHERS = [word for check in all_checks() if check.topic != "nodes" for word in ("--skip", check.name)]
NAMES = [check.name for check in CHECKS]


def verified(
    ready: ReadyProcess, configs: list[Path], *, before: str = "", world: int = 2
) -> tuple[dict[str, Any], int]:
    """The first rank's document and exit code; `before` is called in the last rank."""
    port = free_port()
    ranks = [
        ready.start(
            "verify", config, "--json", *OTHERS, cwd=config.parent, before=before if rank == world - 1 else "",
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for rank, config in enumerate(configs)
    ]  # fmt: skip
    codes = [rank.wait() for rank in ranks]
    assert codes[1:] == [0] * (len(ranks) - 1), ranks[-1].err
    assert [rank.out for rank in ranks[1:]] == [""] * (len(ranks) - 1), "one rank speaks for all"
    return json.loads(ranks[0].out), codes[0]


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in document["checks"]}


def test_two_ranks_that_agree_pass(ready: ReadyProcess, images: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, images, devices=2)
    document, _ = verified(ready, [config, config])
    found = by_name(document)
    found.pop("slow-rank")  # on cores that others use, one of two may well be slower
    assert {name: check["status"] for name, check in found.items()} == dict.fromkeys(NAMES[:-1], "passed")
    assert found["ranks-meet"]["facts"]["ranks"] == 2
    assert "over 2 ranks is exact" in found["all-reduce"]["seen"]


def test_a_rank_with_another_version_config_and_data_and_wrong_sums_is_named_for_each(
    ready: ReadyProcess, images: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(images, other / "images")
    shutil.rmtree(other / "images" / "train" / ".stoker-index", ignore_errors=True)
    (other / "images" / "train" / "class1" / "003.jpg").unlink()
    configs = [
        write_config(tmp_path, images, devices=2, num_workers=0),
        write_config(other, other / "images", devices=2, num_workers=1, label_smoothing=0.1),
    ]
    document, code = verified(ready, configs, before="tests.support.subjects:be_a_faulty_rank")
    found = by_name(document)
    assert code == 1
    assert {name for name in NAMES[:-1] if found[name]["status"] == "failed"} == {
        "same-versions", "same-config", "same-data", "all-reduce",
    }  # fmt: skip
    assert "rank 1 on " in found["same-versions"]["seen"]
    assert "has timm 0.9.0 instead of " in found["same-versions"]["seen"]
    assert found["same-config"]["seen"].endswith("has label_smoothing 0.1 instead of 0.0"), "own paths may differ"
    assert found["same-data"]["seen"].endswith(": other samples, classes or order")
    assert found["all-reduce"]["seen"].startswith("rank 1 on ")
    assert all(check["fix"] for check in found.values() if check["status"] == "failed")


def test_ranks_that_do_not_meet_fail_and_the_first_one_continues(
    ready: ReadyProcess, images: Path, tmp_path: Path
) -> None:
    config = write_config(tmp_path, images, devices=2, rank_timeout="3s")
    document, code = verified(ready, [config])
    found = by_name(document)
    assert code == 1
    assert found["ranks-meet"]["status"] == "failed"
    assert "rank 0 of 2 could not join the others at 127.0.0.1:" in found["ranks-meet"]["seen"]
    assert {found[name]["status"] for name in NAMES[1:]} == {"unknown"}


# What the ranks saw is judged by pure functions.


def ranks_with(*changes: dict[str, Any]) -> tuple[RankFacts, ...]:
    usual = RankFacts(
        0, "node-a", {"torch": "2.15.0"}, {"lr": 0.1}, "d1", sum_is_right=True, all_reduce_s=0.01, work_s=0.010
    )
    return tuple(replace(usual, rank=rank, **change) for rank, change in enumerate(changes))


def test_a_slow_rank_is_compared_with_the_median_of_the_others() -> None:
    outcome = judge_speed(ranks_with({}, {"work_s": 0.019, "host": "node-b"}))
    assert outcome.status == "failed"
    assert outcome.seen.startswith("rank 1 on node-b takes 1.9 times as long as the others")
    assert judge_speed(ranks_with({}, {"work_s": 0.013}, {"work_s": 0.011})).status == "passed"


def test_the_odd_one_is_the_one_that_differs_from_most() -> None:
    outcome = judge_versions(ranks_with({"versions": {"torch": "2.14.0"}}, {}, {}))
    assert (outcome.status, outcome.seen) == ("failed", "rank 0 on node-a has torch 2.14.0 instead of 2.15.0")


def test_data_that_one_rank_cannot_open_fails_and_that_none_can_is_unknown() -> None:
    closed = {"data": "/data does not exist", "data_opened": False}
    outcome = judge_data(ranks_with({}, closed))
    assert (outcome.status, outcome.seen) == ("failed", "rank 1 on node-a cannot open the data: /data does not exist")
    assert judge_data(ranks_with(closed, closed)).status == "unknown"


def test_one_process_has_no_ranks_to_compare(tmp_path: Path) -> None:
    report = run_checks(CHECKS, subject_of(write_config(tmp_path, tmp_path), "devices=1"))
    assert report.not_applicable == tuple(NAMES)


def test_ranks_that_cannot_be_started_here_are_unknown_with_the_way_to_check_them(tmp_path: Path) -> None:
    subject = subject_of(write_config(tmp_path, tmp_path), "devices=8")
    assert why_not_started(subject.config, HERE) == "the config has 8 ranks a node, and this one has 1 cores"
    assert why_not_started(subject.config, Machine(cpus=2, accelerators=8)) is None
    first, *others = run_checks(CHECKS, subject).results
    assert first.finding.status == "unknown"
    assert f"srun stoker verify {subject.path} devices=8" in str(first.finding.fix)
    assert [other.finding.seen for other in others] == ["the ranks did not connect"] * 5
    many = subject_of(write_config(tmp_path, tmp_path), "num_nodes=2", "devices=1").config
    assert why_not_started(many, HERE, {}) == "num_nodes is 2: start it on every node"
    assert why_not_started(many, HERE, {"MASTER_ADDR": "node-a"}) is None
