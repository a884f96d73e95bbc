"""The networks, and the weights that they start from."""
