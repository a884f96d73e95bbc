"""How well a segmentation agrees with its labels: cheap counts while training, exact scores of whole volumes."""
