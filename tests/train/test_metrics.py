"""Loss and accuracy over batches and ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from stoker.tasks.images.permuted_labels import Confusion
from stoker.train.evaluate import Accumulator
from stoker.train.step import StepResult


def samples(count: int, classes: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, classes, generator=generator), torch.arange(count) % classes


def add_in_batches(total: Accumulator, logits: torch.Tensor, labels: torch.Tensor, size: int) -> None:
    for start in range(0, len(labels), size):
        part = slice(start, start + size)
        total.add(logits[part], labels[part], functional.cross_entropy(logits[part], labels[part]))


def test_the_batch_size_does_not_matter() -> None:
    from timm.utils import accuracy  # imported here because the ranks below import this file too

    logits, labels = samples(101)
    top1, top5 = accuracy(logits, labels, topk=(1, 5))
    for size in (1, 7, 64, 101):
        total = Accumulator("cpu")
        add_in_batches(total, logits, labels, size)
        loss = functional.cross_entropy(logits.double(), labels).item()
        assert total.result() == pytest.approx({"loss": loss, "acc1": top1.item(), "acc5": top5.item()})


def test_a_metric_without_samples_is_absent_not_zero() -> None:
    total = Accumulator("cpu")
    total.add(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), torch.tensor(float("nan")))
    assert total.result() == {}
    total.add(*samples(3), torch.tensor(2.0))
    assert total.result()["loss"] == 2.0


def test_mixed_batches_count_for_the_loss_only() -> None:
    total, nothing = Accumulator("cpu"), torch.tensor(False)
    no_hits = torch.zeros(5, dtype=torch.int64)
    total.add_step(StepResult(torch.tensor(3.0), nothing, torch.zeros(3), no_hits, samples=10, judged=0))
    assert total.result() == {"loss": 3.0}
    total.add(torch.eye(6), torch.arange(6), torch.tensor(1.0))
    assert total.result() == {"loss": pytest.approx((30 + 6) / 16), "acc1": 100.0, "acc5": 100.0}


def test_top_five_of_three_classes_is_all_of_them() -> None:
    total = Accumulator("cpu")
    total.add(torch.tensor([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]), torch.tensor([0, 0]), torch.tensor(1.0))
    assert total.result() == {"loss": 1.0, "acc1": 50.0, "acc5": 100.0}


def test_many_small_losses_are_not_lost_in_rounding() -> None:
    total, logits = Accumulator("cpu"), torch.eye(1, 5)
    for loss in (1e9, *[0.5] * 100):
        total.add(logits, torch.tensor([0]), torch.tensor(loss))
    assert total.result()["loss"] == (1e9 + 50) / 101


def _rank(rank: int, world: int, meeting: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    logits, labels = samples(101)
    found = []
    confusion = Confusion(11, torch.device("cpu"))
    # A prime number of samples, split unevenly; then one rank has none at all.
    for parts in ([slice(0, 64), slice(64, 101)], [slice(0, 0), slice(0, 101)]):
        total = Accumulator("cpu")
        add_in_batches(total, logits[parts[rank]], labels[parts[rank]], 10)
        found.append(total.total() | total.result())
        confusion.reset()
        confusion.add(logits[parts[rank]], labels[parts[rank]])
        found[-1]["confusion"] = confusion.total().tolist()
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_uneven_ranks_count_each_sample_once(tmp_path: Path) -> None:
    spawn(_rank, (2, str(tmp_path / "meeting"), str(tmp_path)), nprocs=2)
    alone = Accumulator("cpu")
    alone.add(*samples(101), functional.cross_entropy(*samples(101)))
    expected = alone.total() | alone.result()
    assert expected["samples"] == 101
    logits, labels = samples(101)
    taken_for = torch.zeros(11, 11, dtype=torch.int64)
    for label, guess in zip(labels.tolist(), logits.argmax(1).tolist(), strict=True):
        taken_for[label, guess] += 1
    for rank in range(2):
        for found in json.loads((tmp_path / f"{rank}.json").read_text()):
            assert found.pop("confusion") == taken_for.tolist()
            assert found == pytest.approx(expected)
            assert all(found[name] == expected[name] for name in ("acc1", "acc5", "samples", "judged"))
