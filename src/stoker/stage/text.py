"""What staging did, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stoker.core.console import shown
from stoker.core.units import count, size_text
from stoker.stage.checking import Verification
from stoker.stage.transfer import Summary

if TYPE_CHECKING:
    from stoker.stage.hydrate import Hydrated  # which needs numpy; copying does without

FAILURES_NAMED = 20
CHECKSUMS = {"md5": "MD5", "sha1": "SHA-1", "sha256": "SHA-256"}


def summary_text(summary: Summary) -> str:
    """The summary of a run, failures last."""
    rate = size_text(summary.copied_bytes / summary.seconds) if summary.seconds else "0 MB"
    lines = [
        f"copied   {count(summary.copied_files, 'file')}, {size_text(summary.copied_bytes)} in {summary.seconds:.1f} s "
        f"({rate}/s)",
        f"present  {count(summary.present_files, 'file')} already there and unchanged",
    ]
    if summary.copied_files:
        by_checksum = [
            f"{number:,} {CHECKSUMS.get(kind, kind.upper())}" for kind, number in summary.verified.most_common() if kind
        ]
        agreed = sum(number for kind, number in summary.verified.items() if kind)
        how = f" ({', '.join(by_checksum)})" if by_checksum else ""
        lines.append(f"checked  {agreed:,} against the store's checksum{how}, {summary.verified['']:,} by length only")
    if summary.subset is not None:
        lines.append(f"subset   {count(len(summary.subset['classes']), 'class', 'classes')}, see subset.json")
    if summary.retries:
        lines.append(f"retried  {count(summary.retries.total(), 'request')}: {', '.join(summary.retries)}")
    if summary.failures:
        lines.append(f"failed   {count(len(summary.failures), 'file')}:")
        lines += [f"  {shown(path)}: {reason}" for path, reason in summary.failures[:FAILURES_NAMED]]
        if len(summary.failures) > FAILURES_NAMED:
            lines.append(f"  and {len(summary.failures) - FAILURES_NAMED:,} more; --json lists them all")
    state = "complete" if summary.complete else "incomplete"
    lines.append(f"{summary.target} is {state}: {count(summary.files, 'file')}, {size_text(summary.bytes)}")
    return "\n".join(lines)


def verification_text(result: Verification) -> str:
    """What `--verify` found."""
    lines = [f"{shown(path)}: {reason}" for path, reason in result.wrong[:FAILURES_NAMED]]
    if len(result.wrong) > FAILURES_NAMED:
        lines.append(f"and {len(result.wrong) - FAILURES_NAMED:,} more; --json lists them all")
    if result.unknown:
        lines.append(f"note: {count(len(result.unknown), 'file')} not in the manifest: {shown(result.unknown[0])} …")
    verdict = "all as copied" if result.whole else f"{count(len(result.wrong), 'file')} wrong or missing"
    lines.append(f"verified {count(result.files, 'file')}, {size_text(result.bytes)} of {result.folder}: {verdict}")
    return "\n".join(lines)


def hydrated_text(done: Hydrated) -> str:
    """What `--hydrate` did, failures last."""
    lines = []
    if done.released is not None:
        there = done.files - done.released
        lines.append(f"present   {count(there, 'file')} already there")
    if done.restored:
        lines.append(f"restored  {count(done.restored, 'file')} by lfs")
    if done.read:
        lines.append(f"read      {count(done.read, 'file')} from beginning to end")
    if done.failed:
        lines.append(f"failed    {count(len(done.failed), 'file')}:")
        lines += [f"  {shown(path)}: {reason}" for path, reason in done.failed[:FAILURES_NAMED]]
        if len(done.failed) > FAILURES_NAMED:
            lines.append(f"  and {len(done.failed) - FAILURES_NAMED:,} more; --json lists them all")
    state = "not all there; run the same command again" if done.failed else "all there"
    lines.append(
        f"{done.path} ({done.kind or 'unknown file system'}): {state}: {count(done.files, 'file')}, "
        f"{size_text(done.bytes)} in {done.seconds:.1f} s"
    )
    return "\n".join(lines)
