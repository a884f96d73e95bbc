"""The loaders being compared, one file each. Every loader runs in its own process, peers in their own environment."""
