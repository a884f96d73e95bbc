"""Which patches a run reads, and how a batch of them is made."""
