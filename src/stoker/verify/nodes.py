"""Checks over all ranks: the same versions, config and data everywhere, a correct sum, and no rank that is far slower.

Every rank gathers its facts together with the others (`meet`); the first one then judges them for all.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from stoker import __version__
from stoker.core.errors import StokerError, UserError
from stoker.core.finding import Finding
from stoker.core.units import size_text
from stoker.tasks.base import task_for
from stoker.tasks.checks import Check, Subject, failed, passed, unknown

if TYPE_CHECKING:
    from stoker.profile.host import HostConfig, Machine
    from stoker.train.ranks import Ranks

# Paths and counts that may differ from node to node without changing the result.
OWN_KEYS = {
    "data_root", "index_dir", "cache_dir", "cache_size", "stage_to", "runs_dir", "num_workers", "adjust_loader",
    "prefetch_factor",
}  # fmt: skip
PACKAGES = ("torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg", "nvidia-nvimgcodec-cu13")
# Ranks that have not connected by then never will: no need to wait ten minutes, as a run would.
MEET_S = 120.0
SUMMED = 1 << 20
WORK_S = 0.3
SIDE = 256
# Ranks on one busy host differ by a third now and then; a throttled GPU or a core shared with another job by far more.
SLOW = 1.5


@dataclass(frozen=True)
class RankFacts:
    """The identity and facts of one rank."""

    rank: int
    host: str
    versions: dict[str, str]
    config: dict[str, Any]
    """Every key that must be the same, with its value."""
    data: str
    """Digest of the samples, the classes and their order, or why the data cannot be opened."""
    data_opened: bool = True
    sum_is_right: bool | None = None
    all_reduce_s: float | None = None
    work_s: float | None = None
    """Time of the same small computation, while the other ranks do it too."""

    @property
    def named(self) -> str:
        return f"rank {self.rank} on {self.host}"


def why_not_started(config: HostConfig, machine: Machine, environment: Mapping[str, str] = os.environ) -> str | None:
    """Why verify does not start the ranks of this config itself; None if it does, or if there is only one."""
    if config.num_nodes > 1 and not environment.get("MASTER_ADDR"):
        return f"num_nodes is {config.num_nodes}: start it on every node"
    present = machine.accelerators or machine.cpus
    kind = "GPUs" if machine.accelerators else "cores"
    if config.devices > present:
        return f"the config has {config.devices} ranks a node, and this one has {present} {kind}"
    return None


def meet(subject: Subject, ranks: Ranks) -> tuple[RankFacts, ...] | StokerError:
    """The facts of all ranks, on every rank; or why they could not connect. Every rank has to call it."""
    import torch

    from stoker.train.ranks import gather, process_group

    device = torch.device("cpu")
    if torch.cuda.is_available():  # GPU only
        from stoker.train.ranks import device_index

        device = torch.device("cuda", device_index(ranks.local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(device)
    timeout_s = min(MEET_S, subject.config.rank_timeout)
    try:
        with process_group(ranks, "nccl" if device.type == "cuda" else "gloo", timeout_s) as connected:
            facts = gather(asdict(own_facts(subject, connected, device)), connected)
    except UserError as error:
        return error
    return tuple(RankFacts(**one) for one in facts)


def own_facts(subject: Subject, ranks: Ranks, device: Any) -> RankFacts:
    """This rank's facts; sums and computes together with the others."""
    import torch
    import torch.distributed as dist

    from stoker.config import config_values

    values = {key: value for key, value in config_values(subject.config).items() if key not in OWN_KEYS}
    try:
        listings = task_for(subject.config).listings(subject.data)
        parts = {part: None if listing is None else listing.digest for part, listing in listings.items()}
        digest, opened = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest(), True
    except StokerError as error:
        digest, opened = error.seen, False
    dist.barrier(group=ranks.control)
    # Whole numbers, whose sums are exact in float32: every element has to be right.
    numbers = torch.arange(SUMMED, device=device, dtype=torch.float32) % 1000 + ranks.rank
    expected = (torch.arange(SUMMED, dtype=torch.float32) % 1000) * ranks.world + sum(range(ranks.world))
    began = time.perf_counter()
    dist.all_reduce(numbers)
    total = numbers.cpu()  # waits for the device
    took_s = time.perf_counter() - began
    work_s = _work_s(torch.rand(SIDE, SIDE, device=device))
    return RankFacts(
        rank=ranks.rank,
        host=socket.gethostname(),
        versions=versions(),
        config=json.loads(json.dumps(values, default=str)),
        data=digest,
        data_opened=opened,
        sum_is_right=bool(torch.equal(total, expected)),
        all_reduce_s=took_s,
        work_s=work_s,
    )


def versions() -> dict[str, str]:
    """Versions that can change a result or break a run if they differ between ranks."""
    from importlib import metadata

    import torch

    found = {"stoker": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    if torch.cuda.is_available():  # GPU only
        nccl: Any = torch.cuda.nccl
        found |= {"cuda": str(torch.version.cuda), "nccl": ".".join(map(str, nccl.version()))}
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _work_s(matrix: Any) -> float:
    """The median time of a small product, over a fraction of a second."""
    times: list[float] = []
    ends = time.perf_counter() + WORK_S
    while time.perf_counter() < ends or not times:
        began = time.perf_counter()
        float((matrix @ matrix).sum())  # waits for the device
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _over_ranks(judge: Callable[[tuple[RankFacts, ...]], Finding]) -> Callable[[Subject], Finding | None]:
    """A check of the ranks' facts; does not apply to a single process."""

    def run(subject: Subject) -> Finding | None:
        if isinstance(subject.ranks, tuple):
            return judge(subject.ranks)
        alone = subject.config.devices * subject.config.num_nodes == 1
        return None if alone else unknown("the ranks did not connect")

    return run


def check_ranks_meet(subject: Subject) -> Finding | None:
    """All ranks find each other."""
    config, ranks = subject.config, subject.ranks
    if isinstance(ranks, StokerError):
        hint = ranks.hint or "check MASTER_ADDR and MASTER_PORT on every node"
        return failed(ranks.seen, hint, reason=ranks.name)
    if ranks is not None:
        hosts = Counter(rank.host for rank in ranks)
        said = ", ".join(f"{count} on {host}" for host, count in hosts.items())
        return passed(f"{len(ranks)} ranks: {said}", ranks=len(ranks), hosts=dict(hosts))
    if config.devices * config.num_nodes == 1:
        return None
    why = why_not_started(config, subject.machine) or "the ranks were not started"
    return unknown(why, f"where it will train: srun stoker verify {subject.arguments}, or the same with torchrun")


def judge_versions(ranks: tuple[RankFacts, ...]) -> Finding:
    lines = _odd_ones(ranks, lambda rank: rank.versions)
    if lines:
        return failed("; ".join(lines), "install the same requirements.lock on every node", odd=lines)
    first = ranks[0].versions
    return passed(f"the same on all ranks: torch {first.get('torch')}, timm {first.get('timm')}", versions=first)


def judge_config(ranks: tuple[RankFacts, ...]) -> Finding:
    lines = _odd_ones(ranks, lambda rank: rank.config)
    if lines:
        return failed(
            "; ".join(lines), "copy one config to every node, and start all ranks with the same KEY=VALUE", odd=lines
        )
    text = json.dumps(ranks[0].config, sort_keys=True).encode()
    digest = hashlib.blake2b(text, digest_size=8).hexdigest()
    return passed(f"the same on all ranks ({digest})", digest=digest)


def judge_data(ranks: tuple[RankFacts, ...]) -> Finding:
    closed = [rank for rank in ranks if not rank.data_opened]
    if len(closed) == len(ranks):
        return unknown(f"no rank can open the data: {closed[0].data}", "a data_root= that can be read from here")
    if closed:
        said = "; ".join(f"{rank.named} cannot open the data: {rank.data}" for rank in closed)
        return failed(said, "the same data on every node, at data_root=", odd=[rank.rank for rank in closed])
    lines = _odd_ones(ranks, lambda rank: {"data": rank.data})
    if lines:
        fix = "copy the same data to every node"
        return failed("; ".join(lines) + ": other samples, classes or order", fix, odd=lines)
    return passed(f"the same samples in the same order on all ranks ({ranks[0].data})", digest=ranks[0].data)


def judge_sum(ranks: tuple[RankFacts, ...]) -> Finding:
    wrong = [rank for rank in ranks if not rank.sum_is_right]
    times = [rank.all_reduce_s for rank in ranks if rank.all_reduce_s is not None]
    facts = {"seconds": max(times, default=None), "bytes": SUMMED * 4}
    if wrong:
        return failed(
            f"{', '.join(rank.named for rank in wrong)}: a sum over all ranks has wrong numbers",
            "NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 tells which link is broken; do not train over it",
            **facts,
        )
    return passed(f"a sum of {size_text(SUMMED * 4)} over {len(ranks)} ranks is exact, in {max(times):.2f} s", **facts)


def judge_speed(ranks: tuple[RankFacts, ...]) -> Finding:
    timed = [(rank.work_s, rank) for rank in ranks if rank.work_s is not None]
    slowest_s, slowest = max(timed, key=lambda pair: pair[0])
    # With two ranks, the median would be halfway to the slow one.
    usual_s = statistics.median(work_s for work_s, rank in timed if rank is not slowest)
    ratio = slowest_s / usual_s
    facts = {"slowest": slowest.rank, "ratio": ratio, "seconds": [work_s for work_s, _ in timed]}
    if ratio > SLOW:
        return failed(
            f"{slowest.named} takes {ratio:.1f} times as long as the others for the same work: every step waits for it",
            f"on {slowest.host}: look for other jobs (top, nvidia-smi), heat and clocks, or leave the node out",
            **facts,
        )
    return passed(f"the slowest, {slowest.named}, takes {ratio:.2f} times as long as the median of the others", **facts)


def _odd_ones(ranks: tuple[RankFacts, ...], values_of: Callable[[RankFacts], Mapping[str, Any]]) -> list[str]:
    """A line for each rank whose values differ from those of most ranks; of two, the first one counts as usual."""
    names = dict.fromkeys(name for rank in ranks for name in values_of(rank))
    lines: dict[int, list[str]] = {}
    for name in names:
        shown = [repr(values_of(rank).get(name)) for rank in ranks]
        usual, _ = Counter(shown).most_common(1)[0]
        for rank, value in zip(ranks, shown, strict=True):
            if value != usual:
                lines.setdefault(rank.rank, []).append(f"{name} {_bare(value)} instead of {_bare(usual)}")
    by_rank = {rank.rank: rank for rank in ranks}
    return [f"{by_rank[number].named} has {', '.join(odd)}" for number, odd in sorted(lines.items())]


def _bare(text: str) -> str:
    return text.strip("'\"")


CHECKS = (
    Check("ranks-meet", "nodes", "all ranks find each other", check_ranks_meet),
    Check("same-versions", "nodes", "the same software on every rank", _over_ranks(judge_versions)),
    Check("same-config", "nodes", "the same config on every rank", _over_ranks(judge_config)),
    Check("same-data", "nodes", "the same samples on every rank", _over_ranks(judge_data)),
    Check("all-reduce", "nodes", "a sum over all ranks", _over_ranks(judge_sum)),
    Check("slow-rank", "nodes", "the slowest rank against the median", _over_ranks(judge_speed)),
)
