"""`stoker predict` for volumes: sliding windows, masks, postprocessing."""
