"""Segmentation of volumes: training, planning, prediction, evaluation, packing, pictures."""
