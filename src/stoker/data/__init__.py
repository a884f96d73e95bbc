"""From bytes on a disk or in an object store to batches, in an order that never loses or repeats a sample."""
