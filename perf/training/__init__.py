"""Training with exact and with quantised gradients, on real data: what that costs in accuracy, and buys in time."""
