"""The layouts in which people keep images, and the index of samples that each becomes."""
