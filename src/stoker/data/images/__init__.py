"""Images: index, subset, headers, decoders, crops, packing."""
