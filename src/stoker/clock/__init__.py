"""Where time goes: in the making of a batch, and in a step."""
