"""The methods that graphar is compared with: how each is set up and called, as its own users would."""
