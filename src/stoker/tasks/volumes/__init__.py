"""Segmentation of volumes: training, planning, prediction, evaluation, packing, pictures.

A prediction: `folder` (which volumes, what is done, lease) -> `prediction` (windows, row by row) -> `postprocess` ->
`output`. `evaluation` runs the same, and scores whole volumes.
"""
