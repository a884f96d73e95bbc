"""From bytes to pixels: headers, decoders chosen by measurement, the faithful path."""
