"""Who makes the batches: threads or processes."""
