"""`python -m graphar doctor`: examines this machine, and says for each problem what to do about it."""
