"""From an image's bytes to a crop of its pixels, by whichever decoder is fastest here."""
