"""A matmul and the all-reduce of its result: graphar's op beside its peers', and beside the two alone."""
