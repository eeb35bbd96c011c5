"""What the elements are: codecs, norms, epilogues and partitions, in plain torch."""
