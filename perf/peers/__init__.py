"""The methods that graphar is compared with. Each is set up and called as its users would do it."""
