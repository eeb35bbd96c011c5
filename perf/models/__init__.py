"""Models that are run or trained to time what graphar does in them."""
