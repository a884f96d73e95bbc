"""A rank runs next to its GPU: on made-up hosts, as the kernel describes them under /sys."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stoker.profile import host as host_module
from stoker.profile.host import (
    STAY,
    Binding,
    bind_rank,
    choose_binding,
    cores_of_nodes,
    node_of_device,
    parse_cpu_list,
    pci_address,
)

LEFT, RIGHT = frozenset({0, 1, 2, 3, 8, 9, 10, 11}), frozenset({4, 5, 6, 7, 12, 13, 14, 15})
ALL = LEFT | RIGHT


def make_host(root: Path, nodes: dict[int, str], gpus: Sequence[int | None] = ()) -> Path:
    """Nodes by their list of cores, and the GPU of each bus number on its node; None: the file is missing."""
    for node, cores in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for bus, node in enumerate(gpus):
        folder = root / "bus/pci/devices" / pci_address(0, bus, 0)
        folder.mkdir(parents=True)
        if node is not None:
            (folder / "numa_node").write_text(f"{node}\n")
    return root


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    return make_host(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, [0, 0, 1, 1])


def test_nodes_and_devices_are_found_and_what_is_unknown_is_none(tmp_path: Path) -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    # A node that only holds memory, as with CXL, has no cores.
    host = make_host(tmp_path, {0: "0-3", 1: "4-7", 2: ""}, [1, -1, None])
    assert cores_of_nodes(host) == {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}
    assert [node_of_device(pci_address(0, bus, 0), host) for bus in range(4)] == [1, None, None, None]
    assert cores_of_nodes(tmp_path / "absent") == {}
    assert pci_address(0x10, 0xC1, 0) == "0010:c1:00.0"


def test_each_rank_of_a_full_host_runs_next_to_its_gpu(two_sockets: Path) -> None:
    nodes = [0, 0, 1, 1]
    chosen = [choose_binding(nodes[rank], nodes, 4, ALL, two_sockets) for rank in range(4)]
    assert [binding.cores for binding in chosen] == [LEFT, LEFT, RIGHT, RIGHT]
    # Ranks that see only their own GPU are taken to be spread evenly.
    assert choose_binding(1, [1], 4, ALL, two_sockets) == Binding(RIGHT, 1)
    # A launcher has bound them already.
    for allowed in (LEFT, RIGHT, frozenset({0, 4})):
        assert choose_binding(0, nodes, 4, allowed, two_sockets) == STAY
    # The kernel lists cores 0-15 as online, but this process sees others.
    assert choose_binding(0, nodes, 4, frozenset({64, 65}), two_sockets) == STAY
    assert chosen[2].describe() == "this rank runs on the 8 cores of NUMA node 1, next to its GPU"


def test_a_rank_never_loses_cores_by_it(two_sockets: Path) -> None:
    one_gpu, both_on_one_socket, three_on_one_socket = [0], [0, 0], [0, 0, 0, 1]
    for nodes in (one_gpu, both_on_one_socket, three_on_one_socket):
        assert choose_binding(0, nodes, len(nodes), ALL, two_sockets) == STAY


def test_a_host_that_does_not_say_is_left_alone(tmp_path: Path) -> None:
    host = make_host(tmp_path / "two", {0: "0-3", 1: "4-7"})
    everything = frozenset(range(8))
    assert choose_binding(None, [None, None], 2, everything, host) == STAY
    assert choose_binding(7, [7, 7], 2, everything, host) == STAY  # a node that the kernel does not list
    single = make_host(tmp_path / "one", {0: "0-7"})
    assert choose_binding(0, [0, 0], 2, everything, single) == STAY
    assert choose_binding(0, [0, 0], 2, everything, tmp_path / "absent") == STAY
    assert STAY.describe() is None


def test_the_process_is_bound_to_what_was_chosen(two_sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = [SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in range(4)]
    moved: list[frozenset[int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: cards[index])
    monkeypatch.setattr(host_module, "allowed_cores", lambda: set(ALL))
    monkeypatch.setattr(host_module, "bind_threads", lambda cores: moved.append(cores) or True)
    assert bind_rank(3, 4, two_sockets) == Binding(RIGHT, 1)
    assert moved == [RIGHT]
    monkeypatch.setattr(host_module, "bind_threads", lambda _cores: False)  # the kernel refuses
    assert bind_rank(3, 4, two_sockets) == STAY


MOVES = """
import os, threading
from stoker.profile.host import bind_threads

stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
core = max(os.sched_getaffinity(0))
print(bind_threads(frozenset({core})), os.sched_getaffinity(thread.native_id) == os.sched_getaffinity(0) == {core})
print(bind_threads(frozenset({100_000})), os.sched_getaffinity(0) == {core})
stop.set()
"""


def test_all_threads_of_a_process_move_and_a_refusal_changes_nothing() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("needs Linux")
    done = subprocess.run([sys.executable, "-c", MOVES], capture_output=True, text=True, check=True)
    assert done.stdout == "True True\nFalse True\n"
