"""Who makes the batches: threads or processes.

A worker makes a whole batch in one buffer. Threads reuse a buffer when the last tensor over it is gone; processes fill
slots of shared memory that the main process assigns with each request.
"""
