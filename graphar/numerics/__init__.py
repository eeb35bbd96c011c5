"""The arithmetic of every op in plain torch: dtypes, NaN, codecs, norms, epilogues and partitions."""
