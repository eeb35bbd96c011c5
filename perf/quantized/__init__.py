"""All-reduce with codecs: how far the results are from the exact ones, beside how much sooner they come."""
