"""How fast models that users know are trained, with exact and with quantised gradients."""
