"""Programs that measure: ratios from one run, rounds interleaved, the spread shown."""
