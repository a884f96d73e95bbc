"""Files that hold voxels, each opened as a `Volume` that is read region by region."""
