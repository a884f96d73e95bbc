"""Segmentation of volumes: training, planning, prediction, evaluation, packing, pictures.

A prediction: `predict_folder` (which volumes, what is done, lease) -> `segmenter` (row by row of `windows`)
-> `postprocess` -> `output`. `volume_evaluation` runs the same, and scores whole volumes.
"""
