"""Memory, time and cost of a run before it starts.

`planning` takes a config and a datasheet (or this machine); `tracing` runs the task's real step on fake tensors and
records allocations and operators. `vram` replays CUDA's allocator over the former, `roofline` adds up the time of
the latter. Two traces give every batch size, because each allocation is constant or grows in proportion. `train` makes
the same plan first (`guard`).
"""
