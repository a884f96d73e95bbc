"""Batches of any kind of data: sampler, random numbers, worker threads and processes. Knows no images or volumes.

A worker makes a whole batch in one buffer. Threads reuse a buffer when the last tensor over it is gone; processes fill
slots of shared memory that the main process assigns with each request.
"""
