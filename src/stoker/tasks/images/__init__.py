"""Everything of images: layouts, decoding, augmentation, models, packing, evaluation."""
